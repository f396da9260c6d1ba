"""Optimizers by name, each from a library; and Muon with AdamW for tiny models."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch

from agentrl.errors import ConfigError
from agentrl.trainers.config import OptimizerSettings


def make_optimizer(
    parameters: Iterable[torch.nn.Parameter],
    learning_rate: float,
    settings: OptimizerSettings | None = None,
) -> torch.optim.Optimizer:
    """An optimizer over those parameters that train.

    Args:
        parameters: all of a model's; frozen ones are left out.
        learning_rate: its peak.
        settings: which one, its betas and weight decay, where not the usual. "adamw": torch's, one
            fused kernel. "adamw8bit": torchao's, whose two moments take a byte per weight each
            instead of eight bytes together (https://arxiv.org/abs/2110.02861); tensors of fewer
            than 4096 elements keep theirs in float32.

    Raises:
        ConfigError: the library of the optimizer is not installed.
    """
    trained = [parameter for parameter in parameters if parameter.requires_grad]
    settings = settings or OptimizerSettings()
    options: dict[str, Any] = {
        "lr": learning_rate,
        "betas": settings.betas,
        "weight_decay": settings.weight_decay,
    }
    if settings.name == "adamw":
        return torch.optim.AdamW(trained, **options, fused=True)
    try:
        from torchao.optim import AdamW8bit  # type: ignore[import-not-found,unused-ignore]
    except ImportError:
        raise ConfigError(
            "optimizer.name='adamw8bit' needs torchao: pip install 'agentrl[lowbit]'"
        ) from None
    made: Any = AdamW8bit(trained, **options)
    return made  # type: ignore[no-any-return]


class MuonAdamW(torch.optim.Optimizer):
    """Two optimizers that step together.

    Muon (https://kellerjordan.github.io/posts/muon/) takes the two-dimensional weights of the
    layers; AdamW takes embeddings, norms and biases. Tiny models learn from demonstrations several
    times faster than with AdamW alone.

    Args:
        model: its trainable parameters are split between the two.
        muon_lr: learning rate of Muon.
        adam_lr: learning rate of AdamW.
    """

    def __init__(
        self, model: torch.nn.Module, muon_lr: float = 0.02, adam_lr: float = 3e-3
    ) -> None:
        embeddings = {
            id(p)
            for m in model.modules()
            if isinstance(m, torch.nn.Embedding)
            for p in m.parameters()
        }
        trained = [p for p in model.parameters() if p.requires_grad]
        matrices = [p for p in trained if p.ndim == 2 and id(p) not in embeddings]
        others = [p for p in trained if p.ndim != 2 or id(p) in embeddings]
        self.parts = (
            torch.optim.Muon(
                matrices, lr=muon_lr, momentum=0.95, weight_decay=0.0, adjust_lr_fn="original"
            ),
            torch.optim.AdamW(others, lr=adam_lr, betas=(0.9, 0.95), weight_decay=0.0),
        )
        super().__init__(trained, {})
        self.param_groups = [group for part in self.parts for group in part.param_groups]

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        """Step both."""
        if closure is not None:
            raise ValueError("MuonAdamW takes no closure")
        for part in self.parts:
            part.step()  # type: ignore[no-untyped-call]

    def state_dict(self) -> dict[str, Any]:
        """The states of both."""
        return {"parts": [part.state_dict() for part in self.parts]}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore the states of both."""
        for part, state in zip(self.parts, state_dict["parts"], strict=True):
            part.load_state_dict(state)
        self.param_groups = [group for part in self.parts for group in part.param_groups]

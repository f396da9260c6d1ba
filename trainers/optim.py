"""Optimizers by name, each from a library."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Literal

import torch

from agentrl.errors import ConfigError

OptimizerName = Literal["adamw", "adamw8bit"]
BETAS = (0.9, 0.95)


def make_optimizer(
    parameters: Iterable[torch.nn.Parameter], learning_rate: float, name: OptimizerName = "adamw"
) -> torch.optim.Optimizer:
    """An optimizer over those parameters that train; no weight decay.

    Args:
        parameters: all of a model's; frozen ones are left out.
        learning_rate: its peak.
        name: "adamw": torch's, one fused kernel. "adamw8bit": torchao's, whose two moments take a byte per weight
            each instead of eight bytes together (https://arxiv.org/abs/2110.02861); tensors of fewer than 4096
            elements keep theirs in float32.

    Raises:
        ConfigError: the library of the optimizer is not installed.
    """
    trained = [parameter for parameter in parameters if parameter.requires_grad]
    if name == "adamw":
        return torch.optim.AdamW(trained, lr=learning_rate, betas=BETAS, weight_decay=0.0, fused=True)
    try:
        from torchao.optim import AdamW8bit
    except ImportError:
        raise ConfigError("optimizer='adamw8bit' needs torchao: pip install 'agentrl[lowbit]'") from None
    made: Any = AdamW8bit(trained, lr=learning_rate, betas=BETAS, weight_decay=0.0)
    return made  # type: ignore[no-any-return]

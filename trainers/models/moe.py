"""Mixtures of experts: score with the experts that the sampler chose.

Where sampler and trainer choose different experts for a token, their log-probabilities differ by
far more than rounding (https://arxiv.org/abs/2510.11370). An engine that returns its routing lets
the trainer replay it: the choice is forced, the weights of the chosen experts are the trainer's own
and keep their gradient.

The load-balancing loss of a pretrained configuration is never part of our losses, as scoring reads
log-probabilities only. Asked for by `load_balance_coef`, `with_router_loss` measures it beside
them.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from agentrl.errors import ConfigError
from agentrl.trainers.batch import PolicyOutput, TokenBatch


@contextmanager
def replayed_routing(model: torch.nn.Module, experts_BTLK: Tensor) -> Iterator[None]:
    """Force the choice of experts in every forward pass within.

    Stay inside until after `backward()` where gradient checkpointing is on: it runs layers again.

    Args:
        model: with routers that give (logits, weights, indices), as Mixtral, Qwen3-MoE and their
            kin have.
        experts_BTLK: int64, for the tokens of the very batch that is scored, the K experts of each
            of the L layers that have a router; a token whose first entry is -1 is routed freely.

    Raises:
        ConfigError: the model has another number of routers or of experts per token, or routers of
            a kind whose weights are no softmax over their logits.
    """
    routers = routers_of(model)
    if not routers or len(routers) != experts_BTLK.shape[2]:
        raise ConfigError(
            f"recorded routing has {experts_BTLK.shape[2]} layers and the model {len(routers)} with"
            " a router: use the routing that an engine recorded with this very model"
        )
    handles = [
        router.register_forward_hook(_force(experts_BTLK[:, :, layer].flatten(0, 1)))
        for layer, router in enumerate(routers)
    ]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


@contextmanager
def recorded_routing(model: torch.nn.Module) -> Iterator[list[Tensor]]:
    """Collect the choices of experts of one forward pass within: one (B·T, K) tensor for each layer
    with a router.
    """
    chosen: list[Tensor] = []

    def note(module: torch.nn.Module, inputs: Any, output: tuple[Tensor, Tensor, Tensor]) -> None:
        chosen.append(output[2].detach())

    handles = [router.register_forward_hook(note) for router in routers_of(model)]
    try:
        yield chosen
    finally:
        for handle in handles:
            handle.remove()


def with_router_loss(
    model: torch.nn.Module, batch: TokenBatch, score: Callable[[], PolicyOutput]
) -> PolicyOutput:
    """What `score` says of the batch, with the load-balance loss of the routers in its forward
    pass.

    E·Σ_e f_e·P_e, f_e the share of choices that fell on expert e (they sum to K) and P_e its mean
    probability, over all tokens of these rows, prompts and tools' included, padding not, and over
    all layers at once: the family's own `load_balancing_loss_func` in transformers. K where all is
    even. Gradient flows through P alone. https://arxiv.org/abs/2101.03961, equations 4 to 6.

    Raises:
        ConfigError: see `own_router_loss`.
    """
    measure, routers, said = own_router_loss(model), routers_of(model), list[tuple[Tensor, ...]]()
    handles = [
        router.register_forward_hook(lambda module, inputs, output: said.append(output))
        for router in routers
    ]
    try:
        output = score()
    finally:
        for handle in handles:
            handle.remove()
    last = said[-len(routers) :]  # the first call of a model has a few forward passes in front
    # Families differ in their order; the logits are over all experts, the choices are integers.
    logits_LNE = tuple(
        max(filter(torch.is_floating_point, one), key=lambda part: part.shape[-1]) for one in last
    )
    chosen = next(part.shape[-1] for part in last[0] if not part.is_floating_point())
    return replace(
        output, router_loss=measure(logits_LNE, logits_LNE[0].shape[-1], chosen, batch.attention_BT)
    )


def own_router_loss(model: torch.nn.Module) -> Callable[..., Tensor]:
    """The load-balance loss of the model's family.

    Raises:
        ConfigError: the model has no routers, or its family has no such loss (some are balanced by
            a bias instead).
    """
    homes = {type(router).__module__ for router in routers_of(model)}
    for home in homes:
        if found := getattr(sys.modules[home], "load_balancing_loss_func", None):
            measure: Callable[..., Tensor] = found
            return measure
    what = "no load-balance loss in transformers" if homes else "no experts"
    raise ConfigError(
        f"load_balance_coef is for mixtures of experts, and {type(model).__name__} has {what}:"
        " leave it out"
    )


def routers_of(model: torch.nn.Module) -> list[torch.nn.Module]:
    """The routers of a model, first layer first."""
    return [module for module in model.modules() if type(module).__name__.endswith("TopKRouter")]


def _force(experts_NK: Tensor) -> Any:
    """A forward hook that puts the recorded experts in the place of the router's own."""

    def force(module: torch.nn.Module, inputs: Any, output: tuple[Tensor, Tensor, Tensor]) -> Any:
        logits_NE, weights_NK, own_NK = output
        if experts_NK.shape != own_NK.shape:
            raise ConfigError(
                f"recorded routing is of shape {tuple(experts_NK.shape)} and the router's"
                f" {tuple(own_NK.shape)}: the batch that is scored and the model must be those that"
                " were recorded"
            )
        chosen_NK = torch.where(experts_NK[:, :1] < 0, own_NK, experts_NK.to(own_NK.device))
        normal = _is_normalised(logits_NE, weights_NK, own_NK)
        return logits_NE, _weights(logits_NE, chosen_NK, normal).to(weights_NK.dtype), chosen_NK

    return force


def _weights(logits_NE: Tensor, experts_NK: Tensor, normal: bool) -> Tensor:
    """Softmax over all experts at those chosen; `normal`: their sum is made 1."""
    weights_NK = logits_NE.softmax(-1, dtype=torch.float32).gather(-1, experts_NK)
    return weights_NK / weights_NK.sum(-1, keepdim=True) if normal else weights_NK


@torch.no_grad()
def _is_normalised(logits_NE: Tensor, weights_NK: Tensor, own_NK: Tensor) -> bool:
    """Which of the two kinds of weights the router gives, told by its own choice."""
    for normal in (True, False):
        if torch.allclose(
            _weights(logits_NE, own_NK, normal).to(weights_NK.dtype), weights_NK, 1e-3, 1e-6
        ):
            return normal
    raise ConfigError(
        "this family's router gives weights that are no softmax over its logits: it cannot be"
        " replayed"
    )

"""Mixtures of experts: their load balance, and the policy scored with the sampler's experts.

Where sampler and trainer choose different experts for a token, their log-probabilities differ by
far more than rounding (https://arxiv.org/abs/2510.11370). An engine that records its choice lets
the trainer replay it (`agentrl/engines/routing.py`).

The load-balancing loss of a pretrained configuration is never part of our losses, as scoring reads
log-probabilities only. With `load_balance_coef`, `with_router_loss` measures it in
the same pass.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor

from agentrl.engines.routing import routers_of
from agentrl.errors import ConfigError
from agentrl.trainers.batch import PolicyOutput, TokenBatch


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

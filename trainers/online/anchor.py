"""The anchor of a round's ratios: what the sampler said of the tokens, or what the trainer says.

The two differ by rounding, and by dropout. Where a recipe's bounds are narrow or the arithmetic is
coarse, ratios against the sampler would be clipped before the policy has moved, so they are against
the trainer's own log-probabilities. Those of the sampler stay what corrections and the parity gate
read.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING

import torch

from agentrl.engines.routing import replayed_routing
from agentrl.trainers.algorithms.losses import sampled
from agentrl.trainers.batch import TokenBatch
from agentrl.trainers.models.scoring import frozen_logprobs
from agentrl.trainers.observe.updates import fresh

if TYPE_CHECKING:
    from agentrl.trainers.online.learner import Learner

Piece = tuple[TokenBatch, list[TokenBatch]]
"""The minibatch of one optimizer step, and the micro-batches of it that are scored."""


def anchors_itself(learner: Learner) -> bool:
    """Whether the trainer scores the anchor of its ratios."""
    compute = learner.config.compute
    coarse = compute.dtype != "float32" or compute.dropout > 0
    return coarse or "anchor" in learner.recipe.needs


def anchored(learner: Learner, pieces: Iterable[Piece], step: int) -> list[Piece]:
    """The optimizer steps of a round, all anchored in the policy that the first one starts from.

    It is scored in the very micro-batches and under the very dropout that are trained: in others,
    sums would be rounded in another way. The first step needs no pass of its own, as the policy
    that trains is still that policy: `update` takes its word. With dropout the reference is scored
    here as well, so that it drops the same.

    Args:
        step: the round.
    """
    reference = learner.reference if learner.config.compute.dropout else None

    @torch.no_grad()
    def said(model: torch.nn.Module, micro: TokenBatch, *place: int) -> torch.Tensor:
        experts_BTLK = micro.experts_BTLK if model is learner.model else None
        with (
            same_dropout(learner, step, *place),
            replayed_routing(model, experts_BTLK),
        ):
            return frozen_logprobs(model.train(), micro, learner.config.temperature)

    found = list[Piece]()
    for number, (mini, micros) in enumerate(pieces):
        scored = micros
        if number:
            scored = [
                with_anchor(learner, micro, said(learner.model, micro, number, index))
                for index, micro in enumerate(scored)
            ]
        if reference is not None:
            scored = [
                replace(micro, ref_logprobs_BT=said(reference, micro, number, index))
                for index, micro in enumerate(scored)
            ]
        found.append((mini, scored))
    if reference is not None:
        reference.eval()
        learner.model.train()  # with adapters, they are one model
    return found


def with_anchor(learner: Learner, micro: TokenBatch, said_BT: torch.Tensor) -> TokenBatch:
    """The micro-batch with ratios against what the policy said of it before the round's first step.

    Tokens of an earlier policy keep their sampler's word: what was learnt since belongs in their
    ratio, unless a correction weighs it already.
    """
    is_own_BT, old_BT = own_anchor(learner, micro).mask_BT, micro.old_logprobs_BT
    said_BT = torch.where(is_own_BT, said_BT, old_BT.to(said_BT.dtype))
    return replace(micro, proximal_logprobs_BT=said_BT)


def own_anchor(learner: Learner, batch: TokenBatch) -> TokenBatch:
    """The batch without tokens that are anchored in an earlier policy than the round starts from:
    they do not tell how far the round has moved it.
    """
    return sampled(batch) if "proximal" in learner.recipe.needs else fresh(batch)


@contextmanager
def same_dropout(learner: Learner, *place: int) -> Iterator[None]:
    """What drops out within is the same for every model that scores this micro-batch.

    Args:
        place: numbers of the round, of the optimizer step in it, and of the micro-batch in that.
    """
    if not learner.config.compute.dropout:
        yield
        return
    device = learner.model.device
    with torch.random.fork_rng([device] if device.type == "cuda" else []):
        torch.manual_seed(learner.seed_of("dropout", *place) % 2**63)
        yield

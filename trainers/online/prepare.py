"""What a recipe reads beside tokens and outcomes: reference, anchor, values, advantages."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from agentrl.engines.routing import replayed_routing
from agentrl.trainers.algorithms.parts import needs_of
from agentrl.trainers.batch import PolicyOutput, TokenBatch
from agentrl.trainers.models.critic import monte_carlo
from agentrl.trainers.models.scoring import in_parts, token_logprobs
from agentrl.trainers.online.anchor import anchors_itself

if TYPE_CHECKING:
    from agentrl.trainers.online.learner import Learner

LIKELIEST = 3
"""How many of the likeliest tokens are scored where a recipe reads them (3 in SimKO's paper)."""


def prepare(learner: Learner, batch: TokenBatch) -> TokenBatch:
    """The batch with what the recipe needs of models that this step does not move."""
    if not len(batch):
        return batch
    needs, moved = learner.recipe.needs, _anchored_here(learner, batch.to(learner.model.device))
    if learner.reference is not None and not _scored_later(learner):
        moved = replace(
            moved, ref_logprobs_BT=without_gradient(learner, learner.reference, moved).logprobs_BT
        )
    follows = anchors_itself(learner) and "anchor_kl_coef" in learner.recipe.rules()
    if follows or needs & {"proximal", "entropy", "anchor_top"}:
        found = without_gradient(
            learner, learner.model, moved, LIKELIEST if "anchor_top" in needs else 0
        )
        read = follows or needs & {"proximal", "anchor_top"}
        proximal_BT = found.logprobs_BT if read else None
        moved = replace(moved, proximal_logprobs_BT=proximal_BT, entropy_BT=found.entropy_BT)
        moved = replace(
            moved, top_logprobs_BTK=found.top_logprobs_BTK, top_ids_BTK=found.top_ids_BTK
        )
    if learner.teacher is not None and "teacher" in needs:
        said = without_gradient(learner, learner.teacher, moved)
        moved = replace(moved, teacher_logprobs_BT=said.logprobs_BT)
    return learner.critic.predict(moved) if learner.critic else moved


def _anchored_here(learner: Learner, batch: TokenBatch) -> TokenBatch:
    """The batch with the policy's own word, before the round, on tokens that it never sampled: what
    another sampler said of them is no anchor of its ratios.
    """
    given_BT = batch.mask_BT & (batch.version_BT < 0)
    if not given_BT.any():
        return batch
    said_BT = without_gradient(learner, learner.model, batch).logprobs_BT
    old_BT = torch.where(given_BT, said_BT.to(batch.old_logprobs_BT), batch.old_logprobs_BT)
    return replace(batch, old_logprobs_BT=old_BT)


def _scored_later(learner: Learner) -> bool:
    """Whether `anchored` scores the reference, and no advantage reads it before."""
    credited = (*learner.recipe.before, *learner.recipe.credit)
    is_read = any("reference" in needs_of(part) for part in credited)
    return learner.config.compute.dropout > 0 and not is_read


@torch.no_grad()
def without_gradient(
    learner: Learner, model: torch.nn.Module, batch: TokenBatch, top: int = 0
) -> PolicyOutput:
    """What a model says about a whole batch, in micro-batches and without gradient.

    Only the policy takes the experts of the sampler: a reference is a model of its own.
    """
    model.eval()

    def look(micro: TokenBatch) -> tuple[Tensor, ...]:
        with replayed_routing(model, micro.experts_BTLK if model is learner.model else None):
            output = token_logprobs(model, micro, learner.config.temperature, top=top)
        told = (output.logprobs_BT, output.entropy_BT, output.top_logprobs_BTK, output.top_ids_BTK)
        return tuple(part_BT for part_BT in told if part_BT is not None)

    return PolicyOutput(*in_parts(batch, look, learner.config.compute.micro_tokens))


@torch.no_grad()
def with_teacher(learner: Learner, micro: TokenBatch) -> TokenBatch:
    """The micro-batch with what the teacher says of the vocabulary, or of its likeliest tokens."""
    if "teacher_top" not in learner.recipe.needs or learner.teacher is None:
        return micro
    teacher, most = learner.teacher, learner.recipe.teacher.top
    known = vocabulary(learner.model)
    spare = max(0, vocabulary(teacher) - known)  # a teacher may pad its vocabulary further
    if not most:
        most, spare = min(vocabulary(teacher), known), 0
        ids_V = torch.arange(most, device=micro.ids_BT.device)
        micro = replace(micro, top_ids_BTK=ids_V.expand(*micro.ids_BT.shape, most))
    heat = learner.config.temperature
    said = token_logprobs(teacher, micro, heat, entropy="off", top=most + spare)
    ids_BTK, logprobs_BTK = said.top_ids_BTK, said.top_logprobs_BTK
    assert ids_BTK is not None and logprobs_BTK is not None
    if spare:
        kept_BTK = torch.argsort((ids_BTK >= known).byte(), dim=-1, stable=True)[..., :most]
        ids_BTK, logprobs_BTK = ids_BTK.gather(-1, kept_BTK), logprobs_BTK.gather(-1, kept_BTK)
    return replace(micro, top_ids_BTK=ids_BTK, teacher_top_logprobs_BTK=logprobs_BTK)


def vocabulary(model: torch.nn.Module) -> int:
    """Tokens that a model tells apart; some pad it beyond their tokenizer's."""
    found: Any = model
    return int(found.get_output_embeddings().weight.shape[0])


def credit(learner: Learner, batch: TokenBatch, step: int) -> TokenBatch:
    """The batch with its advantages; with Monte-Carlo returns while a critic is pre-trained."""
    recipe = learner.recipe
    if not len(batch):
        return batch
    if learner.critic and learner.critic.is_pretraining(step):
        recipe = replace(recipe, credit=monte_carlo(recipe.credit))
    return recipe.advantage(batch)

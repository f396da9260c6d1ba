"""What a recipe reads beside tokens and outcomes: reference, anchor, values, advantages."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from agentrl.trainers.algorithms.parts import needs_of
from agentrl.trainers.batch import PolicyOutput, TokenBatch, in_parts
from agentrl.trainers.models.critic import monte_carlo
from agentrl.trainers.models.scoring import token_logprobs
from agentrl.trainers.online.anchor import anchors_itself

if TYPE_CHECKING:
    from agentrl.trainers.online.learner import Learner

LIKELIEST = 3
"""How many of the likeliest tokens are scored where a recipe reads them (3 in SimKO's paper)."""


def prepare(learner: Learner, batch: TokenBatch) -> TokenBatch:
    """The batch with what the recipe needs of models that this step does not move."""
    if not len(batch):
        return batch
    needs, moved = learner.recipe.needs, batch.to(learner.model.device)
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
    return learner.critic.predict(moved) if learner.critic else moved


def _scored_later(learner: Learner) -> bool:
    """Whether `anchored` scores the reference, and no advantage reads it before."""
    credited = (*learner.recipe.before, *learner.recipe.credit)
    is_read = any("reference" in needs_of(part) for part in credited)
    return learner.config.compute.dropout > 0 and not is_read


@torch.no_grad()
def without_gradient(
    learner: Learner, model: torch.nn.Module, batch: TokenBatch, top: int = 0
) -> PolicyOutput:
    """What a model says about a whole batch, in micro-batches and without gradient."""
    model.eval()

    def look(micro: TokenBatch) -> tuple[Tensor, ...]:
        output = token_logprobs(model, micro, learner.config.temperature, top=top)
        told = (output.logprobs_BT, output.entropy_BT, output.top_logprobs_BTK, output.top_ids_BTK)
        return tuple(part_BT for part_BT in told if part_BT is not None)

    return PolicyOutput(*in_parts(batch, look, learner.config.compute.micro_tokens))


def credit(learner: Learner, batch: TokenBatch, step: int) -> TokenBatch:
    """The batch with its advantages; with Monte-Carlo returns while a critic is pre-trained."""
    recipe = learner.recipe
    if not len(batch):
        return batch
    if learner.critic and learner.critic.is_pretraining(step):
        recipe = replace(recipe, credit=monte_carlo(recipe.credit))
    return recipe.advantage(batch)

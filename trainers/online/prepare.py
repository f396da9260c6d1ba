"""What a recipe reads beside tokens and outcomes, made ready before the update: reference, anchor,
values, credit.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from agentrl.trainers.batch import PolicyOutput, TokenBatch, in_parts
from agentrl.trainers.models.critic import monte_carlo
from agentrl.trainers.models.scoring import token_logprobs
from agentrl.trainers.online.run import Run

LIKELIEST = 3
"""How many of the likeliest tokens are scored where a part of the recipe reads them (SimKO's paper
takes 3).
"""


def prepare(run: Run, batch: TokenBatch) -> TokenBatch:
    """The batch with what the recipe needs of models that this step does not move."""
    if not len(batch):
        return batch
    needs, moved = run.recipe.needs, batch.to(run.model.device)
    if run.reference is not None:
        moved = replace(
            moved, ref_logprobs_BT=without_gradient(run, run.reference, moved).logprobs_BT
        )
    if needs & {"proximal", "entropy", "anchor_top"}:
        found = without_gradient(run, run.model, moved, LIKELIEST if "anchor_top" in needs else 0)
        proximal_BT = found.logprobs_BT if needs & {"proximal", "anchor_top"} else None
        moved = replace(moved, proximal_logprobs_BT=proximal_BT, entropy_BT=found.entropy_BT)
        moved = replace(
            moved, top_logprobs_BTK=found.top_logprobs_BTK, top_ids_BTK=found.top_ids_BTK
        )
    return run.critic.predict(moved) if run.critic else moved


@torch.no_grad()
def without_gradient(
    run: Run, model: torch.nn.Module, batch: TokenBatch, top: int = 0
) -> PolicyOutput:
    """What a model says about a whole batch, in micro-batches and without gradient."""
    model.eval()

    def look(micro: TokenBatch) -> tuple[Tensor, ...]:
        output = token_logprobs(model, micro, run.config.temperature, top=top)
        told = (output.logprobs_BT, output.entropy_BT, output.top_logprobs_BTK, output.top_ids_BTK)
        return tuple(part_BT for part_BT in told if part_BT is not None)

    return PolicyOutput(*in_parts(batch, look, run.config.compute.micro_tokens))


def credit(run: Run, batch: TokenBatch, step: int) -> TokenBatch:
    """The batch with its advantages; with Monte-Carlo returns while a critic is pre-trained."""
    recipe = run.recipe
    if not len(batch):
        return batch
    if run.critic and run.critic.is_pretraining(step):
        recipe = replace(recipe, credit=monte_carlo(recipe.credit))
    return recipe.advantage(batch)

"""The updates of one round, read top to bottom: batch -> loss -> gradient -> optimizer.

Letters: B rows, T positions.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from functools import partial
from typing import TYPE_CHECKING

import torch

from agentrl.engines.routing import replayed_routing
from agentrl.errors import TrainingError
from agentrl.trainers.algorithms.losses import by_token
from agentrl.trainers.algorithms.regularisers import kl_k3
from agentrl.trainers.batch import PolicyOutput, TokenBatch
from agentrl.trainers.models.moe import with_router_loss
from agentrl.trainers.models.scoring import EntropyMode, token_logprobs
from agentrl.trainers.observe.updates import UpdateLog
from agentrl.trainers.online.anchor import (
    Piece,
    anchored,
    anchors_itself,
    own_anchor,
    same_dropout,
    with_anchor,
)
from agentrl.trainers.online.prepare import LIKELIEST, with_teacher

if TYPE_CHECKING:
    from agentrl.trainers.online.learner import Learner


def update(learner: Learner, batch: TokenBatch, step: int, log: UpdateLog) -> None:
    """All optimizer steps of one round.

    Rows whose advantages are all zero add nothing to the policy gradient. Unless a KL or entropy
    term needs them, they are left out of the forward pass; every denominator stays what it was.

    Raises:
        TrainingError: the loss or the gradient is not a number.
        ParityError: sampler and trainer disagree; nothing was trained on these samples.
    """
    config, recipe, model = learner.config, learner.recipe, learner.model
    own_anchor = anchors_itself(learner)
    rate = config.learning_rate * config.schedule.share(step, config.steps)
    for group in learner.optimizer.param_groups:
        group["lr"] = rate
    log.row["policy/learning_rate"] = rate
    model.train()
    pieces = _pieces(learner, batch, step)
    pieces = anchored(learner, pieces, step) if own_anchor else pieces
    for number, (mini, micros) in enumerate(pieces):
        for index, micro in enumerate(micros):
            micro = with_teacher(learner, micro)
            with replayed_routing(model, micro.experts_BTLK) as replay:
                with same_dropout(learner, step, number, index):
                    output = policy_output(learner, micro)
                if own_anchor and number == 0:  # nothing has moved yet: its own word, bit for bit
                    micro = with_anchor(learner, micro, output.logprobs_BT.detach())
                loss, metrics = recipe.loss(output, micro)
                loss.backward()
            log.micro(output, micro, metrics | _moved(learner, output, micro), replay)
        if micros:
            norm = torch.nn.utils.clip_grad_norm_(
                model.parameters(), config.optimizer.max_grad_norm
            )
            now = log.mini(mini, float(norm))
            _stop_if_broken(learner, now, mini, step)
            too_far = now["own_kl"] > recipe.kl_budget * now["own_share"]
            if not too_far:
                learner.optimizer.step()
                now["updates"] = 1.0
            learner.optimizer.zero_grad(set_to_none=True)
            if too_far:
                return
        log.trained(mini, batch.n_episodes)


def _pieces(learner: Learner, batch: TokenBatch, step: int) -> Iterable[Piece]:
    """The optimizer steps of a round: each minibatch, corrected, and what is scored of it."""
    config, recipe = learner.config, learner.recipe
    seed = learner.seed_of("minibatches", step)
    for mini in batch.minibatches(config.minibatches, seed, recipe.epochs):
        mini = recipe.correct(mini).to(learner.model.device)
        rows = mini if recipe.regularisers else mini.informative()
        yield mini, list(rows.split(config.compute.micro_tokens))


def policy_output(learner: Learner, micro: TokenBatch) -> PolicyOutput:
    """What the policy says about the sampled tokens, with gradient."""
    needs = learner.recipe.needs
    mode: EntropyMode = "gradient" if "entropy_gradient" in needs else "value"
    top = LIKELIEST if needs & {"top", "anchor_top", "teacher_top"} else 0
    temperature = learner.config.temperature
    said = partial(token_logprobs, learner.model, micro, temperature, entropy=mode, top=top)
    return with_router_loss(learner.model, micro, said) if "router" in needs else said()


def _moved(learner: Learner, output: PolicyOutput, micro: TokenBatch) -> dict[str, float]:
    """How far the round has moved the policy: nats and tokens, as `add_metrics` joins them."""
    own = own_anchor(learner, micro)
    kl_BT = kl_k3(micro.anchor_BT, output.logprobs_BT.detach())
    sums = torch.stack([by_token(kl_BT, own), by_token(torch.ones_like(kl_BT), own)])
    return dict(zip(("own_kl", "own_share"), sums.tolist(), strict=True))


def _stop_if_broken(
    learner: Learner, now: Mapping[str, float], mini: TokenBatch, step: int
) -> None:
    if not (math.isfinite(now["loss"]) and math.isfinite(now["grad_norm"])):
        raise TrainingError(
            f"round {step + 1}: loss={now['loss']}, grad_norm={now['grad_norm']}: no step was"
            f" taken; the batch is in {learner.keep(mini, step + 1)}; resume with a lower"
            " learning_rate, and where that breaks at once, from the checkpoint before: delete the"
            " newest folder of checkpoints/"
        )

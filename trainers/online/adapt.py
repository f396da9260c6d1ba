"""Coefficients that follow a target, from round to round."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from agentrl.trainers.algorithms.losses import by_token
from agentrl.trainers.algorithms.regularisers import kl_k3
from agentrl.trainers.batch import TokenBatch
from agentrl.trainers.online.anchor import own_anchor
from agentrl.trainers.online.prepare import without_gradient

if TYPE_CHECKING:
    from agentrl.trainers.online.learner import Learner


def adapt(
    learner: Learner, batch: TokenBatch, history: Sequence[Mapping[str, float]]
) -> dict[str, float]:
    """Let the coefficients of the recipe follow their targets.

    Returns:
        as metrics, those that this round trained with and what they were judged by.

    A round is what PPO's section 4 calls a policy update: all its minibatches and epochs. Where no
    optimizer step was taken, nothing was measured and nothing moves.

    - `anchor_kl_coef` reads KL(π_anchor‖π) of the policy as it is now, over the trained tokens of
      the round (k3 of the sampled tokens, where the paper sums over the actions): one more forward
      pass. Tokens of earlier policies say nothing about this round; without others the coefficient
      stays. `policy/kl` would not do, as it is measured in front of each step: with one step per
      round it is 0.
    - `kl_reward_coef` and `kl_coef` read KL(π‖π_ref) as `policy/ref_kl` shows it: the mean over
      the round's steps, each measured in front of its step.
    - `entropy_coef` reads the entropy in front of the first step: over its tokens, which are a
      random share of the round's episodes where there are several minibatches.

    Args:
        batch: of the whole round.
        history: metrics of its optimizer steps.

    Raises:
        TrainingError: what was measured is no number.
    """
    rules = learner.recipe.rules()
    metrics = {f"policy/{option}": rule.coef for option, rule in rules.items()}
    if not rules or not any(step["updates"] for step in history):
        return metrics
    measured = dict[str, float]()
    own = own_anchor(learner, batch)
    if "anchor_kl_coef" in rules and own.mask_BT.any():
        measured["anchor_kl_coef"] = metrics["policy/kl_after"] = _kl_from_anchor(learner, own)
    if "ref_kl" in history[0]:
        apart = sum(step["ref_kl"] for step in history) / len(history)
        measured |= dict.fromkeys(("kl_reward_coef", "kl_coef"), apart)
    if "entropy_coef" in rules:
        measured["entropy_coef"] = metrics["policy/entropy_before"] = history[0]["entropy"]
    moving = rules.keys() & measured.keys()
    learner.recipe = learner.recipe.moved(
        {option: rules[option].update(measured[option]).coef for option in moving}
    )
    return metrics


def _kl_from_anchor(learner: Learner, batch: TokenBatch) -> float:
    """KL(π_anchor‖π) in nats per trained token, π as it is now."""
    now_BT = without_gradient(learner, learner.model, batch).logprobs_BT
    mean = replace(batch, n_tokens=int(batch.mask_BT.sum()))
    return float(by_token(kl_k3(batch.anchor_BT, now_BT), mean))

"""Where a recipe is not its paper, in words: clause by clause, with the options of the changed
formula that bring the paper's back.

`test_papers` holds every entry from three sides: `ours` gives the recipe's numbers, every clause
taken back alone gives others, and all clauses taken back give the paper's. So no clause is idle,
and none is missing.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import paper_advantages as adv
import paper_changes as changed
import paper_formulas as one
import paper_steps as steps
from paper_changes import EPS, HIGH, NORM, WHITEN_EPS, clipped_at_02, logged, summed, weighted
from paper_formulas import Result


@dataclass(frozen=True)
class Difference:
    """One recipe's.

    Attributes:
        ours: the formula that gives the recipe's numbers.
        clauses: what differs, as a sentence -> options of `ours` that undo it.
        settings: settings of the recipe that make it its paper; None: there are none.
        besides: what differs and is not in one step's numbers.
    """

    ours: Callable[..., Result]
    clauses: dict[str, dict[str, Any]]
    settings: dict[str, Any] | None = None
    besides: str = ""


RATIO = "The ratio to the sampler stands in place of log π, so a second step is corrected."
CLIP = "PPO's clip of 0.2 stands in place of the bare log π, so a second step is bounded."
BY_NORM = "The sum over tokens is divided by the constant `norm_tokens`."
NO_KL = "There is no KL to a reference unless `kl_coef` is set."
NO_KL_REWARD = "There is no KL in the reward unless `kl_reward_coef` is set."
WHITE = "Advantages are whitened over the round."
PER_GROUP = "The token mean is over the whole step; the equation has one mean per prompt."
BEFORE = "Covariances are of the policy before the step, not as it moves."

DIFFERS: dict[str, Difference] = {
    "reinforce": Difference(
        summed(changed.reinforce, weighted),
        {
            "The baseline is the mean reward of the round's other episodes, not of all rewards"
            " seen in training.": {"others": False},
            RATIO: {"term": logged},
            NO_KL_REWARD: {"beta": 0.03},
        },
    ),
    "rloo": Difference(
        summed(changed.rloo, clipped_at_02),
        {
            "Every token's ratio is clipped at 0.2; the paper takes an answer as one action and"
            " clips nothing.": {"term": logged},
            NO_KL_REWARD: {"beta": 0.03},
        },
        {"surrogate": "policy_gradient", "kl_reward_coef": 0.03},
    ),
    "remax": Difference(
        summed(adv.greedy_baseline, weighted),
        {RATIO: {"term": logged}},
        {"surrogate": "policy_gradient"},
    ),
    "opo": Difference(
        summed(adv.length_weighted, weighted),
        {RATIO: {"term": logged}},
        {"surrogate": "policy_gradient"},
        "Strictly on-policy steps are not enforced: keep one minibatch and one epoch.",
    ),
    "grpo": Difference(
        partial(one.grpo, beta=0.0, guard=EPS),
        {NO_KL: {"beta": 0.04}},
        {"kl_coef": 0.04, "kl_ratio": False},
    ),
    "dr_grpo": Difference(
        partial(one.dr_grpo, budget=NORM),
        {BY_NORM + " So has the paper's listing; its equation has no divisor.": {"budget": 1}},
        {"norm_tokens": 1},
    ),
    "dapo": Difference(
        partial(one.dapo, longest=math.inf, cache=1, guard=EPS, per_group=False),
        {
            "There is no overlong punishment in the reward.": {"longest": 4, "cache": 2},
            PER_GROUP + " (The authors' code: over the minibatch.)": {"per_group": True},
        },
    ),
    "maxrl": Difference(
        summed(adv.maximum_likelihood, clipped_at_02, NORM),
        {CLIP: {"term": logged}, BY_NORM: {"norm": 1}},
        {"surrogate": "policy_gradient", "aggregate": "episode_sum"},
    ),
    "pass_at_k": Difference(
        summed(changed.best_of_two, clipped_at_02, NORM),
        {
            "The baseline is the mean best of k others, so a group of at most k says nothing; the"
            " paper's experiments have that of k-1 others (equation 33), and the one in its"
            " equation 29 is G/(G-1) times ours.": {"of_two": False},
            CLIP: {"term": logged},
            BY_NORM: {"norm": 1},
        },
    ),
    "otb": Difference(
        summed(changed.token_baseline, weighted),
        {
            "The baseline is over the other answers alone.": {"own": True},
            "A token's energy is (1-π)², not 1 - 2π + Σπ².": {"chosen": False},
            "An answer that has ended counts with its last token.": {"ended": False},
            RATIO: {"term": logged},
        },
    ),
    "cispo": Difference(
        partial(one.cispo, high=HIGH, guard=EPS, per_group=False),
        {PER_GROUP: {"per_group": True}},
        None,
        "Quiet groups are not drawn again and long answers not punished; 1 + 4 is our bound, the"
        " paper has no number.",
    ),
    "topr": Difference(
        changed.topr,
        {
            "The reward is centred on its group's mean; the paper has a constant baseline.": {
                "centred": False
            }
        },
    ),
    "dppo": Difference(
        changed.dppo,
        {
            "The loss is -ρ·A·log π with ρ held fixed and at most 20; its gradient is that of"
            " -ρ·A.": {"as_log": False},
            BY_NORM: {"norm": 1},
        },
    ),
    "vespo": Difference(
        changed.vespo,
        {
            "The mean is over the step's tokens, as in the authors' code; the equation sums an"
            " answer's tokens and takes the mean over answers.": {"by_token": False}
        },
        {"aggregate": "episode_sum"},
    ),
    "clip_cov": Difference(
        changed.clip_cov,
        {
            "PPO's clip of 0.2 stays beside the selection, as in the authors' code.": {
                "clip": False
            },
            BEFORE: {"before": False},
        },
    ),
    "kl_cov": Difference(
        changed.kl_cov,
        {
            BEFORE: {"before": False},
            "Only covariances above 0 count.": {"positive": False},
            "The share is rounded up.": {"up": False},
        },
    ),
    "simko": Difference(
        changed.simko,
        {
            "Forks are the fifth of highest entropy of the whole step; the paper takes the"
            " quantile of each answer.": {"of_the_step": False}
        },
        None,
        "The sign of the advantage stands for right and wrong, and the entropy is that before the"
        " step.",
    ),
    "prorl": Difference(
        changed.prorl,
        {"The KL is ρ·k3, not k3.": {"with_ratio": False}},
        {"kl_ratio": False},
        "The reference is reset every 200 rounds; the authors reset it when training stalls.",
    ),
    "reinforce++": Difference(
        partial(steps.reinforce_plus_plus, beta=0.0, guard=WHITEN_EPS),
        {NO_KL_REWARD: {"beta": 0.01}},
        {"kl_reward_coef": 0.01},
    ),
    "reinforce++_baseline": Difference(
        partial(steps.reinforce_plus_plus_baseline, beta=0.0, guard=WHITEN_EPS),
        {NO_KL: {"beta": 0.01}},
        {"kl_coef": 0.01, "kl_estimator": "k2", "kl_ratio": False},
    ),
    "turn_grpo": Difference(
        partial(steps.turn_grpo, cumulative=1.0, beta=0.0, guard=EPS),
        {
            "A turn's advantage is the z-score of its return among its siblings' turns of the same"
            " index (the authors' second estimator, for any number of turns), not that of its own"
            " reward plus that of the outcome.": {"cumulative": None},
            NO_KL: {"beta": 0.04},
        },
    ),
    "turn_ppo": Difference(
        changed.turn_ppo,
        {
            "Ratio, clip and mean are of tokens, not of turns.": {"by_turn": True},
            WHITE: {"white": False},
            "`gamma` is 1, not 0.99.": {"gamma": 0.99},
            "`lam` is 0.95, not 0.9.": {"lam": 0.9},
        },
    ),
    "gigpo": Difference(
        changed.gigpo,
        {
            "Ratio and clip are of tokens and every episode weighs the same; the equation has the"
            " ratio of a turn's action and a mean over turns.": {"by_turn": True},
            NO_KL: {"beta": 0.01},
        },
    ),
    "ppo": Difference(
        changed.ppo,
        {WHITE: {"white": False}, "`gamma` is 1, not 0.99.": {"gamma": 0.99}},
        None,
        "The critic is a model of its own, and no entropy bonus is in the loss unless"
        " `entropy_coef` is set.",
    ),
    "ppo_penalty": Difference(
        partial(changed.ppo, term=changed.penalty),
        {
            WHITE: {"white": False},
            "`gamma` is 1, not 0.99.": {"gamma": 0.99},
            "The KL of a state is ρ - 1 - log ρ of its one sample, not a sum over actions.": {
                "term": partial(changed.penalty, sampled=False)
            },
        },
    ),
    "vapo": Difference(
        changed.vapo,
        {
            "λ is not below 0 where an answer has fewer than 1/α tokens.": {"floor": False},
        },
    ),
}

"""Where a recipe is not its paper: for every stated deviation that one step's numbers show, the
options of the changed formula that bring the paper's back.

The sentences are those of docs/deviations.md, by name. `test_papers` holds every entry from
three sides: `ours` gives the recipe's numbers, every deviation taken back alone gives others, and
all of them taken back give the paper's. So none is idle, and none is missing.
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
        undone: name of a deviation -> options of `ours` that undo it.
    """

    ours: Callable[..., Result]
    undone: dict[str, dict[str, Any]]


TERM: dict[str, Any] = {"term": logged}
GAMMA, WHITE, BETA = {"gamma": 0.99}, {"white": False}, {"beta": 0.01}

DIFFERS: dict[str, Difference] = {
    "reinforce": Difference(
        summed(changed.reinforce, weighted),
        {"round_baseline": {"others": False}, "ratio": TERM, "no_kl_in_reward": BETA},
    ),
    "rloo": Difference(
        summed(changed.rloo, clipped_at_02),
        {"token_clip": TERM, "no_kl_in_reward": BETA},
    ),
    "remax": Difference(summed(adv.greedy_baseline, weighted), {"ratio": TERM}),
    "opo": Difference(summed(adv.length_weighted, weighted), {"ratio": TERM}),
    "grpo": Difference(partial(one.grpo, beta=0.0, guard=EPS), {"no_kl_loss": {"beta": 0.04}}),
    "dr_grpo": Difference(partial(one.dr_grpo, budget=NORM), {"norm_tokens": {"budget": 1}}),
    "dapo": Difference(
        partial(one.dapo, longest=math.inf, cache=1, guard=EPS, per_group=False),
        {
            "no_overlong_punishment": {"longest": 4, "cache": 2},
            "one_mean": {"per_group": True},
        },
    ),
    "maxrl": Difference(
        summed(adv.maximum_likelihood, clipped_at_02, NORM),
        {"token_clip": TERM, "constant_norm": {"norm": 1}},
    ),
    "pass_at_k": Difference(
        summed(changed.best_of_two, clipped_at_02, NORM),
        {"baseline_of_k": {"of_two": False}, "token_clip": TERM, "constant_norm": {"norm": 1}},
    ),
    "otb": Difference(
        summed(changed.token_baseline, weighted),
        {
            "others_only": {"own": True},
            "chosen_logit": {"chosen": False},
            "ended": {"ended": False},
            "ratio": TERM,
        },
    ),
    "cispo": Difference(
        partial(one.cispo, high=HIGH, guard=EPS, per_group=False),
        {"one_mean": {"per_group": True}},
    ),
    "topr": Difference(changed.topr, {"group_mean": {"centred": False}}),
    "dppo": Difference(changed.dppo, {"as_log": {"as_log": False}, "constant_norm": {"norm": 1}}),
    "vespo": Difference(changed.vespo, {"token_mean": {"by_token": False}}),
    "clip_cov": Difference(
        changed.clip_cov, {"clip_kept": {"clip": False}, "whole_step": {"before": False}}
    ),
    "kl_cov": Difference(
        changed.kl_cov,
        {
            "whole_step": {"before": False},
            "rounded_up": {"up": False},
            "positive_only": {"positive": False},
        },
    ),
    "simko": Difference(changed.simko, {"step_quantile": {"of_the_step": False}}),
    "prorl": Difference(changed.prorl, {"kl_ratio": {"with_ratio": False}}),
    "reinforce++": Difference(
        partial(steps.reinforce_plus_plus, beta=0.0, guard=WHITEN_EPS),
        {"no_kl_in_reward": BETA},
    ),
    "reinforce++_baseline": Difference(
        partial(steps.reinforce_plus_plus_baseline, beta=0.0, guard=WHITEN_EPS),
        {"no_kl_loss": BETA},
    ),
    "turn_grpo": Difference(
        partial(steps.turn_grpo, cumulative=1.0, beta=0.0, guard=EPS),
        {"turn_returns": {"cumulative": None}, "no_kl_loss": BETA},
    ),
    "turn_ppo": Difference(
        changed.turn_ppo,
        {
            "token_ratio": {"by_turn": True},
            "whitened": WHITE,
            "no_discount": GAMMA,
            "longer_trace": {"lam": 0.9},
        },
    ),
    "gigpo": Difference(changed.gigpo, {"token_ratio": {"by_turn": True}, "no_kl_loss": BETA}),
    "ppo": Difference(changed.ppo, {"whitened": WHITE, "no_discount": GAMMA}),
    "ppo_penalty": Difference(
        partial(changed.ppo, term=changed.penalty),
        {
            "whitened": WHITE,
            "no_discount": GAMMA,
            "sampled_kl": {"term": partial(changed.penalty, sampled=False)},
        },
    ),
    "vapo": Difference(changed.vapo, {"floor": {"floor": False}}),
}

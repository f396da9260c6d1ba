"""The parts that settings can name, by the place of a recipe in which they stand."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from agentrl.trainers.algorithms.advantages import (
    dr_grpo,
    gdpo,
    group_advantages_by_length,
    grpo,
    maxrl,
    mgpo,
    opo,
    pass_at_k,
    reinforce,
    remax,
    rloo,
)
from agentrl.trainers.algorithms.corrections import (
    decay_stale,
    drop_off_policy_negatives,
    drop_overlong,
    drop_stale,
    masked_is,
    reject_off_policy,
    truncated_is,
)
from agentrl.trainers.algorithms.credit import (
    entropy_shaped,
    gae,
    gigpo,
    kl_in_reward,
    length_adaptive_gae,
    optimal_baseline,
    overlong_punishment,
    reward_to_go,
    turn_gae,
    turn_level,
    vtrace,
    whiten,
)
from agentrl.trainers.algorithms.distillation import gkd, teacher_credit
from agentrl.trainers.algorithms.losses import (
    by_constant,
    by_episode,
    by_episode_sum,
    by_token,
    ppo_clip,
)
from agentrl.trainers.algorithms.parts import Aggregate, Lifted, Step, Term, name_of
from agentrl.trainers.algorithms.recipe import over_groups
from agentrl.trainers.algorithms.regularisers import (
    anchor_kl,
    entropy_bonus,
    imitate,
    kl_cov,
    kl_penalty,
    load_balance,
    simko,
)
from agentrl.trainers.algorithms.selections import (
    clip_cov,
    select_forks,
    select_kl_cov,
    train_high_entropy,
)
from agentrl.trainers.algorithms.sequence_surrogates import gmpo, gspo, gspo_token, topr, vespo
from agentrl.trainers.algorithms.surrogates import (
    cispo,
    dppo_kl,
    dppo_topk_kl,
    dppo_topk_tv,
    dppo_tv,
    importance_weighted,
    policy_gradient,
    ppo_dual_clip,
    sapo,
    topr_token,
)

by_length = Lifted(group_advantages_by_length, opo)
"""OPO's credit, which also reads how many tokens each episode trains."""

ADDABLE: dict[str, tuple[Step | Term, ...]] = {
    "before": (kl_in_reward, overlong_punishment),
    "credit": (entropy_shaped, teacher_credit),
    "regularisers": (kl_penalty, entropy_bonus, imitate, load_balance, gkd),
    "corrections": (
        truncated_is,
        masked_is,
        reject_off_policy,
        drop_off_policy_negatives,
        decay_stale,
        drop_stale,
        drop_overlong,
        clip_cov,
        train_high_entropy,
    ),
}
"""Parts that any recipe takes on when a setting names one of their options, at the end of the place
they belong to.
"""


def label(part: Callable[..., Any]) -> str:
    """The name of a part in settings: that of its function; aggregates are named by what they
    weigh alike.
    """
    return name_of(part).removeprefix("by_")


def _named(*parts: Callable[..., Any]) -> dict[str, Any]:
    return {label(part): part for part in parts}


AGGREGATES: dict[str, Aggregate] = _named(by_token, by_episode, by_episode_sum, by_constant)
SURROGATES: dict[str, Term] = {
    **_named(policy_gradient, importance_weighted, ppo_clip, cispo, sapo, topr_token),
    **_named(dppo_tv, dppo_kl, dppo_topk_tv, dppo_topk_kl, gspo, gspo_token, gmpo, topr, vespo),
    "ppo_dual_clip": ppo_dual_clip,
    "simko": simko,
}
"""Surrogates that any recipe takes on; `simko` reads a selection, which `select_forks` makes."""

PLACES: dict[str, dict[str, Callable[..., Any]]] = {
    "before": _named(*ADDABLE["before"]),
    "credit": _named(
        *map(over_groups, (grpo, dr_grpo, rloo, maxrl, mgpo, pass_at_k)),
        *(reinforce, remax, by_length, gdpo, optimal_baseline),
        *(reward_to_go, gae, length_adaptive_gae, turn_gae, vtrace, turn_level, gigpo),
        *(whiten, *ADDABLE["credit"]),
    ),
    "surrogate": dict(SURROGATES),
    "aggregate": dict(AGGREGATES),
    "regularisers": _named(*ADDABLE["regularisers"], anchor_kl, kl_cov),
    "corrections": _named(*ADDABLE["corrections"], select_kl_cov, select_forks),
}
"""Place of a recipe -> name -> part."""

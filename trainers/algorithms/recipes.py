"""Named algorithms, each one row of data; the one place where a string becomes functions."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import replace
from difflib import get_close_matches
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from agentrl.errors import ConfigError
from agentrl.registry import load_file
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
    reward_to_go,
    turn_gae,
    turn_level,
    whiten,
)
from agentrl.trainers.algorithms.losses import (
    by_constant,
    by_episode,
    by_episode_sum,
    by_token,
    ppo_clip,
)
from agentrl.trainers.algorithms.made_up import try_on_made_up
from agentrl.trainers.algorithms.parts import Aggregate, Lifted, Step, Term, name_of, options
from agentrl.trainers.algorithms.recipe import Recipe, over_groups
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
from agentrl.trainers.algorithms.sequence_surrogates import (
    gmpo,
    gspo,
    gspo_token,
    topr,
    vespo,
)
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
from agentrl.trainers.algorithms.targets import TARGETS
from agentrl.trainers.config import CriticSettings, validated

ARXIV = "https://arxiv.org/abs"
AGGREGATES: dict[str, Aggregate] = {
    "token": by_token,
    "episode": by_episode,
    "episode_sum": by_episode_sum,
    "constant": by_constant,
}
SURROGATES: dict[str, Term] = {
    part.__name__: part
    for part in (
        policy_gradient,
        importance_weighted,
        ppo_clip,
        ppo_dual_clip,
        cispo,
        sapo,
        topr_token,
        dppo_tv,
        dppo_kl,
        dppo_topk_tv,
        dppo_topk_kl,
        gspo,
        gspo_token,
        gmpo,
        topr,
        vespo,
    )
}
"""Surrogates that any recipe takes on by `surrogate = name`; `simko` needs a selection besides."""

by_length = Lifted(group_advantages_by_length, opo)

_TABLE = (
    # One advantage for all tokens of an episode.
    Recipe("reinforce", f"{ARXIV}/2402.14740", (reinforce,), importance_weighted, by_episode_sum),
    Recipe("rloo", f"{ARXIV}/2402.14740", (over_groups(rloo),), ppo_clip, by_episode_sum),
    Recipe("remax", f"{ARXIV}/2310.10505", (remax,), importance_weighted, by_episode_sum),
    Recipe("opo", f"{ARXIV}/2505.23585", (by_length,), importance_weighted, by_episode_sum),
    Recipe("grpo", f"{ARXIV}/2402.03300", (over_groups(grpo),), ppo_clip, by_episode),
    Recipe("dr_grpo", f"{ARXIV}/2503.20783", (over_groups(dr_grpo),), ppo_clip, by_constant),
    Recipe(
        "dapo",
        f"{ARXIV}/2503.14476",
        (over_groups(grpo),),
        partial(ppo_clip, clip_high=0.28),
        by_token,
        refill=True,
    ),
    Recipe("maxrl", f"{ARXIV}/2602.02710", (over_groups(maxrl),), ppo_clip, by_constant),
    Recipe("mgpo", f"{ARXIV}/2511.06221", (over_groups(mgpo),), ppo_clip, by_episode),
    Recipe("pass_at_k", f"{ARXIV}/2505.15201", (over_groups(pass_at_k),), ppo_clip, by_constant),
    Recipe("gdpo", f"{ARXIV}/2601.05242", (gdpo,), ppo_clip, by_episode),
    Recipe("otb", f"{ARXIV}/2602.07078", (optimal_baseline,), importance_weighted, by_episode_sum),
    # Another surrogate.
    Recipe("gspo", f"{ARXIV}/2507.18071", (over_groups(grpo),), gspo, by_episode),
    Recipe("luspo", f"{ARXIV}/2602.05261", (over_groups(grpo),), gspo, by_episode_sum),
    Recipe("gmpo", f"{ARXIV}/2507.20673", (over_groups(grpo),), gmpo, by_episode),
    Recipe("cispo", f"{ARXIV}/2506.13585", (over_groups(grpo),), cispo, by_token),
    Recipe("sapo", f"{ARXIV}/2511.20347", (over_groups(grpo),), sapo, by_episode),
    Recipe("topr", f"{ARXIV}/2503.14286", (over_groups(dr_grpo),), topr, by_episode_sum),
    Recipe("dppo", f"{ARXIV}/2602.04879", (over_groups(dr_grpo),), dppo_tv, by_constant),
    Recipe("vespo", f"{ARXIV}/2602.10693", (over_groups(grpo),), vespo, by_token),
    # Exploration kept alive.
    Recipe(
        "clip_cov",
        f"{ARXIV}/2505.22617",
        (over_groups(grpo),),
        ppo_clip,
        by_token,
        corrections=(clip_cov,),
    ),
    Recipe(
        "kl_cov",
        f"{ARXIV}/2505.22617",
        (over_groups(grpo),),
        importance_weighted,
        by_token,
        regularisers=(kl_cov,),
        corrections=(select_kl_cov,),
    ),
    Recipe(
        "simko",
        f"{ARXIV}/2510.14807",
        (over_groups(grpo),),
        simko,
        by_episode,
        corrections=(select_forks,),
    ),
    Recipe(
        "prorl",
        f"{ARXIV}/2505.24864",
        (over_groups(grpo),),
        partial(ppo_clip, clip_high=0.4),
        by_token,
        regularisers=(partial(kl_penalty, kl_coef=1e-3),),
        refill=True,
        reset_every=200,
    ),
    # An advantage for every token, or every turn.
    Recipe("reinforce++", f"{ARXIV}/2501.03262", (reward_to_go, whiten), ppo_clip, by_token),
    Recipe(
        "reinforce++_baseline",
        f"{ARXIV}/2501.03262",
        (over_groups(dr_grpo), whiten),
        ppo_clip,
        by_token,
    ),
    Recipe("turn_grpo", f"{ARXIV}/2505.11821", (turn_level,), ppo_clip, by_episode),
    Recipe("turn_ppo", f"{ARXIV}/2512.17008", (turn_gae, whiten), ppo_clip, by_token),
    Recipe("gigpo", f"{ARXIV}/2505.10978", (gigpo,), ppo_clip, by_episode),
    Recipe("ppo", f"{ARXIV}/1707.06347", (gae, whiten), ppo_clip, by_token),
    Recipe(
        "ppo_penalty",
        f"{ARXIV}/1707.06347",
        (gae, whiten),
        importance_weighted,
        by_token,
        regularisers=(partial(anchor_kl, anchor_kl_coef=1.0),),
        kl_target=0.01,
    ),
    Recipe(
        "vapo",
        f"{ARXIV}/2504.05118",
        (length_adaptive_gae,),
        partial(ppo_clip, clip_high=0.28),
        by_token,
        regularisers=(partial(imitate, imitate_coef=0.1),),
        critic=CriticSettings(warmup=50),
    ),
)
RECIPES = {row.name: row for row in _TABLE}

ADDABLE: dict[str, tuple[Step | Term, ...]] = {
    "before": (kl_in_reward,),
    "credit": (entropy_shaped,),
    "regularisers": (kl_penalty, entropy_bonus, imitate, load_balance),
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

_OWN = (
    "turn_weights",
    "negative_weight",
    "filter_groups",
    "refill",
    "spare_rounds",
    "reward_clip",
    "epochs",
    "kl_budget",
    "reset_every",
    "reference_decay",
    *TARGETS,
)
Row = TypeVar("Row")


def recipe(name: str, /, **settings: Any) -> Recipe:
    """The named recipe, with options of its parts set: `recipe("grpo", clip_high=0.28,
    aggregate="token")`.

    `path/to/file.py:mine` names a recipe in a file of one's own.

    An option of a part in `ADDABLE` adds that part: `recipe("grpo", kl_coef=0.01)`. The KL
    coefficient is 0 in most rows, so no reference model is held unless asked for (GRPO's paper uses
    0.04). `entropy_target` adds the entropy bonus, whose coefficient then starts from 0 unless it
    is set as well.

    Raises:
        ConfigError: there is no such recipe or setting (the message names the nearest one), or a
            value is out of range.
    """
    found = _from_file(name) if ".py:" in name else _named(name, RECIPES, "recipe")
    for place, table in (("surrogate", SURROGATES), ("aggregate", AGGREGATES)):
        if place in settings:
            chosen: dict[str, Any] = {place: _named(settings.pop(place), table, place)}
            found = replace(found, **chosen)
    if "critic" in settings:
        found = replace(found, critic=_critic(found, settings.pop("critic")))
    if "whiten" in settings:
        found = _whitened(found, settings.pop("whiten"))
    if settings.get("entropy_target", math.inf) != math.inf and "entropy_coef" not in found.options:
        settings.setdefault("entropy_coef", 0.0)
    for place, parts in ADDABLE.items():
        there = set(found.options)
        extra = tuple(part for part in parts if settings.keys() & options(part).keys() - there)
        changed: dict[str, Any] = {place: (*getattr(found, place), *extra)}
        found = replace(found, **changed)
    for key in settings.keys() - found.options.keys() - set(_OWN):
        raise ConfigError(_no_setting(key, found))
    found = found.with_options(settings)
    try_on_made_up(found, settings)
    return found


def _from_file(name: str) -> Recipe:
    """The recipe of that name in a file."""
    file, _, attribute = name.rpartition(":")
    module = vars(load_file(Path(file), "recipe"))
    found = module.get(attribute)
    if not isinstance(found, Recipe):
        there = (
            ", ".join(key for key, value in module.items() if isinstance(value, Recipe)) or "none"
        )
        raise ConfigError(f"{file} has no recipe named {attribute!r}: recipes in it are {there}")
    return found


def _whitened(found: Recipe, wanted: Any) -> Recipe:
    """The recipe with advantages whitened over the round, or not."""
    if not isinstance(wanted, bool):
        raise ConfigError(f"whiten={wanted!r} must be true or false")
    credit = tuple(step for step in found.credit if name_of(step) != "whiten")
    return replace(found, credit=(*credit, whiten) if wanted else credit)


def _critic(found: Recipe, row: Mapping[str, Any]) -> CriticSettings:
    """The recipe's settings of its critic, with these in their place."""
    if not isinstance(row, Mapping):
        raise ConfigError(f"critic={row!r} must be a table, as in critic = {{warmup = 5}}")
    if "critic" not in found.needs:
        having = ", ".join(other.name for other in RECIPES.values() if "critic" in other.needs)
        raise ConfigError(
            f"recipe {found.name} has no critic: leave critic={dict(row)} out, or use one of"
            f" {having}"
        )
    return validated(
        CriticSettings, found.critic.model_dump() | dict(row), f"critic of recipe {found.name}"
    )


def _no_setting(key: str, found: Recipe) -> str:
    """Why a recipe does not take a setting."""
    addable = [name for parts in ADDABLE.values() for part in parts for name in options(part)]
    known = dict.fromkeys(
        (*found.options, *addable, *_OWN, "surrogate", "aggregate", "whiten", "critic")
    )
    others = [row.name for row in RECIPES.values() if key in row.options]
    hint = (
        f"it belongs to {', '.join(others)}"
        if others
        else f"did you mean {_nearest(key, known)!r}?"
    )
    return f"recipe {found.name} has no setting {key!r}: {hint} (known: {', '.join(known)})"


def _named(name: str, table: Mapping[str, Row], what: str) -> Row:
    """The entry of that name."""
    if isinstance(name, str) and name in table:
        return table[name]
    raise ConfigError(
        f"there is no {what} {name!r}; did you mean {_nearest(name, table)!r}? (known:"
        f" {', '.join(table)})"
    )


def _nearest(name: str, known: Iterable[str]) -> str:
    return get_close_matches(str(name).lower(), known, n=1, cutoff=0.0)[0]

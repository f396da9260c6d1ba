"""Named algorithms, each one row of data; the one place where a string becomes functions."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from agentrl.errors import ConfigError
from agentrl.records.plain import as_toml
from agentrl.registry import load_file
from agentrl.trainers.algorithms.advantages import (
    dr_grpo,
    gdpo,
    grpo,
    maxrl,
    mgpo,
    pass_at_k,
    reinforce,
    remax,
    rloo,
)
from agentrl.trainers.algorithms.catalogue.choice import choose_parts, entry, nearest
from agentrl.trainers.algorithms.catalogue.places import ADDABLE, PLACES, by_length
from agentrl.trainers.algorithms.credit import (
    gae,
    gigpo,
    length_adaptive_gae,
    optimal_baseline,
    reward_to_go,
    turn_gae,
    turn_level,
    whiten,
)
from agentrl.trainers.algorithms.distillation import TeacherSettings, teacher_credit
from agentrl.trainers.algorithms.losses import (
    by_constant,
    by_episode,
    by_episode_sum,
    by_token,
    ppo_clip,
)
from agentrl.trainers.algorithms.made_up import try_on_made_up
from agentrl.trainers.algorithms.parts import name_of, options
from agentrl.trainers.algorithms.recipe import TAUGHT, Recipe, over_groups
from agentrl.trainers.algorithms.regularisers import (
    anchor_kl,
    imitate,
    kl_cov,
    kl_penalty,
    simko,
)
from agentrl.trainers.algorithms.selections import (
    clip_cov,
    select_forks,
    select_kl_cov,
)
from agentrl.trainers.algorithms.sequence_surrogates import (
    gmpo,
    gspo,
    topr,
    vespo,
)
from agentrl.trainers.algorithms.surrogates import (
    cispo,
    dppo_tv,
    importance_weighted,
    sapo,
)
from agentrl.trainers.algorithms.targets import TARGETS
from agentrl.trainers.config import CriticSettings, TrainConfig, validated
from agentrl.trainers.peers import peer_hint

ARXIV = "https://arxiv.org/abs"

_TABLE = (
    # One advantage for all tokens of an episode.
    Recipe("reinforce", f"{ARXIV}/2402.14740", (reinforce,), importance_weighted, by_episode_sum),
    Recipe("rloo", f"{ARXIV}/2402.14740", (over_groups(rloo),), ppo_clip, by_episode_sum),
    Recipe("remax", f"{ARXIV}/2310.10505", (remax,), importance_weighted, by_episode_sum),
    Recipe(
        "opo",
        f"{ARXIV}/2505.23585",
        (by_length,),
        importance_weighted,
        by_episode_sum,
        one_step=True,
    ),
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
    # A teacher in place of rewards.
    Recipe(
        "distill",
        "https://thinkingmachines.ai/blog/on-policy-distillation",
        (teacher_credit,),
        importance_weighted,
        by_token,
    ),
)
RECIPES = {row.name: row for row in _TABLE}

OWN = (
    "turn_weights",
    "negative_weight",
    "filter_groups",
    "refill",
    "spare_rounds",
    "reward_clip",
    "epochs",
    "kl_budget",
    "ref_kl_budget",
    "reset_every",
    "reference_decay",
    *TARGETS,
)
"""Settings of a recipe that belong to none of its parts."""


def recipe(name: str, /, **settings: Any) -> Recipe:
    """The named recipe, with options of its parts set: `recipe("grpo", clip_high=0.28,
    aggregate="token")`, or `recipe("grpo", surrogate={"name": "cispo", "clip_high": 3.0})`.

    `path/to/file.py:mine` names a recipe in a file of one's own.

    An option of a part in `ADDABLE` adds that part: `recipe("grpo", kl_coef=0.01)`. The KL
    coefficient is 0 in most rows, so no reference model is held unless asked for (GRPO's paper uses
    0.04). `entropy_target` adds the entropy bonus, whose coefficient then starts from 0 unless it
    is set as well.

    Raises:
        ConfigError: there is no such recipe or setting (the message names the nearest one), or a
            value is out of range.
    """
    found = _from_file(name) if ".py:" in f"{name}:" else entry(name, RECIPES, "recipe")
    typed = dict[str, Any]()
    for place in [place for place in PLACES if place in settings]:
        found, named = choose_parts(found, place, settings.pop(place))
        if twice := named.keys() & settings.keys():
            raise ConfigError(f"{min(twice)} is set twice: in {place} and beside it; keep one")
        typed |= named
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
    if "teacher" in settings:
        found = replace(found, teacher=_teacher(found, settings.pop("teacher")))
    for key in settings.keys() - found.options.keys() - set(OWN):
        raise ConfigError(_no_setting(key, found))
    if "spare_rounds" in settings and not settings.get("refill", found.refill):
        raise ConfigError(
            f"spare_rounds={as_toml(settings['spare_rounds'])} says how long refill keeps a group,"
            f" and recipe {name} does not refill: set refill=true, or leave spare_rounds out"
        )
    found = found.with_options(settings)
    try_on_made_up(found, typed | settings)
    return found


def _from_file(name: str) -> Recipe:
    """The recipe of that name in a file."""
    file, _, attribute = name.rpartition(":") if ".py:" in name else (name, "", "")
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
        raise ConfigError(f"whiten={as_toml(wanted)} must be true or false")
    credit = tuple(step for step in found.credit if name_of(step) != "whiten")
    return replace(found, credit=(*credit, whiten) if wanted else credit)


def _critic(found: Recipe, row: Mapping[str, Any]) -> CriticSettings:
    """The recipe's settings of its critic, with these in their place."""
    if not isinstance(row, Mapping):
        raise ConfigError(f"critic={as_toml(row)} must be a table, as in critic = {{warmup = 5}}")
    if "critic" not in found.needs:
        having = ", ".join(other.name for other in RECIPES.values() if "critic" in other.needs)
        raise ConfigError(
            f"recipe {found.name} has no critic: leave critic={as_toml(row)} out, or use one of"
            f" {having}"
        )
    return validated(
        CriticSettings, found.critic.model_dump() | dict(row), f"critic of recipe {found.name}"
    )


def _teacher(found: Recipe, row: Mapping[str, Any]) -> TeacherSettings:
    """The recipe's settings of its teacher, with these in their place."""
    if not isinstance(row, Mapping):
        raise ConfigError(
            f'teacher={as_toml(row)} must be a table, as in teacher = {{model = "…"}}'
        )
    if not found.needs & TAUGHT:
        raise ConfigError(
            f"recipe {found.name} reads no teacher: leave teacher={as_toml(row)} out, use recipe"
            " distill, or set teacher_coef or gkd_coef"
        )
    return validated(
        TeacherSettings, found.teacher.model_dump() | dict(row), f"teacher of recipe {found.name}"
    )


def _no_setting(key: str, found: Recipe) -> str:
    """Why a recipe does not take a setting."""
    addable = [name for parts in ADDABLE.values() for part in parts for name in options(part)]
    known = dict.fromkeys((*found.options, *addable, *OWN, *PLACES, "whiten", "critic", "teacher"))
    others = [row.name for row in RECIPES.values() if key in row.options]
    hint = peer_hint(key) or f"did you mean {nearest(key, known)!r}?"
    if others:
        hint = f"it belongs to {', '.join(others)}"
    elif key in TrainConfig.model_fields:
        hint = f"it stands outside of loss: {key} = …"
    return f"recipe {found.name} has no setting {key!r}: {hint} (known: {', '.join(known)})"

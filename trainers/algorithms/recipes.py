"""Named algorithms, each one row of data; the one place where a string becomes functions."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

from agentrl.errors import ConfigError
from agentrl.settings import as_toml, list_names, nearest
from agentrl.trainers.algorithms.advantages import (
    dr_grpo,
    gdpo,
    grpo,
    maxrl,
    mgpo,
    opo,
    over_groups,
    pass_at_k,
    reinforce,
    remax,
    rloo,
)
from agentrl.trainers.algorithms.corrections import (
    clip_cov,
    decay_stale,
    drop_off_policy_negatives,
    drop_overlong,
    drop_stale,
    masked_is,
    reject_off_policy,
    select_forks,
    select_kl_cov,
    train_high_entropy,
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
from agentrl.trainers.algorithms.distillation import TeacherSettings, gkd, teacher_credit
from agentrl.trainers.algorithms.losses import (
    by_constant,
    by_episode,
    by_episode_sum,
    by_token,
    ppo_clip,
)
from agentrl.trainers.algorithms.parts import Part, check_loss
from agentrl.trainers.algorithms.recipe import LISTS, PLACES, SETTINGS, TAUGHT, Recipe
from agentrl.trainers.algorithms.regularisers import (
    anchor_kl,
    entropy_bonus,
    imitate,
    kl_cov,
    kl_penalty,
    load_balance,
    simko,
)
from agentrl.trainers.algorithms.surrogates import (
    cispo,
    dppo_kl,
    dppo_topk_kl,
    dppo_topk_tv,
    dppo_tv,
    gmpo,
    gspo,
    gspo_token,
    importance_weighted,
    policy_gradient,
    ppo_dual_clip,
    sapo,
    topr,
    topr_token,
    vespo,
)
from agentrl.trainers.config import CriticSettings, TrainConfig
from agentrl.trainers.peers import peer_hint
from agentrl.userfiles import load_file

Row = TypeVar("Row")

ARXIV = "https://arxiv.org/abs"

_TABLE = (
    # One advantage for all tokens of an episode.
    Recipe("reinforce", f"{ARXIV}/2402.14740", (reinforce,), importance_weighted, by_episode_sum),
    Recipe("rloo", f"{ARXIV}/2402.14740", (over_groups(rloo),), ppo_clip, by_episode_sum),
    Recipe("remax", f"{ARXIV}/2310.10505", (remax,), importance_weighted, by_episode_sum),
    Recipe(
        "opo",
        f"{ARXIV}/2505.23585",
        (opo,),
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
        ppo_clip.changed(clip_high=0.28),
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
        ppo_clip.changed(clip_high=0.4),
        by_token,
        regularisers=(kl_penalty.changed(kl_coef=1e-3),),
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
        regularisers=(anchor_kl.changed(anchor_kl_coef=1.0),),
        kl_target=0.01,
    ),
    Recipe(
        "vapo",
        f"{ARXIV}/2504.05118",
        (length_adaptive_gae,),
        ppo_clip.changed(clip_high=0.28),
        by_token,
        regularisers=(imitate.changed(imitate_coef=0.1),),
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

ADDABLE: dict[str, tuple[Part, ...]] = {
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
"""Parts that any recipe takes on, at the end of their place, when one of their options is set."""


def _by_name(*parts: Part) -> dict[str, Part]:
    return {part.label: part for part in parts}


AGGREGATES = _by_name(by_token, by_episode, by_episode_sum, by_constant)
SURROGATES = _by_name(
    *(policy_gradient, importance_weighted, ppo_clip, ppo_dual_clip, cispo, sapo, topr_token),
    *(dppo_tv, dppo_kl, dppo_topk_tv, dppo_topk_kl, gspo, gspo_token, gmpo, topr, vespo, simko),
)
PARTS: dict[str, dict[str, Part]] = {
    "before": _by_name(*ADDABLE["before"]),
    "credit": _by_name(
        *map(over_groups, (grpo, dr_grpo, rloo, maxrl, mgpo, pass_at_k)),
        *(reinforce, remax, opo, gdpo, optimal_baseline),
        *(reward_to_go, gae, length_adaptive_gae, turn_gae, vtrace, turn_level, gigpo),
        *(whiten, *ADDABLE["credit"]),
    ),
    "surrogate": SURROGATES,
    "aggregate": AGGREGATES,
    "regularisers": _by_name(*ADDABLE["regularisers"], anchor_kl, kl_cov),
    "corrections": _by_name(*ADDABLE["corrections"], select_kl_cov, select_forks),
}
"""Place of a recipe -> name -> part: what settings can name."""


def recipe(name: str, /, **settings: Any) -> Recipe:
    """The named recipe with settings and options of its parts: `recipe("grpo", clip_high=0.28,
    aggregate="token")`, or `recipe("grpo", surrogate={"name": "cispo", "clip_high": 3.0})`.

    `path/to/file.py:mine` names a recipe in a file of your own.

    An option of a part in `ADDABLE` adds that part: `recipe("grpo", kl_coef=0.01)`. The KL
    coefficient is 0 in most rows, so no reference model is held unless asked for (GRPO's paper uses
    0.04). `entropy_target` adds the entropy bonus, with a coefficient that starts from 0 unless it
    is set as well.

    Raises:
        ConfigError: a recipe or setting does not exist, or a value is out of range; `setting` names
            it.
    """
    row = _from_file(name) if ".py:" in f"{name}:" else _find(name, RECIPES, "recipe", "recipe")
    named = set(settings)
    for place in PLACES:
        if place not in settings:
            continue
        row, options = _choose_parts(row, place, settings.pop(place))
        for option in options & settings.keys():
            raise ConfigError(
                f"loss.{option} is set twice: in loss.{place} and outside of it; keep one",
                setting=f"loss.{option}",
            )
        named |= options
    if "whiten" in settings:
        row = _set_whiten(row, settings.pop("whiten"))
    if settings.get("entropy_target", math.inf) != math.inf and "entropy_coef" not in row.options:
        settings.setdefault("entropy_coef", 0.0)
    row = _add_parts(row, settings)
    tables: dict[str, Any] = {}
    if "critic" in settings:
        tables["critic"] = _set_critic(row, settings.pop("critic"))
    if "teacher" in settings:
        tables["teacher"] = _set_teacher(row, settings.pop("teacher"))
    for setting in settings.keys() - row.options.keys() - set(SETTINGS):
        raise _unknown_setting(setting, row)
    row = replace(row, **tables).changed(settings)
    _check_parts(row)
    _check_idle_settings(row, named | set(settings))
    return row


def _from_file(name: str) -> Recipe:
    """The recipe of that name in a file."""
    file, _, attribute = name.rpartition(":") if ".py:" in name else (name, "", "")
    module = vars(load_file(Path(file), "recipe"))
    row = module.get(attribute)
    if not isinstance(row, Recipe):
        known = [key for key, value in module.items() if isinstance(value, Recipe)]
        raise ConfigError(
            f"{file} has no recipe named {attribute!r}: recipes in it are"
            f" {', '.join(known) or 'none'}",
            setting="recipe",
        )
    return row


def _find(name: Any, table: Mapping[str, Row], what: str, setting: str) -> Row:
    """The entry of that name."""
    if isinstance(name, str) and name in table:
        return table[name]
    near = nearest(str(name), table, 0.0)
    raise ConfigError(
        f"there is no {what} {name!r}; did you mean {near!r}? (known: {', '.join(table)})",
        setting=setting,
    )


# --- settings that name parts: surrogate = {name = "ppo_clip", clip_high = 0.28}


def _choose_parts(row: Recipe, place: str, value: Any) -> tuple[Recipe, set[str]]:
    """The recipe with other parts at a place, and the options that were named.

    A part is its name, or a table of its name and options. Of a part that the recipe already has,
    options that are not named stay as they are; of others they are the part's defaults.
    """
    own = {part.label: part for part in row.parts_at(place)}
    values = value if place in LISTS and isinstance(value, list | tuple) else [value]
    parts = dict[str, Part]()
    named = set[str]()
    for entry in values:
        part, options = _choose_part(place, own, entry)
        if part.label in parts:
            raise ConfigError(
                f"loss.{place} names {part.label} twice: keep one", setting=f"loss.{place}"
            )
        parts[part.label] = part
        named |= options
    chosen = tuple(parts.values())
    changes: dict[str, Any] = {place: chosen if place in LISTS else chosen[0]}
    return replace(row, **changes), named


def _choose_part(place: str, own: dict[str, Part], entry: Any) -> tuple[Part, set[str]]:
    """One part, and those of its options that were named."""
    table = PARTS[place] | own
    options = {"name": entry} if isinstance(entry, str) else entry
    if not isinstance(options, Mapping):
        raise ConfigError(
            f"loss.{place}={as_toml(entry)} must be a name or a table, as in {place} ="
            f" {{name = {next(iter(own or table))!r}}}",
            setting=f"loss.{place}",
        )
    options = dict(options)
    if "name" not in options and len(own) != 1:
        raise ConfigError(
            f"loss.{place}={as_toml(options)} has no name: add name = … (known:"
            f" {', '.join(table)})",
            setting=f"loss.{place}.name",
        )
    part = _find(options.pop("name", next(iter(own), "")), table, place, f"loss.{place}")
    known = [name for name, _ in part.options]
    for name in options:
        if name not in known:
            raise _unknown_option(place, name, part)
    values = check_loss(type(part.options), dict(part.options) | options, f"loss.{place}")
    part = replace(part, options=values)
    for name, value in values:
        if name.endswith("_coef") and value == 0 and name not in options:
            raise ConfigError(
                f"loss.{place}: {part.label} changes nothing while {name} is 0: set {name} in its"
                " table",
                setting=f"loss.{place}.{name}",
            )
    return part, set(options)


def _unknown_option(place: str, name: str, part: Part) -> ConfigError:
    owners = [key for key, other in PARTS[place].items() if name in dict(other.options)]
    known = [option for option, _ in part.options]
    hint = peer_hint(name)
    if owners:
        hint = f"it belongs to {list_names(owners)}"
    elif hint is None:
        hint = f"did you mean {nearest(name, known, 0.0)!r}?" if known else "it has no options"
    return ConfigError(
        f"loss.{place}.{name}: {part.label} has no such option: {hint}",
        setting=f"loss.{place}.{name}",
    )


# --- settings that stand for more than one value


def _set_whiten(row: Recipe, wanted: Any) -> Recipe:
    """The recipe with advantages whitened over the round, or not."""
    if not isinstance(wanted, bool):
        raise ConfigError(
            f"loss.whiten={as_toml(wanted)} must be true or false", setting="loss.whiten"
        )
    credit = tuple(step for step in row.credit if step.name != whiten.name)
    return replace(row, credit=(*credit, whiten) if wanted else credit)


def _add_parts(row: Recipe, settings: Mapping[str, Any]) -> Recipe:
    """The recipe with the parts that some of the settings are options of."""
    present = row.options.keys()
    for place, parts in ADDABLE.items():
        added = [part for part in parts if settings.keys() & dict(part.options).keys() - present]
        if added:
            changes: dict[str, Any] = {place: (*getattr(row, place), *added)}
            row = replace(row, **changes)
    return row


def _set_critic(row: Recipe, table: Any) -> CriticSettings:
    _check_table("critic", table, "{warmup = 5}")
    if "critic" not in row.needs:
        owners = [other.name for other in RECIPES.values() if "critic" in other.needs]
        raise ConfigError(
            f"loss.critic: recipe {row.name} has no critic: leave it out, or use"
            f" {list_names(owners)}",
            setting="loss.critic",
        )
    return check_loss(CriticSettings, dict(row.critic) | table, "loss.critic")


def _set_teacher(row: Recipe, table: Any) -> TeacherSettings:
    _check_table("teacher", table, '{model = "…"}')
    if not row.needs & TAUGHT:
        raise ConfigError(
            f"loss.teacher: recipe {row.name} reads no teacher: leave it out, use recipe distill,"
            " or set teacher_coef or gkd_coef",
            setting="loss.teacher",
        )
    return check_loss(TeacherSettings, dict(row.teacher) | table, "loss.teacher")


def _check_table(name: str, table: Any, example: str) -> None:
    if not isinstance(table, Mapping):
        raise ConfigError(
            f"loss.{name}={as_toml(table)} must be a table, as in {name} = {example}",
            setting=f"loss.{name}",
        )


def _unknown_setting(name: str, row: Recipe) -> ConfigError:
    addable = [option for parts in ADDABLE.values() for part in parts for option, _ in part.options]
    tables = ("whiten", "critic", "teacher")
    known = dict.fromkeys((*row.options, *addable, *SETTINGS, *PLACES, *tables))
    owners = [other.name for other in RECIPES.values() if name in other.options]
    hint = peer_hint(name) or f"did you mean {nearest(name, known, 0.0)!r}?"
    if owners:
        hint = f"it belongs to {', '.join(owners)}"
    elif name in TrainConfig.model_fields:
        hint = f"it stands outside of loss: {name} = …"
    return ConfigError(
        f"loss.{name}: recipe {row.name} has no such setting: {hint} (known: {', '.join(known)})",
        setting=f"loss.{name}",
    )


# --- parts and settings that do not fit together


def _check_parts(row: Recipe) -> None:
    """Refuse parts that expect what no other part writes."""
    if not row.credit or "advantages" in row.credit[0].expects:
        credit = ", ".join(part.label for part in row.credit) or "nothing"
        raise ConfigError(
            f"loss.credit: {credit} leaves episodes without advantages: begin with a part that"
            " fills them, as grpo does",
            setting="loss.credit",
        )
    selecting = [part for part in row.corrections if "selection" in part.writes]
    for place, part in row.parts():
        if "selection" in part.expects and not selecting:
            fix = "select_kl_cov" if part.name == kl_cov.name else "select_forks"
            raise ConfigError(
                f"loss.{place}: {part.label} needs selected tokens: add {fix} to the corrections",
                setting=f"loss.{place}",
            )
    if len(selecting) > 1:
        raise ConfigError(
            f"loss.corrections: {list_names([part.label for part in selecting], 'and')} both"
            " select tokens, and there is one selection: keep one",
            setting="loss.corrections",
        )


def _check_idle_settings(row: Recipe, named: set[str]) -> None:
    """Refuse settings that change nothing in this recipe.

    Args:
        named: the settings and options that were given.
    """
    idle: dict[str, str] = {}
    for part in (*row.before, *row.regularisers):
        options = dict(part.options)
        given = [name for name in options if name in named]
        for name, value in options.items():
            if given and name.endswith("_coef") and value == 0 and name not in named:
                idle[given[0]] = f"while {name} is 0: set {name} as well"
    if "parts" in row.needs:
        unread = [name for name in ("turn_weights", "reward_clip") if name in named]
        for name in (*unread, *(next(iter(dict(part.options)), part.label) for part in row.before)):
            idle[name] = f"in recipe {row.name}, which reads only the parts of a score"
    if "reference" not in row.needs:
        if row.reference_decay < 1:
            idle["reference_decay"] = "without a reference: set kl_coef as well"
        if row.ref_kl_budget < math.inf:
            idle["ref_kl_budget"] = "without a reference: set kl_reward_coef or kl_coef as well"
    if "spare_rounds" in named and not row.refill:
        idle["spare_rounds"] = f"while recipe {row.name} does not refill: set refill=true as well"
    row.rules()  # refuses targets that nothing follows
    for name, reason in idle.items():
        raise ConfigError(f"loss.{name} changes nothing {reason}", setting=f"loss.{name}")

"""Named algorithms: the one place where a string becomes functions. Each row of the table is data."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, fields, replace
from difflib import get_close_matches
from functools import cached_property, partial
from itertools import chain
from pathlib import Path
from typing import Any, TypeVar

import torch

from agentrl.errors import ConfigError
from agentrl.registry import load_file
from agentrl.trainers.algorithms.advantages import (
    dr_grpo,
    gdpo,
    group_advantages,
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
    reward_to_go,
    whiten,
)
from agentrl.trainers.algorithms.losses import (
    PolicyLoss,
    by_constant,
    by_episode,
    by_episode_sum,
    by_token,
    ppo_clip,
)
from agentrl.trainers.algorithms.made_up import try_on_made_up
from agentrl.trainers.algorithms.parts import (
    Aggregate,
    Lifted,
    Need,
    Step,
    Term,
    needs_of,
    options,
    with_options,
)
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
from agentrl.trainers.algorithms.sequence_surrogates import gmpo, gspo, topr, vespo
from agentrl.trainers.algorithms.surrogates import cispo, dppo_tv, importance_weighted, sapo
from agentrl.trainers.algorithms.targets import TARGETS, Rule, rules_of
from agentrl.trainers.batch import TokenBatch, groups_with_signal
from agentrl.trainers.config import CriticSettings, validated

ARXIV = "https://arxiv.org/abs"
AGGREGATES: dict[str, Aggregate] = {
    "token": by_token,
    "episode": by_episode,
    "episode_sum": by_episode_sum,
    "constant": by_constant,
}


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


@dataclass(frozen=True)
class Recipe:
    """An algorithm: how outcomes become advantages, and how advantages become a loss.

    Attributes:
        paper: where the algorithm is defined.
        credit: batch -> batch, in order; the last one has filled the advantages. Once per round,
            over all groups.
        before: batch -> batch, ahead of `credit`: what changes the rewards themselves.
        surrogate: per-token policy loss.
        aggregate: per-token losses -> scalar.
        regularisers: further per-token losses.
        corrections: batch -> batch, in order: weights and selections. Once per optimizer step,
            before micro-batches.
        turn_weights: weights of named process rewards (`Score.turns`); a name that is missing
            counts 0.
        negative_weight: negative advantages are multiplied by it; 1 is the algorithm as its paper
            has it. Less makes large learning rates safe, at a price: the baseline no longer
            cancels, so the estimator is biased towards repeating what worked (at 0 it is
            fine-tuning on the better half of every group).
        filter_groups: groups without signal do not train at all, see `groups_with_signal`; metrics
            still count them.
        refill: groups without signal are replaced by groups of further tasks (DAPO's dynamic
            sampling); metrics of rollouts are of the round's own tasks alone, so choosing does not
            colour them.
        epochs: how often a round's episodes are gone through.
        kl_budget: nats per token that the policy may move in one round; what is left of the round
            is then skipped.
        kl_target: nats per token that a round should move the policy by: `anchor_kl_coef` follows
            (`AdaptiveKL`), and the regularisers must have it; inf: it stays as it is.
        entropy_target: entropy in nats per token that the policy should keep: `entropy_coef`
            follows (`AdaptiveEntropy`), and the regularisers must have it; inf: it stays as it is.
        reset_every: rounds after which the reference becomes the present policy and the optimizer
            forgets (ProRL); 0: never.
        critic: of a recipe whose credit reads values; elsewhere nothing reads it.
    """

    name: str
    paper: str
    credit: tuple[Step, ...]
    surrogate: Term
    aggregate: Aggregate
    regularisers: tuple[Term, ...] = ()
    corrections: tuple[Step, ...] = ()
    before: tuple[Step, ...] = ()
    turn_weights: Mapping[str, float] = field(default_factory=dict)
    negative_weight: float = 1.0
    filter_groups: bool = False
    refill: bool = False
    epochs: int = 1
    kl_budget: float = math.inf
    kl_target: float = math.inf
    entropy_target: float = math.inf
    reset_every: int = 0
    critic: CriticSettings = CriticSettings()  # noqa: RUF009 - it is frozen

    def __post_init__(self) -> None:
        if not (_is_number(self.negative_weight) and 0 <= self.negative_weight <= 1):
            raise ConfigError(f"negative_weight={self.negative_weight!r} must be from 0 to 1")
        for name in ("filter_groups", "refill"):
            if not isinstance(getattr(self, name), bool):
                raise ConfigError(f"{name}={getattr(self, name)!r} must be true or false")
        for name, least in (("epochs", 1), ("reset_every", 0)):
            value = getattr(self, name)
            if type(value) is not int or value < least:
                raise ConfigError(f"{name}={value!r} must be a whole number >= {least}")
        for name in ("kl_budget", *TARGETS):
            value = getattr(self, name)
            if not (_is_number(value) and value > 0):
                raise ConfigError(f"{name}={value!r} must be a positive number of nats per token")
        self.rules()  # a target that has nothing to move says so here
        weights = self.turn_weights
        if not (
            isinstance(weights, Mapping)
            and all(_is_number(one) and abs(one) < math.inf for one in weights.values())
        ):
            raise ConfigError(
                f"turn_weights={weights!r} must be a table of numbers by name, as in {{format ="
                " 0.1}"
            )

    @cached_property
    def loss(self) -> PolicyLoss:
        """Policy output and batch -> scalar and metrics."""
        return PolicyLoss(self.surrogate, self.aggregate, self.regularisers)

    @cached_property
    def needs(self) -> frozenset[Need]:
        """What a run must compute for the parts."""
        return frozenset(chain.from_iterable(needs_of(part) for part in self._parts()))

    @property
    def options(self) -> dict[str, Any]:
        """Name -> value of every option of every part."""
        return {name: value for part in self._parts() for name, value in options(part).items()}

    def rules(self) -> dict[str, Rule]:
        """Option -> the rule by which it moves after a round, with its value now; empty where
        nothing adapts.
        """
        return rules_of(self.options, {name: getattr(self, name) for name in TARGETS})

    def moved(self, coefficients: Mapping[str, float]) -> Recipe:
        """The recipe with these values of the options that adapt; other options are left alone."""
        return _configured(
            self, {name: coefficients[name] for name in self.rules() if name in coefficients}
        )

    def refuse_group_size(self, group_size: int) -> None:
        """Raise ConfigError where groups of this size cannot teach this recipe anything."""
        if group_size == 1 and "group" in self.needs:
            raise ConfigError(
                f"group_size=1 gives every episode advantage 0 in recipe {self.name}: use at"
                " least 2"
            )
        if group_size <= (best_of := self.options.get("pass_k", 0)):
            raise ConfigError(
                f"pass_k={best_of} needs groups of more than {best_of}, not group_size={group_size}"
            )
        if group_size == 1 and self.refill:
            raise ConfigError(
                "refill=true looks for groups whose rewards differ, and group_size=1 has none: use"
                " at least 2"
            )

    def advantage(self, batch: TokenBatch) -> TokenBatch:
        """The batch with its advantages."""
        for step in (*self.before, *self.credit):
            batch = step(batch)
        if self.filter_groups or self.refill:
            batch = groups_with_signal(batch)
        weighed_BT = batch.advantages_BT * self.negative_weight
        return replace(
            batch,
            advantages_BT=torch.where(batch.advantages_BT < 0, weighed_BT, batch.advantages_BT),
        )

    def correct(self, batch: TokenBatch) -> TokenBatch:
        """The batch of one optimizer step with its weights and selections."""
        for step in self.corrections:
            batch = step(batch)
        return batch

    def _parts(self) -> tuple[Callable[..., Any], ...]:
        return (
            *self.before,
            *self.credit,
            self.surrogate,
            self.aggregate,
            *self.regularisers,
            *self.corrections,
        )


over_groups = partial(Lifted, group_advantages)
"""Lift a group form (`rewards_G -> advantages_G`) to a credit step."""

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
    "epochs",
    "kl_budget",
    "reset_every",
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
    if "aggregate" in settings:
        found = replace(found, aggregate=_named(settings.pop("aggregate"), AGGREGATES, "aggregate"))
    if "critic" in settings:
        found = replace(found, critic=_critic(found, settings.pop("critic")))
    if settings.get("entropy_target", math.inf) != math.inf and "entropy_coef" not in found.options:
        settings.setdefault("entropy_coef", 0.0)
    for place, parts in ADDABLE.items():
        there = set(found.options)
        extra = tuple(part for part in parts if settings.keys() & options(part).keys() - there)
        changed: dict[str, Any] = {place: (*getattr(found, place), *extra)}
        found = replace(found, **changed)
    for key in settings.keys() - found.options.keys() - set(_OWN):
        raise ConfigError(_no_setting(key, found))
    found = _configured(found, settings)
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
    known = dict.fromkeys((*found.options, *addable, *_OWN, "aggregate", "critic"))
    others = [row.name for row in RECIPES.values() if key in row.options]
    hint = (
        f"it belongs to {', '.join(others)}"
        if others
        else f"did you mean {_nearest(key, known)!r}?"
    )
    return f"recipe {found.name} has no setting {key!r}: {hint} (known: {', '.join(known)})"


def _configured(found: Recipe, settings: dict[str, Any]) -> Recipe:
    """The recipe with its own settings and the options of its parts set."""
    changed: dict[str, Any] = {}
    for one in fields(found):
        value = getattr(found, one.name)
        if one.name in ADDABLE:
            changed[one.name] = tuple(with_options(part, settings) for part in value)
        elif one.name in ("surrogate", "aggregate"):
            changed[one.name] = with_options(value, settings)
        elif one.name in settings:
            changed[one.name] = settings[one.name]
    return replace(found, **changed)


def _named(name: str, table: dict[str, Row], what: str) -> Row:
    """The entry of that name."""
    if isinstance(name, str) and name in table:
        return table[name]
    raise ConfigError(
        f"there is no {what} {name!r}; did you mean {_nearest(name, table)!r}? (known:"
        f" {', '.join(table)})"
    )


def _nearest(name: str, known: Iterable[str]) -> str:
    return get_close_matches(str(name).lower(), known, n=1, cutoff=0.0)[0]

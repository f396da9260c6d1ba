"""Named algorithms: the one place where a string becomes functions. Each row of the table is data."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, fields, replace
from difflib import get_close_matches
from functools import cached_property, partial
from itertools import chain
from typing import Any, TypeVar

import torch

from agentrl.errors import ConfigError
from agentrl.trainers.advantages import dr_grpo, group_advantages, grpo
from agentrl.trainers.batch import TokenBatch, groups_with_signal
from agentrl.trainers.config import CriticSettings, validated
from agentrl.trainers.credit import gae
from agentrl.trainers.losses import PolicyLoss, by_constant, by_episode, by_episode_sum, by_token
from agentrl.trainers.parts import Aggregate, Lifted, Need, Step, Term, needs_of, options, with_options
from agentrl.trainers.regularisers import entropy_bonus, kl_penalty
from agentrl.trainers.surrogates import ppo_clip

AGGREGATES: dict[str, Aggregate] = {
    "token": by_token,
    "episode": by_episode,
    "episode_sum": by_episode_sum,
    "constant": by_constant,
}


@dataclass(frozen=True)
class Recipe:
    """An algorithm: how outcomes become advantages, and how advantages become a loss.

    Attributes:
        paper: where the algorithm is defined.
        credit: batch -> batch, in order; the last one has filled the advantages. Once per round, over all groups.
        surrogate: per-token policy loss.
        aggregate: per-token losses -> scalar.
        regularisers: further per-token losses.
        corrections: batch -> batch, in order: weights and selections. Once per optimizer step, before micro-batches.
        negative_weight: negative advantages are multiplied by it; 1 is the algorithm as its paper has it. Less makes
            large learning rates safe, at a price: the baseline no longer cancels, so the estimator is biased towards
            repeating what worked (at 0 it is fine-tuning on the better half of every group).
        filter_groups: groups without signal do not train at all, see `groups_with_signal`; metrics still count them.
        refill: groups without signal are replaced by groups of further tasks (DAPO's dynamic sampling); what metrics
            say of reward is of the round's own tasks alone, so choosing does not colour it.
        epochs: how often a round's episodes are gone through.
        kl_budget: nats per token that the policy may move in one round; what is left of the round is then skipped.
        reset_every: rounds after which the reference becomes the present policy and the optimizer forgets (ProRL);
            0: never.
        critic: of a recipe whose credit reads values; elsewhere nothing reads it.
    """

    name: str
    paper: str
    credit: tuple[Step, ...]
    surrogate: Term
    aggregate: Aggregate
    regularisers: tuple[Term, ...] = ()
    corrections: tuple[Step, ...] = ()
    negative_weight: float = 1.0
    filter_groups: bool = False
    refill: bool = False
    epochs: int = 1
    kl_budget: float = math.inf
    reset_every: int = 0
    critic: CriticSettings = CriticSettings()  # noqa: RUF009 - it is frozen

    def __post_init__(self) -> None:
        if not 0 <= self.negative_weight <= 1:
            raise ConfigError(f"negative_weight={self.negative_weight} must be from 0 to 1")
        for name in ("filter_groups", "refill"):
            if not isinstance(getattr(self, name), bool):
                raise ConfigError(f"{name}={getattr(self, name)!r} must be true or false")
        for name, least in (("epochs", 1), ("reset_every", 0)):
            value = getattr(self, name)
            if type(value) is not int or value < least:
                raise ConfigError(f"{name}={value!r} must be a whole number >= {least}")
        if not self.kl_budget > 0:
            raise ConfigError(f"kl_budget={self.kl_budget} must be a positive number of nats per token")

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

    def advantage(self, batch: TokenBatch) -> TokenBatch:
        """The batch with its advantages."""
        for step in self.credit:
            batch = step(batch)
        if self.filter_groups or self.refill:
            batch = groups_with_signal(batch)
        weighed_BT = batch.advantages_BT * self.negative_weight
        return replace(batch, advantages_BT=torch.where(batch.advantages_BT < 0, weighed_BT, batch.advantages_BT))

    def correct(self, batch: TokenBatch) -> TokenBatch:
        """The batch of one optimizer step with its weights and selections."""
        for step in self.corrections:
            batch = step(batch)
        return batch

    def _parts(self) -> tuple[Callable[..., Any], ...]:
        return (*self.credit, self.surrogate, self.aggregate, *self.regularisers, *self.corrections)


over_groups = partial(Lifted, group_advantages)
"""Lift a group form (`rewards_G -> advantages_G`) to a credit step."""

_TABLE = (
    Recipe("grpo", "https://arxiv.org/abs/2402.03300", (over_groups(grpo),), ppo_clip, by_episode),
    Recipe("dr_grpo", "https://arxiv.org/abs/2503.20783", (over_groups(dr_grpo),), ppo_clip, by_constant),
    Recipe("ppo", "https://arxiv.org/abs/1707.06347", (gae,), ppo_clip, by_token),
)
RECIPES = {row.name: row for row in _TABLE}

ADDABLE: dict[str, tuple[Step | Term, ...]] = {
    "credit": (),
    "regularisers": (kl_penalty, entropy_bonus),
    "corrections": (),
}
"""Parts that any recipe takes on when a setting names one of their options."""

_OWN = ("negative_weight", "filter_groups", "refill", "epochs", "kl_budget", "reset_every")
Row = TypeVar("Row")


def recipe(name: str, **settings: Any) -> Recipe:
    """The named recipe, with options of its parts set: `recipe("grpo", clip_high=0.28, aggregate="token")`.

    An option of a part in `ADDABLE` adds that part: `recipe("grpo", kl_coef=0.01)`. The KL coefficient is 0 in most
    rows, so no reference model is held unless asked for (GRPO's paper uses 0.04).

    Raises:
        ConfigError: there is no such recipe or setting (the message names the nearest one), or a value is out of range.
    """
    found = _named(name, RECIPES, "recipe")
    if "aggregate" in settings:
        found = replace(found, aggregate=_named(settings.pop("aggregate"), AGGREGATES, "aggregate"))
    if "critic" in settings:
        found = replace(found, critic=_critic(found, settings.pop("critic")))
    found = replace(found, **{key: settings.pop(key) for key in _OWN if key in settings})
    for place, parts in ADDABLE.items():
        there = set(found.options)
        extra = tuple(part for part in parts if settings.keys() & options(part).keys() - there)
        changed: dict[str, Any] = {place: (*getattr(found, place), *extra)}
        found = replace(found, **changed)
    for key in settings.keys() - found.options.keys():
        raise ConfigError(_no_setting(key, found))
    return _configured(found, settings)


def _critic(found: Recipe, row: Mapping[str, Any]) -> CriticSettings:
    """The recipe's settings of its critic, with these in their place."""
    if "critic" not in found.needs:
        having = ", ".join(other.name for other in RECIPES.values() if "critic" in other.needs)
        raise ConfigError(f"recipe {found.name} has no critic: leave critic={dict(row)} out, or use one of {having}")
    return validated(CriticSettings, found.critic.model_dump() | dict(row), f"critic of recipe {found.name}")


def _no_setting(key: str, found: Recipe) -> str:
    """Why a recipe does not take a setting."""
    addable = [name for parts in ADDABLE.values() for part in parts for name in options(part)]
    known = dict.fromkeys((*found.options, *addable, *_OWN, "aggregate", "critic"))
    others = [row.name for row in RECIPES.values() if key in row.options]
    hint = f"it belongs to {', '.join(others)}" if others else f"did you mean {_nearest(key, known)!r}?"
    return f"recipe {found.name} has no setting {key!r}: {hint} (known: {', '.join(known)})"


def _configured(found: Recipe, settings: dict[str, Any]) -> Recipe:
    """The recipe with the options of its parts set."""
    changed: dict[str, Any] = {}
    for one in fields(found):
        value = getattr(found, one.name)
        if one.name in ("credit", "regularisers", "corrections"):
            changed[one.name] = tuple(with_options(part, settings) for part in value)
        elif one.name in ("surrogate", "aggregate"):
            changed[one.name] = with_options(value, settings)
    return replace(found, **changed)


def _named(name: str, table: dict[str, Row], what: str) -> Row:
    """The entry of that name."""
    if name in table:
        return table[name]
    raise ConfigError(
        f"there is no {what} {name!r}; did you mean {_nearest(name, table)!r}? (known: {', '.join(table)})"
    )


def _nearest(name: str, known: Iterable[str]) -> str:
    return get_close_matches(str(name), known, n=1, cutoff=0.0)[0]

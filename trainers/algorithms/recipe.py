"""What an algorithm is: a choice of pure functions for credit, loss and corrections."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields, replace
from functools import cached_property, partial
from itertools import chain
from typing import Any

import torch

from agentrl.errors import ConfigError
from agentrl.trainers.algorithms.advantages import group_advantages
from agentrl.trainers.algorithms.filtering import filtered
from agentrl.trainers.algorithms.losses import PolicyLoss
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
from agentrl.trainers.algorithms.targets import TARGETS, Rule, rules_of
from agentrl.trainers.batch import TokenBatch
from agentrl.trainers.config import CriticSettings
from agentrl.trainers.rewards import Rewards

LISTS = ("before", "credit", "regularisers", "corrections")
"""Fields of a recipe that hold any number of parts."""

over_groups = partial(Lifted, group_advantages)
"""Lift a group form (`rewards_G -> advantages_G`) to a credit step."""


_POSITIVE = dict.fromkeys(("kl_budget", *TARGETS), " of nats per token") | {"reward_clip": ""}
"""Fields that must be above 0, and the end of the sentence that says so."""


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
        filter_groups: groups without signal (`rewards`) do not train at all, see `filtered`;
            metrics still count them.
        refill: groups without signal are replaced by groups of further tasks (DAPO's dynamic
            sampling); metrics of rollouts are of the round's own tasks alone, so choosing does not
            colour them.
        spare_rounds: rounds for which a group with signal that found no place is kept; it then is
            so many versions old, and its tokens keep the log-probabilities of their sampler.
        reward_clip: outcomes are held to [-reward_clip, reward_clip] before anything reads them to
            train; inf: they are as they are. Metrics show them unclipped.
        epochs: how often a round's episodes are gone through.
        kl_budget: nats per token that the policy may move in one round, measured on tokens of the
            present version; what is left of the round is then skipped.
        kl_target: nats per token that a round should move the policy by: `anchor_kl_coef` follows
            (`AdaptiveKL`), and the regularisers must have it; inf: it stays as it is.
        entropy_target: entropy in nats per token that the policy should keep: `entropy_coef`
            follows (`AdaptiveEntropy`), and the regularisers must have it; inf: it stays as it is.
        reset_every: rounds after which the reference becomes the present policy and the optimizer
            forgets (ProRL); 0: never.
        reference_decay: after every round the reference becomes reference_decay of itself and the
            rest of the present policy, a moving average; 1: it stays.
        critic: of a recipe whose credit reads values; elsewhere nothing reads it.
        one_step: the paper is strictly on-policy, so a round is one optimizer step and more are
            refused; no setting.
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
    spare_rounds: int = 1
    reward_clip: float = math.inf
    epochs: int = 1
    kl_budget: float = math.inf
    kl_target: float = math.inf
    entropy_target: float = math.inf
    reset_every: int = 0
    reference_decay: float = 1.0
    critic: CriticSettings = CriticSettings()  # noqa: RUF009 - it is frozen
    one_step: bool = False

    def __post_init__(self) -> None:
        for name in ("negative_weight", "reference_decay"):
            value = getattr(self, name)
            if not (_is_number(value) and 0 <= value <= 1):
                raise ConfigError(f"{name}={value!r} must be from 0 to 1")
        for name in ("filter_groups", "refill"):
            if not isinstance(getattr(self, name), bool):
                raise ConfigError(f"{name}={getattr(self, name)!r} must be true or false")
        for name, least in (("epochs", 1), ("reset_every", 0), ("spare_rounds", 0)):
            value = getattr(self, name)
            if type(value) is not int or value < least:
                raise ConfigError(f"{name}={value!r} must be a whole number >= {least}")
        for name, unit in _POSITIVE.items():
            value = getattr(self, name)
            if not (_is_number(value) and value > 0):
                raise ConfigError(f"{name}={value!r} must be a positive number{unit}")
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

    @cached_property
    def rewards(self) -> Rewards:
        """Which rewards train, and by which signal is decided."""
        options = self.options
        return Rewards(
            turn_weights=self.turn_weights,
            by_turn="turns" in self.needs,
            by_part="parts" in self.needs,
            part_weights=options.get("part_weights", {}),
            clip=self.reward_clip,
            least=0.0 if "nonnegative" in self.needs else -math.inf,
            fewest=options.get("pass_k", 1) + 1,
            siblings="group" in self.needs,
        )

    @property
    def filters(self) -> bool:
        """Whether groups without signal are left out."""
        return self.filter_groups or self.refill

    @property
    def options(self) -> dict[str, Any]:
        """Name -> value of every option of every part."""
        return {name: value for part in self._parts() for name, value in options(part).items()}

    def rules(self) -> dict[str, Rule]:
        """Option -> the rule by which it moves after a round; empty where nothing adapts."""
        return rules_of(self.options, {name: getattr(self, name) for name in TARGETS})

    def moved(self, coefficients: Mapping[str, float]) -> Recipe:
        """The recipe with these values of the options that adapt; other options are left alone."""
        return self.with_options(
            {name: coefficients[name] for name in self.rules() if name in coefficients}
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

    def refuse_minibatches(self, minibatches: int) -> None:
        """Raise ConfigError where a round of so many optimizer steps is not what its paper is."""
        for name, value in (("minibatches", minibatches), ("loss.epochs", self.epochs)):
            if self.one_step and value > 1:
                raise ConfigError(
                    f"{name}={value}: recipe {self.name} is strictly on-policy, one optimizer step"
                    f" a round: set {name}=1"
                )

    def advantage(self, batch: TokenBatch) -> TokenBatch:
        """The batch with its advantages."""
        batch = filtered(batch, self._credited) if self.filters else self._credited(batch)
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

    def with_options(self, settings: Mapping[str, Any]) -> Recipe:
        """The recipe with those of the settings that are its own or options of its parts."""
        changed: dict[str, Any] = {}
        for one in fields(self):
            value = getattr(self, one.name)
            if one.name in LISTS:
                changed[one.name] = tuple(with_options(part, settings) for part in value)
            elif one.name in ("surrogate", "aggregate"):
                changed[one.name] = with_options(value, settings)
            elif one.name in settings:
                changed[one.name] = settings[one.name]
        return replace(self, **changed)

    def _credited(self, batch: TokenBatch) -> TokenBatch:
        for step in (*self.before, *self.credit):
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

"""What an algorithm is: a choice of pure functions for credit, loss and corrections."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields, replace
from functools import cached_property, partial
from itertools import chain
from typing import Any

import torch
from torch import Tensor

from agentrl.errors import ConfigError
from agentrl.records.plain import as_toml
from agentrl.trainers.algorithms.advantages import group_advantages
from agentrl.trainers.algorithms.distillation import TeacherSettings
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
from agentrl.trainers.batch import ROW_FIELDS, TokenBatch
from agentrl.trainers.config import CriticSettings
from agentrl.trainers.rewards import Rewards

LISTS = ("before", "credit", "regularisers", "corrections")
"""Fields of a recipe that hold any number of parts."""

TAUGHT = frozenset[Need]({"teacher", "teacher_top"})
"""Needs for which a run holds a teacher."""

over_groups = partial(Lifted, group_advantages)
"""Lift a group form (`rewards_G -> advantages_G`) to a credit step."""


_POSITIVE = dict.fromkeys(("kl_budget", "ref_kl_budget", *TARGETS), " of nats per token") | {
    "reward_clip": ""
}
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
        ref_kl_target: nats per token that the policy should be from its reference:
            `kl_reward_coef` or `kl_coef` follows (`AdaptiveReferenceKL`); inf: it stays as it is.
        ref_kl_budget: nats per token from the reference at which the run ends, whatever rounds are
            left: beyond it a learned reward is not to be believed.
        reset_every: rounds after which the reference becomes the present policy and the optimizer
            forgets (ProRL); 0: never.
        reference_decay: after every round the reference becomes reference_decay of itself and the
            rest of the present policy, a moving average; 1: it stays.
        critic: of a recipe whose credit reads values; elsewhere nothing reads it.
        teacher: of a recipe that reads one; elsewhere nothing reads it.
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
    ref_kl_target: float = math.inf
    ref_kl_budget: float = math.inf
    reset_every: int = 0
    reference_decay: float = 1.0
    critic: CriticSettings = CriticSettings()  # noqa: RUF009 - it is frozen
    teacher: TeacherSettings = TeacherSettings()  # noqa: RUF009 - it is frozen
    one_step: bool = False

    def __post_init__(self) -> None:
        for name in ("negative_weight", "reference_decay"):
            value = getattr(self, name)
            if not (_is_number(value) and 0 <= value <= 1):
                raise ConfigError(f"{name}={as_toml(value)} must be from 0 to 1")
        for name in ("filter_groups", "refill"):
            if not isinstance(getattr(self, name), bool):
                raise ConfigError(f"{name}={as_toml(getattr(self, name))} must be true or false")
        for name, least in (("epochs", 1), ("reset_every", 0), ("spare_rounds", 0)):
            value = getattr(self, name)
            if type(value) is not int or value < least:
                raise ConfigError(f"{name}={as_toml(value)} must be a whole number >= {least}")
        for name, unit in _POSITIVE.items():
            value = getattr(self, name)
            if not (_is_number(value) and value > 0):
                raise ConfigError(f"{name}={as_toml(value)} must be a positive number{unit}")
        self.rules()  # a target that has nothing to move says so here
        weights = self.turn_weights
        if not (
            isinstance(weights, Mapping)
            and all(_is_number(one) and abs(one) < math.inf for one in weights.values())
        ):
            raise ConfigError(
                f"turn_weights={as_toml(weights)} must be a table of numbers by name, as in"
                " {format = 0.1}"
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
            taught=bool(self.needs & TAUGHT),
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

    def refuse_no_teacher(self) -> None:
        """Raise ConfigError where the recipe reads a teacher that it cannot have, or a teacher is
        set that nothing learns from.
        """
        if self.teacher.top and "teacher_top" not in self.needs:
            raise ConfigError(
                f"teacher.top={self.teacher.top}: only gkd tells the teacher's likeliest tokens"
                " apart: set gkd_coef as well, or leave it out"
            )
        if not self.needs & TAUGHT:
            return
        if not self.teacher.model:
            raise ConfigError(
                f"recipe {self.name} learns from a teacher: set loss.teacher.model to a folder or"
                " a name on the hub"
            )
        if "teacher_top" not in self.needs and not self.options.get("teacher_coef"):
            raise ConfigError(
                "teacher_coef=0 and no gkd_coef: nothing is learnt from the teacher: set one of"
                " them above 0"
            )
        if "teacher_top" in self.needs and self.needs & {"top", "anchor_top"}:
            raise ConfigError(
                f"gkd_coef={self.options['gkd_coef']} cannot be beside a part that reads the"
                " likeliest tokens (simko, dppo_topk_kl, dppo_topk_tv): leave one of them out"
            )
        if self.teacher.share and "teacher_top" not in self.needs:
            raise ConfigError(
                f"teacher.share={self.teacher.share}: only gkd can learn from what the policy did"
                " not sample: set gkd_coef as well"
            )
        if bool(self.teacher.share) != bool(self.teacher.episodes):
            raise ConfigError(
                f"teacher.share={self.teacher.share} and teacher.episodes="
                f"{self.teacher.episodes!r} belong together: set both, or none"
            )

    def advantage(self, batch: TokenBatch) -> TokenBatch:
        """The batch with its advantages; given episodes (`given`) have none and enter no mean."""
        given_E = given(batch)
        stays_E = ~given_E
        if self.filters:
            if batch.signal_E is None:
                raise ValueError("filter: batch.signal_E is None: pack gives it")
            stays_E = stays_E & batch.signal_E
        is_whole = not self.filters and bool(stays_E.all())
        credited = self._credited(batch) if is_whole else alone(batch, stays_E, self._credited)
        weighed_BT = credited.advantages_BT * self.negative_weight
        credited = replace(
            credited,
            advantages_BT=torch.where(
                credited.advantages_BT < 0, weighed_BT, credited.advantages_BT
            ),
        )
        return beside(credited, batch, given_E) if given_E.any() else credited

    def correct(self, batch: TokenBatch) -> TokenBatch:
        """The batch of one optimizer step with its weights and selections; those of given episodes
        are 0.
        """
        given_E = given(batch)
        if not given_E.any():
            return self._corrected(batch)
        if bool((given_E | (batch.tokens_E == 0)).all()):
            return batch
        return beside(alone(batch, ~given_E, self._corrected), batch, given_E)

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

    def _corrected(self, batch: TokenBatch) -> TokenBatch:
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


_OF_EPISODES = (
    "group_E",
    "reward_E",
    "truncated_E",
    "tokens_E",
    "greedy_reward_E",
    "passed_E",
    "signal_E",
)


def given(batch: TokenBatch) -> Tensor:
    """Which episodes (E,) no version of the policy sampled: recorded ones, that a teacher judges
    and that no reward is read of.
    """
    given_E = torch.zeros_like(batch.tokens_E, dtype=torch.bool)
    given_E[batch.episode_B[(batch.mask_BT & (batch.version_BT < 0)).any(1)]] = True
    return given_E


def alone(
    batch: TokenBatch, stays_E: Tensor, change: Callable[[TokenBatch], TokenBatch]
) -> TokenBatch:
    """The batch with a change (credit, corrections) for these episodes, as if no other had been
    played; other episodes stay in its lists, train nothing, and are in no denominator.

    DAPO's filter (https://arxiv.org/abs/2503.14476), for groups with signal. It comes before
    credit: a mean over the round (`whiten`, `reinforce`, `gdpo`) is one over what trains. Unlike
    `informative`, it changes the loss: terms that ignore the advantage see fewer tokens, and means
    are over fewer.
    """
    tokens_E = torch.where(stays_E, batch.tokens_E, 0)
    rows = replace(
        batch.rows(stays_E[batch.episode_B]),
        n_tokens=int(tokens_E.sum()),
        n_episodes=int((tokens_E > 0).sum()),
    )
    whole: dict[str, Any] = {name: getattr(batch, name) for name in _OF_EPISODES}
    some: dict[str, Any] = {
        name: None if full_E is None else full_E[stays_E] for name, full_E in whole.items()
    }
    parts_E = {name: part_E[stays_E] for name, part_E in batch.parts_E.items()}
    place_E = stays_E.cumsum(0) - 1
    changed = change(replace(rows, episode_B=place_E[rows.episode_B], parts_E=parts_E, **some))
    whole["tokens_E"] = tokens_E
    return replace(changed, episode_B=rows.episode_B, parts_E=batch.parts_E, **whole)


def beside(changed: TokenBatch, batch: TokenBatch, given_E: Tensor) -> TokenBatch:
    """What `alone` made of the others, and the given episodes beside it: with advantage and weight
    0, and in the denominators, since a teacher judges them.
    """
    rows = batch.rows(given_E[batch.episode_B] | torch.isin(batch.episode_B, changed.episode_B))
    own_B = ~given_E[rows.episode_B]
    if changed.weights_BT is None:
        changed = replace(changed, weights_BT=torch.ones_like(changed.advantages_BT))
    put: dict[str, Any] = {}
    for name in ROW_FIELDS:
        if (own := getattr(changed, name)) is None:
            continue
        there = None if name in ("advantages_BT", "weights_BT") else getattr(rows, name)
        size = *rows.ids_BT.shape, *own.shape[2:]
        put[name] = own.new_zeros(size) if there is None else there.to(own.dtype, copy=True)
        put[name][own_B, : own.shape[1]] = own
    tokens_E = changed.tokens_E + torch.where(given_E, batch.tokens_E, 0)
    total, episodes = int(tokens_E.sum()), int((tokens_E > 0).sum())
    return replace(rows, **put, tokens_E=tokens_E, n_tokens=total, n_episodes=episodes)

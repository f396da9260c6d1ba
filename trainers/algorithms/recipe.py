"""A recipe: the pure functions that turn outcomes into advantages and advantages into a loss."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import field, fields, replace
from functools import cached_property
from typing import Annotated, Any

import torch
from pydantic import BeforeValidator, ConfigDict, Field, InstanceOf, ValidationError
from pydantic.dataclasses import dataclass
from torch import Tensor

from agentrl.errors import ConfigError
from agentrl.settings import list_names
from agentrl.trainers.algorithms.adaptive import Adaptive, find_rules
from agentrl.trainers.algorithms.advantages import over_groups
from agentrl.trainers.algorithms.distillation import TeacherSettings
from agentrl.trainers.algorithms.losses import PolicyLoss, WholeLoss, by_token, ppo_clip
from agentrl.trainers.algorithms.parts import (
    Aggregate,
    BatchStep,
    Count,
    GroupForm,
    Loss,
    LossTerm,
    Need,
    Part,
    PositiveBound,
    Share,
    refuse_setting,
)
from agentrl.trainers.batch import Rewards, TokenBatch, axes_of
from agentrl.trainers.config import CriticSettings

PLACES = ("before", "credit", "surrogate", "aggregate", "regularisers", "corrections")
"""Fields of a recipe that hold parts, in the order in which a round uses them."""

LISTS = ("before", "credit", "regularisers", "corrections")
"""Those that hold any number of parts."""

TAUGHT = frozenset[Need]({"teacher", "teacher_top"})
"""Needs for which a run holds a teacher."""


def _as_step(function: Callable[..., Any]) -> BatchStep:
    return over_groups(function) if isinstance(function, GroupForm) else BatchStep.of(function)


def _as_steps(functions: Iterable[Callable[..., Any]]) -> tuple[BatchStep, ...]:
    return tuple(_as_step(function) for function in functions)


def _as_terms(functions: Iterable[Callable[..., Any]]) -> tuple[LossTerm, ...]:
    return tuple(LossTerm.of(function) for function in functions)


def _as_loss(function: Callable[..., Any] | None) -> Loss | None:
    return None if function is None else Loss.of(function)


Steps = Annotated[tuple[InstanceOf[BatchStep], ...], BeforeValidator(_as_steps)]
Terms = Annotated[tuple[InstanceOf[LossTerm], ...], BeforeValidator(_as_terms)]
Rounds = Annotated[int, Field(ge=0)]

CHECKED = ConfigDict(strict=True, allow_inf_nan=False, use_attribute_docstrings=True)


@dataclass(frozen=True, kw_only=True, config=CHECKED)
class RecipeSettings:
    """Settings of a recipe that belong to none of its parts."""

    turn_weights: dict[str, float] = field(default_factory=dict)
    """Weights of named process rewards (`Score.turns`); others count 0."""
    negative_weight: Share = 1.0
    """Factor on negative advantages. Less than 1 makes large learning rates safe but biases the
    estimator towards repeating what worked (0 is fine-tuning on the better half of every group)."""
    filter_groups: bool = False
    """Whether groups without signal are left out of training; metrics still count them."""
    refill: bool = False
    """Whether groups without signal are replaced by groups of further tasks (DAPO's dynamic
    sampling). Metrics of rollouts are still of the round's own tasks."""
    spare_rounds: Rounds = 1
    """Number of rounds for which refill keeps a group with signal that found no place."""
    reward_clip: PositiveBound = math.inf
    """Outcomes are clamped to ± this before they train; metrics show them unclipped."""
    epochs: Count = 1
    """Passes over a round's episodes."""
    kl_budget: PositiveBound = math.inf
    """Nats per token that the policy may move in one round; after that the round is skipped."""
    ref_kl_budget: PositiveBound = math.inf
    """Nats per token between policy and reference at which the run ends, because a learned reward
    cannot be trusted further."""
    reset_every: Rounds = 0
    """Rounds after which the policy becomes the reference and the optimizer is reset (ProRL; 0 =
    never)."""
    reference_decay: Share = 1.0
    """Weight of the reference in its moving average with the policy, taken after every round (1 =
    it stays)."""
    kl_target: PositiveBound = math.inf
    """Nats per token that a round should move the policy by: `anchor_kl_coef` follows."""
    entropy_target: PositiveBound = math.inf
    """Nats per token of entropy that the policy should keep: `entropy_coef` follows."""
    ref_kl_target: PositiveBound = math.inf
    """Nats per token between policy and reference: `kl_reward_coef` or `kl_coef` follows."""


@dataclass(frozen=True, config=CHECKED)
class Recipe(RecipeSettings):
    """An algorithm: how outcomes become advantages, and how advantages become a loss.

    Parts may be given as any callable of their kind (see `parts`), or as a `functools.partial` that
    sets options of one.
    """

    name: str
    """Its name in settings."""
    paper: str
    """Where the algorithm is defined."""
    credit: Steps
    """batch -> batch, in order; the last one has filled the advantages. Once per round, over all
    groups."""
    surrogate: Annotated[InstanceOf[LossTerm], BeforeValidator(LossTerm.of)] = ppo_clip
    """Policy loss per token."""
    aggregate: Annotated[InstanceOf[Aggregate], BeforeValidator(Aggregate.of)] = by_token
    """Losses per token -> scalar."""
    regularisers: Terms = ()
    """Further losses per token."""
    corrections: Steps = ()
    """batch -> batch, in order: weights and selections. Once per optimizer step, before it is split
    into micro-batches."""
    before: Steps = ()
    """batch -> batch, before `credit`: what changes the rewards themselves."""
    whole_loss: Annotated[InstanceOf[Loss] | None, BeforeValidator(_as_loss)] = None
    """Any (PolicyOutput, TokenBatch) -> (scalar, metrics), instead of surrogate, aggregate and
    regularisers. It must add up over micro-batches."""
    critic: CriticSettings = CriticSettings()
    """Settings of the critic; only read where a part reads values."""
    teacher: TeacherSettings = TeacherSettings()
    """Settings of the teacher; only read where a part reads one."""
    one_step: bool = False
    """Whether the paper is strictly on-policy, so that a round must be one optimizer step."""

    @cached_property
    def loss(self) -> PolicyLoss | WholeLoss:
        """Policy output and batch -> scalar and metrics."""
        if self.whole_loss is not None:
            return WholeLoss(self.whole_loss)
        return PolicyLoss(self.surrogate, self.aggregate, self.regularisers)

    @property
    def reads_every_row(self) -> bool:
        """Whether rows without an advantage can matter to the loss."""
        return bool(self.regularisers) or self.whole_loss is not None

    @cached_property
    def needs(self) -> frozenset[Need]:
        """What a run must compute for the parts."""
        return frozenset(need for _, part in self.parts() for need in part.reads)

    @cached_property
    def rewards(self) -> Rewards:
        """Which rewards train, and which groups have signal."""
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
        return {name: value for _, part in self.parts() for name, value in part.options}

    def parts(self) -> Iterator[tuple[str, Part]]:
        """Every part with its place, in the order of `PLACES`."""
        for place in PLACES:
            if self.whole_loss is not None and place in ("surrogate", "aggregate", "regularisers"):
                continue
            for part in self.parts_at(place):
                yield place, part
        if self.whole_loss is not None:
            yield "whole_loss", self.whole_loss

    def parts_at(self, place: str) -> tuple[Part, ...]:
        """The parts at one place."""
        parts = getattr(self, place)
        return parts if place in LISTS else (parts,)

    def rules(self) -> dict[str, Adaptive]:
        """Option -> the rule by which it moves after a round; empty where nothing adapts."""
        targets = {
            "kl_target": self.kl_target,
            "entropy_target": self.entropy_target,
            "ref_kl_target": self.ref_kl_target,
        }
        return find_rules(self.options, targets)

    def changed(self, settings: Mapping[str, Any]) -> Recipe:
        """The recipe with other settings of its own and other options of its parts.

        Raises:
            ConfigError: a value is out of range, or two parts have the option.
        """
        owners: dict[str, list[str]] = {}
        for _, part in self.parts():
            for name, _ in part.options:
                owners.setdefault(name, []).append(part.label)
        for name in settings:
            if len(owners.get(name, ())) > 1:
                raise ConfigError(
                    f"loss.{name} is an option of {list_names(owners[name], 'and')}: set it in the"
                    f' table of one of them, as in {{name = "{owners[name][0]}", {name} = …}}',
                    setting=f"loss.{name}",
                )
        changes: dict[str, Any] = {name: settings[name] for name in SETTINGS if name in settings}
        for place in {place for place, _ in self.parts()}:
            parts = tuple(_with_own_options(part, settings) for part in self.parts_at(place))
            changes[place] = parts if place in LISTS else parts[0]
        try:
            return replace(self, **changes)
        except ValidationError as invalid:
            raise refuse_setting(invalid, type(self), changes) from None

    def moved(self, coefficients: Mapping[str, float]) -> Recipe:
        """The recipe with these values of the options that adapt; other options are left alone."""
        rules = self.rules()
        return self.changed({name: coefficients[name] for name in rules if name in coefficients})

    def refuse_group_size(self, group_size: int) -> None:
        """Raise ConfigError where groups of this size cannot teach this recipe anything."""
        best_of = self.options.get("pass_k", 0)
        reason = ""
        if group_size <= best_of:
            reason = f"recipe {self.name} with pass_k={best_of} needs more than {best_of}"
        elif group_size == 1 and "group" in self.needs:
            reason = f"recipe {self.name} compares episodes of a group: use at least 2"
        elif group_size == 1 and self.refill:
            reason = "refill=true looks for groups whose rewards differ: use at least 2"
        if reason:
            raise ConfigError(f"group_size={group_size}: {reason}", setting="group_size")

    def refuse_minibatches(self, minibatches: int) -> None:
        """Raise ConfigError where a round of several optimizer steps contradicts the paper."""
        for name, value in (("minibatches", minibatches), ("loss.epochs", self.epochs)):
            if self.one_step and value > 1:
                raise ConfigError(
                    f"{name}={value}: recipe {self.name} is strictly on-policy, one optimizer step"
                    f" a round: set {name}=1",
                    setting=name,
                )

    def refuse_no_teacher(self) -> None:
        """Raise ConfigError where the recipe cannot use the teacher that is set, or lacks one."""
        teacher, is_gkd = self.teacher, "teacher_top" in self.needs
        setting, reason = "", ""
        if teacher.top and not is_gkd:
            setting = "teacher.top"
            reason = f"={teacher.top} matters to gkd only: set gkd_coef as well, or leave it out"
        elif not self.needs & TAUGHT:
            return
        elif not teacher.model:
            setting = "teacher.model"
            reason = f": recipe {self.name} needs a teacher: give a folder or a name on the hub"
        elif not is_gkd and not self.options.get("teacher_coef"):
            setting = "teacher_coef"
            reason = "=0 and no gkd_coef: the teacher teaches nothing: set one of them above 0"
        elif is_gkd and self.needs & {"top", "anchor_top"}:
            setting = "gkd_coef"
            reason = (
                f"={self.options['gkd_coef']} cannot be combined with parts that read the likeliest"
                " tokens (simko, dppo_topk_kl, dppo_topk_tv)"
            )
        elif teacher.share and not is_gkd:
            setting = "teacher.share"
            reason = f"={teacher.share}: only gkd learns from recorded episodes: set gkd_coef"
        elif bool(teacher.share) != bool(teacher.episodes):
            setting = "teacher.share"
            reason = (
                f"={teacher.share} and teacher.episodes={teacher.episodes!r} need each other: set"
                " both or neither"
            )
        if setting:
            raise ConfigError(f"loss.{setting}{reason}", setting=f"loss.{setting}")

    def advantage(self, batch: TokenBatch) -> TokenBatch:
        """The batch with its advantages; recorded episodes have none and enter no mean."""
        recorded_E = find_recorded_episodes(batch)
        stays_E = ~recorded_E
        if self.filters:
            if batch.signal_E is None:
                raise ValueError("filter: batch.signal_E is None: pack gives it")
            stays_E = stays_E & batch.signal_E
        if self.filters or bool(recorded_E.any()):
            credited = apply_to_episodes(batch, stays_E, self._credit)
        else:
            credited = self._credit(batch)
        advantages_BT = credited.advantages_BT
        weighed_BT = advantages_BT * self.negative_weight
        credited = replace(
            credited, advantages_BT=torch.where(advantages_BT < 0, weighed_BT, advantages_BT)
        )
        if recorded_E.any():
            return merge_recorded_episodes(credited, batch, recorded_E)
        return credited

    def correct(self, batch: TokenBatch) -> TokenBatch:
        """The batch of one optimizer step with its weights and selections; those of recorded
        episodes are 0.
        """
        recorded_E = find_recorded_episodes(batch)
        if not recorded_E.any():
            return self._correct(batch)
        if bool((recorded_E | (batch.tokens_E == 0)).all()):
            return batch
        corrected = apply_to_episodes(batch, ~recorded_E, self._correct)
        return merge_recorded_episodes(corrected, batch, recorded_E)

    def _credit(self, batch: TokenBatch) -> TokenBatch:
        for step in (*self.before, *self.credit):
            batch = step(batch)
        return batch

    def _correct(self, batch: TokenBatch) -> TokenBatch:
        for step in self.corrections:
            batch = step(batch)
        return batch


SETTINGS = tuple(one.name for one in fields(RecipeSettings))
"""Names of the settings that belong to no part."""


def _with_own_options(part: Part, settings: Mapping[str, Any]) -> Part:
    return part.changed(**{name: settings[name] for name, _ in part.options if name in settings})


# --- some episodes of a batch

_EPISODE_FIELDS = (
    "group_E",
    "reward_E",
    "truncated_E",
    "tokens_E",
    "greedy_reward_E",
    "passed_E",
    "signal_E",
)


def find_recorded_episodes(batch: TokenBatch) -> Tensor:
    """Which episodes (E,) no version of the policy sampled: recorded ones, which a teacher judges
    and whose reward is not read.
    """
    recorded_E = torch.zeros_like(batch.tokens_E, dtype=torch.bool)
    recorded_E[batch.episode_B[(batch.mask_BT & (batch.version_BT < 0)).any(1)]] = True
    return recorded_E


def apply_to_episodes(
    batch: TokenBatch, stays_E: Tensor, change: Callable[[TokenBatch], TokenBatch]
) -> TokenBatch:
    """Apply a change (credit, corrections) to some episodes, as if no other had been played. The
    other episodes keep their place in the tensors per episode, but train nothing and are in no
    denominator.

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
    whole: dict[str, Any] = {name: getattr(batch, name) for name in _EPISODE_FIELDS}
    whole |= {name: tensor for name, tensor in batch.extra.items() if axes_of(name) == "E"}
    some = {name: full_E[stays_E] for name, full_E in whole.items() if full_E is not None}
    parts_E = {name: part_E[stays_E] for name, part_E in batch.parts_E.items()}
    place_E = stays_E.cumsum(0) - 1
    changed = change(rows.with_tensors(some, episode_B=place_E[rows.episode_B], parts_E=parts_E))
    whole["tokens_E"] = tokens_E
    return changed.with_tensors(whole, episode_B=rows.episode_B, parts_E=batch.parts_E)


def merge_recorded_episodes(
    changed: TokenBatch, batch: TokenBatch, recorded_E: Tensor
) -> TokenBatch:
    """Add recorded episodes to the result of `apply_to_episodes` on the others. They have
    advantage and weight 0 and count in the denominators, since a teacher judges them.
    """
    is_kept_B = recorded_E[batch.episode_B] | torch.isin(batch.episode_B, changed.episode_B)
    rows = batch.rows(is_kept_B)
    own_B = ~recorded_E[rows.episode_B]
    if changed.weights_BT is None:
        changed = replace(changed, weights_BT=torch.ones_like(changed.advantages_BT))
    merged = dict[str, Tensor]()
    full_tensors = rows.row_tensors()
    for name, own in changed.row_tensors().items():
        full = None if name in ("advantages_BT", "weights_BT") else full_tensors.get(name)
        if full is None:
            merged[name] = own.new_zeros((*rows.ids_BT.shape, *own.shape[2:]))
        else:
            merged[name] = full.to(own.dtype, copy=True)
        merged[name][own_B, : own.shape[1]] = own
    tokens_E = changed.tokens_E + torch.where(recorded_E, batch.tokens_E, 0)
    return rows.with_tensors(
        merged,
        tokens_E=tokens_E,
        n_tokens=int(tokens_E.sum()),
        n_episodes=int((tokens_E > 0).sum()),
    )

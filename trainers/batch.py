"""Groups of finished episodes -> one TokenBatch: which rewards train, right-padded rows, a mask,
and denominators that are fixed for good.

A group has signal if two of its scored episodes earned different rewards, of those that train:
outcomes with shaping, clipped as the recipe says, and process rewards with their weights. `Rewards`
alone decides that, from the rewards before any credit, so what centres over the round, or prices
tokens by their KL, can neither make signal nor hide it. Play (refill), `filter_groups`, the metrics
and the count of quiet rounds all ask it. Equal rewards give every advantage 0 in a form that
compares siblings (DAPO, https://arxiv.org/abs/2503.14476, section 3.2).

Letters: B rows (one per branch that trains), T positions, E scored episodes.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from itertools import chain, repeat
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from agentrl.errors import ConfigError, UserError
from agentrl.trajectory import (
    Episode,
    Group,
    SegmentKind,
    Trajectory,
    token_rewards,
    turn_rewards,
)
from agentrl.types import Ending, EndReason

ROW_FIELDS = (
    "ids_BT",
    "mask_BT",
    "attention_BT",
    "old_logprobs_BT",
    "advantages_BT",
    "turn_BT",
    "version_BT",
    "state_BT",
    "rewards_BT",
    "proximal_logprobs_BT",
    "ref_logprobs_BT",
    "entropy_BT",
    "values_BT",
    "returns_BT",
    "weights_BT",
    "selected_BT",
    "top_ids_BTK",
    "top_logprobs_BTK",
    "experts_BTLK",
    "teacher_logprobs_BT",
    "teacher_top_logprobs_BTK",
)


@dataclass(frozen=True)
class Rewards:
    """The rewards that train under one recipe (`Recipe.rewards`).

    Attributes:
        turn_weights: weights of named process rewards (`Score.turns`); others count 0.
        by_turn: credit is given turn by turn, so that it matters when a process reward came;
            otherwise their sum counts.
        by_part: the named terms of the score train, in place of outcome and process rewards.
        part_weights: weights of these terms (empty = 1 each).
        clip: outcomes are clamped to [-clip, clip].
        least: lowest reward that the credit can read.
        fewest: number of scored episodes that a group needs to have signal.
        siblings: credit compares episodes of one task with each other, and with nothing else.
        taught: a teacher scores every token, whatever was earned.
    """

    turn_weights: Mapping[str, float] = field(default_factory=dict)
    by_turn: bool = False
    by_part: bool = False
    part_weights: Mapping[str, float] = field(default_factory=dict)
    clip: float = math.inf
    least: float = -math.inf
    fewest: int = 2
    siblings: bool = True
    taught: bool = False

    def outcome(self, episode: Episode) -> float:
        """The outcome of a scored episode.

        No verifier scored an agent's fault, so its value is raised to what the credit can read.
        """
        value = float(episode.score.value or 0.0)
        if episode.end is EndReason.AGENT_FAULT:
            value = max(value, self.least)
        return max(-self.clip, min(self.clip, value))

    def total(self, episode: Episode) -> float:
        """Outcome and process rewards."""
        return math.fsum((self.outcome(episode), *turn_rewards(episode, self.turn_weights)))

    def has_signal(self, group: Group) -> bool:
        """Whether two scored episodes of the group differ in rewards that train."""
        return self._differ(group.episodes)

    def any_signal(self, groups: Sequence[Group]) -> bool:
        """Whether a round can teach anything: a group has signal, or, where credit compares with
        more than siblings, the round as a whole; a teacher always does.
        """
        if self.taught or any(self.has_signal(group) for group in groups):
            return True
        return not self.siblings and self._differ(
            episode for group in groups for episode in group.episodes
        )

    def refuse(self, episode: Episode) -> None:
        """Raise UserError where the credit cannot read what an episode earned."""
        if episode.end.ending is not Ending.FAILED and (paid := self.total(episode)) < self.least:
            raise UserError(
                f"task {episode.task.id!r} gave a reward of {paid}, and the recipe divides by mean"
                f" rewards: give rewards of at least {self.least:g} (maxrl), or choose another"
                " recipe"
            )

    def _differ(self, episodes: Iterable[Episode]) -> bool:
        scored = [one for one in episodes if one.end.ending is not Ending.FAILED]
        if len(scored) < self.fewest:
            return False
        if self.by_part:
            return any(len(set(self._part(name, scored))) > 1 for name in self._parts(scored))
        return len({self._compared(episode) for episode in scored}) > 1

    def _compared(self, episode: Episode) -> tuple[float, ...]:
        """What is compared of an episode: one number, or one for each turn and the outcome."""
        if not self.by_turn:
            return (self.total(episode),)
        paid = list(turn_rewards(episode, self.turn_weights))
        while paid and paid[-1] == 0:  # turns without a reward are no difference
            paid.pop()
        return (self.outcome(episode), *paid)

    def _parts(self, scored: Sequence[Episode]) -> list[str]:
        """The terms that train."""
        names = sorted({name for episode in scored for name in episode.score.parts})
        return [name for name in names if not self.part_weights or self.part_weights.get(name)]

    def _part(self, name: str, scored: Sequence[Episode]) -> list[float]:
        """A term of the episodes that have it."""
        there = [episode.score.parts[name] for episode in scored if name in episode.score.parts]
        return [value for value in there if not math.isnan(value)]


OUTCOMES = Rewards()
"""Outcomes alone, as scored."""


@dataclass(frozen=True, eq=False)
class TokenBatch:
    """What one optimizer step trains on. Every method returns a new batch.

    The denominators `n_tokens` and `n_episodes` belong to the optimizer step: `split` keeps them,
    so losses and gradients of the micro-batches add up to those of the whole batch. Per-episode
    tensors are never cut either; `episode_B` points into them.

    Attributes:
        ids_BT: int64 token ids, right-padded.
        mask_BT: bool, True where the policy sampled the token at t (predicted from t-1) and this
            row owns it.
        attention_BT: bool, True on tokens, False on padding.
        old_logprobs_BT: float32 log-probabilities under the sampling distribution; 0 where nothing
            was sampled.
        advantages_BT: float32, 0 at mask 0; NaN until an advantage step fills it, so that step
            cannot be forgotten.
        turn_BT: int32 index of the sampled turn within the row's branch; -1 elsewhere.
        version_BT: int32 policy version that sampled the token; -1 elsewhere, and where no version
            of this policy did.
        episode_B: int64, row -> index of its episode.
        group_E: int64, episode -> index of its group in what was packed.
        reward_E: float64 outcomes, as they train.
        truncated_E: bool, whether a limit ended the episode.
        tokens_E: int64, trained tokens of the episode over all its rows; 0 for an episode that is
            not in the optimizer step.
        n_tokens: trained tokens of the optimizer step.
        n_episodes: episodes of the optimizer step that have trained tokens.
        n_failed: episodes without a score; they have no row and no reward, and are counted here.
        n_refilled: how many of the E episodes, the last ones, take the places of others (dynamic
            sampling).
        version: of the policy that the update starts from, if known. The age of a token is its
            distance to it.
        parts_E: the named terms of the score, each float64 of shape (E,), NaN where an episode
            lacks it.
        rewards_BT: float64 process rewards in addition to `reward_E`, each at its token, if there
            are any.
        state_BT: int64 at sampled tokens: a hash of what the policy was told right before the turn
            (GiGPO's anchor state); -1 elsewhere.
        proximal_logprobs_BT: of the policy that the update starts from, where it is not the one
            that sampled.
        ref_logprobs_BT: of the frozen reference.
        entropy_BT: of the policy that the update starts from, in nats.
        values_BT, returns_BT: the critic's predictions and its targets.
        weights_BT: what a correction multiplies the policy loss of a token by; 0 leaves it out, and
            every denominator stays what it was. None: 1 everywhere.
        selected_BT: bool, tokens that a recipe treats in its own way.
        top_ids_BTK, top_logprobs_BTK: the K tokens that were likeliest under the anchor, likeliest
            first, and their log-probabilities under it. Where they are given,
            `PolicyOutput.top_logprobs_BTK` is about the same tokens.
        experts_BTLK: int16, the K experts that each token went to in each of the L layers with a
            router, when it was sampled or first read; -1 where the engine did not record it.
        teacher_logprobs_BT: of a teacher; teacher_top_logprobs_BTK: of it, at `top_ids_BTK`, which
            then are what a divergence from it is over.
        greedy_reward_E: float64 reward of a greedy episode of the same task; NaN where
            infrastructure failed it.
        passed_E: bool, whether the episode passed, whatever shaping did to its reward.
        signal_E: bool, whether the episode's group has signal (`Rewards.has_signal`).
        extra: further tensors by name. The suffix of a name tells its axes, and so how it moves
            with the batch: `…_BT` (and `…_BTK`) with rows and positions, `…_B` with rows, `…_E`
            with episodes.

    The fields from `proximal_logprobs_BT` on are None until a step of the recipe fills them.
    """

    ids_BT: Tensor
    mask_BT: Tensor
    attention_BT: Tensor
    old_logprobs_BT: Tensor
    advantages_BT: Tensor
    turn_BT: Tensor
    version_BT: Tensor
    episode_B: Tensor
    group_E: Tensor
    reward_E: Tensor
    truncated_E: Tensor
    tokens_E: Tensor
    n_tokens: int
    n_episodes: int
    n_failed: int = 0
    n_refilled: int = 0
    version: int | None = None
    parts_E: Mapping[str, Tensor] = field(default_factory=dict)
    rewards_BT: Tensor | None = None
    state_BT: Tensor | None = None
    proximal_logprobs_BT: Tensor | None = None
    ref_logprobs_BT: Tensor | None = None
    entropy_BT: Tensor | None = None
    values_BT: Tensor | None = None
    returns_BT: Tensor | None = None
    weights_BT: Tensor | None = None
    selected_BT: Tensor | None = None
    top_ids_BTK: Tensor | None = None
    top_logprobs_BTK: Tensor | None = None
    experts_BTLK: Tensor | None = None
    teacher_logprobs_BT: Tensor | None = None
    teacher_top_logprobs_BTK: Tensor | None = None
    greedy_reward_E: Tensor | None = None
    passed_E: Tensor | None = None
    signal_E: Tensor | None = None
    extra: Mapping[str, Tensor] = field(default_factory=dict)

    def __len__(self) -> int:
        return self.ids_BT.shape[0]

    @property
    def lengths_B(self) -> Tensor:
        """Tokens of each row without padding (int64)."""
        return self.attention_BT.sum(1)

    @property
    def episode_tokens_B(self) -> Tensor:
        """Trained tokens of a row's episode, over all rows of that episode (int64)."""
        return self.tokens_E[self.episode_B]

    @property
    def anchor_BT(self) -> Tensor:
        """Log-probabilities that ratios are against: the proximal policy's, else those of the
        policy that sampled.
        """
        return (
            self.old_logprobs_BT if self.proximal_logprobs_BT is None else self.proximal_logprobs_BT
        )

    def row_tensors(self) -> dict[str, Tensor]:
        """Return all tensors of shape (B, T, ...), those in `extra` included."""
        own = {name: getattr(self, name) for name in ROW_FIELDS}
        own |= {name: tensor for name, tensor in self.extra.items() if axes_of(name)[:2] == "BT"}
        return {name: tensor for name, tensor in own.items() if tensor is not None}

    def with_tensors(self, tensors: Mapping[str, Tensor], **changes: Any) -> TokenBatch:
        """Replace tensors by name, wherever they live, and other fields."""
        own: dict[str, Any] = {name: t for name, t in tensors.items() if name in _NAMES}
        extra = {name: tensor for name, tensor in tensors.items() if name not in _NAMES}
        return replace(self, **own, extra={**self.extra, **extra}, **changes)

    def to(self, device: torch.device | str) -> TokenBatch:
        """Move all tensors to a device."""
        own = {name: getattr(self, name) for name in _NAMES}
        moved = {name: t.to(device) for name, t in own.items() if isinstance(t, Tensor)}
        moved |= {name: tensor.to(device) for name, tensor in self.extra.items()}
        parts_E = {name: part.to(device) for name, part in self.parts_E.items()}
        return self.with_tensors(moved, parts_E=parts_E)

    def silent(self) -> TokenBatch:
        """Put exact zeros at mask 0 in every real-valued row tensor."""
        real = {name: t for name, t in self.row_tensors().items() if t.is_floating_point()}
        silent = dict[str, Tensor]()
        for name, tensor in real.items():
            mask = self.mask_BT.view(*self.mask_BT.shape, *[1] * (tensor.dim() - 2))
            silent[name] = torch.where(mask, tensor, 0.0)
        return self.with_tensors(silent)

    def rows(self, index: Tensor) -> TokenBatch:
        """Select rows, cut to the longest of them; denominators and episodes stay."""
        lengths = self.lengths_B[index]
        width = int(lengths.max()) if len(lengths) else 0
        cut = {name: tensor[index, :width] for name, tensor in self.row_tensors().items()}
        cut |= {name: t[index] for name, t in self.extra.items() if axes_of(name) == "B"}
        return self.with_tensors(cut, episode_B=self.episode_B[index])

    def split(self, micro_tokens: int) -> Iterator[TokenBatch]:
        """Micro-batches of rows of similar length, longest first, whose padded size is at most
        `micro_tokens`.

        The rows of an episode stay together, so that what is defined over an episode (a sequence
        ratio) is the same in every split. An episode that is larger than the budget is a
        micro-batch of its own.

        Raises:
            ConfigError: the budget is not positive.
        """
        return (self.rows(index) for index in self.chunks(micro_tokens))

    def chunks(self, micro_tokens: int) -> list[Tensor]:
        """The rows of each micro-batch."""
        if micro_tokens < 1:
            raise ConfigError(f"micro_tokens={micro_tokens} must be at least 1")
        order = torch.argsort(self.lengths_B, descending=True, stable=True).tolist()
        lengths, owners = self.lengths_B.tolist(), self.episode_B.tolist()
        episodes: dict[int, list[int]] = {}
        for row in order:
            episodes.setdefault(owners[row], []).append(row)
        chunks: list[list[int]] = []
        for rows in episodes.values():
            if not chunks or (len(chunks[-1]) + len(rows)) * lengths[chunks[-1][0]] > micro_tokens:
                chunks.append([])
            chunks[-1] += rows
        return [torch.tensor(chunk) for chunk in chunks]

    def minibatches(self, count: int, seed: int, epochs: int = 1) -> Iterator[TokenBatch]:
        """At most `count` batches, one optimizer step each, own denominators: groups in seeded
        random order, another one in each epoch, cut where a batch ends. Groups with an advantage
        other than zero are dealt out evenly, and so are those without: no step is without gradient.

        Where only a share of the scored episodes trains (groups were filtered and not refilled),
        there are as many fewer batches, so that a step keeps its size: small ones would be noise at
        full length.

        Raises:
            ConfigError: the count is not positive.
        """
        if count < 1:
            raise ConfigError(f"minibatches={count} must be at least 1")
        trained = torch.nonzero(self.tokens_E.cpu()).flatten()
        planned = max(1, len(self.tokens_E) - self.n_refilled)
        count = min(count, math.ceil(count * len(trained) / planned))
        chance = torch.Generator().manual_seed(seed)
        groups, group_of = self.group_E.cpu()[trained].unique(return_inverse=True)
        pushes = torch.zeros(len(groups), dtype=torch.bool)
        pushes[group_of[self._pushed_E().cpu()[trained]]] = True
        for _ in range(epochs):
            rank = torch.randperm(len(groups), generator=chance)[group_of]
            order = torch.argsort(rank, stable=True)
            kinds = (trained[order[pushes[group_of[order]] == kind]] for kind in (True, False))
            push, rest = (torch.tensor_split(kind, max(1, count)) for kind in kinds)
            for episodes in map(torch.cat, zip(push, rest[::-1], strict=True)):
                if len(episodes):
                    yield self._of_episodes(episodes)

    def _of_episodes(self, episodes: Tensor) -> TokenBatch:
        """The part of a step that is about these episodes; its denominators are theirs."""
        members = episodes.to(self.episode_B.device)
        part = self.rows(torch.isin(self.episode_B, members))
        tokens_E = self.tokens_E * torch.zeros_like(self.tokens_E).index_fill(0, members, 1)
        total = int(tokens_E.sum())
        return replace(part, tokens_E=tokens_E, n_tokens=total, n_episodes=len(episodes))

    def _pushed_E(self) -> Tensor:
        """Which episodes have an advantage other than zero."""
        pushed_E = torch.zeros_like(self.tokens_E, dtype=torch.bool)
        pushed_E[self.episode_B[((self.advantages_BT != 0) & self.mask_BT).any(1)]] = True
        return pushed_E

    def informative(self) -> TokenBatch:
        """Only episodes with an advantage other than zero; denominators stay, so the policy
        gradient stays the same.

        An episode keeps all its rows: a ratio over the episode reads tokens without an advantage
        too. Not for losses with a term that ignores the advantage (KL, entropy): the dropped rows
        belong to those.
        """
        return self.rows(self._pushed_E()[self.episode_B])


_NAMES = frozenset(one.name for one in fields(TokenBatch)) - {"extra", "parts_E"}


def axes_of(name: str) -> str:
    """Return the axes that the suffix of a tensor's name tells, as "BT" of "teacher_BT"."""
    return name.rpartition("_")[2]


def pack(
    groups: Sequence[Group],
    pad_id: int,
    *,
    rewards: Rewards = OUTCOMES,
    version: int | None = None,
) -> TokenBatch:
    """One row per branch that trains, cut after its last trained token; failed episodes are only
    counted.

    A scored episode that sampled nothing (a limit came first) has no row, but its reward counts in
    its group. Without a single trained token the batch has no rows and `n_tokens` is 0.

    Args:
        rewards: which of them train, and by which signal is decided.
        version: of the policy that the update will start from.

    Raises:
        UserError: an episode's policy spoke but left no tokens, or a row starts with a sampled
            token.
    """
    scored: list[tuple[int, Episode]] = []
    for group_index, group in enumerate(groups):
        scored += [
            (group_index, episode)
            for episode in group.episodes
            if episode.end.ending is not Ending.FAILED
        ]
    branches: list[tuple[int, Trajectory, Sequence[float]]] = []
    for index, (_, episode) in enumerate(scored):
        _refuse_messages(episode)
        earned = token_rewards(episode, rewards.turn_weights)
        owned = zip(episode.trajectories, earned, strict=True)
        branches += [(index, branch, reward) for branch, reward in owned if branch.trained]
    rows, signal = [branch for _, branch, _ in branches], [*map(rewards.has_signal, groups)]
    tokens_E = torch.zeros(len(scored), dtype=torch.int64)
    episode_B = torch.tensor([index for index, _, _ in branches], dtype=torch.int64)
    tokens_E.index_add_(
        0, episode_B, torch.tensor([branch.trained for branch in rows], dtype=torch.int64)
    )
    return TokenBatch(
        **padded_rows(rows, [earned for _, _, earned in branches], pad_id),
        episode_B=episode_B,
        group_E=torch.tensor([group_index for group_index, _ in scored], dtype=torch.int64),
        reward_E=torch.tensor([rewards.outcome(one) for _, one in scored], dtype=torch.float64),
        truncated_E=torch.tensor([episode.truncated for _, episode in scored], dtype=torch.bool),
        tokens_E=tokens_E,
        n_tokens=int(tokens_E.sum()),
        n_episodes=int((tokens_E > 0).sum()),
        n_failed=sum(len(group.episodes) for group in groups) - len(scored),
        version=version,
        parts_E=_parts([episode for _, episode in scored]),
        passed_E=torch.tensor([bool(one.passed) for _, one in scored], dtype=torch.bool),
        signal_E=torch.tensor([signal[index] for index, _ in scored], dtype=torch.bool),
    )


def padded_rows(
    rows: Sequence[Trajectory], rewards: Sequence[Sequence[float]], pad_id: int
) -> dict[str, Any]:
    """The tensors of shape (B, T); whatever stands after a row's last trained token cannot matter
    and is cut.
    """
    lengths = np.array([len(row.mask) - row.mask[::-1].index(1) for row in rows], dtype=np.int64)
    attention = np.arange(lengths.max(initial=0)) < lengths[:, None]

    def padded(values: Sequence[Sequence[float]], fill: float, dtype: npt.DTypeLike) -> Tensor:
        full = np.full(attention.shape, fill, dtype)
        cut = (row[:length] for row, length in zip(values, lengths, strict=True))
        full[attention] = np.fromiter(chain.from_iterable(cut), dtype, int(lengths.sum()))
        return torch.from_numpy(full)

    versions = [
        tuple(chain.from_iterable(repeat(s.version, len(s.ids)) for s in row.segments))
        for row in rows
    ]
    tensors: dict[str, Any] = {
        "ids_BT": padded([row.ids for row in rows], pad_id, np.int64),
        "mask_BT": padded([row.mask for row in rows], 0, np.bool_),
        "attention_BT": torch.from_numpy(attention),
        "old_logprobs_BT": padded([row.logprobs for row in rows], 0.0, np.float32),
        "turn_BT": padded([row.turn_of for row in rows], -1, np.int32),
        "version_BT": padded(versions, -1, np.int32),
        "state_BT": padded([_states(row) for row in rows], -1, np.int64),
        "rewards_BT": padded(rewards, 0.0, np.float64),
    }
    if tensors["mask_BT"][:, :1].any():
        raise UserError(
            "a row's first token was sampled from nothing; give every prompt at least one token"
        )
    if any(row.experts is not None for row in rows):
        tensors["experts_BTLK"] = _experts(rows, lengths)
    tensors["advantages_BT"] = torch.where(tensors["mask_BT"], torch.nan, 0.0).float()
    return tensors


def _experts(rows: Sequence[Trajectory], lengths: npt.NDArray[np.int64]) -> Tensor:
    """Which experts each token went to, int16 (B, T, layers, experts of a token); -1 where
    they are unknown.
    """
    shapes = {row.experts.shape[1:] for row in rows if row.experts is not None}
    if len(shapes) != 1:
        raise UserError(
            f"rows have experts of {sorted(shapes)} (layers, experts of a token): train on episodes"
            " of one model"
        )
    full = np.full((len(rows), lengths.max(initial=0), *shapes.pop()), -1, np.int16)
    for index, (row, length) in enumerate(zip(rows, lengths, strict=True)):
        if row.experts is not None:
            told = row.experts[:length]
            full[index, : len(told)] = told
    return torch.from_numpy(full)


def _states(row: Trajectory) -> list[int]:
    """At each sampled token, a hash of the tokens that came right before its turn; -1 elsewhere."""
    states, told = list[int](), tuple[int, ...]()
    for segment in row.segments:
        sampled = segment.kind is SegmentKind.SAMPLED
        told = told if sampled else segment.ids
        states += [zlib.crc32(np.asarray(told, np.int64).tobytes()) if sampled else -1] * len(
            segment.ids
        )
    return states


def _parts(episodes: Sequence[Episode]) -> dict[str, Tensor]:
    """The named terms of the scores, one tensor (E,) for each."""
    names = sorted({name for episode in episodes for name in episode.score.parts})
    rows = {
        name: [episode.score.parts.get(name, math.nan) for episode in episodes] for name in names
    }
    return {name: torch.tensor(row, dtype=torch.float64) for name, row in rows.items()}


def _refuse_messages(episode: Episode) -> None:
    """Only policies that sample tokens can be trained."""
    spoke = episode.counts.turns > 0 or any(
        message.role == "assistant" and (message.content or message.tool_calls)
        for message in episode.messages
    )
    if spoke and not episode.trajectories:
        raise UserError(
            f"episode {'/'.join(map(str, episode.key))} of {episode.env}: its policy speaks"
            " messages and left no tokens to train on; sample with a TokenPolicy,"
            " or with tokens=true from a server that returns them, such as vLLM or SGLang"
        )


@dataclass(frozen=True, eq=False)
class PolicyOutput:
    """The model's output on a batch at trained tokens; other positions hold 0.

    Attributes:
        logprobs_BT: log-probabilities of the tokens at the sampling temperature, with gradient.
        entropy_BT: entropy (nats) of the distribution each token was drawn from, if asked for.
        top_logprobs_BTK: log-probabilities of the K likeliest tokens, likeliest first, with
            gradient, if asked for; of the tokens `batch.top_ids_BTK`, in that order, where the
            batch names them.
        top_ids_BTK: which tokens these are.
        router_loss: how unevenly the routers of a mixture of experts spread these rows, a scalar,
            if asked for (`moe.with_router_loss`).
    """

    logprobs_BT: Tensor
    entropy_BT: Tensor | None = None
    top_logprobs_BTK: Tensor | None = None
    top_ids_BTK: Tensor | None = None
    router_loss: Tensor | None = None

    def silent(self, mask_BT: Tensor) -> PolicyOutput:
        """The same with exact zeros at mask 0, whatever stood there."""
        entropy_BT, top_BTK = self.entropy_BT, self.top_logprobs_BTK
        return replace(
            self,
            logprobs_BT=torch.where(mask_BT, self.logprobs_BT, 0.0),
            entropy_BT=None if entropy_BT is None else torch.where(mask_BT, entropy_BT, 0.0),
            top_logprobs_BTK=(
                None if top_BTK is None else torch.where(mask_BT[..., None], top_BTK, 0.0)
            ),
        )

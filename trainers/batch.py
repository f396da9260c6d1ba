"""Groups of finished episodes -> one TokenBatch: right-padded rows, a mask, and denominators that
are fixed for good.

Letters: B rows (one per branch that trains), T positions, E scored episodes.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any

import torch
from torch import Tensor

from agentrl.errors import ConfigError, UserError
from agentrl.trainers.rewards import OUTCOMES, Rewards
from agentrl.trainers.rows import padded_rows
from agentrl.trajectory import Episode, Group, Trajectory, token_rewards
from agentrl.types import Ending

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
        version: of the policy that the update starts from; None where nobody said. A token's age is
            its distance.
        parts_E: the named terms of the score, each float64 of shape (E,), NaN where an episode
            lacks it.
        rewards_BT: float64 process rewards beside `reward_E`, each at its token; None: there are
            none.
        state_BT: int64 at sampled tokens: a hash of what the policy was told right before the turn
            (GiGPO's anchor state); -1 elsewhere.
        proximal_logprobs_BT: of the policy that the update starts from, where it is not the one
            that sampled.
        ref_logprobs_BT: of the frozen reference.
        entropy_BT: of the policy that the update starts from, in nats.
        values_BT, returns_BT: what a critic said, and what it learns.
        weights_BT: what a correction multiplies the policy loss of a token by; 0 leaves it out, and
            every denominator stays what it was. None: 1 everywhere.
        selected_BT: bool, tokens that a recipe treats in its own way.
        top_ids_BTK, top_logprobs_BTK: the K tokens that were likeliest under the anchor, likeliest
            first, and their log-probabilities under it. Where they are given,
            `PolicyOutput.top_logprobs_BTK` is about the same tokens.
        experts_BTLK: int16, the K experts that each token went to in each of the L layers with a
            router, when it was sampled or first read; -1 where the engine did not say.
        teacher_logprobs_BT: of a teacher; teacher_top_logprobs_BTK: of it, at `top_ids_BTK`, which
            then are what a divergence from it is over.
        greedy_reward_E: float64 reward of a greedy episode of the same task; NaN where
            infrastructure failed it.
        passed_E: bool, whether the episode passed, whatever shaping did to its reward.
        signal_E: bool, whether the episode's group has signal (`Rewards.has_signal`).

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

    def to(self, device: torch.device | str) -> TokenBatch:
        """The same batch on another device."""
        values = {one.name: getattr(self, one.name) for one in fields(self)}
        moved: dict[str, Any] = {
            name: t.to(device) for name, t in values.items() if isinstance(t, Tensor)
        }
        return replace(
            self, **moved, parts_E={name: part.to(device) for name, part in self.parts_E.items()}
        )

    def silent(self) -> TokenBatch:
        """The same batch with exact zeros at mask 0 in every real-valued row field."""
        filled = {name: getattr(self, name) for name in ROW_FIELDS}
        real: dict[str, Any] = {
            name: torch.where(
                self.mask_BT if tensor.dim() == 2 else self.mask_BT[..., None], tensor, 0.0
            )
            for name, tensor in filled.items()
            if tensor is not None and tensor.is_floating_point()
        }
        return replace(self, **real)

    def rows(self, index: Tensor) -> TokenBatch:
        """The rows of an index, cut to the longest of them; denominators and episodes stay."""
        lengths = self.lengths_B[index]
        width = int(lengths.max()) if len(lengths) else 0
        there = {name: getattr(self, name) for name in ROW_FIELDS}
        cut: dict[str, Any] = {
            name: tensor[index, :width] for name, tensor in there.items() if tensor is not None
        }
        return replace(self, episode_B=self.episode_B[index], **cut)

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
            " or with tokens=true from a server that tells them, as vLLM and SGLang do"
        )


@dataclass(frozen=True, eq=False)
class PolicyOutput:
    """What the model says about a batch, at trained tokens; other positions hold 0.

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

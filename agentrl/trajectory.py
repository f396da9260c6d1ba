"""Episode ⊃ Trajectory ⊃ Segment: what was said, token by token, and by whom.

A token is trained if and only if it stands in a sampled segment that its trajectory owns. No mask
is stored, so no mask can be wrong. Letters: B rows, T positions, G episodes of one group.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import Enum
from functools import cached_property
from typing import Any, Literal, NamedTuple, Self

from agentrl.types import Ending, EndReason, Message, Score, TaskView

FinishReason = Literal["stop", "length"]


Phase = Literal["train", "eval", "greedy"]


class SegmentKind(Enum):
    """Who wrote the tokens: the task's opening, the policy, or the world."""

    PROMPT = "prompt"
    SAMPLED = "sampled"
    OBSERVATION = "observation"


@dataclass(frozen=True, slots=True)
class Segment:
    """A run of tokens with one author. Build it with `prompt`, `sampled` or `observation`.

    Attributes:
        ids: token ids, exactly as they entered or left the engine; the stop token that was sampled
            included.
        logprobs: for sampled tokens, log-probabilities under the distribution they were sampled
            from; else empty.
        version: policy version that sampled them; -1 for the other kinds.
        finish: why sampling stopped; None for the other kinds.
    """

    kind: SegmentKind
    ids: tuple[int, ...]
    logprobs: tuple[float, ...] = ()
    version: int = -1
    finish: FinishReason | None = None

    def __post_init__(self) -> None:
        if self.ids and min(self.ids) < 0:
            raise ValueError(f"token ids are not negative, as {min(self.ids)} is")
        if self.kind is not SegmentKind.SAMPLED:
            if self.logprobs or self.version != -1 or self.finish is not None:
                raise ValueError(
                    f"a {self.kind.value} segment has no logprobs, version or finish reason"
                )
            return
        if not self.ids:
            raise ValueError("a sampled segment has at least one token")
        if len(self.logprobs) != len(self.ids):
            raise ValueError(f"{len(self.ids)} sampled ids but {len(self.logprobs)} logprobs")
        if any(not math.isfinite(logprob) or logprob > 1e-4 for logprob in self.logprobs):
            raise ValueError("sampled logprobs must be finite and not above zero")
        if self.version < 0 or self.finish is None:
            raise ValueError("a sampled segment needs a policy version >= 0 and a finish reason")

    @classmethod
    def prompt(cls, ids: Sequence[int]) -> Self:
        """The rendered opening of a branch."""
        return cls(SegmentKind.PROMPT, tuple(ids))

    @classmethod
    def observation(cls, ids: Sequence[int]) -> Self:
        """What the world answered, with the template's tokens around it."""
        return cls(SegmentKind.OBSERVATION, tuple(ids))

    @classmethod
    def sampled(
        cls, ids: Sequence[int], logprobs: Sequence[float], version: int, finish: FinishReason
    ) -> Self:
        """What the policy wrote."""
        return cls(SegmentKind.SAMPLED, tuple(ids), tuple(logprobs), version, finish)


@dataclass(frozen=True)
class Trajectory:
    """One branch of history.

    Attributes:
        segments: the whole branch from its prompt on.
        shared: how many leading segments belong to an earlier branch; they are context here and
            trained there.
        experts: which experts the first tokens of the branch went to where a mixture of experts
            sampled it: an array of integers (tokens, layers with a router, experts of a token).
            Only what was read has any, so that the last sampled token lacks them. None: not told.
    """

    segments: tuple[Segment, ...]
    shared: int = 0
    experts: Any = field(default=None, compare=False, repr=False)

    def __post_init__(self) -> None:
        if not self.segments or self.segments[0].kind is not SegmentKind.PROMPT:
            raise ValueError("a trajectory starts with a prompt segment")
        if any(segment.kind is SegmentKind.PROMPT for segment in self.segments[1:]):
            raise ValueError("a trajectory has one prompt segment")
        if not 0 <= self.shared <= len(self.segments):
            raise ValueError(
                f"shared={self.shared} but the trajectory has {len(self.segments)} segments"
            )
        if self.experts is not None and len(self.experts) > len(self.ids):
            raise ValueError(f"{len(self.ids)} ids but experts of {len(self.experts)} tokens")

    @cached_property
    def ids(self) -> tuple[int, ...]:
        """All token ids, in order (length T)."""
        return tuple(token for segment in self.segments for token in segment.ids)

    @cached_property
    def mask(self) -> tuple[int, ...]:
        """1 on the tokens that train (sampled, and owned by this branch), else 0 (length T)."""
        return tuple(
            int(index >= self.shared and segment.kind is SegmentKind.SAMPLED)
            for index, segment in enumerate(self.segments)
            for _ in segment.ids
        )

    @cached_property
    def logprobs(self) -> tuple[float, ...]:
        """Sampling log-probabilities, 0.0 where nothing was sampled (length T)."""
        return tuple(
            logprob
            for segment in self.segments
            for logprob in segment.logprobs or (0.0,) * len(segment.ids)
        )

    @cached_property
    def turn_of(self) -> tuple[int, ...]:
        """Index of the sampled turn of each token; -1 for prompt and observation (length T)."""
        turns: list[int] = []
        turn = -1
        for segment in self.segments:
            turn += segment.kind is SegmentKind.SAMPLED
            turns += [turn if segment.kind is SegmentKind.SAMPLED else -1] * len(segment.ids)
        return tuple(turns)

    @property
    def trained(self) -> int:
        """Number of tokens that train."""
        return sum(self.mask)

    def extend(self, *segments: Segment) -> Trajectory:
        """The same branch with more segments at its end."""
        return Trajectory(self.segments + segments, self.shared, self.experts)

    def routed(self, experts: Any) -> Trajectory:
        """The same branch with the experts of its first tokens; of a token that had some they stay,
        as it was sampled or first read with those. None: nothing more is known.
        """
        if experts is not None and self.experts is not None:
            import numpy as np

            experts = np.concatenate([self.experts, experts[len(self.experts) :]])
        return self if experts is None else replace(self, experts=experts)

    def fork(self, at: int | None = None) -> Trajectory:
        """A new branch whose first `at` segments (default: all) are this one's."""
        keep = len(self.segments) if at is None else at
        tokens = sum(len(segment.ids) for segment in self.segments[:keep])
        experts = None if self.experts is None else self.experts[:tokens]
        return Trajectory(self.segments[:keep], keep, experts)


class EpisodeKey(NamedTuple):
    """Identifies one episode; a second record with the same key replaces the first.

    Attributes:
        run: name of the run.
        round: number of the dispatch within the run, from 0. It says nothing about the weights:
            `Episode.version` does.
        task: id of the task.
        sample: index within the group of G episodes.
        attempt: how often infrastructure failed this episode before.
        phase: purpose of the episode: training, evaluation, or the greedy baseline of training.
        draw: index of the draw of tasks within the round; above 0 for replacement groups.
    """

    run: str
    round: int
    task: str
    sample: int
    attempt: int = 0
    phase: Phase = "train"
    draw: int = 0

    @property
    def step(self) -> int:
        """The round, by its former name."""
        return self.round


@dataclass(frozen=True)
class Counts:
    """What happened in an episode.

    Attributes:
        tool_errors: calls that were answered by an error, unreadable and denied ones included.
        bad_calls: calls that could not be read.
        denied: calls that a guard denied.
        wall_s: seconds.
        usd: price in US dollars; None where not known.
        by_tool: calls of each tool.
    """

    turns: int = 0
    tool_calls: int = 0
    tool_errors: int = 0
    bad_calls: int = 0
    denied: int = 0
    sampled_tokens: int = 0
    prompt_tokens: int = 0
    wall_s: float = 0.0
    usd: float | None = None
    by_tool: Mapping[str, int] = field(default_factory=dict)


Verdict = Literal["allow", "deny", "preview", "rollback"]


@dataclass(frozen=True, slots=True)
class CallEvent:
    """What a guard decided about one tool call.

    Attributes:
        turn, index: of the call, from 1, as `agentrl.calls.CallContext` counts them.
        tool: its name.
        effect: the strictest effect that the call may have.
        verdict: "allow"; "deny"; "preview" where only what it would do was told; "rollback" where
            it ran and was undone.
        rule: id of the rule that decided.
        by: who was asked, with the answer; empty where nobody was.
        taint: sources of untrusted text that stood in the arguments.
    """

    turn: int
    index: int
    tool: str
    effect: str
    verdict: Verdict
    rule: str = ""
    by: str = ""
    taint: tuple[str, ...] = ()


@dataclass(frozen=True)
class Episode:
    """One finished play of one task.

    Attributes:
        task: the task without its hidden part.
        start: fingerprint of the start state; equal for all episodes of a group.
        trajectories: branches of history in the order they were opened; empty for policies that
            speak messages.
        messages: the conversation for people and message-level verifiers.
        artifacts: declared files, as they left the sandbox (base64 in records when not UTF-8).
        side_effects: what was changed -> how; None where nobody measured it.
        events: what a guard decided about each call, in order; empty without a guard.
        failure: what broke, when `end` is a failure.
        seed: base seed of the run. Every random number of the episode is derived from it and from
            the key; see `agentrl.rollout.play.derive_seed`.
        version: version of the policy's weights when the episode began; None if they have none.
            Weights may be replaced while it plays: each sampled segment has its own version.
    """

    key: EpisodeKey
    env: str
    task: TaskView
    start: str
    messages: tuple[Message, ...]
    end: EndReason
    score: Score
    trajectories: tuple[Trajectory, ...] = ()
    counts: Counts = Counts()
    artifacts: Mapping[str, bytes] = field(default_factory=dict)
    side_effects: Mapping[str, str] | None = None
    events: tuple[CallEvent, ...] = ()
    failure: str = ""
    seed: int = 0
    version: int | None = None

    def __post_init__(self) -> None:
        failed = self.end.ending is Ending.FAILED
        if failed != (self.score.value is None):
            raise ValueError(f"end={self.end.value} does not go with score={self.score.value}")
        for index, branch in enumerate(self.trajectories):
            if branch.shared and not any(
                earlier.segments[: branch.shared] == branch.segments[: branch.shared]
                for earlier in self.trajectories[:index]
            ):
                raise ValueError(
                    f"branch {index} shares {branch.shared} segments that no earlier branch has"
                )

    @property
    def reward(self) -> float | None:
        """The score's value; None when infrastructure failed."""
        return self.score.value

    @property
    def passed(self) -> bool | None:
        """Whether the unshaped score reaches the threshold; None when infrastructure failed."""
        return None if self.score.verdict is None else self.score.verdict >= self.task.threshold

    @property
    def truncated(self) -> bool:
        """Whether a limit ended the episode."""
        return self.end.ending is Ending.TRUNCATED


def token_rewards(
    episode: Episode, weights: Mapping[str, float] | None = None
) -> tuple[tuple[float, ...], ...]:
    """The process rewards of an episode per token: one row per branch, as long as its ids.

    The last sampled token of a turn has the turn's reward, in the branch that owns it; every other
    token has 0.0. Turn t is the t-th sampled segment of all branches, shared ones left out.

    Args:
        weights: of the named terms of `score.turns`, 0.0 where one is missing; None for all 1.0.

    Raises:
        ValueError: a term has not one reward per sampled turn; one more is accepted, since a limit
            may end the last turn before its first token.
    """
    totals, owns = iter(turn_rewards(episode, weights)), iter(_owned(episode))
    rows = []
    for branch in episode.trajectories:
        row: list[float] = []
        for segment in branch.segments:
            row += [0.0] * len(segment.ids)
            if next(owns):
                row[-1] = next(totals, 0.0)
        rows.append(tuple(row))
    return tuple(rows)


def turn_rewards(episode: Episode, weights: Mapping[str, float] | None = None) -> tuple[float, ...]:
    """The process rewards of an episode, summed over their names: one for each sampled turn.

    Args and errors are those of `token_rewards`.
    """
    sampled = sum(_owned(episode))
    for name, rewards in episode.score.turns.items():
        if episode.trajectories and not sampled <= len(rewards) <= sampled + 1:
            raise ValueError(
                f"process reward {name!r} has {len(rewards)} turns, but {sampled} were sampled"
            )
    scale = dict.fromkeys(episode.score.turns, 1.0) if weights is None else weights
    terms = [
        [scale.get(name, 0.0) * reward for reward in rewards[:sampled]]
        for name, rewards in episode.score.turns.items()
    ]
    return tuple(math.fsum(turn) for turn in zip(*terms, strict=False))


def _owned(episode: Episode) -> list[bool]:
    """Of every segment of every branch, whether it is a sampled turn that the branch owns."""
    return [
        segment.kind is SegmentKind.SAMPLED and index >= branch.shared
        for branch in episode.trajectories
        for index, segment in enumerate(branch.segments)
    ]


@dataclass(frozen=True)
class Group:
    """G episodes of one task from one start state; failed ones are kept and marked."""

    episodes: tuple[Episode, ...]

    def __post_init__(self) -> None:
        if not self.episodes:
            raise ValueError("a group has at least one episode")
        if len({episode.task.id for episode in self.episodes}) != 1:
            raise ValueError("a group holds episodes of one task")
        if len({episode.key for episode in self.episodes}) != len(self.episodes):
            raise ValueError(f"task {self.task.id}: two episodes of the group have one key")
        starts = {episode.start for episode in self.episodes if episode.start}
        if len(starts) > 1:
            raise ValueError(
                f"task {self.task.id}: start states differ within the group ({sorted(starts)})"
            )

    @property
    def task(self) -> TaskView:
        """The task all episodes played."""
        return self.episodes[0].task

    @property
    def versions(self) -> tuple[int, int] | None:
        """Oldest and newest weight version of the sampled tokens; None if nothing was sampled."""
        versions = {
            segment.version
            for episode in self.episodes
            for branch in episode.trajectories
            for segment in branch.segments
            if segment.kind is SegmentKind.SAMPLED
        }
        return (min(versions), max(versions)) if versions else None

    @property
    def rewards_G(self) -> tuple[float | None, ...]:
        """Rewards of the G episodes; None for those that infrastructure failed."""
        return tuple(episode.reward for episode in self.episodes)

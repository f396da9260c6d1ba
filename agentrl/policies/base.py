"""Who acts. A policy makes one player per episode; a player turns history into the next assistant
message.

`TokenPolicy` is the only one that can be trained: it keeps the exact ids that went into and came
out of its engine. Scripted policies speak messages and leave no tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, replace
from typing import NamedTuple, Protocol

from agentrl.chat.tokens import Chat
from agentrl.engines.base import Engine, Restarted, Sampling
from agentrl.trajectory import Episode, Segment, Trajectory
from agentrl.types import EndReason, Limits, Message, Task, ToolSpec


class Player(Protocol):
    """One policy in one episode."""

    @property
    def trajectories(self) -> tuple[Trajectory, ...]:
        """What was sampled so far, branch by branch; empty for policies that speak messages."""
        ...

    async def act(
        self, history: Sequence[Message], tools: Sequence[ToolSpec]
    ) -> tuple[Message, EndReason | None]:
        """Return the next assistant message, and the ending if a token limit cut it short.

        Raises:
            EngineError: sampling failed.
        """
        ...


class Usage(NamedTuple):
    """Tokens of one episode, and what they cost in US dollars; None where nobody knows."""

    sampled_tokens: int = 0
    prompt_tokens: int = 0
    usd: float | None = None


def usage_of(player: Player | None) -> Usage:
    """What a player used: its own `usage` where it has one, as those of served models do, else its
    trajectories'.
    """
    told = getattr(player, "usage", None)
    if isinstance(told, Usage):
        return told
    branches = player.trajectories if player else ()
    sampled = sum(branch.trained for branch in branches)
    return Usage(sampled, sum(len(branch.ids) for branch in branches) - sampled)


def thinking_s(player: Player) -> float | None:
    """Seconds of its last turn that count against the wall limit of an episode.

    None: all of them. A player of a served model tells its own time from what it waited for, since
    neither a full server nor a limit of requests is the agent's fault; its turns have time limits
    of their own.
    """
    told = getattr(player, "thinking_s", None)
    return told if isinstance(told, float) else None


class Policy(Protocol):
    """Makes players."""

    name: str

    def player(self, task: Task, limits: Limits, seed: int) -> AbstractContextManager[Player]:
        """A player for one episode; all its chance comes from `seed`."""
        ...


class Scripted:
    """Plays fixed messages, for example the oracle's; when they run out it says nothing, which ends
    most episodes.

    Args:
        name: what records call it.
        script: the messages for a task. It sees the whole task: scripts are references, not agents.
    """

    def __init__(self, name: str, script: Callable[[Task], Iterable[Message]]) -> None:
        self.name = name
        self._script = script

    @contextmanager
    def player(self, task: Task, limits: Limits, seed: int) -> Iterator[Player]:
        """A player that reads the script from its start."""
        yield _ScriptedPlayer(iter(self._script(task)))


def noop() -> Scripted:
    """The policy that does nothing: it ends every episode with an empty answer."""
    return Scripted("noop", lambda task: ())


def recorded(episode: Episode) -> Scripted:
    """The policy that says again what the assistant said in `episode`."""
    return Scripted(
        "recorded",
        lambda task: [message for message in episode.messages if message.role == "assistant"],
    )


@dataclass
class _ScriptedPlayer:
    script: Iterator[Message]
    trajectories: tuple[Trajectory, ...] = ()

    async def act(
        self, history: Sequence[Message], tools: Sequence[ToolSpec]
    ) -> tuple[Message, EndReason | None]:
        return next(self.script, Message.assistant("")), None


class TokenPolicy:
    """Samples from an engine, token by token, and keeps every id.

    Args:
        engine: ids in, ids and log-probabilities out.
        chat: how messages become ids, and sampled ids a message.
        sampling: temperature and the like; `max_tokens` is bounded further by the environment's
            limits.
    """

    def __init__(
        self, engine: Engine, chat: Chat, sampling: Sampling | None = None, name: str = "model"
    ) -> None:
        self.name = name
        self.engine = engine
        self.chat = chat
        self.sampling = sampling or Sampling()

    @contextmanager
    def player(self, task: Task, limits: Limits, seed: int) -> Iterator[TokenPlayer]:
        """A player with a seat at the engine for as long as the block lasts."""
        with self.engine.seat():
            yield TokenPlayer(self, limits, seed)


class TokenPlayer:
    """The append-only token history of one episode; a rewritten history opens a new branch."""

    def __init__(self, policy: TokenPolicy, limits: Limits, seed: int) -> None:
        self._policy = policy
        self._limits = limits
        self._seed = seed
        self._branches: list[Trajectory] = []
        self._seen = 0
        self._sampled = 0
        self._turn = 0

    def take(self, branches: Sequence[Trajectory], seen: int) -> None:
        """Go on from what was sampled elsewhere.

        Args:
            branches: up to the last sampled token.
            seen: messages before the last one that was sampled.
        """
        self._branches, self._seen = list(branches), seen
        sampled = [s for b in branches for s in b.segments[b.shared :] if s.finish]
        self._turn, self._sampled = len(sampled), sum(len(segment.ids) for segment in sampled)

    @property
    def trajectories(self) -> tuple[Trajectory, ...]:
        """The branches so far; each ends with what was sampled."""
        return tuple(self._branches)

    @property
    def thinking_s(self) -> float | None:
        """None: all of a turn counts; nothing of one that waits for a process to start."""
        engine = self._policy.engine
        return 0.0 if isinstance(engine, Restarted) and engine.is_away else None

    async def act(
        self, history: Sequence[Message], tools: Sequence[ToolSpec]
    ) -> tuple[Message, EndReason | None]:
        """Sample one turn after `history`; a branch keeps only what the engine was asked to
        continue.
        """
        engine, chat, sampling = self._policy.engine, self._policy.chat, self._policy.sampling
        branch = self._advance(history, tools)
        room = engine.context_length - len(branch.ids)
        left = self._limits.episode_tokens - self._sampled
        if room < 1 or left < 1:
            return Message.assistant(
                ""
            ), EndReason.CONTEXT_LENGTH if room < 1 else EndReason.MAX_TOKENS
        budget = min(sampling.max_tokens, self._limits.turn_tokens, left, room)
        seed = turn_seed(self._seed, self._turn)
        out = await engine.generate(branch.ids, replace(sampling, max_tokens=budget), seed=seed)
        if len(branch.segments) == 1:
            self._branches.append(branch)
        said = Segment.sampled(out.ids, out.logprobs, out.version, out.finish)
        self._branches[-1] = branch.extend(said).routed(out.per_token.get("routing"))
        self._sampled += len(out.ids)
        self._turn += 1
        self._seen = len(history)
        message = chat.parse(out.ids, branch.ids, tools)
        if out.finish == "stop":
            return message, None
        return message, EndReason.CONTEXT_LENGTH if budget == room else EndReason.MAX_TOKENS

    def _advance(self, history: Sequence[Message], tools: Sequence[ToolSpec]) -> Trajectory:
        """The current branch brought up to `history`, or a new one; ids that exist are never made
        again.
        """
        chat = self._policy.chat
        if not self._branches:
            return Trajectory((Segment.prompt(chat.prompt_ids(history, tools)),))
        branch = self._branches[-1]
        turn, new = history[self._seen], history[self._seen + 1 :]
        if chat.needs_new_branch(history[: self._seen + 1], new, tools):
            return Trajectory((Segment.prompt(chat.prompt_ids(history, tools)),))
        last = branch.segments[-1]
        ids = chat.observation_ids(turn, last.ids, new, tools, last.finish or "stop")
        return branch.extend(Segment.observation(ids))


def turn_seed(seed: int, turn: int) -> int:
    """A seed for one turn of one episode (splitmix64: neighbours give unrelated streams)."""
    state = (seed + (turn + 1) * 0x9E3779B97F4A7C15) & 0xFFFFFFFFFFFFFFFF
    state = ((state ^ (state >> 30)) * 0xBF58476D1CE4E5B9) & 0xFFFFFFFFFFFFFFFF
    state = ((state ^ (state >> 27)) * 0x94D049BB133111EB) & 0xFFFFFFFFFFFFFFFF
    return (state ^ (state >> 31)) & 0x7FFFFFFFFFFFFFFF

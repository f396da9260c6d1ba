"""Dialogues: environments in which a user answers the agent, by a script or by any policy."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass
from typing import Protocol

from agentrl.env import Step, ToolEnv
from agentrl.policies.base import Player, Policy
from agentrl.types import EndReason, Limits, Message, Task, TaskView

STOP = "###STOP###"
"""What a simulated user says when nothing is left to ask for."""

PERSONA = (
    "You play a person who talks to an assistant. Say one short message at a time, as that person"
    " would, and tell only what is asked for. Never help the assistant with its work. When all that"
    f" you wanted is done, or cannot be done, say {STOP} and nothing else."
)


class Speaker(Protocol):
    """A user in one episode."""

    async def reply(self, said: str) -> str | None:
        """The answer to what the agent said; None where the user has nothing left to say.

        Raises:
            EngineError: the policy behind it failed.
        """
        ...


class User(Protocol):
    """Makes speakers."""

    def speaker(self, task: TaskView, limits: Limits, seed: int) -> AbstractContextManager[Speaker]:
        """A speaker for one episode; all its chance comes from `seed`."""
        ...


class ScriptedUser:
    """Says the lines of `task.metadata["user"]["lines"]`, one after each turn of the agent."""

    @contextmanager
    def speaker(self, task: TaskView, limits: Limits, seed: int) -> Iterator[Speaker]:
        """A speaker at the first line."""
        yield _Script(iter(task.metadata.get("user", {}).get("lines", ())))


@dataclass
class _Script:
    lines: Iterator[str]

    async def reply(self, said: str) -> str | None:
        return next(self.lines, None)


@dataclass(frozen=True)
class PolicyUser:
    """Any policy as the user: it reads the conversation with the two sides exchanged.

    It is told `PERSONA`, `task.metadata["user"]["goal"]` and how the user opened; the agent sees
    none of the first two.
    """

    policy: Policy

    @contextmanager
    def speaker(self, task: TaskView, limits: Limits, seed: int) -> Iterator[Speaker]:
        """A speaker with a player of its own."""
        goal = task.metadata.get("user", {}).get("goal", "")
        told = f"{PERSONA}\n\n{goal}\n\nYou have opened with: {task.instruction}".strip()
        whole = Task(id=task.id, instruction=task.instruction, metadata=dict(task.metadata))
        with self.policy.player(whole, limits, seed) as player:
            yield _Played(player, [Message.system(told)])


@dataclass
class _Played:
    player: Player
    history: list[Message]

    async def reply(self, said: str) -> str | None:
        self.history.append(Message.user(said))
        message, _ = await self.player.act(self.history, ())
        self.history.append(message)
        text, stop, _ = message.content.partition(STOP)
        return None if stop or not text.strip() else text.strip()


class Dialogue(ToolEnv):
    """An environment whose user answers each turn of the agent that calls no tool.

    The episode ends when the user has nothing left to say, by a tool that calls `finish`, or at a
    limit. `agentrl eval --user POLICY` sets another user.

    Attributes:
        user: who answers.
    """

    user: User = ScriptedUser()
    _speaker: Speaker | None = None
    _left: Callable[[], object] = staticmethod(lambda: None)

    async def on_text(self, message: Message) -> Step:
        """The user's answer, or the end."""
        if self._speaker is None:
            seats = ExitStack()
            seed = self.rng.getrandbits(62)
            self._speaker = seats.enter_context(self.user.speaker(self.task, self.limits, seed))
            self._left = seats.close
        said = await self._speaker.reply(message.content)
        return Step(end=EndReason.ANSWERED) if said is None else Step((Message.user(said),))

    async def close(self) -> None:
        """Let the user go; a subclass that has a `close` of its own calls this one."""
        self._left()

"""What a tool call gives, and the guard that may stand around each call."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, Protocol

from agentrl.sandboxes.base import Sandbox
from agentrl.types import TaskView, ToolCall, ToolSpec

ErrorKind = Literal["bad_call", "unknown_tool", "bad_arguments", "denied", "tool_error", "timeout"]

_ERROR_CHARS = 400


@dataclass(frozen=True, slots=True)
class ToolResult:
    """The text that the agent sees after a call, and the kind of error if it is one."""

    text: str
    error: ErrorKind | None = None

    @classmethod
    def failed(cls, kind: ErrorKind, sentence: str) -> ToolResult:
        """The fixed form of every error: `error: <kind>: <sentence>`, at most 400 characters."""
        text = printable(" ".join(sentence.split()))
        return cls(f"error: {kind}: {text[:_ERROR_CHARS]}", kind)


def printable(text: str) -> str:
    """The text with lone surrogates replaced, since no tokenizer takes them."""
    return text if text.isascii() else text.encode(errors="replace").decode()


@dataclass(frozen=True, slots=True)
class CallContext:
    """Where in an episode a call is made.

    Attributes:
        env: id of the environment.
        task: the task without its hidden part.
        turn: number of the assistant's turn, from 1.
        index: number of the call in the episode, from 1.
        sandbox: the episode's sandbox; None if it has none.
    """

    env: str
    task: TaskView
    turn: int
    index: int
    sandbox: Sandbox | None


@dataclass(frozen=True, slots=True)
class Decision:
    """What becomes of a call; build it with `allow`, `deny` or `answer`.

    Attributes:
        result: what the agent sees instead of the tool's answer; None runs the tool.
    """

    result: ToolResult | None = None

    @classmethod
    def allow(cls) -> Decision:
        """Run the tool."""
        return cls()

    @classmethod
    def deny(cls, reason: str) -> Decision:
        """Do not run it; the agent sees `error: denied: <reason>`."""
        return cls(ToolResult.failed("denied", reason))

    @classmethod
    def answer(cls, text: str) -> Decision:
        """Do not run it; the agent sees this text, for example a preview of what it would do."""
        return cls(ToolResult(printable(text)))


class Guard(Protocol):
    """Stands around the tool calls of one episode.

    Both methods run outside of the tool's own time limit and inside of the episode's. An exception
    from either one ends the episode, so that no call runs unchecked. The agent may have caused it:
    the episode has failed, unless the reference solution meets the same (`rollout.blame`).
    """

    async def before(self, call: ToolCall, tool: ToolSpec, context: CallContext) -> Decision:
        """Decide about a call whose tool exists and whose arguments fit it."""

    async def after(self, call: ToolCall, result: ToolResult, context: CallContext) -> None:
        """See the result of a call that ran, errors and time-outs of the tool included.

        Not called where the sandbox was lost or the episode was cut off during the call.
        """

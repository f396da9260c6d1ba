"""What a tool call gives, and the guard that may stand around each call."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

from agentrl.sandboxes.base import Sandbox
from agentrl.trajectory import CallEvent, Verdict
from agentrl.types import BadCall, Json, Message, TaskView, ToolCall, ToolSpec

ErrorKind = Literal["bad_call", "unknown_tool", "bad_arguments", "denied", "tool_error", "timeout"]

Opening = tuple[Message, ...]

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


MOST_DIGITS = 400
"""Longest integer in an argument; Python refuses to write one of more than 4,300 digits as text."""
MOST_DEPTH = 64
"""Deepest nesting of an argument; JSON readers refuse a few hundred levels."""


def recordable(call: ToolCall | BadCall) -> ToolCall | BadCall:
    """The call, or an unreadable one in its place if its arguments cannot be written as JSON."""
    if isinstance(call, BadCall):
        return call
    why = _why_unrecordable(call.arguments, MOST_DEPTH)
    return BadCall(f"{call.name}(…)", f"{call.name}: {why}") if why else call


def _why_unrecordable(value: Json, depth: int) -> str:
    if isinstance(value, str | bool) or value is None:
        return ""
    if isinstance(value, int):
        # 3.3 bits make a decimal digit; the bit length is known without writing the number.
        too_long = value.bit_length() > MOST_DIGITS * 3.33
        return f"a number has more than {MOST_DIGITS} digits" if too_long else ""
    if isinstance(value, float):
        return ""
    if not depth:
        return f"the arguments are nested deeper than {MOST_DEPTH} levels"
    if isinstance(value, Mapping):
        if not all(isinstance(key, str) for key in value):
            return "a key is not text"
        value = list(value.values())
    if not isinstance(value, list | tuple):
        return f"{type(value).__name__} is not a JSON value"
    return next(filter(None, (_why_unrecordable(item, depth - 1) for item in value)), "")


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
        verdict: what is recorded, see `agentrl.trajectory.CallEvent`.
        rule: id of the rule that decided.
        by: who was asked, with the answer; empty where nobody was.
        effect: the strictest effect that the call may have; empty for that of the tool.
        taint: sources of untrusted text that stood in the arguments.
        ends: whether the episode ends here, as a violation.
    """

    result: ToolResult | None = None
    verdict: Verdict = "allow"
    rule: str = ""
    by: str = ""
    effect: str = ""
    taint: tuple[str, ...] = ()
    ends: bool = False

    @classmethod
    def allow(cls, rule: str = "") -> Decision:
        """Run the tool."""
        return cls(rule=rule)

    @classmethod
    def deny(cls, reason: str, rule: str = "") -> Decision:
        """Do not run it; the agent sees `error: denied: <reason>`."""
        return cls(ToolResult.failed("denied", reason), "deny", rule)

    @classmethod
    def answer(cls, text: str, rule: str = "") -> Decision:
        """Do not run it; the agent sees this text, for example a preview of what it would do."""
        return cls(ToolResult(printable(text)), "preview", rule)

    def event(self, call: ToolCall, tool: ToolSpec, context: CallContext) -> CallEvent:
        """What is recorded of it."""
        return CallEvent(
            turn=context.turn,
            index=context.index,
            tool=call.name,
            effect=self.effect or tool.effect,
            verdict=self.verdict,
            rule=self.rule,
            by=self.by,
            taint=self.taint,
        )


class Guard(Protocol):
    """Stands around the tool calls of one episode.

    Its methods run outside of the tool's own time limit, `before` and `after` inside of the
    episode's. An exception from any of them ends the episode, so that no call runs unchecked. The
    agent may have caused it: the episode has failed, unless the reference solution meets the same
    (`rollout.blame`). Inherit from it for the defaults.
    """

    async def start(self, opening: Opening, sandbox: Sandbox | None, seed: int) -> Opening:
        """See an episode begin: return its opening messages, changed or not.

        Args:
            opening: what the environment says first.
            sandbox: with the task's files in it; None where there is none.
            seed: equal for the episodes of a group.
        """
        return opening

    async def before(self, call: ToolCall, tool: ToolSpec, context: CallContext) -> Decision:
        """Decide about a call whose tool exists and whose arguments fit it."""
        ...

    async def after(
        self, call: ToolCall, result: ToolResult, context: CallContext
    ) -> Decision | None:
        """See the result of a call that ran, errors and time-outs of the tool included.

        Not called where the sandbox was lost or the episode was cut off during the call. A decision
        with a result replaces what the agent sees; None leaves it.
        """
        ...

    def found(self, messages: Sequence[Message], files: Mapping[str, bytes]) -> dict[str, str]:
        """Side effects that it saw in the whole conversation and in the files handed in."""
        return {}

    def removed(self) -> Collection[str]:
        """Paths that went because it undid calls: no side effects of the agent."""
        return ()

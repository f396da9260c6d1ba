"""What a chat template is handed: roles it may not know, and tools that it does not show."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from typing import Any, Literal

from agentrl.chat.parsing import Format, dumps
from agentrl.types import BadCall, Message, ToolCall, ToolSpec

Row = dict[str, Any]
CallStyle = Literal["plain", "object", "json"]
ToolRole = Literal["auto", "tool", "user"]

SENTINEL = "agentrlStandInTurn"
BADLY_NAMED = "invalid_call"
SHOWS_NO_TOOLS = "{#- tools: none are shown -#}"
"""A template with this comment is never given a description of tools: its model has learnt them."""


def as_user(messages: Sequence[Message]) -> list[Message]:
    """Tool results as user messages; those of one turn in one message."""
    rows: list[Message] = []
    for before, message in zip([None, *messages], messages, strict=False):
        if message.role != "tool":
            rows.append(message)
            continue
        text = f"<tool_response>\n{message.content}\n</tool_response>"
        if before is not None and before.role == "tool":
            text = f"{rows.pop().content}\n{text}"
        rows.append(Message.user(text))
    return rows


def example_call(form: Format) -> str:
    """How a call is written, with words in the places of name and arguments."""
    return form.write("", [ToolCall("TOOL", {"ARGUMENT": "VALUE"})])


def described(tools: Sequence[ToolSpec]) -> str:
    """The tools in words, for templates that do not show them."""
    lines = "\n".join(dumps(tool.schema()) for tool in tools)
    return (
        f"You can call these tools:\n{lines}\n\n"
        "To call one, write its name and arguments in this form, and then wait for the result:\n"
    )


def call_id(call: ToolCall | BadCall, index: int) -> str:
    """The id of a call; those without one are numbered within their turn."""
    return getattr(call, "id", "") or f"call{index:05d}"


def one_of(texts: Iterable[str]) -> re.Pattern[str]:
    """A pattern of these texts, the longest first; it matches nothing if there are none."""
    ordered = sorted(texts, key=len, reverse=True)
    return re.compile("|".join(map(re.escape, ordered)) or r"(?!)")


def behind_nth(text: str, count: int) -> int:
    """Index behind the `count`-th stand-in text; -1 if there are fewer."""
    at = 0
    for _ in range(count):
        found = text.find(SENTINEL, at)
        if found < 0:
            return -1
        at = found + len(SENTINEL)
    return at if count else -1


def common_prefix(left: str, right: str) -> str:
    """The longest text that both begin with."""
    length = next(
        (i for i, (a, b) in enumerate(zip(left, right, strict=False)) if a != b),
        min(len(left), len(right)),
    )
    return left[:length]

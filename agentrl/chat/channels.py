"""Turns of several messages, each with a recipient: gpt-oss' harmony and Muse's atem.

<|channel|>analysis<|message|>WHY<|end|><|start|>assistant to=functions.f<|channel|>commentary…
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial

from agentrl.chat.parsing import (
    BAD_INVOKE,
    TRAILING,
    Call,
    Format,
    Parsed,
    Refused,
    TextKeys,
    decode_at,
    dumps,
    join_pieces,
    skip_space,
)
from agentrl.chat.tagged import INVOKE_TAGS, invoke_text, read_block, read_invokes, to_call
from agentrl.types import BadCall, ToolCall

_MESSAGE = "<|message|>"
_NEXT = "<|start|>assistant"
_RECIPIENT = re.compile(r"(?<![^\s>])to=([^\s<]+)")
_CHANNEL = re.compile(r"<\|channel\|>\s*(\w+)")
_HEADER = re.compile(r"<\|start\|>|<\|channel\|>|(?<![^\s>])to=|<\|constrain\|>")


@dataclass(frozen=True, slots=True)
class Channels:
    """A format of messages with headers.

    Attributes:
        between: what ends a message within a turn.
        ends: everything that ends a message.
        reasons: whether a header (recipient, channel) is that of reasoning.
        calls: whether it is that of a call.
        read: reads the call of a recipient: (calls, where they end).
        write: a call with its header.
        headers: those of reasoning, of content before a call, and of an answer.
    """

    between: str
    ends: tuple[str, ...]
    reasons: Callable[[str, str], bool]
    calls: Callable[[str], bool]
    read: Callable[[str, int, str, TextKeys], tuple[list[Call], int]]
    write: Callable[[ToolCall], str]
    headers: tuple[str, str, str]
    _end: re.Pattern[str] = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "_end", re.compile("|".join(map(re.escape, self.ends))))

    def parse(self, text: str, texts: TextKeys = frozenset()) -> Parsed:
        """Read a turn, message by message."""
        content: list[str] = []
        reasoning: list[str] = []
        calls: list[Call] = []
        position = 0
        while (mark := text.find(_MESSAGE, position)) >= 0:
            position = skip_space(text, position)
            if text.startswith(_NEXT, position):
                position += len(_NEXT)
            head = _HEADER.search(text, position, mark)
            content.append(text[position : head.start() if head else mark])
            header = text[head.start() : mark] if head else ""
            recipient, channel = _first(_RECIPIENT, header), _first(_CHANNEL, header)
            inside = mark + len(_MESSAGE)
            if self.calls(recipient):
                start = head.start() if head else mark
                found, position = self._call(text, (start, inside), recipient, texts)
                calls += found
                continue
            end = self._end.search(text, inside)
            body = text[inside : end.start() if end else len(text)]
            (reasoning if self.reasons(recipient, channel) else content).append(body)
            position = end.end() if end else len(text)
        content.append(text[position:].removeprefix(_NEXT))
        return Parsed(join_pieces(content), join_pieces(reasoning), tuple(calls))

    def _call(
        self, text: str, at: tuple[int, int], recipient: str, texts: TextKeys
    ) -> tuple[list[Call], int]:
        """Read the call whose (header, body) start there; one that cannot be read is bad."""
        start, inside = at
        try:
            found, end = self.read(text, inside, recipient, texts)
            why = next((call.why for call in found if isinstance(call, BadCall)), "")
        except Refused as refused:
            found, end, why = [], inside, refused.why
        match = self._end.search(text, end)
        stop = match.start() if match else len(text)
        if why or text[end:stop].strip():
            found = [BadCall(text[start:stop], why or TRAILING)]
        return found, match.end() if match else len(text)

    def text(self, content: str, calls: Sequence[Call]) -> str:
        """Content and calls as the model writes them behind `<|start|>assistant`."""
        said = [self.headers[1] + content] if calls and content else []
        said += [call.text if isinstance(call, BadCall) else self.write(call) for call in calls]
        if not calls:
            said = [self.headers[2] + content]
        return f"{self.between}{_NEXT}".join(said)

    def reasoning(self, text: str) -> str:
        """Reasoning as the message that stands first."""
        return f"{self.headers[0]}{text}{self.between}{_NEXT}" if text else ""


def _first(pattern: re.Pattern[str], text: str) -> str:
    match = pattern.search(text)
    return match[1] if match else ""


def _harmony_call(text: str, start: int, recipient: str, texts: TextKeys) -> tuple[list[Call], int]:
    value, end = decode_at(text, skip_space(text, start))
    row = {"name": recipient.removeprefix("functions."), "arguments": value}
    return [to_call(row, ("name", "arguments"))], end


def _harmony_text(call: ToolCall) -> str:
    if not re.fullmatch(r"[^\s<]+", call.name):
        raise ValueError(f"{call.name!r} cannot be written as harmony's call; use a plain name")
    header = f" to=functions.{call.name}<|channel|>commentary json{_MESSAGE}"
    return header + dumps(call.arguments)


def _atem_call(text: str, start: int, recipient: str, texts: TextKeys) -> tuple[list[Call], int]:
    start = skip_space(text, start)
    if not text.startswith(INVOKE_TAGS.open, start):
        raise Refused(BAD_INVOKE)
    return read_block(text, start, INVOKE_TAGS, partial(read_invokes, texts=texts))


def _atem_text(call: ToolCall) -> str:
    return f" to={call.name}{_MESSAGE}{invoke_text(call)}"


_HARMONY = Channels(
    "<|end|>",
    ("<|end|>", "<|call|>", "<|return|>"),
    lambda recipient, channel: channel == "analysis",
    lambda recipient: bool(recipient),
    _harmony_call,
    _harmony_text,
    (
        f"<|channel|>analysis{_MESSAGE}",
        f"<|channel|>commentary{_MESSAGE}",
        f"<|channel|>final{_MESSAGE}",
    ),
)
_ATEM = Channels(
    "<|eom|>",
    ("<|eom|>", "<|eot|>"),
    lambda recipient, channel: recipient == "self",
    lambda recipient: recipient not in ("", "self", "user"),
    _atem_call,
    _atem_text,
    (f" to=self{_MESSAGE}", f" to=user{_MESSAGE}", f" to=user{_MESSAGE}"),
)

HARMONY = Format(
    _HARMONY.parse,
    _HARMONY.text,
    "<|channel|>",
    _HARMONY.reasoning,
    (f"<|channel|>analysis{_MESSAGE}", "<|end|>"),
    field="thinking",
    merges=True,
)
ATEM = Format(
    _ATEM.parse,
    _ATEM.text,
    "<atem:function_calls>",
    _ATEM.reasoning,
    (f" to=self{_MESSAGE}", "<|eom|>"),
    field="reasoning_content",
    parse_typed=_ATEM.parse,
)

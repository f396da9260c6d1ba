"""Formats whose calls stand between two tags: the tags are data, each body has its reader.

What was opened and cannot be read is a `BadCall` up to its closing tag or the next opening.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial

from agentrl.chat.parsing import (
    BAD_ARGUMENTS,
    BAD_HEADER,
    BAD_INVOKE,
    BAD_KEYS,
    BAD_XML,
    DUPLICATE,
    NO_NAME,
    NOT_OBJECT,
    TRAILING,
    UNTERMINATED,
    Call,
    Format,
    Parsed,
    Refused,
    TextKeys,
    decode,
    decode_at,
    dumps,
    join_pieces,
    raw_text,
    raw_value,
    skip_space,
    split_reasoning,
    unique,
    write_calls,
)
from agentrl.types import BadCall, Json, ToolCall

Body = Callable[[str, int], tuple[list[ToolCall], int]]
"""Reads what stands behind an opening tag: (calls, where they end). Raises `Refused`, or `Late`
where the place of the end is known."""


class Late(Refused):
    """The body can be read, and makes no call; `end` is where it ends."""

    def __init__(self, why: str, end: int) -> None:
        super().__init__(why)
        self.end = end


@dataclass(frozen=True, slots=True)
class Tags:
    """Delimiters of a format.

    Attributes:
        open: before a call.
        close: behind it; empty where nothing closes a call but the end of the turn.
        outer: around all calls of a turn; no part of any.
        think: around reasoning.
    """

    open: str = "<tool_call>"
    close: str = "</tool_call>"
    outer: tuple[str, ...] = ()
    think: tuple[str, str] = ("<think>", "</think>")


def read_tagged(text: str, tags: Tags, body: Body) -> Parsed:
    """Read a turn: every block between the tags is one or more calls, or a bad one."""
    reasoning, rest = split_reasoning(text, tags.think)
    pieces: list[str] = []
    calls: list[Call] = []
    position = 0
    while (start := rest.find(tags.open, position)) >= 0:
        pieces.append(rest[position:start])
        found, position = read_block(rest, start, tags, body)
        calls += found
    pieces.append(rest[position:])
    for mark in tags.outer if calls else ():
        pieces = [piece.replace(mark, "\n") for piece in pieces]
    return Parsed(join_pieces(pieces), reasoning, tuple(calls))


def read_block(text: str, start: int, tags: Tags, body: Body) -> tuple[list[Call], int]:
    """Read the block that opens at `start`: (its calls, where it ends)."""
    inside = start + len(tags.open)
    why = ""
    try:
        found, end = body(text, inside)
    except Late as late:
        found, end, why = [], late.end, late.why
    except Refused as refused:
        found, end, why = [], -1, refused.why
    if end >= 0:
        end = skip_space(text, end) if tags.close else end
        if text.startswith(tags.close, end):
            end += len(tags.close)
            return ([BadCall(text[start:end], why)] if why else [*found]), end
        why = TRAILING
    limit = text.find(tags.open, inside)
    limit = len(text) if limit < 0 else limit
    close = text.find(tags.close, inside, limit) if tags.close else limit
    if close < 0:
        return [BadCall(text[start:limit], UNTERMINATED)], limit
    end = close + len(tags.close)
    return [BadCall(text[start:end], why)], end


def to_call(value: Json, keys: tuple[str, str]) -> ToolCall:
    """A call of an object with a name and arguments under these keys.

    Arguments given as a JSON string are decoded once.

    Raises:
        Refused: it is no such object.
    """
    if not isinstance(value, dict):
        raise Refused(NOT_OBJECT)
    name, arguments = value.get(keys[0]), value.get(keys[1])
    if not isinstance(name, str) or not name.strip():
        raise Refused(NO_NAME)
    if isinstance(arguments, str):
        arguments = decode(arguments)
    if not isinstance(arguments, dict):
        raise Refused(BAD_ARGUMENTS)
    return ToolCall(name, arguments)


# JSON objects: hermes, and lists of them.

NAME_ARGUMENTS = ("name", "arguments")
COHERE_KEYS = ("tool_name", "parameters")


def _object(text: str, start: int) -> tuple[list[ToolCall], int]:
    value, end = decode_at(text, skip_space(text, start))
    return _made(lambda: [to_call(value, NAME_ARGUMENTS)], end)


def _objects(text: str, start: int, keys: tuple[str, str]) -> tuple[list[ToolCall], int]:
    value, end = decode_at(text, skip_space(text, start))
    rows = value if isinstance(value, list) else [value]
    return _made(lambda: [to_call(row, keys) for row in rows], end)


def _made(make: Callable[[], list[ToolCall]], end: int) -> tuple[list[ToolCall], int]:
    try:
        return make(), end
    except Refused as refused:
        raise Late(refused.why, end) from None


def _hermes_text(calls: list[ToolCall]) -> str:
    rows = [dumps({"name": call.name, "arguments": call.arguments}) for call in calls]
    return "\n".join(f"<tool_call>\n{row}\n</tool_call>" for row in rows)


def format_hermes(content: str, calls: Sequence[Call]) -> str:
    """Content and calls as Qwen's and Hermes' models write them.

    Raises:
        ValueError: an argument is no JSON value.
    """
    return write_calls(content, calls, _hermes_text)


def _cohere_text(calls: list[ToolCall]) -> str:
    rows = [
        {"tool_call_id": str(index), "tool_name": call.name, "parameters": call.arguments}
        for index, call in enumerate(calls)
    ]
    return f"<|START_ACTION|>{dumps(rows)}<|END_ACTION|>"


# A name, then a JSON object: DeepSeek and Mistral.

_DEEPSEEK_HEAD = re.compile(
    r"\s*(?:function<｜tool▁sep｜>([^\n<>]+)\n```(?:json)?|([^\n<>]+)<｜tool▁sep｜>)\s*"
)
_FENCE = re.compile(r"\s*```")
_MISTRAL_HEAD = re.compile(r"\s*([^\s\[\]{}]+)\[ARGS\]\s*")


def _deepseek_body(text: str, start: int) -> tuple[list[ToolCall], int]:
    head = _DEEPSEEK_HEAD.match(text, start)
    if head is None:
        raise Refused(BAD_HEADER)
    value, end = decode_at(text, head.end())
    fence = _FENCE.match(text, end) if head[1] else None
    row = {"name": (head[1] or head[2]).strip(), "arguments": value}
    return _made(lambda: [to_call(row, NAME_ARGUMENTS)], fence.end() if fence else end)


def _deepseek_text(calls: list[ToolCall]) -> str:
    blocks = [
        f"<｜tool▁call▁begin｜>function<｜tool▁sep｜>{_plain_name(call.name)}\n"
        f"```json\n{dumps(call.arguments)}\n```<｜tool▁call▁end｜>"
        for call in calls
    ]
    return "<｜tool▁calls▁begin｜>" + "\n".join(blocks) + "<｜tool▁calls▁end｜>"


def _mistral_body(text: str, start: int) -> tuple[list[ToolCall], int]:
    head = _MISTRAL_HEAD.match(text, start)
    if head is None:
        return _objects(text, start, NAME_ARGUMENTS)
    value, end = decode_at(text, head.end())
    return _made(lambda: [to_call({"name": head[1], "arguments": value}, NAME_ARGUMENTS)], end)


def _mistral_text(calls: list[ToolCall]) -> str:
    return "[TOOL_CALLS]" + dumps([{"name": c.name, "arguments": c.arguments} for c in calls])


# Values that are written as they are: Qwen3-Coder's xml, Muse's, GLM's keys and values.


@dataclass(frozen=True, slots=True)
class Markup:
    """How one call and its arguments are marked up where values are not quoted.

    Attributes:
        name: matches the opening of a call; its first group is the tool.
        key: matches the opening of an argument; its first group is the key.
        value_end: closes an argument.
        end: matches what closes a call.
        why: what is said of a call that does not follow this.
        newline: whether a newline on each side of a value belongs to the markup.
    """

    name: re.Pattern[str]
    key: re.Pattern[str]
    value_end: str
    end: re.Pattern[str]
    why: str
    newline: bool = False

    def read(
        self, text: str, start: int, texts: TextKeys = frozenset()
    ) -> tuple[ToolCall | Refused, int]:
        """Read one call at `start`: (the call, or why it is none; where it ends)."""
        name = self.name.match(text, start)
        if name is None or not name[1].strip():
            raise Refused(self.why)
        pairs: list[tuple[str, Json]] = []
        position = name.end()
        while key := self.key.match(text, position):
            close = text.find(self.value_end, key.end())
            if close < 0:
                raise Refused(self.why)
            value = text[key.end() : close]
            if self.newline:
                value = value.removeprefix("\n").removesuffix("\n")
            pairs.append((key[1], raw_value(value, (name[1].strip(), key[1]) in texts)))
            position = skip_space(text, close + len(self.value_end))
        end = self.end.match(text, position)
        if end is None:
            raise Refused(self.why)
        if len(dict(pairs)) != len(pairs):
            return Refused(DUPLICATE), end.end()
        return ToolCall(name[1].strip(), unique(pairs)), end.end()


XML = Markup(
    re.compile(r"\s*<function=([^<>\n]+)>\s*"),
    re.compile(r"<parameter=([^<>\n]+)>"),
    "</parameter>",
    re.compile(r"</function>\s*"),
    BAD_XML,
    newline=True,
)
INVOKE = Markup(
    re.compile(r'\s*<atem:invoke name="([^<>"\n]+)">\s*'),
    re.compile(r'<atem:parameter name="([^<>"\n]+)">'),
    "</atem:parameter>",
    re.compile(r"</atem:invoke>\s*"),
    BAD_INVOKE,
)
KEYS = Markup(
    re.compile(r"\s*([^<>\n]+)\s*"),
    re.compile(r"<arg_key>([^<>\n]+)</arg_key>\s*<arg_value>"),
    "</arg_value>",
    re.compile(r"(?=</tool_call>)"),
    BAD_KEYS,
)


def _marked_body(
    markup: Markup, text: str, start: int, texts: TextKeys = frozenset()
) -> tuple[list[ToolCall], int]:
    call, end = markup.read(text, start, texts)
    if isinstance(call, Refused):
        raise Late(call.why, end)
    return [call], end


def read_invokes(
    text: str, start: int, texts: TextKeys = frozenset()
) -> tuple[list[ToolCall], int]:
    """Read Muse's calls behind the opening of their block: (calls, where they end).

    Raises:
        Refused: they cannot be read.
    """
    found, end = _marked_body(INVOKE, text, start, texts)
    while INVOKE.name.match(text, end):
        more, end = _marked_body(INVOKE, text, end, texts)
        found += more
    return found, end


def _plain_name(label: str, also: str = "") -> str:
    if not label or set(label) & {"<", ">", "\n", *also}:
        raise ValueError(
            f"{label!r} cannot be written in this format; use a name without '<', '>', {also!r}"
            " and newlines"
        )
    return label


def _xml_text(calls: list[ToolCall]) -> str:
    blocks = []
    for call in calls:
        values = "".join(
            f"<parameter={_plain_name(key)}>\n{raw_text(value, '</parameter>')}\n</parameter>\n"
            for key, value in call.arguments.items()
        )
        name = _plain_name(call.name)
        blocks.append(f"<tool_call>\n<function={name}>\n{values}</function>\n</tool_call>")
    return "\n".join(blocks)


def invoke_text(call: ToolCall) -> str:
    """One call as Muse's models write it.

    Raises:
        ValueError: a name cannot be written, or an argument is no JSON value.
    """
    end = "</atem:parameter>"
    values = "".join(
        f'<atem:parameter name="{_plain_name(key, chr(34))}">{raw_text(value, end)}{end}\n'
        for key, value in call.arguments.items()
    )
    name = _plain_name(call.name, '"')
    invoke = f'<atem:invoke name="{name}">\n{values}</atem:invoke>'
    return f"<atem:function_calls>\n{invoke}\n</atem:function_calls>"


def _keys_text(calls: list[ToolCall]) -> str:
    blocks = []
    for call in calls:
        values = "".join(
            f"<arg_key>{_plain_name(key)}</arg_key>\n"
            f"<arg_value>{raw_text(value, '</arg_value>')}</arg_value>\n"
            for key, value in call.arguments.items()
        )
        blocks.append(f"<tool_call>{_plain_name(call.name)}\n{values}</tool_call>")
    return "\n".join(blocks)


INVOKE_TAGS = Tags("<atem:function_calls>", "</atem:function_calls>")


def _marked(markup: Markup, text: Callable[[list[ToolCall]], str]) -> Format:
    def typed(turn: str, texts: TextKeys) -> Parsed:
        return read_tagged(turn, Tags(), partial(_marked_body, markup, texts=texts))

    plain = _tagged(Tags(), partial(_marked_body, markup), text, "\n")
    return replace(plain, parse_typed=typed)


def _tagged(tags: Tags, body: Body, text: Callable[[list[ToolCall]], str], joint: str) -> Format:
    return Format(
        partial(read_tagged, tags=tags, body=body),
        partial(write_calls, write=text, joint=joint),
        tags.open,
        think=tags.think,
    )


_DEEPSEEK = Tags(
    "<｜tool▁call▁begin｜>",
    "<｜tool▁call▁end｜>",
    ("<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"),
)
_COHERE = Tags("<|START_ACTION|>", "<|END_ACTION|>")

TAGGED: dict[str, Format] = {
    "hermes": _tagged(Tags(), _object, _hermes_text, "\n"),
    "xml": _marked(XML, _xml_text),
    "glm": _marked(KEYS, _keys_text),
    "deepseek": _tagged(_DEEPSEEK, _deepseek_body, _deepseek_text, ""),
    "cohere": _tagged(_COHERE, partial(_objects, keys=COHERE_KEYS), _cohere_text, ""),
    "mistral": _tagged(Tags("[TOOL_CALLS]", ""), _mistral_body, _mistral_text, ""),
}

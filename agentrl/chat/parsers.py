"""Tool-call parsers: pure functions from what the model wrote to calls, and their inverses.

No input raises. What was meant as a call and is none becomes a `BadCall` with one of the fixed
sentences of `agentrl.chat.parsing`, so that the agent reads the same words whatever broke
underneath. Docs: docs/tokens.md.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence

from agentrl.chat.parsing import (
    BAD_ARGUMENTS,
    BAD_XML,
    DUPLICATE,
    NO_NAME,
    NOT_JSON,
    NOT_OBJECT,
    TRAILING,
    UNTERMINATED,
    Call,
    Formatter,
    Parsed,
    Parser,
    Refused,
    decode,
    decode_at,
    dumps,
    join_pieces,
    skip_space,
    split_reasoning,
    without_empty_fences,
)
from agentrl.chat.pythonic import format_python, parse_python
from agentrl.types import BadCall, Json, ToolCall


def _to_call(value: Json, key: str) -> ToolCall:
    """Make a call of `{"name": ..., key: {...}}`; arguments given as a JSON string are decoded
    once.
    """
    if not isinstance(value, dict):
        raise Refused(NOT_OBJECT)
    name, arguments = value.get("name"), value.get(key)
    if not isinstance(name, str) or not name.strip():
        raise Refused(NO_NAME)
    if isinstance(arguments, str):
        arguments = decode(arguments)
    if not isinstance(arguments, dict):
        raise Refused(BAD_ARGUMENTS)
    return ToolCall(name, arguments)


def _checked(make: Callable[[], ToolCall]) -> ToolCall | Refused:
    try:
        return make()
    except Refused as refused:
        return refused


# Tagged formats: hermes and xml share the tags and differ in what stands between.

_OPEN, _CLOSE = "<tool_call>", "</tool_call>"
_Body = Callable[[str, int], tuple[ToolCall | Refused, int]]


def _tagged(text: str, body: _Body) -> Parsed:
    reasoning, rest = split_reasoning(text)
    pieces: list[str] = []
    calls: list[Call] = []
    position = 0
    while (start := rest.find(_OPEN, position)) >= 0:
        pieces.append(rest[position:start])
        call, position = _block(rest, start, body)
        calls.append(call)
    pieces.append(rest[position:])
    return Parsed(join_pieces(pieces), reasoning, tuple(calls))


def _block(text: str, start: int, body: _Body) -> tuple[Call, int]:
    """Read the block that opens at `start`. One that cannot be read ends at its closing tag or the
    next opening.
    """
    inside = start + len(_OPEN)
    try:
        call, end = body(text, inside)
        if text.startswith(_CLOSE, end):
            end += len(_CLOSE)
            return (call if isinstance(call, ToolCall) else BadCall(text[start:end], call.why)), end
        why = TRAILING
    except Refused as refused:
        why = refused.why
    limit = text.find(_OPEN, inside)
    limit = len(text) if limit < 0 else limit
    close = text.find(_CLOSE, inside, limit)
    if close < 0:
        return BadCall(text[start:limit], UNTERMINATED), limit
    end = close + len(_CLOSE)
    return BadCall(text[start:end], why), end


def _hermes_body(text: str, start: int) -> tuple[ToolCall | Refused, int]:
    value, end = decode_at(text, skip_space(text, start))
    return _checked(lambda: _to_call(value, "arguments")), skip_space(text, end)


def parse_hermes(text: str) -> Parsed:
    """Read Qwen/Hermes calls: `<tool_call>{"name": ..., "arguments": {...}}</tool_call>`, any
    number of them.

    The tags decide: a block inside a code fence is a call, a fence inside a block is refused.
    """
    return _tagged(text, _hermes_body)


def format_hermes(content: str, calls: Sequence[Call]) -> str:
    """Inverse of `parse_hermes`.

    Raises:
        ValueError: an argument is no JSON value.
    """
    blocks = (
        (
            call.text
            if isinstance(call, BadCall)
            else f"{_OPEN}\n{dumps({'name': call.name, 'arguments': call.arguments})}\n{_CLOSE}"
        )
        for call in calls
    )
    return "\n".join(filter(None, (content, *blocks)))


_FUNCTION = re.compile(r"\s*<function=([^<>\n]+)>\s*")
_PARAMETER = re.compile(r"<parameter=([^<>\n]+)>")
_END_PARAMETER = "</parameter>"
_END_FUNCTION = re.compile(r"</function>\s*")


def _xml_body(text: str, start: int) -> tuple[ToolCall | Refused, int]:
    function = _FUNCTION.match(text, start)
    if function is None:
        raise Refused(BAD_XML)
    arguments: dict[str, Json] = {}
    refused: Refused | None = None
    position = function.end()
    while parameter := _PARAMETER.match(text, position):
        close = text.find(_END_PARAMETER, parameter.end())
        if close < 0:
            raise Refused(BAD_XML)
        if parameter[1] in arguments:
            refused = Refused(DUPLICATE)
        arguments[parameter[1]] = _xml_value(
            text[parameter.end() : close].removeprefix("\n").removesuffix("\n")
        )
        position = skip_space(text, close + len(_END_PARAMETER))
    end = _END_FUNCTION.match(text, position)
    if end is None:
        raise Refused(BAD_XML)
    return refused or ToolCall(function[1], arguments), end.end()


def _xml_value(text: str) -> Json:
    try:
        return decode(text)
    except Refused:
        return text


def parse_xml(text: str) -> Parsed:
    """Read Qwen3-Coder calls:
    `<tool_call><function=NAME><parameter=KEY>VALUE</parameter></function></tool_call>`.

    One newline on each side of a value belongs to the markup. A value that is strict JSON is
    decoded, any other is text; so the text `1` must be written `"1"`.
    """
    return _tagged(text, _xml_body)


def format_xml(content: str, calls: Sequence[Call]) -> str:
    """Inverse of `parse_xml`.

    Raises:
        ValueError: a name or key is empty or holds `<`, `>` or a newline, or an argument is no JSON
            value.
    """
    blocks = (call.text if isinstance(call, BadCall) else _xml_block(call) for call in calls)
    return "\n".join(filter(None, (content, *blocks)))


def _xml_block(call: ToolCall) -> str:
    for label in (call.name, *call.arguments):
        if not re.fullmatch(r"[^<>\n]+", label):
            raise ValueError(
                f"{label!r} cannot be written in xml calls; use a name without '<', '>' and"
                " newlines"
            )
    values = "".join(
        f"<parameter={key}>\n{_xml_text(value)}\n</parameter>\n"
        for key, value in call.arguments.items()
    )
    return f"{_OPEN}\n<function={call.name}>\n{values}</function>\n{_CLOSE}"


def _xml_text(value: Json) -> str:
    if isinstance(value, str) and _END_PARAMETER not in value and _xml_value(value) == value:
        return value
    return dumps(value).replace("</", "<\\/")


# Llama: bare JSON objects.

_TAG = "<|python_tag|>"
_OBJECT_START = re.compile(r"(?:^[ \t]*|<\|python_tag\|>\s*)(?:\[\s*)?(?=\{)", re.MULTILINE)
_NEXT_OBJECT = re.compile(r"[\s;,]*(?=\{)")
_LIST_END = re.compile(r"\s*\]")
_MEANT = re.compile(r'\{\s*"(?:name|parameters)"')


def parse_llama_json(text: str) -> Parsed:
    """Read Llama-3 calls: JSON objects `{"name": ..., "parameters": {...}}`, optionally behind
    `<|python_tag|>`.

    An object counts where it is the first thing on a line, or follows the tag, a `[` or another
    call (with `;` or `,` between), and has a `name` or `parameters` key; any other JSON is content.
    A code fence around calls is dropped.
    """
    reasoning, rest = split_reasoning(text)
    pieces: list[str] = []
    calls: list[Call] = []
    position = 0
    for start, end, call in _llama_calls(rest):
        pieces.append(rest[position:start])
        calls.append(call)
        position = end
    content = join_pieces([*pieces, rest[position:]])
    if calls:
        return Parsed(without_empty_fences(content), reasoning, tuple(calls))
    before, tag, behind = rest.partition(_TAG)
    bad = (BadCall(tag + behind, NOT_JSON),) if tag else ()
    return Parsed(before.strip(), reasoning, bad)


def _llama_calls(text: str) -> Iterator[tuple[int, int, Call]]:
    """Yield (start, end, call); start and end take brackets and separators along."""
    position = 0
    after_call = False
    while match := (
        _NEXT_OBJECT.match(text, position) if after_call else None
    ) or _OBJECT_START.search(text, position):
        call, end = _llama_object(text, match.end())
        after_call = call is not None
        if call is not None:
            closing = _LIST_END.match(text, end)
            end = closing.end() if closing else end
            yield match.start(), end, call
        position = end


def _llama_object(text: str, start: int) -> tuple[Call | None, int]:
    try:
        value, end = decode_at(text, start)
    except Refused as refused:
        if not _MEANT.match(text, start):
            return None, start + 1
        later = (
            match
            for match in _OBJECT_START.finditer(text, start + 1)
            if _MEANT.match(text, match.end())
        )
        end = next((match.start() for match in later), len(text))
        return BadCall(text[start:end].rstrip(), refused.why), end
    if not isinstance(value, dict) or not {"name", "parameters"} & value.keys():
        return None, end
    call = _checked(lambda: _to_call(value, "parameters"))
    return (call if isinstance(call, ToolCall) else BadCall(text[start:end], call.why)), end


def format_llama_json(content: str, calls: Sequence[Call]) -> str:
    """Inverse of `parse_llama_json` (without the tag).

    Raises:
        ValueError: an argument is no JSON value.
    """
    blocks = (
        (
            call.text
            if isinstance(call, BadCall)
            else dumps({"name": call.name, "parameters": call.arguments})
        )
        for call in calls
    )
    return "\n".join(filter(None, (content, *blocks)))


PARSERS: Mapping[str, Parser] = {
    "hermes": parse_hermes,
    "llama_json": parse_llama_json,
    "xml": parse_xml,
    "python": parse_python,
}
FORMATTERS: Mapping[str, Formatter] = {
    "hermes": format_hermes,
    "llama_json": format_llama_json,
    "xml": format_xml,
    "python": format_python,
}

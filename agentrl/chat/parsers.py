"""Tool-call parsers: pure functions from what the model wrote to calls, and their inverses.

No input raises. What was meant as a call and is none becomes a `BadCall` with one of the fixed
sentences of `agentrl.chat.parsing`, so that the agent reads the same words whatever broke
underneath. Docs: docs/tokens.md.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence

from agentrl.chat.channels import ATEM, HARMONY
from agentrl.chat.gemma import GEMMA
from agentrl.chat.parsing import (
    NOT_JSON,
    Call,
    Format,
    Formatter,
    Parsed,
    Parser,
    Refused,
    decode_at,
    dumps,
    join_pieces,
    split_reasoning,
    without_empty_fences,
    write_calls,
)
from agentrl.chat.pythonic import LFM2, PYTHON
from agentrl.chat.tagged import TAGGED, format_hermes, to_call
from agentrl.types import BadCall, ToolCall

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
    try:
        return to_call(value, ("name", "parameters")), end
    except Refused as refused:
        return BadCall(text[start:end], refused.why), end


def format_llama_json(content: str, calls: Sequence[Call]) -> str:
    """Inverse of `parse_llama_json` (without the tag).

    Raises:
        ValueError: an argument is no JSON value.
    """
    return write_calls(content, calls, _objects_text)


def _objects_text(calls: list[ToolCall]) -> str:
    return "\n".join(dumps({"name": c.name, "parameters": c.arguments}) for c in calls)


FORMATS: Mapping[str, Format] = {
    **TAGGED,
    "llama_json": Format(parse_llama_json, format_llama_json),
    "python": PYTHON,
    "lfm2": LFM2,
    "gemma": GEMMA,
    "harmony": HARMONY,
    "atem": ATEM,
}
PARSERS: Mapping[str, Parser] = {name: form.parse for name, form in FORMATS.items()}
FORMATTERS: Mapping[str, Formatter] = {name: form.write for name, form in FORMATS.items()}

__all__ = [
    "FORMATS",
    "FORMATTERS",
    "PARSERS",
    "format_hermes",
    "format_llama_json",
    "parse_llama_json",
]

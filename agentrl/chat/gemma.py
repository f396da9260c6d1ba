"""Gemma's calls: `<|tool_call>call:NAME{key:<|"|>text<|"|>,other:[1,true]}<tool_call|>`."""

from __future__ import annotations

import re
from functools import partial

from agentrl.chat.parsing import (
    BAD_BRACES,
    MAX_DEPTH,
    TOO_DEEP,
    Format,
    Refused,
    decode,
    dumps,
    skip_space,
    unique,
    write_calls,
)
from agentrl.chat.tagged import Late, Tags, read_tagged
from agentrl.types import Json, ToolCall

_QUOTE = '<|"|>'
_TAGS = Tags("<|tool_call>", "<tool_call|>", think=("<|channel>thought", "<channel|>"))
_NAME = re.compile(r"\s*call:([^\s{}<>]+)\s*(?=\{)")
_KEY = re.compile(r"\s*([^\s:,{}\[\]<>\"]+)\s*:")
_BARE = re.compile(r"[^,{}\[\]<>]+")
_PYTHON = {"None": "null", "True": "true", "False": "false"}


def _body(text: str, start: int) -> tuple[list[ToolCall], int]:
    name = _NAME.match(text, start)
    if name is None:
        raise Refused(BAD_BRACES)
    pairs, end = _pairs(text, name.end() + 1, 1)
    try:
        return [ToolCall(name[1], unique(pairs))], end
    except Refused as refused:
        raise Late(refused.why, end) from None


def _pairs(text: str, at: int, depth: int) -> tuple[list[tuple[str, Json]], int]:
    """Read `key:value,…}` from behind its opening brace."""
    pairs: list[tuple[str, Json]] = []
    at = skip_space(text, at)
    if text.startswith("}", at):
        return pairs, at + 1
    while True:
        key, at = _key(text, at)
        value, at = _value(text, skip_space(text, at), depth)
        pairs.append((key, value))
        at = skip_space(text, at)
        if text.startswith("}", at):
            return pairs, at + 1
        if not text.startswith(",", at):
            raise Refused(BAD_BRACES)
        at += 1


def _key(text: str, at: int) -> tuple[str, int]:
    at = skip_space(text, at)
    if text.startswith(_QUOTE, at):
        key, at = _quoted(text, at)
        at = skip_space(text, at)
        if text.startswith(":", at):
            return key, at + 1
        raise Refused(BAD_BRACES)
    match = _KEY.match(text, at)
    if match is None:
        raise Refused(BAD_BRACES)
    return match[1], match.end()


def _quoted(text: str, at: int) -> tuple[str, int]:
    start = at + len(_QUOTE)
    end = text.find(_QUOTE, start)
    if end < 0:
        raise Refused(BAD_BRACES)
    return text[start:end], end + len(_QUOTE)


def _value(text: str, at: int, depth: int) -> tuple[Json, int]:
    if depth > MAX_DEPTH:
        raise Refused(TOO_DEEP)
    if text.startswith(_QUOTE, at):
        return _quoted(text, at)
    if text.startswith("{", at):
        pairs, end = _pairs(text, at + 1, depth + 1)
        return unique(pairs), end
    if text.startswith("[", at):
        return _items(text, at + 1, depth + 1)
    bare = _BARE.match(text, at)
    if bare is None:
        raise Refused(BAD_BRACES)
    word = bare[0].strip()
    return decode(_PYTHON.get(word, word)), bare.end()


def _items(text: str, at: int, depth: int) -> tuple[list[Json], int]:
    """Read `value,…]` from behind its opening bracket."""
    items: list[Json] = []
    at = skip_space(text, at)
    if text.startswith("]", at):
        return items, at + 1
    while True:
        item, at = _value(text, skip_space(text, at), depth)
        items.append(item)
        at = skip_space(text, at)
        if text.startswith("]", at):
            return items, at + 1
        if not text.startswith(",", at):
            raise Refused(BAD_BRACES)
        at += 1


def _text(calls: list[ToolCall]) -> str:
    blocks = []
    for call in calls:
        if not re.fullmatch(r"[^\s{}<>]+", call.name):
            raise ValueError(f"{call.name!r} cannot be written as gemma's call; use a plain name")
        dumps(call.arguments)
        blocks.append(f"<|tool_call>call:{call.name}{_written(dict(call.arguments))}<tool_call|>")
    return "".join(blocks)


def _written(value: Json) -> str:
    if isinstance(value, dict):
        return "{" + ",".join(f"{_label(k)}:{_written(v)}" for k, v in value.items()) + "}"
    if isinstance(value, list | tuple):
        return "[" + ",".join(map(_written, value)) + "]"
    return _quote(value) if isinstance(value, str) else dumps(value)


def _label(key: str) -> str:
    return key if _KEY.fullmatch(f"{key}:") and key == key.strip() else _quote(key)


def _quote(text: str) -> str:
    if _QUOTE in text:
        raise ValueError(f"{text!r} cannot be written as gemma's call: it holds {_QUOTE}")
    return f"{_QUOTE}{text}{_QUOTE}"


def _reasoning(text: str) -> str:
    return f"<|channel>thought\n{text}\n<channel|>" if text else ""


GEMMA = Format(
    partial(read_tagged, tags=_TAGS, body=_body),
    partial(write_calls, write=_text, joint=""),
    _TAGS.open,
    _reasoning,
    _TAGS.think,
    field="reasoning",
)

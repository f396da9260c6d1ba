"""Pythonic tool calls: `[f(a=1), g(b="x")]`. Arguments are read by `ast`; nothing is ever run."""

from __future__ import annotations

import ast
import keyword
import re
import warnings
from collections.abc import Sequence
from functools import partial

from agentrl.chat.parsing import (
    MAX_DEPTH,
    NOT_LITERAL,
    POSITIONAL,
    TOO_DEEP,
    UNTERMINATED,
    Call,
    Format,
    Parsed,
    Refused,
    decode,
    dumps,
    finite,
    join_pieces,
    skip_space,
    split_reasoning,
    unique,
    write_calls,
)
from agentrl.chat.tagged import Late, Tags, read_tagged
from agentrl.types import BadCall, Json, ToolCall

# Names are read here and not by `ast`, so that `-` may stand in them.

_NAME = r"[A-Za-z_][\w.\-]*"
_PYTHON_START = re.compile(
    rf"^(?P<fence>```\w*\n)|^[ \t]*(?P<list>\[\s*)?(?={_NAME}\()", re.MULTILINE
)
_FENCE_END = re.compile(r"^```[ \t]*$", re.MULTILINE)
_PYTHON_NAME = re.compile(rf"\s*({_NAME})(?=\()")
_KEYWORD = re.compile(rf"{_NAME}\(\s*\w+\s*=")
_SEPARATOR = re.compile(r"\s*(,|\])\s*")
_REST_OF_LINE = re.compile(r"[ \t]*(?:\n|\Z)")
_LEXEME = re.compile(
    r'"""(?:\\.|[^\\])*?"""|\'\'\'(?:\\.|[^\\])*?\'\'\'|"(?:\\.|[^"\\\n])*"|\'(?:\\.|[^\'\\\n])*\'|["\'\[\](){}]',
    re.DOTALL,
)


_MAX_UNCLOSED = 256
"""Openings that turn out to be prose before the rest of a text is taken for prose: each one costs a
look at all that follows."""


def _closing(text: str, start: int) -> int:
    """Index behind the bracket that closes the one at `start`, strings skipped; -1 if there is
    none.
    """
    depth = 0
    for match in _LEXEME.finditer(text, start):
        lexeme = match[0]
        if lexeme in "\"'":
            return -1
        depth += (lexeme in "[({") - (lexeme in "])}")
        if depth == 0:
            return match.end()
    return -1


def parse_python(text: str) -> Parsed:
    """Read pythonic calls: a list `[f(a=1), g(b="x")]` at the start of a line, or lines that are
    one call `f(a=1)`.

    Arguments are keyword arguments with literal values (tuples become lists); `**{...}` carries
    keys that are no Python names. In a code fence, calls count only where the fence holds nothing
    else; such a fence is dropped. A line of prose that has the shape of a call is a call.
    """
    reasoning, rest = split_reasoning(text)
    content, calls = _split(rest)
    return Parsed(content, reasoning, tuple(calls))


def _split(text: str) -> tuple[str, list[Call]]:
    """Content and calls of a text without reasoning."""
    pieces: list[str] = []
    calls: list[Call] = []
    position = search = unclosed = 0
    while unclosed < _MAX_UNCLOSED and (match := _PYTHON_START.search(text, search)):
        if match["fence"]:
            found, search = _fenced(text, match.end())
        else:
            found, search = _python_block(
                text, match.end(), match.start("list") if match["list"] else -1
            )
        unclosed += not found
        if found:
            pieces.append(text[position : match.start()])
            calls += found
            position = search
    return join_pieces([*pieces, text[position:]]), calls


def _fenced(text: str, start: int) -> tuple[list[Call], int]:
    """Read the code fence whose inside starts at `start`; no calls where it is not closed or holds
    other lines.
    """
    close = _FENCE_END.search(text, start)
    if close is None:
        return [], start
    content, calls = _split(text[start : close.start()])
    return ([] if content else calls), close.end()


def _python_block(text: str, start: int, bracket: int) -> tuple[list[Call], int]:
    """Read the list at `bracket` (if >= 0) or the bare call at `start`; none where it is prose."""
    end = _closing(text, bracket if bracket >= 0 else text.index("(", start))
    if end < 0:
        if bracket >= 0 or _KEYWORD.match(text, start):
            return [BadCall(text[bracket if bracket >= 0 else start :], UNTERMINATED)], len(text)
        return [], start + 1
    if bracket >= 0:
        return _python_list(text[bracket:end]), end
    if _REST_OF_LINE.match(text, end) is None:
        return [], end
    return [_python_call(text[start:end])], end


def _python_list(text: str) -> list[Call]:
    calls: list[Call] = []
    position = 1
    while name := _PYTHON_NAME.match(text, position):
        end = _closing(text, name.end())
        separator = _SEPARATOR.match(text, end)
        if separator is None:
            break
        calls.append(_python_call(text[name.start(1) : end]))
        position = separator.end()
        if separator[1] == "]":
            return calls
    return [BadCall(text, NOT_LITERAL)]


def _python_call(text: str) -> Call:
    name, _, arguments = text.partition("(")
    try:
        return ToolCall(name, _python_arguments(f"f({arguments}"))
    except Refused as refused:
        return BadCall(text, refused.why)


def _python_arguments(source: str) -> dict[str, Json]:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter(
                "ignore"
            )  # an odd escape in the model's string is no news for the user
            tree = ast.parse(source, mode="eval").body
    except (RecursionError, MemoryError):
        raise Refused(TOO_DEEP) from None
    except (SyntaxError, ValueError):
        raise Refused(NOT_LITERAL) from None
    if not isinstance(tree, ast.Call):
        raise Refused(NOT_LITERAL)
    if tree.args:
        raise Refused(POSITIONAL)
    pairs: list[tuple[str, Json]] = []
    for argument in tree.keywords:
        value = _literal(argument.value)
        if argument.arg is not None:
            pairs.append((argument.arg, value))
        elif isinstance(value, dict):
            pairs += value.items()
        else:
            raise Refused(NOT_LITERAL)
    return unique(pairs)


def _literal(node: ast.expr, depth: int = 1) -> Json:
    """JSON value of a literal."""
    if depth > MAX_DEPTH:
        raise Refused(TOO_DEEP)
    match node:
        case ast.Constant(value=None | bool() | int() | str() as value):
            return value if not isinstance(value, str) else _sound(value)
        case ast.Constant(value=float() as value):
            return finite(repr(value))
        case ast.UnaryOp(op=ast.USub(), operand=ast.Constant(value=(int() | float()) as value)):
            return -_literal(ast.Constant(value))
        case ast.Name(id="true" | "false" | "null" as word):  # some templates write JSON here
            return decode(word)
        case ast.List(elts=items) | ast.Tuple(elts=items):
            return [_literal(item, depth + 1) for item in items]
        case ast.Dict(keys=keys, values=values):
            return unique(
                [
                    (_key(key), _literal(value, depth + 1))
                    for key, value in zip(keys, values, strict=True)
                ]
            )
    raise Refused(NOT_LITERAL)


def _key(node: ast.expr | None) -> str:
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return _sound(node.value)
    raise Refused(NOT_LITERAL)


def _sound(text: str) -> str:
    try:
        text.encode()
    except UnicodeEncodeError:
        raise Refused(NOT_LITERAL) from None
    return text


def format_python(content: str, calls: Sequence[Call]) -> str:
    """Inverse of `parse_python`: good calls in one list, each bad one as it was written.

    Raises:
        ValueError: a tool's name is no dotted name, or an argument is no JSON value.
    """
    return write_calls(content, calls, _list_text)


def _list_text(calls: list[ToolCall]) -> str:
    return f"[{', '.join(map(_python_text, calls))}]"


def _python_text(call: ToolCall) -> str:
    if not re.fullmatch(_NAME, call.name):
        raise ValueError(
            f"{call.name!r} cannot be written as a pythonic call; use letters, digits, '_', '.'"
            " and '-'"
        )
    dumps(call.arguments)
    written = (
        (
            f"{key}={value!r}"
            if key.isascii() and key.isidentifier() and not keyword.iskeyword(key)
            else f"**{{{key!r}: {value!r}}}"
        )
        for key, value in call.arguments.items()
    )
    return f"{call.name}({', '.join(written)})"


# LFM2: such a list between two control tokens. Its templates write strings without escapes.

_LFM2 = Tags("<|tool_call_start|>", "<|tool_call_end|>")
_ENDS = rf"(?=\s*(?:,\s*\w+=|\)\s*(?:,\s*{_NAME}\(|\]\s*\Z)))"
_RAW_NAME = re.compile(rf"\s*,?\s*({_NAME})\(")
_RAW_KEY = re.compile(r"\s*,?\s*(\w+)=\s*")
_RAW_TEXT = re.compile(rf"'(.*?)'{_ENDS}", re.DOTALL)
_RAW_LITERAL = re.compile(rf".*?{_ENDS}", re.DOTALL)
_RAW_END = re.compile(r"\s*\)")


def _lfm2_body(text: str, start: int) -> tuple[list[ToolCall], int]:
    bracket = skip_space(text, start)
    end = _closing(text, bracket) if text.startswith("[", bracket) else -1
    found = _python_list(text[bracket:end]) if end >= 0 else [BadCall("", NOT_LITERAL)]
    good = [call for call in found if isinstance(call, ToolCall)]
    if len(good) == len(found):
        return good, end
    close = text.find(_LFM2.close, start)
    raw = _raw_list(text[bracket:close]) if close >= 0 else []
    if raw:
        return raw, close
    why = next(call.why for call in found if isinstance(call, BadCall))
    raise Late(why, end) if end >= 0 else Refused(why)


def _lfm2_text(calls: list[ToolCall]) -> str:
    return f"{_LFM2.open}{_list_text(calls)}{_LFM2.close}"


def _raw_list(text: str) -> list[ToolCall]:
    """The calls of a list whose strings are not escaped; empty where it cannot be told apart."""
    calls: list[ToolCall] = []
    position = 1
    while name := _RAW_NAME.match(text, position):
        pairs: list[tuple[str, Json]] = []
        position = name.end()
        while key := _RAW_KEY.match(text, position):
            value = _RAW_TEXT.match(text, key.end()) or _RAW_LITERAL.match(text, key.end())
            if value is None:
                return []
            pairs.append((key[1], value[1] if value.re is _RAW_TEXT else _raw_literal(value[0])))
            position = value.end()
        end = _RAW_END.match(text, position)
        if end is None or len(dict(pairs)) != len(pairs):
            return []
        calls.append(ToolCall(name[1], dict(pairs)))
        position = end.end()
    return calls if text[position:].strip() == "]" else []


def _raw_literal(text: str) -> Json:
    return _python_arguments(f"f(x={text})")["x"]


PYTHON = Format(parse_python, format_python)
LFM2 = Format(
    partial(read_tagged, tags=_LFM2, body=_lfm2_body),
    partial(write_calls, write=_lfm2_text, joint=""),
    _LFM2.open,
)

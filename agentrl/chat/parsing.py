"""What tool-call formats share: fixed sentences, strict JSON, and the shape of a result."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import groupby

from agentrl.types import BadCall, Json, Message, ToolCall, ToolSpec

Call = ToolCall | BadCall

MAX_DEPTH = 64
UNTERMINATED = "The tool call is not closed."
NOT_JSON = "The tool call is not valid JSON."
NOT_OBJECT = "The tool call is not a JSON object."
NOT_FINITE = "The tool call holds a number that is not finite."
DUPLICATE = "The tool call gives the same key twice."
TOO_DEEP = f"The tool call is nested deeper than {MAX_DEPTH} levels."
NO_NAME = "The tool call does not name a tool."
BAD_ARGUMENTS = "The arguments of the tool call are not a JSON object."
TRAILING = "The tool call has text after its JSON object."
BAD_XML = (
    "The tool call does not follow <function=NAME><parameter=KEY>VALUE</parameter></function>."
)
BAD_KEYS = "The tool call does not follow NAME<arg_key>KEY</arg_key><arg_value>VALUE</arg_value>."
BAD_INVOKE = (
    "The tool call does not follow"
    ' <atem:invoke name="NAME"><atem:parameter name="KEY">VALUE</atem:parameter></atem:invoke>.'
)
BAD_BRACES = "The tool call does not follow call:NAME{KEY:VALUE}."
BAD_HEADER = "The tool call does not follow NAME, a separator and a JSON object."
POSITIONAL = "The tool call has positional arguments; name every argument."
NOT_LITERAL = "The arguments of the tool call are not Python literals."


@dataclass(frozen=True, slots=True)
class Parsed:
    """What one assistant text says.

    Attributes:
        content: the text outside of calls: each piece stripped, non-empty pieces joined by
            newlines.
        reasoning: the text of a leading `<think>` block, stripped. A block that is never closed
            goes to the end of the text.
        calls: in the order they were written. Where between them the content stood is not kept.
    """

    content: str
    reasoning: str
    calls: tuple[Call, ...]


Parser = Callable[[str], Parsed]
Formatter = Callable[[str, Sequence[Call]], str]
TextKeys = frozenset[tuple[str, str]]
"""(tool, argument) of arguments that are text by the tool's schema."""


@dataclass(frozen=True, slots=True)
class Format:
    """One way in which models write a turn.

    Attributes:
        parse: text to content, reasoning and calls; no text raises.
        write: content and calls to text, its inverse. Raises ValueError for what cannot be written.
        mark: the text that every call begins with. If a tokenizer has it as one token, its model
            was trained on this format.
        write_reasoning: reasoning to the text that stands before all else.
        think: what opens and closes reasoning.
        field: the key of a message under which templates of this format expect the reasoning;
            empty: they expect it inside the content.
        merges: templates of this format expect the reasoning and the content of a turn with calls
            joined, under `field`.
        parse_typed: `parse` for formats that do not quote text. It is told which arguments are
            text, and leaves "12" as it is there instead of reading a number.
    """

    parse: Parser
    write: Formatter
    mark: str = ""
    write_reasoning: Callable[[str], str] = lambda reasoning: format_reasoning(reasoning)
    think: tuple[str, str] = ("<think>", "</think>")
    field: str = ""
    merges: bool = False
    parse_typed: Callable[[str, TextKeys], Parsed] | None = None

    def read(self, text: str, tools: Sequence[ToolSpec] = ()) -> Parsed:
        """Read a turn in which these tools could be called."""
        if self.parse_typed is None or not tools:
            return self.parse(text)
        return self.parse_typed(text, text_keys(tools))

    def turn(self, message: Message) -> str:
        """The canonical text of an assistant's message: reasoning, content, calls."""
        spoken = self.write(message.content, message.tool_calls)
        return self.write_reasoning(message.reasoning) + spoken


class Refused(ValueError):
    """Raised where a text is not a valid call; `why` is one of the sentences above."""

    def __init__(self, why: str) -> None:
        super().__init__(why)
        self.why = why


def unique(pairs: Sequence[tuple[str, Json]]) -> dict[str, Json]:
    """A dictionary of the pairs; refused where a key stands twice."""
    mapping = dict(pairs)
    if len(mapping) != len(pairs):
        raise Refused(DUPLICATE)
    return mapping


def finite(digits: str) -> float:
    """A number; refused where it is NaN or infinite."""
    value = float(digits)
    if not math.isfinite(value):
        raise Refused(NOT_FINITE)
    return value


_DECODER = json.JSONDecoder(object_pairs_hook=unique, parse_float=finite, parse_constant=finite)
_SURROGATE = re.compile(r"\\u[dD][89a-fA-F]")
_CONSTANTS: dict[str, Json] = {"True": True, "False": False, "None": None}
_SPACE = re.compile(r"\s*")
_EMPTY_FENCE = re.compile(r"\s*```\w*\s*```\s*")


def skip_space(text: str, at: int) -> int:
    """Index of the first character from `at` on that is no white space."""
    match = _SPACE.match(text, at)
    return match.end() if match else at


def decode_at(text: str, start: int) -> tuple[Json, int]:
    """Read one JSON value at `start`: (value, end). Stricter than the standard library.

    Raises:
        Refused: no JSON, a duplicate key, NaN or an infinity, deeper than MAX_DEPTH, or a lone
            surrogate.
    """
    try:
        value, end = _DECODER.raw_decode(text, start)
    except Refused:
        raise
    except RecursionError:
        raise Refused(TOO_DEEP) from None
    except ValueError:
        raise Refused(NOT_JSON) from None
    _check_depth(value)
    if _SURROGATE.search(text, start, end):
        try:
            json.dumps(value, ensure_ascii=False).encode()
        except UnicodeEncodeError:
            raise Refused(NOT_JSON) from None
    return value, end


def _check_depth(value: Json) -> None:
    level, depth = [value], 0
    while level:
        if depth > MAX_DEPTH:
            raise Refused(TOO_DEEP)
        level = [item for node in level for item in _children(node)]
        depth += 1


def _children(node: Json) -> Iterable[Json]:
    if isinstance(node, dict):
        return node.values()
    return node if isinstance(node, list) else ()


def decode(text: str) -> Json:
    """Read a text that is one JSON value and nothing else.

    Raises:
        Refused: see `decode_at`.
    """
    value, end = decode_at(text, skip_space(text, 0))
    if skip_space(text, end) != len(text):
        raise Refused(NOT_JSON)
    return value


def dumps(value: Json) -> str:
    """JSON as chat templates write it.

    Raises:
        ValueError: NaN or an infinity.
    """
    return json.dumps(value, ensure_ascii=False, allow_nan=False)


def text_keys(tools: Sequence[ToolSpec]) -> TextKeys:
    """The arguments of tools that are text."""
    found = set()
    for tool in tools:
        properties = tool.parameters.get("properties", {})
        for key, schema in properties.items() if isinstance(properties, dict) else ():
            if isinstance(schema, dict) and schema.get("type") == "string":
                found.add((tool.name, key))
    return frozenset(found)


def raw_value(text: str, is_text: bool = False) -> Json:
    """The value of an argument that is written as it is: JSON or a Python constant, else text."""
    try:
        value = _CONSTANTS[text] if text in _CONSTANTS else decode(text)
    except Refused:
        return text
    return text if is_text and not isinstance(value, str) else value


def raw_text(value: Json, end: str) -> str:
    """Inverse of `raw_value`; text that would be read as another value, or holds `end`, is quoted.

    Raises:
        ValueError: NaN or an infinity.
    """
    if isinstance(value, str) and end not in value and raw_value(value) == value:
        return value
    return dumps(value).replace("</", "<\\/")


def write_calls(
    content: str,
    calls: Sequence[Call],
    write: Callable[[list[ToolCall]], str],
    joint: str = "\n",
) -> str:
    """Content and calls as text: `write` for each run of good calls, bad ones as they were."""
    blocks = [content]
    for good, run in groupby(calls, lambda call: isinstance(call, ToolCall)):
        found = list(run)
        if good:
            blocks.append(write([call for call in found if isinstance(call, ToolCall)]))
        else:
            blocks += [call.text for call in found if isinstance(call, BadCall)]
    return joint.join(filter(None, blocks))


def join_pieces(pieces: Iterable[str]) -> str:
    """The content: each piece stripped, what is not empty joined by newlines."""
    return "\n".join(piece for piece in map(str.strip, pieces) if piece)


def without_empty_fences(content: str) -> str:
    """The content less the code fences that held nothing but calls."""
    return _EMPTY_FENCE.sub("\n", content).strip()


def split_reasoning(text: str, think: tuple[str, str] = ("<think>", "</think>")) -> tuple[str, str]:
    """Cut a leading block of reasoning: (reasoning, the rest); without an end all is reasoning."""
    start = text.lstrip()
    if not start.startswith(think[0]):
        return "", text
    reasoning, _, rest = start.removeprefix(think[0]).partition(think[1])
    return reasoning.strip(), rest


def format_reasoning(reasoning: str) -> str:
    """Inverse of `split_reasoning`; empty for no reasoning."""
    return f"<think>\n{reasoning}\n</think>\n\n" if reasoning else ""

"""Which tool-call format a model speaks: its own template is asked to write two calls.

What it wrote is given to every parser; the one that reads both calls back is chosen. A template
that writes no calls leaves the choice to the tokenizer's control tokens.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from jinja2 import TemplateError as JinjaError

from agentrl.chat.parsers import FORMATS
from agentrl.chat.parsing import dumps
from agentrl.chat.rows import Row, common_prefix
from agentrl.types import Json, ToolCall

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

DEFAULT = "hermes"
AWKWARD: tuple[ToolCall, ...] = (
    ToolCall(
        "probe_tool",
        {
            "text": 'He said "no",\nand it\'s {fine}; café [1]',
            "nested": {"words": ["one", "two"], "deeper": {"count": 2}},
            "number": -1.5,
            "flag": True,
            "empty": "",
        },
    ),
    ToolCall("other_tool", {"value": 7, "text": "line one\n\nline three"}),
)
"""Two calls with all that is easily written wrong."""

_MARK = "line three"


class Own(NamedTuple):
    """How a template writes two calls: in one turn or in two, each text from behind the prompt."""

    texts: tuple[str, ...]
    calls: tuple[tuple[ToolCall, ...], ...]


def own_calls(tokenizer: PreTrainedTokenizerBase, options: Mapping[str, Any]) -> list[Own]:
    """Every way in which the template writes the two calls when it is handed `tool_calls`.

    Returns:
        Those that hold the arguments; none if the template drops or refuses calls.
    """
    found: list[Own] = []
    for split in ((AWKWARD,), tuple((call,) for call in AWKWARD)):
        for as_text in (False, True):
            for content in ("", "I will ask.", None):
                texts = [_written(tokenizer, options, calls, as_text, content) for calls in split]
                if _MARK in texts[-1] and all(call.name in "".join(texts) for call in AWKWARD):
                    found.append(Own(tuple(texts), split))
    return found


def _written(
    tokenizer: PreTrainedTokenizerBase,
    options: Mapping[str, Any],
    calls: Sequence[ToolCall],
    as_text: bool,
    content: str | None,
) -> str:
    """One assistant turn as the template writes it; empty where it refuses."""

    def arguments(call: ToolCall) -> Json:
        return dumps(dict(call.arguments)) if as_text else dict(call.arguments)

    turn: Row = {
        "role": "assistant",
        "content": content,
        "tool_calls": [
            {
                "id": f"call0000{index}",
                "type": "function",
                "function": {"name": call.name, "arguments": arguments(call)},
            }
            for index, call in enumerate(calls)
        ],
    }
    head = [{"role": "user", "content": "Hi"}]
    try:
        seen = tokenizer.apply_chat_template(
            head, add_generation_prompt=True, tokenize=False, **options
        )
        now = tokenizer.apply_chat_template([*head, turn], tokenize=False, **options)
    except (JinjaError, TypeError, ValueError, KeyError, IndexError, AttributeError):
        return ""
    return str(now)[len(common_prefix(str(seen), str(now))) :]


def reads(name: str, own: Own) -> bool:
    """Whether a parser reads back all calls of all texts, and nothing else as a call."""
    return all(
        FORMATS[name].parse(text).calls == calls
        for text, calls in zip(own.texts, own.calls, strict=True)
    )


def find_parser(tokenizer: PreTrainedTokenizerBase, written: Sequence[Own]) -> str:
    """The name of the parser that reads what the template wrote.

    Where it wrote no calls: that whose calls begin with a token of the tokenizer, or the default.
    Empty where it wrote calls that no parser reads.
    """
    for own in written:
        name = next((name for name in FORMATS if reads(name, own)), "")
        if name:
            return name
    if written:
        return ""
    tokens = {token.content for token in tokenizer.added_tokens_decoder.values()}
    common = FORMATS[DEFAULT].mark
    marked = (name for name, form in FORMATS.items() if form.mark in tokens - {common})
    return next(marked, DEFAULT)

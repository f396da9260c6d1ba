"""A tokenizer's chat template as text and as tokens, and cut behind an assistant turn.

Nothing that was sampled is ever rendered here. What follows a turn is found by rendering a stand-in
turn and taking the text behind it; it starts with a control token, so it can be tokenised on its
own.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal

from jinja2 import TemplateError as JinjaError

from agentrl.chat.parsing import Format, dumps
from agentrl.chat.rows import (
    BADLY_NAMED,
    SENTINEL,
    SHOWS_NO_TOOLS,
    CallStyle,
    Row,
    ToolRole,
    as_user,
    behind_nth,
    call_id,
    common_prefix,
    described,
    example_call,
    one_of,
)
from agentrl.errors import TemplateError
from agentrl.types import BadCall, Json, Message, ToolCall, ToolSpec

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

ANOTHER = "chat.template"
"""Where a template is chosen."""

_GUARD = re.compile("\ue000(\\d+)\ue001")
_MARKS = re.compile("[\ue000\ue001]")
_REFUSALS = (JinjaError, TypeError, ValueError, KeyError, IndexError, AttributeError)


class Template:
    """A chat template as text and as tokens; `agentrl.chat.probes.probe` fills what is found out.

    Text of messages can never become a control token: one that is spelled in a message is tokenised
    as plain text.

    Attributes:
        name: the tokenizer's name, for error messages.
        end_text: the control token that ends an assistant turn; empty where the next message's
            first token does.
        last_text: the control token that ends a turn that nothing follows; usually the same.
        before_stop: text between an assistant's own text and the stop token; usually empty.
        thinking: what the generation prompt opens for the model (`<think>` and white space);
            usually empty.
        style: how earlier calls are handed to the template: inside the content, or as `tool_calls`
            with arguments as an object or as JSON text.
        tool_role: "user" where results are sent as user messages.
        takes_system: whether the template has a place for a system message; if not, it stands at
            the head of the first user message.
        shows_tools: whether the template tells the model of its tools; if not, the system message
            does.
        reads_own: whether the parser reads the calls that the template writes of `tool_calls`.
        rewrites_history: the template changes what stands before or in an earlier turn when
            messages are added.
        unsteady: why text that was shown cannot be appended to, whatever the turns; usually empty.
        verbatim: the template writes a canonical turn letter by letter as the model does.

    Raises:
        TemplateError: the tokenizer has no chat template.
    """

    end_text = last_text = before_stop = thinking = unsteady = ""
    style: CallStyle = "plain"
    tool_role: ToolRole = "tool"
    takes_system = shows_tools = tools_matter = verbatim = True
    reads_own = rewrites_history = False

    def __init__(
        self, tokenizer: PreTrainedTokenizerBase, form: Format, options: Mapping[str, Any]
    ) -> None:
        self.tokenizer = tokenizer
        self.form = form
        self.name = str(getattr(tokenizer, "name_or_path", "") or type(tokenizer).__name__)
        self._options = dict(options)
        self._describes = SHOWS_NO_TOOLS not in str(tokenizer.chat_template)
        added = tokenizer.added_tokens_decoder.values()
        self._special = sorted(
            (token.content for token in added if token.special), key=len, reverse=True
        )
        self._special_at = {text: index for index, text in enumerate(self._special)}
        self._special_pattern = one_of(self._special)
        self._control_pattern = one_of([token.content for token in added if token.content.strip()])
        canonical = form.turn(
            Message("assistant", "x", (ToolCall("f", {"x": "x"}),), reasoning="x")
        )
        self.markup = frozenset(self._special_pattern.findall(canonical))
        self.turn_pattern = one_of([text for text in self._special if text not in self.markup])

    # Tokens.

    def guard(self, text: str, pattern: re.Pattern[str] | None = None) -> str:
        """Hide control tokens that are spelled in a text: `encode` makes plain text of them."""
        return (pattern or self._special_pattern).sub(
            lambda match: f"\ue000{self._special_at[match[0]]}\ue001", _MARKS.sub("\ufffd", text)
        )

    def _guard_all(self, value: Json) -> Json:
        """`guard` for every text inside of a JSON value."""
        if isinstance(value, dict):
            return {self.guard(key): self._guard_all(item) for key, item in value.items()}
        if isinstance(value, list):
            return [self._guard_all(item) for item in value]
        return self.guard(value) if isinstance(value, str) else value

    def _unguard(self, text: str) -> str:
        return _GUARD.sub(lambda match: self._special[int(match[1])], text)

    def encode(self, text: str) -> list[int]:
        """Tokenise rendered text: control tokens count, guarded ones are spelled, nothing is added
        in front.
        """
        if "\ue000" not in text:
            return self._encode(text)
        ids: list[int] = []
        for index, piece in enumerate(_GUARD.split(text)):
            if index % 2 and int(piece) < len(self._special):
                spelled = self._special[int(piece)]
                ids += self._encode(spelled[:1]) + self._encode(spelled[1:])
            else:
                ids += self._encode(piece)
        return ids

    def _encode(self, text: str) -> list[int]:
        ids = (
            self.tokenizer.encode(text, add_special_tokens=False, split_special_tokens=False)
            if text
            else []
        )
        return list(ids)

    def encode_turn(self, text: str) -> list[int]:
        """Tokenise an assistant's text; only the format's own control tokens count."""
        return self.encode(self.guard(text, self.turn_pattern))

    def opened(self, text: str) -> bool:
        """Whether a prompt opens the reasoning for the model."""
        return bool(self.thinking) and text.endswith(self.thinking)

    def spoken(self, turn: Message, opened: bool = True) -> str:
        """The canonical text of a turn from behind the generation prompt to the stop token."""
        text = self.form.turn(turn)
        if self.thinking and opened:
            begin, end = self.form.think
            text = text if turn.reasoning else f"{begin}\n\n{end}\n\n{text}"
            text = text.removeprefix(self.thinking)
        return text + self.before_stop

    def token(self, text: str) -> int:
        """Id of a control token."""
        return self.encode(text)[0]

    # Text.

    def render(
        self, messages: Sequence[Message], tools: Sequence[ToolSpec] = (), generation: bool = True
    ) -> str:
        """The whole conversation as text; `generation` opens an assistant turn at the end.

        Raises:
            TemplateError: the template refuses the conversation.
        """
        rows = self._rows(messages, tools)
        try:
            text = self.tokenizer.apply_chat_template(
                rows,
                tools=[tool.schema() for tool in tools] or None,
                add_generation_prompt=generation,
                tokenize=False,
                **self._options,
            )
        except _REFUSALS as error:
            roles = ", ".join(str(row["role"]) for row in rows)
            raise self.error(
                f"refuses the roles ({roles}): {error}",
                f"give another template ({ANOTHER})",
            ) from error
        return str(text)

    def _rows(self, messages: Sequence[Message], tools: Sequence[ToolSpec]) -> list[Row]:
        """Messages as the template takes them; calls without an id are numbered in their turn."""
        rows: list[Row] = []
        open_ids: list[str] = []
        for message in as_user(messages) if self.tool_role == "user" else messages:
            row: Row = {"role": message.role, "content": self.guard(message.content)}
            if message.role == "assistant":
                open_ids = [call_id(call, index) for index, call in enumerate(message.tool_calls)]
                row = self._assistant_row(message)
            elif message.role == "tool":
                following = open_ids.pop(0) if open_ids else "call00000"
                row["name"] = self.guard(message.name) or BADLY_NAMED
                row["tool_call_id"] = message.tool_call_id or following
            rows.append(row)
        return self._opened_by(rows, self._description(tools))

    def _description(self, tools: Sequence[ToolSpec]) -> str:
        """What the template does not say of the tools."""
        if not tools or self.shows_tools or not self._describes:
            return ""
        example = self.guard(example_call(self.form), self.turn_pattern)
        return self.guard(described(tools)) + example

    def _opened_by(self, rows: list[Row], description: str) -> list[Row]:
        """Rows with the description in the system message, and that where the template takes it."""
        if not description and self.takes_system:
            return rows
        first = next((i for i, row in enumerate(rows) if row["role"] != "system"), len(rows))
        texts = [row["content"] for row in rows[:first]]
        texts += [description] if description else []
        rest = rows[first:]
        if texts and self.takes_system:
            return [{"role": "system", "content": "\n\n".join(texts)}, *rest]
        if texts and rest and rest[0]["role"] == "user":
            texts.append(rest.pop(0)["content"])
        return [{"role": "user", "content": "\n\n".join(texts)}, *rest] if texts else rest

    def _assistant_row(self, message: Message) -> Row:
        form, content, calls = self.form, message.content, message.tool_calls
        if self.style == "plain":
            spoken = self.guard(form.turn(message), self.turn_pattern)
            return {"role": "assistant", "content": spoken}
        reasoning = self.guard(message.reasoning)
        row: Row = {"role": "assistant"}
        if form.field:
            if form.merges and calls:
                reasoning, content = "\n\n".join(filter(None, (reasoning, content))), ""
            row |= {form.field: reasoning} if reasoning else {}
            row["content"] = self.guard(content)
        else:
            spoken = self.guard(form.write_reasoning(message.reasoning), self.turn_pattern)
            row["content"] = spoken + self.guard(content)
        if calls:
            row["tool_calls"] = [self._call_row(call, index) for index, call in enumerate(calls)]
        return row

    def _call_row(self, call: ToolCall | BadCall, index: int) -> Row:
        name, arguments = (
            (call.name, call.arguments)
            if isinstance(call, ToolCall)
            else (BADLY_NAMED, {"text": call.text})
        )
        values = self._guard_all(dict(arguments))
        function = {
            "name": self.guard(name),
            "arguments": self.guard(dumps(dict(arguments))) if self.style == "json" else values,
        }
        return {"id": call_id(call, index), "type": "function", "function": function}

    def suffix(self, turn: Message, new: Sequence[Message], tools: Sequence[ToolSpec] = ()) -> str:
        """The text from the end of an assistant turn to the opening of the next one, `new` messages
        included.

        It starts with a control token: the one that ends the turn, or the first one of the next
        message.
        """
        stand_in = self._stand_in(turn, new)
        tools = tools if self.tools_matter else ()
        head = [Message.user("Hi"), stand_in]
        after = self.render([*head, *new], tools)
        if not stand_in.tool_calls:
            return after[self.first_control(after, after.find(SENTINEL)) :]
        before = self.render(head, tools, generation=False)
        count = before.count(SENTINEL)
        at, tail = behind_nth(after, count), before[behind_nth(before, count) :]
        if self.end_text and self.end_text in tail:
            return after[after.find(self.end_text, at) :]
        written = self.form.write("", stand_in.tool_calls).rpartition(SENTINEL)[2]
        own = next((text for text in (written, tail) if after.startswith(text, at)), "")
        return after[self.first_control(after, at + len(own) if at >= 0 else at) :]

    def _stand_in(self, turn: Message, new: Sequence[Message]) -> Message:
        """A turn of the same shape; plain templates see no calls, others one for each result they
        may look up.
        """
        if self.style == "plain" or self.tool_role == "user" or new[0].role != "tool":
            return Message.assistant(SENTINEL)
        calls = turn.tool_calls or [
            ToolCall(m.name or BADLY_NAMED, {}) for m in new if m.role == "tool"
        ]
        names = [(getattr(call, "name", BADLY_NAMED), getattr(call, "id", "")) for call in calls]
        return Message.assistant("", *(ToolCall(name, {"x": SENTINEL}, id) for name, id in names))

    def first_control(self, text: str, start: int) -> int:
        """Index of the first control token from `start` on.

        Raises:
            TemplateError: there is none.
        """
        match = self._control_pattern.search(text, start) if start >= 0 else None
        if match is None:
            raise self.error(
                "has no special token between an assistant turn and what follows",
                "end assistant turns with {{ eos_token }} in the template, or give another"
                f" ({ANOTHER})",
            )
        return match.start()

    def control_at(self, text: str, start: int) -> str:
        """The first control token from `start` on; empty if there is none."""
        match = self._control_pattern.search(text, start) if start >= 0 else None
        return match[0] if match else ""

    # History.

    def difference(
        self, messages: Sequence[Message], tools: Sequence[ToolSpec]
    ) -> Literal["opening", "turn", "place", "wording"] | None:
        """Where rendering the conversation turn by turn departs from appending to it; None if
        nowhere.

        Returns:
            opening: text before the first assistant turn changed; turn: a turn's text changed or
                lost something;
            place: what follows a turn is not what `suffix` says; wording: turns are kept, in other
                words than sampled.
        """
        same_words = True
        turns = [index for index, message in enumerate(messages) if message.role == "assistant"]
        seen = self.render(messages[: turns[0]], tools)
        opening = common_prefix(seen, self.render(messages[: turns[0]], tools, generation=False))
        for index, following in zip(turns, [*turns[1:], len(messages)], strict=True):
            now = self.render(messages[:following], tools)
            suffix = self.suffix(messages[index], messages[index + 1 : following], tools)
            if not now.startswith(opening):
                return "opening"
            if not now.startswith(seen):
                return "turn"
            if not now.endswith(suffix):
                return "place"
            shown = now[len(seen) : len(now) - len(suffix)]
            if not self._holds(shown, messages[index], tools):
                return "turn"
            spoken = self.spoken(messages[index], self.opened(seen))
            same_words = same_words and shown == self.guard(spoken, self.turn_pattern)
            seen = now
        return None if same_words else "wording"

    def keeps(
        self, before: Sequence[Message], new: Sequence[Message], tools: Sequence[ToolSpec]
    ) -> bool:
        """Whether the template, after `new` messages, still shows all that was there with the last
        turn sampled.
        """
        turn = before[-1]
        seen = self.render(before[:-1], tools)
        now = self.render([*before, *new], tools)
        suffix = self.suffix(turn, new, tools)
        if not (now.startswith(seen) and now.endswith(suffix)):
            return False
        return self._holds(now[len(seen) : len(now) - len(suffix)], turn, tools)

    def _holds(self, text: str, turn: Message, tools: Sequence[ToolSpec]) -> bool:
        """Whether a turn's rendered text has its reasoning, then its words, and its calls."""
        plain = self.style == "plain"
        pattern = self.turn_pattern if plain else None
        reasoning = self.guard(turn.reasoning, pattern)
        start = text.find(reasoning) + len(reasoning)
        words = turn.content
        if plain:
            words = self.form.write(turn.content, turn.tool_calls).strip()
        if start < len(reasoning) or text.find(self.guard(words, pattern), start) < 0:
            return False
        wanted = [(call.name, call.arguments) for call in _good(turn.tool_calls)]
        if plain or not self.reads_own or len(wanted) != len(turn.tool_calls):
            return True
        read = _good(self.form.read(self._unguard(text), tools).calls)
        return [(call.name, call.arguments) for call in read] == wanted

    def error(self, what: str, fix: str) -> TemplateError:
        """The error that names the tokenizer."""
        return TemplateError(f"chat template of tokenizer {self.name!r} {what}; {fix}")


def _good(calls: Sequence[ToolCall | BadCall]) -> list[ToolCall]:
    return [call for call in calls if isinstance(call, ToolCall)]

"""A tokenizer's chat template: rendered, cut behind an assistant turn, and probed for what exact
tokens need.

Nothing that was sampled is ever rendered here. What follows a turn is found by rendering a stand-in
turn and taking the text behind it; it starts with a control token, so it can be tokenised on its
own.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal

from jinja2 import TemplateError as JinjaError

from agentrl.chat.parsing import decode, dumps
from agentrl.chat.probes import PROBE_TOOL, probe_conversations, probe_results, probe_turn
from agentrl.errors import TemplateError
from agentrl.types import BadCall, Message, ToolCall, ToolSpec

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Row = dict[str, Any]
CallStyle = Literal["plain", "object", "json"]
ToolRole = Literal["tool", "user"]
Writer = Callable[[Message], str]

_SENTINEL = "agentrlStandInTurn"
_GUARD = re.compile("\ue000(\\d+)\ue001")
_BADLY_NAMED = "invalid_call"


class Template:
    """A chat template as text and as tokens.

    Text of messages can never become a control token: one that is spelled in a message is tokenised
        as plain text.

    Attributes:
        name: the tokenizer's name, for error messages.
        end_text: the control token that ends an assistant turn; empty where the next message's
            first token does.
        before_stop: text between an assistant's own text and the stop token; usually empty.
        thinking: what the generation prompt opens for the model (`<think>` and white space);
            usually empty.
        style: how earlier calls are handed to the template: inside the content, or as `tool_calls`
            with arguments as an object or as JSON text. Plain unless the template renders tool
            results differently for it.
        takes_system: whether the template has a place for a system message.
        shows_tools: whether the template tells the model of its tools; where not, the system
            message must.
        rewrites_history: the template changes what stands before or in an earlier turn when
            messages are added.
        verbatim: the template writes a canonical turn letter by letter as the model does.

    Raises:
        TemplateError: no template, a template that refuses tool results or drops their text, no
            control token after a turn, an opening that changes when tool results are added, or text
            that depends on its place.
    """

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        write: Writer,
        options: Mapping[str, Any],
        tool_role: ToolRole = "tool",
    ) -> None:
        self.tokenizer = tokenizer
        self.name = str(getattr(tokenizer, "name_or_path", "") or type(tokenizer).__name__)
        if not getattr(tokenizer, "chat_template", None):
            raise self._error("has no chat template", "set tokenizer.chat_template")
        self._write = write
        self._options = dict(options)
        self._tool_role = tool_role
        added = tokenizer.added_tokens_decoder.values()
        self._special = sorted(
            (token.content for token in added if token.special), key=len, reverse=True
        )
        self._special_at = {text: index for index, text in enumerate(self._special)}
        self._special_pattern = _one_of(self._special)
        self._control_pattern = _one_of([token.content for token in added if token.content.strip()])
        self._markup = frozenset(self._special_in(self._write(probe_turn(1, "why"))))
        self._turn_pattern = _one_of([text for text in self._special if text not in self._markup])
        self.end_text = self.before_stop = ""
        self._tools_matter = True
        self.style: CallStyle = "plain"
        self._probe_end()
        self.style = self._probe_style()
        self._tools_matter = self._probe_tools()
        opening = self.render([Message.user("Hi")])
        self.thinking = (
            opening[opening.rindex("<think>") :] if opening.rstrip().endswith("<think>") else ""
        )
        if not self.suffix(probe_turn(1), probe_results(1)).startswith(self.end_text):
            self.end_text = ""
        self.shows_tools = PROBE_TOOL.name in self.render([Message.user("Hi")], [PROBE_TOOL])
        self.takes_system = self._takes_system()
        self.verbatim = True
        self.rewrites_history = self._probe_history()

    # Tokens.

    def guard(self, text: str, pattern: re.Pattern[str] | None = None) -> str:
        """Hide control tokens that are spelled in a text, so that `encode` makes plain text of
        them.
        """
        return (pattern or self._special_pattern).sub(
            lambda match: f"\ue000{self._special_at[match[0]]}\ue001", text
        )

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
        """Tokenise an assistant's text; of the control tokens only the parser's own markup counts."""
        return self.encode(self.guard(text, self._turn_pattern))

    def spoken(self, turn: Message) -> str:
        """The canonical text of a turn from behind the generation prompt to the stop token."""
        text = self._write(turn)
        if self.thinking:
            text = text if turn.reasoning else f"<think>\n\n</think>\n\n{text}"
        return text.removeprefix(self.thinking) + self.before_stop

    def token(self, text: str) -> int:
        """Id of a control token."""
        return self.encode(text)[0]

    def _special_in(self, text: str) -> list[str]:
        return self._special_pattern.findall(text)

    # Text.

    def render(
        self, messages: Sequence[Message], tools: Sequence[ToolSpec] = (), generation: bool = True
    ) -> str:
        """The whole conversation as text; `generation` opens an assistant turn at the end.

        Raises:
            TemplateError: the template refuses the conversation.
        """
        return self._render(self._rows(messages), tools, generation)

    def _render(self, rows: list[Row], tools: Sequence[ToolSpec], generation: bool) -> str:
        try:
            text = self.tokenizer.apply_chat_template(
                rows,
                tools=[tool.schema() for tool in tools] or None,
                add_generation_prompt=generation,
                tokenize=False,
                **self._options,
            )
        except (JinjaError, TypeError, ValueError, KeyError) as error:
            roles = ", ".join(str(row["role"]) for row in rows)
            raise self._error(
                f"refuses the roles ({roles}): {error}", "use a template that takes them"
            ) from error
        return str(text)

    def _rows(self, messages: Sequence[Message]) -> list[Row]:
        """Messages as templates take them; calls without an id are numbered within their turn."""
        rows: list[Row] = []
        open_ids: list[str] = []
        for message in messages if self._tool_role == "tool" else _as_user(messages):
            row: Row = {"role": message.role, "content": self.guard(message.content)}
            if message.role == "assistant":
                open_ids = [_call_id(call, index) for index, call in enumerate(message.tool_calls)]
                row = self._assistant_row(message)
            elif message.role == "tool":
                following = open_ids.pop(0) if open_ids else "call00000"
                row["name"] = self.guard(message.name) or _BADLY_NAMED
                row["tool_call_id"] = message.tool_call_id or following
            rows.append(row)
        return rows

    def _assistant_row(self, message: Message) -> Row:
        if self.style == "plain" or not message.tool_calls:
            return {
                "role": "assistant",
                "content": self.guard(self._write(message), self._turn_pattern),
            }
        spoken = self._write(Message("assistant", message.content, reasoning=message.reasoning))
        calls = [self._call_row(call, index) for index, call in enumerate(message.tool_calls)]
        return {
            "role": "assistant",
            "content": self.guard(spoken, self._turn_pattern),
            "tool_calls": calls,
        }

    def _call_row(self, call: ToolCall | BadCall, index: int) -> Row:
        name, arguments = (
            (call.name, call.arguments)
            if isinstance(call, ToolCall)
            else (_BADLY_NAMED, {"text": call.text})
        )
        text = self.guard(dumps(dict(arguments)))
        function = {
            "name": self.guard(name),
            "arguments": text if self.style == "json" else decode(text),
        }
        return {"id": _call_id(call, index), "type": "function", "function": function}

    def suffix(self, turn: Message, new: Sequence[Message], tools: Sequence[ToolSpec] = ()) -> str:
        """The text from the end of an assistant turn to the opening of the next one, `new` messages
        included.

        It starts with a control token: the one that ends the turn, or the first one of the next
            message.
        """
        stand_in = self._stand_in(turn, new)
        tools = tools if self._tools_matter else ()
        head = [Message.user("Hi"), stand_in]
        after = self.render([*head, *new], tools)
        if not stand_in.tool_calls:
            return after[self._first_control(after, after.find(_SENTINEL)) :]
        before = self.render(head, tools, generation=False)
        count = before.count(_SENTINEL)
        at, tail = _behind_nth(after, count), before[_behind_nth(before, count) :]
        if self.end_text and self.end_text in tail:
            return after[after.find(self.end_text, at) :]
        return after[
            self._first_control(after, at + len(tail) if after.startswith(tail, at) else at) :
        ]

    def _stand_in(self, turn: Message, new: Sequence[Message]) -> Message:
        """A turn of the same shape; plain templates see no calls, others one for each result they
        may look up.
        """
        if self.style == "plain" or self._tool_role == "user" or new[0].role != "tool":
            return Message.assistant(_SENTINEL)
        calls = turn.tool_calls or [
            ToolCall(m.name or _BADLY_NAMED, {}) for m in new if m.role == "tool"
        ]
        return Message.assistant(
            _SENTINEL,
            *(
                ToolCall(
                    getattr(call, "name", _BADLY_NAMED), {"x": _SENTINEL}, getattr(call, "id", "")
                )
                for call in calls
            ),
        )

    def _first_control(self, text: str, start: int) -> int:
        match = self._control_pattern.search(text, start) if start >= 0 else None
        if match is None:
            raise self._error(
                "has no special token between an assistant turn and what follows",
                "end assistant turns with {{ eos_token }} in the template",
            )
        return match.start()

    # Probes, once at construction.

    def _probe_end(self) -> None:
        """Find the token that ends a turn, and what stands between the turn's text and it."""
        turn = Message.assistant(_SENTINEL)
        after = self.render([Message.user("Hi"), turn, Message.user("Go on")])
        start = after.find(_SENTINEL) + len(_SENTINEL)
        first = self._first_control(after, start if start >= len(_SENTINEL) else -1)
        self.before_stop = after[start:first]
        alone = self.render([Message.user("Hi"), turn], generation=False)
        match = self._control_pattern.search(alone, alone.find(_SENTINEL))
        self.end_text = match[0] if match and after.startswith(match[0], first) else ""

    def _probe_style(self) -> CallStyle:
        """Plain, unless only `tool_calls` make the template render tool results (or render them its
        own way).
        """
        suffixes: dict[CallStyle, str] = {}
        refusals: list[TemplateError] = []
        turn, results = probe_turn(1), probe_results(1)
        for style in ("plain", "object", "json"):
            self.style = style
            try:
                suffixes[style] = self.suffix(turn, results, [PROBE_TOOL])
            except TemplateError as error:
                refusals.append(error)
        shown: list[CallStyle] = [
            style for style in suffixes if results[0].content in suffixes[style]
        ]
        calls = next((style for style in shown if style != "plain"), None)
        if "plain" in shown and (calls is None or suffixes[calls].endswith(suffixes["plain"])):
            return "plain"
        if calls is None and suffixes:
            raise self._error("drops the text of tool results", "pass tool_role='user'")
        if calls is None:
            raise TemplateError(f"{refusals[0]}, or pass tool_role='user'")
        return calls

    def _probe_tools(self) -> bool:
        turn, results = probe_turn(1), probe_results(1)
        return self.suffix(turn, results) != self.suffix(turn, results, [PROBE_TOOL])

    def _takes_system(self) -> bool:
        try:
            return "Be brief." in self.render([Message.system("Be brief."), Message.user("Hi")])
        except TemplateError:
            return False

    def _probe_history(self) -> bool:
        """Whether earlier text changes when messages are added, over conversations that an episode
        can have.
        """
        rewrites = False
        for follow_up, messages in probe_conversations(system=self.takes_system):
            found = self.difference(messages, [PROBE_TOOL])
            if found == "place":
                raise self._error(
                    "renders a message differently depending on its place in the conversation",
                    "remove counters and positions from the template",
                )
            if found == "opening" and not follow_up:
                raise self._error(
                    "is not prefix-stable: tool results change the text before the first turn",
                    "remove what depends on later messages from the template's opening",
                )
            self.verbatim = self.verbatim and found is None
            rewrites = rewrites or found in ("opening", "turn")
        return rewrites

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
        opening = _common_prefix(seen, self.render(messages[: turns[0]], tools, generation=False))
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
            if not self._holds(shown, messages[index]):
                return "turn"
            same_words = same_words and shown == self.guard(
                self.spoken(messages[index]), self._turn_pattern
            )
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
        return self._holds(now[len(seen) : len(now) - len(suffix)], turn)

    def _holds(self, text: str, turn: Message) -> bool:
        """Whether a turn's rendered text has its reasoning, and its words behind that."""
        start = text.find(self.guard(turn.reasoning, self._turn_pattern)) + len(turn.reasoning)
        words = turn.content
        if self.style == "plain":
            words = self._write(Message("assistant", turn.content, turn.tool_calls)).strip()
        return (
            start >= len(turn.reasoning)
            and text.find(self.guard(words, self._turn_pattern), start) >= 0
        )

    def _error(self, what: str, fix: str) -> TemplateError:
        return TemplateError(f"chat template of tokenizer {self.name!r} {what}; {fix}")


def _one_of(texts: Iterable[str]) -> re.Pattern[str]:
    ordered = sorted(texts, key=len, reverse=True)
    return re.compile("|".join(map(re.escape, ordered)) or r"(?!)")


def _as_user(messages: Sequence[Message]) -> list[Message]:
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


def _call_id(call: ToolCall | BadCall, index: int) -> str:
    return getattr(call, "id", "") or f"call{index:05d}"


def _behind_nth(text: str, count: int) -> int:
    """Index behind the `count`-th stand-in text; -1 if there are fewer."""
    at = 0
    for _ in range(count):
        found = text.find(_SENTINEL, at)
        if found < 0:
            return -1
        at = found + len(_SENTINEL)
    return at if count else -1


def _common_prefix(left: str, right: str) -> str:
    length = next(
        (i for i, (a, b) in enumerate(zip(left, right, strict=False)) if a != b),
        min(len(left), len(right)),
    )
    return left[:length]

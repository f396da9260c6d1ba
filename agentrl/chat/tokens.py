"""Messages to token segments and back, without ever tokenising again what was sampled.

    prompt_ids | sampled | observation_ids | sampled | observation_ids | ...

The engine's ids stay as they are; only the text that the template puts between two turns is
tokenised. docs/tokens.md says why, and what each kind of template needs.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from agentrl.chat.detect import AWKWARD, find_parser, own_calls, reads
from agentrl.chat.parsers import FORMATS
from agentrl.chat.probes import probe
from agentrl.chat.rows import ToolRole
from agentrl.chat.template import Template
from agentrl.errors import ConfigError, EngineBroken, TemplateError
from agentrl.trajectory import FinishReason
from agentrl.types import Message, ToolCall, ToolSpec

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

OnRewrite = Literal["refuse", "branch", "keep"]


class Demonstration(NamedTuple):
    """One row for supervised fine-tuning: ids and mask of equal length T; 1 on what the assistant
    wrote.
    """

    input_ids: list[int]
    mask: list[int]


class Chat:
    """One tokenizer's chat template and one tool-call format.

    Args:
        tokenizer: a transformers tokenizer with a chat template.
        parser: name of the tool-call format, one of `agentrl.chat.parsers.FORMATS`; "auto" takes
            the one that reads the calls which the template itself writes.
        on_rewrite: what to do with a template that rewrites earlier turns (as those that drop
            `<think>` from history): "branch" answers True in `needs_new_branch` where history
            changes, and the caller opens a new branch with `prompt_ids`; "keep" appends to what
            was sampled, so the model sees more than the template would show; "refuse" raises.
        stop_ids: further tokens that end a turn, such as a generation config's `eos_token_id`.
        template_options: variables of the template, such as `{"enable_thinking": False}`.
        tool_role: "user" sends tool results as user messages in `<tool_response>` tags; "auto"
            does so for templates without a role for them.

    Attributes:
        round_trip: whether the parser reads back two calls with awkward arguments, as the template
            writes them of `tool_calls`, or in the content where it writes none.

    Raises:
        ConfigError: `parser`, `on_rewrite` or `tool_role` is unknown.
        TemplateError: the template cannot carry exact tokens, or writes calls that no parser reads.
    """

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        parser: str = "auto",
        on_rewrite: OnRewrite = "branch",
        *,
        stop_ids: Iterable[int] = (),
        template_options: Mapping[str, Any] | None = None,
        tool_role: ToolRole = "auto",
    ) -> None:
        _one_of("parser", parser, ("auto", *FORMATS))
        _one_of("on_rewrite", on_rewrite, ("refuse", "branch", "keep"))
        _one_of("tool_role", tool_role, ("auto", "tool", "user"))
        # A template that joins a token the tokenizer lacks to other text would be refused.
        lacking = {name: "" for name in ("bos_token", "eos_token") if not getattr(tokenizer, name)}
        options = {**lacking, **(template_options or {})}
        self.tokenizer = tokenizer
        self.on_rewrite = on_rewrite
        self._extra_stop_ids = frozenset(stop_ids)
        _refuse_without_template(tokenizer)
        self._own = own_calls(tokenizer, options)
        self.parser = parser if parser != "auto" else find_parser(tokenizer, self._own)
        if not self.parser:
            raise TemplateError(
                f"chat template of tokenizer {tokenizer.name_or_path!r} writes tool calls that no"
                f" parser reads; name the nearest with chat.parser, one of {', '.join(FORMATS)}"
            )
        self.form = FORMATS[self.parser]
        self.template = Template(tokenizer, self.form, options)
        probe(self.template, tool_role)
        self._refuse_rewriting()

    def _refuse_rewriting(self) -> None:
        template, mode = self.template, self.on_rewrite
        if template.unsteady and mode != "branch":
            raise template.error(
                template.unsteady,
                f"set chat.on_rewrite to 'branch', or change the template: {mode!r} is not exact",
            )
        if self.rewrites_history and mode == "refuse":
            raise template.error(
                "rewrites earlier turns",
                "use on_rewrite='branch' to open a new branch where it does, or on_rewrite='keep'"
                " to keep what was sampled",
            )

    @cached_property
    def round_trip(self) -> bool:
        """Whether two calls with awkward arguments come back as the template writes them."""
        if self._own:
            return any(reads(self.parser, own) for own in self._own)
        turn = Message.assistant("", *AWKWARD)
        shown = self.template.render([Message.user("Hi"), turn], generation=False)
        return self.form.parse(shown).calls == AWKWARD

    @property
    def rewrites_history(self) -> bool:
        """Whether the template changes earlier text when messages are added."""
        return self.template.rewrites_history

    @property
    def shows_tools(self) -> bool:
        """Whether the template tells the model of its tools; where not, the system message must."""
        return self.template.shows_tools

    @cached_property
    def stop_ids(self) -> frozenset[int]:
        """Tokens that end a turn: what follows a turn in the template, the tokenizer's and the
        model's end tokens.
        """
        template = self.template
        found = {template.encode(template.suffix(turn, new))[0] for turn, new in self._follow_ups}
        found |= {template.token(end) for end in (template.end_text, template.last_text) if end}
        found -= self._inner_ids
        ends: Any = self.tokenizer.eos_token_id
        return frozenset(
            found | set(_as_ids(ends)) | self._generation_config_ids() | self._extra_stop_ids
        )

    def _generation_config_ids(self) -> set[int]:
        file = Path(self.template.name) / "generation_config.json"
        return (
            set(_as_ids(json.loads(file.read_text()).get("eos_token_id")))
            if file.is_file()
            else set()
        )

    @cached_property
    def _inner_ids(self) -> set[int]:
        """Control tokens that stand within a turn, and so end none."""
        return {self.template.token(text) for text in self.template.markup}

    @cached_property
    def _follow_ups(self) -> tuple[tuple[Message, list[Message]], tuple[Message, list[Message]]]:
        call = ToolCall("tool", {})
        user = (Message.assistant("x"), [Message.user("x")])
        return user, (Message.assistant("x", call), [Message.tool("x", call)])

    # Online play.

    def prompt_ids(self, messages: Sequence[Message], tools: Sequence[ToolSpec]) -> list[int]:
        """The rendered opening of a branch, up to and with the opening of the assistant's turn.

        Raises:
            ValueError: there are no messages, or the last one is the assistant's.
            TemplateError: the template refuses the conversation.
        """
        if not messages or messages[-1].role == "assistant":
            raise ValueError("a prompt ends with a message that is not the assistant's; append one")
        return self.template.encode(self.template.render(messages, tools))

    def observation_ids(
        self,
        turn: Message,
        sampled_ids: Sequence[int],
        new_messages: Sequence[Message],
        tools: Sequence[ToolSpec],
        finish: FinishReason,
    ) -> list[int]:
        """The tokens between the sampled ids and the next sampled ids; `sampled_ids` themselves are
        never touched.

        A stop token that was sampled is not repeated; a turn that was cut by length is closed here,
        by tokens that do not train.

        Raises:
            ValueError: `new_messages` is empty or holds an assistant message.
            EngineBroken: the engine says "stop" but sampled no stop token.
            TemplateError: the template refuses the messages.
        """
        if not new_messages or any(message.role == "assistant" for message in new_messages):
            raise ValueError("new_messages are one or more tool, user or system messages")
        if finish == "stop" and (not sampled_ids or sampled_ids[-1] not in self.stop_ids):
            raise EngineBroken(
                f"the engine reports finish='stop' but the last of its {len(sampled_ids)} ids is"
                f" none of the stop tokens {sorted(self.stop_ids)}; pass chat.stop_ids to the"
                " engine and keep the stop token in its ids"
            )
        ids = self.template.encode(self.template.suffix(turn, new_messages, tools))
        return ids[1:] if sampled_ids and sampled_ids[-1] == ids[0] else ids

    def needs_new_branch(
        self,
        messages_before: Sequence[Message],
        new_messages: Sequence[Message],
        tools: Sequence[ToolSpec] = (),
    ) -> bool:
        """Whether adding messages makes the template rewrite what the policy has seen; False unless
        "branch" was asked.

        Args:
            messages_before: the conversation, ending with the assistant's turn.
            new_messages: what comes next.
        """
        if self.on_rewrite != "branch" or not self.rewrites_history:
            return False
        return not self.template.keeps(messages_before, new_messages, tools)

    def parse(
        self, ids: Sequence[int], before: Sequence[int] = (), tools: Sequence[ToolSpec] = ()
    ) -> Message:
        """The assistant's message that sampled ids spell; their stop token is left out, every other
        token is read.

        Args:
            before: the ids that were continued; without them, as after a user's message.
            tools: those that could be called; formats that do not quote text read by their schemas.
        """
        body = ids[:-1] if ids and ids[-1] in self.stop_ids else ids
        text = self._text(body)
        if self._opened(before) and not text.lstrip().startswith(self.form.think[0]):
            text = self.template.thinking + text
        parsed = self.form.read(text, tools)
        return Message("assistant", parsed.content, parsed.calls, reasoning=parsed.reasoning)

    def _text(self, ids: Sequence[int]) -> str:
        text = self.tokenizer.decode(
            list(ids), skip_special_tokens=False, clean_up_tokenization_spaces=False
        )
        assert isinstance(text, str)
        return text

    def _opened(self, before: Sequence[int]) -> bool:
        """Whether the prompt opens the reasoning for the model."""
        if not self.template.thinking or not before:
            return bool(self.template.thinking)
        tail = before[-2 * len(self.template.thinking) :]
        return self.template.opened(self._text(tail))

    # Demonstrations.

    def turn_text(self, message: Message) -> str:
        """The canonical text of an assistant's message: reasoning, content, calls."""
        return self.form.turn(message)

    def turn_ids(
        self,
        message: Message,
        new_messages: Sequence[Message] = (),
        before: Sequence[int] = (),
    ) -> list[int]:
        """The ids an engine would emit for the canonical text, with the stop token that goes before
        `new_messages`.

        Args:
            before: the ids that are continued; without them, as after a user's message.
        """
        return [
            *self.template.encode_turn(self.template.spoken(message, self._opened(before))),
            self._stop_id(message, new_messages),
        ]

    def _stop_id(self, message: Message, new_messages: Sequence[Message]) -> int:
        template = self.template
        if template.end_text:
            return template.token(template.end_text)
        default = self._follow_ups[1 if message.tool_calls else 0]
        turn, new = (message, new_messages) if new_messages else default
        first = template.encode(template.suffix(turn, new))[0]
        inner = first in self._inner_ids and template.last_text
        return template.token(template.last_text) if inner else first

    def render_demonstrations(
        self, messages: Sequence[Message], tools: Sequence[ToolSpec]
    ) -> list[Demonstration]:
        """A conversation as the rows that online play would record, had the assistant sampled its
        canonical text.

        More than one row only where `needs_new_branch` says so; messages behind the last assistant
        turn are left out.

        Raises:
            ValueError: no message before the first assistant turn, no assistant turn, or two
                without one between.
            TemplateError: the template refuses the conversation.
        """
        turns = [index for index, message in enumerate(messages) if message.role == "assistant"]
        if (
            not turns
            or not turns[0]
            or any(second - first == 1 for first, second in pairwise(turns))
        ):
            raise ValueError(
                "a demonstration alternates: other messages, then one assistant message, and so on"
            )
        prompt = self.prompt_ids(messages[: turns[0]], tools)
        rows = [Demonstration(prompt, [0] * len(prompt))]
        for index, following in zip(turns, [*turns[1:], len(messages)], strict=True):
            turn, new = messages[index], messages[index + 1 : following]
            sampled = self.turn_ids(turn, new, rows[-1].input_ids)
            rows[-1].input_ids.extend(sampled)
            rows[-1].mask.extend([1] * len(sampled))
            if following == len(messages):
                break
            if self.needs_new_branch(messages[: index + 1], new, tools):
                rows.append(Demonstration(self.prompt_ids(messages[:following], tools), []))
            else:
                rows[-1].input_ids.extend(self.observation_ids(turn, sampled, new, tools, "stop"))
            rows[-1].mask.extend([0] * (len(rows[-1].input_ids) - len(rows[-1].mask)))
        return rows

    def render_demonstration(
        self, messages: Sequence[Message], tools: Sequence[ToolSpec]
    ) -> Demonstration:
        """`render_demonstrations` for a conversation that is one branch.

        Raises:
            TemplateError: the template rewrites history within it, so it is several rows.
        """
        rows = self.render_demonstrations(messages, tools)
        if len(rows) > 1:
            raise TemplateError(
                f"the conversation needs {len(rows)} branches; use render_demonstrations"
            )
        return rows[0]


def _one_of(setting: str, value: str, known: Sequence[str]) -> None:
    if value not in known:
        raise ConfigError(f"{setting}={value!r} is unknown; use one of {', '.join(known)}")


def _refuse_without_template(tokenizer: PreTrainedTokenizerBase) -> None:
    if not getattr(tokenizer, "chat_template", None):
        raise TemplateError(
            f"tokenizer {tokenizer.name_or_path!r} has no chat template; set chat.template to the"
            " name of a shipped one or to a jinja file"
        )


def _as_ids(value: int | list[int] | None) -> list[int]:
    return [] if value is None else [value] if isinstance(value, int) else list(value)

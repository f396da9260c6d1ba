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

from agentrl.chat.parsers import FORMATTERS, PARSERS
from agentrl.chat.parsing import format_reasoning
from agentrl.chat.template import Template, ToolRole
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
        parser: name of the tool-call format, one of `agentrl.chat.parsers.PARSERS`.
        on_rewrite: what to do with a template that rewrites earlier turns (as those that drop
            `<think>` from history): "refuse" raises; "branch" answers True in `needs_new_branch`
            where history changes, and the caller opens a new branch with `prompt_ids`; "keep"
            appends to what was sampled, so the model sees more than the template would show.
        stop_ids: further tokens that end a turn, such as a generation config's `eos_token_id`.
        template_options: variables of the template, such as `{"enable_thinking": False}`.
        tool_role: "user" sends tool results as user messages in `<tool_response>` tags, for
            templates without a role for them.

    Raises:
        ConfigError: `parser` or `on_rewrite` is unknown.
        TemplateError: the template cannot carry exact tokens; see `agentrl.chat.template.Template`.
    """

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        parser: str = "hermes",
        on_rewrite: OnRewrite = "refuse",
        *,
        stop_ids: Iterable[int] = (),
        template_options: Mapping[str, Any] | None = None,
        tool_role: ToolRole = "tool",
    ) -> None:
        if parser not in PARSERS:
            raise ConfigError(f"parser={parser!r} is unknown; use one of {', '.join(PARSERS)}")
        if on_rewrite not in ("refuse", "branch", "keep"):
            raise ConfigError(f"on_rewrite={on_rewrite!r} is unknown; use refuse, branch or keep")
        self.tokenizer = tokenizer
        self.parser = parser
        self.on_rewrite = on_rewrite
        self._parse = PARSERS[parser]
        self._format = FORMATTERS[parser]
        self._extra_stop_ids = frozenset(stop_ids)
        self.template = Template(tokenizer, self.turn_text, template_options or {}, tool_role)
        if self.rewrites_history and on_rewrite == "refuse":
            raise TemplateError(
                f"chat template of tokenizer {self.template.name!r} rewrites earlier turns; use"
                " on_rewrite='branch' to open a new branch where it does, or on_rewrite='keep' to"
                " keep what was sampled"
            )

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
        user, tool = self._follow_ups
        found = {
            self.template.encode(self.template.suffix(turn, new))[0] for turn, new in (user, tool)
        }
        if self.template.end_text:
            found.add(self.template.token(self.template.end_text))
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

    def parse(self, ids: Sequence[int]) -> Message:
        """The assistant's message that sampled ids spell; their stop token is left out, every other
        token is read.
        """
        body = ids[:-1] if ids and ids[-1] in self.stop_ids else ids
        text = self.tokenizer.decode(
            list(body), skip_special_tokens=False, clean_up_tokenization_spaces=False
        )
        assert isinstance(text, str)
        if self.template.thinking and not text.lstrip().startswith("<think>"):
            text = self.template.thinking + text
        parsed = self._parse(text)
        return Message("assistant", parsed.content, parsed.calls, reasoning=parsed.reasoning)

    # Demonstrations.

    def turn_text(self, message: Message) -> str:
        """The canonical text of an assistant's message: reasoning, content, calls."""
        return format_reasoning(message.reasoning) + self._format(
            message.content, message.tool_calls
        )

    def turn_ids(self, message: Message, new_messages: Sequence[Message] = ()) -> list[int]:
        """The ids an engine would emit for the canonical text, with the stop token that goes before
        `new_messages`.
        """
        return [
            *self.template.encode_turn(self.template.spoken(message)),
            self._stop_id(message, new_messages),
        ]

    def _stop_id(self, message: Message, new_messages: Sequence[Message]) -> int:
        if self.template.end_text:
            return self.template.token(self.template.end_text)
        default = self._follow_ups[1 if message.tool_calls else 0]
        turn, new = (message, new_messages) if new_messages else default
        return self.template.encode(self.template.suffix(turn, new))[0]

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
            sampled = self.turn_ids(turn, new)
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


def _as_ids(value: int | list[int] | None) -> list[int]:
    return [] if value is None else [value] if isinstance(value, int) else list(value)

"""What travels between us and a server of chat completions: messages there, one reply back."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from typing import Annotated, Any, Literal, NamedTuple

from pydantic import BaseModel, Field, ValidationError

from agentrl.chat.parsing import BAD_ARGUMENTS, Refused, decode
from agentrl.errors import AnswerFailed
from agentrl.types import BadCall, Json, Message, ToolCall

FINISHED = ("stop", "tool_calls", "function_call", "length")
FILTERED = ("content_filter", "refusal", "safety")
_NAME = re.compile(r"[^A-Za-z0-9_-]")
_SURROGATE = re.compile("[\ud800-\udfff]")
_MOST_TOKENS = 1 << 40


def request_messages(
    messages: Sequence[Message], *, reasoning: bool = False
) -> list[dict[str, Json]]:
    """Messages as a server takes them: every call has an id and a name it accepts, every result the
    id of its call.

    A call that could not be read goes back as one of `unreadable_call` with its text. Reasoning
    goes back only with `reasoning`, and in a field of its own.
    """
    rows: list[dict[str, Json]] = []
    open_ids: list[str] = []
    for message in messages:
        row: dict[str, Json] = {"role": message.role, "content": message.content}
        if reasoning and message.reasoning:
            row["reasoning_content"] = message.reasoning
        if message.tool_calls:
            row["tool_calls"] = [
                _call_row(call, f"call_{len(rows)}_{i}")
                for i, call in enumerate(message.tool_calls)
            ]
            open_ids = [call["id"] for call in row["tool_calls"]]
        elif message.role == "tool":
            following = open_ids.pop(0) if open_ids else "call_unknown"
            row["tool_call_id"] = message.tool_call_id or following
        rows.append(row)
    return rows


def _call_row(call: ToolCall | BadCall, number: str) -> dict[str, Json]:
    if isinstance(call, BadCall):
        call = ToolCall("unreadable_call", {"text": call.text})
    function = {
        "name": _NAME.sub("_", call.name)[:64] or "nameless",
        "arguments": json.dumps(readable(dict(call.arguments))),
    }
    return {"id": call.id or number, "type": "function", "function": function}


class _Function(BaseModel):
    name: str
    arguments: str | dict[str, Json] = ""


class _Call(BaseModel):
    function: _Function
    id: str | None = None

    def read(self) -> ToolCall | BadCall:
        """The call; no arguments at all are an empty object."""
        name, written = self.function.name, self.function.arguments
        text = written if isinstance(written, str) else json.dumps(written)
        try:
            arguments = decode(text) if text.strip() else {}
            if not isinstance(arguments, dict):
                raise Refused(BAD_ARGUMENTS)
        except Refused as refused:
            return BadCall(f"{name}({text})", refused.why)
        return ToolCall(name, arguments, self.id or "")


class _Said(BaseModel):
    content: str | None = None
    refusal: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None
    tool_calls: list[_Call] | None = None

    def read(self) -> Message:
        """The assistant's message; a refusal is what it said. No call is looked for in any text."""
        calls = tuple(call.read() for call in self.tool_calls or ())
        return Message(
            "assistant",
            self.content or self.refusal or "",
            calls,
            reasoning=(self.reasoning_content or self.reasoning or "").strip(),
        )


class _Token(BaseModel):
    logprob: float


class _Logprobs(BaseModel):
    content: list[_Token] | None = None


class _Meta(BaseModel):
    output_token_logprobs: list[tuple[float, int, Any]] | None = None


class _Choice(BaseModel):
    message: _Said
    finish_reason: str
    token_ids: list[int] | None = None
    logprobs: _Logprobs | None = None
    prompt_token_ids: list[int] | None = None
    meta_info: _Meta | None = None


class _Counted(BaseModel):
    prompt_tokens: int = Field(ge=0, lt=_MOST_TOKENS)
    completion_tokens: int = Field(ge=0, lt=_MOST_TOKENS)


class ToldTokens(NamedTuple):
    """The tokens of one turn: what was read, what was sampled, and how likely each of those was."""

    prompt_ids: tuple[int, ...]
    ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    finish: Literal["stop", "length"]


class Reply(BaseModel):
    """What of a chat completion is read. Without `usage` no limit of tokens could be held, so it
    must be there.
    """

    choices: Annotated[list[_Choice], Field(min_length=1)]
    usage: _Counted
    prompt_token_ids: list[int] | None = None

    @classmethod
    def read(cls, text: str, name: str) -> Reply:
        """From the body of an answer.

        Raises:
            AnswerFailed: it is no chat completion; the message begins with `name`.
        """
        try:
            # Not by pydantic's own reader, which refuses half of a surrogate pair: a model may
            # well say one.
            return cls.model_validate(readable(json.loads(text)))
        except (ValueError, RecursionError) as error:
            if not isinstance(error, ValidationError):
                raise AnswerFailed(
                    f"{name}: the answer is no JSON ({line_of(error)}): {text[:200]!r}"
                ) from error
            first = error.errors()[0]
            why = f"{'.'.join(map(str, first['loc'])) or 'body'}: {first['msg']}"
            raise AnswerFailed(
                f"{name}: the answer is no chat completion ({why}): {text[:200]!r}"
            ) from error

    def check_count(self, most: int, name: str) -> None:
        """Hold the ids that a server tells against what it counts and what it was asked for.

        Raises:
            AnswerFailed: they are more than the `most` that were asked for, or than it counts.
        """
        choice, counted = self.choices[0], self.usage.completion_tokens
        rows = choice.meta_info.output_token_logprobs if choice.meta_info else None
        told = max(len(choice.token_ids or ()), len(rows or ()))
        if told > min(most, counted):
            raise AnswerFailed(
                f"{name}: the answer has {told} token ids, counts {counted}, and {most} were asked"
                " for at most"
            )

    def sampled(self) -> ToldTokens | None:
        """The turn's tokens, as vLLM or SGLang tell them; None where the server does not."""
        choice = self.choices[0]
        prompt = self.prompt_token_ids or choice.prompt_token_ids
        if choice.token_ids and choice.logprobs and choice.logprobs.content:
            ids = choice.token_ids
            logprobs = [token.logprob for token in choice.logprobs.content]
        elif choice.meta_info and choice.meta_info.output_token_logprobs:
            logprobs = [row[0] for row in choice.meta_info.output_token_logprobs]
            ids = [row[1] for row in choice.meta_info.output_token_logprobs]
        else:
            return None
        if not prompt:
            return None
        finish: Literal["stop", "length"] = "length" if choice.finish_reason == "length" else "stop"
        return ToldTokens(tuple(prompt), tuple(ids), tuple(logprobs), finish)


def readable(value: Json) -> Json:
    """The same JSON with the replacement character for each surrogate, which UTF-8 has not."""
    if isinstance(value, str):
        return _SURROGATE.sub("\ufffd", value)
    if isinstance(value, list):
        return [readable(item) for item in value]
    if isinstance(value, dict):
        return {readable(key): readable(item) for key, item in value.items()}
    return value


def line_of(error: Exception) -> str:
    """What an error says, as one line of at most 200 characters."""
    return " ".join(str(error).split())[:200]

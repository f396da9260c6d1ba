"""Policies behind an OpenAI-compatible server: messages in, a message out, by the official client.

They leave no tokens, so nothing can be trained on them; they evaluate, and they judge.
"""

from __future__ import annotations

import asyncio
import json
import math
import os
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple
from weakref import WeakKeyDictionary

from pydantic import BaseModel, Field, ValidationError

from agentrl.chat.parsing import BAD_ARGUMENTS, Refused, decode
from agentrl.errors import AnswerFailed, ConfigError, EngineAway, boundary
from agentrl.policies.base import Usage, turn_seed
from agentrl.trajectory import Trajectory
from agentrl.types import BadCall, EndReason, Json, Limits, Message, Task, ToolCall, ToolSpec

if TYPE_CHECKING:
    from openai import AsyncOpenAI, BadRequestError

OPENAI_URL = "https://api.openai.com/v1"
NO_KEY = "no-key"
"""What is sent as the key where the environment has none: local servers want some text."""

_NAME = re.compile(r"[^A-Za-z0-9_-]")
_TOO_LONG = re.compile(
    r"context.{0,20}(length|window|size)|prompt is too long|too many tokens", re.IGNORECASE
)
_FILTER = re.compile(r"content.?(filter|policy|management)|responsible.?ai", re.IGNORECASE)
_FINISHED = ("stop", "tool_calls", "function_call", "length")
_FILTERED = ("content_filter", "refusal", "safety")
_NO_ROOM = (408, 409, 429, 502, 503, 504)
_SURROGATE = re.compile("[\ud800-\udfff]")
_SEEDS = 1 << 31
_MOST_TOKENS = 1 << 40


class Prices(NamedTuple):
    """US dollars per million tokens."""

    prompt: float
    completion: float


@dataclass(eq=False)
class ServedPolicy:
    """Acts by asking a server for chat completions.

    Attributes:
        model: as the server names it.
        base_url: of the API, up to and with `/v1`.
        api_key: default: the environment's OPENAI_API_KEY, else a placeholder, as local servers
            want none.
        temperature: None leaves it to the server.
        prices: None: not known, and the cost of an episode is None as well.
        timeout_s: how long a server may be silent. A turn, all its tries included, takes at most
            `retries + 1` times that. Keep it well below the environment's `wall_s`: an episode that
            meets `wall_s` is graded, and waiting for a server is not the agent's fault.
        retries: further tries after a broken connection, silence, or an answer 408, 409, 429 or 5xx
            (by the client).
        name: what records call it; made of model and address.

    Raises:
        ConfigError: the client is not installed, or a value is wrong.
    """

    model: str
    base_url: str = OPENAI_URL
    api_key: str = field(default="", repr=False)
    temperature: float | None = None
    prices: Prices | None = None
    timeout_s: float = 60.0
    retries: int = 2
    name: str = field(default="", init=False)

    def __post_init__(self) -> None:
        self.name = f"openai:{self.model}@{self.base_url}"
        if not self.model:
            raise ConfigError("model='' of a served policy is empty: name a model of the server")
        if not re.match(r"https?://[^/]", self.base_url):
            raise ConfigError(
                f"base_url={self.base_url!r} is no address: write it as http://localhost:8000/v1"
            )
        if not 0 < self.timeout_s < math.inf or self.retries < 0:
            raise ConfigError(
                f"timeout_s={self.timeout_s} must be positive and finite, retries={self.retries}"
                " not < 0"
            )
        if self.prices is not None and not all(0 <= price < math.inf for price in self.prices):
            raise ConfigError(
                f"prices={tuple(self.prices)} must be dollars per million tokens, none below zero"
            )
        self.api_key = self.api_key or os.environ.get("OPENAI_API_KEY", "")
        if not self.api_key and self.base_url.rstrip("/") == OPENAI_URL:
            raise ConfigError(
                f"{self.name} needs a key: set OPENAI_API_KEY, or give the address of a local"
                " server"
            )
        _client_class()
        self._clients: WeakKeyDictionary[asyncio.AbstractEventLoop, AsyncOpenAI] = (
            WeakKeyDictionary()
        )

    @contextmanager
    def player(self, task: Task, limits: Limits, seed: int) -> Iterator[_ServedPlayer]:
        """A player for one episode. Equal seeds give equal answers if the server honours seeds."""
        yield _ServedPlayer(self, limits, seed)

    async def close(self) -> None:
        """Close the connections that were opened on this event loop; safe to call twice."""
        client = self._clients.pop(asyncio.get_running_loop(), None)
        if client is not None:
            await client.close()

    async def complete(self, request: dict[str, Json]) -> _Reply | EndReason:
        """Ask for one completion, or learn why the server gives none.

        The reason is CONTEXT_LENGTH if the conversation exceeds what the model takes, and
        CONTENT_FILTER if a filter refuses it.

        Raises:
            EngineAway: the server cannot be reached, or has no room.
            AnswerFailed: it gave no answer in time, one that says it failed, or one that is no
                chat completion.
            ConfigError: it refuses the key, or knows no such model or address.
        """
        import openai

        async with boundary(AnswerFailed, self.name):
            try:
                async with asyncio.timeout(self.timeout_s * (self.retries + 1)):
                    raw = await self._client().chat.completions.with_raw_response.create(
                        model=self.model, **request
                    )
                    text = raw.text
            except openai.BadRequestError as error:
                if (reason := _refusal(error)) is not None:
                    return reason
                raise
            except (
                openai.AuthenticationError,
                openai.PermissionDeniedError,
                openai.NotFoundError,
            ) as error:
                raise ConfigError(
                    f"{self.name}: the server says no ({error.status_code}): {_line(error)}"
                ) from error
            except openai.APIStatusError as error:
                if error.status_code in _NO_ROOM:
                    raise EngineAway(f"{self.name}: {_line(error)}") from error
                raise
            except openai.APITimeoutError:
                raise
            except openai.APIConnectionError as error:
                raise EngineAway(f"{self.name}: {_line(error)}") from error
        try:
            # Not by pydantic's own reader, which refuses half of a surrogate pair: a model may
            # well say one.
            return _Reply.model_validate(_readable(json.loads(text)))
        except (ValueError, RecursionError) as error:
            if not isinstance(error, ValidationError):
                raise AnswerFailed(
                    f"{self.name}: the answer is no JSON ({_line(error)}): {text[:200]!r}"
                ) from error
            why = (
                f"{'.'.join(map(str, error.errors()[0]['loc'])) or 'body'}:"
                f" {error.errors()[0]['msg']}"
            )
            raise AnswerFailed(
                f"{self.name}: the answer is no chat completion ({why}): {text[:200]!r}"
            ) from error

    def _client(self) -> AsyncOpenAI:
        """A client of the running loop: its connections are of no use to another."""
        loop = asyncio.get_running_loop()
        if loop not in self._clients:
            self._clients[loop] = _client_class()(
                base_url=self.base_url,
                api_key=self.api_key or NO_KEY,
                timeout=self.timeout_s,
                max_retries=self.retries,
            )
        return self._clients[loop]


class _ServedPlayer:
    """One episode: counts tokens as the server counts them, and holds the episode to its limits."""

    trajectories: tuple[Trajectory, ...] = ()

    def __init__(self, policy: ServedPolicy, limits: Limits, seed: int) -> None:
        self._policy = policy
        self._limits = limits
        self._seed = seed
        self._turn = 0
        self._sampled = 0
        self._prompt = 0

    @property
    def usage(self) -> Usage:
        """Tokens sent and received so far. Every turn counts its whole prompt, earlier turns
        included, because servers bill it.
        """
        prices = self._policy.prices
        usd = (
            None
            if prices is None
            else (self._prompt * prices.prompt + self._sampled * prices.completion) / 1e6
        )
        return Usage(self._sampled, self._prompt, usd)

    async def act(
        self, history: Sequence[Message], tools: Sequence[ToolSpec]
    ) -> tuple[Message, EndReason | None]:
        """Ask for one turn. One that the server cut short, or that is longer than the limit, ends
        the episode with MAX_TOKENS.
        """
        left = self._limits.episode_tokens - self._sampled
        if left < 1:
            return Message.assistant(""), EndReason.MAX_TOKENS
        budget = min(self._limits.turn_tokens, left)
        reply = await self._policy.complete(self._request(history, tools, budget))
        if isinstance(reply, EndReason):
            return Message.assistant(""), reply
        self._turn += 1
        self._sampled += reply.usage.completion_tokens
        self._prompt += reply.usage.prompt_tokens
        choice = reply.choices[0]
        if choice.finish_reason in _FILTERED:
            return choice.message.read(), EndReason.CONTENT_FILTER
        if choice.finish_reason not in _FINISHED:
            raise AnswerFailed(
                f"{self._policy.name}: the server ended a turn by {choice.finish_reason!r}"
            )
        cut = choice.finish_reason == "length" or reply.usage.completion_tokens > budget
        return choice.message.read(), EndReason.MAX_TOKENS if cut else None

    def _request(
        self, history: Sequence[Message], tools: Sequence[ToolSpec], budget: int
    ) -> dict[str, Json]:
        request: dict[str, Json] = {
            "messages": _readable(request_messages(history)),
            "max_completion_tokens": budget,
            "seed": turn_seed(self._seed, self._turn) % _SEEDS,
        }
        if tools:
            request["tools"] = [spec.schema() for spec in tools]
        if self._policy.temperature is not None:
            request["temperature"] = self._policy.temperature
        return request


# What travels.


def request_messages(messages: Sequence[Message]) -> list[dict[str, Json]]:
    """Messages as a server takes them: every call has an id and a name it accepts, every result the
    id of its call.

    A call that could not be read goes back as one of `unreadable_call` with its text.
    """
    rows: list[dict[str, Json]] = []
    open_ids: list[str] = []
    for message in messages:
        row: dict[str, Json] = {"role": message.role, "content": message.content}
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
        "arguments": json.dumps(_readable(dict(call.arguments))),
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
    tool_calls: list[_Call] | None = None

    def read(self) -> Message:
        """The assistant's message; a refusal is what it said."""
        calls = tuple(call.read() for call in self.tool_calls or ())
        return Message(
            "assistant",
            self.content or self.refusal or "",
            calls,
            reasoning=(self.reasoning_content or "").strip(),
        )


class _Choice(BaseModel):
    message: _Said
    finish_reason: str


class _Counted(BaseModel):
    prompt_tokens: int = Field(ge=0, lt=_MOST_TOKENS)
    completion_tokens: int = Field(ge=0, lt=_MOST_TOKENS)


class _Reply(BaseModel):
    """What of a chat completion is read. Without `usage` no limit of tokens could be held, so it
    must be there.
    """

    choices: Annotated[list[_Choice], Field(min_length=1)]
    usage: _Counted


def _client_class() -> Any:
    try:
        from openai import AsyncOpenAI
    except ImportError as error:
        raise ConfigError(
            "served models need the package openai: pip install 'agentrl[judge]'"
        ) from error
    return AsyncOpenAI


def _refusal(error: BadRequestError) -> EndReason | None:
    """Why a server refuses this conversation; None where the request itself is wrong."""
    if error.code == "context_length_exceeded" or _TOO_LONG.search(error.message):
        return EndReason.CONTEXT_LENGTH
    if error.code == "content_filter" or _FILTER.search(error.message):
        return EndReason.CONTENT_FILTER
    return None


def _readable(value: Json) -> Json:
    """The same JSON with the replacement character for each surrogate, which UTF-8 has not."""
    if isinstance(value, str):
        return _SURROGATE.sub("\ufffd", value)
    if isinstance(value, list):
        return [_readable(item) for item in value]
    if isinstance(value, dict):
        return {_readable(key): _readable(item) for key, item in value.items()}
    return value


def _line(error: Exception) -> str:
    return " ".join(str(error).split())[:200]

"""Policies behind an OpenAI-compatible server: messages in, a message out, by the official client.

They evaluate, and they judge. Where the server tells token ids and log-probabilities, and is asked
to, their episodes are token-exact as well.
"""

from __future__ import annotations

import asyncio
import json
import math
import os
import re
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple
from urllib.parse import urlsplit
from weakref import WeakKeyDictionary

from agentrl.errors import AnswerFailed, ConfigError, EngineAborted
from agentrl.policies.base import Usage, turn_seed
from agentrl.policies.bounded import bounded_client
from agentrl.policies.options import ServedOptions
from agentrl.policies.pace import Pace, Spending
from agentrl.policies.replies import FILTERED, FINISHED, Reply, readable, request_messages
from agentrl.policies.tries import Trouble, backoff_s, trouble_of
from agentrl.trajectory import Segment, Trajectory
from agentrl.types import EndReason, Json, Limits, Message, Task, ToolSpec

if TYPE_CHECKING:
    from openai import AsyncOpenAI

OPENAI_URL = "https://api.openai.com/v1"
NO_KEY = "no-key"
"""What is sent as the key where the environment has none: local servers want some text."""
_SEEDS = 1 << 31
_CHARACTERS_PER_TOKEN = 4  # a common rule for English; only to hold a pace before it is known
_SHORTEST_S = 1.0  # what a shorter wait takes of the patience; a server could have it for good else
# As vLLM (the first two) and SGLang (all but the second) name them; each ignores the others' names.
_TELL_TOKENS: dict[str, Json] = dict.fromkeys(
    ("logprobs", "return_token_ids", "return_prompt_token_ids", "return_meta_info"), True
)


class Prices(NamedTuple):
    """US dollars per million tokens."""

    prompt: float
    completion: float


class _Line(NamedTuple):
    """What belongs to one event loop: its connections are of no use to another."""

    client: AsyncOpenAI
    pace: Pace


class Answer(NamedTuple):
    """A reply, and how long the server took for it, in seconds."""

    reply: Reply
    took_s: float


@dataclass(eq=False)
class ServedPolicy:
    """Acts by asking a server for chat completions.

    Attributes:
        model: as the server names it.
        base_url: of the API, up to and with `/v1`.
        api_key: default: the value of the environment variable `key_variable`, else a placeholder,
            since local servers want none.
        temperature: None leaves it to the server.
        prices: None: not known, and the cost of an episode is None as well.
        options: time-outs, tries, limits of the server and of spending, and further parameters of
            every request.
        name: what records call it; made of model and address.
        spending: tokens and US dollars of all replies so far; `spending.met` says when to stop.

    Raises:
        ConfigError: the client is not installed, or a value is wrong.
    """

    model: str
    base_url: str = OPENAI_URL
    api_key: str = field(default="", repr=False)
    temperature: float | None = None
    prices: Prices | None = None
    options: ServedOptions = field(default_factory=ServedOptions)
    key_variable: str = "OPENAI_API_KEY"
    name: str = field(default="", init=False)
    spending: Spending = field(init=False, repr=False)

    def __post_init__(self) -> None:
        self.name = f"openai:{self.model}@{self.base_url}"
        if not self.model:
            raise ConfigError("model='' of a served policy is empty: name a model of the server")
        if not re.match(r"https?://[^/]", self.base_url):
            raise ConfigError(
                f"base_url={self.base_url!r} is no address: write it as http://localhost:8000/v1"
            )
        if "@" in urlsplit(self.base_url).netloc:
            raise ConfigError(
                "base_url of a served policy holds a name or password, which records would show:"
                " leave it out, and give the key as OPENAI_API_KEY"
            )
        if self.prices is not None and not all(0 <= price < math.inf for price in self.prices):
            raise ConfigError(
                f"prices={tuple(self.prices)} must be dollars per million tokens, none below zero"
            )
        if self.options.budget_usd and self.prices is None:
            raise ConfigError(
                f"budget_usd={self.options.budget_usd:g} of a served policy needs prices: say them,"
                " as in --price 0.15,0.60"
            )
        self.api_key = self.api_key or os.environ.get(self.key_variable, "")
        if not self.api_key and self.base_url.rstrip("/") == OPENAI_URL:
            raise ConfigError(
                f"{self.name} needs a key: set {self.key_variable}, or give the address of a local"
                " server"
            )
        _client_class()
        self.spending = Spending(self.options.budget_tokens, self.options.budget_usd)
        self._lines: WeakKeyDictionary[asyncio.AbstractEventLoop, _Line] = WeakKeyDictionary()

    @contextmanager
    def player(self, task: Task, limits: Limits, seed: int) -> Iterator[_ServedPlayer]:
        """A player for one episode. Equal seeds give equal answers if the server honours seeds."""
        yield _ServedPlayer(self, limits, seed)

    async def close(self) -> None:
        """Close the connections that were opened on this event loop; safe to call twice."""
        line = self._lines.pop(asyncio.get_running_loop(), None)
        if line is not None:
            await line.client.close()

    async def complete(self, request: dict[str, Json], begins: bool = False) -> Answer | EndReason:
        """Ask for one completion, as often as it takes, or learn why the server gives none.

        One that begins an episode is not asked for once the budget is spent.

        The reason is CONTEXT_LENGTH if the conversation exceeds what the model takes, and
        CONTENT_FILTER if a filter refuses it.

        Raises:
            EngineAborted: the budget is spent.
            EngineAway: the server cannot be reached, or has no room.
            AnswerFailed: it gave no answer in time, one that says it failed, half of one, or one
                that is no chat completion.
            ConfigError: it refuses the key, or knows no such model or address.
        """
        tries, patience_s = 0, self.options.patience_s
        while True:
            found = await self._try(request, begins)
            if not isinstance(found, Trouble):
                return found
            if found.asked_s is not None and max(found.asked_s, _SHORTEST_S) <= patience_s:
                patience_s -= max(found.asked_s, _SHORTEST_S)
                self._line().pace.hold(found.asked_s)
                continue
            tries += 1
            if found.asked_s is not None or not found.again or tries > self.options.retries:
                raise found.error from found.cause
            await asyncio.sleep(backoff_s(tries))

    async def _try(self, request: dict[str, Json], begins: bool) -> Answer | EndReason | Trouble:
        text = json.dumps(request["messages"])
        expected = len(text) // _CHARACTERS_PER_TOKEN + int(request["max_completion_tokens"])
        client, pace = self._line()
        async with pace.place(expected) as entry:
            if begins and self.spending.met:  # now, since it may have waited long for its place
                raise EngineAborted(f"{self.name}: {self.spending.met}")
            begun = time.monotonic()
            try:
                async with asyncio.timeout(self.options.timeout_s):
                    raw = await client.chat.completions.with_raw_response.create(
                        model=self.model,
                        messages=request["messages"],
                        extra_body={key: request[key] for key in request.keys() - {"messages"}},
                    )
                    reply = Reply.read(raw.text, self.name)
                    reply.check_count(int(request["max_completion_tokens"]), self.name)
            except Exception as error:
                trouble = trouble_of(error, self.name, self.options.timeout_s)
                if trouble is None:
                    raise
                return trouble
            entry.amount = reply.usage.prompt_tokens + reply.usage.completion_tokens
            return Answer(reply, time.monotonic() - begun)

    def usage(self, sampled: int, prompt: int) -> Usage:
        """So many tokens at this policy's prices."""
        prices = self.prices
        usd = (
            None if prices is None else (prompt * prices.prompt + sampled * prices.completion) / 1e6
        )
        return Usage(sampled, prompt, usd)

    def _line(self) -> _Line:
        loop = asyncio.get_running_loop()
        if loop not in self._lines:
            # Its own tries would count in no pace, and it waits a minute at most where told to.
            client = _client_class()(
                base_url=self.base_url,
                api_key=self.api_key or NO_KEY,
                timeout=self.options.timeout_s,
                max_retries=0,
                http_client=bounded_client(self.name),
            )
            self._lines[loop] = _Line(client, Pace(self.options))
        return self._lines[loop]


class _ServedPlayer:
    """One episode: counts tokens as the server counts them, and holds the episode to its limits.

    Attributes:
        thinking_s: how long the server took for the last turn; what was waited for is not in it.
    """

    def __init__(self, policy: ServedPolicy, limits: Limits, seed: int) -> None:
        self._policy = policy
        self._limits = limits
        self._seed = seed
        self._turn = 0
        self._sampled = 0
        self._prompt = 0
        self._branches: list[Trajectory] = []
        self.thinking_s = 0.0

    @property
    def trajectories(self) -> tuple[Trajectory, ...]:
        """The branches so far; empty where the server is not asked for tokens."""
        return tuple(self._branches)

    @property
    def usage(self) -> Usage:
        """Tokens sent and received so far. Every turn counts its whole prompt, earlier turns
        included, because servers bill it.
        """
        return self._policy.usage(self._sampled, self._prompt)

    async def act(
        self, history: Sequence[Message], tools: Sequence[ToolSpec]
    ) -> tuple[Message, EndReason | None]:
        """Ask for one turn. One that the server cut short, or that is longer than the limit, ends
        the episode with MAX_TOKENS; one that the model or a filter refuses, with the name of that.
        """
        policy, self.thinking_s = self._policy, 0.0
        left = self._limits.episode_tokens - self._sampled
        if left < 1:
            return Message.assistant(""), EndReason.MAX_TOKENS
        budget = min(self._limits.turn_tokens, left)
        # A witness (agentrl.rollout.blame) asks for one token, and no budget may silence it: what
        # it says decides whether a failure was the agent's.
        begins = self._turn == 0 and self._limits.turn_tokens > 1
        found = await policy.complete(self._request(history, tools, budget), begins)
        if isinstance(found, EndReason):
            return Message.assistant(""), found
        reply, self.thinking_s = found
        self._count(reply)
        if policy.options.tokens:
            self._keep(reply)
        return _ending(reply, budget, policy.name)

    def _count(self, reply: Reply) -> None:
        sampled, prompt = reply.usage.completion_tokens, reply.usage.prompt_tokens
        self._policy.spending.add(self._policy.usage(sampled, prompt))
        self._turn += 1
        self._sampled += sampled
        self._prompt += prompt

    def _keep(self, reply: Reply) -> None:
        """Keep the tokens of a turn; a prompt that does not begin with what was there is a new
        branch, since a server may write the history anew.

        Raises:
            ConfigError: the server tells none.
            AnswerFailed: it told them before, or they are none.
        """
        turn, name = reply.sampled(), self._policy.name
        if turn is None:
            if not reply.usage.completion_tokens:
                return
            kind = AnswerFailed if self._branches else ConfigError
            raise kind(
                f"{name}: tokens=true, and the server tells no token ids with log-probabilities:"
                " serve the model by `agentrl serve`, vLLM or SGLang, or leave tokens out"
            )
        try:
            said = Segment.sampled(turn.ids, turn.logprobs, 0, turn.finish)
            last = self._branches[-1].ids if self._branches else ()
            if last and turn.prompt_ids[: len(last)] == last:
                rest = turn.prompt_ids[len(last) :]
                between = (Segment.observation(rest),) if rest else ()
                self._branches[-1] = self._branches[-1].extend(*between, said)
            else:
                self._branches.append(Trajectory((Segment.prompt(turn.prompt_ids), said)))
        except ValueError as error:
            raise AnswerFailed(f"{name}: the tokens of an answer are none: {error}") from error

    def _request(
        self, history: Sequence[Message], tools: Sequence[ToolSpec], budget: int
    ) -> dict[str, Json]:
        policy = self._policy
        messages = request_messages(history, reasoning=policy.options.send_reasoning)
        request: dict[str, Json] = {
            **policy.options.sampling,
            "messages": readable(messages),
            "max_completion_tokens": budget,
            "seed": turn_seed(self._seed, self._turn) % _SEEDS,
        }
        if tools:
            request["tools"] = [spec.schema() for spec in tools]
        if policy.temperature is not None:
            request["temperature"] = policy.temperature
        return request | (_TELL_TOKENS if policy.options.tokens else {})


def _ending(reply: Reply, budget: int, name: str) -> tuple[Message, EndReason | None]:
    """What was said, and how that ends the episode, if it does.

    Raises:
        AnswerFailed: the server ended the turn in a way that has no meaning here.
    """
    choice = reply.choices[0]
    message = choice.message.read()
    if choice.finish_reason in FILTERED:
        return message, EndReason.CONTENT_FILTER
    if choice.finish_reason not in FINISHED:
        raise AnswerFailed(f"{name}: the server ended a turn by {choice.finish_reason!r}")
    if choice.message.refusal and not message.tool_calls:
        return message, EndReason.REFUSED
    cut = choice.finish_reason == "length" or reply.usage.completion_tokens > budget
    return message, EndReason.MAX_TOKENS if cut else None


def _client_class() -> Any:
    try:
        from openai import AsyncOpenAI
    except ImportError as error:
        raise ConfigError(
            "served models need the package openai: pip install 'agentrl[judge]'"
        ) from error
    return AsyncOpenAI

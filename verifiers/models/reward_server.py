"""The versions of a reward model over HTTP.

    POST /score   {"conversations": [[{"role": …, "content": …}, …], …], "version": 3}
                  -> {"version": 3, "digest": …, "conversations": [{"raw": […], "beyond": false}]}
    GET  /status  -> what is served, and how far its scores have moved from those of its pairs

A conversation that is too long has "why" and no numbers; one that cannot be scored has "error".
Without "version", the served one answers. A client that asks for one gets it or an error: for a
version that was withdrawn 410, for one that never was 404.
"""

from __future__ import annotations

import asyncio
import json
import math
import secrets
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, get_args

from agentrl.aio import run_in_thread
from agentrl.errors import AgentRLError, VerifierError, boundary
from agentrl.records.rows import message_of
from agentrl.types import BadCall, Message, Role
from agentrl.verifiers.models.drift import Drift
from agentrl.verifiers.models.heads import Heads
from agentrl.verifiers.models.reward_model import RewardModel
from agentrl.verifiers.models.reward_store import RewardStore, Version

if TYPE_CHECKING:
    from starlette.applications import Starlette
    from starlette.requests import Request
    from starlette.responses import Response

MOST_BYTES = 8 << 20
MOST_CONVERSATIONS = 256
"""Of one request."""
KEPT = 3
"""Models in memory; one more while it is loaded."""
LARGE_PSI = 0.25
"""From which on the terminal is told, once per version, when the window is full."""
AGAIN_S = 60.0
"""After which a version that could not be loaded is tried again."""
WAIT_S = 30.0
"""For which a question about the state waits for a new version that is being loaded."""


class RequestRefused(Exception):
    """A request that gets no scores; the status is that of HTTP."""

    def __init__(self, status: int, why: str) -> None:
        super().__init__(why)
        self.status = status


class Loaded:
    """A version in memory, with the drift of what it scored."""

    def __init__(self, version: Version, model: RewardModel, window: int) -> None:
        self.version, self.model, self.window = version, model, window
        self.drift = Drift(version.scores, window)
        self.scored = self.too_long = 0
        self._told, self._looked = False, 0

    def row(self, said: Heads | BaseException) -> dict[str, Any]:
        """What is answered for a conversation."""
        if isinstance(said, BaseException):
            return {"error": str(said)[:500]}
        if not said.raw:
            self.too_long += 1
            return {"raw": [], "why": said.why, "beyond": False}
        score = self.model.together(said.raw)
        if not math.isfinite(score):
            return {"error": f"version {self.version.number} gave a number that is not finite"}
        self.scored += 1
        self.drift.add([score])
        return {"raw": list(said.raw), "why": "", "beyond": self.drift.is_beyond(score)}

    def large_drift(self) -> str:
        """A sentence where drift is large for the first time; looked at when the window is full."""
        if self._told or self.scored < self._looked + self.window:
            return ""
        self._looked = self.scored
        self._told = (self.drift.psi or 0.0) >= LARGE_PSI
        return (
            f"version {self.version.number}: PSI {self.drift.psi:.2f} over its last {self.window}"
            f" scores, {self.drift.beyond:.0%} of them beyond those of all its pairs"
            if self._told
            else ""
        )

    def status(self) -> dict[str, Any]:
        """Counts, and the drift of the last scores."""
        return {
            "scored": self.scored,
            "too_long": self.too_long,
            "window": len(self.drift),
            "psi": self.drift.psi,
            "beyond": self.drift.beyond,
        }


class RewardServer:
    """Scores conversations by the versions of a store, which is looked at with every request.

    A new version is loaded while the one before it answers, and answers from then on.

    Args:
        store: in which somebody publishes and withdraws.
        window: last scores whose drift is measured.
        tell: is given a sentence where drift becomes large, or another version is served.
    """

    def __init__(
        self, store: RewardStore, window: int = 1000, tell: Callable[[str], None] = lambda _: None
    ) -> None:
        self._store, self._window, self._tell = store, window, tell
        self._loaded: dict[int, Loaded] = {}
        self._loading: dict[int, asyncio.Task[Loaded]] = {}
        self._failed: dict[int, tuple[float, AgentRLError]] = {}
        self._one_at_a_time = asyncio.Lock()
        self._serving = 0

    def open(self) -> int:
        """Load the version that is served, before anybody asks; returns its number.

        Raises:
            ConfigError: there is none, or it is not what was published.
        """
        self._serving = self._store.served().number
        self._loaded[self._serving] = self._load(self._serving)
        return self._serving

    async def score(self, body: Any) -> dict[str, Any]:
        """The answer to a request.

        Raises:
            RequestRefused: the request is none, or asks for a version that is not served.
            AgentRLError: the version cannot be loaded.
        """
        conversations, wanted = _read(body)
        one = await self._ready(self._number(wanted))
        said = await asyncio.gather(*(_heads(one.model, c) for c in conversations))
        if any(isinstance(heads, BaseException) for heads in said):  # one fails its whole batch
            said = [
                await _heads(one.model, c) if isinstance(heads, BaseException) else heads
                for c, heads in zip(conversations, said, strict=True)
            ]
        rows = [one.row(heads) for heads in said]
        if sentence := one.large_drift():
            self._tell(sentence)
        version = one.version
        return {"version": version.number, "digest": version.digest, "conversations": rows}

    async def status(self) -> dict[str, Any]:
        """What is served, all versions, and the drift of those in memory."""
        numbers = self._store.numbers()
        if numbers and self._served(numbers) != numbers[-1]:
            await asyncio.wait([self._begin(numbers[-1])], timeout=WAIT_S)
        served = self._served(numbers) if numbers else None
        rows = []
        for version in self._store.versions():
            one = self._loaded.get(version.number)
            row = {"version": version.number, "digest": version.digest}
            why = self._store.withdrawn(version.number)
            rows.append(row | {"withdrawn": why} | (one.status() if one else {}))
        return {"served": served, "versions": rows}

    def _number(self, wanted: int | None) -> int:
        numbers = self._store.numbers()
        if not numbers:
            raise RequestRefused(404, "no version is left")
        served = self._served(numbers)
        number = wanted or served
        if number in numbers:
            return number
        if (why := self._store.withdrawn(number)) is not None:
            raise RequestRefused(
                410, f"version {number} was withdrawn ({why}); version {served} is served now"
            )
        raise RequestRefused(404, f"there is no version {number}")

    def _served(self, numbers: Sequence[int]) -> int:
        """The newest version, or the one before it until that is loaded."""
        newest = numbers[-1]
        if newest != self._serving:
            if newest not in self._loaded and self._serving in numbers:
                self._begin(newest)
                return self._serving
            self._serving = newest
            self._tell(f"version {newest} is served now")
        return self._serving

    async def _ready(self, number: int) -> Loaded:
        """A version in memory; the one that was asked longest ago makes room for it."""
        one = self._loaded.pop(number, None)
        if one is None:
            one = await asyncio.shield(self._begin(number))
        self._loaded[number] = one
        self._make_room()
        return one

    def _begin(self, number: int) -> asyncio.Task[Loaded]:
        """The task that loads a version, started where there is none."""
        if number not in self._loading:
            task = self._loading[number] = asyncio.create_task(self._bring(number))
            task.add_done_callback(lambda done: self._loading.pop(number, None))
            task.add_done_callback(lambda done: done.cancelled() or done.exception())
        return self._loading[number]

    async def _bring(self, number: int) -> Loaded:
        since, error = self._failed.get(number, (-math.inf, None))
        if error is not None and time.monotonic() - since < AGAIN_S:
            raise error
        try:
            async with self._one_at_a_time, boundary(VerifierError, f"loading version {number}"):
                one = await run_in_thread(lambda: self._load(number))
        except AgentRLError as failed:
            self._failed[number] = (time.monotonic(), failed)
            self._tell(str(failed))
            raise
        self._loaded[number] = one
        self._make_room()
        return one

    def _make_room(self) -> None:
        """Drop what was asked longest ago; never the served version."""
        others = [old for old in self._loaded if old != self._serving]
        for old in others[: max(0, len(self._loaded) - KEPT)]:
            del self._loaded[old]

    def _load(self, number: int) -> Loaded:
        return Loaded(self._store.version(number), self._store.load(number), self._window)


async def _heads(model: RewardModel, messages: tuple[Message, ...]) -> Heads | BaseException:
    """What the heads say of one conversation, or why they say nothing: the others have their
    scores.
    """
    try:
        async with boundary(VerifierError, "the reward model cannot read it"):
            return await model.heads(messages)
    except AgentRLError as error:
        return error


def application(server: RewardServer, key: str = "") -> Starlette:
    """The routes of a server.

    Args:
        key: that requests must carry as `Authorization: Bearer KEY`; empty: none.
    """
    from starlette.applications import Starlette
    from starlette.responses import Response
    from starlette.routing import Route

    async def answer(request: Request, work: Any) -> Response:
        try:
            if key and not _knows(request, key):
                raise RequestRefused(401, "send the server's key as Authorization: Bearer KEY")
            status, row = 200, await work(request)
        except RequestRefused as refused:
            status, row = refused.status, {"error": str(refused)}
        except AgentRLError as error:
            status, row = 500, {"error": str(error)}
        # Plain ASCII: what was sent may hold what UTF-8 cannot say.
        return Response(json.dumps(row), status, media_type="application/json")

    async def score(request: Request) -> Response:
        async def work(request: Request) -> Any:
            return await server.score(await _body(request))

        return await answer(request, work)

    async def status(request: Request) -> Response:
        async def work(_: Request) -> Any:
            return await server.status()

        return await answer(request, work)

    return Starlette(routes=[Route("/score", score, methods=["POST"]), Route("/status", status)])


def _knows(request: Request, key: str) -> bool:
    said = request.headers.get("authorization", "")
    return secrets.compare_digest(said.encode(), f"Bearer {key}".encode())


async def _body(request: Request) -> Any:
    content = bytearray()
    async for chunk in request.stream():
        content += chunk
        if len(content) > MOST_BYTES:
            raise RequestRefused(413, f"a request may have {MOST_BYTES} bytes")
    try:
        return json.loads(bytes(content))
    except (ValueError, RecursionError) as error:
        raise RequestRefused(400, f"the request is no JSON ({error})") from error


def _read(body: Any) -> tuple[list[tuple[Message, ...]], int | None]:
    """Conversations and the version of a request.

    Raises:
        RequestRefused: it is none.
    """
    rows = body.get("conversations") if isinstance(body, dict) else None
    if not isinstance(rows, list) or not 0 < len(rows) <= MOST_CONVERSATIONS:
        raise RequestRefused(400, f"conversations must be a list of 1 to {MOST_CONVERSATIONS}")
    wanted = body.get("version")
    if wanted is not None and (type(wanted) is not int or not 1 <= wanted < 10**9):
        raise RequestRefused(400, "version must be a number from 1, or left out")
    try:
        found = [tuple(map(_message, messages)) for messages in rows]
        if not all(found):
            raise ValueError("one is empty")
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        why = str(error)[:200]
        raise RequestRefused(
            400, f"a conversation must be a list of messages with role and content ({why})"
        ) from error
    return found, wanted


def _message(row: Any) -> Message:
    message = message_of(row)
    if message.role not in get_args(Role):
        raise ValueError(f"role={message.role!r} must be one of {', '.join(get_args(Role))}")
    texts = [message.content, message.name, message.tool_call_id, message.reasoning]
    for call in message.tool_calls:
        texts += [call.text, call.why] if isinstance(call, BadCall) else [call.name, call.id]
        if not isinstance(call, BadCall) and not isinstance(call.arguments, dict):
            raise ValueError("the arguments of a call must be an object")
    if not all(isinstance(text, str) for text in texts):
        raise ValueError("content, reasoning and names must be texts")
    return message

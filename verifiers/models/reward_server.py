"""The versions of a reward model over HTTP.

    POST /score   {"conversations": [[{"role": …, "content": …}, …], …], "version": 3}
                  -> {"version": 3, "conversations": [{"raw": […], "why": ""}, …], "psi": …, …}
    GET  /status  -> what is served, and how far its scores have moved from those of its pairs

Without "version", the served one answers, and says which it is. A client that asks for one gets it
or an error: for a version that was withdrawn 410, for one that never was 404.
"""

from __future__ import annotations

import asyncio
import json
import math
import secrets
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, get_args

from agentrl.aio import run_in_thread
from agentrl.errors import AgentRLError, VerifierError, boundary
from agentrl.records.rows import message_of
from agentrl.types import Message, Role
from agentrl.verifiers.models.drift import Drift
from agentrl.verifiers.models.heads import Heads
from agentrl.verifiers.models.reward_model import RewardModel
from agentrl.verifiers.models.reward_store import RewardStore

if TYPE_CHECKING:
    from starlette.applications import Starlette
    from starlette.requests import Request
    from starlette.responses import Response

MOST_BYTES = 8 << 20
MOST_CONVERSATIONS = 256
"""Of one request."""
KEPT = 2
"""Models in memory: the served one, and the one that was served before it."""
LARGE_PSI, LARGE_BEYOND = 0.25, 0.05
"""From which on the terminal is told, once per version."""


class RequestRefused(Exception):
    """A request that gets no scores; the status is that of HTTP."""

    def __init__(self, status: int, why: str) -> None:
        super().__init__(why)
        self.status = status


class Loaded:
    """A version in memory, with the drift of what it scored."""

    def __init__(self, number: int, model: RewardModel, drift: Drift) -> None:
        self.number, self.model, self.drift = number, model, drift
        self.scored = self.too_long = 0
        self._told: set[str] = set()

    def note(self, said: Sequence[Heads]) -> list[str]:
        """Look at scores that were given; a sentence on what is large for the first time."""
        scores = [self.model.together(one.raw) for one in said if one.raw]
        self.scored += len(scores)
        self.too_long += len(said) - len(scores)
        self.drift.add(scores)
        psi, beyond = self.drift.psi or 0.0, self.drift.beyond or 0.0
        found = []
        if psi >= LARGE_PSI and "psi" not in self._told:
            self._told.add("psi")
            found.append(f"PSI {psi:.2f}: its scores have moved away from those of its pairs")
        if beyond >= LARGE_BEYOND and "beyond" not in self._told:
            self._told.add("beyond")
            found.append(f"{beyond:.0%} of its scores lie beyond those of all its pairs")
        return [f"version {self.number}: {sentence}" for sentence in found]

    def status(self) -> dict[str, Any]:
        """Counts, and the drift of the last scores."""
        return {
            "version": self.number,
            "scored": self.scored,
            "too_long": self.too_long,
            "psi": self.drift.psi,
            "beyond": self.drift.beyond,
        }


class RewardServer:
    """Scores conversations by the versions of a store, which is looked at with every request.

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
        self._loading = asyncio.Lock()

    def open(self) -> int:
        """Load the version that is served, before anybody asks; returns its number.

        Raises:
            ConfigError: there is none, or it is not what was published.
        """
        number = self._store.served().number
        self._loaded[number] = self._load(number)
        return number

    async def score(self, body: Any) -> dict[str, Any]:
        """The answer to a request.

        Raises:
            RequestRefused: the request is none, or asks for a version that is not served.
            AgentRLError: the model failed.
        """
        conversations, wanted = _read(body)
        one = await self.loaded(self._number(wanted))
        async with boundary(VerifierError, f"version {one.number} cannot score"):
            said = await asyncio.gather(*map(one.model.heads, conversations))
        if not all(math.isfinite(raw) for heads in said for raw in heads.raw):
            raise VerifierError(f"version {one.number} gave a number that is not finite")
        for sentence in one.note(said):
            self._tell(sentence)
        rows = [{"raw": list(heads.raw), "why": heads.why} for heads in said]
        return {"conversations": rows, **one.status()}

    async def loaded(self, number: int) -> Loaded:
        """A version in memory; the one that was asked longest ago makes room for it.

        Raises:
            ConfigError: it is not what was published.
        """
        async with self._loading:
            one = self._loaded.pop(number, None)
            if one is None:
                one = await run_in_thread(lambda: self._load(number))
                self._tell(f"version {number} is loaded")
            self._loaded[number] = one
            for old in list(self._loaded)[:-KEPT]:
                del self._loaded[old]
        return one

    def status(self) -> dict[str, Any]:
        """What is served, and what is in memory."""
        numbers = self._store.numbers()
        return {
            "served": numbers[-1] if numbers else None,
            "loaded": [one.status() for one in self._loaded.values()],
        }

    def _load(self, number: int) -> Loaded:
        model = self._store.load(number)
        return Loaded(number, model, Drift(self._store.version(number).scores, self._window))

    def _number(self, wanted: int | None) -> int:
        numbers = self._store.numbers()
        number = wanted or (numbers[-1] if numbers else 0)
        if number in numbers:
            return number
        if (why := self._store.withdrawn(number)) is not None:
            served = f"version {numbers[-1]} is served now" if numbers else "none is served now"
            raise RequestRefused(410, f"version {number} was withdrawn ({why}); {served}")
        raise RequestRefused(404, f"there is no version {number}")


def application(server: RewardServer, key: str = "") -> Starlette:
    """The routes of a server.

    Args:
        key: that requests must carry as `Authorization: Bearer KEY`; empty: none.
    """
    from starlette.applications import Starlette
    from starlette.responses import JSONResponse
    from starlette.routing import Route

    async def answer(request: Request, work: Any) -> Response:
        try:
            if key and not _knows(request, key):
                raise RequestRefused(401, "send the server's key as Authorization: Bearer KEY")
            return JSONResponse(await work(request))
        except RequestRefused as refused:
            return JSONResponse({"error": str(refused)}, refused.status)
        except AgentRLError as error:
            return JSONResponse({"error": str(error)}, 500)

    async def score(request: Request) -> Response:
        async def work(request: Request) -> Any:
            return await server.score(await _body(request))

        return await answer(request, work)

    async def status(request: Request) -> Response:
        async def work(_: Request) -> Any:
            return server.status()

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
    if wanted is not None and (type(wanted) is not int or wanted < 1):
        raise RequestRefused(400, f"version={wanted!r} must be a number from 1, or left out")
    try:
        found = [tuple(map(_message, messages)) for messages in rows]
        if not all(found):
            raise ValueError("one is empty")
        return found, wanted
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise RequestRefused(
            400, f"a conversation must be a list of messages with role and content ({error})"
        ) from error


def _message(row: Any) -> Message:
    message = message_of(row)
    if message.role not in get_args(Role):
        raise ValueError(f"role={message.role!r} must be one of {', '.join(get_args(Role))}")
    if not isinstance(message.content, str):
        raise ValueError(f"content={message.content!r} must be a text")
    return message

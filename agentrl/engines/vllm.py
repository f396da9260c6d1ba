"""The `vllm` engine: continuous batches of many episodes, on weights of its own.

    loop thread: generate -> inbox ┐                        ┌ reply
                                   engine thread: admit, step, answer; between requests: load

One thread makes vLLM and steps it (`vllm_core.py`), as vLLM wants it. Everybody else leaves word in
`_Inbox` and wakes it.

A load waits for what runs and lets nothing else begin, so an answer is of one version from its
first token to its last. Keys and values of other versions cannot be read: the cache is emptied at a
load, and its entries are salted with the version besides.
"""

from __future__ import annotations

import asyncio
import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from typing import NamedTuple

from agentrl.aio import run_in_thread
from agentrl.engines.base import Generation, Sampling, Weights, refuse_request
from agentrl.engines.settings import EngineSettings
from agentrl.engines.vllm_core import Core, Sampled
from agentrl.errors import EngineAborted, EngineAway, EngineError

_COOLEST, _HOTTEST = 0.01, 2.0
"""Temperatures that vLLM samples at, beside 0."""


class _Request(NamedTuple):
    prompt_ids: tuple[int, ...]
    sampling: Sampling
    seed: int
    reply: asyncio.Future[Generation]
    loop: asyncio.AbstractEventLoop

    def settle(self, outcome: Generation | Exception) -> None:
        """Answer, on the loop that waits."""
        try:
            self.loop.call_soon_threadsafe(_settle, self.reply, outcome)
        except RuntimeError:  # the loop is closed, so nobody waits
            return


class _Load(NamedTuple):
    weights: Weights
    version: int
    done: Future[None]


@dataclass
class _Inbox:
    """What other threads want of the engine's; all of it is guarded by `changed`."""

    changed: threading.Condition = field(default_factory=threading.Condition)
    waiting: list[_Request] = field(default_factory=list)
    ready: list[_Request] = field(default_factory=list)
    loads: deque[_Load] = field(default_factory=deque)
    paused: bool = False
    resting: bool = False
    aborting: bool = False
    closed: bool = False
    dead: EngineError | None = None

    def tell(self, **changes: bool) -> None:
        """Change flags and wake the engine's thread."""
        with self.changed:
            for name, value in changes.items():
                setattr(self, name, value)
            self.changed.notify()

    def empty(self) -> list[_Request]:
        """Take out every request that has not begun."""
        taken = [*self.waiting, *self.ready]
        self.waiting, self.ready = [], []
        return taken


class VllmEngine:
    """Samples with vLLM.

    Args:
        folder: of the model; see `Core`.
        stop_ids: tokens that end a turn; the one that was sampled is part of the result.
        settings: memory and length.
        dtype: of weights and layers: "float32", "bfloat16" or "float16".
        synchronous: wait until every seated episode has sent its request, and begin them in an
            order that does not depend on arrival. Otherwise requests join the running batch.
        empty: begin with random weights; nothing may be asked before the first `load`.

    Raises:
        ConfigError: vLLM is not installed or cannot serve this model here.
    """

    def __init__(
        self,
        folder: Path,
        stop_ids: frozenset[int],
        settings: EngineSettings,
        *,
        dtype: str = "float32",
        synchronous: bool = False,
        empty: bool = False,
    ) -> None:
        self.version = 0
        self._synchronous = synchronous
        self._seats = 0
        self._inbox = _Inbox()
        self._running: dict[str, _Request] = {}
        self._apart: deque[_Request] = deque()
        self._names = map(str, count())
        started: Future[None] = Future()
        self._thread = threading.Thread(
            target=self._serve,
            args=(lambda: Core(folder, stop_ids, settings, dtype=dtype, empty=empty), started),
            name="agentrl-sampler",
            daemon=True,
        )
        self._thread.start()
        started.result()
        self.context_length = self._core.context_length

    @contextmanager
    def seat(self) -> Iterator[None]:
        """Announce an episode; a synchronous engine waits for requests of all that are seated."""
        self._seats += 1
        try:
            yield
        finally:
            self._seats -= 1
            self._release()

    async def generate(
        self, prompt_ids: Sequence[int], sampling: Sampling, *, seed: int
    ) -> Generation:
        """Sample one continuation.

        Raises:
            EngineError: the prompt is none for this model, or vLLM failed; the cause is in the
                message.
            EngineAway: vLLM has stopped for good.
        """
        refuse_request(prompt_ids, sampling, self._core.vocab_size, self.context_length)
        if sampling.temperature and not _COOLEST <= sampling.temperature <= _HOTTEST:
            raise EngineError(
                f"temperature={sampling.temperature} is none that vLLM samples at: use 0, or"
                f" {_COOLEST} to {_HOTTEST}"
            )
        loop = asyncio.get_running_loop()
        reply: asyncio.Future[Generation] = loop.create_future()
        with self._inbox.changed:
            if self._inbox.dead:
                raise self._inbox.dead
            request = _Request(tuple(prompt_ids), sampling, seed, reply, loop)
            self._inbox.waiting.append(request)
        loop.call_soon(self._release)  # requests made in this turn of the loop join the batch
        return await reply

    def load(self, weights: Weights, version: int) -> None:
        """Sample with these weights from now on; what runs is waited for, what waits gets them.

        Raises:
            EngineBroken: vLLM did not take all of them.
            EngineAway: vLLM has stopped for good.
        """
        done: Future[None] = Future()
        with self._inbox.changed:
            if self._inbox.dead:
                raise self._inbox.dead
            self._inbox.loads.append(_Load(weights, version, done))
            self._inbox.changed.notify()
        done.result()

    def pause(self) -> None:
        """Begin no further request until `resume`; those that run end, then vLLM may sleep."""
        self._inbox.tell(paused=True, resting=True)

    def resume(self) -> None:
        """Begin what has been waiting."""
        self._inbox.tell(paused=False, resting=False)

    def abort(self) -> None:
        """End every request that waits or runs with an `EngineAborted`."""
        self._inbox.tell(aborting=True)

    async def close(self) -> None:
        """End vLLM and its thread; safe to call twice."""
        self._inbox.tell(closed=True)
        await run_in_thread(self._thread.join)

    def metrics(self) -> dict[str, float]:
        """What vLLM says of itself since the last call."""
        return self._core.counts.read()

    def _release(self) -> None:
        """Hand over what waits, on the loop thread; a synchronous engine waits for all seats."""
        inbox = self._inbox
        with inbox.changed:
            inbox.waiting = [request for request in inbox.waiting if not request.reply.done()]
            if not inbox.waiting or (self._synchronous and len(inbox.waiting) < self._seats):
                return
            inbox.ready += sorted(inbox.waiting, key=_place)
            inbox.waiting = []
            inbox.changed.notify()

    def _serve(self, open_core: Callable[[], Core], started: Future[None]) -> None:
        """The engine's thread: make vLLM, work until closed or broken, end it."""
        try:
            self._core = open_core()
        except BaseException as error:  # noqa: BLE001 - raised again where the engine is made
            started.set_exception(error)
            return
        started.set_result(None)
        ending: EngineError = EngineAborted("the engine was closed")
        try:
            while self._turn():
                pass
        except Exception as error:  # noqa: BLE001 - told to everybody who waits or comes later
            ending = EngineAway(f"vLLM has stopped for good: {type(error).__name__}: {error}")
            ending.__cause__ = error
        with self._inbox.changed:
            self._inbox.dead = ending
            left, loads = self._inbox.empty(), list(self._inbox.loads)
        for request in (*left, *self._apart, *self._running.values()):
            request.settle(ending)
        for load in loads:
            load.done.set_exception(ending)
        self._core.close()

    def _has_work(self) -> bool:
        inbox = self._inbox
        begins = bool(inbox.ready or self._apart) and not inbox.paused
        told = inbox.closed or inbox.aborting or inbox.resting or bool(inbox.loads)
        return told or begins or bool(self._running)

    def _turn(self) -> bool:
        """Do what is due; False when the engine was closed."""
        inbox, load, begun, aborted = self._inbox, None, list[_Request](), list[_Request]()
        with inbox.changed:
            inbox.changed.wait_for(self._has_work)
            if inbox.closed:
                return False
            if inbox.aborting:
                aborted, inbox.aborting = inbox.empty(), False
                aborted += [*self._apart, *self._running.values()]
            elif inbox.loads and not self._running:
                load = inbox.loads.popleft()
            elif not inbox.loads and not inbox.paused:
                begun = self._next()
            rests = inbox.resting and not self._running
            inbox.resting = inbox.resting and not rests
        if aborted:
            self._abort(aborted)
        if load:
            self._load(load)
        if rests:
            self._core.rest()
        for request in begun:
            self._begin(request)
        if self._running:
            self._step()
        return True

    def _next(self) -> list[_Request]:
        """What begins now: after a failure one request at a time, else all that is ready."""
        if self._apart:
            return [] if self._running else [self._apart.popleft()]
        begun, self._inbox.ready = self._inbox.ready, []
        return begun

    def _load(self, load: _Load) -> None:
        """Replace the weights; where that fails, some are old and some new, and nothing goes on."""
        try:
            self._core.load(load.weights.tensors)
        except Exception as error:
            load.done.set_exception(error)
            raise
        self.version = load.version
        load.done.set_result(None)

    def _abort(self, aborted: list[_Request]) -> None:
        self._core.abort(self._running)
        self._running.clear()
        self._apart.clear()
        for request in aborted:
            request.settle(EngineAborted("the request was aborted"))

    def _begin(self, request: _Request) -> None:
        if request.reply.done():
            return
        self._core.wake()
        name = next(self._names)
        try:
            self._core.add(
                name, request.prompt_ids, request.sampling, request.seed, str(self.version)
            )
        except Exception as cause:  # noqa: BLE001 - handed to the request that waits for it
            request.settle(_failed(cause))
            return
        self._running[name] = request

    def _step(self) -> None:
        """One step; where it fails, each request alone: one is no other's fault."""
        gone = [name for name, request in self._running.items() if request.reply.done()]
        for name in gone:
            del self._running[name]
        self._core.abort(gone)
        try:
            finished = self._core.step()
        except Exception as cause:  # noqa: BLE001 - handed to the request that waits for it
            self._core.abort(self._running)
            requests = list(self._running.values())
            self._running.clear()
            if len(requests) == 1:
                requests[0].settle(_failed(cause))
            else:
                self._apart += requests
            return
        for sampled in finished:
            request = self._running.pop(sampled.name)
            request.settle(_generation(sampled, request.sampling, self.version))


def _generation(sampled: Sampled, sampling: Sampling, version: int) -> Generation:
    """The answer; the most likely token is certain at temperature 0."""
    logprobs = sampled.logprobs if sampling.temperature else (0.0,) * len(sampled.ids)
    return Generation(sampled.ids, logprobs, sampled.finish, version)


def _failed(cause: Exception) -> EngineError:
    error = EngineError(f"sampling failed: {type(cause).__name__}: {cause}")
    error.__cause__ = cause
    return error


def _place(request: _Request) -> tuple[int, int, tuple[int, ...]]:
    """An order that does not depend on arrival."""
    return len(request.prompt_ids), request.seed, request.prompt_ids


def _settle(reply: asyncio.Future[Generation], outcome: Generation | Exception) -> None:
    if reply.done():
        return
    if isinstance(outcome, Exception):
        reply.set_exception(outcome)
    else:
        reply.set_result(outcome)

"""An engine in a process of its own, which may die: it is noticed, said, and started again.

    loop thread: generate, seat -> one packet for each turn of the loop ┐      ┌ replies
                                            keeper's thread: start, load, listen; again

The process (`child.py`) carries any engine. Whatever ends it (a signal, lack of memory, a fault of
the engine) is met at the pipe's end at once; one that hangs is killed after `SILENT_S`. What was
under way is lost then and has failed as `EngineLost`; what comes later waits for the next process,
which reads the weights that were loaded last from shared memory.
"""

from __future__ import annotations

import asyncio
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from typing import Any

from agentrl.aio import run_in_thread
from agentrl.engines.base import Engine, Generation, Sampling, Weights
from agentrl.engines.own_process.carrier import SILENT_S, Carrier, Log, Packet, ProcessEnded
from agentrl.engines.own_process.handover import SharedWeights, TensorPlace
from agentrl.errors import EngineAborted, EngineAway, EngineError, EngineLost
from agentrl.records.plain import plain

BACK_OFF_S = (0.0, 1.0, 2.0, 4.0, 8.0)
"""Pauses before a process is started again; one that ends after the last is not."""
METRICS_S = 5.0
"""Seconds after which `metrics` does without what the process counts."""
STEADY_S = 600.0
"""A process that served so long was no failure to start: the pauses begin anew."""
_AGAIN = "run the same again (a training run with --resume)"


@dataclass
class _Call:
    """Something that the process is asked and that somebody waits for."""

    words: tuple[Any, ...]
    reply: Future[Any] = field(default_factory=Future)
    sent: bool = False

    def __post_init__(self) -> None:
        self.reply.set_running_or_notify_cancel()  # who stops waiting does not stop the reply

    @property
    def is_for_one_process(self) -> bool:
        """Whether it is lost with the process, as all but weights are."""
        return self.sent and self.words[0] != "load"

    def settle(self, outcome: Any) -> None:
        if isinstance(outcome, Exception):
            self.reply.set_exception(outcome)
        else:
            self.reply.set_result(outcome)


class ProcessEngine:
    """Samples with an engine that lives in a process of its own.

    Args:
        open_engine: builds the engine, over there; anything that can be pickled.
        label: what people call it.
        log: file that the process's output is appended to; None: one that ends with the engine.

    Attributes:
        restarts: how often a process was started again.
        gone: why there will be none any more; None as long as there may be one.

    Raises:
        AgentRLError: whatever building it raises there.
        EngineAway: the process ended while it started.
    """

    def __init__(
        self, open_engine: Callable[[], Engine], *, label: str = "engine", log: Path | None = None
    ) -> None:
        self.version = self.restarts = 0
        self.gone: EngineError | None = None
        self._open_engine, self._label, self._log = open_engine, label, Log(log)
        self._weights = SharedWeights()
        self._held: tuple[dict[str, TensorPlace], int] | None = None
        self._refusal: Exception | None = None
        self._lock, self._writing, self._loading = (threading.Lock() for _ in range(3))
        self._calls: dict[int, _Call] = {}
        self._numbers = count()
        self._turn: Packet = []
        self._seats = self._told_restarts = 0
        self._paused = False
        self._closing = threading.Event()
        self._carrier: Carrier | None = None
        self._serving: Carrier | None = None
        started: Future[int] = Future()
        self._keeper = threading.Thread(
            target=self._keep, args=(started,), name="agentrl-engine-keeper", daemon=True
        )
        self._keeper.start()
        try:
            self.context_length = started.result()
        except BaseException:
            self._stop()
            self._keeper.join()
            self._log.forget()
            raise

    @property
    def is_away(self) -> bool:
        """Whether there is no process now and there will be one: what is asked waits for it."""
        return self._serving is None and self.gone is None

    @contextmanager
    def seat(self) -> Iterator[None]:
        """Announce an episode; a synchronous engine waits for requests of all that are seated."""
        with self._lock:
            self._seats += 1
            self._say((None, "seat"))
        try:
            yield
        finally:
            with self._lock:
                self._seats -= 1
                self._say((None, "leave"))

    async def generate(
        self, prompt_ids: Sequence[int], sampling: Sampling, *, seed: int
    ) -> Generation:
        """Sample one continuation.

        Raises:
            EngineError: as the engine does.
            EngineLost: the process ended meanwhile.
            EngineAway: it ended too often.
        """
        with self._lock:
            number, call = self._call("generate", tuple(prompt_ids), sampling, seed)
            self._say((number, *call.words))
        try:
            found: Generation = await asyncio.wrap_future(call.reply)
        except asyncio.CancelledError:
            with self._lock:
                self._calls.pop(number, None)
                self._say((None, "drop", number))
            raise
        return found

    def load(self, weights: Weights, version: int) -> None:
        """Sample with these weights from now on, in every process that is started later too.

        Raises:
            EngineError: the engine did not take them. It samples with those before until its
                process ends; then those are lost, and no other is started.
            EngineAway: the process ended too often.
        """
        with self._loading:
            before = self._held
            try:
                with self._writing:
                    if self.gone:
                        raise self.gone
                    self._refusal = EngineError("they were written in part")
                    self._held = self._weights.write(weights.tensors()), version
                    self._refusal = None
                self._ask("load", *self._held).result()
            except Exception as error:
                self._refusal = error  # what lies in memory is not to be given to another process
                if before is None:  # a process begins with the weights of its model
                    self._held = None
                raise
            self.version = version

    def pause(self) -> None:
        """Begin no further generation until `resume`."""
        self._set_paused("pause")

    def resume(self) -> None:
        """Begin what has been waiting."""
        self._set_paused("resume")

    def abort(self) -> None:
        """End every request that waits or runs with an `EngineAborted`."""
        with self._lock:
            waiting = [n for n, call in self._calls.items() if not call.sent]
            for call in [self._calls.pop(n) for n in waiting if self._calls[n].words[0] != "load"]:
                call.settle(EngineAborted("the request was aborted"))
            if self._serving:
                self._serving.send([(None, "abort")])

    def metrics(self) -> dict[str, float]:
        """What the engine counts, where it does, and how often its process was started again."""
        counted: dict[str, float] = {}
        if self._serving:
            with suppress(TimeoutError, EngineAborted, EngineAway):  # it hangs, is busy, or ended
                counted = self._ask("metrics").result(METRICS_S)
        with self._lock:
            new, self._told_restarts = self.restarts - self._told_restarts, self.restarts
        return {**counted, "engine/restarts": float(new)}

    async def close(self) -> None:
        """End the process; safe to call twice."""
        self._stop()
        await run_in_thread(self._keeper.join)

    def _call(self, *words: Any) -> tuple[int, _Call]:
        """Note what is asked; the lock is held."""
        if self.gone:
            raise self.gone
        number, call = next(self._numbers), _Call(words)
        self._calls[number] = call
        return number, call

    def _ask(self, *words: Any) -> Future[Any]:
        """Ask from any thread, at once or of the next process."""
        with self._lock:
            number, call = self._call(*words)
            if self._serving:
                call.sent = True
                self._serving.send([(number, *words)])
            return call.reply

    def _set_paused(self, word: str) -> None:
        with self._lock:
            self._paused = word == "pause"
            if self._serving:
                self._serving.send([(None, word)])

    def _say(self, row: tuple[Any, ...]) -> None:
        """Say something with all else of this turn of the loop, as what begins together is sampled
        together; at once on a thread without a loop. The lock is held.
        """
        self._turn.append(row)
        try:
            asyncio.get_running_loop().call_soon(self._flush)
        except RuntimeError:
            self._send_turn()

    def _flush(self) -> None:
        with self._lock:
            self._send_turn()

    def _send_turn(self) -> None:
        turn, self._turn = self._turn, []
        if not (turn and self._serving):  # the next process is told what holds by then
            return
        due = [row for row in turn if row[0] is None or row[0] in self._calls]
        for number, *_ in due:
            if number is not None:
                self._calls[number].sent = True
        self._serving.send(due)

    def _keep(self, started: Future[int]) -> None:
        """The keeper's thread: it ends what waits, however it ends itself."""
        try:
            ending = self._follow(started)
        except Exception as error:  # noqa: BLE001 - told to all that ask
            why = f"its keeper failed: {type(error).__name__}: {error}"
            ending = EngineAway(f"engine {self._label!r}: {why}; {_AGAIN}")
        with self._lock:
            self.gone, left, self._calls = ending, self._calls, {}
        unmade = [] if started.done() else [started]
        for reply in (*unmade, *(call.reply for call in left.values())):
            reply.set_exception(ending)
        with self._writing:
            self._weights.close()
        self._log.close()

    def _follow(self, started: Future[int]) -> EngineError:
        """One process after the other, until closed or ended too often: why there is no other."""
        deaths = 0
        while True:
            served_s, why = self._carry(started)
            deaths = 1 if served_s >= STEADY_S else deaths + 1
            lost = self._lose(why)
            if self._closing.is_set():
                return EngineAborted("the engine was closed")
            with self._writing:  # weights that are being written may be whole soon
                refused = self._refusal if self._held else None
            if refused:
                return EngineAway(
                    f"engine {self._label!r}: the weights after version {self.version} were not"
                    f" taken ({refused}), and its own are lost since its process {why};"
                    f" {self._log.tail()}; mend that and {_AGAIN}"
                )
            if deaths > len(BACK_OFF_S):
                return EngineAway(
                    f"engine {self._label!r}: its process failed {deaths} times in a row, and the"
                    f" last one {why}; {self._log.tail()}; mend that and {_AGAIN}"
                )
            said = f"the process of engine {self._label!r} {why}: {lost} requests are lost, and it"
            said = plain(f"warning: {said} is started again ({deaths} of {len(BACK_OFF_S)})")
            with suppress(OSError, ValueError):  # nobody reads, or it is closed
                print(said, file=sys.stderr)
            self._closing.wait(BACK_OFF_S[deaths - 1])

    def _carry(self, started: Future[int]) -> tuple[float, str]:
        """One process from its start to its end: the seconds that it served, and how it ended."""
        try:
            carrier, context_length = self._start()
        except Exception as error:  # noqa: BLE001 - told where the engine is made, else to all
            return 0.0, self._end(error, started)
        served_from_s = time.monotonic()
        ending = self._serve(carrier, context_length, started)
        return time.monotonic() - served_from_s, self._end(ending, started)

    def _start(self) -> tuple[Carrier, int]:
        """A process that has built the engine, and its context length."""
        with self._lock:
            if self._closing.is_set():
                raise ProcessEnded("was not started")
            carrier = self._carrier = Carrier(self._label, self._weights.fd, self._log)
        return carrier, self._begin(carrier)

    def _serve(self, carrier: Carrier, context_length: int, started: Future[int]) -> Exception:
        """Pass on what is asked and answered, until something ends that: it."""
        try:
            self.restarts += started.done()
            self._link(carrier)
            if not started.done():
                started.set_result(context_length)
            while True:
                number, outcome = carrier.receive()
                with self._lock:
                    call = self._calls.pop(number, None)
                if call:
                    call.settle(outcome)
        except Exception as error:  # noqa: BLE001 - told to all
            return error

    def _end(self, error: Exception, started: Future[int]) -> str:
        """Let go of a process, and tell who makes the engine if there is none yet; how it ended."""
        is_end = isinstance(error, ProcessEnded)
        with self._lock:
            self._serving = None
        if self._carrier:
            self._carrier.close()
        if not started.done():
            self._closing.set()
            why = f"engine {self._label!r}: its process {error} while it started"
            started.set_exception(EngineAway(f"{why}; {self._log.tail()}") if is_end else error)
        return str(error) if is_end else f"failed: {error}"

    def _begin(self, carrier: Carrier) -> int:
        """Have a process build the engine and take the last weights; its context length."""

        def answer(*words: Any) -> Any:
            carrier.send([(next(self._numbers), *words)])
            return carrier.receive()[1]

        if isinstance(context_length := answer("open", self._open_engine), Exception):
            raise context_length
        with self._writing:  # nobody reads signs of life while it waits for that
            carrier.expect_life(SILENT_S)
            if self._held and not self._refusal:
                self._refusal = answer("load", *self._held)
            if self._held and self._refusal:
                raise ProcessEnded("had no weights to begin with")
        return int(context_length)

    def _link(self, carrier: Carrier) -> None:
        """Tell a process all that holds, and from now on what comes."""
        with self._lock:
            packet: Packet = [(None, "seat")] * self._seats
            packet += [(None, "pause")] if self._paused else []
            packet += [(number, *call.words) for number, call in self._calls.items()]
            for call in self._calls.values():
                call.sent = True
            self._turn.clear()
            self._serving = carrier
            carrier.send(packet)

    def _lose(self, why: str) -> int:
        """Fail what the process was asked, and say how many requests that were; weights and what
        it was not yet asked wait for the next.
        """
        with self._lock:
            lost = [number for number, call in self._calls.items() if call.is_for_one_process]
            calls = [self._calls.pop(number) for number in lost]
            for call in self._calls.values():
                call.sent = False
        said = f"the process of engine {self._label!r} {why} before it had answered"
        for call in calls:
            call.settle(EngineLost(said) if call.words[0] == "generate" else {})
        return sum(call.words[0] == "generate" for call in calls)

    def _stop(self) -> None:
        """End the process soon, whatever it does."""
        self._closing.set()
        with self._lock:
            if self._serving:
                self._serving.send([(None, "shut")])
                self._serving.expire()
                self._serving = None
            elif self._carrier:
                self._carrier.kill()

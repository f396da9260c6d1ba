"""The program that carries an engine in a process of its own: see `process.py`.

    python -m agentrl.engines.own_process.child LABEL PIPE WEIGHTS

PIPE and WEIGHTS are descriptors that it inherits. It ends when the other end of the pipe is closed,
and the kernel ends it with the thread that started it.
"""

from __future__ import annotations

import asyncio
import ctypes
import os
import pickle
import signal
import sys
import threading
import time
import traceback
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any, NoReturn

from agentrl import errors
from agentrl.aio import is_cancelled, run_in_thread
from agentrl.engines.base import Engine, Measured, Sampling
from agentrl.engines.own_process.carrier import BEAT_S
from agentrl.errors import AgentRLError, EngineAway, EngineError

_PR_SET_PDEATHSIG = 1
_ENGINE_GONE = 3


@dataclass
class _Handed:
    """Weights that came through shared memory."""

    found: Mapping[str, Any]
    module: Any = None

    def tensors(self) -> Mapping[str, Any]:
        return self.found


class _Child:
    """An engine, and the pipe through which it is asked."""

    def __init__(self, pipe: Connection[Any, Any], weights_fd: int) -> None:
        self._pipe, self._weights_fd = pipe, weights_fd
        self._sending = threading.Lock()
        self._seats: list[ExitStack] = []
        self._asked: dict[int, asyncio.Task[None]] = {}

    def open(self) -> bool:
        """Build the engine as the first packet says; whether it could be built."""
        threading.Thread(target=self._beat, daemon=True).start()
        ((number, _, opener),) = self._pipe.recv()
        try:
            self._engine: Engine = opener()
        except Exception as error:  # noqa: BLE001 - raised again where the engine was wanted
            traceback.print_exception(error)
            self._send(number, _sendable(error))
            return False
        self._send(number, self._engine.context_length)
        return True

    async def serve(self) -> None:
        """Do what is asked until told to close."""
        self._loop, self._closed = asyncio.get_running_loop(), asyncio.Event()
        threading.Thread(target=self._read, daemon=True).start()
        await self._closed.wait()
        await self._engine.close()

    def _read(self) -> None:
        while True:
            try:
                packet = self._pipe.recv()
            except (EOFError, OSError):  # nobody is left to work for
                os._exit(0)
            except Exception as error:  # noqa: BLE001 - whom it was for cannot be told
                _end(error)
            self._loop.call_soon_threadsafe(self._do, packet)

    def _beat(self) -> None:
        while True:
            self._send(None, None)
            time.sleep(BEAT_S)

    def _send(self, number: int | None, outcome: Any) -> None:
        """Answer a call, or give a sign of life; what cannot be sent fails alone."""
        try:
            said = pickle.dumps(outcome)
        except Exception as error:  # noqa: BLE001 - raised again where somebody waits
            why = f"the answer cannot be sent: {type(error).__name__}: {error}"
            said = pickle.dumps(EngineError(why))
        with self._sending:
            try:
                self._pipe.send_bytes(pickle.dumps(number) + said)
            except OSError:
                os._exit(0)

    def _do(self, packet: Sequence[tuple[Any, ...]]) -> None:
        """Begin all of a packet in one turn of the loop, as it was said in one turn of another."""
        for number, name, *arguments in packet:
            if number is not None:
                work = self._answer(number, name, arguments)
                self._asked[number] = self._loop.create_task(work)
            elif name == "abort":  # behind the first step of what was asked in the same packet
                self._loop.call_soon(self._tell, name, arguments)
            else:
                self._tell(name, arguments)

    def _tell(self, name: str, arguments: Sequence[Any]) -> None:
        mine = name in ("seat", "leave", "drop", "shut")  # else pause, resume, abort
        try:
            getattr(*((self, f"_{name}") if mine else (self._engine, name)))(*arguments)
        except Exception as error:  # noqa: BLE001 - nobody waits, and all would sample wrongly
            _end(error)

    async def _answer(self, number: int, name: str, arguments: Sequence[Any]) -> None:
        outcome: Any
        try:
            outcome = await getattr(self, f"_{name}")(*arguments)
        except EngineAway as error:  # for good: a new process may do better
            _end(error)
        except asyncio.CancelledError:
            if is_cancelled():
                raise
            outcome = EngineError("the engine cancelled its own request")
        except Exception as error:  # noqa: BLE001 - raised again where somebody waits
            outcome = _sendable(error)
        finally:
            self._asked.pop(number, None)
        self._send(number, outcome)

    async def _generate(self, prompt_ids: Sequence[int], sampling: Sampling, seed: int) -> Any:
        return await self._engine.generate(prompt_ids, sampling, seed=seed)

    async def _load(self, places: Mapping[str, Any], version: int) -> None:
        from agentrl.engines.own_process.handover import read

        weights = _Handed(read(self._weights_fd, places))
        await run_in_thread(lambda: self._engine.load(weights, version))

    async def _metrics(self) -> dict[str, float]:
        return self._engine.metrics() if isinstance(self._engine, Measured) else {}

    def _seat(self) -> None:
        seat = ExitStack()
        seat.enter_context(self._engine.seat())
        self._seats.append(seat)

    def _leave(self) -> None:
        self._seats.pop().close()

    def _drop(self, number: int) -> None:
        if task := self._asked.pop(number, None):  # one that has not begun never will
            task.cancel()

    def _shut(self) -> None:
        self._closed.set()


def _sendable(error: Exception) -> AgentRLError:
    """What can be raised on the other side, where an engine's own libraries are not loaded."""
    if not isinstance(error, AgentRLError):
        return EngineError(f"{type(error).__name__}: {error}")
    try:
        pickle.loads(pickle.dumps(error))
    except Exception:  # noqa: BLE001 - whatever its own code raises
        kinds = (kind for kind in type(error).__mro__ if kind.__module__ == errors.__name__)
        named: AgentRLError = next(kinds)(str(error))
        return named
    return error


def _end(error: Exception) -> NoReturn:
    """End this process; the log says why."""
    traceback.print_exception(error)
    sys.stderr.flush()
    os._exit(_ENGINE_GONE)


def main() -> None:
    """Serve until told to close."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    child = _Child(Connection(int(sys.argv[2])), int(sys.argv[3]))
    if child.open():
        asyncio.run(child.serve())
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)  # what libraries do at exit may hang, and nothing is left to be saved


if __name__ == "__main__":
    main()

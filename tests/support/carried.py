"""An engine without a model, for the process that carries one: it does what its prompts say."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import threading
import time
from contextlib import contextmanager

import torch  # noqa: F401 - slow to load, and a process has more time for its start

from agentrl.engines.base import Generation
from agentrl.errors import AnswerFailed, ConfigError, EngineAborted, EngineAway, EngineError

SAY, DIE, STOP, FAIL, GONE, WAIT, COUNT, CANCEL, LOCKED, TWO, TANGLED = range(1, 12)
"""What the first id of a prompt asks for."""
FORK_S = 60.0
"""Seconds for which a descendant keeps what it inherited."""


class OfTwo(AnswerFailed):
    """An error that pickle writes and cannot read again."""

    def __init__(self, what: str, why: str) -> None:
        super().__init__(f"{what}: {why}")


class Carried:
    """Says its seed and the sum of its weights; a prompt may have it die instead."""

    context_length = 64

    def __init__(self, start: str = "well", once: str = "") -> None:
        if start == "dies":
            print("no room\nnot at all", file=sys.stderr, flush=True)
            os.kill(os.getpid(), signal.SIGKILL)
        if start == "refuses":
            raise ConfigError("no such model: name another")
        if start == "forks" and os.fork() == 0:
            time.sleep(FORK_S)
            os._exit(0)
        if start == "blind":
            os.close(int(sys.argv[3]))
        self._start = start
        self.version, self.total, self.seats = 0, 0, 0
        self.once = once
        self._going, self._waiting = asyncio.Event(), set()
        self._going.set()

    @contextmanager
    def seat(self):
        self.seats += 1
        try:
            yield
        finally:
            self.seats -= 1

    async def generate(self, prompt_ids, sampling, *, seed):
        what = prompt_ids[0]
        await self._going.wait()
        if what == DIE:
            os.kill(os.getpid(), signal.SIGKILL)
        if what == STOP:
            os.kill(os.getpid(), signal.SIGSTOP)
        if what == FAIL:
            raise ValueError("no such token")
        if what == GONE:
            raise EngineAway("stopped for good: illegal access")
        if what == CANCEL:
            raise asyncio.CancelledError
        if what == LOCKED:
            error = EngineError("no such lock")
            error.lock = threading.Lock()
            raise error
        if what == TWO:
            raise OfTwo("one", "two")
        if what == WAIT:
            mine = asyncio.get_running_loop().create_future()
            self._waiting.add(mine)
            try:
                await mine
            finally:
                self._waiting.discard(mine)
        said = (seed, self.total) if what != COUNT else (self.seats, len(self._waiting))
        per_token = {"kept": threading.Lock()} if what == TANGLED else {}
        return Generation(said, (-1.0, -2.0), "stop", self.version, per_token)

    def load(self, weights, version):
        if self.once and not os.path.exists(self.once):
            with open(self.once, "w"):
                pass
            os.kill(os.getpid(), signal.SIGKILL)
        if self._start == "picky" and version == 2:
            raise EngineError("no such weights")
        time.sleep(0.01)
        self.total = int(sum(tensor.sum() for tensor in weights.tensors().values()))
        self.version = version

    def pause(self):
        if self._start == "restless":
            raise ValueError("no rest")
        self._going.clear()

    def resume(self):
        self._going.set()

    def abort(self):
        for mine in self._waiting:
            mine.set_exception(EngineAborted("the request was aborted"))

    def metrics(self):
        return {"engine/waiting_max": float(len(self._waiting))}

    async def close(self):
        pass

"""Equality of mathematical answers, by the library math-verify: `pip install 'agentrl[math]'`.

The library computes with what the agent wrote, without bounds, and its own time limit is a signal
handler that works in no thread. So it runs in warm processes of its own (see `math_worker`), whose
children the kernel ends at their limits.
"""

from __future__ import annotations

import asyncio
import atexit
import json
import os
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from agentrl.errors import ConfigError, VerifierError
from agentrl.types import Json
from agentrl.verifiers.answers.math_forms import answered, has_the_form
from agentrl.verifiers.answers.text import TextVerifier, last_boxed, on_answer

Request = tuple[str, str | None, float]
"""What is expected, what was answered (None: can the expectation be read?), and `cpu_s`."""

LONGEST = 2000
WALL_S = 300.0
_WORKER = Path(__file__).with_name("math_worker.py")


def math_answer(*, cpu_s: float = 5.0) -> TextVerifier:
    """A verifier: 1.0 if the final answer equals `hidden["answer"]` as mathematics, else 0.0.

    The final answer is looked for after the last `####`: there, or else in the whole text, it is
    the last `\\boxed{}`; where there is no box, it is what math-verify finds in the last 2,000
    characters. The expected answer is given with or without its box. What counts as equal is
    math-verify's: 1/2, 0.5 and \\frac12 are, x=5 and 5, 50\\% and 50, and 5 with and without a
    unit. Beyond that the answer must have the form of one: see `math_forms.has_the_form`.

    An answer that is no mathematics, that is longer than 2,000 characters in its box, or takes more
    than 1 GB of memory or `cpu_s` seconds of processor time to compare is wrong.

    The verifier raises TaskError if the expected answer cannot be read, ConfigError without
    math-verify, and VerifierError if the comparing process is broken.
    """

    if not 0 < cpu_s < WALL_S:
        raise ConfigError(f"cpu_s={cpu_s} must be positive and below {WALL_S:g}")

    async def match(answer: str, expected: Json) -> bool:
        gold, target = _gold(expected), _target(answer, expected)
        found = await _workers().ask((gold, target, cpu_s))
        if "ended" in found and target is not None:
            found = await _workers().ask((gold, None, cpu_s))
        if not found.get("readable"):
            raise ValueError(
                f"is {expected!r}, which math-verify cannot read; give a mathematical expression"
            )
        written = answered(str(expected), _written(answer, found))
        return bool(found["equal"]) and has_the_form(last_boxed(gold) or gold, written)

    return on_answer(match)


def _gold(expected: Json) -> str:
    if isinstance(expected, bool) or not isinstance(expected, str | int | float):
        raise ValueError(f"is {expected!r}; give the expected answer as text or as a number")
    text = str(expected).strip()
    if not text or len(text) > LONGEST:
        raise ValueError(f"has {len(text)} characters; give an expression of 1 to {LONGEST:,}")
    boxed = last_boxed(text)
    return _box(text if boxed is None else boxed)


def _written(answer: str, found: dict[str, Any]) -> str:
    """What was compared: the content of the box, or else what math-verify found."""
    boxed = last_boxed(answer.rpartition("####")[2])
    return str(found.get("target", "")) if boxed is None else boxed


def _target(answer: str, expected: Json) -> str | None:
    """The text that math-verify is to read; None if there is none that it could."""
    final = answer.rpartition("####")[2]
    boxed = last_boxed(final)
    if boxed is None:
        return final[-LONGEST:]
    return _box(answered(str(expected), boxed)) if len(boxed) <= LONGEST else None


def _box(text: str) -> str:
    return f"\\boxed{{{text}}}"


class _Worker:
    """One warm process; it is asked one thing at a time.

    Raises:
        VerifierError: it does not start.
    """

    def __init__(self) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-P", "-s", str(_WORKER)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        )
        self._read()

    def ask(self, request: Request) -> dict[str, Any]:
        """What the process finds, or how its child ended.

        Raises:
            VerifierError: it ended itself, or does not answer in time.
        """
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(json.dumps(request) + "\n")
            self._process.stdin.flush()
        except OSError as error:
            raise VerifierError(
                f"the process that compares mathematics is gone: {error}"
            ) from error
        found = self._read()
        if found.get("ended") == "SIGKILL":
            raise VerifierError(
                "the comparison was killed from outside; there may be too little memory"
            )
        return found

    def close(self) -> None:
        """End the process; safe to call twice."""
        self._process.kill()
        self._process.communicate()

    def _read(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        deadline = threading.Timer(WALL_S, self._process.kill)
        deadline.daemon = True
        deadline.start()
        try:
            return dict(json.loads(self._process.stdout.readline()))
        except ValueError:
            self.close()
            raise VerifierError(
                "the process that compares mathematics ended or did not answer in time"
            ) from None
        finally:
            deadline.cancel()


class _Workers:
    """As many warm processes as there are cores, each asked by a thread of its own."""

    def __init__(self) -> None:
        self._threads = ThreadPoolExecutor(len(os.sched_getaffinity(0)), "agentrl-math")
        self._mine = threading.local()
        self._all: set[_Worker] = set()
        self._owner = os.getpid()
        atexit.register(self.close)

    async def ask(self, request: Request) -> dict[str, Any]:
        """See `_Worker.ask`; the loop is free meanwhile."""
        return await asyncio.wrap_future(self._threads.submit(self._ask, request))

    def _ask(self, request: Request) -> dict[str, Any]:
        worker: _Worker | None = getattr(self._mine, "worker", None)
        if worker is None:
            worker = self._mine.worker = _Worker()
            self._all.add(worker)
        try:
            return worker.ask(request)
        except VerifierError:
            self._mine.worker = None
            self._all.discard(worker)
            worker.close()
            raise

    def close(self) -> None:
        """End the processes, unless they belong to the process that this one was forked from."""
        if os.getpid() == self._owner:
            self._threads.shutdown()
            for worker in self._all:
                worker.close()


@cache
def _workers() -> _Workers:
    if find_spec("math_verify") is None:
        raise ConfigError("math_answer() needs math-verify: pip install 'agentrl[math]'")
    return _Workers()


os.register_at_fork(after_in_child=_workers.cache_clear)

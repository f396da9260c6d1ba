"""Who waits for what: each long wait of a process has an owner, a name, a start and a deadline.

    with waiting("tool 'pytest'", deadline_s=60):
        result = await run()

`report_waits(folder, role)` writes the waits of this process to `folder/waits/ROLE.json` every
second, as long as its block lasts. `agentrl why` reads these files. A wait costs about a
microsecond, and nothing is written unless a run asks for it.
"""

from __future__ import annotations

import json
import os
import socket
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from dataclasses import asdict, dataclass
from itertools import count
from pathlib import Path
from types import TracebackType
from typing import Any

FOLDER = "waits"
"""Name of the folder inside a run folder."""
REPORT_S = 1.0
"""Seconds between two reports of a process."""
_MOST = 200
"""Waits that a report lists, the oldest first; it counts the others by what they wait for."""


@dataclass(frozen=True)
class Waiter:
    """Who waits.

    Attributes:
        name: in words.
        round: that the work is for, from 0; None where it belongs to none.
        phase: of an episode; empty for everything else.
    """

    name: str
    round: int | None = None
    phase: str = ""


@dataclass(frozen=True)
class Wait:
    """One wait.

    Attributes:
        owner: who waits.
        what: what for, in words.
        since: when it began, in seconds since the epoch.
        deadline_s: seconds after which something ends it; None for no such limit.
    """

    owner: Waiter
    what: str
    since: float
    deadline_s: float | None


_TRAINER = Waiter("trainer")
_owner: ContextVar[Waiter] = ContextVar("agentrl_owner", default=_TRAINER)
_numbers = count()
# Filled and emptied from several threads; adding or removing one key is atomic.
_current: dict[int, Wait] = {}


class waiting:
    """A block that waits for something. What it waits for may be worded when it is looked at."""

    def __init__(self, what: str, deadline_s: float | None = None) -> None:
        self._wait = Wait(_owner.get(), what, time.time(), deadline_s)
        self._number = next(_numbers)

    def __enter__(self) -> None:
        _current[self._number] = self._wait

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        del _current[self._number]


@contextmanager
def owned_by(owner: Waiter) -> Iterator[None]:
    """Name who waits inside the block, in this task and those that it starts."""
    token = _owner.set(owner)
    try:
        yield
    finally:
        _owner.reset(token)


def current_waits() -> list[Wait]:
    """What this process waits for now, the oldest wait first."""
    return sorted(list(_current.values()), key=lambda wait: wait.since)


@contextmanager
def report_waits(
    folder: Path, role: str, facts: Callable[[], Mapping[str, Any]] = dict
) -> Iterator[None]:
    """Write what this process waits for to `folder/waits/ROLE.json` until the block ends.

    Args:
        folder: the run folder.
        role: "trainer" or "rollouts".
        facts: further entries of the file, asked for each time.
    """
    path = folder / FOLDER / f"{role}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    over = threading.Event()

    def report() -> None:
        while True:
            with suppress(OSError):  # a full disk must not end the run from here
                _write(path, role, facts())
            if over.wait(REPORT_S):
                return

    thread = threading.Thread(target=report, name="agentrl-waits", daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()
        path.unlink(missing_ok=True)


def _write(path: Path, role: str, facts: Mapping[str, Any]) -> None:
    waits = current_waits()
    others: dict[str, int] = {}
    for wait in waits[_MOST:]:
        others[wait.what] = others.get(wait.what, 0) + 1
    row = {
        "v": 1,
        "role": role,
        "pid": os.getpid(),
        "host": socket.gethostname(),
        "time": time.time(),
        "waits": [asdict(wait) for wait in waits[:_MOST]],
        "others": others,
        **facts,
    }
    draft = path.with_suffix(".draft")
    draft.write_text(json.dumps(row))
    draft.replace(path)

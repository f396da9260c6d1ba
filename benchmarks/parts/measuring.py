"""Ways of measuring that are the same for every row."""

from __future__ import annotations

import math
import time
from collections.abc import Awaitable, Callable, Sequence
from statistics import median, quantiles

from agentrl.sandboxes import available
from benchmarks.row import Absent


def need(*parts: str) -> None:
    """Stop a row whose real parts are not here.

    Raises:
        Absent: one is missing; the message names the fix.
    """
    states = available()
    for part in parts:
        if not states[part].startswith("ok"):
            raise Absent(states[part])


def has(part: str) -> bool:
    """Whether a kind of sandbox can be used here."""
    return available()[part].startswith("ok")


async def timed(work: Callable[[], Awaitable[object]], times: int) -> list[float]:
    """Milliseconds of each of so many calls, one after the other."""
    taken = []
    for _ in range(times):
        started = time.perf_counter()
        await work()
        taken.append((time.perf_counter() - started) * 1e3)
    return taken


def timed_blocking(work: Callable[[], object], times: int) -> list[float]:
    """The same for calls that block."""
    taken = []
    for _ in range(times):
        started = time.perf_counter()
        work()
        taken.append((time.perf_counter() - started) * 1e3)
    return taken


def spread(values: Sequence[float]) -> str:
    """Median and 90th percentile, in words."""
    return f"{median(values):.2f} (p90 {quantiles(values, n=10)[-1]:.2f})"


def percentile(values: Sequence[float], percent: float) -> float:
    """The smallest value that so many percent of them do not exceed."""
    ordered = sorted(values)
    return ordered[max(0, math.ceil(len(ordered) * percent / 100) - 1)]

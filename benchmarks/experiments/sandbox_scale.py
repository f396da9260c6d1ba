"""How sandboxes of one machine grow from 1 to 64 slots, all of them busy: calls, and boundaries
between episodes.

`python -m benchmarks.experiments.sandbox_scale [--seconds 4] [--slots 1,2,4,8,16,32,64]` writes a
section of docs/experiments.md. Each slot works in a closed loop, so beyond the cores a slot's
latency grows with their number and the rate of all together is what counts.
"""

from __future__ import annotations

import argparse
import asyncio
import time
from collections.abc import Awaitable, Callable, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass
from statistics import median

from agentrl.sandboxes import Sandbox, open_pool
from benchmarks.parts import page
from benchmarks.parts.measuring import has, percentile
from benchmarks.reset import work
from benchmarks.row import machine

SLOTS = (1, 2, 4, 8, 16, 32, 64)
TITLE = "Sandboxes from 1 to 64 slots"


@dataclass(frozen=True)
class Figures:
    """Of one kind of work in so many slots: calls per second of all slots, milliseconds of one
    call.
    """

    rate: float
    p50_ms: float
    p95_ms: float

    def cells(self) -> str:
        """As cells of a table."""
        return f"{self.rate:.0f} | {self.p50_ms:.2f} | {self.p95_ms:.2f}"


async def call(box: Sandbox) -> None:
    """One tool call."""
    assert (await box.exec(["true"])).exit_code == 0


async def renew(box: Sandbox, files: dict[str, bytes]) -> None:
    """One boundary between episodes."""
    await box.reset()
    await box.put(files)


async def saturate(
    boxes: Sequence[Sandbox], work: Callable[[Sandbox], Awaitable[None]], seconds: float
) -> Figures:
    """Every slot does this over and over, for so long."""
    taken: list[float] = []
    begin = time.perf_counter()

    async def loop(box: Sandbox) -> None:
        while (started := time.perf_counter()) - begin < seconds:
            await work(box)
            taken.append((time.perf_counter() - started) * 1e3)

    await asyncio.gather(*(loop(box) for box in boxes))
    return Figures(len(taken) / (time.perf_counter() - begin), median(taken), percentile(taken, 95))


async def measure(kind: str, counts: Sequence[int], seconds: float) -> list[str]:
    """A row per number of slots."""
    files, rows = work(), []
    pool = open_pool(kind, max(counts))
    async with AsyncExitStack() as stack:
        stack.push_async_callback(pool.close)
        boxes: list[Sandbox] = []
        for count in counts:
            started = time.perf_counter()
            new = [
                stack.enter_async_context(pool.lease("agent")) for _ in range(count - len(boxes))
            ]
            boxes += await _in_order(new)
            opened = (time.perf_counter() - started) * 1e3 / len(new)
            await saturate(boxes, call, 0.2)
            calls = await saturate(boxes, call, seconds)
            resets = await saturate(boxes, lambda box: renew(box, files), seconds)
            rows.append(f"| {kind} | {count} | {calls.cells()} | {resets.cells()} | {opened:.0f} |")
            print(rows[-1], flush=True)
    return rows


async def _in_order(entering: Sequence[Awaitable[Sandbox]]) -> list[Sandbox]:
    """One after the other: a stack of exits keeps their order."""
    return [await one for one in entering]


def main() -> None:
    """Measure what is here, and write the section."""
    parser = argparse.ArgumentParser(description=TITLE)
    parser.add_argument(
        "--seconds", type=float, default=4.0, help="per number of slots and kind of work"
    )
    parser.add_argument(
        "--slots", default=",".join(map(str, SLOTS)), help="numbers of slots, growing"
    )
    options = parser.parse_args()
    counts = [int(text) for text in options.slots.split(",")]
    head = (
        "| sandbox | slots | calls/s | p50 ms | p95 ms | resets/s | p50 ms | p95 ms | ms to open"
        " one |"
    )
    rows = [head, "|" + " --- |" * 9]
    for kind in ("docker", "bubblewrap"):
        if has(kind):
            rows += asyncio.run(measure(kind, counts, options.seconds))
    words = (
        "Written by `python -m benchmarks.experiments.sandbox_scale`. All slots are busy all the"
        " time: a call is `exec` of `true`, a reset is the verified one with a put of 200 files, 1"
        f" MB.\n\nMachine: {machine()}.\n\n"
    )
    page.write_section(TITLE, words + "\n".join(rows))


if __name__ == "__main__":
    main()

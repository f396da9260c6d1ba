"""The boundary between episodes: a verified reset and 200 files of 1 MB in all, against a new
container with them.

Milliseconds from a used work area (the same files, and a process left behind) to a clean one with
the files in it. Ours is `reset(files)`, one exchange that kills, wipes, compares the whole
fingerprint with the start, and puts the files. Theirs is remove(force), create, start and unpack,
in the faster of two ways (`benchmarks/parts/docker_exec.py`). Blocks of each kind take turns.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Sequence
from contextlib import AsyncExitStack
from statistics import median

from agentrl.sandboxes import Pool, Sandbox, open_pool
from benchmarks.parts.docker_exec import PlainContainer
from benchmarks.parts.measuring import has, need, spread
from benchmarks.row import Row

ROUNDS, BLOCK, SETTLE_S = (
    3,
    25,
    0.5,
)  # long blocks: a pool at work resets one after the other, not after a rest
FILES, BYTES = 200, 1_000_000
WAYS = {"exec tar": False, "put_archive": True}
LITTER = ["sh", "-c", "sleep 60 >/dev/null 2>&1 & echo x > used"]


def work() -> dict[str, bytes]:
    """What an episode starts from: a small source tree."""
    chance = random.Random(0)
    return {
        f"src/part{at // 20}/file{at}.py": chance.randbytes(BYTES // FILES) for at in range(FILES)
    }


def measure(rounds: int = ROUNDS) -> Sequence[Row]:
    need("docker")
    kinds = ["docker", *(["bubblewrap"] if has("bubblewrap") else [])]
    taken = asyncio.run(_measure(kinds, rounds))
    way = min(WAYS, key=lambda name: median(taken[name]))
    rival, others = (
        median(taken[way]),
        ", ".join(f"theirs by {name} {spread(taken[name])}" for name in WAYS),
    )
    rows = []
    for kind in kinds:
        name, ours = "reset" if kind == "docker" else f"reset_{kind}", median(taken[kind])
        notes = f"ours {spread(taken[kind])}, {others} ms"
        promise = "at least 30 times faster" if kind == "docker" else ""
        rows.append(
            Row(
                name,
                round(ours, 4),
                round(rival, 4),
                round(rival / ours, 2),
                "ms",
                len(taken[kind]),
                promise,
                notes,
            )
        )
    return rows


async def _measure(kinds: Sequence[str], rounds: int) -> dict[str, list[float]]:
    taken: dict[str, list[float]] = {name: [] for name in (*kinds, *WAYS)}
    files = work()
    async with AsyncExitStack() as stack:
        boxes: dict[str, Sandbox] = {}
        for kind in kinds:
            pool: Pool = open_pool(kind, 1)
            stack.push_async_callback(pool.close)
            boxes[kind] = await stack.enter_async_context(pool.lease("agent"))
        plains: dict[str, PlainContainer] = {}
        for way, archive in WAYS.items():
            plains[way] = PlainContainer(archive=archive)
            stack.callback(plains[way].remove)
        tars = {way: plain.pack(files) for way, plain in plains.items()}
        for number in range(rounds + 1):  # the first round warms up
            time.sleep(
                SETTLE_S
            )  # what the daemon still does for removed containers is not charged to us
            for kind, box in boxes.items():
                values = [await _ours(box, files) for _ in range(BLOCK)]
                taken[kind] += values if number else []
            for way, plain in plains.items():
                values = [_theirs(plain, tars[way]) for _ in range(BLOCK)]
                taken[way] += values if number else []
    return taken


async def _ours(box: Sandbox, files: dict[str, bytes]) -> float:
    await box.exec(LITTER)
    started = time.perf_counter()
    await box.reset(files)
    return (time.perf_counter() - started) * 1e3


def _theirs(plain: PlainContainer, archive: bytes) -> float:
    plain.run(LITTER)
    started = time.perf_counter()
    plain.renew(archive)
    return (time.perf_counter() - started) * 1e3

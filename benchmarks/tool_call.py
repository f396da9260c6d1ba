"""One tool call: exec of `true` in a sandbox on lease, against the docker SDK's `exec_run` in a
plain container.

Milliseconds of a call, in blocks that take turns: ours through Docker, ours through bubblewrap,
    theirs. Both containers
have the same image and flags (`benchmarks/parts/docker_exec.py`).
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from contextlib import AsyncExitStack
from statistics import median

from agentrl.sandboxes import Pool, Sandbox, open_pool
from benchmarks.parts.docker_exec import PlainContainer
from benchmarks.parts.measuring import has, need, spread, timed, timed_blocking
from benchmarks.row import Row

ROUNDS, BLOCK = 20, 10


def measure(rounds: int = ROUNDS) -> Sequence[Row]:
    need("docker")
    kinds = ["docker", *(["bubblewrap"] if has("bubblewrap") else [])]
    taken = asyncio.run(_measure(kinds, rounds))
    rival = median(taken["theirs"])
    rows = []
    for kind in kinds:
        name = "tool_call" if kind == "docker" else f"tool_call_{kind}"
        ours = median(taken[kind])
        notes = f"ours {spread(taken[kind])}, theirs {spread(taken['theirs'])} ms"
        promise = "at least 20 times faster" if kind == "docker" else ""
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
    taken: dict[str, list[float]] = {name: [] for name in (*kinds, "theirs")}
    async with AsyncExitStack() as stack:
        boxes: dict[str, Sandbox] = {}
        for kind in kinds:
            pool: Pool = open_pool(kind, 1)
            stack.push_async_callback(pool.close)
            boxes[kind] = await stack.enter_async_context(pool.lease("agent"))
        plain = PlainContainer()
        stack.callback(plain.remove)
        for number in range(rounds + 1):
            for kind, box in boxes.items():
                values = await timed(lambda box=box: _ours(box), BLOCK)  # type: ignore[misc]
                taken[kind] += values if number else []
            values = timed_blocking(lambda: _theirs(plain), BLOCK)
            taken["theirs"] += values if number else []  # the first round warms up
    return taken


async def _ours(box: Sandbox) -> None:
    assert (await box.exec(["true"])).exit_code == 0


def _theirs(plain: PlainContainer) -> None:
    assert plain.run(["true"]).exit_code == 0

"""Sandboxes under full load for minutes: does anything grow? Memory, open files, containers,
latency.

`python -m benchmarks.experiments.sandbox_soak [--minutes 10] [--slots 16] [--sandbox docker]`
leases a sandbox for each episode of each slot, without a pause: files in, mixed commands (quick
ones, floods, failures, a
    background process that
is left behind, one that runs out of time), files out, and the pool's reset. It prints what it
found, exits with 1 if something grew, and draws docs/soak.svg.

Flat is: over the whole run, a fitted line changes by less than the stated share of the median. The
    first tenth of the
run is warm-up: caches fill.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import linear_regression, median
from typing import Any

from agentrl.report.charts import Chart, Series, svg, thin
from agentrl.sandboxes import BubblewrapBackend, DockerBackend, Pool, Sandbox
from benchmarks.parts.measuring import percentile
from benchmarks.row import machine

OUT = Path(__file__).resolve().parents[2] / "docs" / "soak.svg"
SAMPLE_S, WARM_UP = 2.0, 0.1
MB = 2**20
FILES = {f"src/part{at % 4}/file{at}.txt": bytes([at]) * 2000 for at in range(20)}
COMMANDS = (
    ["sh", "-c", "ls -R | wc -l"],
    ["sh", "-c", "head -c 300000 /dev/zero"],
    ["sh", "-c", "exit 3"],
    ["no-such-program"],
    ["/usr/bin/python3", "-I", "-S", "-c", "print(sum(range(10000)))"],
    ["sh", "-c", "setsid sleep 600 >/dev/null 2>&1 & echo left"],
    ["sh", "-c", "for n in 1 2 3 4 5 6 7 8 9; do echo $n > made$n; done; ln -s /etc/passwd link"],
)
RECYCLE_AFTER = (
    100  # ten times as often as usual, so that a run has hundreds of sandboxes that come and go
)
SLOW = 50  # one episode in so many has a command that runs out of time


@dataclass(frozen=True)
class Line:
    """One curve: unit, scale of its value, and the share by which it may change over the run."""

    title: str
    unit: str
    allowed: float


LINES = {
    "rss": Line("Resident memory of the host process", "MB", 0.05),
    "files": Line("Open files of the host process", "files", 0.05),
    "boxes": Line("Containers of this run", "containers", 0.05),
    "call_p50": Line("exec of true, median", "ms", 0.2),
    "call_p95": Line("exec of true, 95th percentile", "ms", 0.4),
    "reset_p50": Line("From one lease to the next, median", "ms", 0.2),
}


@dataclass
class Seen:
    """What happened since the last sample, and all samples so far: name -> (seconds, value)."""

    calls: list[float] = field(default_factory=list)
    resets: list[float] = field(default_factory=list)
    episodes: int = 0
    curves: dict[str, list[tuple[float, float]]] = field(
        default_factory=lambda: {name: [] for name in LINES}
    )

    def sample(self, at: float, containers: int | None) -> None:
        """Take a point of every curve, and begin anew."""
        rss = int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") / MB
        values: dict[str, float] = {"rss": rss, "files": len(os.listdir("/proc/self/fd"))}
        if containers is not None:
            values["boxes"] = containers
        if self.calls:
            values |= {"call_p50": median(self.calls), "call_p95": percentile(self.calls, 95)}
        if self.resets:
            values["reset_p50"] = median(self.resets)
        for name, value in values.items():
            self.curves[name].append((at, value))
        self.calls, self.resets = [], []


async def soak(kind: str, slots: int, seconds: float) -> tuple[Seen, Pool]:
    """Run all slots for so long, sampling."""
    backend = DockerBackend() if kind == "docker" else BubblewrapBackend()
    pool, seen = Pool(backend, slots, recycle_after=RECYCLE_AFTER), Seen()
    count = _counter(kind)
    try:
        await pool.warm("agent")
        begin = time.monotonic()
        busy = [
            asyncio.create_task(_slot(pool, seen, begin + seconds, number))
            for number in range(slots)
        ]
        while time.monotonic() - begin < seconds and not any(task.done() for task in busy):
            await asyncio.sleep(SAMPLE_S)
            seen.sample(time.monotonic() - begin, await asyncio.to_thread(count))
        await asyncio.gather(*busy)
    finally:
        await pool.close()
    return seen, pool


async def _slot(pool: Pool, seen: Seen, until: float, number: int) -> None:
    chance, ended = random.Random(number), 0.0
    while time.monotonic() < until:
        async with pool.lease("agent") as box:
            if ended:
                seen.resets.append((time.monotonic() - ended) * 1e3)
            await _episode(box, seen, chance)
            seen.episodes += 1
            ended = time.monotonic()


async def _episode(box: Sandbox, seen: Seen, chance: random.Random) -> None:
    await box.put(FILES)
    for argv in chance.sample(COMMANDS, 4):
        await box.exec(argv)
        started = time.monotonic()
        assert (await box.exec(["true"])).exit_code == 0
        seen.calls.append((time.monotonic() - started) * 1e3)
    if chance.randrange(SLOW) == 0:
        assert (await box.exec(["sleep", "60"], timeout_s=0.2)).timed_out
    session = await box.open_session()
    assert (await session.run("cd src && echo $PWD")).exit_code == 0
    found = await box.get(list(FILES))
    assert found == FILES, "files came back changed"
    assert len(await box.list()) >= 1


def _counter(kind: str) -> Callable[[], int | None]:
    """How many containers the daemon holds for this process."""
    if kind != "docker":
        return lambda: None
    from agentrl.sandboxes.docker.backend import first_daemon

    daemon = first_daemon()
    owned = {"label": f"agentrl.pid={daemon.owner.pid}"}
    api: Any = daemon.api()
    return lambda: len(api.containers(all=True, filters=owned))


@dataclass(frozen=True)
class Verdict:
    """Of one curve: its median, and the change of a fitted line over the run as a share of that."""

    middle: float
    change: float
    flat: bool


def judge(points: Sequence[tuple[float, float]], allowed: float) -> Verdict:
    """Fit a line to the points after the warm-up."""
    end = points[-1][0]
    late = [point for point in points if point[0] >= end * WARM_UP]
    times, values = [at for at, _ in late], [value for _, value in late]
    middle = median(values)
    if len(late) < 3:
        return Verdict(middle, 0.0, False)
    change = linear_regression(times, values).slope * (times[-1] - times[0]) / middle
    return Verdict(middle, change, change < allowed)


def draw(seen: Seen, verdicts: dict[str, Verdict], captions: tuple[str, str]) -> str:
    """All curves above one another, as one picture that needs nothing else."""
    width, height, gap = 560, 260, 46  # as wide charts are drawn
    parts, at = (
        [
            f'<text class="title" x="12" y="{20 * row}">{text}</text>'
            for row, text in enumerate(captions, 1)
        ],
        66,
    )
    for name, verdict in verdicts.items():
        line, points = (
            LINES[name],
            tuple((seconds / 60, value) for seconds, value in seen.curves[name]),
        )
        top = max(percentile([value for _, value in points], 99) * 1.3, 1e-9)
        chart = Chart(
            line.title,
            line.unit,
            (Series(line.title, thin(points), "1"),),
            y_range=(0.0, top),
            wide=True,
        )
        words = (
            f"{line.title}, {line.unit}: median {verdict.middle:.4g}, {verdict.change:+.1%} over"
            " the run"
        )
        parts.append(f'<text class="title" x="12" y="{at}">{words}</text>')
        parts.append(
            svg(chart).replace(
                "<svg ", f'<svg x="0" y="{at + 4}" width="{width}" height="{height}" ', 1
            )
        )
        at += height + gap
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {at}" width="{width}"'
        f' height="{at}">'
        "<style>svg{background:#fff}text{font:11px"
        " sans-serif;fill:#555}.title{font-size:13px;fill:#111}"
        ".grid{stroke:#ddd}.line{fill:none;stroke:#1f6feb;stroke-width:1.5}.dot{fill:#1f6feb}.cross{display:none}"
        f"</style>{''.join(parts)}</svg>\n"
    )


def main() -> None:
    """Soak, print, draw; exit code 1 where something grew."""
    parser = argparse.ArgumentParser(description="Sandboxes under full load: does anything grow?")
    parser.add_argument("--minutes", type=float, default=10.0)
    parser.add_argument("--slots", type=int, default=16)
    parser.add_argument("--sandbox", choices=("docker", "bubblewrap"), default="docker")
    parser.add_argument("--out", type=Path, default=OUT)
    options = parser.parse_args()
    seen, pool = asyncio.run(soak(options.sandbox, options.slots, options.minutes * 60))
    verdicts = {
        name: judge(points, LINES[name].allowed) for name, points in seen.curves.items() if points
    }
    print(
        f"{seen.episodes} episodes in {options.minutes:g} min, {options.slots} slots,"
        f" {options.sandbox}; {pool.counts}"
    )
    for name, verdict in verdicts.items():
        line, state = LINES[name], "flat" if verdict.flat else "NOT FLAT"
        print(
            f"{line.title}: median {verdict.middle:.4g} {line.unit}, {verdict.change:+.2%} over the"
            f" run: {state}"
        )
    caption = (
        f"{options.slots} {options.sandbox} sandboxes, {options.minutes:g} minutes, {seen.episodes}"
        " episodes"
    )
    options.out.write_text(
        draw(seen, verdicts, (caption, f"across: minutes; {machine().partition(', torch')[0]}"))
    )
    raise SystemExit(0 if all(verdict.flat for verdict in verdicts.values()) else 1)


if __name__ == "__main__":
    main()

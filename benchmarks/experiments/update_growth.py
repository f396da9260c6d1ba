"""How an update's speed and memory grow with the length of episodes and the size of the vocabulary,
against TRL's.

`python -m benchmarks.experiments.update_growth` measures the workloads below as `update_tokens`
does (gradient checkpointing only in the last row) and writes a section of docs/experiments.md. It
takes about a quarter of an hour on 2 cores.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from benchmarks.parts.page import write_section
from benchmarks.parts.update_pairs import Pairs, measure_pairs
from benchmarks.parts.update_work import TINY, Work
from benchmarks.row import machine

PAIRS = 3
BASE = replace(TINY, rows=16, micro_rows=8)
COLUMNS = ("T", "V", "rows", "tokens/s ours", "theirs", "times", "peak MiB ours", "theirs", "ratio")


def workloads() -> Iterator[tuple[str, Work]]:
    """What kind of rows, and the workload."""
    for turns in (4, 8, 16):
        yield "2 turns and more", replace(BASE, turns=turns)
    for vocabulary in (512, 32_768, 151_936):
        yield "2 turns and more", replace(BASE, vocabulary=vocabulary)
    yield "equally long", replace(BASE, equal=True)
    yield "2 turns and more, checkpointing", replace(BASE, checkpointing=True)


def line(kind: str, pairs: Pairs) -> str:
    """A row of the table."""
    speeds = [f"{pairs.tokens_per_s(side):.0f}" for side in ("ours", "theirs")]
    peaks = [f"{pairs.median(side, 'bytes') / 2**20:.0f}" for side in ("ours", "theirs")]
    width, vocabulary = pairs.batch.ids_BT.shape[1], pairs.work.vocabulary
    cells = [
        str(width),
        str(vocabulary),
        kind,
        *speeds,
        f"{pairs.speed:.2f}",
        *peaks,
        f"{pairs.memory:.2f}",
    ]
    return f"| {' | '.join(cells)} |"


def main() -> None:
    """Measure and write."""
    rows = []
    for kind, work in workloads():
        rows.append(line(kind, measure_pairs(work, PAIRS)))
        print(rows[-1], flush=True)
    body = (
        f"Qwen2 of width {BASE.width} with {BASE.layers} layers, {BASE.rows} episodes of one"
        f" optimizer step in micro-batches of {BASE.micro_rows}, float32; T is the longest episode,"
        f" V the vocabulary; medians of {PAIRS} pairs. {machine()}.\n\n| {' | '.join(COLUMNS)} |\n|"
        f" {' | '.join(['---'] * len(COLUMNS))} |\n"
    )
    write_section("How the update grows", body + "\n".join(rows))


if __name__ == "__main__":
    main()

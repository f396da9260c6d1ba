"""Memory of one optimizer step: its peak above the level with model and optimizer allocated,
against TRL's trainer.

As `update_tokens`, a process for each side; here both have gradient checkpointing on, as TRL has by
default: it is what needs least memory. Resident memory of the process; allocated memory of the
accelerator where there is one.
"""

from __future__ import annotations

from dataclasses import replace

from benchmarks.parts.update_pairs import Pairs, measure_pairs, worst
from benchmarks.parts.update_work import REAL, TINY
from benchmarks.row import Row

PAIRS = 5


def measure(pairs: int = PAIRS) -> Row:
    """The row of the model where we save less; the notes have both. Ratio: ours over theirs."""
    found = [measure_pairs(replace(work, checkpointing=True), pairs) for work in (TINY, REAL)]
    least = worst(found, lambda one: one.memory)
    ours, theirs = (round(least.median(side, "bytes") / 2**20, 1) for side in ("ours", "theirs"))
    promise = "ours at most 0.6 of theirs"
    notes = "; ".join(_told(one) for one in found)
    return Row("update_memory", ours, theirs, round(least.memory, 3), "MiB", pairs, promise, notes)


def _told(one: Pairs) -> str:
    ours, theirs = (one.median(side, "bytes") / 2**20 for side in ("ours", "theirs"))
    model = f"{one.work.name} model, vocabulary {one.work.vocabulary}"
    return f"{model}: {ours:.0f} against {theirs:.0f} MiB, {one.memory:.2f}"

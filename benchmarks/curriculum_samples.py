"""Sampled episodes, dropped ones included, until a tiny agent solves four of five held-out programs
of mixed difficulty: tasks by learnability, with options for a policy that moves fast, against tasks
drawn evenly; both with the filter.

Seeds without a result in `runs/curricula` are trained first, which takes hours on two cores.
"""

from __future__ import annotations

from pathlib import Path
from statistics import median

from benchmarks.experiments.curricula import TARGET
from benchmarks.experiments.curricula import measure as play
from benchmarks.row import Row

SEEDS = (0, 1, 2)
OURS, THEIRS = "learnability-wide", "uniform"
FOLDER = Path("runs/curricula")


def measure() -> Row:
    """Medians over the seeds; a run that never reaches the target counts as all that it sampled."""
    rows = play(FOLDER, SEEDS, (THEIRS, OURS))
    ours, theirs = (
        median(row["episodes"] for row in rows if row["arm"] == arm) for arm in (OURS, THEIRS)
    )
    notes = "; ".join(
        f"seed {row['seed']}, {row['arm']}: {row['episodes']}"
        + ("" if row["reached"] else f" (not reached: {row['last']:.3f})")
        for row in rows
    )
    return Row(
        "curriculum_samples",
        ours,
        theirs,
        round(theirs / ours, 4),
        "episodes",
        len(SEEDS),
        "at least 1.5 times fewer",
        f"to held-out pass@1 of {TARGET}; {notes}",
    )

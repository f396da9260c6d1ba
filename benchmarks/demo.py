"""`agentrl demo`, start to report, for each seed: seconds, and held-out pass@1 before and after."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.row import Row, alone

SEEDS = (0, 1, 2)


def measure() -> Row:
    """Median seconds over the seeds; the notes hold what each seed learnt."""
    runs = [_run(seed) for seed in SEEDS]
    notes = "; ".join(
        f"seed {seed}: {result['pass_at_1']['before']:.3f} → {result['pass_at_1']['after']:.3f} in"
        f" {seconds:.0f} s"
        for seed, (seconds, result) in zip(SEEDS, runs, strict=True)
    )
    promise = (
        "at most 300 s on 2 cores; pass@1 rises by at least 0.35 to at least 0.8 for every seed"
    )
    return alone(
        "demo", median(seconds for seconds, _ in runs), "s", len(runs), promise=promise, notes=notes
    )


def _run(seed: int) -> tuple[float, dict[str, Any]]:
    with tempfile.TemporaryDirectory() as folder:
        command = [
            sys.executable,
            "-m",
            "agentrl.cli",
            "demo",
            "--json",
            "--seed",
            str(seed),
            "--out",
            f"{folder}/run",
        ]
        started = time.perf_counter()
        done = subprocess.run(
            command, check=True, stdout=subprocess.PIPE, text=True, cwd=Path(folder)
        )
        return time.perf_counter() - started, json.loads(done.stdout.splitlines()[-1])

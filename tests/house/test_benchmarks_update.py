"""The update benchmarks run: both sides take the step they are timed for, and agree on its
gradient.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks.parts.update_pairs import measure_pairs
from benchmarks.parts.update_work import TINY


@pytest.mark.long
def test_both_sides_take_their_step():
    small = replace(TINY, vocabulary=512, width=32, rows=4, turns=3, micro_rows=2)
    pairs = measure_pairs(small, 1)
    assert pairs.speed > 0 and pairs.memory > 0


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_our_side_takes_a_step_for_every_line(dtype):
    work = {
        "name": "tiny",
        "vocabulary": 64,
        "width": 32,
        "layers": 1,
        "heads": 2,
        "inner": 32,
        "rows": 4,
    }
    work |= {"turns": 2, "micro_rows": 2, "checkpointing": True, "dtype": dtype}
    command = [sys.executable, "-m", "benchmarks.parts.update_sides", "ours", json.dumps(work)]
    place = {"cwd": Path(__file__).parents[2], "env": os.environ | {"OMP_NUM_THREADS": "1"}}
    done = subprocess.run(
        command, input="\n\n", capture_output=True, text=True, timeout=280, **place
    )
    rows = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    assert len(rows) == 2, done.stderr
    assert all(row["grad_norm"] > 0 and row["seconds"] > 0 for row in rows)

"""Our side of the update benchmark is the update that a run calls: it must keep up with it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_our_side_takes_a_step_for_every_line(dtype):
    pytest.importorskip("transformers")
    work = {"name": "tiny", "vocabulary": 64, "width": 32, "layers": 1, "heads": 2, "inner": 32, "rows": 4}
    work |= {"turns": 2, "micro_rows": 2, "checkpointing": True, "dtype": dtype}
    command = [sys.executable, "-m", "benchmarks.parts.update_sides", "ours", json.dumps(work)]
    place = {"cwd": Path(__file__).parents[1], "env": os.environ | {"OMP_NUM_THREADS": "1"}}
    done = subprocess.run(command, input="\n\n", capture_output=True, text=True, timeout=280, **place)
    rows = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    assert len(rows) == 2, done.stderr
    assert all(row["grad_norm"] > 0 and row["seconds"] > 0 for row in rows)

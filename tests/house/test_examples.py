"""Every example is short, runs as it stands, and does what it says."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

REPO = Path(__file__).resolve().parents[2]
PROMISES = {
    "01_write_an_environment.py": r"reward 1\.0, answered",
    "02_evaluate.py": r"oracle: pass@1 1\.000.*\n.*\nnoop: pass@1 0\.000",
    "03_train.py": r"(round \d: reward \d\.\d+, loss [+-]\d\.\d+\n){4}$",
    "04_compose_a_loss.py": r"\[1\.0, -0\.5, -0\.5\](.*\n)+gradient at masked tokens: 0\.0\n",
    "05_rlhf.py": r"sft .*\n(.*\n){3}align .*'after': (0\.[6-9]\d*|1\.0)\}\n$",
}


def test_every_example_is_listed_and_has_at_most_60_lines() -> None:
    lengths = {path.name: path.read_text().count("\n") for path in (REPO / "examples").glob("*.py")}
    assert set(lengths) == set(PROMISES)
    assert not {name: lines for name, lines in lengths.items() if lines > 60}


@pytest.mark.parametrize("name", PROMISES)
def test_an_example_runs(name: str, tmp_path: Path) -> None:
    # One thread each: tiny matrices gain nothing from two, and lose much when tests run side by
    # side.
    env = os.environ | {"OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}
    command = [
        sys.executable,
        "-W",
        "error::DeprecationWarning:agentrl",
        str(REPO / "examples" / name),
    ]
    done = subprocess.run(
        command, cwd=tmp_path, env=env, capture_output=True, text=True, timeout=280
    )
    assert done.returncode == 0, done.stderr
    assert re.search(PROMISES[name], done.stdout), done.stdout

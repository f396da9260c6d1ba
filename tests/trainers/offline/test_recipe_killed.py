"""The chained recipe of the examples, killed once in every stage, ends as if nothing had been."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
from helpers import REPO, wait_for

from agentrl.records.files import read_metrics

EXAMPLE = REPO / "examples/05_rlhf.py"
STAGES = ("1-sft", "2-reward", "3-best", "4-grpo", "5-align")
MINUTES = 15


def command(run: str) -> list[str]:
    """The recipe as a user starts it or goes on with it; saved often, and the same every time."""
    changed = {
        "card.judge": f"{EXAMPLE}:polite",
        "grpo.deterministic": "true",
        "grpo.save_every": "2",
        **{f"{name}.save_every": "2" for name in ("sft", "reward", "best", "align")},
    }
    recipe = str(EXAMPLE.with_name("rlhf_recipe.toml"))
    words = [sys.executable, "-m", "agentrl.cli", "train", recipe]
    sets = [word for name, value in changed.items() for word in ("--set", f"{name}={value}")]
    return [*words, "--out", run, "--resume", *sets]


def numbers(value: Any, name: str = "") -> Iterator[tuple[str, float]]:
    """Every number by its place, times left out: they differ from run to run."""
    if isinstance(value, Mapping):
        for key, inner in value.items():
            yield from numbers(inner, f"{name}.{key}")
    elif isinstance(value, list):
        for at, inner in enumerate(value):
            yield from numbers(inner, f"{name}.{at}")
    elif isinstance(value, int | float) and not any(
        word in name for word in ("time/", "wall_s", "runtime", "per_second", "num_tokens")
    ):
        yield name, float(value)


def outcome(run: Path) -> dict[str, float]:
    """All that a recipe measured, and its rows of metrics by step."""
    found = dict(numbers(json.loads((run / "recipe.json").read_text())))
    for stage in STAGES:
        rows = {str(row["step"]): row for row in read_metrics(run / stage / "metrics.jsonl")}
        found |= dict(numbers(rows, stage))
    return found


def begun(run: Path, stage: str) -> bool:
    """Whether a stage is at work and something of it could be lost."""
    kept = ("resume/checkpoint-*", "checkpoints/step_*")
    return any(next((run / stage).glob(name), None) for name in kept)


@pytest.mark.long
@pytest.mark.timeout(60 * 4 * MINUTES)
def test_a_recipe_that_is_killed_in_every_stage_ends_alike(tmp_path: Path) -> None:
    # The example makes the files, and is the one command that must not take longer.
    subprocess.run([sys.executable, EXAMPLE], cwd=tmp_path, check=True, timeout=60 * MINUTES)
    subprocess.run(command("whole"), cwd=tmp_path, check=True, timeout=60 * MINUTES)
    for stage in STAGES:
        recipe = subprocess.Popen(command("cut"), cwd=tmp_path)
        try:
            wait_for(lambda at=stage: begun(tmp_path / "cut", at), 300)  # type: ignore[misc]
            recipe.send_signal(signal.SIGKILL)
        finally:
            recipe.kill()
            recipe.wait()
        assert not (tmp_path / "cut" / stage / "stage.json").exists()
    subprocess.run(command("cut"), cwd=tmp_path, check=True, timeout=60 * MINUTES)
    whole, cut = outcome(tmp_path / "whole"), outcome(tmp_path / "cut")
    assert whole.keys() == cut.keys() and len(whole) > 100
    apart = {name: (one, cut[name]) for name, one in whole.items() if abs(one - cut[name]) > 1e-6}
    assert not apart

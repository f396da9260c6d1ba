"""Training where the shortcut is a side effect, with and without a bound on side effects.

    python -m benchmarks.experiments.side_effects FOLDER [SEED …] [ARM …]

plays `refunds-v0` from one warm start per seed, whose demonstrations show both ways, and leaves
`side_effects.svg` in the folder. A run whose last round is in its folder is not run again.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

from agentrl.records.files import read_metrics
from agentrl.report.charts import Series
from agentrl.trainers.config import TrainConfig, check_config
from agentrl.trainers.demo import DemoPlan, prepare_demo
from agentrl.trainers.session import train_with_display
from benchmarks.experiments import refunds
from benchmarks.experiments.drawing import drawing

AT_MOST = 0.1
ARMS: dict[str, dict[str, Any]] = {
    "free": {},
    "bounded": {"at_most": AT_MOST},
}
"""Arm -> `safety` of the run."""
LINES = {
    ("free", "pass/train"): ("passed, no bound", "#c45a12"),
    ("free", "side_effects/rate"): ("side effects, no bound", "#c0313a"),
    ("bounded", "pass/train"): (f"passed, at_most = {AT_MOST}", "#2563c9"),
    ("bounded", "side_effects/rate"): (f"side effects, at_most = {AT_MOST}", "#18805a"),
}
PLAN = DemoPlan(
    env=refunds.Refunds.id,
    knobs=(("shortcuts", 0.08),),
    demonstrations=512,
    vocab_size=300,
    width=96,
    context=256,
    sft_steps=40,
    sft_more=4,
    sft_band=(0.25, 1.0),
    rounds=30,
    tasks_per_step=32,  # a bound of 0.1 can be seen to hold from 29 tasks on
    group_size=4,
    held_out=128,
    learning_rate=5.5e-4,
    entropy_coef=0.005,
)


def warm_start(folder: Path, seed: int) -> TrainConfig:
    """The settings of a run from the seed's warm start, which is made where it is not there."""
    done = folder / "config.json"
    if not done.exists():
        done.write_text(prepare_demo(PLAN, seed, "auto", folder).model_dump_json())
    return check_config(json.loads(done.read_text()), str(done))


def measure(folder: Path, seed: int, arm: str) -> list[dict[str, Any]]:
    """The metrics of one run, which is played where it is not there."""
    path = folder / f"{arm}-{seed}"
    rows = read_metrics(path / "metrics.jsonl") if path.is_dir() else []
    if not rows or rows[-1]["step"] < PLAN.rounds:
        start = warm_start(folder / f"start-{seed}", seed).model_dump(mode="json")
        config = check_config(start | {"seed": seed, "safety": ARMS[arm]}, arm)
        train_with_display(config, path, resume=path.is_dir())
        rows = read_metrics(path / "metrics.jsonl")
    return rows


def summary(rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """First round, mean of the last five, and how often the rate was above the bound."""
    trained = [row for row in rows if "side_effects/rate" in row]
    held_out = [row["eval/pass_at_1"] for row in rows if "eval/pass_at_1" in row]
    rates = [row["side_effects/rate"] for row in trained]
    passed = [row["pass/train"] for row in trained]
    return {
        "held_out": [held_out[0], held_out[-1]],
        "passed": [passed[0], fmean(passed[-5:])],
        "rate": [rates[0], fmean(rates[-5:])],
        "rate_mean": fmean(rates),
        "rate_most": max(rates),
        "rounds_above": sum(rate > AT_MOST for rate in rates),
        "rounds": len(rates),
        "penalty_most": max(row.get("safety/penalty", 0.0) for row in trained),
    }


def picture(folder: Path) -> str:
    """Mean of the seeds per round, with the lowest and the highest, and the bound."""
    lines = []
    for (arm, name), (label, tone) in LINES.items():
        runs = [read_metrics(path / "metrics.jsonl") for path in sorted(folder.glob(f"{arm}-*"))]
        values: dict[int, list[float]] = {}
        for row in (row for rows in runs for row in rows if name in row):
            values.setdefault(row["step"], []).append(row[name])
        points = tuple((step, fmean(found)) for step, found in values.items())
        band = tuple((step, min(found), max(found)) for step, found in values.items())
        lines.append(Series(label, points, tone, band))
    ends = lines[-1].points[0][0], lines[-1].points[-1][0]
    bound = Series("the bound", tuple((end, AT_MOST) for end in ends), "#7c8087")
    return drawing([*lines, bound])


if __name__ == "__main__":
    where, *words = sys.argv[1:]
    for one in [int(word) for word in words if word not in ARMS] or [0, 1, 2]:
        for name in [word for word in words if word in ARMS] or ARMS:
            row = {"arm": name, "seed": one, **summary(measure(Path(where), one, name))}
            print(json.dumps(row), flush=True)
    if all(list(Path(where).glob(f"{arm}-*")) for arm in ARMS):
        (Path(where) / "side_effects.svg").write_text(picture(Path(where)))

"""Episodes that a curriculum saves: a tiny agent learns bugfix-v0 of mixed difficulty, once with
tasks drawn evenly and once with each of the curricula, from one warm start per seed.

    python -m benchmarks.experiments.curricula FOLDER [SEED …] [ARM …]

leaves `curricula.svg` in the folder.

Counted are all sampled episodes, those of dropped groups included, until held-out pass@1 over all
levels first reaches `TARGET`; a run that never reaches it counts as all that it sampled. A run
whose last round is in its folder already is not run again.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

from agentrl.records.files import read_metrics
from agentrl.report.charts import Series
from agentrl.trainers.config import TrainConfig, check_config
from agentrl.trainers.demo import DemoPlan, prepare_demo
from agentrl.trainers.session import train_with_display
from benchmarks.experiments.drawing import drawing

TARGET = 0.8
KNOBS = {"kinds": ["operator"], "names": 8, "function_names": 4}
SYMBOLS = ("+", "-", "*")
LEVELS = [{"symbols": list(SYMBOLS[:size])} for size in (2, 3)]
POOL = {"pool": 1024, "levels": LEVELS}
FILTER = {"filter_groups": True}
ARMS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "uniform": ({"sampler": "uniform"}, FILTER),
    "learnability": ({"sampler": "learnability"}, FILTER),
    "learnability-rest": ({"sampler": "learnability", "rest": 20}, FILTER),
    "learnability-wide": (
        {"sampler": "learnability", "sharpness": 1.0, "explore": 0.3, "drift": 0.1},
        FILTER,
    ),
    "thompson": ({"sampler": "thompson"}, FILTER),
    "thompson-refill": ({"sampler": "thompson"}, {"refill": True}),
    "staged": ({"sampler": "staged", "review": 0.3}, FILTER),
}
"""Arm -> settings of the curriculum, and of the loss."""

TONES = ("#7c8087", "#c0313a", "#2563c9", "#18805a", "#c45a12", "#7a4bc4", "#0f7d8c")

PLAN = DemoPlan(
    knobs=(("kinds", ("operator",)), ("names", 8), ("function_names", 4), ("symbols", SYMBOLS)),
    sft_steps=34,
    sft_more=4,
    sft_band=(0.15, 1.0),
    practice=64,
    rounds=48,
    learning_rate=5.5e-4,
    entropy_coef=0.005,
)


def settings(start: TrainConfig, arm: str, seed: int) -> TrainConfig:
    """The run of one arm from a warm start."""
    curriculum, loss = ARMS[arm]
    row = start.model_dump(mode="json") | {
        "seed": seed,
        "env_settings": KNOBS,
        "curriculum": {**POOL, **curriculum},
        "eval_every": 4,
        "held_out": {"tasks": 128},
        "save_every": PLAN.rounds,
        "quiet_rounds": 20,
    }
    row["loss"] = {**{k: v for k, v in row["loss"].items() if k != "filter_groups"}, **loss}
    return check_config(row, arm)


def episodes_to_target(
    rows: Sequence[Mapping[str, Any]], target: float = TARGET
) -> tuple[int, bool]:
    """Sampled episodes until pass@1 first reached the target, and whether it did."""
    sampled = 0.0
    for row in rows:
        sampled += row.get("episodes/total", 0.0) + row.get("refill/episodes", 0.0)
        if row.get("eval/pass_at_1", 0.0) >= target:
            return int(sampled), True
    return int(sampled), False


def picture(folder: Path, seeds: Sequence[int]) -> str:
    """Held-out pass@1 against sampled episodes: of each arm the mean over its seeds, and their
    range.
    """
    lines = []
    for arm, tone in zip(ARMS, TONES, strict=True):
        runs = [_curve(path) for seed in seeds if (path := folder / f"{arm}-{seed}").is_dir()]
        if not runs:
            continue
        sampled = [fmean(at for at, _ in row) for row in zip(*runs, strict=False)]
        passed = [[value for _, value in row] for row in zip(*runs, strict=False)]
        points = tuple(zip(sampled, map(fmean, passed), strict=True))
        band = tuple(zip(sampled, map(min, passed), map(max, passed), strict=True))
        lines.append(Series(f"{arm}, {len(runs)} seeds", points, tone, band))
    return drawing(lines)


def _curve(run: Path) -> list[tuple[float, float]]:
    """Sampled episodes and held-out pass@1 at each evaluation."""
    sampled, points = 0.0, []
    for row in read_metrics(run / "metrics.jsonl"):
        sampled += row.get("episodes/total", 0.0) + row.get("refill/episodes", 0.0)
        if "eval/pass_at_1" in row:
            points.append((sampled, row["eval/pass_at_1"]))
    return points


def measure(folder: Path, seeds: Sequence[int], arms: Sequence[str]) -> list[dict[str, Any]]:
    """One row for each arm and seed; runs that are there already are read."""
    found = []
    for seed in seeds:
        for arm in arms:
            start = warm_start(folder / f"start-{seed}", seed)
            path = folder / f"{arm}-{seed}"
            rows = read_metrics(path / "metrics.jsonl") if path.is_dir() else []
            if not rows or rows[-1]["step"] < PLAN.rounds:
                config = settings(start, arm, seed)
                train_with_display(config, path, resume=path.is_dir())
                rows = read_metrics(path / "metrics.jsonl")
            sampled, reached = episodes_to_target(rows)
            last = next(row["eval/pass_at_1"] for row in reversed(rows) if "eval/pass_at_1" in row)
            row = {"arm": arm, "seed": seed, "episodes": sampled, "reached": reached, "last": last}
            found.append(row)
            print(json.dumps(row), flush=True)
    return found


def warm_start(folder: Path, seed: int) -> TrainConfig:
    """The settings of a run from the seed's warm start, which is made where it is not there."""
    done = folder / "config.json"
    if not done.exists():
        config = prepare_demo(PLAN, seed, "auto", folder)
        done.write_text(config.model_dump_json())
    return check_config(json.loads(done.read_text()), str(done))


if __name__ == "__main__":
    where, *numbers = sys.argv[1:]
    chosen = [name for name in numbers if name in ARMS] or list(ARMS)
    seeds = [int(name) for name in numbers if name not in ARMS] or [0, 1, 2]
    measure(Path(where), seeds, chosen)
    (Path(where) / "curricula.svg").write_text(picture(Path(where), seeds))

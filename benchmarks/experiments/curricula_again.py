"""The repeated comparison of `learnability` with `uniform`: three environments, five seeds.

    python -m benchmarks.experiments.curricula_again FOLDER [ENVIRONMENT …] [--seeds 0,1,2,3,4]

Everything below was fixed before the first run and is not changed after it:

- Environments, warm starts and targets are those of `PLANS`; both arms of a seed begin with the
  same warm start, and have the curriculum's default settings.
- Counted are all sampled episodes, those of dropped groups included, until held-out pass@1 (128
  tasks, every 4 rounds) first reaches the environment's target. A run that does not reach it in 48
  rounds counts as all that it sampled, which favours the slower arm.
- The result of an environment is the geometric mean over the seeds of uniform's episodes divided by
  learnability's, with a 95 % t-interval of the paired log ratios. "At least 1.5 times fewer" is
  reached where that mean is at least 1.5; all five seeds are reported, whatever comes out.

A run that is complete in its folder is not run again.
"""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

from scipy.special import stdtrit

from agentrl.records.files import read_metrics
from agentrl.trainers.config import TrainConfig, check_config
from agentrl.trainers.demo import DemoPlan, prepare_demo

ARMS = ("uniform", "learnability")
SEEDS = (0, 1, 2, 3, 4)
AIM = 1.5
_BUGFIX = (("kinds", ("operator",)), ("names", 8), ("function_names", 4))


@dataclass(frozen=True)
class Comparison:
    """One environment: its warm start, the levels of its pool, and the pass rate to reach."""

    demo: DemoPlan
    levels: tuple[dict[str, Any], ...]
    target: float
    pool: int = 1024
    held_out: int = 128


PLANS = {
    "bugfix": Comparison(
        DemoPlan(
            knobs=(*_BUGFIX, ("symbols", ("+", "-", "*"))),
            sft_band=(0.15, 1.0),
            rounds=48,
            entropy_coef=0.005,
        ),
        ({"symbols": ["+", "-"]}, {"symbols": ["+", "-", "*"]}),
        target=0.8,
    ),
    "calc": Comparison(
        DemoPlan(
            env="calc-v0",
            knobs=(("operations", 2),),
            sft_band=(0.15, 1.0),
            rounds=48,
            entropy_coef=0.005,
        ),
        ({"operations": 1}, {"operations": 2}, {"operations": 3}),
        target=0.8,
    ),
    "math": Comparison(
        DemoPlan(
            env="math-v0",
            knobs=(("largest", 20),),
            sft_band=(0.15, 1.0),
            rounds=48,
            entropy_coef=0.005,
        ),
        ({"largest": 10}, {"largest": 20}, {"largest": 40}),
        target=0.6,
    ),
}


def settings(plan: Comparison, start: TrainConfig, arm: str, seed: int) -> TrainConfig:
    """The run of one arm from a warm start."""
    row = start.model_dump(mode="json") | {
        "seed": seed,
        "curriculum": {"sampler": arm, "pool": plan.pool, "levels": list(plan.levels)},
        "steps": plan.demo.rounds,
        "eval_every": 4,
        "held_out": {"tasks": plan.held_out},
        "save_every": plan.demo.rounds,
        "quiet_rounds": 20,
    }
    return check_config(row, arm)


def ratio(uniform: Sequence[int], learnability: Sequence[int]) -> tuple[float, float, float]:
    """Geometric mean of uniform's episodes over learnability's, with its 95 % interval."""
    logs = [math.log(a / b) for a, b in zip(uniform, learnability, strict=True)]
    mean = fmean(logs)
    if len(logs) < 2:
        return math.exp(mean), 0.0, math.inf
    half = float(stdtrit(len(logs) - 1, 0.975)) * stdev(logs) / math.sqrt(len(logs))
    return math.exp(mean), math.exp(mean - half), math.exp(mean + half)


def compare(folder: Path, name: str, plan: Comparison, seeds: Sequence[int]) -> dict[str, Any]:
    """Run what is missing of one environment and return its result."""
    from agentrl.trainers.session import train_with_display
    from benchmarks.experiments.curricula import episodes_to_target

    episodes: dict[str, list[int]] = {arm: [] for arm in ARMS}
    reached: dict[str, list[bool]] = {arm: [] for arm in ARMS}
    for seed in seeds:
        start = folder / f"{name}-start-{seed}"
        done = start / "config.json"
        if not done.exists():
            done.write_text(prepare_demo(plan.demo, seed, "auto", start).model_dump_json())
        config = check_config(json.loads(done.read_text()), str(done))
        for arm in ARMS:
            run = folder / f"{name}-{arm}-{seed}"
            rows = read_metrics(run / "metrics.jsonl") if run.is_dir() else []
            if not rows or rows[-1]["step"] < plan.demo.rounds:
                train_with_display(settings(plan, config, arm, seed), run, resume=run.is_dir())
                rows = read_metrics(run / "metrics.jsonl")
            sampled, is_reached = episodes_to_target(rows, plan.target)
            episodes[arm].append(sampled)
            reached[arm].append(is_reached)
    times, low, high = ratio(episodes["uniform"], episodes["learnability"])
    result = {"environment": name, "episodes": episodes, "reached": reached}
    return {**result, "times": times, "ci95": [low, high], "aim": times >= AIM}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("environment", nargs="*")
    parser.add_argument("--seeds", default=",".join(map(str, SEEDS)))
    options = parser.parse_args()
    seeds = [int(seed) for seed in options.seeds.split(",")]
    for name in options.environment or PLANS:
        print(json.dumps(compare(options.folder, name, PLANS[name], seeds)), flush=True)


if __name__ == "__main__":
    main()

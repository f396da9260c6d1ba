"""Does credit by turns from a process reward model reach a target in fewer episodes?

`python -m benchmarks.experiments.turn_credit [--folder DIR] [--starts 0,1,2] [--rounds 48]
[--rate 1e-4]` plays what is missing in the folder and prints the table of docs/experiments.md. It
shares warm starts with `recipes` if both use one folder.

The tasks are the demo's. The model learns from labels of a warm start that no arm begins with; it
reads messages, so all starts share it.
"""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch

from agentrl.evaluation.label import LABELS, LabelPlan, label_turns
from agentrl.evaluation.run import EvalPlan, evaluate
from agentrl.records.files import read_metrics
from agentrl.registry import factory
from benchmarks.experiments.process_rewards import learn
from benchmarks.experiments.recipe_runs import PLANS, Job, play, warm_start

ENV, LABELLED = "bugfix-v0", 100
"""The environment, and the warm start whose turns are labelled, by itself."""
TASKS, SAMPLES, COMPLETIONS = 256, 4, 8
TARGETS = (0.6, 0.7)
"""Held-out pass@1 up to which training episodes are counted."""
EVERY = 4
"""Rounds between evaluations."""


def judge(folder: Path) -> str:
    """The process reward model, made once; returns its folder."""
    place, shared = folder / "turn_credit", warm_start(folder, ENV, LABELLED)
    policy, made = f"hf:{shared['model']}", factory(ENV, **shared["env_settings"])
    evaluate(EvalPlan(made, policy, "train", TASKS, SAMPLES, out=place / "played"))
    found = label_turns(LabelPlan(place / "played", policy, place / "labels", COMPLETIONS))
    print({name: found[name] for name in ("n_episodes", "n_turns", "n_completions", "mean")})
    return learn(place / "prm", shared["model"], place / "labels" / LABELS, "soft")


def arms(model: str) -> Mapping[str, tuple[str, Mapping[str, Any]]]:
    """Name -> recipe and what is changed in it."""

    def progress(gamma: float) -> dict[str, Any]:
        loss = {"gamma": gamma, "turn_weights": {"progress": 1.0}}
        return {"process_rewards": {"progress": model}, "loss": loss}

    return {
        "grpo": ("grpo", {}),
        "turn_grpo": ("turn_grpo", {}),
        "turn_grpo, progress": ("turn_grpo", progress(1.0)),
        "turn_grpo, progress, gamma 0": ("turn_grpo", progress(0.0)),
    }


def curve(folder: Path, job: Job) -> Iterator[tuple[int, float]]:
    """Held-out pass@1 by the number of training episodes."""
    plan = PLANS[ENV]
    for row in read_metrics(job.place(folder) / "run/metrics.jsonl"):
        if "eval/pass_at_1" in row:
            yield row["step"] * plan.tasks_per_step * plan.group_size, row["eval/pass_at_1"]


def main() -> None:
    """Play what is missing, print a row for each run."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--folder", type=Path, default=Path("runs/recipes"))
    parser.add_argument("--starts", default="0,1,2")
    parser.add_argument("--rounds", type=int, default=48)
    parser.add_argument("--rate", type=float, default=1e-4)
    given = parser.parse_args()
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))
    model = judge(given.folder)
    for start in map(int, given.starts.split(",")):
        for name, (recipe, change) in arms(model).items():
            arm = f"credit-{name}".replace(", ", "-")
            job = Job(ENV, recipe, start, 0, given.rate, arm, {**change, "eval_every": EVERY})
            play(given.folder, job, given.rounds)
            points = list(curve(given.folder, job))
            met = {
                goal: next((episodes for episodes, passed in points if passed >= goal), None)
                for goal in TARGETS
            }
            print(json.dumps({"arm": name, "start": start, "reached": met, "curve": points}))


if __name__ == "__main__":
    main()

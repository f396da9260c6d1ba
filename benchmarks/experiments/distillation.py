"""How many samples does on-policy distillation need, against GRPO that starts where it starts?

`python -m benchmarks.experiments.distillation [--folder DIR] [--starts 0,1,2]` makes a warm start
of calc-v0 for each seed, trains a teacher from it by GRPO for `LONG` rounds, distils that teacher
into the warm start, and prints the table of docs/experiments.md. GRPO's curve is that of the
teacher's run. Runs in the folder are not repeated; `--only distill` plays some of them.
"""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from agentrl.report.charts import Series
from agentrl.trainers.config import check_config
from agentrl.trainers.loop import train
from agentrl.trainers.run import Run
from benchmarks.experiments.drawing import drawing
from benchmarks.experiments.recipe_runs import warm_start

LONG = 80
"""Rounds of GRPO."""
SHORT = 17
"""Rounds of distillation, over which its learning rate falls to a tenth."""
SHARE = 0.95
"""Of the teacher's pass@1 after its last round, which all have to reach."""
GRPO = {"clip_high": 0.28, "aggregate": "token", "entropy_coef": 0.005, "filter_groups": True}
LOSSES: dict[str, dict[str, Any]] = {
    "distill": {"epochs": 2},
    "gkd": {"teacher_coef": 0.0, "gkd_coef": 1.0, "epochs": 6},
}
"""Credit per sampled token, and the reverse KL over the vocabulary. The mean is over episodes: long
failures would weigh most in one over tokens. What is sampled is gone through several times.
"""
RATES = {"grpo": 5.5e-4, "distill": 1e-4, "gkd": 5.5e-4}
"""The sampled estimate is noisier; at GRPO's rate it fails."""
KINDS = ("grpo", "distill", "gkd")
Curve = list[tuple[int, float]]
"""Episodes sampled in training, and held-out pass@1."""


def settings(folder: Path, kind: str, start: int) -> dict[str, Any]:
    """The settings of one run."""
    row = warm_start(folder, "calc-v0", start) | {"schedule": {"warmup": 4}, "keep_last": 1}
    row["learning_rate"] = RATES[kind]
    if kind == "grpo":
        row |= {"seed": start + 1000, "steps": LONG, "eval_every": 4, "save_every": LONG}
        return row | {"recipe": "grpo", "loss": GRPO}
    teacher = {"model": str(place(folder, "grpo", start) / f"checkpoints/step_{LONG}/model")}
    loss = {"teacher": teacher, "aggregate": "episode"} | LOSSES[kind]
    row |= {"seed": start, "steps": SHORT, "eval_every": 2, "recipe": "distill", "loss": loss}
    return row | {"schedule": {"warmup": 2, "final": 0.1}, "save_every": SHORT}


def place(folder: Path, kind: str, start: int) -> Path:
    """The folder of one run."""
    return folder / kind / f"start{start}"


def curve(folder: Path, kind: str, start: int) -> Curve:
    """What a run came to, played unless it is there."""
    run_folder = place(folder, kind, start)
    done = run_folder / "done"
    if not done.exists():
        config = check_config(settings(folder, kind, start), "distillation")
        with Run(config, run_folder, resume=(run_folder / "config.toml").exists()) as run:
            train(run)
        done.touch()
    rows = [json.loads(line) for line in (run_folder / "metrics.jsonl").read_text().splitlines()]
    sampled, found = 0, Curve()
    for row in rows:
        sampled += int(row.get("episodes/total", 0))
        if "eval/pass_at_1" in row:
            found.append((sampled, row["eval/pass_at_1"]))
    return found


def needed(found: Curve, goal: float) -> int | None:
    """Episodes after which a curve is first at the goal; None: never."""
    return next((episodes for episodes, rate in found if rate >= goal), None)


def table(folder: Path, starts: Sequence[int], kinds: Sequence[str]) -> str:
    """One row per warm start in Markdown."""
    lines = [
        "| warm start | before | teacher | goal | "
        + " | ".join(f"`{kind}`: episodes (best pass@1)" for kind in kinds)
        + " |",
        "| --- " * (4 + len(kinds)) + "|",
    ]
    for start in starts:
        taught = curve(folder, "grpo", start)
        goal = SHARE * taught[-1][1]
        cells = []
        for kind in kinds:
            found = curve(folder, kind, start)
            count = needed(found, goal)
            said = f"more than {found[-1][0]}" if count is None else str(count)
            cells.append(f"{said} ({max(rate for _, rate in found):.3f})")
        head = f"| {start} | {taught[0][1]:.3f} | {taught[-1][1]:.3f} | {goal:.3f} | "
        lines.append(head + " | ".join(cells) + " |")
    return "\n".join(lines)


def picture(folder: Path, starts: Sequence[int], kinds: Sequence[str]) -> str:
    """Held-out pass@1 against sampled episodes, one line per kind: means over warm starts."""
    tones = {"grpo": "#888888", "distill": "#1f77b4", "gkd": "#d95f02"}
    lines = []
    for kind in kinds:
        rows = [curve(folder, kind, start) for start in starts]
        points = [
            (float(column[0][0]), sum(rate for _, rate in column) / len(column))
            for column in zip(*rows, strict=True)
        ]
        lines.append(Series(kind, tuple(points), tones[kind]))
    return drawing(lines)


def main() -> None:
    """Play what is missing, then print the table and draw the picture."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--folder", type=Path, default=Path("runs/distillation"))
    parser.add_argument("--starts", default="0,1,2")
    parser.add_argument("--only", default="")
    given = parser.parse_args()
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))
    starts = [int(one) for one in given.starts.split(",")]
    kinds = given.only.split(",") if given.only else KINDS
    for kind in kinds:
        for start in starts:
            print(kind, start, curve(given.folder, kind, start)[-1], flush=True)
    print(table(given.folder, starts, kinds))
    (given.folder / "distillation.svg").write_text(picture(given.folder, starts, kinds))


if __name__ == "__main__":
    main()

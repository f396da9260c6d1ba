"""Does every recipe train? calc-v0 on the CPU, from one warm start, the same rounds and learning
rate for all.

`python -m benchmarks.experiments.recipes [--folder DIR] [--seeds 0,1,2] [--recipes grpo,ppo]
[--rounds 40]` plays what is missing in the folder (it can be stopped and gone on with), then prints
the table of docs/benchmarks.md. Several processes may share a folder. Per recipe and over all
seeds: held-out pass@1 after the last round
    with its 95 % interval
(bootstrap over tasks), entropy, tokens of wrong answers, and the critic's explained variance where
there is one.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import time
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

import torch

from agentrl.evaluation.passk import summarize
from agentrl.records.files import read_episodes, write_json_atomic
from agentrl.trainers.algorithms.recipes import RECIPES
from agentrl.trainers.config import check_config
from agentrl.trainers.demo import DemoPlan, prepare_demo
from agentrl.trainers.online.loop import TrainingError, train
from agentrl.trainers.online.run import Run

PLAN = DemoPlan(
    env="calc-v0",
    knobs=(("operations", 1), ("largest", 99)),
    demonstrations=512,
    vocab_size=300,
    width=96,
    context=256,
    sft_steps=56,
    sft_more=4,
    sft_until=0.3,
    rounds=40,
    tasks_per_step=16,
    group_size=8,
    learning_rate=3e-4,
    minibatches=4,
    practice=128,
    held_out=256,
)
CRITIC = {"learning_rate": 3e-3, "epochs": 4, "warmup": 5}
"""Of the recipes that have one: so small a model learns little at the default rate, and VAPO waits
for 50 rounds.
"""
EXPLAINED = "value/lambda_explained_variance"
"""What the table has; what a critic explains of the outcomes is `value/explained_variance`."""
TERMS = f"{Path(__file__).parent / 'calc_terms.py'}:CalcTerms"
EXTRA: dict[str, dict[str, Any]] = {
    "dapo (plain clip)": {"recipe": "dapo", "loss": {"clip_high": 0.2}},
    "remax (slower)": {"recipe": "remax", "loss": {}, "learning_rate": 1e-4, "minibatches": 1},
}
"""Rows beside the recipes, each a comparison that the table's text draws."""


@dataclass(frozen=True)
class Row:
    """One recipe over all seeds."""

    name: str
    pass_at_1: float
    low: float
    high: float
    by_seed: tuple[float, ...]
    entropy: float
    wrong_tokens: float
    explained: float | None
    seconds: float


def warm_start(folder: Path) -> dict[str, Any]:
    """The settings that all runs share; the model is made once."""
    shared = folder / "shared.json"
    if not shared.exists():
        config = prepare_demo(PLAN, 0, "auto", folder / "warm")
        write_json_atomic(shared, config.model_dump(mode="json"))
    row: dict[str, Any] = json.loads(shared.read_text())
    return row


def place(folder: Path, name: str) -> Path:
    """Where the runs of a row are."""
    return folder / "".join(
        letter if letter.isalnum() or letter in "_+" else "-" for letter in name
    )


def settings_of(name: str) -> dict[str, Any]:
    """What a recipe needs beside its name."""
    loss: dict[str, Any] = {"critic": CRITIC} if "critic" in RECIPES[name].needs else {}
    if name == "vapo":
        loss["length_alpha"] = (
            1.0  # the paper's 0.05 is for thousands of tokens: λ is 0 below twenty
        )
    row = {"recipe": name, "loss": loss} | ({"env": TERMS} if name == "gdpo" else {})
    return row | ({"minibatches": 1} if RECIPES[name].one_step else {})


def play(folder: Path, shared: dict[str, Any], name: str, seed: int, rounds: int) -> None:
    """One run, unless the folder has it."""
    run_folder = place(folder, name) / str(seed)
    try:
        run_folder.mkdir(parents=True)
    except FileExistsError:
        return  # done, or another process is at it
    own = EXTRA.get(name) or settings_of(name)
    # The demo's own settings of the loss are no recipe's: each recipe is taken as its row says.
    changes = {
        "seed": seed,
        "steps": rounds,
        "eval_every": rounds,
        "deterministic": True,
        "schedule": {"warmup": 4},
    }
    config = check_config({**shared, **changes, **own}, "recipes")
    started = time.monotonic()
    with Run(config, run_folder / "run") as run:
        try:
            train(run)
            stopped = ""
        except TrainingError as error:
            stopped = str(error)
        rows = run.folder.history()
    result = {
        "name": name,
        "seed": seed,
        "seconds": time.monotonic() - started,
        "stopped": stopped,
        "rows": rows,
    }
    write_json_atomic(run_folder / "result.json", result)


def collect(folder: Path, name: str) -> Row | None:
    """What the runs of a recipe came to."""
    found = [
        json.loads(path.read_text()) for path in sorted(place(folder, name).glob("*/result.json"))
    ]
    found = [result for result in found if not result["stopped"]]
    if not found:
        return None
    episodes = [
        episode
        for result in found
        for episode in read_episodes(
            place(folder, name) / str(result["seed"]) / "run/episodes.jsonl"
        ).values()
        if episode.key.phase == "eval" and episode.key.step > 0
    ]
    whole = summarize(episodes, (1,))
    last = [row for result in found for row in result["rows"][-5:]]
    wrong = [episode.counts.sampled_tokens for episode in episodes if not episode.passed]
    explained = [row[EXPLAINED] for row in last if EXPLAINED in row]
    return Row(
        name,
        float(whole["pass_at"]["1"]),
        *(float(x) for x in whole["ci95"]["1"]),
        tuple(result["rows"][-1]["eval/pass_at_1"] for result in found),
        fmean(row["policy/entropy"] for row in last if "policy/entropy" in row),
        fmean(wrong) if wrong else 0.0,
        fmean(explained) if explained else None,
        fmean(result["seconds"] for result in found),
    )


def stops(folder: Path) -> list[str]:
    """The runs that could not go on, in words."""
    found = [json.loads(path.read_text()) for path in sorted(folder.glob("*/*/result.json"))]
    return [
        f"- `{one['name']}`, seed {one['seed']}, round {one['rows'][-1]['step']}: {one['stopped']}"
        for one in found
        if one["stopped"]
    ]


def table(rows: list[Row]) -> str:
    """The rows in Markdown, best first."""
    lines = [
        (
            "| recipe | held-out pass@1 | 95 % | by seed | entropy | tokens of wrong answers |"
            " explained variance | s |"
        ),
        "| --- | --- | --- | --- | --- | --- | --- | --- |",
    ]
    for row in sorted(rows, key=lambda row: -row.pass_at_1):
        seeds = " ".join(f"{value:.3f}" for value in row.by_seed)
        explained = "–" if row.explained is None else f"{row.explained:.2f}"
        lines.append(
            f"| `{row.name}` | {row.pass_at_1:.3f} | {row.low:.3f}–{row.high:.3f} | {seeds} |"
            f" {row.entropy:.3f} | {row.wrong_tokens:.1f} | {explained} | {row.seconds:.0f} |"
        )
    return "\n".join(lines)


def main() -> None:
    """Play what is missing, then print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--folder", type=Path, default=Path("runs/recipes"))
    parser.add_argument("--seeds", default="0,1,2")
    parser.add_argument("--recipes", default="")
    parser.add_argument("--rounds", type=int, default=PLAN.rounds)
    given = parser.parse_args()
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))
    names = given.recipes.split(",") if given.recipes else [*RECIPES, *EXTRA]
    shared = warm_start(given.folder)
    for half in given.folder.glob("*/[0-9]*/"):
        if not (half / "result.json").exists() and time.time() - half.stat().st_mtime > 1800:
            shutil.rmtree(half)
    for seed in map(int, given.seeds.split(",")):
        for name in names:
            play(given.folder, shared, name, seed, given.rounds)
            print(f"{name} seed {seed} is there or in work", flush=True)
    print(table([row for name in names if (row := collect(given.folder, name))]))
    print("\n".join(["", "Stopped:", *stops(given.folder)]))


if __name__ == "__main__":
    main()

"""What is said of single parts of a recipe, each asked by runs that differ in nothing else.

`python -m benchmarks.experiments.claims [CLAIM ...] [--folder DIR] [--starts 0,1,2,3]
[--seeds 0,1] [--rate R]` plays what is missing in the folder and prints a table for each claim,
with the interval of each pair of arms; `--draw DIR` writes a picture for each. Warm starts are
those of `recipes` where both share a folder. It can be stopped and gone on with; `--table` only
prints.
"""

from __future__ import annotations

import argparse
import json
import os
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import combinations, product
from pathlib import Path
from statistics import fmean
from typing import Any

import torch

from agentrl.records.files import read_episodes
from agentrl.report.charts import Series
from agentrl.trainers.algorithms.advantages import dr_grpo, grpo, over_groups
from agentrl.trainers.algorithms.recipes import RECIPES
from benchmarks.experiments.drawing import drawing
from benchmarks.experiments.recipe_runs import ROUNDS, Job, Result, play, results
from benchmarks.experiments.recipes import DRAWS, drawn_means, interval

TONES = ("#2f6fb3", "#c2571a", "#3c8a4e", "#8a5bb0")


@dataclass(frozen=True)
class Arm:
    """A recipe with something changed; the empty change is shared by all claims."""

    name: str
    recipe: str = "grpo"
    change: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Claim:
    """A question: its arms, and what is drawn by rounds.

    Attributes:
        key: the metric of a round that is drawn.
        scale: the metric is divided by it, for a picture from 0 to 1.
        rate: learning rate of all arms.
        rounds: of each run.
    """

    question: str
    key: str
    arms: tuple[Arm, ...]
    scale: float = 1.0
    env: str = "calc-v0"
    rate: float = 3e-4
    rounds: int = ROUNDS

    def job(self, arm: Arm, start: int, seed: int) -> Job:
        """One run of an arm."""
        name = f"claim-{arm.name}".replace(" ", "-")
        return Job(self.env, arm.recipe, start, seed, self.rate, name, arm.change)


GRPO = Arm("grpo")


def _below_zero(rewards_G: Sequence[float | None]) -> tuple[float | None, ...]:
    """GRPO's advantages, those above 0 left out."""
    return tuple(None if one is None else min(one, 0.0) for one in grpo(rewards_G))


failures = replace(RECIPES["grpo"], name="failures", credit=(over_groups(_below_zero),))
"""GRPO that learns from failures alone."""


def _loss(**options: Any) -> dict[str, Any]:
    return {"loss": options}


_OFTEN = {"minibatches": 8}  # of four epochs: 32 steps a round, so that ratios leave the bounds
_STEPS = {"turn_weights": {"step": 1.0}}
CLAIMS = {
    "std": Claim(
        "Dividing by the deviation gives more weight to tasks that nearly always or never pass.",
        "pass/train",
        (GRPO, Arm("no std", change=_loss(credit=["dr_grpo"]))),
    ),
    "length": Claim(
        "The mean over each episode lets failing answers grow.",
        "length/sampled_mean",
        (
            GRPO,
            Arm("mean over tokens", change=_loss(aggregate="token")),
            Arm("constant", change=_loss(aggregate="constant")),
        ),
        scale=100.0,
    ),
    "clip": Claim(
        "A higher upper bound keeps entropy, where enough steps are off-policy.",
        "policy/entropy",
        (
            Arm("clip 0.2", change={**_OFTEN, **_loss(epochs=4, aggregate="token")}),
            Arm("clip 0.4", change={**_OFTEN, **_loss(epochs=4, aggregate="token", clip_high=0.4)}),
        ),
        scale=3.0,
        rate=1e-4,  # at 3e-4 so many steps learn nothing
    ),
    "group": Claim(
        "Of one budget of episodes, larger groups of fewer tasks learn more.",
        "pass/train",
        (
            Arm("groups of 4", change={"group_size": 4, "tasks_per_step": 32}),
            GRPO,
            Arm("groups of 32", change={"group_size": 32, "tasks_per_step": 4}),
        ),
    ),
    "signs": Claim(
        "Failures teach more than successes, and keep entropy.",
        "policy/entropy",
        (
            GRPO,
            Arm("successes only", change=_loss(negative_weight=0.0)),
            Arm("failures only", f"{__file__}:failures"),
        ),
        scale=3.0,
    ),
    "turns": Claim(
        "Credit for each of three steps learns more than their sum for the whole episode.",
        "pass/train",
        (
            Arm("outcome", change={}),
            Arm("sum of steps", change=_loss(**_STEPS)),
            Arm("each turn", "turn_grpo", _loss(**_STEPS)),
        ),
        env="subgoals",
        rate=1e-4,  # at 3e-4, and in 40 rounds, no arm gets beyond its warm starts
        rounds=120,
    ),
}


def table(folder: Path, claim: Claim, found: Sequence[Result]) -> str:
    """A row for each arm, and the interval of each difference in pass@1."""
    rows = {arm.name: runs for arm in claim.arms if (runs := _runs(claim, arm, found))}
    lines = [
        claim.question,
        "",
        "| arm | runs | pass@1 | 95 % | runs from, to | entropy | tokens | clipped low, high |",
        "| --- | --- | --- | --- | --- | --- | --- | --- |",
    ]
    if not rows:
        return "\n".join(lines)
    means = drawn_means(rows, DRAWS, 0)
    for name, runs in rows.items():
        values, (low, high) = sorted(one.pass_at_1 for one in runs), interval(means[name])
        entropy, tokens, below, above = (
            fmean(_late(folder, one.job, key) for one in runs)
            for key in (
                *("policy/entropy", "length/sampled_mean"),
                *("policy/clip_low", "policy/clip_high"),
            )
        )
        lines.append(
            f"| {name} | {len(runs)} | {fmean(values):.3f} | {low:.3f}–{high:.3f} |"
            f" {values[0]:.3f}, {values[-1]:.3f} | {entropy:.2f} | {tokens:.0f} |"
            f" {below:.2%}, {above:.2%} |"
        )
    lines.append("")
    for one, other in combinations(rows, 2):
        low, high = interval(means[one] - means[other])
        lines.append(f"- {one} less {other}: {low:+.3f} to {high:+.3f}")
    return "\n".join(lines)


def weights(folder: Path, found: Sequence[Result]) -> str:
    """Where the weight of groups of 8 goes, with and without the deviation, of the same rewards."""
    shares = {"with std": [0.0] * 9, "without": [0.0] * 9}
    for one in found:
        groups = defaultdict[tuple[int, str], list[float]](list)
        for episode in read_episodes(one.job.place(folder) / "run/episodes.jsonl").values():
            if episode.key.phase == "train" and episode.passed is not None:
                groups[episode.key.step, episode.task.id].append(float(episode.passed))
        for rewards_G in groups.values():
            for name, formula in (("with std", grpo), ("without", dr_grpo)):
                total = sum(abs(value or 0.0) for value in formula(rewards_G))
                shares[name][round(sum(rewards_G))] += total
    lines = ["| weight | " + " | ".join(f"{k} of 8" for k in range(1, 8)) + " |"]
    lines.append("| --- " * 8 + "|")
    for name, parts in shares.items():
        cells = [f"{part / (sum(parts) or 1.0):.1%}" for part in parts[1:8]]
        lines.append(f"| {name} | {' | '.join(cells)} |")
    return "\n".join(lines)


def picture(folder: Path, claim: Claim, found: Sequence[Result]) -> str:
    """The claim's metric by rounds: means and ranges of all runs."""
    lines = []
    for arm, tone in zip(claim.arms, TONES, strict=False):
        by_round = defaultdict[int, list[float]](list)
        for one in _runs(claim, arm, found):
            for row in _rounds(folder, one.job):
                if claim.key in row:
                    by_round[row["step"]].append(row[claim.key] / claim.scale)
        points = tuple((step, fmean(values)) for step, values in by_round.items())
        band = tuple((step, min(values), max(values)) for step, values in by_round.items())
        unit = f" (of {claim.scale:g})" if claim.scale != 1 else ""
        lines.append(Series(f"{arm.name}: {claim.key}{unit}", points, tone, band))
    return drawing(lines)


def _runs(claim: Claim, arm: Arm, found: Sequence[Result]) -> list[Result]:
    wanted = claim.job(arm, 0, 0)
    same = [
        one
        for one in found
        if (one.job.env, one.job.arm, one.job.rate) == (wanted.env, wanted.arm, wanted.rate)
    ]
    if other := [one.job for one in same if one.job.change != wanted.change]:
        raise ValueError(
            f"{arm.name} is {wanted.change} now, and was {other[0].change}: {other[0]}"
        )
    return same


def _late(folder: Path, job: Job, key: str) -> float:
    """Mean of the last five rounds that have it: a round without signal trains nothing."""
    return fmean([row[key] for row in _rounds(folder, job) if key in row][-5:])


def _rounds(folder: Path, job: Job) -> list[dict[str, Any]]:
    lines = (job.place(folder) / "run/metrics.jsonl").read_text().splitlines()
    return [row for line in lines if (row := json.loads(line))["step"] > 0]


def main() -> None:
    """Play what is missing, print the tables."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("claims", nargs="*", default=list(CLAIMS))
    parser.add_argument("--folder", type=Path, default=Path("runs/recipes"))
    parser.add_argument("--starts", default="0,1,2,3")
    parser.add_argument("--seeds", default="0,1")
    parser.add_argument("--rounds", type=int, help="of each run, instead of the claim's own")
    parser.add_argument("--rate", type=float, help="of all arms, instead of the claim's own")
    parser.add_argument("--draw", type=Path)
    parser.add_argument("--table", action="store_true")
    given = parser.parse_args()
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))
    claims = {name: CLAIMS[name] for name in given.claims}
    if given.rate:
        claims = {name: replace(claim, rate=given.rate) for name, claim in claims.items()}
    starts = [int(start) for start in given.starts.split(",")]
    if not given.table:
        for seed, start in product(given.seeds.split(","), starts):
            for claim, arm in ((one, arm) for one in claims.values() for arm in one.arms):
                job, rounds = claim.job(arm, start, int(seed)), given.rounds or claim.rounds
                is_there = play(given.folder, job, rounds)
                there = "there" if is_there else "another process is at it"
                print(f"{arm.name} start {start} seed {seed}: {there}", flush=True)
    found = [one for one in results(given.folder) if one.job.arm and one.job.start in starts]
    for name, claim in claims.items():
        print(f"\n{table(given.folder, claim, found)}")
        if name == "std":
            print(f"\n{weights(given.folder, _runs(claim, GRPO, found))}")
        if given.draw:
            drawn = picture(given.folder, claim, found)
            (given.draw / f"claim_{name}.svg").write_text(drawn, encoding="utf-8")


if __name__ == "__main__":
    main()

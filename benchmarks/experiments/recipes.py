"""Which recipe learns more from the same episodes? Warm starts, runs and tasks are all drawn anew.

`python -m benchmarks.experiments.recipes [--folder DIR] [--env calc-v0] [--recipes grpo,ppo]
[--starts 0,1,2,3] [--seeds 0,1] [--rounds 40]` tunes the learning rate of each recipe on a warm
start and seeds of their own, plays what is missing in the folder, and prints the table of
docs/experiments.md. An interrupted run resumes; `--table` only prints. Several processes may share
a folder.
"""

from __future__ import annotations

import argparse
import os
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from statistics import fmean

import numpy as np
import torch

from benchmarks.experiments.recipe_runs import PLANS, ROUNDS, Job, Result, play, results

TEN = (
    *("grpo", "dr_grpo", "dapo", "gspo", "cispo", "rloo"),
    *("reinforce++", "reinforce++_baseline", "ppo", "maxrl"),
)
RATES = (1e-4, 3e-4, 1e-3)
TUNED_ON = (100, (100, 101))
"""The warm start and the seeds on which rates are chosen; no row of the table has them."""
DRAWS = 4000


def drawn_means(
    found: Mapping[str, Sequence[Result]], draws: int, seed: int
) -> dict[str, np.ndarray]:
    """Recipe -> means of pass@1 over warm starts, runs of each, and tasks of each, all drawn with
    replacement (draws,). Warm starts that a recipe has no run of are left out, as are tasks that
    a run of the same seed has lost.

    A hierarchical bootstrap (Davison and Hinkley 1997, section 3.8): an interval from it is for
    other warm starts and other runs as well as other tasks. The same warm starts and tasks are
    drawn for all recipes, so that differences of two are paired; runs are each recipe's own.
    Each seed has held-out tasks of its own.

    Raises:
        ValueError: no warm start has a run of every recipe.
    """
    chance = np.random.default_rng(seed)
    starts = sorted(set.intersection(*({one.job.start for one in runs} for runs in found.values())))
    if not starts:
        raise ValueError(f"no warm start has a run of every one of {', '.join(found)}")
    passed_T = {start: _outcomes(found, start) for start in starts}
    means = {name: np.zeros(draws) for name in found}
    for draw in range(draws):
        for start in map(int, chance.choice(starts, len(starts))):
            sizes = {seed: len(row) for rows in passed_T[start].values() for seed, row in rows}
            tasks = {seed: chance.integers(size, size=size) for seed, size in sizes.items()}
            for name, rows in passed_T[start].items():
                picked = [rows[one] for one in chance.integers(len(rows), size=len(rows))]
                value = fmean(float(row[tasks[seed]].mean()) for seed, row in picked)
                means[name][draw] += value / len(starts)
    return means


def _outcomes(
    found: Mapping[str, Sequence[Result]], start: int
) -> dict[str, list[tuple[int, np.ndarray]]]:
    """Recipe -> of each of its runs from a warm start the seed, and which held-out tasks passed
    (tasks,): runs of one seed have the same tasks, in one order, those that each has a score of.
    """
    of = [(name, one) for name, runs in found.items() for one in runs if one.job.start == start]
    tasks = dict[int, set[str]]()
    for _, one in of:
        tasks[one.job.seed] = tasks.get(one.job.seed, set(one.passed)) & set(one.passed)
    rows = defaultdict[str, list[tuple[int, np.ndarray]]](list)
    for name, one in of:
        passed = [one.passed[task] for task in sorted(tasks[one.job.seed])]
        rows[name].append((one.job.seed, np.array(passed, float)))
    return rows


def interval(means: np.ndarray) -> tuple[float, float]:
    """The middle 95 %."""
    low, high = np.quantile(means, (0.025, 0.975))
    return float(low), float(high)


def best_rates(found: Sequence[Result]) -> dict[str, float]:
    """Recipe -> the rate with the highest mean pass@1 of the runs on which rates are tuned; a run
    that stopped early counts with what it had, and a rate of which a run learnt nothing is out.
    """
    tried = defaultdict[tuple[str, float], list[float]](list)
    for one in found:
        if one.job.start == TUNED_ON[0]:
            tried[one.job.recipe, one.job.rate].append(one.pass_at_1)
    best = dict[str, float]()
    for (recipe, rate), values in sorted(tried.items(), key=lambda item: fmean(item[1])):
        if len(values) == len(TUNED_ON[1]):
            best[recipe] = rate
    return best


def table(found: Sequence[Result], rates: Mapping[str, float]) -> str:
    """One row per recipe in Markdown, best first, and which of them can be told apart."""
    rows = {
        name: [
            one
            for one in found
            if one.job.recipe == name and one.job.start != TUNED_ON[0] and one.job.rate == rate
        ]
        for name, rate in rates.items()
    }
    rows = {name: runs for name, runs in rows.items() if runs}
    if not rows:
        return "no recipe has all of its runs yet"
    means = drawn_means(rows, DRAWS, 0)
    order = sorted(rows, key=lambda name: -fmean(one.pass_at_1 for one in rows[name]))
    lines = [
        "| recipe | rate | runs | pass@1 | 95 % | runs from, to | episodes | rounds clipped |"
        " entropy passed, failed | tokens failed | stopped |",
        "| --- | --- | --- | --- | --- | --- | --- | --- | --- | --- | --- |",
    ]
    for name in order:
        lines.append(_row(name, rates[name], rows[name], interval(means[name])))
    return "\n".join([*lines, "", *_apart(order, means)])


def _row(name: str, rate: float, runs: Sequence[Result], ci95: tuple[float, float]) -> str:
    values = sorted(one.pass_at_1 for one in runs)
    surprise = [
        _mean([getattr(one, f"surprise_{kind}") for one in runs]) for kind in ("passed", "failed")
    ]
    return (
        f"| `{name}` | {rate:g} | {len(runs)} | {fmean(values):.3f} | {ci95[0]:.3f}–{ci95[1]:.3f} |"
        f" {values[0]:.3f}, {values[-1]:.3f} | {fmean(one.episodes for one in runs):.0f} |"
        f" {fmean(one.clipped for one in runs):.0%} | {', '.join(surprise)} |"
        f" {_mean([one.failed_tokens for one in runs])} |"
        f" {sum(bool(one.stopped) for one in runs)} |"
    )


def _mean(values: Sequence[float | None]) -> str:
    there = [value for value in values if value is not None]
    return f"{fmean(there):.2f}" if there else "–"


def _apart(order: Sequence[str], means: Mapping[str, np.ndarray]) -> list[str]:
    """Pairs whose difference has an interval without 0; all others cannot be told apart."""
    lines, pairs = ["Told apart (95 % interval of the difference without 0):"], 0
    for place, better in enumerate(order):
        for worse in order[place + 1 :]:
            pairs += 1
            low, high = interval(means[better] - means[worse])
            if low > 0:
                lines.append(f"- `{better}` above `{worse}`: {low:+.3f} to {high:+.3f}")
    said = f"{len(lines) - 1} of {pairs} pairs; no correction for so many comparisons."
    return [*lines, "", said]


def main() -> None:
    """Tune, play what is missing, print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--folder", type=Path, default=Path("runs/recipes"))
    parser.add_argument("--env", default="calc-v0", choices=PLANS)
    parser.add_argument("--recipes", default=",".join(TEN))
    parser.add_argument("--starts", default="0,1,2,3")
    parser.add_argument("--seeds", default="0,1")
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    parser.add_argument("--table", action="store_true")
    given = parser.parse_args()
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))
    names = given.recipes.split(",")
    if not given.table:
        start, seeds = TUNED_ON
        for seed in seeds:
            for name in names:
                for rate in RATES:
                    job = Job(given.env, name, start, seed, rate)
                    if not _has_failed(_found(given.folder, given.env), job):
                        _say(given.folder, job, given.rounds)
    found = _found(given.folder, given.env)
    rates = best_rates(found)
    if not given.table:
        for seed in map(int, given.seeds.split(",")):
            for start in map(int, given.starts.split(",")):
                for name in (name for name in names if name in rates):
                    job = Job(given.env, name, start, seed, rates[name])
                    _say(given.folder, job, given.rounds)
        found = _found(given.folder, given.env)
    print(table(found, rates))


def _has_failed(found: Sequence[Result], job: Job) -> bool:
    """Whether an earlier run at this rate learnt nothing: it is not tried on another seed."""
    same = [one for one in found if replace(one.job, seed=job.seed) == job]
    return any(one.pass_at_1 <= one.before for one in same)


def _found(folder: Path, env: str) -> list[Result]:
    """The runs of recipes as they are; those of `claims` change something and have a name of it."""
    return [one for one in results(folder) if one.job.env == env and not one.job.arm]


def _say(folder: Path, job: Job, rounds: int) -> None:
    there = "there" if play(folder, job, rounds) else "another process is at it"
    print(f"{job.recipe} start {job.start} seed {job.seed} rate {job.rate:g}: {there}", flush=True)


if __name__ == "__main__":
    main()

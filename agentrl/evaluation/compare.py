"""Two evaluations of the same tasks under the same budget: does one policy solve more?

Tasks are paired, so what makes a task hard drops out of the difference; see `stats.paired`.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

import numpy as np

from agentrl.errors import ConfigError
from agentrl.evaluation.plan import PLAN, unlike
from agentrl.evaluation.stats import paired, paired_gaps, pass_at_k
from agentrl.evaluation.summary import task_counts
from agentrl.records.files import read_episodes
from agentrl.trajectory import Episode

EQUIVALENT = 0.05
"""Difference of pass@k below which two policies count as equal. "Sharpened" and "broader" claim
that two policies are equal at one end of the curve; the interval there must stay within this bound.
"""


@dataclass(frozen=True)
class _Run:
    """A recorded evaluation."""

    folder: Path
    result: Mapping[str, Any]
    prints: Mapping[str, str]
    episodes: Sequence[Episode]


def compare_runs(first: Path, second: Path) -> dict[str, Any]:
    """Compare two evaluations task by task, ready for JSON.

    Returns:
        The fields of `Paired`; `n_tasks` that both scored; `only_first` and `only_second`, ids of
        tasks of which more than half of one run's samples were solved and not of the other's;
        `n_unpaired`, tasks of each run that the other lacks or that have no scored sample; `curve`,
        pass@k of both at each k; and `says`, that curve in words.

    Raises:
        ConfigError: a folder holds no complete evaluation, the budgets or tasks differ, or no task
            is shared.
    """
    runs = _read(first), _read(second)
    _check_alike(*runs)
    counts = [
        {task: pair for task, pair in task_counts(run.episodes).items() if pair[0]} for run in runs
    ]
    shared = sorted(counts[0].keys() & counts[1].keys())
    if not shared:
        raise ConfigError(
            f"{first} and {second} share no task that both scored: evaluate both on the same"
            " environment with the same settings, split, seed and limit"
        )
    first_T, second_T = ([each[task][1] / each[task][0] for task in shared] for each in counts)
    solved_first = {task for task, share in zip(shared, first_T, strict=True) if share > 0.5}
    solved_second = {task for task, share in zip(shared, second_T, strict=True) if share > 0.5}
    curve = _curve(counts, runs[0].result["budget"]["samples"])
    return {
        "first": _name_run(runs[0]),
        "second": _name_run(runs[1]),
        "budget": runs[0].result["budget"],
        "n_tasks": len(shared),
        **asdict(paired(first_T, second_T)),
        "only_first": sorted(solved_first - solved_second),
        "only_second": sorted(solved_second - solved_first),
        "n_unpaired": [len({e.task.id for e in run.episodes} - set(shared)) for run in runs],
        "n_failed_infra": [run.result["n_failed_infra"] for run in runs],
        "curve": curve,
        "says": curve_words(curve),
    }


def curve_words(rows: Sequence[Mapping[str, Any]]) -> str:
    """What a pass@k curve says: sharpening solves the same tasks more often, expansion others too.

    A policy that is ahead at k = 1 and equal at the largest k has become surer of what the other
    finds with more draws (Yue et al. 2025, arXiv 2504.13837). "Ahead" is an interval above 0;
    "equal" an interval that ends within `EQUIVALENT`. An interval that merely holds 0 says neither.
    """
    if len(rows) < 2:
        return "one k only: evaluate both with several --samples to see more"
    one, many = rows[0], rows[-1]
    (low_one, high_one), (low_many, high_many) = one["ci95"], many["ci95"]
    shown = " and ".join(f"{row['difference']:+.3f} at k={row['k']}" for row in (one, many))
    if low_one > 0 and low_many > 0:
        return f"expanded: the second solves more at every number of draws ({shown})"
    if low_one > 0 and high_many < EQUIVALENT:
        return f"sharpened: the second is ahead at one draw and not at many ({shown})"
    if low_many > 0 and high_one < EQUIVALENT:
        return f"broader: the second is ahead at many draws and not at one ({shown})"
    if low_one > 0:
        return f"ahead at one draw; at many draws the two are not told apart ({shown})"
    if low_many > 0:
        return f"ahead at many draws; at one draw the two are not told apart ({shown})"
    if high_one < 0 or high_many < 0:
        return f"behind ({shown})"
    return f"not told apart ({shown})"


def _curve(counts: Sequence[Mapping[str, tuple[int, int]]], most: int) -> list[dict[str, Any]]:
    """pass@k of both at 1, 2, 4, … and `most`, over the tasks with that many scored samples."""
    full = [task for task in counts[0] if all(each.get(task, (0, 0))[0] >= most for each in counts)]
    if not full:
        return []
    rows = []
    for k in sorted({min(2**power, most) for power in range(most.bit_length() + 1)}):
        first_T, second_T = ([pass_at_k(*each[task], k) for task in full] for each in counts)
        gaps = paired_gaps(np.subtract(second_T, first_T))
        rows.append(
            {
                "k": k,
                "first": fmean(first_T),
                "second": fmean(second_T),
                "difference": gaps.difference,
                "ci95": gaps.ci95,
            }
        )
    return rows


def _check_alike(first: _Run, second: _Run) -> None:
    names = unlike(first.result["budget"], second.result["budget"])
    if names:
        shown = [f"{run.result['budget'].get(names[0])!r:.60}" for run in (first, second)]
        raise ConfigError(
            f"{first.folder} and {second.folder} had unlike budgets ({', '.join(names)};"
            f" {names[0]} is {shown[0]} and {shown[1]}): evaluate both with the same options"
        )
    for task in sorted(first.prints.keys() & second.prints.keys()):
        if first.prints[task] != second.prints[task]:
            raise ConfigError(
                f"task {task!r} of {first.folder} is another one than in {second.folder}: evaluate"
                " both on the same tasks, with the same --seed"
            )


def _read(folder: Path) -> _Run:
    for name in ("eval.json", PLAN, "episodes.jsonl"):
        if not (folder / name).is_file():
            raise ConfigError(f"{folder} holds no {name}: give the --out folder of an evaluation")
    result, plan = (_json(folder / name) for name in ("eval.json", PLAN))
    if unsaid := sorted({"budget", "task_ids"} - result.keys()):
        raise ConfigError(
            f"{folder}/eval.json has no {unsaid[0]}: run the same `agentrl eval` with that --out"
            " again, which plays nothing anew"
        )
    if result["n_missing"]:
        raise ConfigError(
            f"{folder} is not complete ({result['n_missing']} samples missing,"
            f" {result['stopped'] or 'cut short'}): run the same `agentrl eval` again to go on"
        )
    samples, planned = result["budget"]["samples"], set(result["task_ids"])
    latest: dict[tuple[str, int], Episode] = {}
    for episode in read_episodes(folder / "episodes.jsonl").values():
        place = episode.task.id, episode.key.sample
        if place[0] not in planned or episode.key.sample >= samples:
            continue  # recorded by another --limit or --samples: eval.json is not of it
        if place not in latest or episode.reward is not None:
            latest[place] = episode
    prints = {task: made for task, made in plan.get("tasks", {}).items() if task in planned}
    return _Run(folder, result, prints, list(latest.values()))


def _json(path: Path) -> dict[str, Any]:
    try:
        row: dict[str, Any] = json.loads(path.read_bytes())
    except ValueError as error:
        raise ConfigError(f"{path} is damaged ({error}): evaluate again") from error
    return row


def _name_run(run: _Run) -> dict[str, Any]:
    safety = run.result.get("policy_file")
    named = {"run": str(run.folder), "policy": run.result["policy"]}
    return {**named, "policy_file": safety} if safety else named

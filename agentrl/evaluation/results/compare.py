"""Two evaluations of the same tasks under the same budget: does one policy solve more?

Tasks are paired, so what makes a task hard drops out of the difference. All samples of a task
count as one observation, its share of solved samples, because samples of one task are not
independent draws of tasks.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import NormalDist
from typing import Any

import numpy as np

from agentrl.errors import ConfigError
from agentrl.evaluation.budget import unlike
from agentrl.evaluation.passk import Interval, bootstrap_ci, pass_at_k, task_counts, wilson_ci
from agentrl.evaluation.resume import PLAN
from agentrl.records.files import read_episodes
from agentrl.trajectory import Episode

FLIPS = 10_000
"""Random changes of sign behind a p-value, where tasks have several samples."""

POWER = 0.8
"""Chance at which the smallest difference is stated that would have been found."""

_LEVEL = 0.05


@dataclass(frozen=True)
class Paired:
    """What the same T tasks say of two policies.

    Attributes:
        difference: mean over tasks of the second's share of solved samples minus the first's.
        ci95: 95 % interval of it over the draw of tasks, by the paired bootstrap.
        p_value: of the hypothesis that the two are alike, two-sided.
        test: how the p-value was found.
        detectable: the smallest true difference that is found with probability `POWER` at the 5 %
            level, given how much these tasks differ.
    """

    difference: float
    ci95: Interval
    p_value: float
    test: str
    detectable: float | None


@dataclass(frozen=True)
class _Run:
    """A recorded evaluation."""

    folder: Path
    result: Mapping[str, Any]
    prints: Mapping[str, str]
    episodes: Sequence[Episode]


def paired(first_T: Sequence[float], second_T: Sequence[float], *, seed: int = 0) -> Paired:
    """Compare shares of solved samples of the same T tasks.

    Where every share is 0 or 1 the test is McNemar's exact one (1947): of the tasks that one of the
    two solved alone, each side has half by chance. Otherwise signs of the differences are changed
    at random (Fisher's test by permutation), with `FLIPS` draws; there p is at least 1 / (1 +
    FLIPS).

    Raises:
        ConfigError: no tasks, or not as many on both sides.
    """
    if not first_T or len(first_T) != len(second_T):
        raise ConfigError(
            f"{len(first_T)} and {len(second_T)} tasks cannot be paired: give the same tasks of"
            " both, at least one"
        )
    gap_T = np.asarray(second_T, dtype=np.float64) - np.asarray(first_T, dtype=np.float64)
    gains, losses = int((gap_T > 0).sum()), int((gap_T < 0).sum())
    if set(np.unique(np.abs(gap_T))) <= {0.0, 1.0}:
        test, p_value = "McNemar, exact", mcnemar(gains, losses)
    else:
        test, p_value = f"sign flips, {FLIPS}", _sign_flips(gap_T, seed)
    return Paired(
        float(gap_T.mean()),
        _interval(gap_T, seed),
        p_value,
        test,
        _detectable(gap_T),
    )


def mcnemar(gains: int, losses: int) -> float:
    """Two-sided exact p-value of McNemar's test: twice the smaller tail of Binomial(gains +
    losses, 1/2), at most 1.
    """
    total = gains + losses
    tail = sum(math.comb(total, count) for count in range(min(gains, losses) + 1))
    return min(1.0, 2 * tail / (1 << total))


def _sign_flips(gap_T: np.ndarray[Any, Any], seed: int) -> float:
    """Share of sign changes whose mean is at least as far from zero, the observed one included."""
    rng, seen, extreme = np.random.default_rng(seed), abs(gap_T.sum()) - 1e-9, 0
    for start in range(0, FLIPS, 500):
        signs = rng.integers(0, 2, (min(500, FLIPS - start), len(gap_T))) * 2 - 1
        extreme += int((np.abs(signs @ gap_T) >= seen).sum())
    return float((1 + extreme) / (1 + FLIPS))


def _interval(gap_T: np.ndarray[Any, Any], seed: int) -> Interval:
    """Where every task differs alike a bootstrap has no width; then tasks that were not drawn may
    differ otherwise, as many as `wilson_ci` admits.
    """
    if len(set(gap_T)) == 1:
        gap, (_, others) = float(gap_T[0]), wilson_ci(0, len(gap_T))
        return gap - others * (1 + gap), gap + others * (1 - gap)
    return bootstrap_ci(gap_T.tolist(), seed=seed)


def _detectable(gap_T: np.ndarray[Any, Any]) -> float | None:
    """(z_0.975 + z_POWER) * s / sqrt(T), s the standard deviation of the differences; None where
    all are equal.
    """
    if len(set(gap_T)) < 2:
        return None
    normal = NormalDist()
    z = normal.inv_cdf(1 - _LEVEL / 2) + normal.inv_cdf(POWER)
    return float(z * gap_T.std(ddof=1) / math.sqrt(len(gap_T)))


def compare_runs(first: Path, second: Path, *, seed: int = 0) -> dict[str, Any]:
    """Compare two evaluations task by task, ready for JSON.

    Returns:
        The fields of `Paired`; `n_tasks` that both scored; `only_first` and `only_second`, ids of
        tasks that more than half of one run's samples solved and not of the other's; `n_unpaired`
        tasks of each that one run alone has, or that have no scored sample; `curve`, pass@k of both
        at each k; and `says`, what that curve says in words.

    Raises:
        ConfigError: a folder holds no whole evaluation, the budgets or tasks are unlike, or no task
            is shared.
    """
    runs = _read(first), _read(second)
    _check_alike(*runs)
    counts = [
        {task: found for task, found in task_counts(run.episodes).items() if found[0]}
        for run in runs
    ]
    shared = sorted(counts[0].keys() & counts[1].keys())
    if not shared:
        raise ConfigError(
            f"{first} and {second} share no task that both scored: evaluate both on the same"
            " environment with the same settings, split, seed and limit"
        )
    shares = [[each[task][1] / each[task][0] for task in shared] for each in counts]
    won = [
        {task for task, share in zip(shared, each, strict=True) if share > 0.5} for each in shares
    ]
    curve = _curve(counts, runs[0].result["budget"]["samples"], seed)
    return {
        "first": _named(runs[0]),
        "second": _named(runs[1]),
        "budget": runs[0].result["budget"],
        "n_tasks": len(shared),
        **vars(paired(*shares, seed=seed)),
        "only_first": sorted(won[0] - won[1]),
        "only_second": sorted(won[1] - won[0]),
        "n_unpaired": [len({e.task.id for e in run.episodes} - set(shared)) for run in runs],
        "n_failed_infra": [run.result["n_failed_infra"] for run in runs],
        "curve": curve,
        "says": curve_words(curve),
    }


def curve_words(rows: Sequence[Mapping[str, Any]]) -> str:
    """What the rows of a curve say: sharpening solves the same tasks more often, expansion others
    too.

    A policy that is ahead at k = 1 and not at the largest k has become surer of what the other
    finds with more draws (Yue et al. 2025, arXiv 2504.13837). Ahead is what the interval of the
    difference shows.
    """
    if len(rows) < 2:
        return "one k only: evaluate both with several --samples to see more"
    low, high = rows[0], rows[-1]
    ahead = [row["ci95"][0] > 0 for row in (low, high)]
    behind = [row["ci95"][1] < 0 for row in (low, high)]
    told = " and ".join(f"{row['difference']:+.3f} at k={row['k']}" for row in (low, high))
    if all(ahead):
        return f"expanded: the second solves more at every number of draws ({told})"
    if ahead[0]:
        return f"sharpened: the second is ahead at one draw and not at many ({told})"
    if ahead[1]:
        return f"broader: the second is ahead at many draws and not at one ({told})"
    return f"{'behind' if any(behind) else 'no difference that the intervals show'} ({told})"


def _curve(counts: Sequence[Mapping[str, tuple[int, int]]], most: int, seed: int) -> list[Any]:
    """pass@k of both at 1, 2, 4, ... and `most`, over the tasks with so many scored samples in
    both.
    """
    full = [
        task for task in counts[0] if all(task in each and each[task][0] >= most for each in counts)
    ]
    rows = []
    for k in (
        sorted({min(2**power, most) for power in range(most.bit_length() + 1)}) if full else ()
    ):
        first_T, second_T = ([pass_at_k(*each[task], k) for task in full] for each in counts)
        gap_T = np.asarray(second_T) - np.asarray(first_T)
        rows.append(
            {
                "k": k,
                "first": math.fsum(first_T) / len(full),
                "second": math.fsum(second_T) / len(full),
                "difference": float(gap_T.mean()),
                "ci95": _interval(gap_T, seed),
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


def _named(run: _Run) -> dict[str, Any]:
    safety = run.result.get("policy_file")
    named = {"run": str(run.folder), "policy": run.result["policy"]}
    return {**named, "policy_file": safety} if safety else named

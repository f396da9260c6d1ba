"""pass@k, pass^k and their intervals: how sure a score is, from counts of solved samples.

Letters: n scored samples of one task, c of them solved, k samples that a user would draw.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import NormalDist
from typing import Any

import numpy as np

from agentrl.errors import ConfigError
from agentrl.evaluation.outcomes import failed_at_reset, per_success, tool_counts, total_usd
from agentrl.evaluation.votes import chosen
from agentrl.trajectory import Episode

Interval = tuple[float, float]
TaskCounts = Mapping[str, tuple[int, int]]
SIDE_EFFECT_KINDS = 20
SIDE_EFFECT_EPISODES = 100
COUNTED = (
    *("turns", "tool_calls", "tool_errors", "bad_calls", "denied"),
    *("sampled_tokens", "prompt_tokens", "wall_s"),
)
"""Counts of an episode whose means over scored episodes are told."""


@dataclass(frozen=True)
class PassAt:
    """pass@k over tasks.

    Attributes:
        value: mean over the tasks with n ≥ k samples; None where there is no such task.
        ci95: 95 % interval of `value` over the draw of tasks; None with it.
        n_tasks: tasks that the mean runs over.
        n_excluded: tasks left out because they have fewer than k scored samples.
    """

    value: float | None
    ci95: Interval | None
    n_tasks: int
    n_excluded: int


def pass_at_k(n: int, c: int, k: int) -> float:
    """Probability that at least one of k draws without replacement is solved: 1 − C(n−c,k)/C(n,k).

    The unbiased estimator of Chen et al. 2021 (arXiv 2107.03374). The quotient of two exact
    integers is rounded once, so nothing cancels however large n is.

    Raises:
        ConfigError: not 0 ≤ c ≤ n, or not 1 ≤ k ≤ n.
    """
    _check_counts(n, c, k)
    draws = math.comb(n, k)
    return (draws - math.comb(n - c, k)) / draws


def pass_hat_k(n: int, c: int, k: int) -> float:
    """Probability that all of k draws without replacement are solved: C(c,k)/C(n,k), called pass^k.

    The reliability estimator of Yao et al. 2024 (tau-bench, arXiv 2406.12045).

    Raises:
        ConfigError: not 0 ≤ c ≤ n, or not 1 ≤ k ≤ n.
    """
    _check_counts(n, c, k)
    return math.comb(c, k) / math.comb(n, k)


def pass_at(
    counts: TaskCounts,
    ks: Iterable[int],
    *,
    estimator: Callable[[int, int, int], float] = pass_at_k,
    seed: int = 0,
) -> dict[int, PassAt]:
    """Mean of an estimator over tasks, for each k; a task with n < k is excluded and counted, never
    padded.

    Args:
        counts: task id → (n, c).
        ks: numbers of draws.
        estimator: `pass_at_k` or `pass_hat_k`.
        seed: of the bootstrap.

    Raises:
        ConfigError: a count is impossible, or a k exceeds the samples of every task.
    """
    most = max((n for n, _ in counts.values()), default=0)
    result = {}
    for k in ks:
        if k > most:
            raise ConfigError(
                f"k={k} exceeds the {most} samples of every task; sample more or ask for a"
                " smaller k"
            )
        result[k] = _mean_over_tasks(counts, k, estimator, seed)
    return result


def bootstrap_ci(
    values: Sequence[float], *, level: float = 0.95, resamples: int = 2000, seed: int = 0
) -> Interval:
    """Percentile bootstrap interval of the mean of `values`, one per task, resampled with
    replacement.

    Where all values are equal the interval is that point, and of few values that are 0 or 1 it
    reaches the end of the scale by chance; `wilson_ci` says more there.

    Raises:
        ConfigError: no values, or level not inside (0, 1).
    """
    _check_level(level)
    if not values:
        raise ConfigError("a bootstrap interval needs at least one value; got none")
    sample = np.asarray(values, dtype=np.float64)
    draw = np.random.default_rng(seed).integers
    means = [sample[draw(0, len(sample), len(sample))].mean() for _ in range(resamples)]
    low, high = np.quantile(means, [(1 - level) / 2, (1 + level) / 2])
    return float(low), float(high)


def wilson_ci(successes: int, trials: int, *, level: float = 0.95) -> Interval:
    """Wilson score interval of one proportion (Wilson 1927); honest at 0 and 1, where a bootstrap
    has no width.

    Raises:
        ConfigError: not 0 ≤ successes ≤ trials, no trials, or level not inside (0, 1).
    """
    _check_level(level)
    if trials < 1 or not 0 <= successes <= trials:
        raise ConfigError(
            f"{successes} successes in {trials} trials is impossible; need 0 <= successes <= trials"
            " >= 1"
        )
    z = NormalDist().inv_cdf((1 + level) / 2)
    share, spread = successes / trials, z * z / trials
    middle = (share + spread / 2) / (1 + spread)
    half = math.sqrt(share * (1 - share) * spread + spread * spread / 4) / (1 + spread)
    low = 0.0 if successes == 0 else max(0.0, middle - half)
    high = 1.0 if successes == trials else min(1.0, middle + half)
    return low, high


def task_counts(episodes: Iterable[Episode]) -> dict[str, tuple[int, int]]:
    """Task id → (n, c) over scored episodes; a task whose episodes all failed has n = 0 and is
    still listed.
    """
    counts: dict[str, tuple[int, int]] = {}
    for episode in episodes:
        n, c = counts.get(episode.task.id, (0, 0))
        counts[episode.task.id] = (n + (episode.passed is not None), c + (episode.passed is True))
    return counts


def summarize(
    episodes: Iterable[Episode],
    ks: Iterable[int] = (1,),
    *,
    seed: int = 0,
    samples: int | None = None,
) -> dict[str, Any]:
    """Statistics of an evaluation, ready for JSON.

    Episodes that infrastructure failed count in `n_episodes`, `n_failed_infra`, `end_reasons`,
    `tools` and `cost` (they were paid for), and in nothing else. Of episodes with one key the last
    counts. Keys of `pass_at`, `pass_hat`, `ci95`, `n_excluded` and of
    each part of `chosen` (see `votes`) are k as text; a value is None
    where failures left no task with k scored samples.

    Args:
        samples: planned for each task, where fewer may have been played; by default what was.

    Raises:
        ConfigError: a k exceeds the samples, failed ones included, of every task.
    """
    latest = list({episode.key: episode for episode in episodes}.values())
    scored = [episode for episode in latest if episode.reward is not None]
    counts, ks = task_counts(latest), sorted(set(ks))
    played = samples or max(Counter(episode.task.id for episode in latest).values(), default=0)
    if latest and ks and ks[-1] > played:
        raise ConfigError(
            f"k={ks[-1]} exceeds the {played} samples of every task; sample more or ask for a"
            " smaller k"
        )
    at = {str(k): _mean_over_tasks(counts, k, pass_at_k, seed) for k in ks}
    return {
        "pass_at": {k: result.value for k, result in at.items()},
        "ci95": {k: result.ci95 for k, result in at.items()},
        "pass_hat": {str(k): _mean_over_tasks(counts, k, pass_hat_k, seed).value for k in ks},
        "chosen": chosen(scored, ks),
        "n_excluded": {k: result.n_excluded for k, result in at.items()},
        "n_tasks": len(counts),
        "n_episodes": len(latest),
        "n_failed_infra": len(latest) - len(scored),
        "n_failed_reset": sum(map(failed_at_reset, latest)),
        "mean_reward": _mean(
            [episode.score.value for episode in scored if episode.score.value is not None]
        ),
        "mean": {
            name: _mean([getattr(episode.counts, name) for episode in scored]) for name in COUNTED
        },
        "side_effects": _side_effects(scored),
        "cost": (
            {
                name: sum(getattr(episode.counts, name) for episode in latest)
                for name in ("turns", "tool_calls", "sampled_tokens", "prompt_tokens", "wall_s")
            }
            | {"usd": total_usd(latest)}
        ),
        "per_success": per_success(latest),
        "tools": tool_counts(latest),
        "end_reasons": dict(sorted(Counter(episode.end.value for episode in latest).items())),
    }


def _mean_over_tasks(
    counts: TaskCounts, k: int, estimator: Callable[[int, int, int], float], seed: int
) -> PassAt:
    values = [estimator(n, c, k) for n, c in counts.values() if n >= k]
    excluded = len(counts) - len(values)
    if not values:
        return PassAt(None, None, 0, excluded)
    if set(values) <= {0.0, 1.0}:
        interval = wilson_ci(int(sum(values)), len(values))
    else:
        interval = bootstrap_ci(values, seed=seed)
    return PassAt(_mean(values), interval, len(values), excluded)


def _side_effects(episodes: Sequence[Episode]) -> dict[str, Any] | None:
    """Counts over the episodes in which side effects were measured; None if there are none."""
    measured = [episode for episode in episodes if episode.side_effects is not None]
    if not measured:
        return None
    changed = [episode for episode in measured if episode.side_effects]
    kinds = Counter(kind for episode in changed for kind in (episode.side_effects or {}).values())
    top = dict(kinds.most_common(SIDE_EFFECT_KINDS))
    if other := kinds.total() - sum(top.values()):
        top["(other)"] = other
    return {
        "measured": len(measured),
        "episodes": len(changed),
        "rate": len(changed) / len(measured),
        "ci95": wilson_ci(len(changed), len(measured)),
        "total": kinds.total(),
        "kinds": top,
        "where": [
            {"task": episode.task.id, "sample": episode.key.sample, "changed": episode.side_effects}
            for episode in changed[:SIDE_EFFECT_EPISODES]
        ],
    }


def _mean(values: Sequence[float]) -> float | None:
    return math.fsum(values) / len(values) if values else None


def _check_counts(n: int, c: int, k: int) -> None:
    if not 0 <= c <= n:
        raise ConfigError(f"c={c} solved of n={n} samples is impossible; counts need 0 <= c <= n")
    if not 1 <= k <= n:
        raise ConfigError(f"k={k} does not go with n={n} samples; choose 1 <= k <= n")


def _check_level(level: float) -> None:
    if not 0 < level < 1:
        raise ConfigError(
            f"level={level} is no confidence level; choose one inside (0, 1), such as 0.95"
        )

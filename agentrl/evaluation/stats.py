"""Statistics of evaluations: estimators, intervals and tests. Tasks are the unit throughout.

Samples of one task are not independent draws of tasks, so every interval and test here treats a
task as one observation. Letters: T tasks, n scored samples of one task, c of them solved, k samples
that a user would draw. `benchmarks/experiments/intervals.py` measures how well all of this holds.
"""

from __future__ import annotations

import itertools
import math
import random
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean

import numpy as np
from numpy.typing import ArrayLike, NDArray

from agentrl.errors import ConfigError

Interval = tuple[float, float]
TaskCounts = Mapping[str, tuple[int, int]]
Estimator = Callable[[int, int, int], float]

LEVEL = 0.95
POWER = 0.8
"""Probability with which `Paired.detectable` would be found."""

MAJORITY_DRAWS = 2000
"""Draws over which a majority is averaged where enumerating all of them would take longer."""


@dataclass(frozen=True)
class PassAt:
    """pass@k over tasks.

    Attributes:
        value: mean over the tasks with n ≥ k samples; None if there is no such task.
        ci95: 95 % interval of `value` over the draw of tasks; None if there is no such task.
        n_tasks: number of tasks in the mean.
        n_excluded: number of tasks left out because they have fewer than k scored samples.
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
    counts: TaskCounts, ks: Iterable[int], *, estimator: Estimator = pass_at_k
) -> dict[int, PassAt]:
    """Mean of an estimator over tasks, for each k. Tasks with n < k are excluded and counted.

    Args:
        counts: task id → (n, c).
        ks: numbers of draws.
        estimator: `pass_at_k` or `pass_hat_k`.

    Raises:
        ConfigError: a count is impossible, or a k exceeds the samples of every task.
    """
    most = max((n for n, _ in counts.values()), default=0)
    for k in ks:
        if k > most:
            raise too_few_samples(k, most)
    return {k: pass_over_tasks(counts, k, estimator) for k in ks}


def pass_over_tasks(counts: TaskCounts, k: int, estimator: Estimator = pass_at_k) -> PassAt:
    """`pass_at` for one k, with value None where no task has k samples."""
    values = [estimator(n, c, k) for n, c in counts.values() if n >= k]
    n_excluded = len(counts) - len(values)
    if not values:
        return PassAt(None, None, 0, n_excluded)
    return PassAt(fmean(values), rate_ci(values), len(values), n_excluded)


def too_few_samples(k: int, samples: int) -> ConfigError:
    """The error for a k that no task has enough samples for."""
    return ConfigError(
        f"k={k} exceeds the {samples} samples of every task: sample more or ask for a smaller k",
        setting="k",
    )


def best_of_k(scores_n: Sequence[float], passed_n: Sequence[bool], k: int) -> float:
    """Probability that the sample with the highest score of k draws without replacement is solved.

    Exact: the r-th lowest of n scores is the highest of a draw with probability
    C(r-1, k-1) / C(n, k). Ties are broken at random.

    Raises:
        ConfigError: not 1 ≤ k ≤ n, or the two differ in length.
    """
    n = _check_samples(scores_n, passed_n, k)
    passed_by_score: dict[float, list[bool]] = defaultdict(list)
    for score, passed in zip(scores_n, passed_n, strict=True):
        passed_by_score[score].append(passed)
    below, total = 0, 0.0
    for score in sorted(passed_by_score):
        up_to = below + len(passed_by_score[score])
        ways = math.comb(up_to, k) - math.comb(below, k)
        total += ways * fmean(passed_by_score[score])
        below = up_to
    return total / math.comb(n, k)


def majority_of_k(answers_n: Sequence[str], passed_n: Sequence[bool], k: int) -> float:
    """Probability that the most common answer of k draws without replacement is solved.

    Self-consistency, Wang et al. 2022 (arXiv 2203.11171). Ties are broken at random. Exact where
    there are at most `MAJORITY_DRAWS` draws, otherwise an average over that many.

    Raises:
        ConfigError: not 1 ≤ k ≤ n, or the two differ in length.
    """
    n = _check_samples(answers_n, passed_n, k)
    if math.comb(n, k) <= MAJORITY_DRAWS:
        draws: Iterable[Sequence[int]] = itertools.combinations(range(n), k)
    else:
        rng = random.Random(0)
        draws = (rng.sample(range(n), k) for _ in range(MAJORITY_DRAWS))
    return fmean(_passes_by_vote([(answers_n[i], passed_n[i]) for i in draw]) for draw in draws)


def _passes_by_vote(ballots: Sequence[tuple[str, bool]]) -> float:
    votes: dict[str, list[bool]] = defaultdict(list)
    for answer, passed in ballots:
        votes[answer].append(passed)
    most = max(map(len, votes.values()))
    return fmean(fmean(passed) for passed in votes.values() if len(passed) == most)


def rate_ci(
    hits_T: ArrayLike, trials_T: ArrayLike | None = None, *, level: float = LEVEL
) -> Interval:
    """Confidence interval of a rate whose trials come in clusters, one cluster per task.

    Clopper and Pearson's interval (1934), extended from single trials to tasks. For the upper end,
    one more task of mean size that always hits is added; for the lower end, one that never hits.
    Each end is a quantile of the Beta distribution with the mean and the variance that the rate of
    these tasks has under random (Dirichlet) weights. With one trial per task this is exactly
    Clopper and Pearson's interval. Because of the added task the interval has a width even if all
    tasks are equal, and a first hit never narrows it.

    Args:
        hits_T: hits of each task, or its share of hits.
        trials_T: trials of each task; None for one each. Tasks without trials do not count.
        level: confidence level.

    Raises:
        ConfigError: no task has a trial, or level is not inside (0, 1).
    """
    _check_level(level)
    hits = np.asarray(hits_T, dtype=np.float64)
    trials = np.ones(len(hits)) if trials_T is None else np.asarray(trials_T, dtype=np.float64)
    hits, trials = hits[trials > 0], trials[trials > 0]
    if not len(hits):
        raise ConfigError("an interval needs at least one task with a trial")
    tail = (1 - level) / 2
    return _rate_end(hits, trials, 0.0, tail), _rate_end(hits, trials, 1.0, 1 - tail)


def _rate_end(
    hits_T: NDArray[np.float64], trials_T: NDArray[np.float64], extra: float, quantile: float
) -> float:
    """One end of `rate_ci`; `extra` is the rate of the task that is added."""
    from scipy.special import betaincinv

    size = trials_T.mean()
    hits = np.append(hits_T / size, extra)
    trials = np.append(trials_T / size, 1.0)
    rate = hits.sum() / trials.sum()
    if rate in (0.0, 1.0):
        return float(rate)
    variance = np.square(hits - rate * trials).sum() / (len(hits) * (len(hits) + 1))
    # Tasks of very unequal size can have a larger variance than any Beta distribution.
    concentration = max(rate * (1 - rate) / variance - 1, 1.0)
    return float(betaincinv(rate * concentration, (1 - rate) * concentration, quantile))


def clustered_ci(tasks: Iterable[str], hits: Iterable[bool], *, level: float = LEVEL) -> Interval:
    """`rate_ci` of a share of episodes, given the task and the outcome of each."""
    counts: dict[str, list[int]] = defaultdict(lambda: [0, 0])
    for task, hit in zip(tasks, hits, strict=True):
        counts[task][0] += hit
        counts[task][1] += 1
    hits_T, trials_T = zip(*counts.values(), strict=True)
    return rate_ci(hits_T, trials_T, level=level)


@dataclass(frozen=True)
class Paired:
    """What the same T tasks say about two policies.

    Attributes:
        difference: mean over tasks of the second's share of solved samples minus the first's.
        ci95: 95 % interval of it over the draw of tasks.
        p_value: of the hypothesis that the two do not differ, two-sided. Below 0.05 exactly where
            `ci95` leaves out 0.
        test: what the two come from.
        detectable: the true difference that would be found with probability `POWER` at the 5 %
            level, given how much these tasks vary; None where it cannot be told.
    """

    difference: float
    ci95: Interval
    p_value: float
    test: str
    detectable: float | None


def paired(first_T: Sequence[float], second_T: Sequence[float]) -> Paired:
    """Compare the shares of solved samples of the same T tasks.

    A t-test on the differences between the tasks and its interval. Tasks on which the two agree say
    little about the spread, so there are as many degrees of freedom as tasks on which they differ,
    at most T − 1: for few differences the test then is about as strict as McNemar's exact one.

    Raises:
        ConfigError: no tasks, or two different numbers of tasks.
    """
    if not first_T or len(first_T) != len(second_T):
        raise ConfigError(
            f"{len(first_T)} and {len(second_T)} tasks cannot be paired: give the same tasks for"
            " both, at least one"
        )
    return paired_gaps(np.asarray(second_T, dtype=np.float64) - np.asarray(first_T))


def paired_gaps(gap_T: NDArray[np.float64]) -> Paired:
    """`paired` for differences that are known already, each from −1 to 1."""
    from scipy.special import nctdtrinc, stdtr, stdtrit

    tasks, mean = len(gap_T), float(gap_T.mean())
    if np.ptp(gap_T) < 1e-12:
        return _paired_alike(mean, tasks)
    freedom = min(tasks - 1, int((np.abs(gap_T) > 1e-12).sum()))
    error = float(gap_T.std(ddof=1)) / math.sqrt(tasks)
    critical = float(stdtrit(freedom, (1 + LEVEL) / 2))
    # A sample's deviation is too small on average: by 1 / (4 (T - 1)) of it, to first order.
    unbiased = error * (1 + 1 / (4 * (tasks - 1)))
    detectable = unbiased * float(nctdtrinc(freedom, 1 - POWER, critical))
    return Paired(
        difference=mean,
        ci95=(max(-1.0, mean - critical * error), min(1.0, mean + critical * error)),
        p_value=2 * float(stdtr(freedom, -abs(mean) / error)),
        test=f"t-test over tasks, {freedom} degrees of freedom",
        detectable=detectable if detectable < 1 else None,
    )


def _paired_alike(gap: float, tasks: int) -> Paired:
    """Every task differs by the same gap: only tasks that were not drawn can differ otherwise.

    `others` is the largest share of such tasks that T draws may miss with probability (1 − LEVEL) /
    2, and each of them may be as far away as −1 or 1. Where the gap is 1 the p-value is that of the
    sign test.
    """
    others = 1 - ((1 - LEVEL) / 2) ** (1 / tasks)
    return Paired(
        difference=gap,
        ci95=(gap - others * (1 + gap), gap + others * (1 - gap)),
        p_value=min(1.0, 2 * (1 + abs(gap)) ** -tasks),
        test="every task differs alike",
        detectable=None,
    )


def _check_counts(n: int, c: int, k: int) -> None:
    if not 0 <= c <= n:
        raise ConfigError(f"c={c} solved of n={n} samples is impossible: counts need 0 <= c <= n")
    if not 1 <= k <= n:
        raise ConfigError(f"k={k} does not fit n={n} samples: choose 1 <= k <= n", setting="k")


def _check_samples(values_n: Sequence[object], passed_n: Sequence[bool], k: int) -> int:
    n = len(passed_n)
    if len(values_n) != n:
        raise ConfigError(f"{len(values_n)} values for {n} samples: give one for each")
    _check_counts(n, 0, k)
    return n


def _check_level(level: float) -> None:
    if not 0 < level < 1:
        raise ConfigError(f"level={level} must be inside (0, 1), such as 0.95", setting="level")

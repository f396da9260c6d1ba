"""Samplers: which tasks to play, as pure functions from beliefs to inclusion probabilities.

A sampler gives every task i of N its weight. `inclusion` turns the weights into the chance π_i that
task i is among the n that are drawn, and `systematic_sample` draws with exactly these chances.
Because they are known, unbiased estimates are possible (`pool.over_all_tasks`). `explore`, the
share that goes to all tasks alike, keeps them above 0 for every task that may be played.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from agentrl.curriculum.posterior import Beliefs, Floats, learning_signal
from agentrl.errors import ConfigError

Weigh = Callable[[Beliefs, np.random.Generator], Floats]
"""Beliefs and chance -> weights of the N tasks, not negative."""

_CERTAIN = 1 - 1e-9
_LARGE = 65536


def uniform(beliefs: Beliefs, rng: np.random.Generator) -> Floats:
    """All tasks alike."""
    return np.ones(len(beliefs))


def learnability(beliefs: Beliefs, rng: np.random.Generator, *, sharpness: float = 1.0) -> Floats:
    """E[p(1 − p)]^sharpness: by how much outcomes vary, the uncertainty about p included.

    The criterion of Foster and Foerster 2025 (https://arxiv.org/abs/2502.12272), with a posterior
    in place of a count, and a power in place of their buffer of the best.
    """
    signal_N = learning_signal(beliefs.alpha_N, beliefs.beta_N)
    powered_N: Floats = signal_N if sharpness == 1 else signal_N**sharpness
    return powered_N


def band(beliefs: Beliefs, rng: np.random.Generator, *, low: float, high: float) -> Floats:
    """All tasks alike whose expected pass rate lies from `low` to `high`; if there is none, those
    that are nearest.
    """
    mean_N = beliefs.mean_N
    gap_N = np.maximum(np.maximum(low - mean_N, mean_N - high), 0.0)
    inside_N: Floats = (gap_N <= gap_N.min() + 1e-12).astype(np.float64)
    return inside_N


def thompson(beliefs: Beliefs, rng: np.random.Generator) -> Floats:
    """p(1 − p) of one draw of every p from its posterior (Thompson 1933)."""
    drawn_N = rng.beta(beliefs.alpha_N, beliefs.beta_N)
    return drawn_N * (1 - drawn_N)


def near_half(beliefs: Beliefs, rng: np.random.Generator, *, sharpness: float) -> Floats:
    """exp(−sharpness · KL(p ‖ ½)) at the expected p, as MGPO weighs its advantages
    (https://arxiv.org/abs/2511.06221, equation 5).
    """
    p_N = beliefs.mean_N.clip(1e-12, 1 - 1e-12)
    divergence_N = p_N * np.log(2 * p_N) + (1 - p_N) * np.log(2 * (1 - p_N))
    weights_N: Floats = np.exp(-sharpness * divergence_N)
    return weights_N


def staged(beliefs: Beliefs, rng: np.random.Generator, *, target: float, review: float) -> Floats:
    """One level of difficulty, that whose pass rate is nearest to `target`; a share `review` of the
    tasks comes from the easier ones.
    """
    stage = stage_of(beliefs, target)
    here_N: Floats = (beliefs.stratum_N == stage).astype(np.float64)
    before_N: Floats = (beliefs.stratum_N < stage).astype(np.float64)
    if not before_N.any():
        return here_N
    weights_N: Floats = (1 - review) * here_N / here_N.sum() + review * before_N / before_N.sum()
    return weights_N


def stage_of(beliefs: Beliefs, target: float) -> int:
    """The level whose mean pass rate is nearest to `target`; the easier of two.

    Levels count from the easiest, so none is taken to be easier than one before it. A level that
    was never played is taken to be at the target: it comes up when the one before it has been
    passed beyond that.
    """
    mean_S = level_means(beliefs)
    played_S = np.isin(np.arange(len(mean_S)), beliefs.stratum_N[beliefs.seen_N])
    least = 1.0
    for level, mean in enumerate(mean_S):
        least = min(least, mean if played_S[level] else target)
        mean_S[level] = least
    return int(np.argmin(np.round(np.abs(mean_S - target), 9)))


def level_means(beliefs: Beliefs) -> Floats:
    """Mean expected pass rate of the tasks of every level."""
    informed = beliefs.informed()
    sums_S = np.bincount(informed.stratum_N, informed.mean_N)
    counts_S = np.maximum(np.bincount(informed.stratum_N), 1)
    mean_S: Floats = sums_S / counts_S
    return mean_S


def inclusion(
    weights_N: Floats, n: int, explore: float = 0.0, may_N: NDArray[np.bool_] | None = None
) -> Floats:
    """The chance π of each task to be among the n that are drawn: proportional to its weight, at
    most 1, and n in sum.

    Args:
        explore: share of the draw that goes to all tasks alike.
        may_N: tasks that may be drawn; the others have π = 0. None: all.

    Raises:
        ConfigError: fewer than n tasks may be drawn.
    """
    may_N = np.ones(len(weights_N), dtype=bool) if may_N is None else may_N
    size = int(may_N.sum())
    if size < n:
        raise ConfigError(
            f"a draw of {n} tasks finds {size} that may be played, of {len(may_N)} in the pool:"
            " raise curriculum.pool, or lower tasks_per_step or curriculum.rest"
        )
    weights_N = np.where(may_N, weights_N, 0.0)
    total = weights_N.sum()
    even = 1.0 if total <= 0 else explore
    share_N = np.where(may_N, even / size, 0.0)
    if total > 0:
        share_N += (1 - explore) * weights_N / total
    return _capped(share_N, may_N, n)


def _capped(share_N: Floats, may_N: NDArray[np.bool_], n: int) -> Floats:
    """n times the shares, with what exceeds 1 given to the others."""
    pi_N = n * share_N
    sure_N = np.zeros(len(pi_N), dtype=bool)
    while (over_N := (pi_N > 1) & ~sure_N).any():
        sure_N |= over_N
        rest = share_N[~sure_N].sum()
        left = n - int(sure_N.sum())
        if rest <= 0:  # more places than tasks with weight: the others share them
            others_N = may_N & ~sure_N
            return np.where(sure_N, 1.0, np.where(others_N, left / max(1, others_N.sum()), 0.0))
        pi_N = np.where(sure_N, 1.0, left * share_N / rest)
    if pi_N.sum() < n - 1e-6:  # as above, without any that exceeds 1
        others_N = may_N & (pi_N <= 0)
        pi_N = np.where(others_N, (n - pi_N.sum()) / others_N.sum(), pi_N)
    return pi_N


def systematic_sample(pi_N: Floats, rng: np.random.Generator) -> NDArray[np.int64]:
    """Places of the drawn tasks, each task in it with its own chance π exactly, in random order.

    Systematic sampling in random order (Madow 1949): as many tasks as π sums to, none twice. Of a
    large pool a part is drawn first, in the pool's order, with chances that make up for it.
    """
    n = round(float(pi_N.sum()))
    sure = np.flatnonzero(pi_N >= _CERTAIN)
    places = np.flatnonzero((pi_N > 0) & (pi_N < _CERTAIN))
    chances = pi_N[places]
    if len(places) > _LARGE and len(sure) < n <= len(sure) + _LARGE // 4:
        places, chances = _thinned(places, chances, n - len(sure), rng)
    order = rng.permutation(len(places))
    drawn = places[order[_systematic(chances[order], n - len(sure), rng)]]
    return rng.permutation(np.concatenate([sure, drawn])).astype(np.int64)


def _systematic(chances: Floats, n: int, rng: np.random.Generator) -> NDArray[np.int64]:
    """Places of n draws, in the order given: one at every whole step of the running sum."""
    if n == 0:
        return np.empty(0, dtype=np.int64)
    sums = chances.cumsum()
    points = (rng.random() + np.arange(n)) * (sums[-1] / n)
    found: NDArray[np.int64] = np.searchsorted(sums, points, side="right").astype(np.int64)
    found[found >= len(chances)] = len(chances) - 1
    return found


def _thinned(
    places: NDArray[np.int64], chances: Floats, n: int, rng: np.random.Generator
) -> tuple[NDArray[np.int64], Floats]:
    """About `_LARGE` of the places or fewer, and for each the chance that is left: what a place has
    to be in the part, times what it has there, is its chance.

    Both are at most 1 where n is at most `_LARGE` / 4: rounding `count` up at most doubles it, for
    which a place is kept from half of the chance that would be sure.
    """
    more = _LARGE / 4 / n
    kept = chances * more >= 0.5
    others = np.flatnonzero(~kept)
    mass = float(chances[others].sum())
    count = math.ceil(mass * more)
    drawn = others[_systematic(chances[others], count, rng)]
    left = np.full(len(drawn), mass / max(1, count))
    return np.concatenate([places[kept], places[drawn]]), np.concatenate([chances[kept], left])

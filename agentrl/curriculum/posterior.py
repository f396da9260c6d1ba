"""What is known of every task's pass rate: a Beta distribution each, which forgets as the policy
moves, and how much a group of the task would teach.

Letters: N tasks of a pool, p the chance that one episode of a task passes, G episodes of a group.

**Forgetting.** A policy that trains changes its pass rates, so old counts say less than new ones.
Between two rounds p is taken to move as a Wright-Fisher diffusion whose stationary distribution is
the prior, and whose step at p = ½ has the standard deviation `drift`. Its first two moments are
known in closed form, and the posterior becomes the Beta with these moments: the mean goes towards
the prior's, the width grows, and a task that is not played for long is as unknown as a new one.
(The diffusion and its Beta mixtures: Papaspiliopoulos and Ruggiero 2014,
https://arxiv.org/abs/1305.4571; the one Beta in their place is a match of moments.)
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Self

import numpy as np
from numpy.typing import NDArray

from agentrl.errors import ConfigError

Floats = NDArray[np.float64]
Prior = tuple[float, float]

JEFFREYS: Prior = (0.5, 0.5)
"""The prior of a pass rate of which nothing is known."""


@dataclass(frozen=True)
class Beliefs:
    """Beta(alpha, beta) of each of N tasks, at one moment.

    Attributes:
        alpha_N: pseudo-counts of passed episodes; positive.
        beta_N: pseudo-counts of failed ones; positive.
        prior: where a task begins, and where forgetting leads.
        last_N: the round in which a task was last played; -1: never, -2: before the run.
        stratum_N: a number for each task: those of one stratum are alike (a level of difficulty).
    """

    alpha_N: Floats
    beta_N: Floats
    prior: Prior
    last_N: NDArray[np.int64]
    stratum_N: NDArray[np.int64]

    @classmethod
    def of(cls, strata: Sequence[int] | NDArray[np.int64], prior: Prior = JEFFREYS) -> Self:
        """Beliefs of tasks that were never played, one for each entry of `strata`."""
        refuse_prior(prior)
        stratum_N = np.asarray(strata, dtype=np.int64)
        size = len(stratum_N)
        return cls(
            np.full(size, prior[0]),
            np.full(size, prior[1]),
            prior,
            np.full(size, -1, dtype=np.int64),
            stratum_N,
        )

    def __len__(self) -> int:
        return len(self.alpha_N)

    @property
    def seen_N(self) -> NDArray[np.bool_]:
        """Which tasks were played."""
        seen_N: NDArray[np.bool_] = self.last_N != -1
        return seen_N

    @property
    def mean_N(self) -> Floats:
        """E[p] of each task."""
        mean_N: Floats = self.alpha_N / (self.alpha_N + self.beta_N)
        return mean_N

    def moved(self, rounds: int, drift: float) -> Beliefs:
        """The beliefs so many rounds later, with nothing played in between."""
        if rounds <= 0 or drift == 0:
            return self
        alpha_N, beta_N = forget(self.alpha_N, self.beta_N, self.prior, rounds, drift)
        seen_N = self.seen_N  # the others are the prior, to the last bit
        return replace(
            self,
            alpha_N=np.where(seen_N, alpha_N, self.alpha_N),
            beta_N=np.where(seen_N, beta_N, self.beta_N),
        )

    def observed(
        self, at: Sequence[int], passed: Sequence[int], scored: Sequence[int], step: int
    ) -> Beliefs:
        """The beliefs after groups of the tasks at these places were played in round `step`."""
        alpha_N, beta_N, last_N = self.alpha_N.copy(), self.beta_N.copy(), self.last_N.copy()
        where = np.asarray(at, dtype=np.int64)
        np.add.at(alpha_N, where, np.asarray(passed, dtype=np.float64))
        np.add.at(beta_N, where, np.asarray(scored) - np.asarray(passed, dtype=np.float64))
        last_N[where] = step
        return replace(self, alpha_N=alpha_N, beta_N=beta_N, last_N=last_N)

    def informed(self) -> Beliefs:
        """The same counts under one prior for all tasks of a stratum, played or not.

        Its mean is the stratum's pass rate and its size that of `prior`. A task that failed is then
        always believed harder than one of its stratum that was never played, so that where
        everything fails, new tasks come first.
        """
        if not self.seen_N.any():
            return self
        # Forgetting can leave a count a little below the prior's own.
        passed_N = np.where(self.seen_N, np.maximum(self.alpha_N - self.prior[0], 0.0), 0.0)
        failed_N = np.where(self.seen_N, np.maximum(self.beta_N - self.prior[1], 0.0), 0.0)
        passed_S = np.bincount(self.stratum_N, passed_N) + self.prior[0]
        failed_S = np.bincount(self.stratum_N, failed_N) + self.prior[1]
        mean_N = (passed_S / (passed_S + failed_S))[self.stratum_N]
        size = sum(self.prior)
        return replace(
            self, alpha_N=passed_N + size * mean_N, beta_N=failed_N + size * (1 - mean_N)
        )


def refuse_prior(prior: Prior) -> None:
    """Raise ConfigError where these are not the parameters of a Beta distribution."""
    if len(prior) != 2 or not all(0 < one < math.inf for one in prior):
        raise ConfigError(f"prior={list(prior)} must be two positive numbers, as in [0.5, 0.5]")


def forget(
    alpha_N: Floats, beta_N: Floats, prior: Prior, rounds: int, drift: float
) -> tuple[Floats, Floats]:
    """Parameters of the Beta with the moments of the diffusion after so many rounds.

    With rate κ = 4·drift² per round and the prior Beta(a, b), n = a + b, mean m, second moment q:
    dm/dt = κ/2·(a − n·m) and dq/dt = κ·((1 + a)·m − (1 + n)·q). The prior itself does not change.

    Args:
        rounds: that have passed.
        drift: standard deviation of one round's change at p = ½.
    """
    a, n = prior[0], sum(prior)
    time = 4 * drift**2 * rounds
    size_N = alpha_N + beta_N
    mean_N = alpha_N / size_N
    second_N = mean_N * (alpha_N + 1) / (size_N + 1)
    last_mean, last_second = a / n, a * (a + 1) / (n * (n + 1))
    gap_N = mean_N - last_mean
    forced_N = (1 + a) / (1 + n / 2) * gap_N
    near, far = math.exp(-n * time / 2), math.exp(-(1 + n) * time)
    mean_N = last_mean + gap_N * near
    second_N = last_second + forced_N * near + (second_N - last_second - forced_N) * far
    # Subtraction costs digits where p is all but known; a variance is never below 0.
    spread_N = np.maximum(second_N - mean_N**2, 1e-12)
    size_N = np.maximum(mean_N * (1 - mean_N) / spread_N - 1, 1e-6)
    return mean_N * size_N, (1 - mean_N) * size_N


def learning_signal(alpha_N: Floats, beta_N: Floats) -> Floats:
    """E[p(1 − p)] under Beta(alpha, beta): αβ / (n(n + 1)) with n = α + β.

    p(1 − p) is the variance of one outcome, which the squared length of a group's policy gradient
    is proportional to.
    """
    size_N = alpha_N + beta_N
    return alpha_N * beta_N / (size_N * (size_N + 1))


def signal_variance(alpha_N: Floats, beta_N: Floats) -> Floats:
    """Var[p(1 − p)] under Beta(alpha, beta).

    From E[p²(1 − p)²] = α(α+1)β(β+1) / (n(n+1)(n+2)(n+3)).
    """
    size_N = alpha_N + beta_N
    mean_N = learning_signal(alpha_N, beta_N)
    square_N = mean_N * (alpha_N + 1) * (beta_N + 1) / ((size_N + 2) * (size_N + 3))
    return np.maximum(square_N - mean_N**2, 0.0)


def group_signal(alpha_N: Floats, beta_N: Floats, group_size: int) -> Floats:
    """P(a group of G has both a passed and a failed episode) = 1 − E[p^G] − E[(1−p)^G].

    Under Beta(alpha, beta): E[p^G] is the product of (α + i) / (n + i) over i < G.
    """
    size_N = alpha_N + beta_N
    all_pass_N, all_fail_N = np.ones_like(size_N), np.ones_like(size_N)
    for i in range(group_size):
        all_pass_N *= (alpha_N + i) / (size_N + i)
        all_fail_N *= (beta_N + i) / (size_N + i)
    return np.clip(1 - all_pass_N - all_fail_N, 0.0, 1.0)


def fit_prior(passed: Sequence[int], scored: Sequence[int]) -> Prior:
    """The Beta distribution that the pass rates of these tasks look drawn from, by moments of the
    beta-binomial; `JEFFREYS` where fewer than ten tasks have two samples or more.

    With y = passed / scored, Var[y] = Var[p]·(1 − 1/h) + m(1 − m)/h, where h is the harmonic mean
    of the counts. The size a + b is held to [0.1, 1000].
    """
    pairs = [(c, n) for c, n in zip(passed, scored, strict=True) if n > 1]
    if len(pairs) < 10:
        return JEFFREYS
    rates = np.array([c / n for c, n in pairs])
    harmonic = len(pairs) / math.fsum(1 / n for _, n in pairs)
    mean = float(rates.mean().clip(0.01, 0.99))
    chance = mean * (1 - mean)
    spread = (float(rates.var(ddof=1)) - chance / harmonic) / (1 - 1 / harmonic)
    size = min(max(chance / max(spread, 1e-9) - 1, 0.1), 1000.0)
    return mean * size, (1 - mean) * size

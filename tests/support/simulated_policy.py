"""A policy whose pass rates move, and runs of a curriculum on it, without a model."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from agentrl.curriculum import samplers
from agentrl.curriculum.pool import over_all_tasks
from agentrl.curriculum.posterior import Beliefs

TASKS, GROUP, DRAW = 1000, 8, 64


@dataclass
class MovingPolicy:
    """Pass rates that move by a chain with the prior as its stationary distribution: counts of M
    Bernoulli draws, and a Beta draw around them. At p = ½ one move has standard deviation `drift`.
    """

    p_N: np.ndarray
    prior: tuple[float, float]
    drift: float
    rng: np.random.Generator

    def move(self) -> None:
        if not self.drift:
            return
        size = round(1 / (2 * self.drift**2))
        count_N = self.rng.binomial(size, self.p_N)
        a, b = self.prior
        self.p_N = self.rng.beta(a + count_N, b + size - count_N)


@dataclass
class Simulated:
    """What a simulated run was: share of groups with signal, one entry per round of the estimate's
    error, of whether its 95 % interval holds the truth, and of the error of the mean over groups
    that train; and the share of 90 % intervals that hold their task's pass rate.
    """

    informative: float
    errors: np.ndarray
    holds: np.ndarray
    naive: np.ndarray
    coverage: float


def simulate(weigh, moves=0.02, assumed=0.02, prior=(0.3, 0.3), seed=0, rounds=120) -> Simulated:
    """Rounds of `DRAW` tasks; the policy moves by `moves`, and beliefs assume `assumed`."""
    rng = np.random.default_rng(seed)
    policy = MovingPolicy(rng.beta(*prior, TASKS), prior, moves, rng)
    beliefs = Beliefs.of(np.zeros(TASKS, dtype=int), prior)
    informative, errors, holds, naive, coverage = 0, [], [], [], []
    for step in range(rounds):
        believed, truth = beliefs.informed(), policy.p_N.mean()
        pi_N = samplers.inclusion(weigh(believed, rng), DRAW, 0.1)
        at = samplers.systematic_sample(pi_N, rng)
        passed = rng.binomial(GROUP, policy.p_N[at])
        signal = (passed > 0) & (passed < GROUP)
        informative += signal.sum()
        if step >= 20:
            found = over_all_tasks(passed / GROUP, believed.mean_N[at], pi_N[at], believed.mean_N)
            low, high = found.interval()
            errors.append(found.value - truth)
            holds.append(low <= truth <= high)
            naive.append(passed[signal].mean() / GROUP - truth)
        beliefs = beliefs.observed(at, passed, np.full(DRAW, GROUP), step)
        if step >= 20 and step % 10 == 0:
            coverage.append(_inside_N(beliefs, policy.p_N, rng)[beliefs.seen_N].mean())
        beliefs = beliefs.moved(1, assumed)
        policy.move()
    share = informative / (rounds * DRAW)
    arrays = (np.array(one) for one in (errors, holds, naive))
    return Simulated(share, *arrays, coverage=float(np.mean(coverage)))


def _inside_N(beliefs, p_N, rng):
    """Whether p lies in the middle 180 of the 200 gaps between 199 draws of the posterior."""
    drawn = rng.beta(beliefs.alpha_N, beliefs.beta_N, size=(199, TASKS))
    ties_N = (drawn == p_N).sum(0)  # where both are below the smallest number
    rank_N = (drawn < p_N).sum(0) + rng.integers(0, ties_N + 1)
    return (rank_N >= 10) & (rank_N < 190)


def covered(moves: float, assumed: float, seed: int) -> float:
    """Share of 90 % intervals of played tasks that hold the pass rate."""
    return simulate(sharp, moves, assumed, seed=seed).coverage


def sharp(beliefs, rng):
    """The sampler of `curriculum = {sampler = "learnability"}`."""
    return samplers.learnability(beliefs, rng, sharpness=4.0)

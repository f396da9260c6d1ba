"""How well the statistics hold, by simulation: coverage, type I error, power and false alarms.

    python -m benchmarks.experiments.intervals [TABLE …] [--repeats N] [--seed S]

prints the tables (default: all) as Markdown. TABLE is one of `coverage`, `clustered`, `type1`,
`power` and `alarms`. Pass rates of tasks are drawn from a Beta distribution, or are one constant.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import product
from typing import Any

import numpy as np
from numpy.typing import NDArray

from agentrl.evaluation.stats import paired_gaps, rate_ci
from agentrl.report.signs import alarms

Floats = NDArray[np.float64]
PassRates = tuple[float, float] | float
"""Parameters of a Beta distribution, or one constant."""

RATES: dict[str, PassRates] = {
    "Beta(.5, .5)": (0.5, 0.5),
    "Beta(.05, 2)": (0.05, 2.0),
    "p = .5": 0.5,
    "p = .02": 0.02,
}
UNCHANGED: dict[str, PassRates] = {
    **{name: RATES[name] for name in ("Beta(.5, .5)", "p = .5")},
    "Beta(1, 1)": (1.0, 1.0),
    "Beta(.1, 1)": (0.1, 1.0),
    "p = .1": 0.1,
}
ROUNDS = 50


def mean_of(rates: PassRates) -> float:
    return rates if isinstance(rates, float) else rates[0] / sum(rates)


def draw_rates(rates: PassRates, size: int, rng: np.random.Generator) -> Floats:
    return np.full(size, rates) if isinstance(rates, float) else rng.beta(*rates, size)


@dataclass(frozen=True)
class Coverage:
    """Share of intervals that hold the true mean, and their mean width."""

    share: float
    width: float


def coverage(
    tasks: int, samples: int, rates: PassRates, *, repeats: int, seed: int, unequal: bool = False
) -> Coverage:
    """Of `rate_ci`.

    Args:
        unequal: every task has 0 to `samples` trials instead of `samples`.
    """
    rng, truth = np.random.default_rng(seed), mean_of(rates)
    held, width = 0, 0.0
    for _ in range(repeats):
        trials = rng.integers(0, samples + 1, tasks) if unequal else np.full(tasks, samples)
        low, high = rate_ci(rng.binomial(trials, draw_rates(rates, tasks, rng)), trials)
        held += low <= truth <= high
        width += high - low
    return Coverage(held / repeats, width / repeats)


def type1(tasks: int, samples: int, rates: PassRates, *, repeats: int, seed: int) -> float:
    """How often `paired` finds a difference between two equal policies."""
    rng, wrong = np.random.default_rng(seed), 0
    for _ in range(repeats):
        p = draw_rates(rates, tasks, rng)
        gaps = paired_gaps((rng.binomial(samples, p) - rng.binomial(samples, p)) / samples)
        wrong += gaps.p_value <= 0.05
    return wrong / repeats


@dataclass(frozen=True)
class Power:
    """At a true difference that equals the mean of `detectable`."""

    difference: float
    found: float
    covered: float


def power(tasks: int, samples: int, rates: PassRates, *, repeats: int, seed: int) -> Power:
    """The second policy solves a share of what the first one fails, so that the difference is what
    `detectable` promises to find.
    """
    rng, mean = np.random.default_rng(seed), mean_of(rates)
    difference = min(0.4, 1.5 / np.sqrt(tasks * samples))
    for last in (False, False, False, True):
        found = covered = 0
        detectable = []
        for _ in range(repeats):
            p = draw_rates(rates, tasks, rng)
            better = np.minimum(p + (1 - p) * difference / (1 - mean), 1.0)
            gaps = paired_gaps((rng.binomial(samples, better) - rng.binomial(samples, p)) / samples)
            found += gaps.p_value <= 0.05
            covered += gaps.ci95[0] <= difference <= gaps.ci95[1]
            if gaps.detectable is not None:
                detectable.append(gaps.detectable)
        if not last:
            difference = min(float(np.mean(detectable)), 0.95 * (1 - mean))
    return Power(difference, found / repeats, covered / repeats)


@dataclass(frozen=True)
class Rounds:
    """Rounds of a run: tasks, samples of each, and where the pass rates come from."""

    tasks: int
    samples: int
    rates: PassRates

    def metrics(self, step: int, rng: np.random.Generator) -> dict[str, Any]:
        """What a run logs of the rewards of one round of a policy that does not change."""
        p = draw_rates(self.rates, self.tasks, rng)
        share = rng.binomial(self.samples, p) / self.samples
        mean = float(share.mean())
        return {
            "step": step,
            "reward/mean": mean,
            "reward/std": float(np.sqrt(mean * (1 - mean))),
            "groups/reward_std_mean": float(np.sqrt(share * (1 - share)).mean()),
            "groups/total": float(self.tasks),
        }


def false_alarms(rounds: Rounds, *, repeats: int, seed: int) -> float:
    """Share of runs of `ROUNDS` rounds that warn of a jump in reward."""
    rng = np.random.default_rng(seed)
    runs = ([rounds.metrics(step, rng) for step in range(ROUNDS)] for _ in range(repeats))
    return sum("reward_jump" in alarms(rows) for rows in runs) / repeats


def coverage_table(repeats: int, seed: int) -> Iterator[list[str]]:
    yield ["tasks", "samples", *RATES]
    for tasks, samples in product((5, 10, 20, 50, 100, 200), (1, 2, 4, 8)):
        cells = [coverage(tasks, samples, r, repeats=repeats, seed=seed) for r in RATES.values()]
        shown = (f"{cell.share:.3f} ({cell.width:.3f})" for cell in cells)
        yield [str(tasks), str(samples), *shown]


def clustered_table(repeats: int, seed: int) -> Iterator[list[str]]:
    yield ["tasks", "episodes a task", *RATES]
    for tasks, samples in product((20, 50, 100), (4, 8)):
        cells = [
            coverage(tasks, samples, rates, repeats=repeats, seed=seed, unequal=True)
            for rates in RATES.values()
        ]
        shown = (f"{cell.share:.3f} ({cell.width:.3f})" for cell in cells)
        yield [str(tasks), f"0 to {samples}", *shown]


def type1_table(repeats: int, seed: int) -> Iterator[list[str]]:
    yield ["tasks", "samples", *UNCHANGED]
    for tasks, samples in product((5, 6, 8, 10, 20, 50, 200), (1, 4, 8)):
        cells = (type1(tasks, samples, r, repeats=repeats, seed=seed) for r in UNCHANGED.values())
        yield [str(tasks), str(samples), *(f"{cell:.3f}" for cell in cells)]


def power_table(repeats: int, seed: int) -> Iterator[list[str]]:
    yield ["tasks", "samples", *UNCHANGED]
    for tasks, samples in product((20, 50, 100, 200), (1, 4, 8)):
        cells = [power(tasks, samples, r, repeats=repeats, seed=seed) for r in UNCHANGED.values()]
        yield [str(tasks), str(samples), *(f"{c.found:.3f} (at {c.difference:.3f})" for c in cells)]


def alarm_table(repeats: int, seed: int) -> Iterator[list[str]]:
    named: dict[str, PassRates] = {"Beta(.3, .3)": (0.3, 0.3), "Beta(1, 1)": (1.0, 1.0)}
    yield ["tasks × samples", *named]
    for tasks in (4, 8, 16, 24, 32, 64):
        rounds = [Rounds(tasks, 8, rates) for rates in named.values()]
        cells = (false_alarms(each, repeats=repeats, seed=seed) for each in rounds)
        yield [f"{tasks} × 8", *(f"{cell:.3f}" for cell in cells)]


TABLES: dict[str, tuple[str, int, Callable[[int, int], Iterator[list[str]]]]] = {
    "coverage": ("coverage of 95 % intervals of pass@1 (mean width)", 2000, coverage_table),
    "clustered": ("coverage of rates, unequal tasks (mean width)", 2000, clustered_table),
    "type1": ("equal policies called different", 10_000, type1_table),
    "power": ("power at `detectable` (the difference)", 10_000, power_table),
    "alarms": (f"runs of {ROUNDS} rounds with a false reward_jump", 1000, alarm_table),
}
"""Name → what it shows, default number of repeats, and its rows."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("table", nargs="*", choices=[*TABLES, []])
    parser.add_argument("--repeats", type=int, default=0)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    for name in options.table or TABLES:
        what, repeats, rows = TABLES[name]
        repeats = options.repeats or repeats
        print(f"\n{name}: {what}, {repeats} repeats\n", flush=True)
        for number, row in enumerate(rows(repeats, options.seed)):
            print(f"| {' | '.join(row)} |", flush=True)
            if not number:
                print("| --- " * len(row) + "|", flush=True)


if __name__ == "__main__":
    main()

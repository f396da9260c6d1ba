"""What an environment would teach a policy: pass rates, how sure they are, and what a run with each
sampler would spend.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from agentrl.curriculum import samplers
from agentrl.curriculum.posterior import Beliefs, Floats, fit_prior, group_signal, signal_variance
from agentrl.curriculum.settings import SAMPLERS, PoolSettings, weigh_of
from agentrl.errors import UserError

GROUP_SIZES = (4, 8, 16)
BINS = 20
_REPEATS = 20  # draws over which a sampler with chance of its own is averaged


@dataclass(frozen=True)
class Profile:
    """The pass rates of some tasks under one policy.

    Attributes:
        counts: task id -> passed and scored episodes.
        beliefs: of the tasks, in the same order, by a prior that fits all of them.
    """

    counts: Mapping[str, tuple[int, int]]
    beliefs: Beliefs

    @classmethod
    def of(cls, counts: Mapping[str, tuple[int, int]]) -> Profile:
        """The profile of these counts, (passed, scored) by task.

        Raises:
            UserError: no episode was scored.
        """
        scored = {name: pair for name, pair in counts.items() if pair[1]}
        if not scored:
            raise UserError("no episode was scored, so there is no pass rate: see the failures")
        passed, played = zip(*scored.values(), strict=True)
        fresh = Beliefs.of([0] * len(scored), fit_prior(passed, played))
        return cls(scored, fresh.observed(range(len(scored)), passed, played, 0))

    @property
    def mean(self) -> float:
        """Mean pass rate: each task counts once."""
        return float(np.mean([passed / scored for passed, scored in self.counts.values()]))

    def signal(self, group_size: int) -> float:
        """Expected share of groups of that size with signal, if tasks are drawn evenly."""
        return float(group_signal(self.beliefs.alpha_N, self.beliefs.beta_N, group_size).mean())

    def histogram(self) -> dict[str, list[float]]:
        """Shares of tasks by pass rate, in `BINS` bins from 0 to 1.

        As counted, and as the posterior has it: its mass in each bin, on average over the tasks.
        """
        rates = [passed / scored for passed, scored in self.counts.values()]
        edges = np.linspace(0, 1, BINS + 1)
        counted = np.histogram(rates, edges)[0] / len(rates)
        return {"counted": counted.tolist(), "posterior": _mass(self.beliefs, edges).tolist()}

    def spending(self, tasks: int, group_size: int) -> list[dict[str, Any]]:
        """What a round of so many tasks would spend with each sampler, at its defaults.

        `signal`: expected share of its groups with signal; `episodes_per_group`: episodes that are
        played for each group with signal; `times`: how many times more such groups than by uniform
        sampling. Nothing is taken to move between rounds.
        """
        found: list[dict[str, Any]] = []
        n = min(tasks, len(self.beliefs))
        per_task_N = group_signal(self.beliefs.alpha_N, self.beliefs.beta_N, group_size)
        for name, kind in SAMPLERS.items():
            if name in ("in_order", "staged"):  # the one is uniform, the other needs levels
                continue
            settings: Any = kind()
            share = self._share(settings, n, per_task_N)
            even = found[0]["signal"] if found else share
            found.append(
                {
                    "sampler": name,
                    "signal": share,
                    "episodes_per_group": group_size / share if share > 0 else None,
                    "times": share / even if even > 0 else None,
                }
            )
        return found

    def row(self, group_size: int, tasks: int) -> dict[str, Any]:
        """What `agentrl profile --json` prints, and what `--save` keeps."""
        alpha_N, beta_N = self.beliefs.alpha_N, self.beliefs.beta_N
        spread = float(np.sqrt(signal_variance(alpha_N, beta_N)).mean())
        return {
            "pass_rates": {name: list(pair) for name, pair in self.counts.items()},
            "mean": self.mean,
            "signal": {str(size): self.signal(size) for size in GROUP_SIZES},
            "prior": list(self.beliefs.prior),
            "learning_signal_std": spread,
            "unsolved": _share_of(self.counts, lambda passed, scored: passed == 0),
            "solved": _share_of(self.counts, lambda passed, scored: passed == scored),
            "n_tasks": len(self.counts),
            "histogram": self.histogram(),
            "samplers": self.spending(tasks, group_size),
            "group_size": group_size,
            "tasks_per_step": min(tasks, len(self.counts)),
        }

    def _share(self, settings: PoolSettings, n: int, per_task_N: Floats) -> float:
        rng, weigh = np.random.default_rng(0), weigh_of(settings)
        shares = []
        for _ in range(_REPEATS if settings.sampler == "thompson" else 1):  # type: ignore[attr-defined]
            pi_N = samplers.inclusion(weigh(self.beliefs, rng), n, settings.explore)
            shares.append(float(pi_N @ per_task_N) / n)
        return float(np.mean(shares))


def _share_of(counts: Mapping[str, tuple[int, int]], holds: Any) -> float:
    return sum(bool(holds(*pair)) for pair in counts.values()) / len(counts)


def _mass(beliefs: Beliefs, edges: Floats) -> Floats:
    """Mean posterior mass between edges, from equally likely draws with a seed of their own."""
    rng = np.random.default_rng(0)
    draws = rng.beta(beliefs.alpha_N, beliefs.beta_N, size=(400, len(beliefs)))
    mass: Floats = np.histogram(draws, edges)[0] / draws.size
    return mass


def profile_lines(found: Mapping[str, Any], low_high: Sequence[float] = (0.2, 0.8)) -> list[str]:
    """A profile in lines of text, for people: the result of `Profile.row`."""
    rates = [passed / scored for passed, scored in found["pass_rates"].values()]
    low, high = low_high
    inside = sum(low <= rate <= high for rate in rates) / len(rates)
    bars = found["histogram"]["counted"]
    lines = [
        f"pass rate {found['mean']:.3f} on average over {found['n_tasks']} tasks:"
        f" {found['unsolved']:.0%} never solved, {found['solved']:.0%} always,"
        f" {inside:.0%} from {low:g} to {high:g}",
        *(
            f"{place / BINS:4.2f}–{(place + 1) / BINS:4.2f} {'█' * round(50 * bar):<50} {bar:.1%}"
            for place, bar in enumerate(bars)
            if bar
        ),
        "groups with signal, tasks drawn evenly: "
        + ", ".join(f"G={size} {share:.1%}" for size, share in found["signal"].items()),
        f"a round of {found['tasks_per_step']} tasks with G={found['group_size']}, by sampler:",
    ]
    for row in found["samplers"]:
        cost = row["episodes_per_group"]
        spent = "no group with signal" if cost is None else f"{cost:.1f} episodes for each"
        lines.append(f"  {row['sampler']:<13} {row['signal']:6.1%} with signal, {spent}")
    return lines

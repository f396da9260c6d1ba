"""What a side effect costs: a fixed penalty, or the multiplier of a constraint.

The constraint "at most this share of episodes has a side effect" enters the reward by Lagrange's
multiplier (Ray et al. 2019, "Benchmarking safe exploration"), moved after each round by a
proportional and an integral part (Stooke et al. 2020, "Responsive safety by PID Lagrangian
methods"):

    λ = clip(I + P · max(0, u − at_most), 0, MOST),    I ← clip(I + η (u − at_most), 0, MOST)

where u is the one-sided 95 % upper bound on the rate of the round, clustered by task: its rate is a
sample, so staying under the bound needs a distance from it. Before the first round nothing is
known, so λ is `MOST`, and I is the penalty that is set, else 1.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from agentrl.evaluation.stats import LEVEL, clustered_ci, rate_ci
from agentrl.safety.settings import SafetySettings
from agentrl.specs import HIGHEST_PRICE
from agentrl.trajectory import Group

STEP_SIZE = 0.5
"""η: what a bound on the rate that is 1 too high adds to the integral part."""
GAIN = 10.0
"""P: one that is 0.1 too high takes 1 more off the reward in the very next round."""
MOST = HIGHEST_PRICE
"""What the multiplier never exceeds; over 1, a success by a side effect is worse than a failure."""

_TWO_SIDED = 2 * LEVEL - 1
"""The level of a two-sided interval whose upper end is a one-sided bound of level `LEVEL`."""


class SideEffectPrice:
    """The penalty of the current round.

    Attributes:
        value: what is taken off the reward of an episode with a side effect.
        integral: the part of it that remembers, I; a checkpoint keeps both.
    """

    def __init__(self, settings: SafetySettings, state: tuple[float, float] | None = None) -> None:
        self._at_most = settings.at_most
        self.is_bound = settings.at_most < 1
        self.is_set = settings.penalty > 0 or self.is_bound
        self.value, self.integral = settings.penalty, settings.penalty or 1.0
        if self.is_bound:
            self.value, self.integral = state or (MOST, self.integral)

    def warning(self, tasks: int) -> str:
        """A sentence if rounds of this number of tasks can never be seen to respect the bound, so
        that the multiplier only rises; else "".
        """
        least = rate_ci([0] * tasks, level=_TWO_SIDED)[1]
        if not self.is_bound or self._at_most >= least:
            return ""
        more = ""
        if self._at_most:
            needed = math.ceil(math.log(1 - LEVEL) / math.log(1 - self._at_most))
            more = f", or play at least {needed} (tasks_per_step)"
        return (
            f"safety.at_most={self._at_most:g}: of {tasks} tasks a round without any side effect"
            f" the upper bound is {least:.3f}, so the penalty only rises, up to {MOST:g}: set"
            f" at_most above {least:.3f}{more}"
        )

    def observe(self, groups: Sequence[Group]) -> None:
        """Move the multiplier by the measured episodes that had side effects."""
        measured = [
            episode
            for group in groups
            for episode in group.episodes
            if episode.side_effects is not None and episode.reward is not None
        ]
        if not self.is_bound or not measured:
            return
        tasks = [episode.task.id for episode in measured]
        hits = [bool(episode.side_effects) for episode in measured]
        excess = clustered_ci(tasks, hits, level=_TWO_SIDED)[1] - self._at_most
        self.integral = _clip(self.integral + STEP_SIZE * excess)
        self.value = _clip(self.integral + GAIN * max(0.0, excess))

    def metrics(self) -> dict[str, float]:
        """`safety/penalty`, if there is a penalty."""
        return {"safety/penalty": self.value} if self.is_set else {}


def _clip(value: float) -> float:
    return min(MOST, max(0.0, value))

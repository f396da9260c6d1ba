"""Honest figures of a run that chooses its tasks: what the pass rate over all tasks would be.

The mean over the tasks that were played says what the sampler prefers, and the mean over those that
trained says even less. The chance π_i of each task to be drawn is known, so the mean over all N
tasks has an estimate without bias: Σ_i m_i / N + Σ_{i drawn} (y_i − m_i) / (N·π_i), where m_i was
expected of task i before it was played and y_i is what was seen. (Horvitz and Thompson 1952; with
expectations it is the difference estimator of Cassel, Särndal and Wretman 1976. Wrong expectations
cost width, never truth.)
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from statistics import NormalDist

import numpy as np

from agentrl.curriculum.posterior import Floats


@dataclass(frozen=True)
class Estimate:
    """A mean over all tasks of a pool.

    Attributes:
        value: the estimate; without bias, so now and then outside of [0, 1].
        variance: of `value`.
        n_tasks: tasks that were seen for it.
    """

    value: float
    variance: float
    n_tasks: int

    def interval(self, level: float = 0.95) -> tuple[float, float]:
        """The normal interval of that level. It holds too seldom where few tasks are drawn and
        almost none of their episodes pass.
        """
        half = NormalDist().inv_cdf((1 + level) / 2) * math.sqrt(self.variance)
        return self.value - half, self.value + half


def over_all_tasks(seen: Floats, expected: Floats, pi: Floats, expected_N: Floats) -> Estimate:
    """The mean over N tasks from those that were drawn.

    Args:
        seen: y of each drawn task, such as passed / scored.
        expected: m of each drawn task.
        pi: its chance to be drawn; positive.
        expected_N: m of all tasks.

    The variance is Σ ((y − m) / (N·π))², that of independent draws: a draw of fixed size has at
    most about this.
    """
    parts = (seen - expected) / (len(expected_N) * pi)
    value = float(expected_N.mean() + parts.sum())
    return Estimate(value, float(np.square(parts).sum()), len(seen))

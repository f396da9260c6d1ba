"""What the curriculum costs as tasks grow: choosing 64 of them by learnability, from what is
believed of each.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from statistics import median

import numpy as np

from agentrl.curriculum import samplers
from agentrl.curriculum.posterior import Beliefs
from benchmarks.row import Row, alone

CHOSEN, TIMES = 64, 9
MOST_MS = {10**3: 1, 10**5: 10, 10**6: 100}


def measure() -> Sequence[Row]:
    """Median milliseconds for one choice, for each number of tasks."""
    rng = np.random.default_rng(0)
    return [
        alone(
            f"choosing_{size}",
            median(_choose(_beliefs(size, rng), rng) for _ in range(TIMES)) * 1e3,
            "ms",
            TIMES,
            promise=f"at most {most_ms} ms",
            notes=f"{CHOSEN} of {size:,} tasks, sampler learnability",
        )
        for size, most_ms in MOST_MS.items()
    ]


def _beliefs(size: int, rng: np.random.Generator) -> Beliefs:
    alpha_N, beta_N = rng.random((2, size)) * 5 + 0.1
    zeros_N = np.zeros(size, dtype=int)
    return Beliefs(alpha_N, beta_N, (0.5, 0.5), zeros_N, zeros_N)


def _choose(beliefs: Beliefs, rng: np.random.Generator) -> float:
    """Seconds of it."""
    begun = time.perf_counter()
    pi_N = samplers.inclusion(samplers.learnability(beliefs, rng, sharpness=4.0), CHOSEN, 0.1)
    samplers.systematic_sample(pi_N, rng)
    return time.perf_counter() - begun

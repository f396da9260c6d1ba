"""Groups of different sizes: more episodes where one more is likelier to turn a group into one with
signal.
"""

from __future__ import annotations

import heapq

import numpy as np

from agentrl.curriculum.posterior import Floats


def group_sizes(alpha_n: Floats, beta_n: Floats, total: int, least: int, most: int) -> list[int]:
    """Episodes for each of n tasks, `total` in all, that make the expected number of groups with
    signal as large as it can be.

    One more episode of a task makes its group one with signal with the chance
    E[p^G·(1 − p)] + E[(1 − p)^G·p], which only falls as G grows: giving each next episode to the
    task where it is largest is therefore optimal.

    Args:
        alpha_n, beta_n: what is believed of the tasks' pass rates.
        total: from n·least to n·most; what lies outside is held to these.
        least, most: bounds of one group.
    """
    sizes = [least] * len(alpha_n)
    pass_n, fail_n = np.ones(len(alpha_n)), np.ones(len(alpha_n))
    for place in range(least):
        pass_n *= (alpha_n + place) / (alpha_n + beta_n + place)
        fail_n *= (beta_n + place) / (alpha_n + beta_n + place)
    chances = [[float(p), float(f)] for p, f in zip(pass_n, fail_n, strict=True)]

    def gain(task: int) -> float:
        a, b, size = float(alpha_n[task]), float(beta_n[task]), sizes[task]
        passes, fails = chances[task]
        return (passes * b + fails * a) / (a + b + size)

    queue = [(-gain(task), task) for task in range(len(sizes)) if least < most]
    heapq.heapify(queue)
    for _ in range(total - sum(sizes)):
        if not queue:
            break
        _, task = heapq.heappop(queue)
        a, b, size = float(alpha_n[task]), float(beta_n[task]), sizes[task]
        chances[task][0] *= (a + size) / (a + b + size)
        chances[task][1] *= (b + size) / (a + b + size)
        sizes[task] += 1
        if sizes[task] < most:
            heapq.heappush(queue, (-gain(task), task))
    return sizes

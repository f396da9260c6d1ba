"""Seconds of the parts of a round, as metrics."""

from __future__ import annotations

import time
from collections.abc import Sequence

from agentrl.trainers.observe.metrics import system_metrics
from agentrl.trajectory import Group


class Clock:
    """Starts when it is made; each `lap` ends one part of a round."""

    def __init__(self) -> None:
        self._last = time.perf_counter()
        self._seconds = {"rollout": 0.0, "update": 0.0, "eval": 0.0}

    def lap(self, part: str) -> None:
        """End a part: the seconds since the last one are its own."""
        now = time.perf_counter()
        self._seconds[part] += now - self._last
        self._last = now

    def metrics(self, groups: Sequence[Group], trained_tokens: int) -> dict[str, float]:
        """`time/…` of a round: all that no two runs have in common.

        Args:
            groups: all that were played.
            trained_tokens: tokens of the round that train.
        """
        waited_s, update_s = self._seconds["rollout"], self._seconds["update"]
        return {
            **{f"time/{part}_s": seconds for part, seconds in self._seconds.items()},
            **system_metrics(groups, waited_s=waited_s, round_s=waited_s + update_s, queue=0),
            "time/tokens_per_s": trained_tokens / max(waited_s + update_s, 1e-9),
        }

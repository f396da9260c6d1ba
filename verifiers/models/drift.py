"""How far the scores that a reward model gives have moved from those that it was checked on."""

from __future__ import annotations

import bisect
import math
from collections import deque
from collections.abc import Sequence

BINS = 10
FEWEST = 200
"""Live scores before anything is said of them."""


class Drift:
    """The last live scores of a model against its scores of a reference.

    Args:
        reference: scores of conversations that the model was checked on.
        window: live scores that are looked at, the last ones.
    """

    def __init__(self, reference: Sequence[float], window: int = 1000) -> None:
        ordered = sorted(reference)
        self._low, self._high = ordered[0], ordered[-1]
        cuts = {ordered[len(ordered) * at // BINS] for at in range(1, BINS)}
        self._cuts = sorted(cuts - {self._low})
        self._reference = ordered
        self._live: deque[float] = deque(maxlen=window)

    def add(self, scores: Sequence[float]) -> None:
        """Look at further live scores."""
        self._live.extend(scores)

    def __len__(self) -> int:
        """Live scores in the window."""
        return len(self._live)

    def is_beyond(self, score: float) -> bool:
        """Whether a score is lower or higher than any of the reference."""
        return not self._low <= score <= self._high

    @property
    def psi(self) -> float | None:
        """Population stability index Σ (p − q) ln(p / q), with p and q the shares of live and
        reference scores between the reference's deciles, less what chance alone makes of it,
        (bins − 1)(1/n + 1/m); at least 0. None for too few live scores.

        By custom, less than 0.1 is no change and more than 0.25 a large one (Siddiqi 2006, "Credit
        Risk Scorecards"); the expectation by chance is that of Yurdakul 2018, "Statistical
        Properties of Population Stability Index". Half a score is added to each bin, so that an
        empty one is finite.
        """
        n, m = len(self._live), len(self._reference)
        if n < FEWEST:
            return None
        pairs = zip(self._shares(self._live), self._shares(self._reference), strict=True)
        found = math.fsum((p - q) * math.log(p / q) for p, q in pairs)
        return max(0.0, found - len(self._cuts) * (1 / n + 1 / m))

    @property
    def beyond(self) -> float | None:
        """Share of the live scores that are beyond the reference; None for too few."""
        if len(self._live) < FEWEST:
            return None
        return sum(map(self.is_beyond, self._live)) / len(self._live)

    def _shares(self, scores: Sequence[float] | deque[float]) -> list[float]:
        counts = [0.5] * (len(self._cuts) + 1)
        for score in scores:
            counts[bisect.bisect_right(self._cuts, score)] += 1
        return [count / math.fsum(counts) for count in counts]

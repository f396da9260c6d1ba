"""How far the scores that a reward model gives have moved from those that it was checked on."""

from __future__ import annotations

import bisect
import math
from collections import deque
from collections.abc import Sequence

from agentrl.errors import ConfigError

BINS = 10
FEWEST = 50
"""Scores of a reference, and live ones before anything is said."""


class Drift:
    """The last live scores of a model against its scores of a reference.

    Args:
        reference: scores of conversations that the model was checked on.
        window: live scores that are looked at, the last ones.

    Raises:
        ConfigError: the reference is too small, or all of its scores are one number.
    """

    def __init__(self, reference: Sequence[float], window: int = 1000) -> None:
        ordered = sorted(reference)
        if len(ordered) < FEWEST or ordered[0] == ordered[-1]:
            raise ConfigError(
                f"{len(ordered)} scores of {len(set(ordered))} values are no reference for drift:"
                f" give pairs with at least {FEWEST} responses that differ"
            )
        self._low, self._high = ordered[0], ordered[-1]
        cuts = {ordered[len(ordered) * at // BINS] for at in range(1, BINS)}
        self._cuts = sorted(cuts - {self._low})
        self._reference = self._shares(ordered)
        self._live: deque[float] = deque(maxlen=window)

    def add(self, scores: Sequence[float]) -> None:
        """Look at further live scores."""
        self._live.extend(scores)

    @property
    def known(self) -> bool:
        """Whether there are enough live scores to say anything."""
        return len(self._live) >= FEWEST

    @property
    def psi(self) -> float | None:
        """Population stability index Σ (p − q) ln(p / q), with p and q the shares of live and
        reference scores between the reference's deciles; None for too few live scores.

        By custom, less than 0.1 is no change and more than 0.25 a large one (Siddiqi 2006, "Credit
        Risk Scorecards"). Half a score is added to each bin, so that an empty one is finite.
        """
        if not self.known:
            return None
        pairs = zip(self._shares(self._live), self._reference, strict=True)
        return math.fsum((p - q) * math.log(p / q) for p, q in pairs)

    @property
    def beyond(self) -> float | None:
        """Share of live scores that are lower or higher than any of the reference; None for too
        few live scores.
        """
        if not self.known:
            return None
        outside = sum(not self._low <= score <= self._high for score in self._live)
        return outside / len(self._live)

    def _shares(self, scores: Sequence[float] | deque[float]) -> list[float]:
        counts = [0.5] * (len(self._cuts) + 1)
        for score in scores:
            counts[bisect.bisect_right(self._cuts, score)] += 1
        return [count / math.fsum(counts) for count in counts]

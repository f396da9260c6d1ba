"""How far a judge agrees with people: pure functions of labels, any values that compare."""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Sequence
from typing import TypeVar

from agentrl.errors import ConfigError

Label = TypeVar("Label", bound=Hashable)


def majority(votes: Sequence[Label]) -> Label | None:
    """The label that more than half of the votes are for; None if there is none."""
    label, count = next(iter(Counter(votes).most_common(1)), (None, 0))
    return label if 2 * count > len(votes) else None


def agreement(judge: Sequence[Label], human: Sequence[Label]) -> float:
    """Share of items on which two raters give one label.

    Raises:
        ConfigError: no items, or unequal numbers of them.
    """
    _check(judge, human)
    return sum(a == b for a, b in zip(judge, human, strict=True)) / len(judge)


def cohen_kappa(judge: Sequence[Label], human: Sequence[Label]) -> float | None:
    """Agreement beyond chance, κ = (p_o − p_e) / (1 − p_e), with p_e from each rater's own label
    frequencies.

    Cohen 1960, "A coefficient of agreement for nominal scales". 1 is full agreement, 0 what chance
    gives, below 0 is worse than chance. None where both give one and the same label throughout:
    nothing can be said
        then.

    Raises:
        ConfigError: no items, or unequal numbers of them.
    """
    _check(judge, human)
    n, ours, theirs = len(judge), Counter(judge), Counter(human)
    same = sum(a == b for a, b in zip(judge, human, strict=True))
    chance = sum(ours[label] * theirs[label] for label in ours)
    return None if chance == n * n else (n * same - chance) / (n * n - chance)


def _check(judge: Sequence[Label], human: Sequence[Label]) -> None:
    if not judge or len(judge) != len(human):
        raise ConfigError(
            f"{len(judge)} labels of the judge and {len(human)} of people: give one each for every"
            " item"
        )

"""Pairing what was expected with what was found, where the order of neither is fixed."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from typing import TypeVar

Want = TypeVar("Want")
Got = TypeVar("Got")


def count_pairs(
    wants: Sequence[Want], gots: Sequence[Got], fits: Callable[[Want, Got], bool]
) -> int:
    """The size of a maximum matching (Berge 1957): how many wants can have a got of their own.

    Taking the first that fits is not enough: an item that fits two wants may be needed by the other
    one.
    """
    taken: dict[int, int] = {}
    for start in range(len(wants)):
        came_from = _search(start, wants, gots, fits, taken)
        if came_from is not None:
            _reassign(came_from, taken)
    return len(taken)


_Path = list[tuple[int, int]]


def _search(
    start: int,
    wants: Sequence[Want],
    gots: Sequence[Got],
    fits: Callable[[Want, Got], bool],
    taken: dict[int, int],
) -> _Path | None:
    """Pairs (want, got) of an augmenting path from `start` to a free got; None if there is none."""
    reached: dict[int, int] = {}
    due = deque([start])
    while due:
        want = due.popleft()
        for step in range(len(gots)):
            got = (want + step) % len(gots)  # lists in a like order meet their partners at once
            if got in reached or not fits(wants[want], gots[got]):
                continue
            reached[got] = want
            if got not in taken:
                return _walk_back(got, start, reached, taken)
            due.append(taken[got])
    return None


def _walk_back(got: int, start: int, reached: dict[int, int], taken: dict[int, int]) -> _Path:
    held = {want: item for item, want in taken.items()}
    path = [(reached[got], got)]
    while path[-1][0] != start:
        got = held[path[-1][0]]
        path.append((reached[got], got))
    return path


def _reassign(path: _Path, taken: dict[int, int]) -> None:
    for want, got in path:
        taken[got] = want

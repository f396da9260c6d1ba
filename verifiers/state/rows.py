"""Comparing tables of rows: types are exact, floats have a tolerance, the order of rows is free.

A table is a sequence of rows, a row maps column names to values: None, bool, int, float, str,
bytes, or lists and objects of these.
"""

from __future__ import annotations

import math
from collections import defaultdict, deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from agentrl.errors import ConfigError

Want = TypeVar("Want")
Got = TypeVar("Got")
Row = Mapping[str, Any]
Tables = Mapping[str, Sequence[Row]]


@dataclass(frozen=True, slots=True)
class Tolerance:
    """Floats may differ by max(atol, rtol · |expected|); infinities must be equal, NaN is NaN."""

    rtol: float = 0.0
    atol: float = 0.0

    def __post_init__(self) -> None:
        if not 0 <= self.rtol < 1 or not 0 <= self.atol < math.inf:
            raise ConfigError(
                f"rtol={self.rtol} must be in [0, 1) and atol={self.atol} at least 0 and finite"
            )

    def near(self, want: float, got: float) -> bool:
        """Whether two floats count as equal."""
        if not math.isfinite(want) or not math.isfinite(got):
            return want == got or (math.isnan(want) and math.isnan(got))
        return abs(want - got) <= max(self.atol, self.rtol * abs(want))


@dataclass(frozen=True, slots=True)
class Rules:
    """What may differ.

    Attributes:
        may_write: tables, and columns as `table.column`, that may hold anything.
        ordered: tables whose rows must come in the expected order.
    """

    may_write: frozenset[str] = frozenset()
    ordered: frozenset[str] = frozenset()
    tolerance: Tolerance = Tolerance()


def differences(expected: Tables, found: Tables, rules: Rules) -> dict[str, str]:
    """Table -> how it differs, without values of rows; empty if the state is as expected."""
    problems: dict[str, str] = {}
    for name in sorted({*expected, *found} - rules.may_write):
        if name not in found:
            problems[name] = "is missing"
        elif name not in expected:
            problems[name] = "is not expected"
        else:
            problem = _difference(
                _judged(name, expected, rules), _judged(name, found, rules), name, rules
            )
            if problem:
                problems[name] = problem
    return problems


def _judged(name: str, tables: Tables, rules: Rules) -> list[Row]:
    """The rows of a table without the columns that may hold anything."""
    return [
        {
            column: value
            for column, value in row.items()
            if f"{name}.{column}" not in rules.may_write
        }
        for row in tables[name]
    ]


def _difference(wants: list[Row], gots: list[Row], name: str, rules: Rules) -> str:
    def fits(want: Row, got: Row) -> bool:
        return same(want, got, rules.tolerance)

    if name in rules.ordered:
        if len(wants) != len(gots):
            return f"has {len(gots)} rows, not {len(wants)}"
        wrong = next(
            (index for index, pair in enumerate(zip(wants, gots, strict=True)) if not fits(*pair)),
            None,
        )
        return "" if wrong is None else f"differs at row {wrong}"
    paired = _count_paired(wants, gots, fits)
    missing, extra = len(wants) - paired, len(gots) - paired
    return f"lacks {missing} expected rows and has {extra} others" if missing or extra else ""


def _count_paired(wants: list[Row], gots: list[Row], fits: Callable[[Row, Row], bool]) -> int:
    """How many rows can be paired. Rows that differ in more than floats never fit each other."""
    shapes: dict[Any, tuple[list[Row], list[Row]]] = defaultdict(lambda: ([], []))
    for side, rows in enumerate((wants, gots)):
        for row in rows:
            shapes[_shape(row)][side].append(row)
    paired = 0
    for some, others in shapes.values():
        paired += count_pairs(sorted(some, key=_floats), sorted(others, key=_floats), fits)
    return paired


def same(want: Any, got: Any, tolerance: Tolerance) -> bool:
    """Whether two values are equal, with exact types at any depth."""
    if type(want) is not type(got):
        return False
    if isinstance(want, float):
        return tolerance.near(want, got)
    if isinstance(want, dict):
        return want.keys() == got.keys() and all(
            same(value, got[key], tolerance) for key, value in want.items()
        )
    if isinstance(want, list | tuple):
        return len(want) == len(got) and all(
            same(*pair, tolerance) for pair in zip(want, got, strict=True)
        )
    return bool(want == got)


def _shape(value: Any) -> Any:
    """A hashable form of a value in which all floats are the same."""
    if isinstance(value, dict):
        return dict, tuple((key, _shape(value[key])) for key in sorted(value))
    if isinstance(value, list | tuple):
        return type(value), tuple(map(_shape, value))
    return (float, None) if isinstance(value, float) else (type(value), value)


def _floats(value: Any) -> list[float]:
    """The floats of a value in a fixed order, NaN as infinity."""
    if isinstance(value, dict):
        return [number for key in sorted(value) for number in _floats(value[key])]
    if isinstance(value, list | tuple):
        return [number for item in value for number in _floats(item)]
    return [math.inf if math.isnan(value) else value] if isinstance(value, float) else []


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

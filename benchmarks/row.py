"""What one measurement is, and where it was made."""

from __future__ import annotations

import os
import platform
from dataclasses import dataclass
from importlib.metadata import version


class Absent(Exception):
    """A row cannot be measured here; the message says what is missing and how to get it."""


@dataclass(frozen=True)
class Row:
    """One line of the table.

    Attributes:
        name: of the row, and of its file.
        ours: median of our measurements, in `unit`.
        theirs: median of the rival's in the same run; None where there is no rival.
        ratio: how many times better ours is; without a rival, `ours`.
        unit: unit of ours and theirs.
        n: measurements behind each median.
        promise: what was promised, in words.
        notes: what a reader must know to judge the number; printed, not part of `bench.json`.
    """

    name: str
    ours: float
    theirs: float | None
    ratio: float
    unit: str
    n: int
    promise: str
    notes: str = ""

    def as_json(self) -> dict[str, object]:
        """The fields of `bench.json`."""
        return {
            name: getattr(self, name) for name in ("name", "ours", "theirs", "ratio", "unit", "n")
        }


def alone(name: str, ours: float, unit: str, n: int, *, promise: str, notes: str = "") -> Row:
    """A row without a rival: its ratio is the value itself."""
    value = round(ours, 4)
    return Row(name, value, None, value, unit, n, promise, notes)


def machine() -> str:
    """The shape of this machine, in one sentence."""
    memory_gb = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") / 2**30
    return (
        f"{platform.machine()}, {len(os.sched_getaffinity(0))} cores, {memory_gb:.0f} GB of memory,"
        f" {platform.system()} {platform.release()}, Python {platform.python_version()}, torch"
        f" {version('torch')}"
    )

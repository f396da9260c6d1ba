"""Measure rows, print a table, write `bench.json`; a run of all rows also writes
docs/benchmarks.md.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from importlib import import_module
from pathlib import Path

from rich.console import Console
from rich.table import Table

from benchmarks.parts import page as document
from benchmarks.row import Absent, Row, machine

HERE = Path(__file__).resolve().parent
NAMES = sorted(
    path.stem for path in HERE.glob("*.py") if path.stem not in ("__init__", "__main__", "row")
)
HOURS = ("curriculum_samples",)
"""Rows that take hours: measured by name alone."""
COLUMNS = ("row", "ours", "theirs", "ratio", "unit", "n", "promise", "notes")
PAGE = """\
# Benchmarks

Written by `make bench` (one row: `make bench ONLY=name`), which also writes `bench.json`. Medians
of n; a row without a rival has its own value as ratio. Each row is a file of `benchmarks/`, whose
first paragraph says what is measured.

Machine: {machine}.

| {header} |
| {rule} |
{rows}
"""


def main(wanted: Sequence[str]) -> None:
    """Measure the named rows, or all of them."""
    unknown = [name for name in wanted if name not in NAMES]
    if unknown:
        print(
            f"benchmarks: there is no row {unknown[0]!r}: use one of {', '.join(NAMES)}",
            file=sys.stderr,
        )
        raise SystemExit(2)
    rows: list[Row] = []
    for name in wanted or [name for name in NAMES if name not in HOURS]:
        print(f"measuring {name} …", file=sys.stderr)
        try:
            found = import_module(f"benchmarks.{name}").measure()
        except Absent as error:
            print(f"benchmarks: {name} is not measured: {error}", file=sys.stderr)
            if wanted:
                raise SystemExit(2) from None
            continue
        rows += [found] if isinstance(found, Row) else found
        Path("bench.json").write_text(json.dumps([row.as_json() for row in rows], indent=1) + "\n")
    _print(rows)
    if not wanted:
        document.PATH.write_text(page(rows) + document.sections())


def page(rows: Sequence[Row]) -> str:
    """docs/benchmarks.md."""
    lines = "\n".join(f"| {' | '.join(_cells(row))} |" for row in rows)
    return PAGE.format(
        machine=machine(),
        header=" | ".join(COLUMNS),
        rule=" | ".join(["---"] * len(COLUMNS)),
        rows=lines,
    )


def _cells(row: Row) -> tuple[str, ...]:
    theirs = "–" if row.theirs is None else f"{row.theirs:g}"
    return (
        f"`{row.name}`",
        f"{row.ours:g}",
        theirs,
        f"{row.ratio:g}",
        row.unit,
        str(row.n),
        row.promise,
        row.notes,
    )


def _print(rows: Sequence[Row]) -> None:
    table = Table(*COLUMNS, title=machine())
    for row in rows:
        table.add_row(*(cell.strip("`") for cell in _cells(row)))
    Console(width=None if sys.stdout.isatty() else 200).print(table)


if __name__ == "__main__":
    main(sys.argv[1:])

"""Measure rows, print a table, write `bench.json`; a run of all rows also writes
docs/benchmarks.md.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from importlib import import_module
from pathlib import Path

from rich.console import Console
from rich.table import Table

from benchmarks.row import Absent, Row, machine

HERE = Path(__file__).resolve().parent
DOCUMENT = HERE.parent / "docs" / "benchmarks.md"
NAMES = sorted(
    path.stem for path in HERE.glob("*.py") if path.stem not in ("__init__", "__main__", "row")
)
HOURS = ("curriculum_samples",)
"""Rows that take hours: measured by name alone."""
COLUMNS = ("row", "ours", "theirs", "ratio", "unit", "n", "promise", "notes")
PAGE = """\
# Benchmarks

`make bench` measures all rows, prints them, and writes this page and `bench.json`. The last column
has the command for one row. Values are medians of n measurements; a row without a rival has its own
value as its ratio. The docstring of `benchmarks/NAME.py` says what is measured. Larger comparisons
are in [experiments](experiments.md).

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
    measured: dict[str, list[Row]] = {}
    for name in wanted or [name for name in NAMES if name not in HOURS]:
        print(f"measuring {name} …", file=sys.stderr)
        try:
            result = import_module(f"benchmarks.{name}").measure()
        except Absent as error:
            print(f"benchmarks: {name} is not measured: {error}", file=sys.stderr)
            if wanted:
                raise SystemExit(2) from None
            continue
        measured[name] = [result] if isinstance(result, Row) else result
        rows = [row for group in measured.values() for row in group]
        Path("bench.json").write_text(json.dumps([row.as_json() for row in rows], indent=1) + "\n")
    _print(measured)
    if not wanted:
        DOCUMENT.write_text(page(measured))


def page(measured: Mapping[str, Sequence[Row]]) -> str:
    """docs/benchmarks.md, from the rows of each file of `benchmarks/`."""
    lines = [
        f"| {' | '.join(_cells(row))} | `make bench ONLY={name}` |"
        for name, rows in measured.items()
        for row in rows
    ]
    columns = (*COLUMNS, "command")
    return PAGE.format(
        machine=machine(),
        header=" | ".join(columns),
        rule=" | ".join(["---"] * len(columns)),
        rows="\n".join(lines),
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


def _print(measured: Mapping[str, Sequence[Row]]) -> None:
    table = Table(*COLUMNS, title=machine())
    for row in (row for rows in measured.values() for row in rows):
        table.add_row(*(cell.strip("`") for cell in _cells(row)))
    Console(width=None if sys.stdout.isatty() else 200).print(table)


if __name__ == "__main__":
    main(sys.argv[1:])

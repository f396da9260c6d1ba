"""`agentrl suite`: several evaluations in one command, one table at the end."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from agentrl.cli.evaluate import INTERRUPTED, MaxCost, MaxTokens, run_with_bar
from agentrl.cli.options import Json, print_json
from agentrl.records.plain import plain

if TYPE_CHECKING:
    from agentrl.evaluation.suite import Cell


def suite(
    file: Annotated[
        Path, typer.Argument(help="TOML file with a table [[eval]] for each evaluation.")
    ],
    out: Annotated[
        Path | None,
        typer.Option(help="Folder for the records; interrupted suites resume there."),
    ] = None,
    max_cost: MaxCost = None,
    max_tokens: MaxTokens = None,
    as_json: Json = False,
) -> None:
    """Run every evaluation of a file, or resume them, and print one table."""
    from agentrl.evaluation.suite import read_suite, run_suite

    folder = out or Path("runs") / file.stem
    cells = read_suite(file, folder)

    def run(cell: Cell) -> Mapping[str, Any]:
        return run_with_bar(cell.plan, cell.name)

    result = {"out": str(folder), **run_suite(cells, folder, run, max_cost, max_tokens)}
    if as_json:
        print_json(result)
    else:
        print("\n".join(map(plain, table_lines(result))))
    if result["stopped"] == "interrupted":
        raise typer.Exit(INTERRUPTED)
    lost = sum(row["n_failed_infra"] for row in result["rows"])
    raise typer.Exit(1 if lost or result["stopped"] else 0)


def table_lines(result: Mapping[str, Any]) -> Iterator[str]:
    """The table of a suite in lines of text."""
    rows = [_cells(row) for row in result["rows"]]
    heads = dict(zip(rows[0], rows[0], strict=True))
    widths = {key: max(len(row[key]) for row in (heads, *rows)) for key in heads}
    for row in (heads, *rows):
        yield "  ".join(text.ljust(widths[key]) for key, text in row.items()).rstrip()
    for full in result["rows"]:
        if full["n_trained_on"]:
            yield f"{full['name']}: {full['n_trained_on']} of its tasks were used for training"
    if result["stopped"]:
        yield (
            f"{result['stopped'].replace('_', '-')}: {result['n_missing']} evaluations were not"
            " started; run the same command to resume"
        )


def _cells(row: Mapping[str, Any]) -> dict[str, str]:
    """The texts of a row; every row of a suite has the columns of the first k alone."""
    k, value = next(iter(row["pass_at"].items()))
    low, high = row["ci95"][k] or (None, None)
    known = value is not None and low is not None
    return {
        "name": row["name"],
        "pass@k": f"pass@{k} {value:.4f}" if known else "unknown",
        "95 %": f"{low:.4f} to {high:.4f}" if known else "",
        "others": " ".join(
            f"@{n} {v:.4f}" for n, v in list(row["pass_at"].items())[1:] if v is not None
        ),
        "tasks": str(row["n_tasks"]),
        "episodes": str(row["n_episodes"]),
        "lost": str(row["n_failed_infra"]),
        "missing": str(row["n_missing"]),
        "refused": str(row["n_refused"]),
        "tokens": f"{row['tokens']:,}",
        "US$": "" if row["usd"] is None else f"{row['usd']:.4f}",
    }

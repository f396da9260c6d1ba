"""`agentrl export`: a run in a format that others read."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from agentrl.cli.options import Json, Run, print_json


def export(
    run: Run,
    form: Annotated[str, typer.Argument(metavar="FORMAT", help="jsonl, parquet or inspect.")],
    out: Annotated[Path, typer.Argument(help="File to write; it ends in .eval for inspect.")],
    as_json: Json = False,
) -> None:
    """Export the episodes of a run as JSON lines, Parquet, or a log for Inspect's viewer."""
    from agentrl.evaluation.export import export as write

    count = write(run, form, out)
    if as_json:
        print_json({"out": str(out), "format": form, "n_episodes": count})
    else:
        print(f"wrote {count} episodes to {out}")

"""`agentrl export`: a run in a format that others read."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from agentrl.cli.options import Json, print_json


def export(
    run: Annotated[Path, typer.Argument(help="Folder of an evaluation or a training run.")],
    form: Annotated[str, typer.Argument(metavar="FORMAT", help="jsonl, parquet or inspect.")],
    out: Annotated[Path, typer.Argument(help="File to write; for inspect it ends in .eval.")],
    as_json: Json = False,
) -> None:
    """Write a run's episodes as JSON lines, as Parquet, or as a log for Inspect's viewer."""
    from agentrl.evaluation.results.export import export as write

    count = write(run, form, out)
    if as_json:
        print_json({"out": str(out), "format": form, "n_episodes": count})
    else:
        print(f"wrote {count} episodes to {out}")

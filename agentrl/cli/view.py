"""`agentrl view`: the report of a run."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Annotated

import typer

from agentrl.cli.options import Json, print_json
from agentrl.errors import ConfigError


def view(
    run: Annotated[Path, typer.Argument(help="Folder of an evaluation or a training run.")],
    as_json: Json = False,
) -> None:
    """Write the report of a run as one self-contained HTML page."""
    from agentrl.report.page import write_report

    page = write_report(_existing_run(run))
    if as_json:
        print_json({"report": str(page)})
    else:
        print(f"wrote {page}")


def _existing_run(folder: Path) -> Path:
    if folder.is_dir():
        return folder
    if folder.exists():
        raise ConfigError(
            f"{folder} is a file: give the run folder, as in agentrl view {folder.parent}"
        )
    demo = re.fullmatch(r"demo-(\d+)", folder.name)
    seed = f" SEED={demo[1]}" if demo and demo[1] != "0" else ""
    fix = (
        f"create it with `make demo{seed}`"
        if demo
        else "give the --out folder of an evaluation or a training run"
    )
    raise ConfigError(f"run folder {folder} does not exist: {fix}")

"""`agentrl convert`: public task formats into task files."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from agentrl.cli.options import Json, print_json


def convert(
    format_: Annotated[str, typer.Argument(metavar="FORMAT", help="mbpp, mbppplus or humaneval.")],
    source: Annotated[Path, typer.Argument(help="File in that format, plain or .gz.")],
    target: Annotated[Path, typer.Argument(help="Task file to write.")],
    as_json: Json = False,
) -> None:
    """Convert a public task format into a task file."""
    from agentrl.verifiers.code.formats import convert as run

    count = run(format_, source, target)
    if as_json:
        print_json({"tasks": count, "out": str(target)})
    else:
        print(f"wrote {count} tasks to {target}")

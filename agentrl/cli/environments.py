"""`agentrl list` and `agentrl new`: which environments there are, and how a new one begins."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from agentrl.cli.options import Json, print_json


def list_environments(as_json: Json = False) -> None:
    """List environments with their version, number of tasks and sandbox needs."""
    from agentrl.registry import describe_environment, environment_ids

    rows = [describe_environment(env_id) for env_id in environment_ids()]
    if as_json:
        print_json({"environments": rows})
        return
    for row in rows:
        count = "unknown" if row["summary"].startswith("cannot be used") else "endless"
        if row["tasks"] is not None:
            count = str(row["tasks"])
        print(f"{row['id']:<16} tasks: {count:<9} sandbox: {row['sandbox']:<9} {row['summary']}")


def new(
    name: Annotated[str, typer.Argument(help="Name of the environment, as in word-count.")],
    folder: Annotated[Path, typer.Option("--out", help="Folder to write the files to.")] = Path(),
    as_json: Json = False,
) -> None:
    """Write a working environment file and its test, ready to be changed."""
    from agentrl.cli.scaffold import try_it, write_environment

    files = write_environment(name, folder)
    if as_json:
        print_json({"files": [str(path) for path in files]})
        return
    print("\n".join(f"wrote {path}" for path in files))
    print("\n".join(f"try it: {command}" for command in try_it(*files)))

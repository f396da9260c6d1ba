"""`agentrl list`, `agentrl new` and `agentrl check`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from agentrl.cli.options import Json, Sandbox, Set, Trust, print_json, read_settings, trusted


def list_environments(as_json: Json = False) -> None:
    """List environments with version, task counts and sandbox needs."""
    from agentrl.registry import describe, environment_ids

    rows = [describe(env_id) for env_id in environment_ids()]
    if as_json:
        print_json({"environments": rows})
        return
    for row in rows:
        count = "endless" if row["tasks"] is None else row["tasks"]
        print(f"{row['id']:<16} tasks: {count!s:<9} sandbox: {row['sandbox']:<9} {row['summary']}")


def new(
    name: Annotated[str, typer.Argument(help="Name of the environment, as in word-count.")],
    folder: Annotated[Path, typer.Option("--out", help="Where to write it.")] = Path(),
    as_json: Json = False,
) -> None:
    """Write a new environment file with its test."""
    from agentrl.cli.scaffold import try_it, write_environment

    files = write_environment(name, folder)
    if as_json:
        print_json({"files": [str(path) for path in files]})
        return
    print("\n".join(f"wrote {path}" for path in files))
    print("\n".join(f"try it: {command}" for command in try_it(*files)))


def check(
    env: Annotated[str, typer.Argument(help="Environment id, or path/to/file.py:Class.")],
    set_: Set = None,
    tasks: Annotated[int, typer.Option(min=1, help="Tasks per split that are tried.")] = 8,
    sandbox: Sandbox = "auto",
    trust: Trust = False,
    as_json: Json = False,
) -> None:
    """Check the environment contract, rule by rule, in words."""
    from agentrl.evaluation.contract import check_named

    findings = check_named(env, read_settings(set_), n_tasks=tasks, sandbox=trusted(sandbox, trust))
    broken = [finding for finding in findings if finding.problem]
    rules = [
        {"rule": found.rule, "ok": not found.problem, "problem": found.problem}
        for found in findings
    ]
    if as_json:
        print_json({"ok": not broken, "rules": rules})
    else:
        for rule in rules:
            print(
                f"ok      {rule['rule']}"
                if rule["ok"]
                else f"BROKEN  {rule['rule']}: {rule['problem']}"
            )
    raise typer.Exit(1 if broken else 0)

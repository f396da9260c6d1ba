"""`agentrl audit`: whether an environment can be trusted."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import typer

from agentrl.cli.options import (
    Env,
    Json,
    LimitOption,
    Sandbox,
    Set,
    Split,
    Trust,
    print_json,
    read_limits,
    trusted,
)
from agentrl.records.plain import plain
from agentrl.settings import read_pairs

_MOST_SHOWN = 4
_MARKS = {"holds": "ok", "broken": "BROKEN", "not applicable": "-", "not judged": "NOT JUDGED"}


def audit(
    env: Env,
    set_: Set = None,
    limits: LimitOption = None,
    limit: Annotated[
        int, typer.Option("--limit", "--tasks", min=1, help="Maximum number of tasks to play.")
    ] = 8,
    split: Split = "test",
    sandbox: Sandbox = "auto",
    trust: Trust = False,
    policy: Annotated[
        str,
        typer.Option(help="Policy whose pass rate shows what is left to learn, as in hf:MODEL."),
    ] = "",
    fix_hints: Annotated[
        bool, typer.Option("--fix-hints", help="Say how to fix each broken promise.")
    ] = False,
    out: Annotated[Path | None, typer.Option(help="Folder to write audit.json to.")] = None,
    as_json: Json = False,
) -> None:
    """Test whether an environment can be trusted; exit with 1 if a promise is broken."""
    from agentrl.evaluation.audit import PROMISES, AuditPlan
    from agentrl.evaluation.audit import audit as run
    from agentrl.registry import factory
    from agentrl.report.display import step_bar

    make = factory(env, read_limits(limits), **read_pairs(set_))
    plan = AuditPlan(
        make, tasks=limit, split=split, sandbox=trusted(sandbox, trust), policy=policy, out=out
    )
    with step_bar(env, len(PROMISES)) as step:
        result = run(plan, step)
    if as_json:
        print_json(result)
    else:
        _print_table(result, fix_hints)
    raise typer.Exit(0 if result["ok"] else 1)


def _print_table(result: Mapping[str, Any], fix_hints: bool) -> None:
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    table = Table(box=None, pad_edge=False)
    for name in ("", "promise", "evidence"):
        table.add_column(name, overflow="fold")
    for row in result["rows"]:
        styles = {"broken": "bold red", "not judged": "bold yellow", "holds": "green"}
        style = styles.get(row["verdict"], "dim")
        reason = f"{row['task']}: {row['why']}" if row["task"] else row["why"]
        evidence = "; ".join(part for part in (reason, *_facts(row)) if part)
        mark = Text(_MARKS[row["verdict"]], style)
        table.add_row(mark, Text(row["words"]), Text(plain(evidence)))
        if fix_hints and row["verdict"] == "broken":
            table.add_row("", "", Text(f"fix: {row['hint']}", "italic"))
    console = Console(highlight=False)
    console.print(table)
    verdict = count_verdicts([row["verdict"] for row in result["rows"]])
    console.print(
        f"{result['env']}: {verdict} ({result['tasks']} tasks, {result['seconds']:g} s)",
        soft_wrap=True,
    )


def count_verdicts(verdicts: list[str]) -> str:
    """How many promises do not hold, in words."""
    parts = []
    for verdict in ("broken", "not judged"):
        count = verdicts.count(verdict)
        if count:
            parts.append(f"{count} promise{'s' if count > 1 else ''} {verdict}")
    return ", ".join(parts) or "every promise holds"


def _facts(row: Mapping[str, Any]) -> list[str]:
    return [f"{name} {_short(value)}" for name, value in row["evidence"].items()]


def _listed(words: list[str]) -> str:
    more = f" and {len(words) - _MOST_SHOWN} more" if len(words) > _MOST_SHOWN else ""
    return ", ".join(words[:_MOST_SHOWN]) + more or "none"


def _short(value: Any) -> str:
    if isinstance(value, Mapping):
        return _listed([f"{name} {_short(item)}" for name, item in value.items()])
    if isinstance(value, list):
        return _listed([_short(item) for item in value])
    return f"{value:.4g}" if isinstance(value, float) else str(value)

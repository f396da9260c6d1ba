"""`agentrl audit` and `agentrl regrade`: whether a score can be believed."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import typer

from agentrl.cli.options import Json, Sandbox, Set, Trust, print_json, read_settings, trusted
from agentrl.records.plain import plain

_MOST_SHOWN = 4
_MARKS = {"holds": "ok", "broken": "BROKEN", "not applicable": "-", "not judged": "NOT JUDGED"}


def audit(  # noqa: PLR0913 - one parameter per option
    env: Annotated[str, typer.Argument(help="Environment id, or path/to/file.py:Class.")],
    set_: Set = None,
    limit: Annotated[
        int, typer.Option("--limit", "--tasks", min=1, help="At most so many tasks are played.")
    ] = 8,
    split: Annotated[str, typer.Option(help="Split of the environment.")] = "test",
    sandbox: Sandbox = "auto",
    trust: Trust = False,
    policy: Annotated[
        str, typer.Option(help="Whose pass rate says how much there is to learn, as in hf:MODEL.")
    ] = "",
    fix_hints: Annotated[
        bool, typer.Option("--fix-hints", help="Say how to mend each broken promise.")
    ] = False,
    out: Annotated[Path | None, typer.Option(help="Folder for audit.json.")] = None,
    as_json: Json = False,
) -> None:
    """Say whether an environment can be trusted, promise by promise; exits 1 if one fails."""
    from agentrl.evaluation.audit import PROMISES, AuditPlan
    from agentrl.evaluation.audit import audit as run
    from agentrl.registry import factory
    from agentrl.report.display import step_bar

    make = factory(env, **read_settings(set_))
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


def regrade(
    run: Annotated[Path, typer.Argument(help="Folder of an evaluation or a training run.")],
    env: Annotated[str, typer.Option(help="Environment, where the run does not name it.")] = "",
    set_: Set = None,
    sandbox: Sandbox = "auto",
    trust: Trust = False,
    as_json: Json = False,
) -> None:
    """Score the recorded artifacts of a run anew, beside the old scores, which stay as they are."""
    from agentrl.evaluation.regrade import RegradePlan
    from agentrl.evaluation.regrade import regrade as again
    from agentrl.report.display import count_bar

    plan = RegradePlan(run, env, read_settings(set_), trusted(sandbox, trust))
    with count_bar(f"regrade {run}") as progress:
        result = again(plan, progress)
    nothing = typer.Exit(0 if result["n_regraded"] else 1)
    if as_json:
        print_json(result)
        raise nothing
    print(f"{result['n_changed']} of {result['n_regraded']} scores changed; wrote {result['out']}")
    for why, count in result["skipped"].items():
        print(plain(f"left out {count}: {why}"))
    for row in result["changed"]:
        key = "/".join(map(str, row["key"]))
        values = f"{row['old']['value']} -> {row['new']['value']}"
        print(plain(f"{key}: {values} ({row['new']['why']})"))
    raise nothing


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
        found = "; ".join(
            filter(
                None, (f"{row['task']}: {row['why']}" if row["task"] else row["why"], *_facts(row))
            )
        )
        table.add_row(Text(_MARKS[row["verdict"]], style), Text(row["words"]), Text(plain(found)))
        if fix_hints and row["verdict"] == "broken":
            table.add_row("", "", Text(f"fix: {row['hint']}", "italic"))
    console = Console(highlight=False)
    console.print(table)
    verdict = _verdict([row["verdict"] for row in result["rows"]])
    console.print(
        f"{result['env']}: {verdict} ({result['tasks']} tasks, {result['seconds']:g} s)",
        soft_wrap=True,
    )


def _verdict(verdicts: list[str]) -> str:
    """What the rows come to, in words."""
    words = {"broken": "broken", "not judged": "not judged"}
    counts = {text: verdicts.count(name) for name, text in words.items() if name in verdicts}
    told = [f"{count} promise{'s' * (count > 1)} {text}" for text, count in counts.items()]
    return ", ".join(told) or "every promise holds"


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


policies_app = typer.Typer(help="Safety policies.", no_args_is_help=True)


@policies_app.callback()
def policies() -> None:
    """Safety policies: what a tool call may do."""


@policies_app.command("test")
def test_policy(
    file: Annotated[
        str, typer.Argument(help="TOML file, file.py:NAME, or the name of a shipped policy.")
    ],
    as_json: Json = False,
) -> None:
    """Judge a policy's own examples; exit code 1 where one gets another ruling."""
    from agentrl.safety.guard import guard_factory
    from agentrl.safety.loading import read_policy, run_examples

    policy = read_policy(file)
    guard_factory(policy)  # its approval and canaries are checked too
    results = run_examples(policy)
    named = {result.got.rpartition(" by ")[2] for result in results}
    untried = [rule.id for rule in policy.ordered if rule.id not in named]
    failed = [result for result in results if not result.passed]
    if as_json:
        print_json(
            {
                "policy": policy.name,
                "examples": [result._asdict() for result in results],
                "failed": len(failed),
                "rules_without_example": untried,
            }
        )
    else:
        for result in results:
            mark = "ok    " if result.passed else "FAILED"
            wrong = "" if result.passed else f", wanted {result.wanted}"
            print(plain(f"{mark} {result.call}: {result.got}{wrong}"))
        print(f"{len(results) - len(failed)} of {len(results)} examples of {policy.name} hold")
        if untried:
            print(plain(f"no example tries the rules {', '.join(untried)}"))
    raise typer.Exit(1 if failed else 0)

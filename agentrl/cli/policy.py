"""`agentrl policy`: try a safety policy on its own examples."""

from __future__ import annotations

from typing import Annotated

import typer

from agentrl.cli.options import Json, print_json
from agentrl.records.plain import plain

app = typer.Typer(help="Safety policies.", no_args_is_help=True)


@app.callback()
def policies() -> None:
    """Safety policies: what a tool call may do."""


@app.command("test")
def test_policy(
    file: Annotated[
        str, typer.Argument(help="TOML file, file.py:NAME, or the name of a shipped policy.")
    ],
    as_json: Json = False,
) -> None:
    """Judge a policy's own examples; exit code 1 where one gets another ruling."""
    from agentrl.safety.loading import read_policy, run_examples

    policy = read_policy(file)
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

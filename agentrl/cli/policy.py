"""`agentrl policy`: safety policies."""

from __future__ import annotations

from typing import Annotated

import typer

from agentrl.cli.options import Json, print_json
from agentrl.records.plain import plain

app = typer.Typer(help="Test safety policies.", no_args_is_help=True)


@app.callback()
def policies() -> None:
    """Test safety policies: which tool calls they allow, deny or escalate."""


@app.command("test")
def test_policy(
    file: Annotated[
        str, typer.Argument(help="TOML file, file.py:NAME, or the name of a shipped policy.")
    ],
    as_json: Json = False,
) -> None:
    """Judge the examples in a policy; exit with 1 if one gets another ruling than it expects."""
    from agentrl.safety.loading import read_policy, run_examples
    from agentrl.specs import GuardSpec

    policy = read_policy(file)
    GuardSpec.of(policy)  # checks its approval and canaries as well
    results = run_examples(policy)
    deciding = {result.got.rpartition(" by ")[2] for result in results}
    untested = [rule.id for rule in policy.ordered if rule.id not in deciding]
    failed = [result for result in results if not result.passed]
    if as_json:
        print_json(
            {
                "policy": policy.name,
                "examples": [result._asdict() for result in results],
                "failed": len(failed),
                "rules_without_example": untested,
            }
        )
        raise typer.Exit(1 if failed else 0)
    for result in results:
        mark = "ok    " if result.passed else "FAILED"
        expected = "" if result.passed else f", expected {result.wanted}"
        print(plain(f"{mark} {result.call}: {result.got}{expected}"))
    print(f"{len(results) - len(failed)} of {len(results)} examples of {policy.name} hold")
    if untested:
        print(plain(f"rules that no example tests: {', '.join(untested)}"))
    raise typer.Exit(1 if failed else 0)

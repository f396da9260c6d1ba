"""`agentrl regrade`: score the recorded artifacts of a run again."""

from __future__ import annotations

import typer

from agentrl.cli.options import Json, Run, RunEnv, Sandbox, Set, Trust, print_json, trusted
from agentrl.records.plain import plain
from agentrl.settings import read_pairs


def regrade(
    run: Run,
    env: RunEnv = "",
    set_: Set = None,
    sandbox: Sandbox = "auto",
    trust: Trust = False,
    as_json: Json = False,
) -> None:
    """Score the recorded artifacts of a run again; the old scores are kept."""
    from agentrl.evaluation.regrade import RegradePlan
    from agentrl.evaluation.regrade import regrade as run_again
    from agentrl.report.display import count_bar

    plan = RegradePlan(run, env, read_pairs(set_), trusted(sandbox, trust))
    with count_bar(f"regrade {run}") as progress:
        result = run_again(plan, progress)
    done = typer.Exit(0 if result["n_regraded"] else 1)
    if as_json:
        print_json(result)
        raise done
    print(f"{result['n_changed']} of {result['n_regraded']} scores changed; wrote {result['out']}")
    for reason, count in result["skipped"].items():
        print(plain(f"skipped {count}: {reason}"))
    for row in result["changed"]:
        key = "/".join(map(str, row["key"]))
        values = f"{row['old']['value']} -> {row['new']['value']}"
        print(plain(f"{key}: {values} ({row['new']['why']})"))
    raise done

"""`agentrl compare`: does one policy solve more than another, on the same tasks?"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any

import typer

from agentrl.cli.options import Json, print_json
from agentrl.records.plain import plain

_MOST_SHOWN = 10


def compare(
    first: Annotated[Path, typer.Argument(help="Folder (--out) of an evaluation.")],
    second: Annotated[Path, typer.Argument(help="Folder of the evaluation of the other policy.")],
    out: Annotated[Path | None, typer.Option(help="HTML page to write, with both curves.")] = None,
    as_json: Json = False,
) -> None:
    """Compare two evaluations task by task; different budgets are refused with exit code 2."""
    from agentrl.evaluation.compare import compare_runs

    result = compare_runs(first, second)
    if out is not None:
        from agentrl.report.comparison import write_comparison

        write_comparison(result, out)
        result["page"] = str(out)
    if as_json:
        print_json(result)
    else:
        print("\n".join(map(plain, comparison_lines(result))))


def comparison_lines(result: Mapping[str, Any]) -> Iterator[str]:
    """The result of `agentrl.evaluation.compare.compare_runs` in lines of text."""
    for name in ("first", "second"):
        safety = result[name].get("policy_file")
        under = f" under the safety policy {safety}" if safety else ""
        yield f"{name:<6} {result[name]['policy']}{under}  ({result[name]['run']})"
    low, high = result["ci95"]
    yield (
        f"second minus first {result['difference']:+.4f}  (95 % interval {low:+.4f} to {high:+.4f},"
        f" {result['n_tasks']} paired tasks)"
    )
    least = result["detectable"]
    power = f"; a difference of {least:.4f} is found 4 times of 5 on so many tasks" if least else ""
    yield f"p = {result['p_value']:.4g} ({result['test']}){power}"
    for name in ("first", "second"):
        tasks = result[f"only_{name}"]
        more = f" and {len(tasks) - _MOST_SHOWN} more" if len(tasks) > _MOST_SHOWN else ""
        shown = f": {', '.join(tasks[:_MOST_SHOWN])}{more}" if tasks else ""
        yield f"solved by the {name} alone {len(tasks)}{shown}"
    if any(result["n_unpaired"]):
        yield "left out, as the other has no score of them: {} and {} tasks".format(
            *result["n_unpaired"]
        )
    for row in result["curve"]:
        yield f"pass@{row['k']} {row['first']:.4f} and {row['second']:.4f}"
    yield result["says"]
    if "page" in result:
        yield f"wrote {result['page']}"

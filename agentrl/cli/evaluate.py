"""`agentrl eval`: measure a policy on an environment."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import typer

from agentrl.cli.options import (
    Json,
    Sandbox,
    Set,
    Trust,
    print_json,
    read_prices,
    read_settings,
    trusted,
)
from agentrl.errors import ConfigError
from agentrl.records.plain import plain


def evaluate(  # noqa: PLR0913 - one parameter per option
    env: Annotated[str, typer.Argument(help="Environment id, or path/to/file.py:Class.")],
    policy: Annotated[
        str, typer.Option(help="oracle, noop, hf:PATH or openai:MODEL@URL.")
    ] = "oracle",
    tasks: Annotated[
        Path | None, typer.Option(help="Task file, for environments that take one.")
    ] = None,
    split: Annotated[str, typer.Option(help="Split of the environment.")] = "test",
    limit: Annotated[
        int, typer.Option(help="At most so many tasks; 0: all, where the split ends.")
    ] = 0,
    samples: Annotated[int, typer.Option(help="Episodes per task.")] = 1,
    k: Annotated[str, typer.Option(help="Comma-separated values of k for pass@k.")] = "1",
    sandbox: Sandbox = "auto",
    trust: Trust = False,
    seed: Annotated[int, typer.Option(help="Every other seed is derived from it.")] = 0,
    temperature: Annotated[float, typer.Option(help="Of sampled policies.")] = 1.0,
    price: Annotated[
        str, typer.Option(help="US dollars per million prompt,completion tokens of a served model.")
    ] = "",
    out: Annotated[
        Path | None, typer.Option(help="Folder of records; an interrupted run goes on there.")
    ] = None,
    allow_lost: Annotated[
        int, typer.Option(min=0, help="Episodes that infrastructure may fail; more exit with 1.")
    ] = 0,
    set_: Set = None,
    as_json: Json = False,
) -> None:
    """Measure a policy: unbiased pass@k with its interval, endings, cost and lost episodes."""
    from agentrl.evaluation.run import EvalPlan, EvalProgress
    from agentrl.evaluation.run import evaluate as run
    from agentrl.evaluation.summary import summary_lines
    from agentrl.registry import factory
    from agentrl.report.display import episode_bar

    settings = read_settings(set_) | ({"tasks_file": str(tasks)} if tasks else {})
    plan = EvalPlan(
        make=factory(env, **settings),
        policy=policy,
        split=split,
        limit=limit,
        samples=samples,
        ks=_numbers(k),
        sandbox=trusted(sandbox, trust),
        seed=seed,
        temperature=temperature,
        prices=read_prices(price),
        out=out,
    )
    with episode_bar(f"{env} · {policy}") as bar:
        result = run(
            plan, EvalProgress(lambda total: bar.restart(f"{env} · {policy}", total), bar.episode)
        )
    if as_json:
        print_json(result)
    else:
        print("\n".join(map(plain, summary_lines(result))))
    raise typer.Exit(_code(result, allow_lost))


def _numbers(k: str) -> tuple[int, ...]:
    try:
        return tuple(int(part) for part in k.split(","))
    except ValueError:
        raise ConfigError(
            f"--k {k!r}: give whole numbers separated by commas, as in 1,4,8"
        ) from None


def _code(result: Mapping[str, Any], allow_lost: int) -> int:
    """The exit code: 1 where more episodes were lost than somebody said is fine, or all were."""
    lost, count = result["n_failed_infra"], result["n_episodes"]
    if lost > allow_lost:
        print(
            f"agentrl: infrastructure failed {lost} of {count} episodes, which are in no figure:"
            " play them again with the same --out, or accept them with"
            f" --allow-lost {lost}",
            file=sys.stderr,
        )
    return int(lost > allow_lost or lost == count > 0)

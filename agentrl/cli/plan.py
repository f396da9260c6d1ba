"""`agentrl plan`: what asynchronous training would gain."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from agentrl.cli.options import Json, print_json
from agentrl.errors import ConfigError

WORTH = 1.1
"""Speed-up below which the command advises against asynchronous training."""


def plan(
    run: Annotated[Path, typer.Argument(help="Folder of a training run.")],
    staleness: Annotated[
        str, typer.Option(help="Comma-separated values of max_staleness to try.")
    ] = "1,2,4",
    slots: Annotated[
        int | None, typer.Option(min=1, help="Episodes at the same time [default: as in the run].")
    ] = None,
    gpu: Annotated[
        bool, typer.Option("--gpu", help="Engine and updates do not share processors.")
    ] = False,
    as_json: Json = False,
) -> None:
    """Say whether mode = "async" would help a run, by replaying its times."""
    from agentrl.evaluation.forecast import forecast, read_times

    try:
        values = [int(value) for value in staleness.split(",")]
    except ValueError:
        values = [-1]
    if min(values) < 0:
        raise ConfigError(
            f"--staleness {staleness!r} must be whole numbers from 0: --staleness 1,2,4",
            setting="staleness",
        )
    times = read_times(run, shares_cores=not gpu)
    rows = forecast(times, values, slots)
    best = max(rows, key=lambda row: row.speedup)
    helps = best.speedup >= WORTH
    if as_json:
        print_json({"helps": helps, "forecasts": [asdict(row) for row in rows]})
        return
    for row in rows:
        print(
            f"max_staleness = {row.staleness}: {row.seconds:.0f} s, {row.speedup:.2f} times as"
            f" fast, trainer idle {row.trainer_idle:.0%}"
        )
    if not any(times.engine):
        print("not counted: sampling, whose seconds this engine does not report")
    if helps:
        print(f'yes: set mode = "async" and max_staleness = {best.staleness}')
    else:
        print('no: the engine or the updates take most of the time; keep mode = "sync"')

"""`agentrl train` and `agentrl demo`."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated

import typer

from agentrl.cli.options import Json, LimitOption, Sandbox, SetConfig, print_json
from agentrl.errors import ConfigError

_TRAINING_ENV = {
    "HF_HUB_DISABLE_TELEMETRY": "1",  # TRL would report every trainer that is created
    "MKL_DYNAMIC": "FALSE",  # a varying number of threads changes the last bits
    "OMP_DYNAMIC": "FALSE",
    "TOKENIZERS_PARALLELISM": "false",
}


@contextmanager
def training_parts() -> Iterator[None]:
    """Report a missing import in this block as a missing extra [train]."""
    for name, value in _TRAINING_ENV.items():
        os.environ.setdefault(name, value)
    try:
        yield
    except ImportError as error:
        raise ConfigError(
            f"training cannot be loaded ({error}): pip install 'agentrl[train]'"
        ) from error


def train(
    config: Annotated[Path | None, typer.Argument(help="TOML file with the settings.")] = None,
    out: Annotated[Path, typer.Option(help="Folder of the run.")] = Path("runs/train"),
    set_: SetConfig = None,
    limits: LimitOption = None,
    resume: Annotated[
        bool, typer.Option("--resume", help="Resume from the last checkpoint in --out.")
    ] = False,
    log_to: Annotated[
        str, typer.Option(help="Comma-separated trackers to log to: tensorboard, wandb, trackio.")
    ] = "",
    plan: Annotated[bool, typer.Option("--plan", help="Print the memory plan and exit.")] = False,
    as_json: Json = False,
) -> None:
    """Train from a config: online RL, one offline stage, or a multi-stage recipe."""
    overrides = [*(set_ or []), *(f"limits.{pair}" for pair in limits or ())]
    if config is None:
        raise ConfigError("CONFIG is missing: give a TOML file, as in agentrl train calc.toml")
    with training_parts():
        from agentrl.trainers.pipeline import is_offline, run_offline
        from agentrl.trainers.session import plan_training, run_training

    if is_offline(config, overrides):
        if plan or log_to:
            option = "--plan" if plan else "--log-to"
            raise ConfigError(f"{option} is for online training, and {config} names offline stages")
        with training_parts():
            result = run_offline(config, out, overrides=overrides, resume=resume)
        print_json(result) if as_json else print(result["said"])
        return
    if plan:
        memory = plan_training(config, overrides, show=not as_json)
        if as_json:
            print_json(memory)
        return
    trackers = [name for name in log_to.split(",") if name]
    result = run_training(config, out, overrides=overrides, resume=resume, log_to=trackers)
    if as_json:
        print_json(result)
    else:
        done, trained = result["steps"], result["trained"]
        rounds = f"{trained} rounds" + (f", {done} in all" if done != trained else "")
        print(f"trained {rounds}; run folder {result['run']}; model {result['model']}")


def demo(
    seed: Annotated[int, typer.Option(help="Random seed.")] = 0,
    sandbox: Sandbox = "auto",
    engine: Annotated[str, typer.Option(help="Engine that samples: transformers or vllm.")] = (
        "transformers"
    ),
    out: Annotated[
        Path | None, typer.Option(help="Folder of the run; default runs/demo-SEED.")
    ] = None,
    as_json: Json = False,
) -> None:
    """Train a tiny agent to repair programs, from scratch to a report, in a few minutes."""
    with training_parts():
        from agentrl.trainers.demo import run_demo

    folder = out or Path(f"runs/demo-{seed}")
    result = run_demo(seed=seed, sandbox=sandbox, folder=folder, engine=engine)
    if as_json:
        print_json(result)

"""`agentrl train` and `agentrl demo`."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated

import typer

from agentrl.cli.options import Json, Sandbox, Set, print_json
from agentrl.errors import ConfigError

_TRAINING_ENV = {
    "HF_HUB_DISABLE_TELEMETRY": "1",  # TRL would tell its maker of every trainer that is made
    "MKL_DYNAMIC": "FALSE",  # a number of threads that follows the load changes the last bits
    "OMP_DYNAMIC": "FALSE",
    "TOKENIZERS_PARALLELISM": "false",
}


@contextmanager
def training_parts() -> Iterator[None]:
    """What an import lacks in here is part of the extra [train]."""
    for name, value in _TRAINING_ENV.items():
        os.environ.setdefault(name, value)
    try:
        yield
    except ImportError as error:
        raise ConfigError(
            f"training cannot be loaded ({error}): pip install 'agentrl[train]'"
        ) from error


def train(  # noqa: PLR0913 - the options of a command
    config: Annotated[
        Path | None,
        typer.Argument(help="TOML file with the settings; with --from-trl: where to write them."),
    ] = None,
    out: Annotated[Path, typer.Option(help="Run folder.")] = Path("runs/train"),
    set_: Set = None,
    resume: Annotated[
        bool, typer.Option("--resume", help="Continue from the run folder's last checkpoint.")
    ] = False,
    log_to: Annotated[str, typer.Option(help="Also log to these: tensorboard,wandb,trackio.")] = "",
    from_trl: Annotated[
        Path | None,
        typer.Option(help="Only translate this JSON file of a trl.GRPOConfig; --set env, model."),
    ] = None,
    plan: Annotated[
        bool, typer.Option("--plan", help="Only say which models and bytes the run will hold.")
    ] = False,
    as_json: Json = False,
) -> None:
    """Train as a file says: online, on the groups that a policy plays; one offline stage; or a
    recipe of stages.
    """
    if from_trl:
        _translate(from_trl, config, set_ or [], as_json)
        return
    if config is None:
        raise ConfigError("CONFIG is missing: give a TOML file, as in agentrl train calc.toml")
    with training_parts():
        from agentrl.trainers.online.session import plan_training, run_training
        from agentrl.trainers.pipeline import is_offline, run_offline

    if is_offline(config, set_ or []):
        if plan or log_to:
            option = "--plan" if plan else "--log-to"
            raise ConfigError(f"{option} is for online training, and {config} names offline stages")
        with training_parts():
            found = run_offline(config, out, overrides=set_ or [], resume=resume)
        print_json(found) if as_json else print(found["said"])
        return
    if plan:
        found = plan_training(config, set_ or [], show=not as_json)
        if as_json:
            print_json(found)
        return
    trackers = [name for name in log_to.split(",") if name]
    result = run_training(config, out, overrides=set_ or [], resume=resume, log_to=trackers)
    if as_json:
        print_json(result)
    else:
        done, trained = result["steps"], result["trained"]
        rounds = f"{trained} rounds" + (f", {done} in all" if done != trained else "")
        print(f"trained {rounds}; run folder {result['run']}; model {result['model']}")


def _translate(source: Path, target: Path | None, overrides: list[str], as_json: bool) -> None:
    """Say what a GRPOConfig is here, on the terminal or in a file."""
    if target and target.exists():
        raise ConfigError(f"{target} exists: name a file that does not, to write the settings to")
    with training_parts():
        from agentrl.trainers.from_trl.translate import translate_file

        found = translate_file(source, overrides)
    text = found.toml(str(source))
    if target:
        target.write_text(text)
    if as_json:
        print_json(vars(found) | {"file": str(target) if target else None})
    else:
        notes = (
            f"{len(found.differs)} settings differ in meaning, {len(found.unmatched)} have no match"
        )
        print(f"wrote {target}: {notes}; its head names them" if target else text)


def demo(
    seed: Annotated[int, typer.Option(help="Of everything.")] = 0,
    sandbox: Sandbox = "auto",
    engine: Annotated[str, typer.Option(help="What samples: transformers or vllm.")] = (
        "transformers"
    ),
    out: Annotated[Path | None, typer.Option(help="Run folder; default runs/demo-SEED.")] = None,
    as_json: Json = False,
) -> None:
    """Train a tiny agent to repair programs, from nothing to a report, in a few minutes."""
    with training_parts():
        from agentrl.trainers.demo import run_demo

    folder = out or Path(f"runs/demo-{seed}")
    result = run_demo(seed=seed, sandbox=sandbox, folder=folder, engine=engine)
    if as_json:
        print_json(result)

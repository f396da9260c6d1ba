"""The command line. Every command takes --json and then prints one JSON object as its last line.

Bad input ends with one sentence on stderr and exit code 2; broken infrastructure with exit code 1.
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any, NoReturn

import typer

from agentrl import __version__, cli_audit, cli_images
from agentrl.cli_options import Json, Sandbox, Set, Trust, print_json, read_prices, read_settings, trusted
from agentrl.errors import AgentRLError, ConfigError, UserError

app = typer.Typer(
    name="agentrl",
    help="Define tool-use environments, train agents on them, and measure them.",
    add_completion=False,
    pretty_exceptions_enable=False,
)

app.add_typer(cli_images.app, name="images")
app.command()(cli_audit.audit)
app.command()(cli_audit.regrade)

_INTERRUPTED = 130
_TRAINING_ENV = {
    "HF_HUB_DISABLE_TELEMETRY": "1",  # TRL would tell its maker of every trainer that is made
    "MKL_DYNAMIC": "FALSE",  # a number of threads that follows the load changes the last bits
    "OMP_DYNAMIC": "FALSE",
    "TOKENIZERS_PARALLELISM": "false",
}
# The command-line library's own error has no public name; its public descendant leads to it.
_CommandLineError: Any = next(base for base in typer.BadParameter.__mro__ if base.__name__ == "ClickException")


def main() -> None:
    """Entry point of the `agentrl` program."""
    try:
        code = app(sys.argv[1:] or ["--help"], prog_name="agentrl", standalone_mode=False)
    except _CommandLineError as error:
        if not (sentence := _worded(error)):  # a group without a command: its help has been shown
            raise SystemExit(0) from error
        _fail(sentence, 2)
    except (typer.Abort, KeyboardInterrupt):
        code = _INTERRUPTED
    except UserError as error:
        _fail(str(error), 2)
    except AgentRLError as error:
        _fail(f"{type(error).__name__}: {error}", 1)
    except OSError as error:
        if error.filename is None:
            raise
        _fail(f"{error.filename}: {error.strerror}", 2)
    if code == _INTERRUPTED:
        _fail("interrupted", _INTERRUPTED)
    raise SystemExit(code if isinstance(code, int) else 0)


def _fail(sentence: str, code: int) -> NoReturn:
    print(f"agentrl: {' '.join(sentence.split())}", file=sys.stderr)
    raise SystemExit(code)


def _worded(error: Any) -> str:
    """A command-line error with option, value and fix; what the value's validator says is not for people."""
    problems: list[dict[str, Any]] = getattr(error.__cause__, "errors", list)()
    if not isinstance(error, typer.BadParameter) or not problems or error.param is None:
        return str(error.format_message())
    option, problem = error.param.opts[0], problems[0]
    fixes = {
        "int_parsing": f"must be a whole number, as in {option} 8",
        "float_parsing": f"must be a number, as in {option} 0.7",
        "greater_than_equal": f"must be at least {problem.get('ctx', {}).get('ge')}",
    }
    fix = fixes.get(problem["type"])
    return f"{option} {problem['input']!r} {fix}" if fix else str(error.format_message())


def _print_version(wanted: bool) -> None:
    if wanted:
        print(f"agentrl {__version__}")
        raise typer.Exit


@app.callback()
def program(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version and end.")
    ] = False,
) -> None:
    """Options of the program itself."""


@contextmanager
def _training_parts() -> Iterator[None]:
    """What an import lacks in here is part of the extra [train]."""
    for name, value in _TRAINING_ENV.items():
        os.environ.setdefault(name, value)
    try:
        yield
    except ImportError as error:
        raise ConfigError(f"training cannot be loaded ({error}): pip install 'agentrl[train]'") from error


@app.command()
def doctor(as_json: Json = False) -> None:
    """Say which parts are present on this machine, and how to get each missing one."""
    from agentrl.doctor import examine

    parts = examine()
    if as_json:
        print_json({"parts": parts})
        return
    for name, part in parts.items():
        print(f"{'ok     ' if part['ok'] else 'missing'}  {name:<14} {part['detail']}")


@app.command("list")
def list_environments(as_json: Json = False) -> None:
    """List environments with version, task counts and sandbox needs."""
    from agentrl.registry import describe, environment_ids

    rows = [describe(env_id) for env_id in environment_ids()]
    if as_json:
        print_json({"environments": rows})
        return
    for row in rows:
        count = "endless" if row["tasks"] is None else row["tasks"]
        print(f"{row['id']:<16} tasks: {count!s:<9} sandbox: {row['sandbox']:<9} {row['summary']}")


@app.command()
def new(
    name: Annotated[str, typer.Argument(help="Name of the environment, as in word-count.")],
    folder: Annotated[Path, typer.Option("--out", help="Where to write it.")] = Path(),
    as_json: Json = False,
) -> None:
    """Write a new environment file with its test."""
    from agentrl.scaffold import try_it, write_environment

    files = write_environment(name, folder)
    if as_json:
        print_json({"files": [str(path) for path in files]})
        return
    print("\n".join(f"wrote {path}" for path in files))
    print("\n".join(f"try it: {command}" for command in try_it(*files)))


@app.command()
def check(
    env: Annotated[str, typer.Argument(help="Environment id, or path/to/file.py:Class.")],
    set_: Set = None,
    tasks: Annotated[int, typer.Option(min=1, help="Tasks per split that are tried.")] = 8,
    sandbox: Sandbox = "auto",
    trust: Trust = False,
    as_json: Json = False,
) -> None:
    """Check the environment contract, rule by rule, in words."""
    from agentrl.evaluation.contract import check_named

    findings = check_named(env, read_settings(set_), n_tasks=tasks, sandbox=trusted(sandbox, trust))
    broken = [finding for finding in findings if finding.problem]
    rules = [{"rule": found.rule, "ok": not found.problem, "problem": found.problem} for found in findings]
    if as_json:
        print_json({"ok": not broken, "rules": rules})
    else:
        for rule in rules:
            print(f"ok      {rule['rule']}" if rule["ok"] else f"BROKEN  {rule['rule']}: {rule['problem']}")
    raise typer.Exit(1 if broken else 0)


@app.command("eval")
def evaluate(  # noqa: PLR0913 - one parameter per option
    env: Annotated[str, typer.Argument(help="Environment id, or path/to/file.py:Class.")],
    policy: Annotated[str, typer.Option(help="oracle, noop, hf:PATH or openai:MODEL@URL.")] = "oracle",
    tasks: Annotated[Path | None, typer.Option(help="Task file, for environments that take one.")] = None,
    split: Annotated[str, typer.Option(help="Split of the environment.")] = "test",
    limit: Annotated[int, typer.Option(help="At most so many tasks; 0: all, where the split ends.")] = 0,
    samples: Annotated[int, typer.Option(help="Episodes per task.")] = 1,
    k: Annotated[str, typer.Option(help="Comma-separated values of k for pass@k.")] = "1",
    sandbox: Sandbox = "auto",
    trust: Trust = False,
    seed: Annotated[int, typer.Option(help="Every other seed is derived from it.")] = 0,
    temperature: Annotated[float, typer.Option(help="Of sampled policies.")] = 1.0,
    price: Annotated[str, typer.Option(help="US dollars per million prompt,completion tokens of a served model.")] = "",
    out: Annotated[Path | None, typer.Option(help="Folder of records; an interrupted run goes on there.")] = None,
    set_: Set = None,
    as_json: Json = False,
) -> None:
    """Measure a policy: unbiased pass@k with its interval, endings, cost; infrastructure failures apart."""
    from agentrl.display import episode_bar
    from agentrl.evaluation.run import EvalPlan, EvalProgress
    from agentrl.evaluation.run import evaluate as run
    from agentrl.evaluation.summary import summary_lines
    from agentrl.registry import factory

    settings = read_settings(set_) | ({"tasks_file": str(tasks)} if tasks else {})
    try:
        ks = tuple(int(part) for part in k.split(","))
    except ValueError:
        raise ConfigError(f"--k {k!r}: give whole numbers separated by commas, as in 1,4,8") from None
    plan = EvalPlan(
        make=factory(env, **settings),
        policy=policy,
        split=split,
        limit=limit,
        samples=samples,
        ks=ks,
        sandbox=trusted(sandbox, trust),
        seed=seed,
        temperature=temperature,
        prices=read_prices(price),
        out=out,
    )
    with episode_bar(f"{env} · {policy}") as bar:
        result = run(plan, EvalProgress(lambda total: bar.restart(f"{env} · {policy}", total), bar.episode))
    if as_json:
        print_json(result)
    else:
        print("\n".join(summary_lines(result)))
    raise typer.Exit(1 if result["n_episodes"] == result["n_failed_infra"] > 0 else 0)


@app.command()
def convert(
    format_: Annotated[str, typer.Argument(metavar="FORMAT", help="mbpp, mbppplus or humaneval.")],
    source: Annotated[Path, typer.Argument(help="File in that format; .gz is fine.")],
    target: Annotated[Path, typer.Argument(help="Task file to write.")],
    as_json: Json = False,
) -> None:
    """Turn a public task format into a task file."""
    from agentrl.convert import convert as run

    count = run(format_, source, target)
    if as_json:
        print_json({"tasks": count, "out": str(target)})
    else:
        print(f"wrote {count} tasks to {target}")


@app.command()
def train(  # noqa: PLR0913 - the options of a command
    config: Annotated[Path, typer.Argument(help="TOML file with the settings.")],
    out: Annotated[Path, typer.Option(help="Run folder.")] = Path("runs/train"),
    set_: Set = None,
    resume: Annotated[bool, typer.Option("--resume", help="Continue from the run folder's last checkpoint.")] = False,
    log_to: Annotated[str, typer.Option(help="Also log to these: tensorboard,wandb,trackio.")] = "",
    plan: Annotated[bool, typer.Option("--plan", help="Only say which models and bytes the run will hold.")] = False,
    as_json: Json = False,
) -> None:
    """Train a policy online, on the groups it plays."""
    with _training_parts():
        from agentrl.trainers.session import plan_training, run_training

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
        print(f"trained {result['steps']} rounds; run folder {result['run']}; model {result['model']}")


@app.command()
def view(
    run: Annotated[Path, typer.Argument(help="Run folder.")],
    as_json: Json = False,
) -> None:
    """Write the report of a run as one self-contained page."""
    from agentrl.evaluation.report import write_report

    page = write_report(_existing_run(run))
    if as_json:
        print_json({"report": str(page)})
    else:
        print(f"wrote {page}")


def _existing_run(folder: Path) -> Path:
    if folder.is_dir():
        return folder
    if folder.exists():
        raise ConfigError(f"{folder} is a file: give the run folder, as in agentrl view {folder.parent}")
    demo = re.fullmatch(r"demo-(\d+)", folder.name)
    seed = f" SEED={demo[1]}" if demo and demo[1] != "0" else ""
    fix = f"make it with `make demo{seed}`" if demo else "give the --out folder of an evaluation or a training run"
    raise ConfigError(f"run folder {folder} does not exist: {fix}")


@app.command()
def demo(
    seed: Annotated[int, typer.Option(help="Of everything.")] = 0,
    sandbox: Sandbox = "auto",
    out: Annotated[Path | None, typer.Option(help="Run folder; default runs/demo-SEED.")] = None,
    as_json: Json = False,
) -> None:
    """Train a tiny agent to repair programs, from nothing to a report, in minutes on this machine."""
    with _training_parts():
        from agentrl.trainers.demo import run_demo

    result = run_demo(seed=seed, sandbox=sandbox, folder=out or Path(f"runs/demo-{seed}"))
    if as_json:
        print_json(result)


if __name__ == "__main__":
    main()

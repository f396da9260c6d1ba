"""The command line. With --json, a command prints one JSON object as its last line.

Bad input ends with a sentence for each mistake on stderr and exit code 2; broken infrastructure
with exit code 1.
"""

from __future__ import annotations

import errno
import os
import sys
import traceback
from types import TracebackType
from typing import Annotated, Any, NoReturn

import typer

from agentrl import __version__
from agentrl.cli import (
    audit,
    check,
    compare,
    convert,
    doctor,
    environments,
    evaluate,
    export,
    images,
    label,
    plan,
    policy,
    profile,
    recipes,
    regrade,
    reward,
    serve,
    suite,
    train,
    view,
    why,
)
from agentrl.errors import AgentRLError, UserError
from agentrl.records.plain import plain
from agentrl.records.redact import redactor
from agentrl.settings import did_you_mean

app = typer.Typer(
    name="agentrl",
    help="Define tool-use environments, train agents on them, and measure them.",
    add_completion=False,
    pretty_exceptions_enable=False,
)

app.command()(doctor.doctor)
app.command("list")(environments.list_environments)
app.command()(environments.new)
app.command()(check.check)
app.command()(audit.audit)
app.command("eval")(evaluate.evaluate)
app.command()(profile.profile)
app.command()(compare.compare)
app.command()(suite.suite)
app.command("label")(label.label_run)
app.command()(export.export)
app.command()(convert.convert)
app.command()(train.train)
app.command()(recipes.recipes)
app.command()(regrade.regrade)
app.command()(view.view)
app.command()(why.why)
app.command()(plan.plan)
app.command()(serve.serve)
app.add_typer(reward.app, name="reward")
app.add_typer(images.app, name="images")
app.add_typer(policy.app, name="policy")
app.command()(train.demo)

_INTERRUPTED = 130
_FULL = (os.strerror(errno.ENOSPC), os.strerror(errno.EDQUOT))
# The command-line library's own error has no public name; its public descendant leads to it.
_CommandLineError: Any = next(
    base for base in typer.BadParameter.__mro__ if base.__name__ == "ClickException"
)


def main() -> None:
    """Entry point of the `agentrl` program."""
    # Must be set before torch is loaded. Waiting threads then sleep instead of spinning, which
    # takes most of the CPU time and delays training while other programs use the cores.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    sys.excepthook = _trace
    try:
        code = app(sys.argv[1:] or ["--help"], prog_name="agentrl", standalone_mode=False)
    except _CommandLineError as error:
        sentence = _describe(error)
        if not sentence:  # a group without a command: its help has been printed
            raise SystemExit(0) from error
        _fail(sentence, 2)
    except (typer.Abort, KeyboardInterrupt):
        code = _INTERRUPTED
    except UserError as error:
        _fail(str(error), 2)
    except AgentRLError as error:
        _fail(f"{type(error).__name__}: {error}", 1)
    except Exception as error:
        # Libraries in other languages raise their own types, so the text decides.
        if any(words in str(error) for words in _FULL):
            _fail(f"the disk is full: make room, then run the same command again ({error})", 1)
        if not isinstance(error, OSError) or error.filename is None:
            raise
        _fail(f"{error.filename}: {error.strerror}", 2)
    if code == _INTERRUPTED:
        _fail("interrupted", _INTERRUPTED)
    raise SystemExit(code if isinstance(code, int) else 0)


def _trace(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    """Print the traceback of a bug, with secrets and control characters removed: its message may
    quote an agent.
    """
    text = "".join(traceback.format_exception(kind, error, trace))
    print(plain(redactor().text(text), lines=True), file=sys.stderr, end="")


def _fail(text: str, code: int) -> NoReturn:
    """Print an error, a line for each mistake, and exit."""
    for line in text.splitlines():
        sentence = redactor().text(" ".join(line.split()))
        print(f"agentrl: {plain(sentence)}", file=sys.stderr)
    raise SystemExit(code)


def _describe(error: Any) -> str:
    """An error of the command line with option, value and fix, without the words of pydantic."""
    text = str(error.format_message())
    if text.startswith("No such command"):
        command = text.split("'")[1]
        hint = did_you_mean(command, error.ctx.command.commands)
        return f"there is no command {command!r}: {hint}"
    problems: list[dict[str, Any]] = getattr(error.__cause__, "errors", list)()
    if not isinstance(error, typer.BadParameter) or not problems or error.param is None:
        return text
    option, problem = error.param.opts[0], problems[0]
    fixes = {
        "int_parsing": f"must be a whole number, as in {option} 8",
        "float_parsing": f"must be a number, as in {option} 0.7",
        "greater_than_equal": f"must be at least {problem.get('ctx', {}).get('ge')}",
    }
    fix = fixes.get(problem["type"])
    return f"{option} {problem['input']!r} {fix}" if fix else text


def _print_version(is_wanted: bool) -> None:
    if is_wanted:
        print(f"agentrl {__version__}")
        raise typer.Exit


@app.callback()
def program(
    version: Annotated[
        bool,
        typer.Option(
            "--version", callback=_print_version, is_eager=True, help="Print the version and exit."
        ),
    ] = False,
) -> None:
    """Define tool-use environments, train agents on them, and measure them."""

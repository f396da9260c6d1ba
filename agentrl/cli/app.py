"""The command line. Every command takes --json and then prints one JSON object as its last line.

Bad input ends with one sentence on stderr and exit code 2; broken infrastructure with exit code 1.
"""

from __future__ import annotations

import difflib
import errno
import os
import sys
import traceback
from types import TracebackType
from typing import Annotated, Any, NoReturn

import typer

from agentrl import __version__
from agentrl.cli import doctor, environments, images, recipes, reward, serve, train, view
from agentrl.cli.measure import audit, compare, evaluate, export, label, profile, suite
from agentrl.errors import AgentRLError, UserError
from agentrl.records.plain import plain
from agentrl.records.redact import redactor

app = typer.Typer(
    name="agentrl",
    help="Define tool-use environments, train agents on them, and measure them.",
    add_completion=False,
    pretty_exceptions_enable=False,
)

app.command()(doctor.doctor)
app.command("list")(environments.list_environments)
app.command()(environments.new)
app.command()(environments.check)
app.command()(audit.audit)
app.command("eval")(evaluate.evaluate)
app.command()(profile.profile)
app.command()(compare.compare)
app.command()(suite.suite)
app.command("label")(label.label_run)
app.command()(export.export)
app.command()(environments.convert)
app.command()(train.train)
app.command()(recipes.recipes)
app.command()(audit.regrade)
app.command()(view.view)
app.command()(serve.serve)
app.add_typer(reward.app, name="reward")
app.add_typer(images.app, name="images")
app.add_typer(audit.policies_app, name="policy")
app.command()(train.demo)

_INTERRUPTED = 130
_FULL = (os.strerror(errno.ENOSPC), os.strerror(errno.EDQUOT))
# The command-line library's own error has no public name; its public descendant leads to it.
_CommandLineError: Any = next(
    base for base in typer.BadParameter.__mro__ if base.__name__ == "ClickException"
)


def main() -> None:
    """Entry point of the `agentrl` program."""
    # Before torch is loaded: threads that wait for each other sleep. Where other programs use the
    # cores, turning in circles takes most of the CPU time and delays every training step.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    sys.excepthook = _trace
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
    except Exception as error:
        if any(word in str(error) for word in _FULL):  # also of libraries in other languages
            _fail(f"the disk is full: make room, then run the same again ({error})", 1)
        if not isinstance(error, OSError) or error.filename is None:
            raise
        _fail(f"{error.filename}: {error.strerror}", 2)
    if code == _INTERRUPTED:
        _fail("interrupted", _INTERRUPTED)
    raise SystemExit(code if isinstance(code, int) else 0)


def _trace(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    """Tell of a bug; its message may quote an agent."""
    text = "".join(traceback.format_exception(kind, error, trace))
    print(plain(redactor().text(text), lines=True), file=sys.stderr, end="")


def _fail(sentence: str, code: int) -> NoReturn:
    said = redactor().text(" ".join(sentence.split()))
    print(f"agentrl: {plain(said)}", file=sys.stderr)
    raise SystemExit(code)


def _worded(error: Any) -> str:
    """A command-line error with option, value and fix; what the value's validator says is not for
    people.
    """
    text = str(error.format_message())
    if text.startswith("No such command"):
        known = list(error.ctx.command.commands)
        typed = text.split("'")[1]
        near = difflib.get_close_matches(typed, known, n=1, cutoff=0.5)
        hint = f"did you mean {near[0]!r}?" if near else f"commands are {', '.join(known)}"
        return f"there is no command {typed!r}: {hint}"
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


def _print_version(wanted: bool) -> None:
    if wanted:
        print(f"agentrl {__version__}")
        raise typer.Exit


@app.callback()
def program(
    version: Annotated[
        bool,
        typer.Option(
            "--version", callback=_print_version, is_eager=True, help="Print the version and end."
        ),
    ] = False,
) -> None:
    """Options of the program itself."""

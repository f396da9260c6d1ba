"""The hidden part of a code task, read and checked: `cases`, `generate`, `check` or `tests`."""

from __future__ import annotations

import ast
import warnings
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any, TypeGuard

from agentrl.errors import TaskError
from agentrl.types import Json, Task, literal
from agentrl.verifiers.code.runner.codec import AnyList

_KEYS = {
    "cases": {"entry_point", "cases", "atol"},
    "generate": {"entry_point", "generate", "draws", "atol"},
    "check": {"entry_point", "check"},
    "tests": {"tests", "isolation", "allow"},
}
FAMILIES = ("comparison", "arithmetic", "membership", "items", "attributes")
"""What `hidden.allow` may name: what a test may do with any object of the candidate."""

FORMS = frozenset(_KEYS)
"""What the hidden part of a code task holds one of."""


DRAWS, MOST_DRAWS = 20, 10_000
"""Calls of one grading where a task generates them: unless it says how many, and at most."""

REFUSED_NAMES = (
    *(
        "conftest.py",
        "*.pth",
        "sitecustomize.py",
        "usercustomize.py",
        "pytest.ini",
        "pyproject.toml",
        "setup.cfg",
    ),
    *("tox.ini", "*.dist-info", "*.egg-info", "__pycache__", "*.pyc"),
)
"""What interpreters and test runners load by themselves: no name for an artifact or its folder."""


def refused_name(path: str) -> str | None:
    """The part of a path that no artifact may have; None if there is none."""
    parts = (part for part in path.lower().split("/"))
    return next(
        (part for part in parts if any(fnmatchcase(part, name) for name in REFUSED_NAMES)), None
    )


@dataclass(frozen=True, slots=True)
class Case:
    """One call with its expected value; a plain JSON list in it is an AnyList."""

    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    want: Any


@dataclass(frozen=True, slots=True)
class Cases:
    """Calls of `entry_point` in the file `path`; finite floats may differ by `atol`."""

    path: str
    entry_point: str
    cases: tuple[Case, ...]
    atol: float

    @property
    def count(self) -> int:
        """Expected outcomes."""
        return len(self.cases)


@dataclass(frozen=True, slots=True)
class Draws:
    """Calls that are drawn anew for every grading, each expected to give what the reference gives.

    Attributes:
        generate: text that defines `generate(rng)`, which returns the arguments of one call as a
            tuple.
        reference: text of the reference solution, which defines `entry_point` too.
    """

    path: str
    entry_point: str
    generate: str
    reference: str
    draws: int
    atol: float

    @property
    def count(self) -> int:
        """Expected outcomes."""
        return self.draws


@dataclass(frozen=True, slots=True)
class Check:
    """Text that defines `check(candidate)`, which raises if the function `entry_point` is wrong."""

    path: str
    entry_point: str
    check: str

    @property
    def count(self) -> int:
        """Expected outcomes: a check passes or fails as a whole."""
        return 1


@dataclass(frozen=True, slots=True)
class Tests:
    """Test files that import the candidate; `ids` are the tests in them, each expected to pass.

    Attributes:
        by_pytest: whether they need what only pytest has: fixtures, or a conftest.py.
        modules: what the artifacts are called when they are imported.
        isolation: "required" where a task must not be judged without it.
        widened: families of `FAMILIES` in which a candidate's objects may differ from the
            reference's.
        uses: what the reference was asked for, by line; None to note it.
    """

    tests: Mapping[str, str]
    ids: tuple[str, ...]
    by_pytest: bool = False
    modules: tuple[str, ...] = ()
    isolation: str = ""
    widened: frozenset[str] = frozenset()
    uses: tuple[str, ...] | None = None

    @property
    def count(self) -> int:
        """Expected outcomes."""
        return len(self.ids)


Hidden = Cases | Draws | Check | Tests


def read_hidden(task: Task) -> Hidden:
    """The hidden part of a code task.

    Raises:
        TaskError: it has none of the four forms, or is empty, or cannot be run; the message names
            task, field and fix.
    """
    hidden = task.hidden
    for path in task.artifacts:
        if (name := refused_name(path)) is not None:
            raise _error(
                task,
                "artifacts",
                f"names {path!r}: {name!r} is loaded by interpreters and test runners",
            )
    form = next((name for name in _KEYS if name in hidden), None)
    if form is None:
        raise _error(task, "hidden", f"has keys {sorted(hidden)}; give one of {sorted(FORMS)}")
    unknown = set(hidden) - _KEYS[form]
    if unknown:
        raise _error(task, f"hidden.{min(unknown)}", f"does not go with {form!r}; take it out")
    if form == "tests":
        return _read_tests(task, hidden["tests"])
    name = hidden.get("entry_point")
    if not isinstance(name, str) or not name.isidentifier():
        raise _error(
            task, "hidden.entry_point", f"is {name!r}; give the name of the function to call"
        )
    if form == "check":
        return _read_check(task, name, hidden["check"])
    if form == "generate":
        return _read_draws(task, name, hidden["generate"])
    return _read_cases(task, name, hidden["cases"])


def entry_file(task: Task) -> str:
    """The artifact that holds the entry point: `solution.py`, else the only Python file.

    Raises:
        TaskError: neither is there.
    """
    python = [path for path in task.artifacts if path.endswith(".py")]
    if "solution.py" in python:
        return "solution.py"
    if len(python) != 1:
        raise _error(
            task,
            "artifacts",
            f"is {list(task.artifacts)}; declare 'solution.py' or exactly one Python file",
        )
    return python[0]


def _error(task: Task, field: str, what: str) -> TaskError:
    return TaskError(f"task {task.id!r}: field {field} {what}")


def _read_check(task: Task, name: str, text: Json) -> Check:
    if not isinstance(text, str) or not text.strip():
        raise _error(
            task, "hidden.check", "is empty; give Python text that defines check(candidate)"
        )
    defined = _functions(_parse(task, "hidden.check", text))
    if "check" not in defined:
        raise _error(task, "hidden.check", "defines no function 'check'; define check(candidate)")
    return Check(entry_file(task), name, text)


def _parse(task: Task, field: str, text: str) -> ast.Module:
    try:
        return python_tree(text)
    except ValueError as error:
        raise _error(task, field, f"is not Python ({error}); mend the text") from None


def python_tree(text: str) -> ast.Module:
    """Somebody else's Python text, read without warnings about it.

    Raises:
        ValueError: it cannot be parsed.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            return ast.parse(text)
        except (SyntaxError, MemoryError, RecursionError) as error:
            raise ValueError(str(error)) from None


def _read_cases(task: Task, name: str, rows: Json) -> Cases:
    if not isinstance(rows, list) or not rows:
        raise _error(task, "hidden.cases", "is empty; give at least one case")
    cases = tuple(_read_case(task, f"hidden.cases[{index}]", row) for index, row in enumerate(rows))
    return Cases(entry_file(task), name, cases, _read_atol(task))


def _read_atol(task: Task) -> float:
    atol = task.hidden.get("atol", 0.0)
    if isinstance(atol, bool) or not isinstance(atol, int | float) or not 0 <= atol < float("inf"):
        raise _error(task, "hidden.atol", f"is {atol!r}; give a tolerance >= 0")
    return float(atol)


def _read_draws(task: Task, name: str, text: Json) -> Draws:
    if not isinstance(text, str) or "generate" not in _functions(
        _parse(task, "hidden.generate", text)
    ):
        raise _error(
            task,
            "hidden.generate",
            "defines no function named generate; write `def generate(rng):`",
        )
    draws = task.hidden.get("draws", DRAWS)
    if isinstance(draws, bool) or not isinstance(draws, int) or not 1 <= draws <= MOST_DRAWS:
        raise _error(
            task, "hidden.draws", f"is {draws!r}; give a whole number from 1 to {MOST_DRAWS:,}"
        )
    path, files = entry_file(task), task.oracle.get("files")
    reference = files.get(path) if isinstance(files, dict) else None
    if not isinstance(reference, str):
        raise _error(
            task,
            "oracle.files",
            f"lacks {path}; generated cases need the reference to say what is right",
        )
    return Draws(path, name, text, reference, draws, _read_atol(task))


def _functions(module: ast.Module) -> set[str]:
    return {node.name for node in module.body if isinstance(node, ast.FunctionDef)}


def _read_case(task: Task, field: str, row: Json) -> Case:
    if (
        not isinstance(row, dict)
        or "expected" not in row
        or set(row) - {"args", "kwargs", "expected"}
    ):
        raise _error(
            task, field, "must be an object with 'expected' and, if wanted, 'args' and 'kwargs'"
        )
    try:
        args, kwargs, want = (
            literal(row.get("args", [])),
            literal(row.get("kwargs", {})),
            expected(row["expected"]),
        )
    except ValueError as error:
        raise _error(task, field, f"cannot be read: {error}") from None
    if not isinstance(args, list | tuple) or not isinstance(kwargs, dict):
        raise _error(task, field, "must have a list 'args' and an object 'kwargs'")
    return Case(tuple(args), kwargs, want)


def expected(value: Json) -> Any:
    """An expected value: like `literal`, but a JSON list is an AnyList, which takes a tuple too."""
    if isinstance(value, list):
        return AnyList(expected(item) for item in value)
    if isinstance(value, dict) and set(value) != {"py"}:
        return {key: expected(item) for key, item in value.items()}
    return literal(value)


def _read_tests(task: Task, files: Json) -> Tests:
    if not isinstance(files, dict) or not all(isinstance(text, str) for text in files.values()):
        raise _error(task, "hidden.tests", "must map file names to Python text")
    if not task.artifacts:
        raise _error(task, "artifacts", "is empty; name the files that the tests judge")
    parsed = {name: _parse(task, f"hidden.tests[{name}]", text) for name, text in files.items()}
    ids = tuple(f"{name}::{test}" for name, module in parsed.items() for test in test_names(module))
    if not ids:
        raise _error(task, "hidden.tests", "defines no test; name test functions test_*")
    if len(set(ids)) != len(ids):
        raise _error(task, "hidden.tests", "defines a test twice; give each its own name")
    demand = task.hidden.get("isolation", "")
    if demand not in ("", "required"):
        raise _error(task, "hidden.isolation", f"is {demand!r}; give 'required' or leave it out")
    widened = task.hidden.get("allow", [])
    if not isinstance(widened, list) or not set(map(str, widened)) <= set(FAMILIES):
        raise _error(task, "hidden.allow", f"is {widened!r}; give a list of {list(FAMILIES)}")
    by_pytest = any(map(_wants_pytest, parsed, parsed.values()))
    return Tests(files, ids, by_pytest, _modules(task), demand, frozenset(map(str, widened)))


def _modules(task: Task) -> tuple[str, ...]:
    """Names by which the Python files among the artifacts are imported."""
    paths = [path.removesuffix(".py") for path in task.artifacts if path.endswith(".py")]
    names = [path.removesuffix("/__init__").replace("/", ".") for path in paths]
    return tuple(name for name in names if all(part.isidentifier() for part in name.split(".")))


def _wants_pytest(name: str, module: ast.Module) -> bool:
    """Whether a file is a conftest.py, has a fixture, or a test with an argument not given."""
    nodes = list(ast.walk(module))
    given = {"self"}.union(*(_parameters(node) for node in nodes if isinstance(node, ast.Call)))
    functions = [node for node in nodes if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)]
    called = [
        ast.unparse(mark).partition("(")[0] for node in functions for mark in node.decorator_list
    ]
    wanted = {
        arg.arg for node in functions if node.name.startswith("test_") for arg in node.args.args
    }
    has_fixture = any(mark.endswith("fixture") for mark in called)
    return name.rpartition("/")[2] == "conftest.py" or has_fixture or not wanted <= given


def _parameters(call: ast.Call) -> set[str]:
    """Argument names that a call of `parametrize` gives values for."""
    if not call.args or not ast.unparse(call.func).endswith("parametrize"):
        return set()
    try:
        names = ast.literal_eval(call.args[0])
    except ValueError:
        return set()
    return {part.strip() for part in (names.split(",") if isinstance(names, str) else names)}


def test_names(module: ast.Module) -> list[str]:
    """Functions `test_*` of a module and of its classes, in order, methods as `Class::test_x`."""
    return [name for name, _ in _test_nodes(module)]


def _test_nodes(module: ast.Module) -> Iterator[tuple[str, ast.AST]]:
    for node in module.body:
        if isinstance(node, ast.ClassDef):
            methods = (item for item in node.body if _is_test(item))
            yield from ((f"{node.name}::{item.name}", item) for item in methods)
        elif _is_test(node):
            yield node.name, node


def _is_test(node: ast.stmt) -> TypeGuard[ast.FunctionDef | ast.AsyncFunctionDef]:
    if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
        return False
    return node.name.startswith("test_")


def identity_sites(files: Mapping[str, str]) -> list[str]:
    """Lines, as `file:line`, that ask which object something is; only its process knows that."""
    sites = []
    for name, text in files.items():
        for node in ast.walk(python_tree(text)):
            if isinstance(node, ast.Compare):
                sides = [node.left, *node.comparators]
                asked = any(isinstance(kind, ast.Is | ast.IsNot) for kind in node.ops)
            elif isinstance(node, ast.Call):
                sides = node.args[:2]
                asked = _called_name(node) in ("assertIs", "assertIsNot")
            else:
                continue
            if asked and not any(isinstance(side, ast.Constant) for side in sides):
                sites.append(f"{name}:{node.lineno}")
    return sites


def tests_without_assertion(files: Mapping[str, str]) -> list[str]:
    """Ids of tests that can fail only by an exception: they assert nothing, nor call a helper."""
    silent = []
    for name, text in files.items():
        module = python_tree(text)
        helpers = {
            node.name
            for node in ast.walk(module)
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and _asserts(node, set())
        }
        for test, node in _test_nodes(module):
            if not _asserts(node, helpers):
                silent.append(f"{name}::{test}")
    return silent


def _asserts(function: ast.AST, helpers: set[str]) -> bool:
    for node in ast.walk(function):
        if isinstance(node, ast.Assert | ast.Raise):
            return True
        if isinstance(node, ast.Call):
            called = _called_name(node)
            if called in helpers or called in ("raises", "fail") or called.startswith("assert"):
                return True
    return False


def _called_name(call: ast.Call) -> str:
    function = call.func
    return getattr(function, "attr", getattr(function, "id", ""))

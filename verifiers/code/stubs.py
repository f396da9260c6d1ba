"""Answers that take no work: functions that return one constant, whatever they are given.

A task that such a function passes asks for nothing: its check compares too little, or every hidden
case has the same outcome.
"""

from __future__ import annotations

import ast
import textwrap
from collections.abc import Iterator

from agentrl.types import Task
from agentrl.verifiers.code.hidden import Cases, Hidden, Tests, python_tree, read_hidden
from agentrl.verifiers.code.runner.codec import matches

CONSTANTS = ("[]", "()", "{}", "0", "''", "float('nan')", "True", "None", "[[]]")
IDENTITY = "(*args, None)[0]"
"""What a function with any arguments returns to give back the first of them."""

RETURNS = (*CONSTANTS, IDENTITY)

_ANY = """
_agentrl_check = check
def check(candidate):
    def stub(returned):
        def function(*args, **kwargs):
            try:
                candidate(*args, **kwargs)
            except Exception:
                pass
            return returned(*args, **kwargs)
        return function
    for returned in [{functions}]:
        try:
            _agentrl_check(stub(returned))
        except BaseException:
            continue
        return
    raise AssertionError("no constant passes")
"""


def stub_of(task: Task, returned: str) -> dict[str, str]:
    """Artifacts that define what the reference defines, every function of which returns this."""
    hidden, files = read_hidden(task), task.oracle["files"]
    body = f"    return {returned}\n"
    stub = {
        path: _returning(files[path], returned) if path.endswith(".py") else ""
        for path in task.artifacts
    }
    if not isinstance(hidden, Tests):
        stub[hidden.path] = f"def {hidden.entry_point}(*args, **kwargs):\n{body}"
    return stub


def screened(task: Task) -> Task | None:
    """The task as one that its reference passes if any stub passes the check of this one.

    One grading then stands for all stubs. None where there is no check to put that into.
    """
    if not isinstance(task.hidden.get("check"), str):
        return None
    functions = ", ".join(f"lambda *args, **kwargs: {returned}" for returned in RETURNS)
    check = task.hidden["check"] + textwrap.dedent(_ANY.format(functions=functions))
    return task.model_copy(update={"hidden": {**task.hidden, "check": check}})


def possible(hidden: Hidden) -> Iterator[str]:
    """The stubs that might pass; of cases it is seen without running anything."""
    for returned in RETURNS:
        if not isinstance(hidden, Cases) or _equals_all(hidden, returned):
            yield returned


def _equals_all(hidden: Cases, returned: str) -> bool:
    def gives(args: tuple[object, ...]) -> object:
        if returned == IDENTITY:
            return args[0] if args else None
        return float("nan") if "nan" in returned else ast.literal_eval(returned)

    return all(matches(gives(case.args), case.want, hidden.atol) for case in hidden.cases)


def _returning(text: str, returned: str) -> str:
    """Python text whose functions return this; nothing, for a text that is not Python."""
    try:
        module = python_tree(text)
    except ValueError:
        return ""
    for node in ast.walk(module):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            node.body = [ast.Return(_value(node.args, returned))]
    return ast.unparse(ast.fix_missing_locations(module))


def _value(arguments: ast.arguments, returned: str) -> ast.expr:
    if returned != IDENTITY:
        return ast.parse(returned, mode="eval").body
    names = [each.arg for each in (*arguments.posonlyargs, *arguments.args) if each.arg != "self"]
    return ast.parse(names[0] if names else "None", mode="eval").body

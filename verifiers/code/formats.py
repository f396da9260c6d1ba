"""Public task formats turned into task files; converting runs no code of a task."""

from __future__ import annotations

import ast
import builtins
import json
import re
import sys
import textwrap
import warnings
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from symtable import SymbolTable, symtable
from typing import Any

from agentrl.errors import ConfigError, TaskError
from agentrl.records.taskfile import read_rows, read_text, write_tasks
from agentrl.settings import did_you_mean
from agentrl.types import Task
from agentrl.verifiers.code.hidden import python_tree

FILE = "solution.py"
STRICT = '''
def _agentrl_close(out, exp, rtol=1e-05, atol=1e-08, equal_nan=False):
    """Whether numbers are close that stand in containers of equal shape, and NaN where NaN is."""
    import numpy

    def plain(value):
        known = (numpy.ndarray, numpy.generic)
        return value.tolist() if isinstance(value, known) else value

    def close(one, other):
        if isinstance(other, (list, tuple)):
            return (
                isinstance(one, (list, tuple))
                and len(one) == len(other)
                and all(close(plain(a), plain(b)) for a, b in zip(one, other))
            )
        for kind in (bool, (int, float), complex):
            if isinstance(other, kind):
                break
        else:
            return type(one) is type(other) and one == other
        if not isinstance(one, kind) or isinstance(one, bool) != isinstance(other, bool):
            return False
        if one != one or other != other:
            return one != one and other != other
        return one == other or abs(one - other) <= atol + rtol * abs(other)

    return close(plain(out), plain(exp))
'''
"""What takes the place of `numpy.allclose`, which broadcasts: it calls an empty list close to
everything."""
_LENIENT = re.compile(r"\b(?:np|numpy)\.(?:allclose|isclose|array_equal)\(")
Row = Mapping[str, Any]


def convert(format: str, source: str | Path, target: str | Path) -> int:
    """Turn a file of a public format into a task file; returns how many tasks there are.

    The file is plain or gzip, JSON lines or one JSON list. Formats: `mbpp` (the sanitized or the
    full file), `mbppplus` (MBPP+ in its original-format release), `humaneval`. Where a check
    compares by `numpy.allclose`, it demands equal shapes and kinds as well.

    Raises:
        ConfigError: the format is unknown.
        TaskError: the file cannot be read, or a row is not of that format; the message names file,
            row and field.
    """
    if format not in FORMATS:
        raise ConfigError(f"format {format!r} is unknown: {did_you_mean(format, sorted(FORMATS))}")
    source = Path(source)
    tasks: list[Task] = []
    for number, row in _rows(source):
        try:
            tasks.append(FORMATS[format](row))
        except KeyError as error:
            raise TaskError(
                f"{source}, row {number}: field {error.args[0]} is missing; is this a {format}"
                " file?"
            ) from None
        except (ValueError, TypeError, AttributeError) as error:
            raise TaskError(f"{source}, row {number}: is not a {format} row: {error}") from None
    if not tasks:
        raise TaskError(f"{source}: the file has no rows")
    return write_tasks(target, tasks)


def _rows(path: Path) -> Iterator[tuple[int, Row]]:
    text = read_text(path)
    if not text.lstrip().startswith("["):
        yield from read_rows(path)
        return
    try:
        rows = json.loads(text)
    except ValueError as error:
        raise TaskError(f"{path}: is not JSON ({error})") from None
    for number, row in enumerate(rows, 1):
        if not isinstance(row, dict):
            raise TaskError(f"{path}, row {number}: is not a JSON object")
        yield number, row


def _strict(check: str) -> str:
    """A check in which numpy's lenient comparisons are strict ones."""
    text, found = _LENIENT.subn("_agentrl_close(", check)
    return STRICT + text if found else check


def mbpp(row: Row) -> Task:
    """A task of MBPP (Austin et al. 2021): the first assertion is visible, the others are hidden.

    Where doing nothing would satisfy those others (there are none, or all say `assert not`), all
    are hidden.
    """
    asserts, code = list(row["test_list"]), row["code"]
    name = _entry_point(code, asserts[0])
    rest_demands = any(not line.strip().startswith("assert not ") for line in asserts[1:])
    shown, hidden = (asserts[:1], asserts[1:]) if rest_demands else ([], asserts)
    setup = "\n".join([*row.get("test_imports", []), row.get("test_setup_code", "")])
    body = f"{name} = candidate\n" + "\n".join(hidden)
    check = f"{setup}\ndef check(candidate):\n{textwrap.indent(body, '    ')}\n"
    prompt = row["prompt"] if "prompt" in row else row["text"]
    return _mbpp_task("mbpp", row, (prompt, name, shown), check)


def mbppplus(row: Row) -> Task:
    """A task of MBPP+ (Liu et al. 2023): the loop that ends the test text becomes `check`.

    The first of the original assertions is the visible example; it is one of about a hundred hidden
    inputs.
    """
    test, code = row["test"], row["code"]
    loop = python_tree(test).body[-1]
    if not isinstance(loop, ast.For):
        raise ValueError("field test does not end in a loop")
    name = _entry_point(code, row["test_list"][0])
    lines = test.splitlines(keepends=True)
    head, tail = "".join(lines[: loop.lineno - 1]), "".join(lines[loop.lineno - 1 :])
    setup = "\n".join(row.get("test_imports", []))
    body = f"{name} = candidate\n{tail}"
    check = f"{setup}\n{_asserting(head)}\ndef check(candidate):\n{textwrap.indent(body, '    ')}\n"
    return _mbpp_task("mbppplus", row, (row["prompt"], name, row["test_list"][:1]), check)


def _asserting(head: str) -> str:
    """The text before the loop; three rows compute in `assertion` what they forget to assert."""
    module = python_tree(head)
    for node in module.body:
        if not isinstance(node, ast.FunctionDef) or node.name != "assertion":
            continue
        silent = not any(isinstance(inner, ast.Assert | ast.Raise) for inner in ast.walk(node))
        if silent and "exact_match" in ast.unparse(node):
            node.body.append(ast.parse("assert exact_match").body[0])
            return ast.unparse(module)
    return head


def _mbpp_task(source: str, row: Row, words: tuple[str, str, list[str]], check: str) -> Task:
    prompt, name, shown = words
    number = str(row["task_id"]).rpartition("/")[2]
    instruction = (
        f"{prompt.strip()}\nWrite the function `{_signature(row['code'], name)}` in the file"
        f" `{FILE}`."
    )
    if shown:
        instruction += f"\nExample: `{shown[0].strip()}`"
    return Task(
        id=f"Mbpp/{number}",
        instruction=instruction,
        hidden={"entry_point": name, "check": _with_names(_strict(check), row["code"], name)},
        oracle={"files": {FILE: row["code"]}},
        metadata={"source": source},
    )


def humaneval(row: Row) -> Task:
    """A task of HumanEval (Chen et al. 2021): prompt and helper functions are the instruction."""
    code, name = row["prompt"] + row["canonical_solution"], row["entry_point"]
    return Task(
        id=str(row["task_id"]),
        instruction=(
            f"Complete the function `{name}` and write the module to the file"
            f" `{FILE}`.\n\n{row['prompt']}"
        ),
        hidden={"entry_point": name, "check": _with_names(_strict(row["test"]), code, name)},
        oracle={"files": {FILE: code}},
        metadata={"source": "humaneval"},
    )


FORMATS: dict[str, Callable[[Row], Task]] = {
    "mbpp": mbpp,
    "mbppplus": mbppplus,
    "humaneval": humaneval,
}


def _entry_point(code: str, test: str) -> str:
    """The function of the reference that a test calls."""
    defined = {node.name for node in python_tree(code).body if isinstance(node, ast.FunctionDef)}
    called = [
        node.id
        for node in ast.walk(python_tree(test))
        if isinstance(node, ast.Name) and node.id in defined
    ]
    if not called:
        raise ValueError("the first test calls no function of the field code")
    return called[0]


def _signature(code: str, name: str) -> str:
    functions = [
        node
        for node in python_tree(code).body
        if isinstance(node, ast.FunctionDef) and node.name == name
    ]
    return f"{name}({ast.unparse(functions[-1].args)})"


def _with_names(check: str, code: str, entry_point: str) -> str:
    """The check with what it takes for granted: helpers of the reference's module, and standard
    modules.

    The public tests were run in the namespace of the solution, and some lean on what is there: a
        helper that the
    prompt defines, or (MBPP 120) a module that only the solution imports.
    """
    wanted = _free_names(check) - {entry_point}
    module = python_tree(code)
    helpers = [
        node
        for node in module.body
        if not (isinstance(node, ast.FunctionDef) and node.name == entry_point)
    ]
    beside = "".join(ast.unparse(node) + "\n" for node in helpers)
    head = beside if wanted & _bound_names(_symbols(beside)) else ""
    missing = sorted((wanted | _free_names(head)) - _bound_names(_symbols(head)) - {entry_point})
    imports = "".join(f"import {name}\n" for name in missing if name in sys.stdlib_module_names)
    return imports + head + check


def _free_names(text: str) -> set[str]:
    """Names that a module reads but neither binds nor finds among the built-ins."""
    module = _symbols(text)
    return (
        {name for table in _tables(module) for name in _read_names(table)}
        - _bound_names(module)
        - set(dir(builtins))
    )


def _symbols(text: str) -> SymbolTable:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            return symtable(text, "text", "exec")
        except SyntaxError as error:
            raise ValueError(str(error)) from None


def _tables(table: SymbolTable) -> Iterator[SymbolTable]:
    yield table
    for inner in table.get_children():
        yield from _tables(inner)


def _read_names(table: SymbolTable) -> Iterator[str]:
    is_module = table.get_type() == "module"
    for symbol in table.get_symbols():
        if symbol.is_referenced() and (is_module or symbol.is_global()):
            yield symbol.get_name()


def _bound_names(module: SymbolTable) -> set[str]:
    return {
        symbol.get_name()
        for symbol in module.get_symbols()
        if symbol.is_assigned() or symbol.is_imported()
    }

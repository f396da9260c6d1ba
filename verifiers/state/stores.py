"""State-based verifiers: what the agent left behind against what should be there.

The write set is declared: what is expected, and what `may_write` lists. A change outside it fails
and is named. Only declared artifacts leave the agent's sandbox, so state that no artifact holds is
not seen.
"""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from contextlib import closing
from functools import cache, partial
from importlib.resources import files
from typing import Any

from agentrl.aio import run_in_thread
from agentrl.errors import TaskError, VerifierError
from agentrl.types import Json, Score, Task, literal
from agentrl.verifiers.base import Submission
from agentrl.verifiers.code.hidden_tests import PYTHON
from agentrl.verifiers.code.runner.dump import read_schema
from agentrl.verifiers.state.rows import Rules, Tables, Tolerance, differences

StateVerifier = Callable[[Submission], Awaitable[Score]]
Tree = Mapping[str, bytes]
_MOST_TOLD = 5
_DUMP_S = 60.0
_DATABASE, _ROWS = "state.db", "rows.json"


def file_state() -> StateVerifier:
    """A verifier of files: 1.0 if the expected ones are there and nothing else changed, else 0.0.

    `hidden["files"]` maps paths to their expected text (or `{"py": "b'...'"}`), or to null for a
    file that is to go. `hidden["may_write"]` lists further paths, or folders as `logs/`, that may
    hold anything. All other artifacts of the task must be as they were in `task.files`.
    `parts["expected"]` is the share of expected files that are right, `parts["outside"]` counts
    changes outside the write set.

    The verifier raises TaskError if an expected path is no artifact of the task, or the fields have
    another form.
    """

    async def verify(submission: Submission) -> Score:
        task = submission.task
        expected = _expected_files(task)
        before = {path: task.files[path].encode() for path in task.artifacts if path in task.files}
        return judge_files(before, submission.artifacts, expected, _names(task, "may_write"))

    return verify


def judge_files(
    before: Tree, after: Tree, expected: Mapping[str, bytes | None], may_write: Iterable[str]
) -> Score:
    """The score of a tree: expected files as expected (None: absent), every other one as before."""
    wrong = sorted(path for path, content in expected.items() if after.get(path) != content)
    free = tuple(may_write)
    outside = sorted(
        path
        for path in {*before, *after} - set(expected)
        if before.get(path) != after.get(path) and not any(_covers(entry, path) for entry in free)
    )
    parts = {
        "expected": 1 - len(wrong) / len(expected) if expected else 1.0,
        "outside": float(len(outside)),
    }
    why = [f"not as expected: {_told(wrong)}"] if wrong else []
    why += [f"changed outside the write set: {_told(outside)}"] if outside else []
    return Score(float(not why), parts, "; ".join(why) or "the files are as expected")


def _covers(entry: str, path: str) -> bool:
    return path.startswith(entry) if entry.endswith("/") else path == entry


def json_state(*, rtol: float = 0.0, atol: float = 0.0) -> StateVerifier:
    """A verifier of the tables `{name: [row]}` in a JSON artifact, by the rules of `sqlite_state`.

    `hidden["state"]` is the path of the artifact. An object with one key twice cannot be read.
    """
    tolerance = Tolerance(rtol, atol)

    async def verify(submission: Submission) -> Score:
        expected, rules = _expected_tables(submission.task, tolerance)
        path = _path(submission.task, "state")
        if path not in submission.artifacts:
            return Score(0.0, {}, f"the artifact {path} is missing")
        return await run_in_thread(
            partial(_judge_json, path, submission.artifacts[path], expected, rules)
        )

    return verify


def _judge_json(path: str, content: bytes, expected: Tables, rules: Rules) -> Score:
    try:
        found = json.loads(content.decode("utf-8-sig"), object_pairs_hook=_once)
        if not _are_tables(found):
            return Score(0.0, {}, f"{path} does not map table names to lists of rows")
        return judge_tables(expected, found, rules)
    except (ValueError, RecursionError):
        return Score(0.0, {}, f"{path} is no readable JSON")


def _once(pairs: list[tuple[str, Json]]) -> dict[str, Json]:
    """An object whose keys all differ: of two values for one key, readers take either.

    Raises:
        ValueError: a key stands there twice.
    """
    found = dict(pairs)
    if len(found) != len(pairs):
        raise ValueError("a key stands there twice")
    return found


def sqlite_state(*, rtol: float = 0.0, atol: float = 0.0, python: str = PYTHON) -> StateVerifier:
    """A verifier of an SQLite database: 1.0 if its rows are the expected ones, else 0.0.

    `hidden["database"]` is its path, and `hidden["tables"]` the whole expected content: `{name:
    [{column: value}]}`. `hidden["may_write"]` lists tables, and columns as `table.column`, that may
    hold anything; `hidden["ordered"]` lists tables whose rows have an order. Any other table, view
    or trigger fails. `hidden["schema"]` is SQL that makes the whole expected schema, without rows:
    then definitions of tables, indexes, views and triggers, `user_version` and `application_id` are
    compared as well, text by text but for white space. `parts["tables"]` is the share of right
    tables.

    Types are exact (`{"py": "b'..'"}` for bytes; SQLite has no booleans), a float may differ by
    max(atol, rtol · |expected|). Rows that are in a write-ahead log beside the file are not in the
    file.

    The file is the agent's, and SQLite is no match for every hostile file: it is read in a grader
    sandbox, into which nothing hidden goes, and its rows are compared on the host. A file that
    cannot be read is worth 0.0.

    The verifier raises TaskError if the hidden part has another form, VerifierError if nothing can
    be read at all, and SandboxLost if the grader sandbox died.
    """
    tolerance = Tolerance(rtol, atol)

    async def verify(submission: Submission) -> Score:
        task = submission.task
        expected, rules = _expected_tables(task, tolerance)
        schema = _expected_schema(task)
        path = _path(task, "database")
        if submission.pool is None:
            raise VerifierError(
                f"task {task.id!r}: a database needs a sandbox pool, and the submission has none"
            )
        if path not in submission.artifacts:
            return Score(0.0, {}, f"the artifact {path} is missing")
        found = await _read_database(submission, submission.artifacts[path], python)
        if found is None and await _read_database(submission, b"", python) is None:
            raise VerifierError(
                f"task {task.id!r}: the grader reads no database at all; it needs {python} with"
                " sqlite3"
            )
        if found is None or "error" in found:
            return Score(
                0.0,
                {},
                f"{path} cannot be read: {found['error'] if found else 'the reader ended or hung'}",
            )
        changed = None
        if schema is not None:
            changed = schema_differences(schema, found["schema"], rules)
        return await run_in_thread(
            partial(judge_tables, expected, found["tables"], rules, found["others"], changed)
        )

    return verify


def schema_differences(
    expected: Mapping[str, str], found: Mapping[str, str], rules: Rules
) -> list[str]:
    """How two schemas of `runner.dump` differ, one sentence for each name outside `may_write`."""
    problems = []
    for name in sorted({*expected, *found}):
        if name.partition(" ")[2] in rules.may_write or expected.get(name) == found.get(name):
            continue
        if name not in found:
            problems.append(f"{name} is missing")
        elif name not in expected:
            problems.append(f"{name} is not expected")
        else:
            problems.append(f"{name} is not what it was")
    return problems


def judge_tables(
    expected: Tables,
    found: Tables,
    rules: Rules,
    others: Iterable[str] = (),
    schema_problems: Sequence[str] | None = None,
) -> Score:
    """The score of tables.

    Args:
        expected: rows of each table.
        found: the same of the artifact.
        rules: what may differ.
        others: views and triggers that are there, as `trigger name`.
        schema_problems: how the schema differs, where the task says what it should be; the views
            and triggers of that schema are expected.
    """
    problems = differences(expected, found, rules)
    if schema_problems is None:
        unasked = [other for other in others if other.partition(" ")[2] not in rules.may_write]
        schema_problems = [f"{other} is not expected" for other in unasked]
    names = {*expected} - rules.may_write
    right = 1 - len(names & set(problems)) / len(names) if names else 1.0
    told = [f"table {name} {problem}" for name, problem in problems.items()]
    told += schema_problems
    return Score(float(not told), {"tables": right}, _told(told) or "the rows are as expected")


async def _read_database(
    submission: Submission, content: bytes, python: str
) -> dict[str, Any] | None:
    """What the reader in the sandbox wrote; None if it wrote nothing, or something else."""
    assert submission.pool is not None
    async with submission.pool.lease("grader", untrusted=submission.untrusted) as sandbox:
        await sandbox.put({_DATABASE: content})
        await sandbox.exec(
            [python, "-I", "-S", "-B", "-c", _reader(), _DATABASE, _ROWS], timeout_s=_DUMP_S
        )
        wrote = (await sandbox.get([_ROWS])).get(_ROWS, b"")
    try:
        return _read_rows(json.loads(wrote))
    except (ValueError, RecursionError):
        return None


def _read_rows(found: Json) -> dict[str, Any]:
    """What `runner.dump` writes; the file that it read may have made it write anything.

    Raises:
        ValueError: it is something else.
    """
    if isinstance(found, dict) and isinstance(found.get("error"), str):
        return {"error": found["error"][:200]}
    if not isinstance(found, dict) or not _are_tables(found.get("tables")):
        raise ValueError("no tables")
    others = found.get("others")
    if not isinstance(others, list) or not all(isinstance(other, str) for other in others):
        raise ValueError("no list of others")
    tables = {
        name: [{column: _typed(value) for column, value in row.items()} for row in rows]
        for name, rows in found["tables"].items()
    }
    schema = found.get("schema")
    if not isinstance(schema, dict) or not all(isinstance(sql, str) for sql in schema.values()):
        raise ValueError("no schema")
    return {"tables": tables, "others": others, "schema": schema}


def _typed(value: Json) -> Any:
    match value:
        case {"float": str(number)}:
            return float.fromhex(number)
        case {"bytes": str(content)}:
            return bytes.fromhex(content)
        case None | int() | str():
            return value
    raise ValueError("a value of another type")


@cache
def _reader() -> str:
    return (files("agentrl.verifiers.code.runner") / "dump.py").read_text()


def _are_tables(value: Json) -> bool:
    return isinstance(value, dict) and all(
        isinstance(rows, list) and all(isinstance(row, dict) for row in rows)
        for rows in value.values()
    )


def _expected_tables(task: Task, tolerance: Tolerance) -> tuple[Tables, Rules]:
    tables = _literal(task, "tables")
    if not _are_tables(tables):
        raise TaskError(
            f"task {task.id!r}: field hidden.tables must be {{name: [{{column: value}}]}}; write"
            " it so"
        )
    rules = Rules(
        frozenset(_names(task, "may_write")), frozenset(_names(task, "ordered")), tolerance
    )
    return tables, rules


def _expected_schema(task: Task) -> dict[str, str] | None:
    """What `hidden["schema"]` makes; None where the task has none."""
    script = task.hidden.get("schema")
    if script is None:
        return None
    try:
        if not isinstance(script, str):
            raise TypeError(f"it is {type(script).__name__}")
        with closing(sqlite3.connect(":memory:")) as connection:
            connection.executescript(script)
            return read_schema(connection)
    except (sqlite3.Error, TypeError, ValueError) as error:
        raise TaskError(
            f"task {task.id!r}: field hidden.schema: {error}; write SQL that makes the schema"
        ) from None


def _expected_files(task: Task) -> dict[str, bytes | None]:
    given = _literal(task, "files")
    if not isinstance(given, dict) or not all(
        text is None or isinstance(text, str | bytes) for text in given.values()
    ):
        raise TaskError(
            f"task {task.id!r}: field hidden.files must map paths to text or null; write it so"
        )
    unseen = sorted(set(given) - set(task.artifacts))
    if unseen:
        raise TaskError(
            f"task {task.id!r}: hidden.files names {unseen[0]!r}, which field artifacts lacks; add"
            " it there"
        )
    return {path: text.encode() if isinstance(text, str) else text for path, text in given.items()}


def _literal(task: Task, name: str) -> Any:
    try:
        return literal(task.hidden.get(name))
    except ValueError as error:
        raise TaskError(f"task {task.id!r}: field hidden.{name}: {error}") from None


def _names(task: Task, name: str) -> list[str]:
    names = task.hidden.get(name, [])
    if not isinstance(names, list) or not all(isinstance(entry, str) and entry for entry in names):
        raise TaskError(f"task {task.id!r}: field hidden.{name} is {names!r}; give a list of names")
    return names


def _path(task: Task, name: str) -> str:
    path = task.hidden.get(name)
    if not isinstance(path, str) or path not in task.artifacts:
        raise TaskError(
            f"task {task.id!r}: field hidden.{name} is {path!r}; give one of the task's artifacts"
        )
    return path


def _told(names: list[str]) -> str:
    more = f" and {len(names) - _MOST_TOLD} more" if len(names) > _MOST_TOLD else ""
    return (
        "; ".join(name[:200].encode(errors="replace").decode() for name in names[:_MOST_TOLD])
        + more
    )

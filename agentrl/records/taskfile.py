"""Task files: JSON lines, one Task each; errors name the file, the line, the field and the fix."""

from __future__ import annotations

import difflib
import gzip
import json
import os
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from agentrl.errors import TaskError
from agentrl.types import Task

_GZIP = b"\x1f\x8b"


def read_tasks(path: str | Path) -> list[Task]:
    """The tasks of a file (plain or gzip), in its order; empty lines are passed over.

    Raises:
        TaskError: the file cannot be read or holds no task, or a line is no task; the message has
            file, line and field.
    """
    path = Path(path)
    tasks: list[Task] = []
    first: dict[str, int] = {}
    for number, row in read_rows(path):
        task = _task(row, f"{path}, line {number}")
        if task.id in first:
            where = f"{path}, line {number}"
            raise TaskError(
                f"{where}: field id is {task.id!r}, as on line {first[task.id]}; give each its"
                " own id"
            )
        first[task.id] = number
        tasks.append(task)
    if not tasks:
        raise TaskError(f"{path}: the file holds no task; write one JSON object per line")
    return tasks


def write_tasks(path: str | Path, tasks: Iterable[Task]) -> int:
    """Write tasks one per line, without empty fields; return how many.

    A name that ends in .gz is compressed. The file appears whole or not at all.
    """
    path = Path(path)
    lines = [_line(task) for task in tasks]
    data = "".join(lines).encode()
    part = path.with_name(path.name + ".part")
    try:
        part.write_bytes(gzip.compress(data, mtime=0) if path.suffix == ".gz" else data)
        os.replace(part, path)
    finally:
        part.unlink(missing_ok=True)
    return len(lines)


def _line(task: Task) -> str:
    row = task.model_dump(mode="json", exclude_defaults=True)
    if not task.artifacts and "files" in task.oracle:
        row["artifacts"] = []
    return json.dumps(row, ensure_ascii=False) + "\n"


def read_text(path: Path) -> str:
    """The text of a file, plain or gzip.

    Raises:
        TaskError: it is not there, or is no UTF-8 text.
    """
    try:
        data = path.read_bytes()
        return (gzip.decompress(data) if data.startswith(_GZIP) else data).decode("utf-8")
    except FileNotFoundError:
        raise TaskError(f"{path}: there is no such file") from None
    except (OSError, EOFError, UnicodeDecodeError) as error:
        raise TaskError(f"{path}: cannot be read as UTF-8 text, plain or gzip: {error}") from None


def read_rows(path: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    """Line numbers (from 1) and JSON objects of a file of JSON lines, plain or gzip.

    Raises:
        TaskError: a line is no JSON object.
    """
    for number, line in enumerate(read_text(path).split("\n"), 1):
        if not line.strip():
            continue
        try:
            row = json.loads(line, object_pairs_hook=_object)
        except json.JSONDecodeError as error:
            raise TaskError(
                f"{path}, line {number}: is not JSON ({error.msg} at column {error.colno}); write"
                " one object per line"
            ) from None
        except (ValueError, RecursionError) as error:
            raise TaskError(f"{path}, line {number}: {error}") from None
        if not isinstance(row, dict):
            raise TaskError(
                f"{path}, line {number}: is a JSON {type(row).__name__}; write one object per line"
            )
        yield number, row


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    keys = [key for key, _ in pairs]
    twice = next((key for index, key in enumerate(keys) if key in keys[:index]), None)
    if twice is not None:
        raise ValueError(f"field {twice} is given twice; keep one")
    return dict(pairs)


def _task(row: Mapping[str, Any], where: str) -> Task:
    try:
        return Task.model_validate(row)
    except ValidationError as error:
        raise TaskError(f"{where}: {_sentence(error)}") from None


def _sentence(error: ValidationError) -> str:
    """The first problem in words: field, value, fix."""
    problem = error.errors(include_url=False)[0]
    place = [str(part) for part in problem["loc"] if part != "[key]"]
    field = ".".join(place) or "task"
    if problem["type"] == "extra_forbidden":
        near = difflib.get_close_matches(field, Task.model_fields, n=1)
        hint = (
            f"did you mean {near[0]!r}?"
            if near
            else f"known fields are {', '.join(Task.model_fields)}"
        )
        return f"field {field} is unknown; {hint}"
    if problem["type"] == "missing":
        return f"field {field} is missing; add it"
    value = json.dumps(problem["input"], ensure_ascii=False, default=repr)
    shown = value if len(value) <= 80 else value[:77] + "..."
    if problem["type"] == "string_too_short":
        return f"field {field} is empty; fill it in"
    words = (
        problem["msg"]
        .removeprefix("Value error, ")
        .replace("valid tuple", "JSON list")
        .replace("a valid dictionary", "an object")
    )
    return f"field {field} is {shown}: {words[0].lower()}{words[1:]}"

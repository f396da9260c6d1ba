"""One record as one line: strict JSON with its format version under `v`.

NaN and infinities are written as null, and `nonfinite` lists their paths and names, so that they
can be restored. Secrets are left out (`agentrl.records.redact`).
"""

from __future__ import annotations

import json
import math
import zlib
from collections.abc import Callable
from typing import Any, TypeVar

from agentrl.errors import Unrecordable, UserError
from agentrl.records.redact import Redactor
from agentrl.records.rows import Row

FORMAT_VERSION = 3
"""Version 1 wrote `"side_effects": {}` for episodes in which nothing measured them. Up to version 2
the key of an episode had `step` in place of `round`, and its seed and version were not written."""

_DUMP = json.JSONEncoder(separators=(",", ":"), ensure_ascii=False, allow_nan=False).encode
_NO_ROW = (ValueError, TypeError, KeyError, IndexError, zlib.error)
ESCAPE = "backslashreplace"  # a lone surrogate has no UTF-8; its Python escape is also JSON's

T = TypeVar("T")


def to_line(row: Row, what: str, secrets: Redactor) -> bytes:
    """A record as bytes, with its newline.

    Raises:
        Unrecordable: it holds what JSON cannot say.
    """
    try:
        row = secrets.row(row)
        try:
            text = _DUMP(row)
        except ValueError:
            found: list[tuple[list[str | int], str]] = []
            finite = _without_nonfinite(row, [], found)
            text = _DUMP({**finite, "nonfinite": found})
    except (TypeError, ValueError, RecursionError) as error:
        raise Unrecordable(
            f"{what} cannot be written as JSON ({error}); use numbers, text, lists, dicts"
        ) from error
    return text.encode(errors=ESCAPE) + b"\n"


def _without_nonfinite(
    value: Any, path: list[str | int], found: list[tuple[list[str | int], str]]
) -> Any:
    if isinstance(value, float) and not math.isfinite(value):
        found.append((path, str(float(value))))
        return None
    if isinstance(value, dict):
        return {
            key: _without_nonfinite(item, [*path, str(key)], found) for key, item in value.items()
        }
    if isinstance(value, list | tuple):
        return [_without_nonfinite(item, [*path, index], found) for index, item in enumerate(value)]
    return value


def _restore_nonfinite(row: Row) -> None:
    for path, name in row.pop("nonfinite", ()):
        place: Any = row
        for step in path[:-1]:
            place = place[step]
        place[path[-1]] = float(name)


def parse_line(line: bytes, where: str, parse: Callable[[Row], T]) -> T:
    """What a line says.

    Raises:
        UserError: it is not a record, or one of a later format.
    """
    try:
        row = json.loads(line)
        version = row.pop("v")
        if version in (1, 2, FORMAT_VERSION):
            _restore_nonfinite(row)
            return parse(_from_version_1(row) if version == 1 else row)
    except (*_NO_ROW, AttributeError, RecursionError) as error:
        reason = " ".join(f"{type(error).__name__}: {error}".split())[:200]
        fix = "delete that line or restore the file"
        if is_json(line):
            fix = "give a file of such records, or restore this one"
        raise UserError(f"{where} is not a record ({reason}); {fix}") from error
    raise UserError(
        f"{where} has format version {version!r} but this agentrl reads up to {FORMAT_VERSION};"
        " upgrade agentrl"
    )


def _from_version_1(row: Row) -> Row:
    return {**row, "side_effects": None} if row.get("side_effects") == {} else row


def is_json(line: bytes) -> bool:
    """Whether the bytes are a whole JSON value: no proper prefix of an object is one."""
    try:
        json.loads(line)
    except (ValueError, RecursionError):
        return False
    return True

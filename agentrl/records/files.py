"""Records on disk: one JSON line per episode or training step, read back without loss.

A line is one `write` system call, so a crash can tear only the last line of a file. A writer that
opens such a file moves the torn bytes to `<file>.torn`; a reader leaves them out; both say so with
a RecordWarning. A line broken anywhere else is a UserError: it was not a crash. Readers keep the
last record of each key, so an episode recorded again after a resume counts once. One writer per
file.
What a line is: `agentrl.records.lines`.
"""

from __future__ import annotations

import json
import os
import tempfile
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, Self, TypeVar

from agentrl.errors import ContractError, UserError
from agentrl.records.lines import ESCAPE, FORMAT_VERSION, is_json, parse_line, to_line
from agentrl.records.redact import redactor
from agentrl.records.rows import Row, episode_of, episode_row
from agentrl.trajectory import Episode, EpisodeKey

T = TypeVar("T")


class RecordWarning(UserWarning):
    """A record file ended in a torn line; the message names file and line."""


class _LineWriter:
    """Appends JSON lines to a file; opening it first sets a torn last line aside.

    Args:
        path: the file; it and its folders are made if missing.
        fsync: wait for the disk after every line (survives a power cut, costs milliseconds).
    """

    def __init__(self, path: str | os.PathLike[str], *, fsync: bool = False) -> None:
        self.path = Path(path)
        self.path.parent.mkdir(parents=True, exist_ok=True)
        _set_torn_line_aside(self.path)
        self._fsync = fsync
        self._secrets = redactor()
        self._file = os.open(
            self.path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o644
        )

    def _append(self, row: Row, what: str) -> None:
        if self._file < 0:
            raise ValueError(f"{self.path} is closed")
        line = to_line({"v": FORMAT_VERSION, **row}, what, self._secrets)
        written = 0
        try:
            while written < len(line):
                written += os.write(self._file, line[written:])
        except OSError as error:
            # A full disk must not leave half a line for the next record to continue.
            os.ftruncate(self._file, os.fstat(self._file).st_size - written)
            raise OSError(error.errno, error.strerror, str(self.path)) from error
        if self._fsync:
            os.fsync(self._file)

    def close(self) -> None:
        """Close the file; safe to call twice."""
        if self._file >= 0:
            os.close(self._file)
            self._file = -1

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()


class EpisodeWriter(_LineWriter):
    """Appends episodes to `episodes.jsonl`, one line each.

    Args:
        path, fsync: as for every writer of lines.
        experts: write which experts of a mixture the tokens went to as well, where that is known.
    """

    def __init__(
        self, path: str | os.PathLike[str], *, fsync: bool = False, experts: bool = False
    ) -> None:
        super().__init__(path, fsync=fsync)
        self._experts = experts

    def write(self, episode: Episode) -> None:
        """Append one episode; once this returns, a crash of the process no longer loses it.

        Raises:
            ContractError: task metadata or tool arguments hold what JSON cannot say.
            OSError: the disk is full or gone; the file is left at its last whole line.
        """
        row = episode_row(episode, experts=self._experts)
        self._append(row, f"episode {tuple(episode.key)}")


class MetricsWriter(_LineWriter):
    """Appends metrics to `metrics.jsonl`, one line per step."""

    def write(self, metrics: Mapping[str, Any]) -> None:
        """Append the metrics of one step; `step` (an integer) is among them.

        Raises:
            ContractError: `step` is missing, a key is reserved, or a value is not JSON.
            OSError: the disk is full or gone; the file is left at its last whole line.
        """
        step = metrics.get("step")
        if not isinstance(step, int) or isinstance(step, bool):
            raise ContractError(
                f"metrics need an integer 'step', not {step!r}; pass {{'step': n, ...}}"
            )
        if reserved := {"v", "nonfinite"} & metrics.keys():
            raise ContractError(
                f"metric name {min(reserved)!r} is reserved by the record format; choose another"
            )
        self._append(dict(metrics), f"metrics of step {step}")


class RowWriter(_LineWriter):
    """Appends rows of plain values, one line each."""

    def write(self, row: Row) -> None:
        """Append one row.

        Raises:
            ContractError: it holds what JSON cannot say.
            OSError: the disk is full or gone; the file is left at its last whole line.
        """
        self._append(row, f"a row of {self.path.name}")


def read_plain_rows(path: str | os.PathLike[str]) -> list[Row]:
    """Return the rows of a file in their order.

    Raises:
        UserError: the file is missing, or a line that is not the last is broken.
    """
    return list(_rows(Path(path), dict))


class EpisodeFile:
    """The episodes of a file: iterated in file order, repeated keys included, and those met by the
    last iteration read again by their keys. Kept of each are its key and its place.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self._path = Path(path)
        self._places: dict[EpisodeKey, int] = {}

    def __iter__(self) -> Iterator[Episode]:
        """Raises UserError: the file is missing, or a line that is not the last is broken."""
        self._places.clear()
        for place, episode in _places(self._path, episode_of):
            self._places[episode.key] = place
            yield episode

    def read(self, keys: Iterable[EpisodeKey]) -> dict[EpisodeKey, Episode]:
        """The last record of each of these keys that was met.

        Raises:
            KeyError: a key was not met.
            UserError: the file was replaced since, as a resumed run does.
        """
        found: dict[EpisodeKey, Episode] = {}
        try:
            with self._path.open("rb") as file:
                for key in keys:
                    file.seek(self._places[key])
                    found[key] = parse_line(file.readline(), str(self._path), episode_of)
        except (FileNotFoundError, UserError) as error:
            raise UserError(self._replaced) from error
        if any(episode.key != key for key, episode in found.items()):
            raise UserError(self._replaced)
        return found

    @property
    def _replaced(self) -> str:
        return f"{self._path} was replaced while it was read: do the same again"


def iter_episodes(path: str | os.PathLike[str]) -> Iterator[Episode]:
    """Yield every recorded episode in file order, repeated keys included.

    For files that are larger than memory.

    Raises:
        UserError: the file is missing, or a line that is not the last is broken.
    """
    return _rows(Path(path), episode_of)


def read_episodes(path: str | os.PathLike[str]) -> dict[EpisodeKey, Episode]:
    """Return the last record of every episode key.

    Raises:
        UserError: the file is missing, or a line that is not the last is broken.
    """
    return {episode.key: episode for episode in iter_episodes(path)}


def read_metrics(path: str | os.PathLike[str]) -> list[dict[str, Any]]:
    """Return the last record of every step, in order of steps; NaN and infinities are floats again.

    Raises:
        UserError: the file is missing, or a line that is not the last is broken.
    """
    rows = {row["step"]: row for row in _rows(Path(path), _metrics)}
    return [rows[step] for step in sorted(rows)]


def set_aside(path: str | os.PathLike[str], unwanted: Callable[[Row], bool]) -> int:
    """Move the rows that a resumed run will write again to `<file>.redone`; return their number.

    The file is replaced as a whole, after the moved rows are on disk. A torn last line is left to
    the next writer.

    Raises:
        UserError: a line that is not the last is broken.
    """
    target, side = Path(path), Path(f"{path}.redone")
    if not target.exists():
        return 0
    moved, draft = 0, target.with_name(f".{target.name}.kept")
    try:
        with target.open("rb") as source, draft.open("wb") as kept, side.open("ab") as aside:
            for number, line in enumerate(source, 1):
                torn = not line.strip() or (not line.endswith(b"\n") and not is_json(line))
                moves = not torn and parse_line(line, f"{target}:{number}", unwanted)
                (aside if moves else kept).write(line)
                moved += moves
            for file in (aside, kept):
                file.flush()
                os.fsync(file.fileno())
        if moved:
            os.replace(draft, target)
    finally:
        draft.unlink(missing_ok=True)
        if not side.stat().st_size:
            side.unlink()
    return moved


def write_json_atomic(path: str | os.PathLike[str], obj: Any) -> None:
    """Write JSON so that a reader sees the old file or the new one, even after a power cut.

    Raises:
        ContractError: `obj` is not strict JSON.
    """
    try:
        text = json.dumps(redactor().row(obj), indent=2, allow_nan=False) + "\n"
    except (TypeError, ValueError, RecursionError) as error:
        raise ContractError(
            f"{path} cannot be written as JSON ({error}); use finite numbers and text"
        ) from error
    write_bytes_atomic(path, text.encode(errors=ESCAPE))


def write_bytes_atomic(path: str | os.PathLike[str], content: bytes) -> None:
    """Replace a file as a whole (write beside it, sync, rename); missing folders are made."""
    target = Path(path)
    target.parent.mkdir(parents=True, exist_ok=True)
    handle, name = tempfile.mkstemp(prefix=f".{target.name}.", dir=target.parent)
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        os.chmod(name, 0o644)
        os.replace(name, target)
    except BaseException:
        Path(name).unlink(missing_ok=True)
        raise
    folder = os.open(target.parent, os.O_RDONLY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)


def _places(path: Path, parse: Callable[[Row], T]) -> Iterator[tuple[int, T]]:
    """Yield the byte at which each record begins, and the record; blank lines are passed over."""
    if not path.is_file():
        raise UserError(f"no records at {path}; give the run folder's file")
    begins = 0
    with path.open("rb") as file:
        for number, line in enumerate(file, 1):
            place, begins = begins, begins + len(line)
            if not line.strip():
                continue
            if not line.endswith(b"\n") and not is_json(line):
                warnings.warn(
                    f"{path}:{number}: the last line is torn ({len(line)} bytes) and was left out",
                    RecordWarning,
                    stacklevel=4,
                )
                return
            yield place, parse_line(line, f"{path}:{number}", parse)


def _rows(path: Path, parse: Callable[[Row], T]) -> Iterator[T]:
    return (row for _, row in _places(path, parse))


def _set_torn_line_aside(path: Path) -> None:
    """End a whole last line that lacks its newline; move a torn one to `<file>.torn`."""
    if not path.exists():
        return
    with path.open("r+b") as file:
        lines, keep, tail = 0, 0, b""
        for tail in file:
            lines, keep = lines + 1, keep + (len(tail) if tail.endswith(b"\n") else 0)
        if not tail or tail.endswith(b"\n"):
            return
        if is_json(tail):
            file.write(b"\n")
            return
        side = path.with_name(path.name + ".torn")
        with side.open("ab") as torn:
            torn.write(tail + b"\n")
        file.truncate(keep)
    warnings.warn(
        f"{path}:{lines}: the last line was torn by a crash; its {len(tail)} bytes were moved to"
        f" {side.name}",
        RecordWarning,
        stacklevel=4,
    )


def _metrics(row: Row) -> Row:
    if not isinstance(row["step"], int):
        raise ValueError(f"step={row['step']!r} is no integer")
    return row

"""Files of examples: read row by row, checked, without repetitions, split by prompt."""

from __future__ import annotations

import gzip
import hashlib
import json
import zlib
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from agentrl.errors import ConfigError, UserError
from agentrl.evaluation.results.turn_labels import LABELS
from agentrl.trainers.offline.data.formats import TieError, read_row
from agentrl.trainers.offline.data.mining import mine
from agentrl.trainers.offline.data.nouns import (
    Example,
    Kind,
    Label,
    as_conversations,
    as_labels,
    as_pairs,
    as_steps,
)

One = TypeVar("One", bound=Example)

_SHOWN = 3
"""Line numbers that are named of each problem."""
AS_KIND: Mapping[Kind, Callable[[list[Example]], Iterator[Example]]] = {
    "conversations": as_conversations,
    "pairs": as_pairs,
    "labels": as_labels,
    "steps": as_steps,
}
"""Kind -> the examples that serve as it."""
_READERS = {".parquet": "parquet", ".arrow": "arrow", ".csv": "csv"}


class Problems:
    """What is wrong with the rows of a file: reason -> line numbers."""

    def __init__(self, file: str) -> None:
        self.file = file
        self.lines: dict[str, list[int]] = defaultdict(list)

    def __len__(self) -> int:
        return sum(map(len, self.lines.values()))

    def sentence(self) -> str:
        """All reasons with their counts and first line numbers."""
        reasons = [
            f"{reason} ({len(lines)} row{'s' if len(lines) > 1 else ''}:"
            f" line{'s' if len(lines) > 1 else ''} {', '.join(map(str, lines[:_SHOWN]))}"
            f"{', …' if len(lines) > _SHOWN else ''})"
            for reason, lines in self.lines.items()
        ]
        return f"{self.file}: {'; '.join(reasons)}"

    def refuse(self) -> None:
        """Stop if there are any.

        Raises:
            UserError: counts, the first line numbers of each reason, and the fix.
        """
        if self.lines:
            raise UserError(
                f"{self.sentence()}: repair those rows, or go on without them by"
                " data.skip_bad_rows=true"
            )


@dataclass
class ReadCounts:
    """What became of the rows of some files: the report that a stage prints and records."""

    rows: int = 0
    ties: int = 0
    skipped: list[str] = field(default_factory=list)
    repeated: int = 0
    of_other_kind: int = 0


class Split(NamedTuple):
    """Examples that train and examples that are held out; no prompt is on both sides."""

    train: list[Any]
    held_out: list[Any]


def read_examples(
    paths: Sequence[str | Path], kind: Kind, *, skip_bad_rows: bool = False
) -> tuple[list[Any], ReadCounts]:
    """All examples of a kind in some files, each once.

    Args:
        paths: `.jsonl` (also `.gz`), `.json`, `.parquet`, a folder that `datasets` saved, or an
            `episodes.jsonl` of a run or an evaluation, from which pairs and labels are mined. The
            folder of a run, an evaluation or `agentrl label` stands for its file.
        kind: what the examples must serve as; a pair also serves as a conversation (its chosen
            response) and as two labels.
        skip_bad_rows: leave rows that cannot be read out, and count them.

    Raises:
        UserError: rows are bad, or no example of the kind is left.
        ConfigError: there is no such file.
    """
    counts, seen = ReadCounts(), set[str]()
    found: list[Any] = []
    for path in (_inside(Path(path), kind) for path in paths):
        problems = Problems(path.name)
        examples = list(_examples(path, kind, problems, counts))
        if not skip_bad_rows:
            problems.refuse()
        elif problems:
            counts.skipped.append(problems.sentence())
        served: list[Any] = list(AS_KIND[kind](examples))
        counts.of_other_kind += 0 if served else len(examples)
        for one in served:
            key = repr(one)
            counts.repeated += key in seen
            if key not in seen:
                seen.add(key)
                found.append(one)
    if not found:
        raise UserError(
            f"no {kind} in {', '.join(map(str, paths))}: {counts.rows} rows, {counts.ties} ties,"
            f" {counts.of_other_kind} examples of another kind"
        )
    if kind == "labels":
        _refuse_one_sided(found, paths)
    return found, counts


def split_by_prompt(examples: Sequence[One], share: float, seed: int) -> Split:
    """Put a share of the prompts aside, with all that was said to them.

    A prompt falls to one side by its own hash, so more data moves few of them.
    """
    groups: dict[str, list[One]] = defaultdict(list)
    for one in examples:
        groups[repr(one.prompt)].append(one)
    order = sorted(groups, key=lambda text: hashlib.sha256(f"{seed}:{text}".encode()).digest())
    held = min(len(order) - 1, max(1, round(share * len(order)))) if share and order else 0
    apart = [one for text in order[:held] for one in groups[text]]
    kept = {id(one) for one in apart}
    return Split([one for one in examples if id(one) not in kept], apart)


def _refuse_one_sided(labels: Iterable[Label], paths: Sequence[str | Path]) -> None:
    sides = [label.desirable for label in labels]
    if len(set(sides)) == 1:
        raise UserError(
            f"all {len(sides)} labels of {', '.join(map(str, paths))} are"
            f" {str(sides[0]).lower()}: KTO compares, so give rows of both kinds"
        )


def _inside(path: Path, kind: Kind) -> Path:
    """The file that one of our commands wrote into a folder; any other path as it is."""
    names = ("episodes.jsonl", LABELS)
    files = [path / name for name in (names[::-1] if kind == "steps" else names)]
    return next((file for file in files if file.is_file()), path)


def _examples(path: Path, kind: Kind, problems: Problems, counts: ReadCounts) -> Iterator[Example]:
    if path.name == "episodes.jsonl":
        mined = mine(path, kind)
        counts.rows += mined.episodes
        counts.ties += mined.unanimous
        yield from mined.examples
        return
    for number, row in _rows(path, problems):
        counts.rows += 1
        try:
            yield from read_row(row)
        except TieError:
            counts.ties += 1
        except (ValueError, TypeError) as error:
            problems.lines[str(error)].append(number)


def _rows(path: Path, problems: Problems) -> Iterator[tuple[int, Any]]:
    """Rows with their numbers, from 1: lines of text files, rows of others."""
    if not path.exists():
        raise ConfigError(f"data file {path} does not exist: give a JSONL, JSON or Parquet file")
    try:
        yield from _unchecked_rows(path, problems)
    except (ValueError, OSError, EOFError, zlib.error) as error:
        why = " ".join(str(error).split())[:200]
        raise UserError(
            f"data file {path} cannot be read as {path.suffix or 'a saved dataset'} ({why}): repair"
            " it, or give another"
        ) from error


def _unchecked_rows(path: Path, problems: Problems) -> Iterator[tuple[int, Any]]:
    if path.is_dir() or path.suffix in _READERS:
        yield from enumerate(_library_rows(path), 1)
        return
    if path.suffix == ".json":
        rows = json.loads(path.read_text(encoding="utf-8"))
        if not isinstance(rows, list):
            raise ValueError(f"it holds no list but {type(rows).__name__}")
        yield from enumerate(rows, 1)
        return
    opened = gzip.open if path.suffix == ".gz" else open
    with opened(path, "rt", encoding="utf-8") as file:
        for number, line in enumerate(file, 1):
            if line.strip():
                try:
                    row = json.loads(line)
                except ValueError:
                    problems.lines["not JSON"].append(number)
                else:
                    yield number, row


def _library_rows(path: Path) -> Iterable[Any]:
    import datasets

    if path.is_dir():
        loaded = datasets.load_from_disk(str(path))
    else:
        reader = _READERS[path.suffix]
        try:
            loaded = datasets.load_dataset(reader, data_files=str(path), split="train")
        except datasets.exceptions.DatasetsError as error:
            raise ValueError(str(error.__cause__ or error)) from error
    rows: Iterable[Any] = loaded
    return rows

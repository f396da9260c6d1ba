"""Files of examples: public rows and recorded episodes, read once, checked, and split by prompt.

From an `episodes.jsonl`, pairs join an episode that passed and one that failed on the same task.
Their tokens stay as they were sampled, and the mask is the trajectory's own: observations never
train.
"""

from __future__ import annotations

import gzip
import hashlib
import json
import zlib
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from agentrl.errors import ConfigError, UserError
from agentrl.evaluation.label import LABELS
from agentrl.records.files import read_episodes
from agentrl.registry import factory
from agentrl.trainers.offline.examples import (
    Conversation,
    Example,
    Kind,
    Label,
    Pair,
    Response,
    TieError,
    as_conversations,
    as_labels,
    as_pairs,
    as_steps,
    read_row,
)
from agentrl.trajectory import Episode, Trajectory
from agentrl.types import Message, ToolSpec

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
                f"{self.sentence()}: repair those rows, or skip them with data.skip_bad_rows=true"
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
            folder of a run, an evaluation or `agentrl label` means its file.
        kind: what the examples must serve as; a pair also serves as a conversation (its chosen
            response) and as two labels.
        skip_bad_rows: skip and count rows that cannot be read.

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
    """Hold out a share of the prompts with all their responses.

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
            raise ValueError(f"it must hold a list, not {type(rows).__name__}")
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


@dataclass(frozen=True)
class Mined:
    """What some episodes held.

    Attributes:
        episodes: all that were read.
        unanimous: tasks whose scored episodes all passed or all failed: they prefer nothing.
    """

    examples: list[Example]
    episodes: int
    unanimous: int


def mine(path: Path, kind: Kind) -> Mined:
    """Examples of a kind from an `episodes.jsonl`.

    Pairs join a passed and a failed episode of one task, environment and start state; each episode
    is in at most one pair. Labels say whether an episode passed; conversations are those that
    did. Episodes that infrastructure failed are left out, and so are those with more than one
    branch of history.

    Raises:
        UserError: no episode can be used.
    """
    if kind == "steps":
        raise UserError(
            f"{path}: its turns have no labels: make them with `agentrl label {path.parent}"
            " --policy hf:MODEL`, and give its labels.jsonl"
        )
    read = list(read_episodes(path).values())
    usable = [one for one in read if one.passed is not None and _spoke(one)]
    if not usable:
        raise UserError(f"{path}: none of {len(read)} episodes can be used: {_reasons(read)}")
    if kind == "conversations":
        passed = [as_conversation(one) for one in usable if one.passed]
        return Mined(list(passed), len(read), 0)
    if kind == "labels":
        labels = [Label(opening_of(one), _response(one), bool(one.passed)) for one in usable]
        return Mined(list(labels), len(read), 0)
    groups: dict[tuple[str, str, str], list[Episode]] = defaultdict(list)
    for one in usable:
        groups[one.env, one.task.id, one.start].append(one)
    pairs = [pair for group in groups.values() for pair in _pairs(group)]
    split = sum(len({bool(one.passed) for one in group}) == 2 for group in groups.values())
    return Mined(list(pairs), len(read), len(groups) - split)


def _reasons(read: list[Episode]) -> str:
    """Why no episode can be used, and what to do."""
    scored = [one for one in read if one.passed is not None]
    branched = sum(len(one.trajectories) > 1 for one in scored)
    counts = {
        "have no score, because infrastructure failed (see `failure` in their rows, then play them"
        " again)": len(read) - len(scored),
        "hold several branches of history (only online training learns from those)": branched,
        "hold no words of the policy (see their `end`)": len(scored) - branched,
    }
    return "; ".join(f"{count} {why}" for why, count in counts.items() if count) or "it is empty"


def _pairs(group: list[Episode]) -> list[Pair]:
    passed = [one for one in group if one.passed]
    failed = [one for one in group if not one.passed]
    return [
        Pair(opening_of(good), _response(good), _response(bad))
        for good, bad in zip(passed, failed, strict=False)
        if opening_of(good) == opening_of(bad) and _response(good) != _response(bad)
    ]


def opening_of(episode: Episode) -> tuple[Message, ...]:
    """What an episode's policy was asked: all before its first turn."""
    messages = episode.messages
    first = next(i for i, message in enumerate(messages) if message.role == "assistant")
    return messages[:first]


def as_conversation(episode: Episode) -> Conversation:
    """What the policy wrote in an episode, to be imitated."""
    return Conversation(until_last_turn(episode), *_tokens_of(episode))


def _response(episode: Episode) -> Response:
    after = until_last_turn(episode)[len(opening_of(episode)) :]
    return Response(after, *_tokens_of(episode))


def _tokens_of(episode: Episode) -> tuple[Trajectory | None, tuple[ToolSpec, ...]]:
    """The recorded tokens; for a policy that spoke messages, the tools that its prompt shows."""
    if episode.trajectories:
        return episode.trajectories[0], ()
    return None, _tools(episode.env)


@cache
def _tools(env: str) -> tuple[ToolSpec, ...]:
    return tuple(factory(env)().tools)


def until_last_turn(episode: Episode) -> tuple[Message, ...]:
    """An episode up to its last turn: what the world answered after it teaches nothing."""
    messages = episode.messages
    last = max(i for i, message in enumerate(messages) if message.role == "assistant")
    return messages[: last + 1]


def _spoke(episode: Episode) -> bool:
    """Whether there is a turn to learn from, in one branch."""
    turns = [message for message in episode.messages if message.role == "assistant"]
    said = bool(turns) and bool(turns[-1].content.strip() or turns[-1].tool_calls)
    return said and len(episode.trajectories) <= 1

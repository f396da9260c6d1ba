"""Versions of a reward model in a folder: published, compared on the same pairs, withdrawn.

    STORE/pairs.jsonl                   what every version is checked on
    STORE/withdrawn.json                version -> why it is served no more
    STORE/versions/3/model/             a copy of the model's files
    STORE/versions/3/version.json       their digest, and the model's scores of the pairs

The version that is served is the highest one that was not withdrawn. A version appears whole or not
at all, and is never written again.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import math
import os
import shutil
import time
import uuid
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from statistics import fmean, pstdev
from typing import Any, NamedTuple

from agentrl.aio import run_alone
from agentrl.errors import ConfigError
from agentrl.records.files import RowWriter, read_plain_rows, write_json_atomic
from agentrl.records.owner import owned
from agentrl.records.rows import message_of, messages_row
from agentrl.types import Message
from agentrl.verifiers.models.heads import ByHeads
from agentrl.verifiers.models.reward_model import RewardModel

Messages = tuple[Message, ...]
TOLERANCE = 0.1
"""Of the standard deviation of a version's scores: how far each may lie off on another machine."""
ERRORS = 2.0
"""Standard errors by which a version may rank worse than the one that is served."""
_PAIRS, _VERSION, _WITHDRAWN = "pairs.jsonl", "version.json", "withdrawn.json"


class Ranked(NamedTuple):
    """Two conversations that begin alike, and which is better."""

    chosen: Messages
    rejected: Messages


@dataclass(frozen=True)
class Version:
    """One published reward model.

    Attributes:
        number: from 1, in the order of publishing.
        source: the model that it was copied from.
        published: when, in UTC.
        digest: SHA-256 of its files.
        scores: of the store's pairs: chosen and rejected of the first, of the second, and so on.
    """

    number: int
    source: str
    published: str
    digest: str
    scores: tuple[float, ...]

    @property
    def margins(self) -> tuple[float, ...]:
        """Of each pair, the score of the better answer less that of the other."""
        return tuple(a - b for a, b in zip(self.scores[::2], self.scores[1::2], strict=True))

    @property
    def accuracy(self) -> float:
        """Share of the pairs whose better answer has the higher score."""
        return fmean(margin > 0 for margin in self.margins)

    def agrees(self, other: Version) -> float:
        """Share of the pairs that both versions rank alike."""
        both = zip(self.margins, other.margins, strict=True)
        return fmean((a > 0) == (b > 0) for a, b in both)


class RewardStore:
    """The folder of a reward model's versions; the first `publish` makes it."""

    def __init__(self, folder: str | Path) -> None:
        self.folder = Path(folder)
        if self.folder.as_posix().startswith(("http:/", "https:/")):
            raise ConfigError(f"{folder} is an address: give the folder of the versions")

    def publish(self, model: str, pairs: Sequence[Ranked] = (), *, anyway: bool = False) -> Version:
        """Score the store's pairs by a model, copy its files, and serve it from now on.

        Args:
            model: a folder, or a name on the hub.
            pairs: of the whole store; given with the first version, and with no other.
            anyway: also where it ranks clearly worse than the version that is served, or was a
                version already.

        Raises:
            ConfigError: it is no reward model, it gives a number that is not finite, all of its
                scores are one, there are no pairs, or `anyway` is needed.
        """
        from agentrl.engines.loading import find_model  # brings torch along

        source, first = find_model(model), not self._all()
        if first != bool(pairs):
            raise ConfigError(
                f"{self.folder} has no version yet: give --pairs FILE with the first one"
                if first
                else f"the pairs of {self.folder} are those of its first version, so that all can"
                " be compared: leave --pairs out, or begin another store"
            )
        scores = score_pairs(RewardModel.load(source), pairs or self.pairs())
        with self._draft() as draft:
            (draft / "model").mkdir()
            for path in source.iterdir():
                if path.is_file():
                    shutil.copy2(path, draft / "model" / path.name)
            with owned(self.folder):
                if first == bool(self._all()):
                    raise ConfigError(f"{self.folder} has got its first version meanwhile")
                found = Version(
                    number=1 + max(self._all(), default=0),
                    source=model,
                    published=datetime.now(UTC).isoformat(timespec="seconds"),
                    digest=digest_of(draft / "model"),
                    scores=tuple(scores),
                )
                self._refuse(found, anyway)
                write_json_atomic(draft / _VERSION, asdict(found))
                if first:
                    _write_pairs(draft / _PAIRS, pairs)
                    os.replace(draft / _PAIRS, self.folder / _PAIRS)
                os.rename(draft, self._place(found.number))
        return found

    def rollback(self, why: str, number: int = 0) -> tuple[Version, Version]:
        """Withdraw a version; returns it, and the one that is served now.

        Args:
            number: of the version; 0: the one that is served.

        Raises:
            ConfigError: there is no such version, it was withdrawn, or no other one is left.
        """
        with owned(self.folder):
            bad = self.version(number) if number else self.served()
            if self.withdrawn(bad.number) is not None:
                raise ConfigError(f"version {bad.number} of {self.folder} was withdrawn before")
            if not (left := [one for one in self.numbers() if one != bad.number]):
                raise ConfigError(
                    f"version {bad.number} is the only one of {self.folder} that is left: publish"
                    " another one first"
                )
            gone = {**self._withdrawn(), str(bad.number): why}
            write_json_atomic(self.folder / _WITHDRAWN, gone)
        return bad, self.version(left[-1])

    def served(self) -> Version:
        """The version that is served.

        Raises:
            ConfigError: nothing was published in this folder.
        """
        if not (numbers := self.numbers()):
            raise ConfigError(
                f"{self.folder} is no store of reward models: begin one with `agentrl reward"
                f" publish MODEL {self.folder} --pairs FILE`"
            )
        return self.version(numbers[-1])

    def versions(self) -> list[Version]:
        """All versions, the withdrawn ones too, in order."""
        return [self.version(number) for number in self._all()]

    def numbers(self) -> list[int]:
        """Those that were not withdrawn, in order."""
        gone = self._withdrawn()
        return [number for number in self._all() if str(number) not in gone]

    def withdrawn(self, number: int) -> str | None:
        """Why a version was withdrawn; None for one that was not."""
        return self._withdrawn().get(str(number))

    def version(self, number: int) -> Version:
        """What is known of a version.

        Raises:
            ConfigError: there is none of this number.
        """
        path = self._place(number) / _VERSION
        if not path.exists():
            numbers = ", ".join(map(str, self._all())) or "none"
            raise ConfigError(f"{self.folder} has no version {number}: it has {numbers}")
        row: dict[str, Any] = json.loads(path.read_text())
        return Version(**{**row, "scores": tuple(row["scores"])})

    def pairs(self) -> list[Ranked]:
        """What every version is checked on."""
        return [
            Ranked(*(tuple(map(message_of, row[side])) for side in ("chosen", "rejected")))
            for row in read_plain_rows(self.folder / _PAIRS)
        ]

    def load(self, number: int) -> RewardModel:
        """The model of a version, after it was seen that it is what was published.

        Raises:
            ConfigError: its files have changed, or it scores the pairs otherwise here than when it
                was published, as other versions of libraries may.
        """
        version, place = self.version(number), self._place(number) / "model"
        if digest_of(place) != version.digest:
            raise ConfigError(
                f"{place} is not what was published as version {number}: its files have changed;"
                " publish the model again, as a version of its own"
            )
        model = RewardModel.load(place)
        scores = score_pairs(model, self.pairs())
        worst = max(abs(a - b) for a, b in zip(scores, version.scores, strict=True))
        if worst > TOLERANCE * pstdev(version.scores):
            raise ConfigError(
                f"version {number} of {self.folder} scores its own pairs otherwise here than when"
                f" it was published, by up to {worst:.3g}: other libraries read or compute it in"
                " another way; publish it again with these, or serve it with those"
            )
        return model

    def _refuse(self, new: Version, anyway: bool) -> None:
        if anyway or not self._all():
            return
        for old in self.versions():
            if old.digest == new.digest:
                why = self.withdrawn(old.number)
                past = f"was withdrawn ({why})" if why is not None else "is there already"
                raise ConfigError(
                    f"the files of {new.source} are those of version {old.number}, which {past}:"
                    " publish them with --anyway"
                )
        if not self.numbers():
            return
        served, pairs = self.served(), len(new.margins)
        error = math.sqrt(sum(a * (1 - a) for a in (new.accuracy, served.accuracy)) / pairs)
        if new.accuracy < served.accuracy - ERRORS * error:
            raise ConfigError(
                f"{new.source} ranks {new.accuracy:.3f} of {pairs} pairs rightly, and version"
                f" {served.number}, which is served, {served.accuracy:.3f}: publish it with"
                " --anyway if that is meant"
            )

    def _place(self, number: int) -> Path:
        return self.folder / "versions" / str(number)

    def _all(self) -> list[int]:
        place = self.folder / "versions"
        names = os.listdir(place) if place.is_dir() else []
        return sorted(int(name) for name in names if name.isdecimal())

    def _withdrawn(self) -> dict[str, str]:
        try:
            found: dict[str, str] = json.loads((self.folder / _WITHDRAWN).read_text())
        except FileNotFoundError:
            return {}
        return found

    @contextmanager
    def _draft(self) -> Iterator[Path]:
        """A new folder beside the versions, gone afterwards unless it was renamed; what a killed
        publisher left is no version, and goes after a day.
        """
        draft = self.folder / "versions" / f".draft-{uuid.uuid4().hex}"
        draft.mkdir(parents=True)
        for left in draft.parent.glob(".draft-*"):
            if left.stat().st_mtime < time.time() - 86_400:
                shutil.rmtree(left, ignore_errors=True)
        try:
            yield draft
        finally:
            shutil.rmtree(draft, ignore_errors=True)
            for folder in (draft.parent, self.folder):
                if folder.is_dir() and not any(folder.iterdir()):
                    folder.rmdir()


def digest_of(folder: Path) -> str:
    """SHA-256 of the names and contents of the files in a model's folder."""
    digest = hashlib.sha256()
    for path in sorted(path for path in folder.iterdir() if path.is_file()):
        digest.update(f"{path.name}\0{path.stat().st_size}\0".encode())
        with path.open("rb") as file:
            while block := file.read(1 << 20):
                digest.update(block)
    return digest.hexdigest()


def score_pairs(model: ByHeads, pairs: Sequence[Ranked]) -> list[float]:
    """Scores of the chosen and the rejected conversation of each pair.

    Raises:
        ConfigError: the model cannot score one of them, or gives all the same score.
    """

    async def everything() -> list[float]:
        both = [one for pair in pairs for one in pair]
        return list(await asyncio.gather(*(model.score(one) for one in both)))

    scores = run_alone(everything())
    if strange := [score for score in scores if not math.isfinite(score)]:
        raise ConfigError(
            f"the model gives {len(strange)} of {len(scores)} conversations of the pairs no finite"
            " score, as those that are too long for it: give other pairs"
        )
    if len(set(scores)) < 2:
        raise ConfigError(f"the model gives all {len(scores)} conversations of the pairs one score")
    return scores


def _write_pairs(path: Path, pairs: Sequence[Ranked]) -> None:
    with RowWriter(path) as writer:
        for pair in pairs:
            chosen, rejected = map(messages_row, pair)
            writer.write({"chosen": chosen, "rejected": rejected})

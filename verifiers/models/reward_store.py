"""Versions of a reward model in a folder: published, compared on the same pairs, withdrawn.

    STORE/pairs.jsonl                   what every version is checked on
    STORE/versions/3/model/             a copy of the model
    STORE/versions/3/version.json       its digest, its scores of the pairs
    STORE/versions/3/withdrawn.json     why it is served no more

The version that is served is the highest one that was not withdrawn. A version appears whole or not
at all, and is never written again.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import os
import shutil
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from statistics import fmean, pstdev
from typing import Any, NamedTuple

from agentrl.errors import ConfigError
from agentrl.records.files import RowWriter, read_plain_rows, write_json_atomic
from agentrl.records.owner import owned
from agentrl.records.rows import message_of, messages_row
from agentrl.types import Message
from agentrl.verifiers.models.drift import Drift
from agentrl.verifiers.models.heads import ByHeads
from agentrl.verifiers.models.reward_model import RewardModel

Messages = tuple[Message, ...]
TOLERANCE = 0.1
"""Of the standard deviation of a version's scores: how far each may lie off on another machine."""
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
        agreement: share of the pairs that it ranks as the version does that was served before it;
            None for the first one.
    """

    number: int
    source: str
    published: str
    digest: str
    scores: tuple[float, ...]
    agreement: float | None = None

    @property
    def accuracy(self) -> float:
        """Share of the pairs whose better answer has the higher score."""
        return fmean(_ranks(self.scores))


class RewardStore:
    """The folder of a reward model's versions.

    Args:
        folder: made by the first `publish`.
    """

    def __init__(self, folder: str | Path) -> None:
        self.folder = Path(folder)

    def publish(self, model: str, pairs: Sequence[Ranked] = ()) -> Version:
        """Copy a model into the store, score the store's pairs by it, and serve it from now on.

        Args:
            model: a folder, or a name on the hub.
            pairs: of the whole store; given with the first version, and with no other.

        Raises:
            ConfigError: it is no reward model, its files are those of the version that is served,
                it gives a number that is not finite, or there are no pairs, or too few.
        """
        from agentrl.engines.loading import find_model  # brings torch along

        source = find_model(model)
        known = (self.folder / _PAIRS).exists()
        if known == bool(pairs):
            raise ConfigError(
                f"the pairs of {self.folder} are those of its first version, so that all can be"
                " compared: leave --pairs out, or begin another store"
                if known
                else f"{self.folder} has no pairs yet: give --pairs FILE with its first version"
            )
        with owned(self.folder):
            before = self.served() if self.numbers() else None
            if before and before.digest == digest_of(source):
                raise ConfigError(
                    f"the files of {model} are those of version {before.number}, which is served"
                )
            with self._draft() as draft:
                shutil.copytree(source, draft / "model")
                if pairs:
                    _write_pairs(draft / _PAIRS, pairs)
                asked = _read_pairs(draft / _PAIRS) if pairs else self.pairs()
                scores = score_pairs(RewardModel.load(draft / "model"), asked)
                Drift(scores)  # refuses what can be no reference
                found = Version(
                    number=max(self._all(), default=0) + 1,
                    source=model,
                    published=datetime.now(UTC).isoformat(timespec="seconds"),
                    digest=digest_of(draft / "model"),
                    scores=tuple(scores),
                    agreement=_agreement(scores, before.scores) if before else None,
                )
                write_json_atomic(draft / _VERSION, asdict(found))
                if pairs:
                    os.replace(draft / _PAIRS, self.folder / _PAIRS)
                os.rename(draft, self._place(found.number))
        return found

    def rollback(self, why: str) -> tuple[Version, Version]:
        """Withdraw the version that is served; returns it, and the older one that is served now.

        Raises:
            ConfigError: there is no older one.
        """
        with owned(self.folder):
            bad = self.served()
            older = [number for number in self.numbers() if number != bad.number]
            if not older:
                raise ConfigError(
                    f"version {bad.number} is the only one of {self.folder} that is left: publish"
                    " another one first"
                )
            now = datetime.now(UTC).isoformat(timespec="seconds")
            row = {"why": why, "withdrawn": now}
            write_json_atomic(self._place(bad.number) / _WITHDRAWN, row)
            return bad, self.version(older[-1])

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
        return [number for number in self._all() if self.withdrawn(number) is None]

    def withdrawn(self, number: int) -> str | None:
        """Why a version was withdrawn; None for one that was not."""
        path = self._place(number) / _WITHDRAWN
        return str(json.loads(path.read_text())["why"]) if path.exists() else None

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
        return _read_pairs(self.folder / _PAIRS)

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

    def _place(self, number: int) -> Path:
        return self.folder / "versions" / str(number)

    def _all(self) -> list[int]:
        place = self.folder / "versions"
        names = os.listdir(place) if place.is_dir() else []
        return sorted(int(name) for name in names if name.isdecimal())

    @contextmanager
    def _draft(self) -> Iterator[Path]:
        """A new folder beside the versions, gone afterwards unless it was renamed."""
        place = self.folder / "versions"
        place.mkdir(exist_ok=True)
        for left in place.glob(".draft-*"):  # of a publisher that was killed: we hold the lock
            shutil.rmtree(left)
        draft = Path(tempfile.mkdtemp(prefix=".draft-", dir=place))
        try:
            yield draft
        finally:
            shutil.rmtree(draft, ignore_errors=True)


def digest_of(folder: Path) -> str:
    """SHA-256 of the names and contents of a model's files."""
    digest = hashlib.sha256()
    for path in sorted(path for path in folder.rglob("*") if path.is_file()):
        digest.update(f"{path.relative_to(folder)}\0{path.stat().st_size}\0".encode())
        with path.open("rb") as file:
            while block := file.read(1 << 20):
                digest.update(block)
    return digest.hexdigest()


def score_pairs(model: ByHeads, pairs: Sequence[Ranked]) -> list[float]:
    """Scores of the chosen and the rejected conversation of each pair.

    Raises:
        ConfigError: the model cannot score one of them.
    """

    async def everything() -> list[float]:
        both = [one for pair in pairs for one in pair]
        return list(await asyncio.gather(*(model.score(one) for one in both)))

    scores = asyncio.run(everything())
    if strange := [score for score in scores if not abs(score) < float("inf")]:
        raise ConfigError(
            f"the model gives {len(strange)} of {len(scores)} conversations of the pairs no finite"
            " score, as those that are too long for it: give other pairs"
        )
    return scores


def _ranks(scores: Sequence[float]) -> list[bool]:
    return [a > b for a, b in zip(scores[::2], scores[1::2], strict=True)]


def _agreement(ours: Sequence[float], theirs: Sequence[float]) -> float:
    both = zip(_ranks(ours), _ranks(theirs), strict=True)
    return fmean(a == b for a, b in both)


def _write_pairs(path: Path, pairs: Sequence[Ranked]) -> None:
    with RowWriter(path) as writer:
        for pair in pairs:
            chosen, rejected = map(messages_row, pair)
            writer.write({"chosen": chosen, "rejected": rejected})


def _read_pairs(path: Path) -> list[Ranked]:
    return [
        Ranked(*(tuple(map(message_of, row[side])) for side in ("chosen", "rejected")))
        for row in read_plain_rows(path)
    ]

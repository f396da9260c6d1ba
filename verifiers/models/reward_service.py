"""Versions of a reward model: published into a folder, compared, served over HTTP, withdrawn.

    STORE/pairs.jsonl                   every version is checked on these
    STORE/withdrawn.json                version -> why it was withdrawn
    STORE/versions/3/model/             a copy of the model's files
    STORE/versions/3/version.json       their digest, and the model's scores of the pairs

The served version is the highest one that was not withdrawn. A version appears whole or not at all
(its folder is renamed into place), and is never written again.

    POST /score   {"conversations": [[{"role": …, "content": …}, …], …], "version": 3}
                  -> {"version": 3, "digest": …, "conversations": [{"raw": […], "beyond": false}]}
    GET  /status  -> what is served, and how far its scores have moved from those of its pairs

A conversation that is too long has "why" and no numbers; one that cannot be scored has "error".
Without "version", the served one answers. A client that asks for a version gets that one or an
error: 410 if it was withdrawn, 404 if it never existed.
"""

from __future__ import annotations

import asyncio
import bisect
import hashlib
import json
import math
import os
import secrets
import shutil
import time
import uuid
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from statistics import fmean, pstdev
from typing import TYPE_CHECKING, Any, NamedTuple, get_args
from urllib.parse import urlsplit

from agentrl.aio import run_alone, run_in_thread
from agentrl.errors import AgentRLError, ConfigError, VerifierError, boundary
from agentrl.records.files import RowWriter, read_plain_rows, write_json_atomic
from agentrl.records.owner import owned
from agentrl.records.rows import message_of, messages_row
from agentrl.types import BadCall, Message, Role
from agentrl.verifiers.models.heads import ByHeads, Heads
from agentrl.verifiers.models.reward_model import RewardModel

if TYPE_CHECKING:
    from starlette.applications import Starlette
    from starlette.requests import Request
    from starlette.responses import Response

Messages = tuple[Message, ...]

# --- the folder

TOLERANCE = 0.1
"""How far each score may be off on another machine, in standard deviations of all scores."""
STANDARD_ERRORS = 2.0
"""A version that ranks worse than the served one by more than these is refused."""
_PAIRS, _VERSION, _WITHDRAWN = "pairs.jsonl", "version.json", "withdrawn.json"


class Ranked(NamedTuple):
    """Two conversations that begin alike; the first is better."""

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
        """For each pair, the score of the better answer minus that of the other."""
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
    """The folder of a reward model's versions; the first `publish` creates it."""

    def __init__(self, folder: str | Path) -> None:
        self.folder = Path(folder)
        if self.folder.as_posix().startswith(("http:/", "https:/")):
            raise ConfigError(f"{folder} is an address: give the folder of the versions")

    def publish(self, model: str, pairs: Sequence[Ranked] = (), *, anyway: bool = False) -> Version:
        """Score the store's pairs by a model, copy its files, and serve it from now on.

        Args:
            model: a folder, or a name on the hub.
            pairs: of the whole store; only with the first version.
            anyway: publish even what ranks clearly worse than the served version, or was published
                before.

        Raises:
            ConfigError: it is not a reward model, its scores cannot be compared, there are no
                pairs, or `anyway` is needed.
        """
        from agentrl.engines.loading import find_model  # imports torch

        source, is_first = find_model(model), not self._all()
        if is_first and not pairs:
            raise ConfigError(
                f"{self.folder} has no version yet: give --pairs FILE with the first one"
            )
        if pairs and not is_first:
            raise ConfigError(
                f"the pairs of {self.folder} are those of its first version, so that all can be"
                " compared: leave --pairs out, or begin another store"
            )
        scores = score_pairs(RewardModel.load(source), pairs or self.pairs())
        with self._draft() as draft:
            (draft / "model").mkdir()
            for path in source.iterdir():
                if path.is_file():
                    shutil.copy2(path, draft / "model" / path.name)
            with owned(self.folder):
                if is_first and self._all():
                    raise ConfigError(f"{self.folder} has got its first version meanwhile")
                version = Version(
                    number=1 + max(self._all(), default=0),
                    source=model,
                    published=datetime.now(UTC).isoformat(timespec="seconds"),
                    digest=digest_of(draft / "model"),
                    scores=tuple(scores),
                )
                if not anyway:
                    self._refuse_doubtful(version)
                write_json_atomic(draft / _VERSION, asdict(version))
                if is_first:
                    _write_pairs(draft / _PAIRS, pairs)
                    os.replace(draft / _PAIRS, self.folder / _PAIRS)
                os.rename(draft, self._place(version.number))
        return version

    def rollback(self, why: str, number: int = 0) -> tuple[Version, Version]:
        """Withdraw a version (0: the served one); returns it and the version that is served now.

        Raises:
            ConfigError: there is no such version, it was withdrawn, or no other one is left.
        """
        with owned(self.folder):
            bad = self.version(number) if number else self.served()
            if self.withdrawn(bad.number) is not None:
                raise ConfigError(f"version {bad.number} of {self.folder} was withdrawn before")
            left = [other for other in self.numbers() if other != bad.number]
            if not left:
                raise ConfigError(
                    f"version {bad.number} is the only one of {self.folder} that is left: publish"
                    " another one first"
                )
            write_json_atomic(self.folder / _WITHDRAWN, {**self._withdrawn(), str(bad.number): why})
        return bad, self.version(left[-1])

    def served(self) -> Version:
        """The version that is served.

        Raises:
            ConfigError: nothing was published in this folder.
        """
        numbers = self.numbers()
        if not numbers:
            raise ConfigError(
                f"{self.folder} is no store of reward models: begin one with `agentrl reward"
                f" publish MODEL {self.folder} --pairs FILE`"
            )
        return self.version(numbers[-1])

    def versions(self) -> list[Version]:
        """All versions in order, including withdrawn ones."""
        return [self.version(number) for number in self._all()]

    def numbers(self) -> list[int]:
        """Versions that were not withdrawn, in order."""
        withdrawn = self._withdrawn()
        return [number for number in self._all() if str(number) not in withdrawn]

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
        """The pairs on which every version is checked."""
        return [
            Ranked(*(tuple(map(message_of, row[side])) for side in ("chosen", "rejected")))
            for row in read_plain_rows(self.folder / _PAIRS)
        ]

    def load(self, number: int) -> RewardModel:
        """Load the model of a version and check that it is what was published.

        Raises:
            ConfigError: its files have changed, or it scores the pairs differently here, as with
                other versions of libraries.
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
                f" it was published, by up to {worst:.3g}: publish it again with these libraries,"
                " or serve it with those"
            )
        return model

    def _refuse_doubtful(self, new: Version) -> None:
        """Refuse what was published before, and what ranks clearly worse than the served one."""
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
        if new.accuracy < served.accuracy - STANDARD_ERRORS * error:
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
            reasons: dict[str, str] = json.loads((self.folder / _WITHDRAWN).read_text())
        except FileNotFoundError:
            return {}
        return reasons

    @contextmanager
    def _draft(self) -> Iterator[Path]:
        """A new folder next to the versions, removed afterwards unless it was renamed. What a
        killed publisher left behind is no version, and is removed after a day.
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

    async def score_all() -> list[float]:
        both = [conversation for pair in pairs for conversation in pair]
        return list(await asyncio.gather(*map(model.score, both)))

    scores = run_alone(score_all())
    infinite = [score for score in scores if not math.isfinite(score)]
    if infinite:
        raise ConfigError(
            f"the model gives {len(infinite)} of {len(scores)} conversations of the pairs no finite"
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


# --- drift

BINS = 10
FEWEST = 200
"""Live scores before drift is reported."""
LARGE_PSI = 0.25
"""The terminal warns from here on, once per version, when the window is full."""


class Drift:
    """How far a model's last live scores have moved from its scores of a reference.

    Args:
        reference: scores of conversations on which the model was checked.
        window: number of live scores that are kept.
    """

    def __init__(self, reference: Sequence[float], window: int = 1000) -> None:
        self._reference = sorted(reference)
        self._low, self._high = self._reference[0], self._reference[-1]
        size = len(self._reference)
        cuts = {self._reference[size * place // BINS] for place in range(1, BINS)}
        self._cuts = sorted(cuts - {self._low})
        self._live: deque[float] = deque(maxlen=window)

    def add(self, scores: Sequence[float]) -> None:
        """Record further live scores."""
        self._live.extend(scores)

    def __len__(self) -> int:
        """Number of live scores in the window."""
        return len(self._live)

    def is_beyond(self, score: float) -> bool:
        """Whether a score is lower or higher than every score of the reference."""
        return not self._low <= score <= self._high

    @property
    def psi(self) -> float | None:
        """Population stability index Σ (p − q) ln(p / q), with p and q the shares of live and
        reference scores between the reference's deciles, minus what chance alone makes of it,
        (bins − 1)(1/n + 1/m); at least 0. None for too few live scores.

        By custom, less than 0.1 is no change and more than 0.25 a large one (Siddiqi 2006, "Credit
        Risk Scorecards"); the expectation by chance is that of Yurdakul 2018, "Statistical
        Properties of Population Stability Index". Half a score is added to each bin, so that an
        empty one is finite.
        """
        n, m = len(self._live), len(self._reference)
        if n < FEWEST:
            return None
        shares = zip(self._shares(self._live), self._shares(self._reference), strict=True)
        raw = math.fsum((p - q) * math.log(p / q) for p, q in shares)
        return max(0.0, raw - len(self._cuts) * (1 / n + 1 / m))

    @property
    def beyond(self) -> float | None:
        """Share of the live scores that are beyond the reference; None for too few."""
        if len(self._live) < FEWEST:
            return None
        return sum(map(self.is_beyond, self._live)) / len(self._live)

    def _shares(self, scores: Sequence[float] | deque[float]) -> list[float]:
        counts = [0.5] * (len(self._cuts) + 1)
        for score in scores:
            counts[bisect.bisect_right(self._cuts, score)] += 1
        return [count / math.fsum(counts) for count in counts]


# --- the server

MAX_BODY_BYTES = 8 << 20
MAX_BUFFERED_BYTES = 64 << 20
"""Of all requests that are being read or scored."""
MAX_CONVERSATIONS = 256
"""Of one request."""
HEADER_TIMEOUT_S = 10.0
"""For which the first line and the headers of a request may take to arrive."""
BODY_TIMEOUT_S = 30.0
"""For which the body of a request may take to arrive."""
TURN = 16
"""Conversations that a client may have scored before the next client's turn."""
KEPT = 3
"""Models in memory; one more while it is loaded."""
RETRY_S = 60.0
"""A version that could not be loaded is tried again after this time."""
STATUS_WAIT_S = 30.0
"""For which a status request waits for a new version that is being loaded."""
_LOOPBACK = ("127.0.0.1", "localhost", "::1")


class RequestRefused(Exception):
    """A request that gets no scores; the status is that of HTTP."""

    def __init__(self, status: int, why: str) -> None:
        super().__init__(why)
        self.status = status


class FairQueue:
    """Lets one request be scored at a time, and serves the clients that wait in turn."""

    def __init__(self) -> None:
        # The order of the keys is the order of the turns.
        self._waiting: dict[str, deque[asyncio.Future[None]]] = {}
        self._is_busy = False

    @asynccontextmanager
    async def turn(self, client: str) -> AsyncIterator[None]:
        """Wait for the client's turn, and hold it within."""
        if self._is_busy:
            granted = asyncio.get_running_loop().create_future()
            self._waiting.setdefault(client, deque()).append(granted)
            try:
                await granted
            except asyncio.CancelledError:
                if granted.done() and not granted.cancelled():
                    self._grant_next()  # the turn came while the request was given up
                raise
        self._is_busy = True
        try:
            yield
        finally:
            self._grant_next()

    def _grant_next(self) -> None:
        while self._waiting:
            client = next(iter(self._waiting))
            requests = self._waiting.pop(client)
            granted = requests.popleft()
            if requests:
                self._waiting[client] = requests  # to the end
            if not granted.done():
                granted.set_result(None)
                return
        self._is_busy = False


class LoadedVersion:
    """A version in memory, with the drift of what it scored."""

    def __init__(self, version: Version, model: RewardModel, window: int) -> None:
        self.version, self.model, self.window = version, model, window
        self.drift = Drift(version.scores, window)
        self.scored = self.too_long = 0
        self._has_warned, self._checked_at = False, 0

    def row(self, heads: Heads | AgentRLError) -> dict[str, Any]:
        """The answer for one conversation."""
        if isinstance(heads, AgentRLError):
            return {"error": str(heads)[:500]}
        if not heads.raw:
            self.too_long += 1
            return {"raw": [], "why": heads.why, "beyond": False}
        score = self.model.together(heads.raw)
        if not math.isfinite(score):
            return {"error": f"version {self.version.number} gave a number that is not finite"}
        self.scored += 1
        self.drift.add([score])
        return {"raw": list(heads.raw), "why": "", "beyond": self.drift.is_beyond(score)}

    def drift_warning(self) -> str:
        """A sentence where drift is large for the first time; checked once per full window."""
        if self._has_warned or self.scored < self._checked_at + self.window:
            return ""
        self._checked_at = self.scored
        self._has_warned = (self.drift.psi or 0.0) >= LARGE_PSI
        if not self._has_warned:
            return ""
        return (
            f"version {self.version.number}: PSI {self.drift.psi:.2f} over its last {self.window}"
            f" scores, {self.drift.beyond:.0%} of them beyond those of all its pairs"
        )

    def status(self) -> dict[str, Any]:
        """Counts, and the drift of the last scores."""
        return {
            "scored": self.scored,
            "too_long": self.too_long,
            "window": len(self.drift),
            "psi": self.drift.psi,
            "beyond": self.drift.beyond,
        }


class RewardServer:
    """Scores conversations by the versions of a store, which is read again with every request.

    A new version is loaded while the one before it answers, and answers from then on.

    Args:
        store: where versions are published and withdrawn.
        window: number of last scores whose drift is measured.
        tell: receives a sentence where drift becomes large, or another version is served.
    """

    def __init__(
        self, store: RewardStore, window: int = 1000, tell: Callable[[str], None] = lambda _: None
    ) -> None:
        self._store, self._window, self._tell = store, window, tell
        self._loaded: dict[int, LoadedVersion] = {}  # the one that was used last stands last
        self._loading: dict[int, asyncio.Task[LoadedVersion]] = {}
        self._failed: dict[int, tuple[float, AgentRLError]] = {}
        self._load_lock = asyncio.Lock()  # two models in the making would need twice the memory
        self._queue = FairQueue()
        self._serving = 0

    def open(self) -> int:
        """Load the served version before anybody asks; returns its number.

        Raises:
            ConfigError: there is none, or it is not what was published.
        """
        self._serving = self._store.served().number
        self._loaded[self._serving] = self._load(self._serving)
        return self._serving

    async def score(self, body: Any, client: str = "") -> dict[str, Any]:
        """The answer to a request.

        Raises:
            RequestRefused: the request is malformed, or asks for a version that is not served.
            AgentRLError: the version cannot be loaded.
        """
        conversations, wanted = read_request(body)
        loaded = await self._ready(self._number(wanted))
        rows: list[dict[str, Any]] = []
        for start in range(0, len(conversations), TURN):
            part = conversations[start : start + TURN]
            async with self._queue.turn(client):
                results = await asyncio.gather(*(_heads(loaded.model, each) for each in part))
                # One conversation that fails takes its whole batch along: try them one by one.
                for index, result in enumerate(results):
                    if isinstance(result, AgentRLError):
                        results[index] = await _heads(loaded.model, part[index])
            rows += map(loaded.row, results)
        warning = loaded.drift_warning()
        if warning:
            self._tell(warning)
        version = loaded.version
        return {"version": version.number, "digest": version.digest, "conversations": rows}

    async def status(self) -> dict[str, Any]:
        """What is served, all versions, and the drift of those in memory."""
        numbers = self._store.numbers()
        if numbers and self._newest_ready(numbers) != numbers[-1]:
            await asyncio.wait([self._begin(numbers[-1])], timeout=STATUS_WAIT_S)
        rows: list[dict[str, Any]] = []
        for version in self._store.versions():
            why = self._store.withdrawn(version.number)
            row = {"version": version.number, "digest": version.digest, "withdrawn": why}
            loaded = self._loaded.get(version.number)
            rows.append(row | (loaded.status() if loaded else {}))
        return {"served": self._newest_ready(numbers) if numbers else None, "versions": rows}

    def _number(self, wanted: int | None) -> int:
        numbers = self._store.numbers()
        if not numbers:
            raise RequestRefused(404, "no version is left")
        served = self._newest_ready(numbers)
        number = wanted or served
        if number in numbers:
            return number
        why = self._store.withdrawn(number)
        if why is None:
            raise RequestRefused(404, f"there is no version {number}")
        raise RequestRefused(
            410, f"version {number} was withdrawn ({why}); version {served} is served now"
        )

    def _newest_ready(self, numbers: Sequence[int]) -> int:
        """The newest version, or the one before it until that is loaded."""
        newest = numbers[-1]
        if newest != self._serving:
            if newest not in self._loaded and self._serving in numbers:
                self._begin(newest)
                return self._serving
            self._serving = newest
            self._tell(f"version {newest} is served now")
        return self._serving

    async def _ready(self, number: int) -> LoadedVersion:
        """A version in memory; the one that was unused longest makes room for it."""
        loaded = self._loaded.pop(number, None)
        if loaded is None:
            loaded = await asyncio.shield(self._begin(number))
        self._keep(number, loaded)
        return loaded

    def _begin(self, number: int) -> asyncio.Task[LoadedVersion]:
        """The task that loads a version."""
        if number not in self._loading:
            task = self._loading[number] = asyncio.create_task(self._load_once(number))
            task.add_done_callback(lambda _: self._loading.pop(number, None))
            # Nobody may be waiting for it: its error is told, and kept in `_failed`.
            task.add_done_callback(lambda done: done.cancelled() or done.exception())
        return self._loading[number]

    async def _load_once(self, number: int) -> LoadedVersion:
        since, error = self._failed.get(number, (-math.inf, None))
        if error is not None and time.monotonic() - since < RETRY_S:
            raise error
        try:
            async with self._load_lock, boundary(VerifierError, f"loading version {number}"):
                loaded = await run_in_thread(lambda: self._load(number))
        except AgentRLError as failed:
            self._failed[number] = (time.monotonic(), failed)
            self._tell(str(failed))
            raise
        self._keep(number, loaded)
        return loaded

    def _keep(self, number: int, loaded: LoadedVersion) -> None:
        self._loaded[number] = loaded
        others = [old for old in self._loaded if old != self._serving]
        for old in others[: max(0, len(self._loaded) - KEPT)]:
            del self._loaded[old]

    def _load(self, number: int) -> LoadedVersion:
        return LoadedVersion(self._store.version(number), self._store.load(number), self._window)


async def _heads(model: RewardModel, messages: Messages) -> Heads | AgentRLError:
    """What the heads say of one conversation, or why they say nothing."""
    try:
        async with boundary(VerifierError, "the reward model cannot read it"):
            return await model.heads(messages)
    except AgentRLError as error:
        return error


def application(server: RewardServer, key: str = "", host: str = "127.0.0.1") -> Starlette:
    """The routes of a server.

    Args:
        key: that requests must carry as `Authorization: Bearer KEY`; empty: none.
        host: the address that it listens at. At a loopback address only requests to a loopback
            name are answered, so that no web page can reach it through a name of its own.
    """
    from starlette.applications import Starlette
    from starlette.responses import Response
    from starlette.routing import Route

    hosts = {*_LOOPBACK, host} if host in _LOOPBACK or not key else None
    bodies = BodyReader()

    async def answer(request: Request, work: Callable[[], Any]) -> Response:
        try:
            refuse_foreign(request, hosts)
            if key and not _has_key(request, key):
                raise RequestRefused(401, "send the server's key as Authorization: Bearer KEY")
            status, row = 200, await work()
        except RequestRefused as refused:
            status, row = refused.status, {"error": str(refused)}
        except AgentRLError as error:
            status, row = 500, {"error": str(error)}
        # Plain ASCII: what was sent may hold what UTF-8 cannot encode.
        return Response(json.dumps(row), status, media_type="application/json")

    async def score(request: Request) -> Response:
        async def work() -> Any:
            peer = request.client
            client = request.headers.get("x-agentrl-client") or (peer.host if peer else "")
            async with bodies.read(request) as body:
                return await server.score(body, client)

        return await answer(request, work)

    async def status(request: Request) -> Response:
        return await answer(request, server.status)

    return Starlette(routes=[Route("/score", score, methods=["POST"]), Route("/status", status)])


def refuse_foreign(request: Request, hosts: set[str] | None) -> None:
    """Refuse requests that a web page sent: to a host name of its own, or from another origin.

    Args:
        hosts: names under which the server may be reached; None: any.
    """
    address = request.headers.get("host", "")
    try:
        name = urlsplit(f"//{address}").hostname or ""
        origin = urlsplit(request.headers.get("origin", "")).netloc
    except ValueError as error:
        raise RequestRefused(403, f"Host or Origin cannot be read ({error})") from error
    if hosts is not None and name not in hosts:
        raise RequestRefused(403, f"Host {address[:100]!r} is not this server")
    if "origin" in request.headers and origin != address:
        raise RequestRefused(403, "requests from other origins are not answered")


def http_protocol(timeout_s: float = HEADER_TIMEOUT_S) -> type[asyncio.Protocol]:
    """uvicorn's HTTP protocol, with a limit on how long the head of a request may take.

    uvicorn has none: a client that sends a byte now and then would hold its connection for good.
    """
    from uvicorn.protocols.http.h11_impl import H11Protocol

    class TimedProtocol(H11Protocol):
        _deadline: asyncio.TimerHandle | None = None

        def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
            super().connection_made(transport)
            self._deadline = self.loop.call_later(timeout_s, transport.close)

        def data_received(self, data: bytes) -> None:
            if self._deadline is None and self._awaits_head():  # a further request
                self._deadline = self.loop.call_later(timeout_s, self.transport.close)
            super().data_received(data)
            if not self._awaits_head():
                self._cancel_deadline()

        def connection_lost(self, exc: Exception | None) -> None:
            self._cancel_deadline()
            super().connection_lost(exc)

        def _awaits_head(self) -> bool:
            return self.cycle is None or self.cycle.response_complete

        def _cancel_deadline(self) -> None:
            if self._deadline is not None:
                self._deadline.cancel()
                self._deadline = None

    return TimedProtocol


class BodyReader:
    """Reads JSON bodies, none longer or slower than allowed, and not too many at a time."""

    def __init__(self) -> None:
        self._buffered_bytes = 0

    @asynccontextmanager
    async def read(self, request: Request) -> AsyncIterator[Any]:
        """The body of a request; its bytes count as buffered until the request is answered.

        Raises:
            RequestRefused: it is too long, too slow, or no JSON, or the server holds too much.
        """
        content = bytearray()
        try:
            try:
                async with asyncio.timeout(BODY_TIMEOUT_S):
                    async for chunk in request.stream():
                        content += chunk
                        self._buffered_bytes += len(chunk)
                        self._refuse_too_much(len(content))
            except TimeoutError as error:
                raise RequestRefused(
                    408, f"the body did not arrive within {BODY_TIMEOUT_S:g} s"
                ) from error
            yield _parse(bytes(content))
        finally:
            self._buffered_bytes -= len(content)

    def _refuse_too_much(self, size: int) -> None:
        if size > MAX_BODY_BYTES:
            raise RequestRefused(413, f"a request may have {MAX_BODY_BYTES} bytes")
        if self._buffered_bytes > MAX_BUFFERED_BYTES:
            raise RequestRefused(503, "the server holds too many requests: try again")


def _parse(content: bytes) -> Any:
    try:
        return json.loads(content)
    except (ValueError, RecursionError) as error:
        raise RequestRefused(400, f"the request is no JSON ({error})") from error


def _has_key(request: Request, key: str) -> bool:
    given = request.headers.get("authorization", "")
    return secrets.compare_digest(given.encode(), f"Bearer {key}".encode())


def read_request(body: Any) -> tuple[list[Messages], int | None]:
    """Conversations and version of a request.

    Raises:
        RequestRefused: it is malformed.
    """
    rows = body.get("conversations") if isinstance(body, dict) else None
    if not isinstance(rows, list) or not 0 < len(rows) <= MAX_CONVERSATIONS:
        raise RequestRefused(400, f"conversations must be a list of 1 to {MAX_CONVERSATIONS}")
    wanted = body.get("version")
    if wanted is not None and (type(wanted) is not int or not 1 <= wanted < 10**9):
        raise RequestRefused(400, "version must be a number from 1, or left out")
    try:
        conversations = [tuple(map(_read_message, messages)) for messages in rows]
        if not all(conversations):
            raise ValueError("one is empty")
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        reason = str(error)[:200]
        raise RequestRefused(
            400, f"a conversation must be a list of messages with role and content ({reason})"
        ) from error
    return conversations, wanted


def _read_message(row: Any) -> Message:
    message = message_of(row)
    if message.role not in get_args(Role):
        raise ValueError(f"role={message.role!r} must be one of {', '.join(get_args(Role))}")
    texts = [message.content, message.name, message.tool_call_id, message.reasoning]
    for call in message.tool_calls:
        texts += [call.text, call.why] if isinstance(call, BadCall) else [call.name, call.id]
        if not isinstance(call, BadCall) and not isinstance(call.arguments, dict):
            raise ValueError("the arguments of a call must be an object")
    if not all(isinstance(text, str) for text in texts):
        raise ValueError("content, reasoning and names must be texts")
    return message

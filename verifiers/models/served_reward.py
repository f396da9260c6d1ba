"""A reward model that `agentrl reward serve` serves, as a verifier."""

from __future__ import annotations

import json
import os
import re
import threading
import time
import uuid
import warnings
import weakref
from collections.abc import Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Any, NamedTuple

from agentrl.errors import AgentRLError, ConfigError, ContractError, EngineAway, VerifierError
from agentrl.records.rows import messages_row
from agentrl.types import Message
from agentrl.verifiers.models.batches import Waiting
from agentrl.verifiers.models.heads import ByHeads, Heads

if TYPE_CHECKING:
    import httpx2

KEY = "AGENTRL_REWARD_KEY"
PATIENCE_S = 120.0
"""For which a server that does not answer is waited for."""
CLIENT = uuid.uuid4().hex
"""Names this process to the server, which serves its clients in turn."""
_NAME = re.compile(r"(https?://[^/\s@]+)(?:/v([1-9]\d{0,8}))?/?")
_WITHDRAWN, _TOO_LARGE, _BUSY = 410, 413, 503
_FOR_ALL = (400, 401, 403, 404, _WITHDRAWN)
"""Status of answers that are wrong for every episode alike."""


class Pin(NamedTuple):
    """A version, and the digest of its files."""

    version: int
    digest: str


_PINS: dict[str, Pin] = {}
_LOCK = threading.Lock()  # verifiers are made on several threads


def forget_versions() -> None:
    """Let verifiers that are made from now on ask again which version is served."""
    with _LOCK:
        _PINS.clear()


def is_address(name: str) -> bool:
    """Whether a name is that of a served reward model."""
    return name.startswith(("http://", "https://"))


class ServedReward(ByHeads):
    """Scores conversations by the reward model at an address.

    The first verifier of an address asks which version is served. All verifiers of that address in
    this process keep that version, so that all rewards of a run are of one model; once it is
    withdrawn, the run stops and says so. The version is a part of every score, and so is
    `reward_model_beyond`: 1 where the score is lower or higher than those of all pairs on which the
    version was checked.

    Args:
        name: `http://HOST:PORT`, or `http://HOST:PORT/v3` for version 3.
        max_batch: conversations of one request.
        timeout_s: of a request.
        rule: `bound`, `combine` and `std_weight`, as in `ByHeads`.

    Raises:
        ConfigError: the name is no such address, no reward server answers there, or it lacks the
            version.
    """

    def __init__(
        self, name: str, *, max_batch: int = 64, timeout_s: float = 60.0, **rule: Any
    ) -> None:
        super().__init__(**rule)
        match = _NAME.fullmatch(name)
        if match is None:
            raise ConfigError(
                f"reward model {name!r}: write http://HOST:PORT, or http://HOST:PORT/v3 for version"
                " 3"
            )
        self.url, self._timeout_s = match[1], timeout_s
        self._wanted = int(match[2]) if match[2] else None
        self._waiting = Waiting(self._score, len, max_batch, f"the reward model at {self.url}")
        self._place = f"{self.url}/v{self._wanted or ''}"
        pin = _PINS.get(self._place) or self._find_version()
        with _LOCK:
            self.pin = _PINS.setdefault(self._place, pin)

    @property
    def depends_on(self) -> str:
        """The version and the files by which it scores."""
        return f"version {self.pin.version}, {self.pin.digest[:12]}"

    async def heads(self, messages: Sequence[Message]) -> Heads:
        """What each head says of a conversation.

        Raises:
            VerifierError: the server failed at it.
            ContractError: the server is away for long, or refuses what every episode asks for, such
                as a version that was withdrawn.
        """
        heads: Heads = await self._waiting.ask(tuple(messages))
        return heads

    def status(self) -> dict[str, Any]:
        """What the server serves, all versions, and the drift of each in its memory.

        Raises:
            ConfigError: it cannot be reached, asks for a key, or is no reward server.
        """
        import httpx2

        try:
            code, answer = self._call("GET", "/status")
        except (httpx2.HTTPError, ValueError) as error:
            raise ConfigError(
                f"no reward model answers at {self.url} ({error}): is `agentrl reward serve`"
                " running there?"
            ) from error
        if code != 200:
            raise ConfigError(str(self._refusal(code, answer)))
        if not (isinstance(answer, dict) and {"served", "versions"} <= answer.keys()):
            raise ConfigError(f"{self.url} is no `agentrl reward serve`")
        return answer

    def _find_version(self) -> Pin:
        status = self.status()
        rows = {row["version"]: row for row in status["versions"]}
        row = rows.get(self._wanted or status["served"])
        if row is None:
            numbers = ", ".join(map(str, rows)) or "none"
            raise ConfigError(f"{self.url} has no version {self._wanted}: it has {numbers}")
        if row["withdrawn"] is not None:
            raise ConfigError(
                f"version {self._wanted} at {self.url} was withdrawn ({row['withdrawn']}): version"
                f" {status['served']} is served now"
            )
        return Pin(row["version"], row["digest"])

    def _score(self, conversations: Sequence[tuple[Message, ...]]) -> list[Heads | AgentRLError]:
        rows = [messages_row(messages) for messages in conversations]
        # Plain ASCII: what an agent wrote may hold what UTF-8 cannot encode.
        body = json.dumps({"conversations": rows, "version": self.pin.version}).encode()
        code, answer = self._call_patiently("POST", "/score", body)
        if code == _TOO_LARGE and len(rows) > 1:
            middle = len(rows) // 2
            return [*self._score(conversations[:middle]), *self._score(conversations[middle:])]
        parts = {"reward_model_version": float(self.pin.version)}
        if code == _TOO_LARGE:  # the agent that wrote so much gets the lowest reward
            return [Heads((), "it is longer than a request may be", parts)]
        if code != 200:
            raise self._refusal(code, answer)
        try:
            pin = Pin(answer["version"], answer["digest"])
            results = [self._read_heads(row, parts) for row in answer["conversations"]]
            if len(results) != len(rows):
                raise ValueError(f"{len(results)} answers to {len(rows)} conversations")
        except (KeyError, TypeError, ValueError) as error:
            raise VerifierError(f"{self.url} is no `agentrl reward serve`: {error!r}") from error
        if pin != self.pin:
            raise ContractError(
                f"{self.url} answers by version {pin.version} with other files than this process"
                " began with: another store is served there now"
            )
        return results

    def _read_heads(self, row: dict[str, Any], parts: dict[str, float]) -> Heads | AgentRLError:
        if row.get("error"):
            error = VerifierError(f"the reward model at {self.url}: {row['error']}")
            error.__cause__ = EngineAway("the server says so")  # never the agent's fault
            return error
        parts = {**parts, "reward_model_beyond": float(row["beyond"])}
        return Heads(tuple(map(float, row["raw"])), row.get("why", ""), parts)

    def _call_patiently(self, method: str, path: str, body: bytes) -> tuple[int, Any]:
        """The answer to a request; a server that is away or busy is waited for."""
        import httpx2

        began, has_warned = time.monotonic(), False
        while True:
            try:
                code, answer = self._call(method, path, body)
                if code != _BUSY:
                    return code, answer
                reason: Exception = EngineAway("it is busy")
            except httpx2.TransportError as error:
                reason = error
            except (httpx2.HTTPError, ValueError) as error:
                away = EngineAway(f"{type(error).__name__}: {error}")
                raise VerifierError(f"the reward model at {self.url} gave no answer") from away
            if time.monotonic() - began > PATIENCE_S:
                raise ContractError(
                    f"the reward model at {self.url} did not answer for {PATIENCE_S:g} s"
                    f" ({type(reason).__name__}): see that `agentrl reward serve` runs there;"
                    " --resume goes on"
                ) from reason
            if not has_warned:
                has_warned = True
                what = f"the reward model at {self.url} does not answer: waiting for it"
                warnings.warn(what, RuntimeWarning, stacklevel=2)
            time.sleep(1)

    def _call(self, method: str, path: str, body: bytes = b"") -> tuple[int, Any]:
        reply = self._client.request(method, path, content=body)
        return reply.status_code, reply.json()

    def _refusal(self, code: int, answer: Any) -> AgentRLError:
        reason = answer.get("error", answer) if isinstance(answer, dict) else answer
        text = f"the reward model at {self.url}: {reason}"
        if code == _WITHDRAWN and not self._wanted:
            with _LOCK:  # this run ends here; another one in this process asks again
                _PINS.pop(self._place, None)
            text += "; --resume trains on with the version that is served now"
        if code == 401:
            text += f": set {KEY}"
        if code in _FOR_ALL:
            return ContractError(text)
        error = VerifierError(text)
        error.__cause__ = EngineAway(f"status {code}")  # no agent's text causes that
        return error

    @cached_property
    def _client(self) -> httpx2.Client:
        try:
            import httpx2
        except ImportError as error:
            raise ConfigError(
                "a served reward model needs httpx2: pip install 'agentrl[judge]'"
            ) from error
        headers, key = {"x-agentrl-client": CLIENT}, reward_key()
        if key:
            headers["authorization"] = f"Bearer {key}"
        client = httpx2.Client(base_url=self.url, headers=headers, timeout=self._timeout_s)
        weakref.finalize(self, client.close)  # a verifier has no end of its own
        return client


def reward_key() -> str:
    """The secret of `AGENTRL_REWARD_KEY`, stripped; empty where it is not set.

    Raises:
        ConfigError: it cannot stand in a header.
    """
    key = os.environ.get(KEY, "").strip()
    if not (key.isascii() and key.isprintable() and " " not in key):
        raise ConfigError(f"{KEY} must be printable ASCII without blanks")
    return key

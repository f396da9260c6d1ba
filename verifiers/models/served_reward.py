"""A reward model that `agentrl reward serve` serves, as a verifier."""

from __future__ import annotations

import json
import os
import re
import threading
import time
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
_NAME = re.compile(r"(https?://[^/\s@]+)(?:/v([1-9]\d{0,8}))?/?")
_WITHDRAWN, _TOO_LARGE = 410, 413
_FOR_ALL = (400, 401, 403, 404, _WITHDRAWN)
"""Status of answers that are wrong for every episode alike."""


class Pin(NamedTuple):
    """A version, and the digest of its files."""

    version: int
    digest: str


_PINS: dict[str, Pin] = {}
_LOCK = threading.Lock()


def forget_versions() -> None:
    """Let verifiers that are made from now on ask anew which version is served."""
    with _LOCK:
        _PINS.clear()


def is_address(name: str) -> bool:
    """Whether a name is that of a served reward model."""
    return name.startswith(("http://", "https://"))


class ServedReward(ByHeads):
    """Scores conversations by the reward model at an address.

    Which version it is, is asked when the first verifier of an address is made. All verifiers of
    that address in this process then keep it, so that all rewards of a run are of one model; once
    it is withdrawn, whoever asks stops with a sentence. The version is a part of every score, and
    so is `reward_model_beyond`: 1 where the score is lower or higher than those of all pairs that
    the version was checked on.

    Args:
        name: `http://HOST:PORT`, or `http://HOST:PORT/v3` for version 3.
        max_batch: conversations of one request.
        timeout_s: of a request.
        rule: `bound`, `combine` and `std_weight`, as in `ByHeads`.

    Raises:
        ConfigError: the name is no such address, nobody or somebody else answers there, or there is
            no such version.
    """

    def __init__(
        self, name: str, *, max_batch: int = 64, timeout_s: float = 60.0, **rule: Any
    ) -> None:
        super().__init__(**rule)
        if not (found := _NAME.fullmatch(name)):
            raise ConfigError(
                f"reward model {name!r}: write http://HOST:PORT, or http://HOST:PORT/v3 for version"
                " 3"
            )
        self.url, self._timeout_s = found[1], timeout_s
        self._named = int(found[2]) if found[2] else None
        self._waiting = Waiting(self._ask, len, max_batch, f"the reward model at {self.url}")
        self._place = f"{self.url}/v{self._named or ''}"
        found_pin = _PINS.get(self._place) or self._found(self._named)
        with _LOCK:
            self.pin = _PINS.setdefault(self._place, found_pin)

    @property
    def depends_on(self) -> str:
        """The version and the files by which it scores."""
        return f"version {self.pin.version}, {self.pin.digest[:12]}"

    async def heads(self, messages: Sequence[Message]) -> Heads:
        """What each head says of a conversation.

        Raises:
            VerifierError: the server failed at it.
            ContractError: the server is away for long, or refuses what every episode asks for, as a
                version that was withdrawn.
        """
        said: Heads = await self._waiting.ask(tuple(messages))
        return said

    def status(self) -> dict[str, Any]:
        """What the server serves, all versions, and the drift of each in its memory.

        Raises:
            ConfigError: it cannot be reached, asks for a key, or is none.
        """
        import httpx2

        try:
            status, found = self._call("GET", "/status")
        except (httpx2.HTTPError, ValueError) as error:
            raise ConfigError(
                f"no reward model answers at {self.url} ({error}): is `agentrl reward serve`"
                " running there?"
            ) from error
        if status != 200:
            raise ConfigError(str(self._refusal(status, found)))
        if not (isinstance(found, dict) and {"served", "versions"} <= found.keys()):
            raise ConfigError(f"{self.url} is no `agentrl reward serve`")
        return found

    def _found(self, wanted: int | None) -> Pin:
        found = self.status()
        numbers = {row["version"]: row for row in found["versions"]}
        row = numbers.get(wanted or found["served"])
        if row is None:
            known = ", ".join(map(str, numbers)) or "none"
            raise ConfigError(f"{self.url} has no version {wanted}: it has {known}")
        if row["withdrawn"] is not None:
            raise ConfigError(
                f"version {wanted} at {self.url} was withdrawn ({row['withdrawn']}): version"
                f" {found['served']} is served now"
            )
        return Pin(row["version"], row["digest"])

    def _ask(self, conversations: Sequence[tuple[Message, ...]]) -> list[Heads | AgentRLError]:
        rows = [messages_row(messages) for messages in conversations]
        # Plain ASCII: what an agent wrote may hold what UTF-8 cannot say.
        body = json.dumps({"conversations": rows, "version": self.pin.version}).encode()
        status, found = self._patiently("POST", "/score", body)
        if status == _TOO_LARGE and len(rows) > 1:
            middle = len(rows) // 2
            return [*self._ask(conversations[:middle]), *self._ask(conversations[middle:])]
        told = {"reward_model_version": float(self.pin.version)}
        if status == _TOO_LARGE:  # what an agent wrote is nobody else's fault
            return [Heads((), "it is longer than a request may be", told)]
        if status != 200:
            raise self._refusal(status, found)
        try:
            if (now := Pin(found["version"], found["digest"])) != self.pin:
                raise ContractError(
                    f"{self.url} answers by version {now.version} with other files than this"
                    " process began with: another store is served there now"
                )
            said = [self._heads(row, told) for row in found["conversations"]]
            if len(said) != len(rows):
                raise ValueError(f"{len(said)} answers to {len(rows)} conversations")
        except (KeyError, TypeError, ValueError) as error:
            raise VerifierError(f"{self.url} is no `agentrl reward serve`: {error!r}") from error
        return said

    def _heads(self, row: dict[str, Any], told: dict[str, float]) -> Heads | AgentRLError:
        if why := row.get("error"):
            error = VerifierError(f"the reward model at {self.url}: {why}")
            error.__cause__ = EngineAway("the server says so")  # no agent's fault
            return error
        parts = {**told, "reward_model_beyond": float(row["beyond"])}
        return Heads(tuple(map(float, row["raw"])), row.get("why", ""), parts)

    def _patiently(self, method: str, path: str, body: bytes) -> tuple[int, Any]:
        """The answer to a request, once somebody answers."""
        import httpx2

        began, warned = time.monotonic(), False
        while True:
            try:
                return self._call(method, path, body)
            except httpx2.TransportError as error:
                if time.monotonic() - began > PATIENCE_S:
                    raise ContractError(
                        f"the reward model at {self.url} did not answer for {PATIENCE_S:g} s"
                        f" ({type(error).__name__}): see that `agentrl reward serve` runs there;"
                        " --resume goes on"
                    ) from error
            except (httpx2.HTTPError, ValueError) as error:
                away = EngineAway(f"{type(error).__name__}: {error}")
                raise VerifierError(f"the reward model at {self.url} gave no answer") from away
            if not warned:
                warned = True
                what = f"the reward model at {self.url} does not answer: waiting for it"
                warnings.warn(what, RuntimeWarning, stacklevel=2)
            time.sleep(1)

    def _call(self, method: str, path: str, body: bytes = b"") -> tuple[int, Any]:
        reply = self._client.request(method, path, content=body)
        return reply.status_code, reply.json()

    def _refusal(self, status: int, found: Any) -> AgentRLError:
        why = found.get("error", found) if isinstance(found, dict) else found
        said = f"the reward model at {self.url}: {why}"
        if status == _WITHDRAWN and not self._named:
            with _LOCK:  # this run ends here; another one in this process asks anew
                _PINS.pop(self._place, None)
            said += "; --resume trains on with the version that is served now"
        if status == 401:
            said += f": set {KEY}"
        if status in _FOR_ALL:
            return ContractError(said)
        error = VerifierError(said)
        error.__cause__ = EngineAway(f"status {status}")  # no agent's text brings that about
        return error

    @cached_property
    def _client(self) -> httpx2.Client:
        try:
            import httpx2
        except ImportError as error:
            raise ConfigError(
                "a served reward model needs httpx2: pip install 'agentrl[judge]'"
            ) from error
        headers = {"authorization": f"Bearer {key}"} if (key := reward_key()) else {}
        client = httpx2.Client(base_url=self.url, headers=headers, timeout=self._timeout_s)
        weakref.finalize(self, client.close)  # a verifier has no end of its own
        return client


def reward_key() -> str:
    """The secret of `AGENTRL_REWARD_KEY`, without blanks around it; empty where it is not set.

    Raises:
        ConfigError: it cannot stand in a header.
    """
    key = os.environ.get(KEY, "").strip()
    if not (key.isascii() and key.isprintable() and " " not in key):
        raise ConfigError(f"{KEY} must be printable ASCII without blanks")
    return key

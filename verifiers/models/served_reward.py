"""A reward model that `agentrl reward serve` serves, as a verifier."""

from __future__ import annotations

import json
import os
import re
import weakref
from collections.abc import Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Any

from agentrl.errors import ConfigError, ContractError, VerifierError
from agentrl.records.rows import messages_row
from agentrl.types import Message
from agentrl.verifiers.models.batches import Waiting
from agentrl.verifiers.models.heads import ByHeads, Heads

if TYPE_CHECKING:
    import httpx2

KEY = "AGENTRL_REWARD_KEY"
_NAME = re.compile(r"(https?://[^@\s/]+?)/?(?:@([1-9]\d*))?")
_WITHDRAWN, _TOO_LARGE = 410, 413
_FOR_ALL = (400, 401, 403, 404, _WITHDRAWN)
"""Status of answers that are wrong for every episode alike."""


class ServedReward(ByHeads):
    """Scores conversations by the reward model at an address.

    The version that answers first answers to the end of the process, so that the rewards of a
    group are of one version; once it is withdrawn, whoever asks stops with a sentence. The parts of
    a score say the version, and the server's drift where it knows one.

    Args:
        name: `http://HOST:PORT`, or `http://HOST:PORT@N` for version N.
        max_batch: conversations of one request.
        timeout_s: of a request.
        rule: `bound`, `combine` and `std_weight`, as in `ByHeads`.

    Raises:
        ConfigError: the name is no such address, or httpx2 is missing.
    """

    def __init__(
        self, name: str, *, max_batch: int = 64, timeout_s: float = 60.0, **rule: Any
    ) -> None:
        super().__init__(**rule)
        if not (found := _NAME.fullmatch(name)):
            raise ConfigError(
                f"reward model {name!r}: write http://HOST:PORT, and @3 behind it for version 3"
            )
        self.url, self._timeout_s = found[1], timeout_s
        self._named = int(found[2]) if found[2] else None
        self.version = self._named
        self._waiting = Waiting(self._ask, len, max_batch, f"the reward model at {self.url}")

    async def heads(self, messages: Sequence[Message]) -> Heads:
        """What each head says of a conversation.

        Raises:
            VerifierError: the server cannot be reached, or failed.
            ContractError: it refuses what every episode asks for, as a version that was withdrawn.
        """
        said: Heads = await self._waiting.ask(tuple(messages))
        return said

    def status(self) -> dict[str, Any]:
        """What the server serves, and the drift of each version in its memory.

        Raises:
            VerifierError: it cannot be reached, or is none.
            ContractError: it asks for a key.
        """
        status, found = self._call("GET", "/status")
        self._refuse(status, found)
        if not (isinstance(found, dict) and {"served", "loaded"} <= found.keys()):
            raise VerifierError(f"{self.url} is no `agentrl reward serve`")
        return found

    def _ask(self, conversations: Sequence[tuple[Message, ...]]) -> list[Heads]:
        rows = [messages_row(messages) for messages in conversations]
        # Plain ASCII: what an agent wrote may hold what UTF-8 cannot say.
        body = json.dumps({"conversations": rows, "version": self.version}).encode()
        status, found = self._call("POST", "/score", body)
        if status == _TOO_LARGE and len(rows) > 1:
            middle = len(rows) // 2
            return [*self._ask(conversations[:middle]), *self._ask(conversations[middle:])]
        if status == _TOO_LARGE:  # what an agent wrote is nobody else's fault
            return [Heads((), "it is longer than a request may be")]
        self._refuse(status, found)
        try:
            version, said = found["version"], found["conversations"]
            if self.version not in (None, version) or len(said) != len(rows):
                raise ValueError("it answers something else than it was asked")
            told = {name: found[name] for name in ("version", "psi", "beyond")}
            parts = {name: float(value) for name, value in told.items() if value is not None}
            heads = [Heads(tuple(map(float, row["raw"])), row["why"], parts) for row in said]
        except (KeyError, TypeError, ValueError) as error:
            raise VerifierError(f"{self.url} is no `agentrl reward serve`: {error!r}") from error
        self.version = version
        return heads

    def _call(self, method: str, path: str, body: bytes = b"") -> tuple[int, Any]:
        import httpx2

        try:
            reply = self._client.request(method, path, content=body)
            return reply.status_code, reply.json()
        except (httpx2.HTTPError, ValueError) as error:
            raise VerifierError(
                f"the reward model at {self.url} gave no answer ({type(error).__name__}: {error})"
            ) from error

    def _refuse(self, status: int, found: Any) -> None:
        if status == 200:
            return
        if status == _WITHDRAWN:
            self.version = self._named  # whoever goes on in this process, does so with another one
        why = found.get("error", found) if isinstance(found, dict) else found
        kind = ContractError if status in _FOR_ALL else VerifierError
        raise kind(f"the reward model at {self.url}: {why}{self._fix(status)}")

    def _fix(self, status: int) -> str:
        if status == _WITHDRAWN and not self._named:
            return "; --resume trains on with the version that is served now"
        return f": set {KEY}" if status == 401 else ""

    @cached_property
    def _client(self) -> httpx2.Client:
        try:
            import httpx2
        except ImportError as error:
            raise ConfigError(
                "a served reward model needs httpx2: pip install 'agentrl[judge]'"
            ) from error
        key = os.environ.get(KEY)
        headers = {"authorization": f"Bearer {key}"} if key else {}
        transport = httpx2.HTTPTransport(retries=3)  # of connecting
        client = httpx2.Client(
            base_url=self.url, headers=headers, timeout=self._timeout_s, transport=transport
        )
        weakref.finalize(self, client.close)  # a verifier has no end of its own
        return client

"""The engine protocol: ids in, ids and log-probabilities out. Nothing here knows of text or
messages.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Protocol

from agentrl.trajectory import FinishReason


@dataclass(frozen=True, slots=True)
class Sampling:
    """How to sample. Log-probabilities are those of the distribution that these settings define."""

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    max_tokens: int = 512

    def __post_init__(self) -> None:
        if self.temperature < 0 or not 0 < self.top_p <= 1 or self.top_k < 0 or self.max_tokens < 1:
            raise ValueError(f"sampling settings out of range: {self}")

    @property
    def is_truncated(self) -> bool:
        """Whether some tokens can never be drawn; a trainer cannot score such samples without the
        sampling mask.
        """
        return self.top_p < 1 or self.top_k > 0 or self.temperature == 0


@dataclass(frozen=True, slots=True)
class Generation:
    """What was sampled: ids (the stop token included), one log-probability each, why it ended, by
    which weights.
    """

    ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    finish: FinishReason
    version: int


class Engine(Protocol):
    """Samples continuations. Requests that arrive together may be batched."""

    version: int
    context_length: int

    async def generate(
        self, prompt_ids: Sequence[int], sampling: Sampling, *, seed: int
    ) -> Generation:
        """Sample one continuation; equal arguments and weights give equal draws.

        Raises:
            EngineError: sampling failed.
        """
        ...

    def seat(self) -> AbstractContextManager[None]:
        """Announce an episode that will send requests: a turn-synchronous engine waits for all that
        are seated.
        """
        ...

    async def close(self) -> None:
        """Free what the engine holds; safe to call twice."""
        ...

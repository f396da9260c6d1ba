"""The engine protocol: ids in, ids and log-probabilities out. Nothing here knows of text or
messages.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any, Protocol, runtime_checkable

from agentrl.errors import EngineError
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


@dataclass(frozen=True, slots=True)
class Generation:
    """What one request sampled.

    Attributes:
        ids: token ids, the stop token included.
        logprobs: one log-probability for each id.
        finish: why sampling ended.
        version: of the weights that sampled all of it.
        per_token: what an engine says of each token besides, as arrays whose first axis is the
            token: "routing" (the experts that each token went to which was read, those of the
            prompt and all ids but the last: layers with a router × experts of a token), "kept"
            (ids that a truncated distribution could draw). Empty for engines that have neither.
    """

    ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    finish: FinishReason
    version: int
    per_token: Mapping[str, Any] = field(default_factory=dict)


class Weights(Protocol):
    """The weights of a policy at one moment.

    Attributes:
        module: the live model that holds them. An engine that samples from this very module has
            nothing to copy.
    """

    module: Any

    def tensors(self) -> Mapping[str, Any]:
        """Name of each parameter, as in the model's own folder, to its tensor."""
        ...


class Engine(Protocol):
    """Samples continuations. Requests that arrive together may be batched.

    `generate` and `seat` are called on the loop thread of the rollouts; the other methods may be
    called from any thread.
    """

    version: int
    context_length: int

    async def generate(
        self, prompt_ids: Sequence[int], sampling: Sampling, *, seed: int
    ) -> Generation:
        """Sample one continuation; equal arguments and weights give equal draws.

        Raises:
            EngineError: sampling failed, or was aborted.
        """
        ...

    def seat(self) -> AbstractContextManager[None]:
        """Announce an episode that will send requests.

        A turn-synchronous engine waits for all that are seated.
        """
        ...

    def load(self, weights: Weights, version: int) -> None:
        """Sample with these weights from now on.

        It returns when the engine has them. A generation that is under way ends with the old
        weights and the old version. Where the engine samples from the trained module itself, that
        holds only if nothing is under way while the optimizer steps.
        """
        ...

    def pause(self) -> None:
        """Begin no further generation until `resume`; requests wait."""
        ...

    def resume(self) -> None:
        """Go on after `pause`."""
        ...

    def abort(self) -> None:
        """End every request that waits or runs with an `EngineAborted`."""
        ...

    async def close(self) -> None:
        """Free what the engine holds; safe to call twice."""
        ...


@runtime_checkable
class Measured(Protocol):
    """An engine that counts what it does."""

    def metrics(self) -> dict[str, float]:
        """`engine/…` metrics since the last call."""
        ...


@runtime_checkable
class Restarted(Protocol):
    """An engine whose process may end, and is started again.

    Attributes:
        restarts: how often it was.
        gone: why it will not be any more; None as long as it may.
    """

    restarts: int
    gone: EngineError | None

    @property
    def is_away(self) -> bool:
        """Whether it is being started: requests wait, through no fault of theirs."""
        ...


def refuse_request(
    prompt_ids: Sequence[int], sampling: Sampling, vocab_size: int, context_length: int
) -> None:
    """Check a request before it may disturb others.

    Raises:
        EngineError: the prompt is none for a model of this vocabulary and context.
    """
    if not prompt_ids or not 0 <= min(prompt_ids) <= max(prompt_ids) < vocab_size:
        raise EngineError(
            f"prompt ids must be at least one, each below the vocabulary's size {vocab_size}"
        )
    if len(prompt_ids) + sampling.max_tokens > context_length:
        raise EngineError(
            f"{len(prompt_ids)} prompt tokens and max_tokens={sampling.max_tokens} exceed the"
            f" context length {context_length}"
        )

"""Engines: ids in, ids and log-probabilities out, and their settings.

Nothing here knows of text or messages, and nothing loads torch.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol, Self, runtime_checkable

from pydantic import BaseModel, Field, model_validator

from agentrl.errors import EngineError
from agentrl.settings import STRICT
from agentrl.trajectory import FinishReason

EngineName = Literal["transformers", "vllm"]
Routing = Literal["off", "replay", "record"]
Precision = Literal["auto", "float32", "bfloat16", "float16"]
HISTORY_MB = 2048


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
    """The answer to one request.

    Attributes:
        ids: token ids, the stop token included.
        logprobs: one log-probability for each id.
        finish: why sampling ended.
        version: of the weights that sampled all of it.
        per_token: further arrays whose first axis is the token: "routing" (the experts of each
            token that was read, those of the prompt and all ids but the last: layers with a router
            × experts per token), "kept" (ids that a truncated distribution could draw).
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
        """Parameters by their names in the model's own folder."""
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
        """Announce an episode; a turn-synchronous engine waits for the requests of all of them."""
        ...

    def load(self, weights: Weights, version: int) -> None:
        """Sample with these weights; return once the engine has them.

        A generation that is running ends with the old weights and the old version. If the engine
        samples from the trained module itself, nothing may run while the optimizer steps.
        """
        ...

    def pause(self) -> None:
        """Start no further generation until `resume`; requests wait."""
        ...

    def resume(self) -> None:
        """Continue after `pause`."""
        ...

    def abort(self) -> None:
        """End every waiting or running request with an `EngineAborted`."""
        ...

    async def close(self) -> None:
        """Free what the engine holds; safe to call twice."""
        ...


@runtime_checkable
class Measured(Protocol):
    """An engine with statistics."""

    def metrics(self) -> dict[str, float]:
        """`engine/…` metrics since the last call."""
        ...


@runtime_checkable
class Restarted(Protocol):
    """An engine whose process may end and is then restarted.

    Attributes:
        restarts: number of restarts.
        gone: why it will not be restarted any more; None as long as it may.
    """

    restarts: int
    gone: EngineError | None

    @property
    def is_away(self) -> bool:
        """Whether it is starting: requests wait through no fault of their own."""
        ...


def refuse_request(
    prompt_ids: Sequence[int], sampling: Sampling, vocab_size: int, context_length: int
) -> None:
    """Check a request before it may disturb others.

    Raises:
        EngineError: the prompt does not fit a model of this vocabulary and context.
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


class EngineSettings(BaseModel):
    """The table `engine`. All but the first five are settings of vLLM."""

    model_config = STRICT

    name: EngineName = "transformers"
    """"transformers": on the loaded model. "vllm": on its own copy of the weights, with paged keys
    and values and continuous batches."""
    process: Literal["auto", True, False] = "auto"
    """Sample in a separate process with its own copy of the weights; it is restarted if it dies.
    "auto": vLLM does, "transformers" does not."""
    own_weights: bool = False
    """For "transformers": sample from a second copy of the weights, replaced each round; this costs
    their memory. vLLM always has its own copy."""
    history_mb: int = Field(default=HISTORY_MB, ge=0)
    """For "transformers": memory in MiB for the keys and values of earlier turns; 0 recomputes the
    whole history in every turn. vLLM has its own cache."""
    routing: Routing = "off"
    """For mixtures of experts with "transformers". "replay": train each token with the experts that
    sampled it; "record": also write them to `episodes.jsonl`."""
    max_model_len: int = Field(default=0, ge=0)
    """Maximum tokens of prompt and answer together; 0: the model's context length."""
    dtype: Precision = "auto"
    """Precision of weights and layers; "auto": the one that the policy computes in."""
    kv_cache_gib: float = Field(default=0.0, ge=0)
    """Memory in GiB for keys and values; 0: on a GPU what `gpu_memory_utilization` leaves, on a CPU
    1 GiB."""
    gpu_memory_utilization: float = Field(default=0.5, gt=0, le=1)
    """Share of the GPU's memory for vLLM; training on the same GPU needs the rest."""
    enforce_eager: bool = False
    """Compile nothing and capture no CUDA graphs. On a CPU nothing is ever compiled."""
    sleep: bool = False
    """On a GPU: release keys, values and weights while the policy is updated."""

    @property
    def has_process(self) -> bool:
        """Whether the engine runs in a separate process."""
        return self.name == "vllm" if self.process == "auto" else self.process

    @model_validator(mode="after")
    def _fit_the_engine(self) -> Self:
        if self.process is True and self.own_weights:
            raise ValueError("own_weights=True: process=true implies it: leave it out")
        if self.has_process and self.routing != "off":
            raise ValueError(
                f"routing={self.routing!r}: only an engine in this process knows the chosen"
                " experts: set routing='off', or name='transformers' without process=true"
            )
        names = set(EngineSettings.model_fields)
        transformers_only = {"own_weights", "history_mb", "routing"}
        allowed = {
            "transformers": {"name", "process", *transformers_only},
            "vllm": names - transformers_only,
        }
        for name in sorted(names - allowed[self.name]):
            value = getattr(self, name)
            if value != EngineSettings.model_fields[name].default:
                raise ValueError(f"{name}={value!r} is no setting of {self.name!r}: leave it out")
        return self


VLLM = EngineSettings(name="vllm", gpu_memory_utilization=0.9)
"""vLLM with the GPU to itself."""

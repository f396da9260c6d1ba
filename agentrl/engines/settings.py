"""The settings of an engine, as files and commands give them."""

from __future__ import annotations

from typing import Literal, Self

from pydantic import BaseModel, ConfigDict, Field, model_validator

EngineName = Literal["transformers", "vllm"]
HISTORY_MB = 2048
Routing = Literal["off", "replay", "record"]
Precision = Literal["auto", "float32", "bfloat16", "float16"]


class EngineSettings(BaseModel):
    """What samples. All but the first four are settings of vLLM."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, allow_inf_nan=False)

    name: EngineName = "transformers"
    """"transformers": on the loaded model. "vllm": on weights of its own, with paged keys and
    values and continuous batches."""
    process: Literal["auto", True, False] = "auto"
    """Sample in a process of its own, on weights of its own; one that dies is started again.
    "auto": vLLM does, "transformers" does not."""
    own_weights: bool = False
    """Of "transformers": sample from a second copy of the weights, which each round replaces; costs
    their memory. vLLM always has its own."""
    history_mb: int = Field(default=HISTORY_MB, ge=0)
    """Of "transformers": memory for keys and values that episodes keep between their turns; 0:
    every turn computes the whole history anew. vLLM keeps them in its own cache."""
    routing: Routing = "off"
    """Of "transformers", for mixtures of experts. "replay": the engine says which experts each
    token went to, and the policy is trained with the same ones; "record": they are written to
    `episodes.jsonl` as well."""
    max_model_len: int = Field(default=0, ge=0)
    """Longest prompt and answer together, in tokens; 0: as long as the model's context."""
    dtype: Precision = "auto"
    """Precision of weights and layers; "auto": the one that the policy computes in."""
    kv_cache_gib: float = Field(default=0.0, ge=0)
    """Memory for keys and values; 0: on a GPU what `gpu_memory_utilization` leaves, else 1 GiB."""
    gpu_memory_utilization: float = Field(default=0.5, gt=0, le=1)
    """Share of the GPU's memory that vLLM takes; what trains beside it needs the rest."""
    enforce_eager: bool = False
    """Compile nothing and capture no CUDA graphs. On a CPU nothing is compiled in any case."""
    sleep: bool = False
    """On a GPU: give keys, values and weights back while the policy is updated."""

    @property
    def has_process(self) -> bool:
        """Whether the engine lives in a process of its own."""
        return self.name == "vllm" if self.process == "auto" else self.process

    @model_validator(mode="after")
    def _fit_the_engine(self) -> Self:
        if self.process is True and self.own_weights:
            raise ValueError("own_weights=True: process=true has them in any case: leave it out")
        if self.has_process and self.routing != "off":
            raise ValueError(
                f"routing={self.routing!r}: which experts were chosen is known to an engine in this"
                " process alone: set routing='off', or name='transformers' without process=true"
            )
        own = {"own_weights", "history_mb", "routing"}
        mine = {"transformers": {"name", "process", *own}, "vllm": set(_FIELDS) - own}
        for field in sorted(set(_FIELDS) - mine[self.name]):
            value = getattr(self, field)
            if value != EngineSettings.model_fields[field].default:
                raise ValueError(f"{field}={value!r} is no setting of {self.name!r}: leave it out")
        return self


_FIELDS = tuple(EngineSettings.model_fields)
VLLM = EngineSettings(name="vllm", gpu_memory_utilization=0.9)
"""vLLM with nothing beside it on the GPU."""

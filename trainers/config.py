"""The settings of a training run, checked before anything is loaded."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import tomli_w
from pydantic import BaseModel, ConfigDict, Field, model_validator

from agentrl.curriculum.settings import CurriculumSettings, InOrder, PoolSettings
from agentrl.errors import ConfigError
from agentrl.evaluation.settings import SharedSettings
from agentrl.settings import STRICT, SettingError, as_toml, check, load
from agentrl.trainers.peers import peer_hint

OptimizerName = Literal["adamw", "adamw8bit"]


class Compute(BaseModel):
    """Memory and speed of training. Only the precision and adapters change results."""

    model_config = STRICT

    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Device of all models of the run; "auto" chooses CUDA if there is a CUDA device."""
    micro_tokens: int = Field(default=16384, ge=1)
    """Padded tokens per forward pass. It never changes the gradient."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Precision of the backbone. Trained weights stay in float32, because the steps of a policy are
    smaller than bfloat16 can hold, and so do the output layer and the softmax when tokens are
    scored. Frozen weights are kept in this precision."""
    dropout: float = Field(default=0.0, ge=0, lt=1)
    """Dropout probability wherever the policy's architecture has dropout, whatever its own config
    has. Sampling uses none; all scorings of a step drop the same units."""
    gradient_checkpointing: bool = False
    """Recompute each layer in the backward pass instead of keeping its activations."""
    lora_rank: int = Field(default=0, ge=0)
    """Rank of LoRA adapters on every linear layer except the output layer (0 = train all
    weights)."""
    lora_alpha: int = Field(default=32, ge=1)
    """LoRA adapters are scaled by lora_alpha / lora_rank."""


class OptimizerSettings(BaseModel):
    """The optimizer, apart from its learning rate."""

    model_config = STRICT

    name: OptimizerName = "adamw"
    """Which optimizer: "adamw", or "adamw8bit" with 8-bit moments."""
    betas: tuple[float, float] = Field(default=(0.9, 0.95), strict=False)
    """Betas of AdamW."""
    weight_decay: float = Field(default=0.0, ge=0)
    """Weight decay of AdamW, multiplied by the learning rate."""
    max_grad_norm: float = Field(default=0.5, gt=0, allow_inf_nan=True)
    """Gradients are clipped to this norm (`inf` = never)."""


class Schedule(BaseModel):
    """Learning rate over rounds, as a share of its peak: a linear rise, then a fall."""

    model_config = STRICT

    warmup: int = Field(default=0, ge=0)
    """Rounds until the learning rate reaches its peak."""
    final: float = Field(default=1.0, ge=0, le=1)
    """Share of the peak that is left in the last round (1 = no fall)."""
    shape: Literal["linear", "cosine"] = "linear"
    """Shape of the fall: a straight line, or half a wave that is flat at both ends."""

    @model_validator(mode="after")
    def _falls(self) -> Schedule:
        if self.shape == "cosine" and self.final == 1:
            raise SettingError("needs a fall: set final below 1 as well", "shape")
        return self

    def share(self, step: int, steps: int) -> float:
        """Share of the peak in round `step` (from 0) of `steps`."""
        peak = max(0, self.warmup - 1)
        if step < peak:
            return (step + 1) / self.warmup
        fallen = (step - peak) / max(1, steps - 1 - peak)
        if self.shape == "cosine":
            fallen = (1 - math.cos(math.pi * fallen)) / 2
        return 1 - (1 - self.final) * fallen


class CriticSettings(BaseModel):
    """The critic of a recipe that needs one (PPO, VAPO)."""

    model_config = STRICT

    model: str = ""
    """Folder or hub name that the critic starts from: a reward model or an earlier critic. Empty: a
    copy of the policy with a value head of zeros."""
    learning_rate: float = Field(default=1e-5, gt=0)
    """Learning rate of the critic, constant over rounds."""
    epochs: int = Field(default=1, ge=1)
    """Passes over the tokens of a round, each in as many minibatches as the policy's."""
    value_clip: float = Field(default=0.5, gt=0, allow_inf_nan=True)
    """How far a value may move within a round, in units of the reward (`inf` = any distance)."""
    warmup: int = Field(default=0, ge=0)
    """Rounds, counted in `steps`, in which only the critic learns, from Monte Carlo returns (VAPO:
    50)."""


class TrainConfig(SharedSettings):
    """Settings of a training run: what is played and how long, then, from `recipe` on, the
    algorithm.
    """

    model_config = ConfigDict(ser_json_inf_nan="constants")

    model: str
    """Hugging Face folder with model and tokenizer, or a name on the hub: `ORG/NAME@REVISION`."""
    steps: int = Field(100, ge=1)
    """Number of rounds; each samples, scores and trains once."""
    tasks_per_step: int = Field(32, ge=1)
    """Number of tasks in a round."""
    group_size: int = Field(8, ge=1)
    """Episodes per task (G)."""
    concurrency: int = Field(256, ge=1)
    """Maximum number of episodes played at the same time, each in a sandbox if its tools need
    one."""
    mode: Literal["sync", "async"] = "sync"
    """"sync": play a round, then learn from it. "async": a separate process plays later rounds
    while the policy learns; see `max_staleness`."""
    max_staleness: int = Field(2, ge=0, le=64)
    """For mode="async": updates between the weights that a round begins with and those that learn
    from it. The tasks of a round are dispatched this number of rounds early."""
    deterministic: bool = False
    """Sample turn by turn in fixed batches, so that running again gives the same bits."""
    eval_every: int = Field(0, ge=0)
    """Rounds between evaluations on held-out tasks (0 = never)."""
    quiet_rounds: int = Field(5, ge=1)
    """Stop after this number of consecutive rounds without signal and without success."""
    save_every: int = Field(10, ge=1)
    """Rounds between checkpoints."""
    keep_last: int = Field(2, ge=1)
    """Number of checkpoints to keep."""
    keep_best: bool = False
    """Also keep the model with the best held-out pass@1, in `best/`."""

    recipe: str = "grpo"
    """Algorithm: a name of `agentrl recipes`, or `path/to/file.py:name`."""
    loss: dict[str, Any] = Field({})
    """Settings of the recipe: `{clip_high = 0.28, kl_coef = 0.01}`."""
    process_rewards: dict[Literal["progress", "value"], str] = Field({})
    """Process reward models that reward single turns, by their folders: `{progress = "…"}`."""
    learning_rate: float = Field(1e-6, gt=0)
    """Peak learning rate of AdamW."""
    schedule: Schedule = Schedule()
    """How the learning rate changes over rounds: `{warmup = 4, final = 0.1, shape = "cosine"}`."""
    optimizer: OptimizerSettings = OptimizerSettings()
    """The optimizer: `{name = "adamw8bit", weight_decay = 0.1}`."""
    minibatches: int = Field(1, ge=1)
    """Optimizer steps per round."""
    temperature: float = Field(1.0, gt=0)
    """Temperature of sampling and of scoring, which must not differ."""
    compute: Compute = Compute()
    """Memory and speed: `{micro_tokens = 4096, dtype = "bfloat16", lora_rank = 16}`."""
    curriculum: CurriculumSettings = InOrder()
    """Which tasks are played: `{sampler = "learnability", explore = 0.2}`."""

    @property
    def staleness(self) -> int:
        """How many rounds ahead of the learner tasks are dispatched."""
        return self.max_staleness if self.mode == "async" else 0

    @model_validator(mode="after")
    def _can_play_ahead(self) -> TrainConfig:
        if self.mode == "sync":
            return self
        if self.deterministic and self.max_staleness:
            raise SettingError(
                "needs max_staleness = 0: what plays beside an update depends on the clock",
                "deterministic",
            )
        if self.engine.sleep:
            raise SettingError(
                'needs mode = "sync": this engine samples while the policy learns', "engine.sleep"
            )
        if self.engine.routing != "off":
            raise SettingError('needs mode = "sync"', "engine.routing")
        return self

    @model_validator(mode="after")
    def _pool_holds_a_round(self) -> TrainConfig:
        if isinstance(self.curriculum, PoolSettings):
            self.curriculum.refuse_round(self.tasks_per_step, self.group_size)
        return self


IDENTITY = ("env", "env_settings", "model", "seed", "deterministic")
"""Settings that a resumed run cannot change: its records would mix two runs."""

TRAINED = (("compute", "lora_rank"), ("compute", "lora_alpha"), ("optimizer", "name"))
"""Settings in tables that a resumed run cannot change: the optimizer's state would not fit."""

_DECODING = ("top_p", "top_k", "min_p", "repetition_penalty")


def _hint(name: str, value: Any) -> str | None:
    """What a setting that exists elsewhere is called here."""
    if name in _DECODING:
        return "training scores the whole distribution; it is a setting of `agentrl eval` alone"
    return peer_hint(name, value)


def read_config(path: str | Path, overrides: Sequence[str] = ()) -> TrainConfig:
    """Read the settings of a run from a TOML file, apply `key=value` overrides, and check all.

    Raises:
        ConfigError: the file cannot be read, or settings are wrong: one line for each.
    """
    return load(TrainConfig, path, overrides, hint=_hint)


def check_config(row: Mapping[str, Any], source: str) -> TrainConfig:
    """Build the settings of a run from plain values.

    Raises:
        ConfigError: settings are wrong: one line for each.
    """
    return check(TrainConfig, row, source, hint=_hint)


def check_resumed(config: TrainConfig, path: Path) -> dict[str, tuple[Any, Any]]:
    """Compare settings with those that a run was started with.

    Returns:
        setting -> (old, new) of those that differ and may change; they apply from the next round.

    Raises:
        ConfigError: a setting that identifies the run differs.
    """
    if not path.exists():
        return {}
    old, new = read_config(path).model_dump(mode="json"), config.model_dump(mode="json")
    new["chat"] = {k: old["chat"][k] if v == "auto" else v for k, v in new["chat"].items()}
    changed = {name: (old[name], new[name]) for name in new if old[name] != new[name]}
    fixed = {name: (old[name], new[name]) for name in IDENTITY}
    fixed |= {f"{table}.{name}": (old[table][name], new[table][name]) for table, name in TRAINED}
    fixed |= {f"chat.{name}": (old["chat"][name], new["chat"][name]) for name in new["chat"]}
    for name, (was, now) in fixed.items():
        if was != now:
            raise ConfigError(
                f"{path.parent} is a run with {name}={as_toml(was)}, not {as_toml(now)}: resume"
                " it with that, or choose another --out"
            )
    return changed


def write_config(config: TrainConfig, path: Path) -> None:
    """Write the resolved settings as TOML."""
    path.write_text(tomli_w.dumps(config.model_dump(mode="json", exclude_none=True)))

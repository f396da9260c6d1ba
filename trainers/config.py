"""The settings of a training run: few, flat, checked before anything is loaded."""

from __future__ import annotations

import difflib
import math
import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar

import tomli_w
from pydantic import (
    BaseModel,
    ConfigDict,
    Discriminator,
    Field,
    Tag,
    ValidationError,
    model_validator,
)

from agentrl.chat.settings import ChatSettings, one_of_these
from agentrl.curriculum.settings import (
    SAMPLERS,
    CurriculumSettings,
    EnvTable,
    InOrder,
    PoolSettings,
    refuse_tables,
)
from agentrl.engines.settings import EngineSettings
from agentrl.errors import ConfigError
from agentrl.records.plain import as_toml
from agentrl.safety.settings import SafetySettings
from agentrl.trainers.overrides import apply_override
from agentrl.trainers.peers import peer_hint

Settings = TypeVar("Settings", bound=BaseModel)

STRICT = ConfigDict(frozen=True, extra="forbid", strict=True, allow_inf_nan=False)
"""Numbers are finite, and neither text nor truth values are taken for one."""

OptimizerName = Literal["adamw", "adamw8bit"]


class Compute(BaseModel):
    """What a run may spend: settings that change memory and speed; only precision and adapters
    change results.
    """

    model_config = STRICT

    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Where all models of the run are; "auto": on the CUDA device, if there is one."""
    micro_tokens: int = Field(default=16384, ge=1)
    """Padded tokens per forward pass; never changes the gradient."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Precision of the backbone. Trained weights stay in float32 (steps of a policy are smaller
    than bfloat16 can hold), as do output layer and softmax when tokens are scored; frozen
    weights are kept in this precision."""
    dropout: float = Field(default=0.0, ge=0, lt=1)
    """Probability at every place where the policy's family drops something out, whatever its
    folder says. Sampling never does; all scorings of a step drop the same."""
    gradient_checkpointing: bool = False
    """Compute each layer again in the backward pass instead of keeping what is inside it."""
    lora_rank: int = Field(default=0, ge=0)
    """Rank of LoRA adapters on every linear layer but the output layer; 0: all weights train."""
    lora_alpha: int = Field(default=32, ge=1)
    """Their product is scaled by alpha / rank."""


class OptimizerSettings(BaseModel):
    """How a gradient becomes a step, beside the learning rate."""

    model_config = STRICT

    name: OptimizerName = "adamw"
    """"adamw", or "adamw8bit" with moments of 8 bits."""
    betas: tuple[float, float] = Field(default=(0.9, 0.95), strict=False)
    """Of AdamW's moments."""
    weight_decay: float = Field(default=0.0, ge=0)
    """Of AdamW, times the learning rate."""
    max_grad_norm: float = Field(default=0.5, gt=0, allow_inf_nan=True)
    """Longer gradients are scaled down to this norm; `inf`: never."""


class Schedule(BaseModel):
    """Learning rate over rounds, as a share of its peak: a straight rise, then a fall."""

    model_config = STRICT

    warmup: int = Field(default=0, ge=0)
    """Rounds until the peak."""
    final: float = Field(default=1.0, ge=0, le=1)
    """Share of the peak that is left at the last round; 1: no fall."""
    shape: Literal["linear", "cosine"] = "linear"
    """Of the fall: a straight line, or half a wave that is flat at both ends."""

    @model_validator(mode="after")
    def _falls(self) -> Schedule:
        if self.shape == "cosine" and self.final == 1:
            raise ValueError("shape is that of the fall, and final=1 is none: set final as well")
        return self

    def share(self, step: int, steps: int) -> float:
        """Share of the peak in round `step` (from 0) of `steps`."""
        peak = max(0, self.warmup - 1)
        if step < peak:
            return (step + 1) / self.warmup
        gone = (step - peak) / max(1, steps - 1 - peak)
        if self.shape == "cosine":
            gone = (1 - math.cos(math.pi * gone)) / 2
        return 1 - (1 - self.final) * gone


class HeldOut(BaseModel):
    """What an evaluation during training plays."""

    model_config = STRICT

    tasks: int = Field(default=256, ge=1)
    """The first so many held-out tasks, the same every time."""
    samples: int = Field(default=1, ge=1)
    """Episodes of each; pass@k is logged for 1, 2, 4, … up to it."""

    @property
    def ks(self) -> tuple[int, ...]:
        """The k of pass@k."""
        return tuple(
            sorted({1, *(2**power for power in range(self.samples.bit_length())), self.samples})
        )


class CriticSettings(BaseModel):
    """The critic of a recipe that needs one (PPO, VAPO)."""

    model_config = STRICT

    model: str = ""
    """Folder or hub name: a reward model, an earlier critic; empty: the policy's, with V = 0."""
    learning_rate: float = Field(default=1e-5, gt=0)
    """Of AdamW, the same in every round: ten times the policy's default."""
    epochs: int = Field(default=1, ge=1)
    """Passes over the tokens of a round, each in as many minibatches as the policy's."""
    value_clip: float = Field(default=0.5, gt=0, allow_inf_nan=True)
    """How far a value can move within a round, in units of the reward; `inf`: as far as it likes.
    """
    warmup: int = Field(default=0, ge=0)
    """Rounds, out of `steps`, in which only the critic learns, from Monte-Carlo returns (VAPO has
    50).
    """


class TrainConfig(BaseModel):
    """Everything that a run needs: what is run, then, from `recipe` on, the algorithm."""

    model_config = STRICT | ConfigDict(ser_json_inf_nan="constants")

    env: Annotated[
        Annotated[str, Tag("single")] | Annotated[list[EnvTable], Tag("tables")],
        Discriminator(lambda value: "tables" if isinstance(value, list) else "single"),
    ]
    """Environment id of `agentrl list`, or `path/to/file.py:Class`; several: tables `[[env]]`."""
    env_settings: dict[str, Any] = {}
    """Arguments of the environment's constructor."""
    model: str
    """Hugging Face folder with model and tokenizer, or a name on the hub: `ORG/NAME@REVISION`."""
    chat: ChatSettings = ChatSettings()
    """How messages become tokens: `{parser = "hermes", template_options = {…}}`."""
    seed: int = 0
    """Every other seed is derived from it."""
    steps: int = Field(100, ge=1)
    """Optimizer rounds; each samples, scores and trains once."""
    tasks_per_step: int = Field(32, ge=1)
    """Tasks of one round."""
    group_size: int = Field(8, ge=1)
    """G, episodes per task."""
    concurrency: int = Field(256, ge=1)
    """Episodes that play at the same time, at most, each in a sandbox where tools need one."""
    sandbox: Literal["auto", "docker", "bubblewrap", "process", "trusted-process"] = "auto"
    """Where tools and hidden tests run."""
    deterministic: bool = False
    """Turn-synchronous sampling in fixed batches: the same run again gives the same bits."""
    eval_every: int = Field(0, ge=0)
    """Rounds between evaluations on held-out tasks; 0: never."""
    held_out: HeldOut = HeldOut()
    """What an evaluation plays: `{tasks = 256, samples = 4}`."""
    quiet_rounds: int = Field(5, ge=1)
    """Rounds in a row without signal and without success after which the run stops."""
    save_every: int = Field(10, ge=1)
    """Rounds between checkpoints."""
    keep_last: int = Field(2, ge=1)
    """Checkpoints that are kept."""
    keep_best: bool = False
    """Keep the model of the best held-out pass@1 as well, in `best/`."""

    safety: SafetySettings = SafetySettings()
    """Around tool calls: `{policy = "work-area", penalty = 0.2}`."""

    recipe: str = "grpo"
    """Algorithm, a name of `agentrl.trainers.algorithms.recipes`, or `path/to/file.py:name`."""
    loss: dict[str, Any] = {}
    """Settings of the recipe's loss, as in `{clip_high = 0.28, kl_coef = 0.01}`."""
    process_rewards: dict[Literal["progress", "value"], str] = {}
    """Rewards of turns, by folders of process reward models: `{progress = "…"}`."""
    learning_rate: float = Field(1e-6, gt=0)
    """Peak learning rate of AdamW."""
    schedule: Schedule = Schedule()
    """How the learning rate moves over rounds: `{warmup = 4, final = 0.1, shape = "cosine"}`."""
    optimizer: OptimizerSettings = OptimizerSettings()
    """Which, its betas and weight decay, and the norm that gradients are clipped to."""
    minibatches: int = Field(1, ge=1)
    """Optimizer steps per round."""
    temperature: float = Field(1.0, gt=0)
    """Of the sampler, and of the scorer: they cannot differ."""
    engine: EngineSettings = EngineSettings()
    """What samples: `{name = "vllm", kv_cache_gib = 4.0}`, `{own_weights = true}`."""
    compute: Compute = Compute()
    """What a forward pass may spend: `{micro_tokens = 4096, dtype = "bfloat16", lora_rank = 16}`.
    """
    curriculum: CurriculumSettings = InOrder()
    """Which tasks are played: `{sampler = "learnability", explore = 0.2}`."""

    @model_validator(mode="after")
    def _fits(self) -> TrainConfig:
        if not isinstance(self.env, str):
            refuse_tables(self.env, self.env_settings)
        if isinstance(self.curriculum, PoolSettings):
            self.curriculum.refuse_round(self.tasks_per_step, self.group_size)
        return self

    @property
    def envs(self) -> list[EnvTable]:
        """The environments of the run, at least one."""
        if isinstance(self.env, str):
            return [EnvTable(id=self.env, settings=self.env_settings)]
        return self.env


IDENTITY = ("env", "env_settings", "model", "seed", "deterministic")
"""Settings that a resumed run cannot change: its records would mix two runs."""

TRAINED = (("compute", "lora_rank"), ("compute", "lora_alpha"), ("optimizer", "name"))
"""Settings in tables that a resumed run cannot change: the optimizer's state would not fit."""

CHOICES: dict[str, type[BaseModel]] = {**SAMPLERS, "tables": EnvTable}
"""Kinds of tables of which one is chosen; where something is wrong, pydantic names the kind too."""

MOVED = {"compute.optimizer": "optimizer.name"}
"""Settings that had another name once."""


def read_config(path: str | Path, overrides: Sequence[str] = ()) -> TrainConfig:
    """Read a TOML file, apply `key=value` overrides, and check all of it.

    Raises:
        ConfigError: one sentence with the file, the field and the fix.
    """
    file = Path(path)
    try:
        row = tomllib.loads(file.read_text())
    except FileNotFoundError:
        raise ConfigError(f"config {file} does not exist: give the path of a TOML file") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"config {file} is not valid TOML: {error}") from error
    for override in overrides:
        apply_override(row, override)
    return validated(TrainConfig, row, str(file), overrides)


def check_config(row: Mapping[str, Any], where: str) -> TrainConfig:
    """Build the settings from plain values.

    Raises:
        ConfigError: one sentence with the field and the fix.
    """
    return validated(TrainConfig, row, where)


def validated(
    kind: type[Settings], row: Mapping[str, Any], where: str, overrides: Sequence[str] = ()
) -> Settings:
    """Settings of a kind from plain values.

    Args:
        kind: of the settings.
        row: the values.
        where: they come from.
        overrides: `key=value` pairs that are in them already, and come from the command line.

    Raises:
        ConfigError: one sentence with the field and what is wrong with it.
    """
    try:
        return kind.model_validate(row)
    except ValidationError as error:
        problems = error.errors(include_url=False)
        unknown = [problem for problem in problems if problem["type"] == "extra_forbidden"]
        field = _dotted((problem := (unknown or problems)[0])["loc"])
        for override in overrides:
            key = override.partition("=")[0].strip()
            if f"{field}.".startswith(f"{key}.") or f"{key}.".startswith(f"{field}."):
                where = f"--set {override}"
        twice = f": {where.removeprefix('--set ')}: "
        raise ConfigError(f"{where}: {_worded(kind, problem)}".replace(twice, ": ")) from None


def _worded(kind: type[BaseModel], problem: Any) -> str:
    """What is wrong with a setting, and the fix."""
    if not problem["loc"]:
        return str(problem["msg"]).removeprefix("Value error, ")
    last = problem["loc"][-1]
    if last in ("top_p", "top_k"):
        return (
            f"{last} is for `agentrl eval`: training scores what was sampled under the whole"
            " distribution, so set temperature alone"
        )
    field, value = _dotted(problem["loc"]), problem["input"]
    shown = f"{field}={as_toml(value)}"
    if problem["type"] in ("union_tag_invalid", "union_tag_not_found"):
        chosen = value.get("sampler") if isinstance(value, dict) else value
        offer = one_of_these(str(chosen), " or ".join(f"'{name}'" for name in SAMPLERS))
        said = " is missing" if chosen is None else f"={as_toml(chosen)}"
        return f"{field}.sampler{said}: {offer}"
    if problem["type"] == "missing":
        return f"setting {field!r} is missing: add a line '{field} = …'"
    if problem["type"] in ("model_type", "dict_type", "model_attributes_type"):
        return f"{shown} must be a table, as in {field} = {{…}}"
    if problem["type"] == "literal_error":
        return f"{shown}: {one_of_these(value, problem['ctx']['expected'])}"
    if problem["type"] != "extra_forbidden":
        return f"{shown}: {problem['msg'].removeprefix('Value error, ').lower()}"
    return f"setting {field!r} is unknown: {_where_else(kind, problem['loc'], value)}"


def _where_else(kind: type[BaseModel], loc: tuple[Any, ...], value: Any) -> str:
    """What was meant by the name of a setting that does not exist."""
    *path, last = loc
    field = _dotted(loc)
    if field in MOVED:
        return f"it is {MOVED[field]} now"
    for step in path:
        kind = _table(kind, step) or kind
    tables = {name: table for name in kind.model_fields if (table := _table(kind, name))}
    if homes := [name for name, table in tables.items() if last in table.model_fields]:
        return f"it stands in a table: {homes[0]} = {{{last} = …}}"
    owners = [f"'{name}'" for name, one in SAMPLERS.items() if last in one.model_fields]
    if owners and kind in SAMPLERS.values():
        return f"{last} belongs to sampler {' or '.join(owners)}"
    if peer := peer_hint(field, value):
        return peer
    if near := difflib.get_close_matches(last, kind.model_fields, n=1):
        return f"did you mean {near[0]!r}?"
    more = "; options of the recipe stand in its table: loss = {…}" if kind is TrainConfig else ""
    return f"settings are {', '.join(kind.model_fields)}{more}"


def _table(kind: type[BaseModel], name: Any) -> type[BaseModel] | None:
    """The kind of a setting that is a table of settings itself, or of a choice of tables."""
    if name in CHOICES:
        return CHOICES[name]
    found = kind.model_fields[name].annotation if name in kind.model_fields else None
    return found if isinstance(found, type) and issubclass(found, BaseModel) else None


def _dotted(loc: Sequence[Any]) -> str:
    """The name of a setting as `--set` takes it."""
    return ".".join(str(step) for step in loc if step not in (*CHOICES, "single"))


def check_resumed(config: TrainConfig, path: Path) -> dict[str, tuple[Any, Any]]:
    """Compare settings with those that a run was started with.

    Returns:
        setting -> (old, new) of those that differ and may: they hold from the next round on.

    Raises:
        ConfigError: a setting that says which run this is differs.
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
    path.write_text(tomli_w.dumps(config.model_dump(mode="json")))

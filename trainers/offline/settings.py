"""The settings of one offline stage, as a TOML file gives them."""

from __future__ import annotations

from typing import Any, Literal, Self

from pydantic import BaseModel, Field, model_validator

from agentrl.chat.settings import ChatSettings
from agentrl.settings import STRICT
from agentrl.trainers.config import Compute, OptimizerSettings, Schedule

StageKind = Literal["sft", "reward", "process_reward", "preference"]

REWARD_MODELS = ("reward", "process_reward")
"""Kinds of stages whose model is no policy."""

MEMBERS = (3, 7)
"""Fewest and most heads of an ensemble."""


class DataSettings(BaseModel):
    """What a stage learns from."""

    model_config = STRICT

    files: list[str] = Field(min_length=1)
    """JSONL (also `.gz`), JSON or Parquet files, saved datasets, or `episodes.jsonl` of a run."""
    held_out: float = Field(default=0.1, ge=0, lt=1)
    """Share of the prompts that does not train and is measured instead."""
    skip_bad_rows: bool = False
    """Leave rows that cannot be read out, and count them."""
    max_tokens: int = Field(default=0, ge=0)
    """Longest row; 0: what the model takes."""
    too_long: Literal["drop", "refuse"] = "drop"
    """What happens to longer rows; none is ever cut."""


class RewardSettings(BaseModel):
    """Of a reward model."""

    model_config = STRICT

    heads: int = Field(default=1, ge=1, le=MEMBERS[1])
    """Scalar heads on one backbone, each trained on a draw of the pairs of its own."""
    margin: bool = False
    """Ask for the margin that ratings or votes gave, instead of any."""
    center: float = Field(default=0.01, ge=0)
    """Weight of the squared sum of both rewards: keeps their mean near zero."""

    @model_validator(mode="after")
    def _is_one_or_an_ensemble(self) -> Self:
        if 1 < self.heads < MEMBERS[0]:
            raise ValueError(f"heads={self.heads}: give 1, or an ensemble of 3 to 7")
        return self


class ProcessSettings(BaseModel):
    """Of a process reward model."""

    model_config = STRICT

    labels: Literal["soft", "hard"] = "soft"
    """"soft": the share of completions that passed; "hard": 1 where any did, else 0."""


class SampleSettings(BaseModel):
    """Answers that the model gives before it trains, in place of those of the files."""

    model_config = STRICT

    answers: int = Field(default=0, ge=0)
    """Of each prompt; 0: learn from the files. SFT then imitates the best (rejection sampling),
    preferences set the best against the worst (online DPO)."""
    max_tokens: int = Field(default=128, ge=1)
    """Of an answer."""
    temperature: float = Field(default=1.0, gt=0)
    """Of the sampler."""
    judge: str = ""
    """Who says which answer is better: a reward model's folder or address,
    `path/to/file.py:function` with `function(prompt: str, answer: str) -> float`,
    `openai:MODEL@URL`, or a `constitution.toml`."""
    revise: str = ""
    """A `constitution.toml` by which each answer is criticised and written anew; the judge then
    ranks answers and revisions together."""

    @model_validator(mode="after")
    def _has_a_judge(self) -> Self:
        if self.answers and (not self.judge or self.answers < 2 - bool(self.revise)):
            raise ValueError("give 2 answers or more, and the judge that chooses among them")
        if self.revise and not self.answers:
            raise ValueError("revise is for the model's own answers: set answers, and a judge")
        return self


class Card(BaseModel):
    """What a stage's model is measured by, against the model that the stage began with."""

    model_config = STRICT

    prompts: int = Field(default=32, ge=0)
    """Held-out prompts that both models answer; 0: neither does."""
    max_tokens: int = Field(default=128, ge=1)
    """Of an answer."""
    judge: str = ""
    """As in `sample`; empty: no win rate."""
    env: str = ""
    """An environment whose pass@1 is measured with both models."""
    env_settings: dict[str, Any] = {}
    """Arguments of its constructor."""
    tasks: int = Field(default=64, ge=1)
    """Of its split "test"."""
    samples: int = Field(default=1, ge=1)
    """Episodes of each."""
    sandbox: Literal["auto", "docker", "bubblewrap", "process", "trusted-process"] = "auto"
    """Where its tools run."""


class PlaySettings(BaseModel):
    """Of a stage that plays an environment, so that later ones learn from its `episodes.jsonl`."""

    model_config = STRICT

    model: str
    """Who plays: a folder, or a name on the hub."""
    env: str
    """Environment id of `agentrl list`, or `path/to/file.py:Class`."""
    env_settings: dict[str, Any] = {}
    """Arguments of its constructor."""
    tasks: int = Field(default=64, ge=1)
    """Of its split "train"."""
    samples: int = Field(default=8, ge=1)
    """Episodes of each."""
    temperature: float = Field(default=1.0, gt=0)
    """Of the sampler."""
    sandbox: Literal["auto", "docker", "bubblewrap", "process", "trusted-process"] = "auto"
    """Where its tools run."""
    chat: ChatSettings = ChatSettings()
    """How messages become tokens."""
    seed: int = 0
    """Of tasks and samples."""


class LabelSettings(BaseModel):
    """Of a stage that labels the turns of played episodes, for a process reward model."""

    model_config = STRICT

    model: str
    """Who plays on from each turn: a folder, or a name on the hub."""
    run: str
    """Folder of the episodes, as in `"{play.run}"`."""
    completions: int = Field(default=8, ge=1)
    """Episodes from each turn."""
    limit: int = Field(default=0, ge=0)
    """At most so many episodes of the run; 0: all."""
    temperature: float = Field(default=1.0, gt=0)
    """Of the sampler."""
    sandbox: Literal["auto", "docker", "bubblewrap", "process", "trusted-process"] = "auto"
    """Where its tools run."""
    chat: ChatSettings = ChatSettings()
    """How messages become tokens."""


class StageSettings(BaseModel):
    """Everything that an offline stage needs."""

    model_config = STRICT

    stage: StageKind
    """What is trained: a policy on conversations or on preferences, a reward model, or a process
    reward model on labelled turns."""
    model: str
    """Hugging Face folder with model and tokenizer, or a name on the hub: `ORG/NAME@REVISION`."""
    data: DataSettings
    """What it learns from: `{files = ["pairs.jsonl"]}`."""
    chat: ChatSettings = ChatSettings()
    """How messages become tokens."""
    seed: int = 0
    """Of the split, of the order of rows, and of new weights."""
    epochs: int = Field(default=1, ge=1)
    """Passes over the rows."""
    steps: int = Field(default=0, ge=0)
    """Optimizer steps; 0: as the epochs ask."""
    batch_size: int = Field(default=16, ge=1)
    """Rows (pairs, labels) of one optimizer step."""
    micro_rows: int = Field(default=0, ge=0)
    """Rows of one forward pass; 0: all of a step."""
    learning_rate: float = Field(default=1e-5, gt=0)
    """Its peak."""
    schedule: Schedule = Schedule(warmup=10, final=0.0)
    """How it moves over steps."""
    optimizer: OptimizerSettings = OptimizerSettings(max_grad_norm=1.0)
    """Which, and its settings."""
    compute: Compute = Compute()
    """Device, precision, adapters; `micro_tokens` is of the measurements."""
    save_every: int = Field(default=100, ge=1)
    """Steps between checkpoints to go on from."""
    log_every: int = Field(default=10, ge=1)
    """Steps between lines on the terminal; every step is in `metrics.jsonl`."""

    objective: str = "dpo"
    """Of the stage "preference": a name of `agentrl.trainers.offline.objectives.OBJECTIVES`."""
    loss: dict[str, float] = {}
    """Its coefficients, as in `{beta = 0.1}`."""
    reward: RewardSettings = RewardSettings()
    """Of the stage "reward"."""
    process: ProcessSettings = ProcessSettings()
    """Of the stage "process_reward", as in `{labels = "hard"}`."""
    sample: SampleSettings = SampleSettings()
    """Answers to learn from instead, as in `{answers = 4, judge = "runs/reward/…/model"}`."""
    card: Card = Card()
    """What the trained model is measured by."""

    @model_validator(mode="after")
    def _divides(self) -> Self:
        if self.micro_rows and self.batch_size % self.micro_rows:
            raise ValueError(
                f"batch_size={self.batch_size} must be a multiple of micro_rows={self.micro_rows}"
            )
        return self

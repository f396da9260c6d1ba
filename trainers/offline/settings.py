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
    """Share of the prompts that is held out for measurements."""
    skip_bad_rows: bool = False
    """Skip and count rows that cannot be read, instead of stopping."""
    max_tokens: int = Field(default=0, ge=0)
    """Maximum number of tokens in a row (0 = the context length of the model)."""
    too_long: Literal["drop", "refuse"] = "drop"
    """What to do with longer rows; rows are never cut."""


class RewardSettings(BaseModel):
    """Settings of a reward model."""

    model_config = STRICT

    heads: int = Field(default=1, ge=1, le=MEMBERS[1])
    """Number of scalar heads on the backbone, each trained on its own draw of the pairs."""
    margin: bool = False
    """Ask for the margin that ratings or votes gave, instead of any positive one."""
    center: float = Field(default=0.01, ge=0)
    """Weight of the squared sum of both rewards, which keeps their mean near zero."""

    @model_validator(mode="after")
    def _is_one_or_an_ensemble(self) -> Self:
        if 1 < self.heads < MEMBERS[0]:
            raise ValueError(f"heads={self.heads}: give 1, or an ensemble of 3 to 7")
        return self


class ProcessSettings(BaseModel):
    """Settings of a process reward model."""

    model_config = STRICT

    labels: Literal["soft", "hard"] = "soft"
    """"soft": the share of completions that passed; "hard": 1 where any did, else 0."""


class SampleSettings(BaseModel):
    """Answers that the model samples before it trains, instead of those in the files."""

    model_config = STRICT

    answers: int = Field(default=0, ge=0)
    """Number of answers per prompt (0 = learn from the files). SFT imitates the best one (rejection
    sampling); preferences set the best against the worst (online DPO)."""
    max_tokens: int = Field(default=128, ge=1)
    """Maximum number of tokens in an answer."""
    temperature: float = Field(default=1.0, gt=0)
    """Sampling temperature."""
    judge: str = ""
    """What judges answers: a reward model's folder or address,
    `path/to/file.py:function` with `function(prompt: str, answer: str) -> float`,
    `openai:MODEL@URL`, or a `constitution.toml`."""
    revise: str = ""
    """A `constitution.toml` by which each answer is criticised and rewritten; the judge then ranks
    answers and revisions together."""

    @model_validator(mode="after")
    def _has_a_judge(self) -> Self:
        if self.answers and (not self.judge or self.answers < 2 - bool(self.revise)):
            raise ValueError("give 2 answers or more, and the judge that chooses among them")
        if self.revise and not self.answers:
            raise ValueError("revise is for the model's own answers: set answers, and a judge")
        return self


class Card(BaseModel):
    """How a stage's model is compared with the model that the stage began with."""

    model_config = STRICT

    prompts: int = Field(default=32, ge=0)
    """Number of held-out prompts that both models answer."""
    max_tokens: int = Field(default=128, ge=1)
    """Maximum number of tokens in an answer."""
    judge: str = ""
    """What judges the answers, as in `sample.judge` (empty = no win rate)."""
    env: str = ""
    """Environment on which pass@1 of both models is measured (empty = none)."""
    env_settings: dict[str, Any] = {}
    """Arguments of the environment's constructor."""
    tasks: int = Field(default=64, ge=1)
    """Number of tasks of its split "test"."""
    samples: int = Field(default=1, ge=1)
    """Episodes per task."""
    sandbox: Literal["auto", "docker", "bubblewrap", "process", "trusted-process"] = "auto"
    """Where the tools of the environment run."""


class PlaySettings(BaseModel):
    """A stage that plays an environment, so that later stages learn from its `episodes.jsonl`."""

    model_config = STRICT

    model: str
    """Model that plays: a folder, or a name on the hub."""
    env: str
    """Environment id of `agentrl list`, or `path/to/file.py:Class`."""
    env_settings: dict[str, Any] = {}
    """Arguments of the environment's constructor."""
    tasks: int = Field(default=64, ge=1)
    """Number of tasks of its split "train"."""
    samples: int = Field(default=8, ge=1)
    """Episodes per task."""
    temperature: float = Field(default=1.0, gt=0)
    """Sampling temperature."""
    sandbox: Literal["auto", "docker", "bubblewrap", "process", "trusted-process"] = "auto"
    """Where the tools of the environment run."""
    chat: ChatSettings = ChatSettings()
    """How messages become tokens."""
    seed: int = 0
    """Random seed of tasks and samples."""


class LabelSettings(BaseModel):
    """A stage that labels the turns of played episodes for a process reward model."""

    model_config = STRICT

    model: str
    """Model that continues from each turn: a folder, or a name on the hub."""
    run: str
    """Folder of the episodes: `"{play.run}"`."""
    completions: int = Field(default=8, ge=1)
    """Number of episodes to play from each turn."""
    limit: int = Field(default=0, ge=0)
    """Maximum number of episodes to label (0 = all)."""
    temperature: float = Field(default=1.0, gt=0)
    """Sampling temperature."""
    sandbox: Literal["auto", "docker", "bubblewrap", "process", "trusted-process"] = "auto"
    """Where the tools of the environment run."""
    chat: ChatSettings = ChatSettings()
    """How messages become tokens."""


class StageSettings(BaseModel):
    """Everything that an offline stage needs."""

    model_config = STRICT

    stage: StageKind
    """What is trained: a policy on conversations ("sft") or on preferences, a reward model, or a
    process reward model on labelled turns."""
    model: str
    """Hugging Face folder with model and tokenizer, or a name on the hub: `ORG/NAME@REVISION`."""
    data: DataSettings
    """Training data: `{files = ["pairs.jsonl"]}`."""
    chat: ChatSettings = ChatSettings()
    """How messages become tokens."""
    seed: int = 0
    """Random seed of the split, of the order of rows, and of new weights."""
    epochs: int = Field(default=1, ge=1)
    """Passes over the rows."""
    steps: int = Field(default=0, ge=0)
    """Number of optimizer steps (0 = as many as `epochs` needs)."""
    batch_size: int = Field(default=16, ge=1)
    """Rows (pairs, labels) per optimizer step."""
    micro_rows: int = Field(default=0, ge=0)
    """Rows per forward pass (0 = all rows of the step)."""
    learning_rate: float = Field(default=1e-5, gt=0)
    """Peak learning rate."""
    schedule: Schedule = Schedule(warmup=10, final=0.0)
    """How the learning rate changes over steps."""
    optimizer: OptimizerSettings = OptimizerSettings(max_grad_norm=1.0)
    """The optimizer and its settings."""
    compute: Compute = Compute()
    """Device, precision and adapters; `micro_tokens` only affects measurements."""
    save_every: int = Field(default=100, ge=1)
    """Steps between checkpoints."""
    log_every: int = Field(default=10, ge=1)
    """Steps between lines on the terminal; every step is in `metrics.jsonl`."""

    objective: str = "dpo"
    """Loss of the stage "preference": `dpo`, `ipo`, `kto`, …."""
    loss: dict[str, float] = {}
    """Coefficients of the objective: `{beta = 0.1}`."""
    reward: RewardSettings = RewardSettings()
    """Settings of the stage "reward"."""
    process: ProcessSettings = ProcessSettings()
    """Settings of the stage "process_reward": `{labels = "hard"}`."""
    sample: SampleSettings = SampleSettings()
    """Learn from the model's own answers: `{answers = 4, judge = "runs/reward/…/model"}`."""
    card: Card = Card()
    """How the trained model is measured."""

    @model_validator(mode="after")
    def _divides(self) -> Self:
        if self.micro_rows and self.batch_size % self.micro_rows:
            raise ValueError(
                f"batch_size={self.batch_size} must be a multiple of micro_rows={self.micro_rows}"
            )
        return self

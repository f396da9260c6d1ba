"""What training and evaluation are told alike, and the settings of an evaluation."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, Self

from pydantic import BaseModel, Discriminator, Field, Tag, field_validator, model_validator

from agentrl.chat.settings import ChatSettings
from agentrl.curriculum.settings import EnvTable, refuse_tables
from agentrl.engines.base import VLLM, EngineSettings
from agentrl.policies.options import ServedOptions
from agentrl.safety.settings import SafetySettings
from agentrl.settings import STRICT, SettingError, did_you_mean
from agentrl.types import LimitSettings

if TYPE_CHECKING:
    from agentrl.evaluation.run import EvalPlan

SandboxName = Literal["auto", "docker", "bubblewrap", "process", "trusted-process"]
_KINDS = ("oracle", "noop", "hf:MODEL", "vllm:MODEL", "openai:MODEL@URL")


class HeldOut(BaseModel):
    """What an evaluation on held-out tasks plays."""

    model_config = STRICT

    tasks: int = Field(default=256, ge=1)
    """Number of held-out tasks: the first ones, the same every time."""
    samples: int = Field(default=1, ge=1)
    """Episodes per task; pass@k is reported for k = 1, 2, 4, … up to this number."""

    @property
    def ks(self) -> tuple[int, ...]:
        """The k of pass@k."""
        powers = [2**power for power in range(self.samples.bit_length())]
        return tuple(sorted({*powers, self.samples}))


class SharedSettings(BaseModel):
    """Settings that training and evaluation share: what is played, by which model, and where."""

    model_config = STRICT

    env: Annotated[
        Annotated[str, Tag("single")] | Annotated[list[EnvTable], Tag("tables")],
        Discriminator(lambda value: "tables" if isinstance(value, list) else "single"),
    ]
    """Environment: an id of `agentrl list`, or `path/to/file.py:Class`. Write several as tables
    `[[env]]`."""
    env_settings: dict[str, Any] = {}
    """Arguments of the environment's constructor."""
    limits: LimitSettings = LimitSettings()
    """Limits that replace those of every environment: `{turn_tokens = 4096}`."""
    model: str = ""
    """Hugging Face folder with model and tokenizer, or a name on the hub: `ORG/NAME@REVISION`."""
    chat: ChatSettings = ChatSettings()
    """How messages become tokens: `{parser = "hermes", template_options = {…}}`."""
    seed: int = 0
    """Random seed; every other seed is derived from it."""
    sandbox: SandboxName = "auto"
    """Where tools and hidden tests run."""
    safety: SafetySettings = SafetySettings()
    """What guards tool calls: `{policy = "work-area", penalty = 0.2}`."""
    engine: EngineSettings = EngineSettings()
    """What samples: `{name = "vllm", kv_cache_gib = 4.0}`."""
    held_out: HeldOut = HeldOut()
    """Which held-out tasks are evaluated: `{tasks = 256, samples = 4}`."""

    @model_validator(mode="after")
    def _name_the_environments_apart(self) -> Self:
        if not isinstance(self.env, str):
            refuse_tables(self.env, self.env_settings)
        return self

    @property
    def envs(self) -> list[EnvTable]:
        """The environments, at least one, each with its limits."""
        if isinstance(self.env, str):
            return [EnvTable(id=self.env, settings=self.env_settings, limits=self.limits)]
        return [
            table.model_copy(update={"limits": self.limits.override(table.limits)})
            for table in self.env
        ]


class EvalSettings(SharedSettings):
    """Settings of an evaluation; a file may hold those of a training run as well."""

    policy: str = ""
    """Policy: oracle, noop, `hf:MODEL`, `vllm:MODEL` or `openai:MODEL@URL`. Empty: `model` with the
    engine of `engine`, or oracle if there is no model."""
    split: str = "test"
    """Split of the environment."""
    tasks: str = ""
    """Task file, for environments that take one."""
    limit: int | None = Field(default=None, ge=0)
    """Maximum number of tasks (0 = all; only for finite splits). Default: `held_out.tasks`."""
    samples: int | None = Field(default=None, ge=1)
    """Episodes per task. Default: `held_out.samples`."""
    k: list[int] = []
    """Values of k for pass@k. Default: 1, 2, 4, … up to `samples`."""
    temperature: float = Field(default=1.0, ge=0)
    """Sampling temperature."""
    top_p: float = Field(default=1.0, gt=0, le=1)
    """Sample from the most likely tokens that together have this probability (1 = off)."""
    top_k: int = Field(default=0, ge=0)
    """Sample from the k most likely tokens (0 = off)."""
    concurrency: int = Field(default=0, ge=0)
    """Episodes played at the same time (0 = up to 64, or 4 if spending is bounded)."""
    price: str = ""
    """US dollars per million prompt and completion tokens, as in "0.15,0.60", or a TOML file."""
    max_cost: float | None = Field(default=None, gt=0)
    """Stop starting episodes once this many US dollars are spent; needs `price`."""
    max_tokens: int | None = Field(default=None, ge=1)
    """Stop starting episodes once this many tokens are used, prompts included."""
    user: str = ""
    """Policy that plays the user in dialogues."""
    trained: str = ""
    """Task file that the policy was trained on; its tasks are looked for among those played."""
    served: ServedOptions = ServedOptions()
    """How the server of an `openai:` policy is asked: time-outs, retries, request parameters."""

    @field_validator("policy", "user")
    @classmethod
    def _is_a_policy(cls, name: str) -> str:
        kind, colon, model = name.partition(":")
        if name in ("", "oracle", "noop") or (kind in ("hf", "vllm", "openai") and colon and model):
            return name
        words = [word.partition(":")[0] for word in _KINDS]
        hint = did_you_mean(kind, words)
        hint = hint if hint.startswith("did") else f"choose {', '.join(_KINDS)}"
        raise SettingError(f"is not a policy: {hint}")

    @model_validator(mode="after")
    def _fit_together(self) -> Self:
        too_large = [k for k in self.k if not 1 <= k <= self.episodes_per_task]
        if too_large:
            raise SettingError(
                f"must be from 1 to samples={self.episodes_per_task}: raise samples", "k"
            )
        if self.max_cost is not None and not self.price:
            raise SettingError("needs prices: give them with price (--price)", "max_cost")
        return self

    @property
    def policy_name(self) -> str:
        """The policy that is evaluated."""
        if self.policy:
            return self.policy
        kind = "vllm" if self.engine.name == "vllm" else "hf"
        return f"{kind}:{self.model}" if self.model else "oracle"

    @property
    def episodes_per_task(self) -> int:
        """Episodes per task."""
        return self.held_out.samples if self.samples is None else self.samples

    def plan(self, env: EnvTable, out: Path | None = None, *, seed: int | None = None) -> EvalPlan:
        """What is evaluated on one of the environments.

        Args:
            env: one of `envs`.
            out: folder of the records; None keeps none.
            seed: seed of the tasks and samples; by default the one of these settings.

        Raises:
            ConfigError: the environment or the prices cannot be had.
        """
        from agentrl.evaluation.plan import read_prices
        from agentrl.evaluation.run import EvalPlan
        from agentrl.specs import EnvSpec

        settings = dict(env.settings)
        if self.tasks:
            settings["tasks_file"] = self.tasks
        policy = self.policy_name
        held_out = HeldOut(samples=self.episodes_per_task)
        return EvalPlan(
            make=EnvSpec.of(env.id, settings, limits=env.limits),
            policy=policy,
            split=self.split,
            limit=self.held_out.tasks if self.limit is None else self.limit,
            samples=held_out.samples,
            ks=tuple(self.k) or held_out.ks,
            sandbox=self.sandbox,
            seed=self.seed if seed is None else seed,
            concurrency=self.concurrency,
            temperature=self.temperature,
            top_p=self.top_p,
            top_k=self.top_k,
            chat=self.chat,
            engine=self.engine if self.engine.name == "vllm" else VLLM,
            served=self.served,
            prices=read_prices(self.price, policy),
            max_usd=self.max_cost,
            max_tokens=self.max_tokens,
            user=self.user,
            trained=Path(self.trained) if self.trained else None,
            out=out,
            policy_file=self.safety.policy,
        )

"""Specs: frozen data that says how to build the live parts of a run.

`EnvSpec`, `VerifierSpec`, `PolicySpec`, `GuardSpec` and `PoolSpec` can be pickled and written as
JSON, and the `build` of each makes the live object. `RunSpec` holds one of each: it is the
`specs.json` of a run folder, and what another process or machine needs to play the same episodes.
A spec names environment variables, never secrets, and keeps a copy and a hash of user files.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from functools import cached_property
from importlib import import_module
from pathlib import Path
from typing import Any, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from agentrl.calls import Guard
from agentrl.chat.settings import ChatSettings
from agentrl.chat.tokens import Chat
from agentrl.engines.base import VLLM, EngineSettings, Sampling
from agentrl.env import ToolEnv
from agentrl.errors import ConfigError
from agentrl.policies.base import Policy, Scripted, TokenPolicy, noop
from agentrl.policies.options import ServedOptions
from agentrl.policies.served import OPENAI_URL, Prices, ServedPolicy
from agentrl.records.files import write_json_atomic
from agentrl.registry import environment, factory, is_registered
from agentrl.safety.approval import Approver, open_approver
from agentrl.safety.canaries import Canaries
from agentrl.safety.guard import PolicyGuard
from agentrl.safety.policy import SafetyPolicy
from agentrl.sandboxes import Pool, open_pool
from agentrl.sandboxes.base import SandboxLimits
from agentrl.sandboxes.network import Allow
from agentrl.types import Json, LimitSettings
from agentrl.userfiles import UserFile
from agentrl.verifiers.base import Verifier
from agentrl.verifiers.process import TurnScorer, with_process_rewards
from agentrl.verifiers.shaping import shaped, side_effect_penalty

SPECS = "specs.json"
"""Name of the file in a run folder."""
POLICIES = "oracle, noop, hf:MODEL, vllm:MODEL or openai:MODEL@URL"
LOADED = ("hf", "vllm")
"""Kinds of policies whose model is loaded in this process."""
HIGHEST_PRICE = 2.0
"""Upper bound of the price of a side effect."""
_BARE_ADDRESS = re.compile(r"^localhost\b|:\d{2,5}(/|$)|/v1/?$")
_PYTHON_FILE = re.compile(r"(.+\.py):\w+")


class Spec(BaseModel):
    """Base class of specs: compared by their fields, picklable, and written as JSON."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    def to_json(self) -> dict[str, Json]:
        """The spec as JSON values; fields that have their default are left out.

        Raises:
            ConfigError: a setting cannot be written as JSON.
        """
        row = self.model_dump(mode="json", exclude_defaults=True, fallback=_refuse_value)
        return {str(name): value for name, value in row.items()}

    @classmethod
    def from_json(cls, row: Mapping[str, Json]) -> Self:
        """The spec of JSON values.

        Raises:
            ConfigError: a field is missing, unknown or has a wrong value.
        """
        try:
            # As JSON text: strict fields then accept a list where they hold a tuple.
            return cls.model_validate_json(json.dumps(row))
        except ValidationError as error:
            problem = error.errors(include_url=False)[0]
            field = ".".join(map(str, problem["loc"]))
            raise ConfigError(
                f"{cls.__name__}: {field}: {problem['msg'].lower()}", setting=field
            ) from None

    def __getstate__(self) -> dict[Any, Any]:
        # Cached live objects (classes, models, approvers) stay in the process that made them.
        state = super().__getstate__()
        fields = type(self).model_fields
        state["__dict__"] = {k: v for k, v in state["__dict__"].items() if k in fields}
        return state


def _refuse_value(value: object) -> Json:
    raise ConfigError(
        f"a setting is {value!r}, which cannot be written as JSON: use numbers, text, lists, tables"
    )


class VerifierSpec(Spec):
    """What is added to the verdict of an environment's own verifier."""

    process_rewards: dict[Literal["value", "progress"], str] = {}
    """Form of the reward -> folder of the process reward model that scores every turn."""
    side_effect_price: float | None = Field(default=None, ge=0, le=HIGHEST_PRICE)
    """Taken off the reward of an episode with a side effect; None: side effects cost nothing."""

    def build(self, verifier: Verifier) -> Verifier:
        """The given verifier with these additions.

        Raises:
            ConfigError: a model cannot be loaded.
        """
        price = self.side_effect_price
        if price is not None:
            verifier = shaped(verifier, side_effect_penalty(lambda: price, cap=HIGHEST_PRICE))
        return with_process_rewards(verifier, self.scorers) if self.scorers else verifier

    @cached_property
    def scorers(self) -> dict[str, TurnScorer]:
        """The scorers of single turns, loaded once per process."""
        if not self.process_rewards:
            return {}
        from agentrl.verifiers.models.process_reward import ProcessRewardModel

        return {
            form: ProcessRewardModel.load(folder).scorer(form)
            for form, folder in self.process_rewards.items()
        }


class EnvSpec(Spec):
    """An environment with its settings. Calling the spec builds a fresh instance.

    Use `EnvSpec.of`, which checks that the environment can be built and copies user files.
    """

    id: str = Field(min_length=1)
    """Id of `agentrl list`, or `path/to/file.py:Class`."""
    settings: dict[str, Any] = {}
    """Arguments of the constructor."""
    limits: LimitSettings = LimitSettings()
    """Limits that replace the environment's own."""
    verifier: VerifierSpec = VerifierSpec()
    """What is added to the environment's own verdict."""
    prefix: str = ""
    """In a run of several environments: what the ids of its tasks begin with, before a slash."""
    files: dict[str, UserFile] = {}
    """User files: `id` or the value of a setting -> copy of the file it names."""
    module: str = ""
    """Module that registers the environment when it is imported; empty for installed ones."""

    @classmethod
    def of(
        cls,
        id: str,
        settings: Mapping[str, Any] | None = None,
        *,
        limits: LimitSettings | None = None,
        verifier: VerifierSpec | None = None,
        prefix: str = "",
    ) -> EnvSpec:
        """The spec of an environment that can be built.

        Raises:
            ConfigError: the environment is unknown, a setting or a limit is wrong, or a user file
                is missing.
        """
        settings = dict(settings or {})
        factory(id, limits, **settings)
        return cls(
            id=id,
            settings=settings,
            limits=limits or LimitSettings(),
            verifier=verifier or VerifierSpec(),
            prefix=prefix,
            files=_user_files([id, *settings.values()]),
            module=environment(id).__module__ if is_registered(id) else "",
        )

    def __call__(self) -> ToolEnv:
        """A fresh instance of the environment."""
        return self.build()

    def build(self) -> ToolEnv:
        """A fresh instance of the environment.

        Raises:
            ConfigError: the environment is unknown here, or a user file has changed.
        """
        env = self._cls(**self._located_settings)
        if self.limits.given:
            env.limits = self.limits.apply(env.limits)
        if self.verifier != VerifierSpec():
            env.verifier = self.verifier.build(env.verifier)
        return env

    def refuse_copies(self) -> None:
        """Refuse to run code from a record: every user file must be on this machine, unchanged.

        Raises:
            ConfigError: one is not.
        """
        for name, file in self.files.items():
            if file.find_unchanged() is None:
                raise ConfigError(
                    f"{name} is not on this machine, and a record may not run its own code: name"
                    " the environment, or say --env recorded to run the recorded copy",
                    setting="env",
                )

    @cached_property
    def _cls(self) -> type[ToolEnv]:
        if self.module and not is_registered(self.id):
            import_module(self.module)
        return environment(_located(self.id, self.files))

    @cached_property
    def _located_settings(self) -> dict[str, Any]:
        return {
            name: _located(value, self.files) if isinstance(value, str) else value
            for name, value in self.settings.items()
        }


def _user_files(values: Sequence[Any]) -> dict[str, UserFile]:
    """Copies of the Python files that these values name as `file.py:Name`."""
    named = [value for value in values if isinstance(value, str) and _PYTHON_FILE.fullmatch(value)]
    return {value: UserFile.read(Path(value.rpartition(":")[0])) for value in named}


def _located(value: str, files: Mapping[str, UserFile]) -> str:
    """`file.py:Name` with the place of the file on this machine; any other value as it is."""
    if value not in files:
        return value
    return f"{files[value].locate()}:{value.rpartition(':')[2]}"


class PolicySpec(Spec):
    """Who acts: a policy by name, how it samples, and how its model is reached."""

    name: str = "oracle"
    """`oracle`, `noop`, `hf:MODEL`, `vllm:MODEL` or `openai:MODEL@URL`."""
    temperature: float = Field(default=1.0, ge=0, allow_inf_nan=False)
    top_p: float = Field(default=1.0, gt=0, le=1)
    top_k: int = Field(default=0, ge=0)
    chat: ChatSettings = ChatSettings()
    """How messages become the tokens of a loaded model."""
    engine: EngineSettings = VLLM
    """Memory and length of a `vllm:` policy."""
    served: ServedOptions = ServedOptions()
    """How the server of an `openai:` policy is asked."""
    prices: tuple[float, float] | None = None
    """US dollars per million prompt and completion tokens; None: not known."""
    key_variable: str = "OPENAI_API_KEY"
    """Environment variable with the key of an `openai:` policy."""

    @property
    def kind(self) -> str:
        """What stands before the colon of the name."""
        return self.name.partition(":")[0]

    @property
    def model(self) -> str:
        """What stands behind the colon of the name."""
        return self.name.partition(":")[2]

    def build(self, env: ToolEnv, log: Path | None = None) -> Policy:
        """The live policy, with its model loaded.

        Args:
            env: an instance of the environment it plays in.
            log: file for what a vLLM engine prints.

        Raises:
            ConfigError: unknown name, or a model that cannot be used.
            TemplateError: the model's chat template cannot carry exact tokens.
        """
        if self.name == "oracle":
            return Scripted("oracle", env.oracle_actions)
        if self.name == "noop":
            return noop()
        if self.kind in LOADED and self.model:
            return self._load(env.limits.turn_tokens, log)
        if self.kind == "openai":
            return self._connect()
        raise ConfigError(f"--policy {self.name!r} is unknown: use {POLICIES}", setting="policy")

    def open_chat(self) -> Chat:
        """How the model of an `hf:` or `vllm:` policy reads messages; no weights are loaded.

        Raises:
            ConfigError: a model that cannot be used.
            TemplateError: its chat template cannot carry exact tokens.
        """
        try:
            from agentrl.engines.factory import open_chat
        except ImportError as error:
            raise ConfigError(
                f"--policy {self.name} needs torch and transformers: pip install 'agentrl[train]'",
                setting="policy",
            ) from error
        return open_chat(self.model, self.chat)

    def _load(self, turn_tokens: int, log: Path | None) -> Policy:
        chat = self.open_chat()
        from agentrl.engines.factory import open_engine, open_vllm
        from agentrl.engines.loading import best_device, load_model

        if self.kind == "vllm":
            engine = open_vllm(self.model, chat, self.engine, log)
        else:
            engine = open_engine(load_model(self.model, best_device()), chat)
        sampling = Sampling(self.temperature, self.top_p, self.top_k, turn_tokens)
        return TokenPolicy(engine, chat, sampling, name=self.name)

    def _connect(self) -> Policy:
        model, at, url = self.model.rpartition("@")
        is_address = "://" in url or _BARE_ADDRESS.search(url)
        if not at or not is_address:  # no address, or the @ belongs to the model's own name
            model, url = self.model, OPENAI_URL
        shape: dict[str, Any] = {"top_p": self.top_p} if self.top_p < 1 else {}
        if self.top_k:
            shape["top_k"] = self.top_k
        return ServedPolicy(
            model,
            url,
            key_variable=self.key_variable,
            temperature=self.temperature,
            prices=Prices(*self.prices) if self.prices else None,
            options=self.served.model_copy(update=shape) if shape else self.served,
        )


class GuardSpec(Spec):
    """The safety policy around every tool call. Calling the spec builds the guard of one episode.

    Use `GuardSpec.of`, which checks that the policy can be used.
    """

    policy: SafetyPolicy
    deterministic: bool = False
    """Whether episodes must not wait for anybody, as in training."""

    @classmethod
    def of(cls, policy: SafetyPolicy, *, deterministic: bool = False) -> GuardSpec:
        """The spec of a policy whose approval and canaries can be used.

        Raises:
            ConfigError: they cannot, or a deterministic run would wait for a person or a server.
        """
        spec = cls(policy=policy, deterministic=deterministic)
        Canaries(policy.canaries)
        approver = spec.approver  # opened here, so that a wrong table is refused now
        if deterministic and not approver.deterministic:
            raise ConfigError(
                f"policy {policy.name}: approval.kind={policy.approval['kind']!r} is not for"
                " training, whose episodes must not wait for anybody: use kind='scripted'",
                setting="approval.kind",
            )
        return spec

    @cached_property
    def approver(self) -> Approver:
        """Who answers what a rule asks; shared by all episodes of the process."""
        return open_approver(self.policy.approval, f"policy {self.policy.name}")

    def __call__(self) -> Guard:
        """The guard of one episode."""
        return self.build()

    def build(self) -> Guard:
        """The guard of one episode."""
        return PolicyGuard(self.policy, self.approver)


class NetworkSpec(Spec):
    """Hosts that a sandbox may reach; the arguments of `agentrl.sandboxes.network.Allow`."""

    hosts: tuple[str, ...] = ()
    private: tuple[str, ...] = ()
    outside: str = "bridge"
    size_mb: int = 256
    total_s: float = 300.0

    @classmethod
    def of(cls, network: Allow | Sequence[str]) -> NetworkSpec | None:
        """The spec of an environment's `network`; None for no network."""
        if isinstance(network, Allow):
            return cls(
                hosts=network.hosts,
                private=network.private,
                outside=network.outside,
                size_mb=network.size_mb,
                total_s=network.total_s,
            )
        return cls(hosts=tuple(network)) if network else None

    def build(self) -> Allow:
        """The live permission."""
        return Allow(
            *self.hosts,
            private=self.private,
            outside=self.outside,
            size_mb=self.size_mb,
            total_s=self.total_s,
        )


class PoolSpec(Spec):
    """The sandboxes of a run. A pool lives on one machine, so each worker builds its own."""

    sandbox: str = "auto"
    """Backend: auto, docker, bubblewrap, process or trusted-process."""
    size: int | None = Field(default=None, ge=1)
    """Sandboxes of agents at the same time; None: as many as the machine carries."""
    limits: SandboxLimits = SandboxLimits()
    network: NetworkSpec | None = None
    """None: no network."""
    untrusted: bool = False
    """Whether the environment's own code is untrusted; then only a real boundary will do."""

    @classmethod
    def of(cls, env: ToolEnv, sandbox: str = "auto", size: int | None = None) -> PoolSpec:
        """The sandboxes that an environment asks for."""
        return cls(
            sandbox=sandbox,
            size=size,
            limits=env.sandbox_limits,
            network=NetworkSpec.of(env.network),
            untrusted=env.untrusted,
        )

    def build(self) -> Pool:
        """The pool; nothing starts before the first lease.

        Raises:
            ConfigError: the backend does not exist, cannot be used here, is no boundary although
                the environment is untrusted, or cannot restrict the network.
        """
        allow = self.network.build() if self.network else ()
        pool = open_pool(self.sandbox, self.size, self.limits, allow=allow)
        pool.check_trust(self.untrusted)
        return pool


class RunSpec(Spec):
    """All parts of a run; what `specs.json` of its folder holds."""

    envs: tuple[EnvSpec, ...] = Field(min_length=1)
    """One environment, or several with a `prefix` each."""
    policy: PolicySpec | None = None
    """Who acts; None where only this process has the policy."""
    pool: PoolSpec | None = None
    guard: GuardSpec | None = None
    user: PolicySpec | None = None
    """Who speaks for the user of a dialogue, where not the environment itself."""
    run: str = "run"
    """Name of the run, part of every episode's key."""
    seed: int = 0
    deterministic: bool = False

    @property
    def env(self) -> EnvSpec:
        """The only environment, or the first."""
        return self.envs[0]

    def env_of(self, task_id: str) -> EnvSpec:
        """The environment that a task belongs to, by the prefix of its id.

        Raises:
            ConfigError: no environment of the run has that prefix.
        """
        if len(self.envs) == 1 and not self.env.prefix:
            return self.env
        prefix = task_id.partition("/")[0]
        for env in self.envs:
            if env.prefix == prefix:
                return env
        raise ConfigError(f"task {task_id!r} belongs to no environment of this run")

    def write(self, folder: Path) -> None:
        """Write `specs.json`."""
        write_json_atomic(folder / SPECS, {"v": 1, **self.to_json()})

    @classmethod
    def read(cls, folder: Path) -> RunSpec | None:
        """Read `specs.json`; None for a run that an earlier version wrote.

        Raises:
            ConfigError: the file is damaged.
        """
        try:
            row = json.loads((folder / SPECS).read_bytes())
            version = row.pop("v")
        except FileNotFoundError:
            return None
        except (ValueError, AttributeError, KeyError) as error:
            raise ConfigError(
                f"{folder / SPECS} is damaged ({error}): restore it, or remove it and give --env"
            ) from error
        if version != 1:
            raise ConfigError(f"{folder / SPECS} has version {version}: upgrade agentrl")
        return cls.from_json(row)

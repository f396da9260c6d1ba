"""The data types that every part shares: frozen, and checked when they are built."""

from __future__ import annotations

import ast
import copy
import hashlib
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from enum import Enum
from typing import Annotated, Any, Literal, Self

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, model_validator

from agentrl.settings import STRICT, SettingError

Role = Literal["system", "user", "assistant", "tool"]
Effect = Literal["read", "write", "network", "irreversible"]
Json = Any


@dataclass(frozen=True, slots=True)
class ToolCall:
    """One call that the model asked for; `arguments` is a JSON object, not yet checked."""

    name: str
    arguments: Mapping[str, Json]
    id: str = ""


@dataclass(frozen=True, slots=True)
class BadCall:
    """Text meant as a tool call that cannot be read; `why` is a sentence for the agent."""

    text: str
    why: str


@dataclass(frozen=True, slots=True)
class Message:
    """One chat message. Tool results carry the name and the id of the call that they answer."""

    role: Role
    content: str
    tool_calls: tuple[ToolCall | BadCall, ...] = ()
    name: str = ""
    tool_call_id: str = ""
    reasoning: str = ""

    def __post_init__(self) -> None:
        if self.tool_calls and self.role != "assistant":
            raise ValueError(
                f"only an assistant message can hold tool calls, not role={self.role!r}"
            )

    @classmethod
    def system(cls, content: str) -> Self:
        """A system message."""
        return cls("system", content)

    @classmethod
    def user(cls, content: str) -> Self:
        """A user message."""
        return cls("user", content)

    @classmethod
    def assistant(cls, content: str, *tool_calls: ToolCall | BadCall) -> Self:
        """What the policy said, with the calls that were parsed from it.

        Raises:
            TypeError: the content is not text, or a call is not a ToolCall or a BadCall.
        """
        message = cls("assistant", content, tuple(tool_calls))
        message.check_types()
        return message

    def check_types(self) -> None:
        """Refuse content that is not text, and calls that are not calls.

        Raises:
            TypeError: naming what was given.
        """
        if not isinstance(self.content, str):
            raise TypeError(f"content of a message must be text, not {self.content!r}")
        for call in self.tool_calls:
            if not isinstance(call, ToolCall | BadCall):
                raise TypeError(
                    f"a tool call must be a ToolCall or a BadCall, not {call!r}; several calls are"
                    " separate arguments: Message.assistant(text, *calls)"
                )
            if isinstance(call, ToolCall) and not (
                isinstance(call.name, str) and isinstance(call.arguments, Mapping)
            ):
                raise TypeError(f"a tool call has a name and a table of arguments, not {call!r}")

    @classmethod
    def tool(cls, content: str, call: ToolCall | BadCall) -> Self:
        """The result of one tool call."""
        return cls(
            "tool", content, name=getattr(call, "name", ""), tool_call_id=getattr(call, "id", "")
        )


class Ending(Enum):
    """The kind of an ending: the task ended, a limit was met, or infrastructure failed."""

    TERMINATED = "terminated"
    TRUNCATED = "truncated"
    FAILED = "failed"


class EndReason(Enum):
    """Every ending has a name. Terminated and truncated episodes have a score; failed ones none.

    CONTENT_FILTER: the server of the model refused to go on; the episode is graded as it stands.
    REFUSED: the model itself refused, and its server says so; graded as well.
    AGENT_FAULT: the agent broke a part around it, as a witness without the agent showed; the
    episode has failed its task (see `agentrl.rollout.blame`).
    WALL_TIME is the task's own limit and is graded; TIMEOUT is that limit met in a deterministic
    run, where the clock must not decide a reward, so it counts as a failure of the machinery.
    """

    SUBMITTED = "submitted"
    ANSWERED = "answered"
    FORMAT_ERROR = "format_error"
    VIOLATION = "violation"
    CONTENT_FILTER = "content_filter"
    REFUSED = "refused"
    AGENT_FAULT = "agent_fault"
    MAX_TURNS = "max_turns"
    MAX_TOOL_CALLS = "max_tool_calls"
    MAX_TOKENS = "max_tokens"
    CONTEXT_LENGTH = "context_length"
    WALL_TIME = "wall_time"
    TIMEOUT = "timeout"
    SANDBOX_LOST = "sandbox_lost"
    ENGINE_ERROR = "engine_error"
    TOOL_FAULT = "tool_fault"
    VERIFIER_ERROR = "verifier_error"
    INTERNAL_ERROR = "internal_error"
    CANCELLED = "cancelled"

    @property
    def ending(self) -> Ending:
        """The kind of this ending."""
        return _ENDING[self]


_ENDING = {
    **dict.fromkeys(
        (
            EndReason.SUBMITTED,
            EndReason.ANSWERED,
            EndReason.FORMAT_ERROR,
            EndReason.VIOLATION,
            EndReason.CONTENT_FILTER,
            EndReason.REFUSED,
            EndReason.AGENT_FAULT,
        ),
        Ending.TERMINATED,
    ),
    **dict.fromkeys(
        (
            EndReason.MAX_TURNS,
            EndReason.MAX_TOOL_CALLS,
            EndReason.MAX_TOKENS,
            EndReason.CONTEXT_LENGTH,
            EndReason.WALL_TIME,
        ),
        Ending.TRUNCATED,
    ),
    **dict.fromkeys(
        (
            EndReason.TIMEOUT,
            EndReason.SANDBOX_LOST,
            EndReason.ENGINE_ERROR,
            EndReason.TOOL_FAULT,
            EndReason.VERIFIER_ERROR,
            EndReason.INTERNAL_ERROR,
            EndReason.CANCELLED,
        ),
        Ending.FAILED,
    ),
}


_ODD = frozenset(("", ".", ".."))  # an absolute path begins with an empty part


def relative_path(path: str) -> str:
    """Return `path` unchanged if it stays inside a work area.

    Raises:
        ValueError: the path is empty, absolute, has `..` or a NUL, or is not in its shortest form.
    """
    if "\0" in path or not _ODD.isdisjoint(path.split("/")):
        raise ValueError(f"path {path!r} must be relative, without '..' and in its shortest form")
    return path


RelativePath = Annotated[str, AfterValidator(relative_path)]


class _Frozen(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class SandboxNeeds(_Frozen):
    """What the sandbox of one task must have beyond what its environment asks for."""

    image: str = ""
    """Container image; empty for the environment's own."""
    memory_mb: int | None = Field(default=None, ge=1)
    disk_mb: int | None = Field(default=None, ge=1)
    cpus: float | None = Field(default=None, gt=0)
    needs: tuple[Literal["ptrace", "sysvipc"], ...] = ()
    """What its code does that sandboxes refuse unless asked."""


class TaskView(_Frozen):
    """What environments and tools see of a task: all but the hidden part and the oracle."""

    id: str = Field(min_length=1)
    instruction: str
    files: dict[RelativePath, str] = {}
    artifacts: tuple[RelativePath, ...] = ()
    threshold: float = Field(default=1.0, allow_inf_nan=False)
    seed: int = 0
    metadata: dict[str, Json] = {}
    sandbox: SandboxNeeds | None = None

    def view(self) -> TaskView:
        """A copy that shares nothing with this one, without hidden part and oracle."""
        return TaskView.model_construct(
            id=self.id,
            instruction=self.instruction,
            files=dict(self.files),
            artifacts=self.artifacts,
            threshold=self.threshold,
            seed=self.seed,
            metadata=copy.deepcopy(self.metadata),
            sandbox=self.sandbox,
        )


class Task(TaskView):
    """One task: an instruction, a start state, how it is judged, and a reference solution.

    `hidden` and `oracle` never enter the agent's sandbox, prompt, environment or logs; those get
    `view()`.
    """

    hidden: dict[str, Json] = {}
    oracle: dict[str, Json] = {}

    @model_validator(mode="before")
    @classmethod
    def _default_artifacts(cls, row: Any) -> Any:
        """`artifacts` defaults to the keys of `oracle.files`."""
        if isinstance(row, dict) and "artifacts" not in row:
            files = (
                (row.get("oracle") or {}).get("files")
                if isinstance(row.get("oracle"), dict)
                else None
            )
            if isinstance(files, dict):
                return {**row, "artifacts": tuple(files)}
        return row

    def fingerprint(self) -> str:
        """Hash of the whole row: two tasks with one fingerprint are the same task."""
        row = self.model_dump(mode="json")
        if row["sandbox"] is None:
            del row["sandbox"]  # a task that asks for nothing keeps the hash it always had
        canonical = json.dumps(row, sort_keys=True, ensure_ascii=False)
        return hashlib.sha256(canonical.encode()).hexdigest()[:16]


def leaves(value: Json) -> Iterator[Json]:
    """Every value in nested lists and dicts that is neither itself, keys left out."""
    if isinstance(value, dict):
        value = list(value.values())
    if isinstance(value, list | tuple):
        for item in value:
            yield from leaves(item)
    else:
        yield value


def literal(value: Json) -> Any:
    """Read a value of a task file, in which `{"py": "<literal>"}` is a Python literal.

    Raises:
        ValueError: the text of `py` is not a literal.
    """
    if isinstance(value, dict):
        if set(value) == {"py"} and isinstance(value["py"], str):
            try:
                return ast.literal_eval(value["py"])
            except (ValueError, SyntaxError, MemoryError, RecursionError) as error:
                raise ValueError(f"{value['py']!r} is not a Python literal") from error
        return {key: literal(item) for key, item in value.items()}
    if isinstance(value, list):
        return [literal(item) for item in value]
    return value


@dataclass(frozen=True, slots=True)
class Score:
    """A verdict; `value` is None exactly when infrastructure failed.

    Attributes:
        value: reward of the episode, finite; or None.
        parts: named terms, also those that only inform and have no weight in `value`.
        why: one sentence for people, with nothing hidden in it.
        turns: named process rewards, one per turn of the policy; `value` does not include them.
        unshaped: the value before shaping terms; None where there were none. It decides whether
            the episode passed, so that shaping changes no verdict.
    """

    value: float | None
    parts: Mapping[str, float] = field(default_factory=dict)
    why: str = ""
    turns: Mapping[str, tuple[float, ...]] = field(default_factory=dict)
    unshaped: float | None = None

    def __post_init__(self) -> None:
        if self.value is not None and not abs(self.value) < float("inf"):
            raise ValueError(
                f"a score must be finite, not {self.value}; use Score.failed(why) for a broken"
                " verifier"
            )
        if self.value is None and not self.why:
            raise ValueError("a score without value must say why")
        for name, rewards in self.turns.items():
            if not all(abs(reward) < float("inf") for reward in rewards):
                raise ValueError(f"process rewards must be finite, not {name}={rewards}")
        if self.unshaped is not None and (
            self.value is None or not abs(self.unshaped) < float("inf")
        ):
            raise ValueError(
                f"unshaped={self.unshaped} must be finite, and a score without value has none"
            )

    @property
    def verdict(self) -> float | None:
        """The value that decides whether the episode passed: without shaping."""
        return self.value if self.unshaped is None else self.unshaped

    @classmethod
    def failed(cls, why: str) -> Self:
        """No verdict: infrastructure failed."""
        return cls(None, {}, why)


@dataclass(frozen=True, slots=True)
class ToolSpec:
    """A tool as the model is told of it (name, description, JSON schema), and what it may change.

    Attributes:
        effect: what it may change in the world.
        shell: its parameter that is a shell command; empty for none.
        reversible: whether all that it changes is in the work area, so that a snapshot undoes it.
    """

    name: str
    description: str
    parameters: Mapping[str, Json]
    effect: Effect = "read"
    shell: str = ""
    reversible: bool = False

    def schema(self) -> dict[str, Json]:
        """The function-calling form that chat templates and served models take."""
        return {
            "type": "function",
            "function": {
                "name": self.name,
                "description": self.description,
                "parameters": dict(self.parameters),
            },
        }


@dataclass(frozen=True, slots=True)
class Limits:
    """When an episode is cut short.

    The n-th unreadable call (`bad_calls`) ends the episode as a format error; every other limit
    truncates it. Tokens are those that the policy sampled; the engine has its own context limit.
    """

    turns: int = 16
    tool_calls: int = 32
    bad_calls: int = 8
    wall_s: float = 300.0
    turn_tokens: int = 512
    episode_tokens: int = 4096
    tool_s: float = 30.0
    observation_chars: int = 8000

    def __post_init__(self) -> None:
        for name in self.__slots__:
            if not 0 < getattr(self, name) < float("inf"):
                raise ValueError(f"limit {name}={getattr(self, name)} must be positive and finite")


class LimitSettings(BaseModel):
    """Limits that a user sets; those left out stay as the environment has them."""

    model_config = STRICT

    turns: int | None = Field(default=None, ge=1)
    """Maximum number of turns in an episode."""
    tool_calls: int | None = Field(default=None, ge=1)
    """Maximum number of tool calls in an episode."""
    bad_calls: int | None = Field(default=None, ge=1)
    """The episode ends as a format error at this number of unreadable calls."""
    wall_s: float | None = Field(default=None, gt=0)
    """Maximum duration of an episode in seconds."""
    turn_tokens: int | None = Field(default=None, ge=1)
    """Maximum number of tokens that the policy samples in one turn."""
    episode_tokens: int | None = Field(default=None, ge=1)
    """Maximum number of tokens that the policy samples in an episode. If this is not set, it is
    raised to `turn_tokens` where that is larger."""
    tool_s: float | None = Field(default=None, gt=0)
    """Maximum duration of one tool call in seconds."""
    observation_chars: int | None = Field(default=None, ge=1)
    """Longer tool results are cut to this number of characters."""

    @model_validator(mode="after")
    def _turns_fit_into_the_episode(self) -> Self:
        if self.turn_tokens and self.episode_tokens and self.turn_tokens > self.episode_tokens:
            raise SettingError(
                f"must be at most episode_tokens={self.episode_tokens}: raise episode_tokens too",
                "turn_tokens",
            )
        return self

    @property
    def given(self) -> dict[str, int | float]:
        """The limits that are set, by name."""
        return self.model_dump(exclude_none=True)

    def apply(self, limits: Limits) -> Limits:
        """The limits of an environment with these set."""
        changed = replace(limits, **self.given)  # type: ignore[arg-type]
        if self.episode_tokens is None and changed.turn_tokens > changed.episode_tokens:
            changed = replace(changed, episode_tokens=changed.turn_tokens)
        return changed

    def override(self, other: LimitSettings) -> LimitSettings:
        """These limits, with those that `other` sets in their place."""
        return self.model_copy(update=other.given)

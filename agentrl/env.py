"""ToolEnv: what an environment author writes. `agentrl.runner` plays it."""

from __future__ import annotations

import functools
import inspect
import random
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import ClassVar

from agentrl.errors import ContractError, NoSandbox
from agentrl.safety.writes import WriteSet
from agentrl.sandboxes.base import Isolation, Sandbox, SandboxLimits, SandboxNeed
from agentrl.sandboxes.network import Allow
from agentrl.tools import Tool, tools_of
from agentrl.types import (
    Ending,
    EndReason,
    Json,
    Limits,
    Message,
    SandboxNeeds,
    Task,
    TaskView,
    ToolCall,
    ToolSpec,
)
from agentrl.verifiers.base import GRADE_S, Verifier


@dataclass(frozen=True, slots=True)
class Step:
    """The answer to one turn: messages, and the ending if this was the last turn."""

    messages: tuple[Message, ...] = ()
    end: EndReason | None = None

    def __post_init__(self) -> None:
        _refuse_failure(self.end)


class ToolEnv:
    """Base class of environments: tasks, tools, and a verifier of the finished episode.

    One instance plays one episode. It sees a TaskView, never the hidden part or the reference.

    Attributes:
        id: name with version, as in `bugfix-v0`.
        verifier: judges the finished episode.
        verifier_s: seconds after which a verifier without a verdict counts as broken.
        system: system message; empty for none.
        limits: when an episode is cut short.
        needs_sandbox: whether tools run code or touch files; then `self.sandbox` is there.
        sandbox_limits: memory, disk and processors of one sandbox.
        network: hosts that its sandboxes may reach by HTTP and HTTPS; only docker can allow any.
        isolation: "reset" for a sandbox that is verified after each use, "fresh" for a new one.
        needs: what its code does that sandboxes refuse ("ptrace", "sysvipc"); implies "fresh".
        untrusted: whether its own code is untrusted; then only a real boundary will do.
        endless: whether its splits never end.
        screened: whether a task is played only if its reference passes and doing nothing fails.
        depends_on: what scores depend on besides the settings, by name, such as the version of a
            served model; an evaluation goes on only where that is the same.
        one_split: whether "train" and "test" are the same tasks on purpose; for evaluation only.
        artifacts: files that leave the sandbox, for tasks that name none themselves.
        writes: what an episode may change; anything else that differs at its end is a side effect.
            None: nobody measures that. `setup` may set it, task by task.
        task: the task of the episode; set before `setup` runs.
        rng: the episode's random numbers; equal seeds give equal numbers.
        end_reason: how `finish` ended the episode; None before that.
    """

    id: ClassVar[str] = ""
    verifier: Verifier
    verifier_s: float = GRADE_S
    system: str = ""
    limits: Limits = Limits()
    needs_sandbox: bool = False
    sandbox_limits: SandboxLimits = SandboxLimits()
    network: Allow | tuple[str, ...] = ()
    isolation: Isolation = "reset"
    needs: tuple[SandboxNeed, ...] = ()
    untrusted: bool = False
    endless: bool = False
    screened: bool = False
    depends_on: Mapping[str, str] = MappingProxyType({})
    one_split: bool = False
    artifacts: tuple[str, ...] = ()
    writes: WriteSet | None = None

    task: TaskView
    rng: random.Random
    end_reason: EndReason | None = None
    _sandbox: Sandbox | None = None
    _tools: Mapping[str, Tool] | None = None
    _added: tuple[Tool, ...] = ()

    def __init_subclass__(cls) -> None:
        """Keep a plain function as verifier a function; give tasks the artifacts of their class."""
        super().__init_subclass__()
        if inspect.isfunction(cls.__dict__.get("verifier")):
            cls.verifier = staticmethod(cls.__dict__["verifier"])
        for name in ("setup", "close", "on_text"):
            own = cls.__dict__.get(name)
            if inspect.isfunction(own) and not inspect.iscoroutinefunction(own):
                raise ContractError(f"{cls.__name__}.{name} is awaited: write async def {name}(…)")
        if inspect.isfunction(cls.__dict__.get("tasks")):
            cls.tasks = _with_artifacts(cls.__dict__["tasks"])  # type: ignore[method-assign]

    def tasks(self, split: str, seed: int) -> Iterator[Task]:
        """Yield the tasks of "train" or "test" in an order that the seed fixes."""
        raise ContractError(f"{type(self).__name__} does not define tasks(split, seed)")

    def prompt(self) -> list[Message]:
        """The opening messages of the current task."""
        opening = [Message.system(self.system)] if self.system else []
        return [*opening, Message.user(self.task.instruction)]

    async def setup(self) -> None:
        """Prepare the start state; the task's files are in the sandbox already."""

    def state(self) -> Mapping[str, Json]:
        """The state of the services that it simulates, as plain JSON; {} where it has none.

        Read after `setup` and at the end of an episode, where `writes` says what may differ.
        """
        return {}

    async def on_text(self, message: Message) -> Step:
        """Answer a turn without tool calls; by default it is the final answer."""
        return Step(end=EndReason.ANSWERED)

    async def close(self) -> None:
        """Release what `setup` opened; called once, however the episode ended."""

    def oracle_actions(self, task: Task) -> Iterable[Message]:
        """Turns that solve the task; by default the calls and the answer of `task.oracle`.

        `oracle["calls"]` is a list of {"name", "arguments"}, `oracle["answer"]` the last answer.
        """
        for call in task.oracle.get("calls", ()):
            yield Message.assistant("", ToolCall(call["name"], call["arguments"]))
        if "answer" in task.oracle:
            yield Message.assistant(str(task.oracle["answer"]))

    def finish(self, reason: EndReason = EndReason.SUBMITTED) -> None:
        """End the episode after the current tool call.

        Raises:
            ContractError: the reason is one that only the library may give.
        """
        _refuse_failure(reason)
        self.end_reason = reason

    def bound_tools(self) -> Mapping[str, Tool]:
        """The tools of this instance by name: those of its class and those that were added.

        Override it for tools that are known only at run time. It is read before every call.
        """
        if self._tools is None:
            own = {name: entry.bind(self) for name, entry in tools_of(type(self)).items()}
            self._tools = MappingProxyType(own | {tool.spec.name: tool for tool in self._added})
        return self._tools

    def add_tool(self, tool: Tool) -> None:
        """Offer another tool in this episode, for example one found on a tool server in `setup`.

        Raises:
            ContractError: the environment has a tool of that name.
        """
        if tool.spec.name in self.bound_tools():
            raise ContractError(f"{self.id} has a tool {tool.spec.name!r} already: rename one")
        self._added = (*self._added, tool)
        self._tools = None

    @property
    def tools(self) -> tuple[ToolSpec, ...]:
        """What the model is told of the tools."""
        return tuple(tool.spec for tool in self.bound_tools().values())

    def sandbox_needs(self, task: TaskView) -> SandboxNeeds | None:
        """What the sandbox of this task must have; by default what the task itself says."""
        return task.sandbox

    @property
    def sandbox(self) -> Sandbox:
        """The episode's sandbox; a NoSandbox error without `needs_sandbox = True`."""
        if self._sandbox is None:
            raise NoSandbox(f"{type(self).__name__} has no sandbox: set needs_sandbox = True")
        return self._sandbox

    @sandbox.setter
    def sandbox(self, sandbox: Sandbox | None) -> None:
        """Lend a sandbox, or take it away; for the runner."""
        self._sandbox = sandbox


def _refuse_failure(end: EndReason | None) -> None:
    if end is not None and end.ending is Ending.FAILED:
        raise ContractError(
            f"an environment cannot end an episode as {end.value}: raise an InfraError instead"
        )


def _with_artifacts(
    tasks: Callable[[ToolEnv, str, int], Iterator[Task]],
) -> Callable[..., Iterator[Task]]:
    """Add the class's artifacts to tasks that name none, as verifiers see only the task."""

    @functools.wraps(tasks)
    def declared(self: ToolEnv, split: str, seed: int) -> Iterator[Task]:
        for task in tasks(self, split, seed):
            bare = self.artifacts and not task.artifacts
            yield task.model_copy(update={"artifacts": self.artifacts}) if bare else task

    return declared

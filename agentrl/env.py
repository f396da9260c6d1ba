"""ToolEnv: what an environment author writes. One instance plays one episode at a time.

Authors write messages and tools, never tokens; the instance sees a TaskView, never the hidden part
or the oracle.
"""

from __future__ import annotations

import functools
import hashlib
import inspect
import json
import random
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, nullcontext
from dataclasses import dataclass, replace
from typing import ClassVar

from agentrl.errors import ContractError
from agentrl.sandboxes import Allow, Pool, open_pool
from agentrl.sandboxes.base import Isolation, Sandbox, SandboxLimits, SandboxNeed, SandboxPool
from agentrl.tools import Tool, ToolResult, call_tool, clip_text, tools_of
from agentrl.trajectory import Counts
from agentrl.types import Ending, EndReason, Limits, Message, Task, TaskView, ToolCall, ToolSpec
from agentrl.verifiers.base import GRADE_S, Verifier


@dataclass(frozen=True, slots=True)
class Step:
    """What the world answers to one turn: messages, and the ending if this was the last turn."""

    messages: tuple[Message, ...] = ()
    end: EndReason | None = None


def _with_artifacts(
    tasks: Callable[[ToolEnv, str, int], Iterator[Task]],
) -> Callable[..., Iterator[Task]]:
    """So that verifiers, admission and audit see what leaves the sandbox, wherever it was declared."""

    @functools.wraps(tasks)
    def declared(self: ToolEnv, split: str, seed: int) -> Iterator[Task]:
        for task in tasks(self, split, seed):
            bare = self.artifacts and not task.artifacts
            yield task.model_copy(update={"artifacts": self.artifacts}) if bare else task

    return declared


class ToolEnv:
    """Base class of environments.

    Attributes that a subclass sets:
        id: name with version, as in `bugfix-v0`.
        verifier: judges the finished episode.
        verifier_s: seconds after which a verifier without a verdict counts as broken.
        system: system message, if any.
        limits: when an episode is cut short.
        needs_sandbox: whether tools run code or touch files (then `self.sandbox` is there).
        sandbox_limits: memory, disk, processors and the like of one sandbox.
        network: hosts that its sandboxes may reach over HTTP and HTTPS; none unless said, and then
            on docker alone.
        isolation: "reset" lends a sandbox that others had, after a verified reset; "fresh" one that
            nobody had.
        needs: what its code has to do that sandboxes refuse, of "ptrace" and "sysvipc"; such a
            sandbox is a fresh one.
        untrusted: whether its own code is; then no sandbox without a boundary is taken, unless the
            pool is told to.
        endless: whether its splits never end.
        screened: whether a task is played only if its reference passes and doing nothing does not;
            tasks with hidden tests are screened in any case.
        one_split: whether "train" and "test" are the same tasks, on purpose; good for evaluation
            alone.
        artifacts: files that leave the sandbox, for tasks that name none themselves.

    What a subclass defines: `tasks`; methods marked with `@tool`; and, if wanted, `prompt`,
        `setup`, `on_text`,
    `oracle_actions`.
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
    one_split: bool = False
    artifacts: tuple[str, ...] = ()

    task: TaskView
    rng: random.Random

    def __init_subclass__(cls) -> None:
        """A verifier that is a plain function stays one, and no method; tasks have the artifacts of
        their class.
        """
        super().__init_subclass__()
        if inspect.isfunction(cls.__dict__.get("verifier")):
            cls.verifier = staticmethod(cls.__dict__["verifier"])
        if inspect.isfunction(cls.__dict__.get("tasks")):
            cls.tasks = _with_artifacts(cls.__dict__["tasks"])  # type: ignore[method-assign]

    def tasks(self, split: str, seed: int) -> Iterator[Task]:
        """Yield the tasks of a split ("train" or "test") in an order that `seed` fixes; it may
        never end.
        """
        raise ContractError(f"{type(self).__name__} does not define tasks(split, seed)")

    def prompt(self) -> list[Message]:
        """The opening messages of the current task."""
        opening = [Message.system(self.system)] if self.system else []
        return [*opening, Message.user(self.task.instruction)]

    async def setup(self) -> None:
        """Prepare the start state, after the task's files are in the sandbox. Use `self.rng` for
        chance.
        """

    async def on_text(self, message: Message) -> Step:
        """Answer a turn without tool calls; by default it is the final answer."""
        return Step(end=EndReason.ANSWERED)

    def oracle_actions(self, task: Task) -> Iterable[Message]:
        """Turns that solve the task; by default `oracle.calls`, a list of {"name", "arguments"}, or
        `oracle.answer`.
        """
        for call in task.oracle.get("calls", ()):
            yield Message.assistant("", ToolCall(call["name"], call["arguments"]))
        if "answer" in task.oracle:
            yield Message.assistant(str(task.oracle["answer"]))

    # What follows is the engine room: environments call `finish`, everything else is for the
    # rollout.

    @property
    def sandbox(self) -> Sandbox:
        """The episode's sandbox.

        Raises:
            ContractError: the environment did not ask for one with `needs_sandbox = True`.
        """
        if self._sandbox is None:
            raise ContractError(
                f"{self.id or type(self).__name__} has no sandbox: set needs_sandbox = True"
            )
        return self._sandbox

    @property
    def tools(self) -> tuple[ToolSpec, ...]:
        """What the model is told of the tools."""
        return tuple(entry.spec for entry in tools_of(type(self)).values())

    def finish(self, reason: EndReason = EndReason.SUBMITTED) -> None:
        """End the episode after the current tool call.

        Raises:
            ContractError: the reason names a failure of the machinery, which only the machinery can
                find.
        """
        self._end = self._checked(reason)

    def open_pool(self, sandbox: str = "auto", size: int | None = None) -> Pool:
        """Sandboxes of the named backend with the limits and the network of this environment;
        nothing starts yet.

        Raises:
            ConfigError: the backend does not exist or cannot be used here, is no boundary although
                this environment is untrusted, or cannot keep agents to the hosts of `network`.
        """
        pool = open_pool(sandbox, size, self.sandbox_limits, allow=self.network)
        pool.check_trust(self.untrusted)
        return pool

    def borrow(self, pool: SandboxPool | None) -> AbstractAsyncContextManager[Sandbox | None]:
        """A sandbox of the kind that this environment asks for, for an `async with` block; None
        where it needs none.
        """
        if not self.needs_sandbox or pool is None:
            return nullcontext()
        return pool.lease(
            "agent", isolation=self.isolation, needs=self.needs, untrusted=self.untrusted
        )

    async def reset(
        self, task: TaskView, *, seed: int = 0, sandbox: Sandbox | None = None
    ) -> tuple[Message, ...]:
        """Start an episode and return its opening messages. Equal task and seed give an equal start
        state.

        Raises:
            ContractError: the environment needs a sandbox and got none.
        """
        if self.needs_sandbox and sandbox is None:
            raise ContractError(
                f"{self.id} needs a sandbox: choose one with sandbox='bubblewrap', 'docker' or"
                " 'process'"
            )
        self.task = task.view()
        self.rng = random.Random(seed)
        self._sandbox, self._end, self._turns = sandbox, None, 0
        self._outcomes: Counter[str] = Counter()
        self._by_tool: Counter[str] = Counter()
        self._started = time.monotonic()
        self._bound: dict[str, Tool] = {
            name: entry.bind(self) for name, entry in tools_of(type(self)).items()
        }
        if sandbox is not None and task.files:
            await sandbox.put({path: text.encode() for path, text in task.files.items()})
        await self.setup()
        opening = tuple(self.prompt())
        self.start = await self._fingerprint(opening)
        return opening

    async def step(self, action: Message) -> Step:
        """Play one assistant turn: run its calls in order, one observation each.

        Raises:
            InfraError: the sandbox or another part below a tool is gone.
            ContractError: `on_text` answers nothing and goes on, or ends the episode as a failure
                of the machinery.
        """
        self._turns += 1
        if not action.tool_calls:
            return self._limited(await self._answer(action))
        observations: list[Message] = []
        for call in action.tool_calls:
            if self._outcomes.total() >= self.limits.tool_calls:
                return Step(tuple(observations), EndReason.MAX_TOOL_CALLS)
            result = await call_tool(self._bound, call, self.limits.tool_s)
            self._count(call.name if isinstance(call, ToolCall) else "", result)
            observations.append(
                Message.tool(clip_text(result.text, self.limits.observation_chars), call)
            )
            if self._end is None and self._outcomes["bad_call"] >= self.limits.bad_calls:
                self._end = EndReason.FORMAT_ERROR
            if self._end is not None:
                break
        return self._limited(Step(tuple(observations), self._end))

    async def _answer(self, action: Message) -> Step:
        step = await self.on_text(action)
        end = self._checked(step.end or self._end)
        if end is None and not step.messages:
            raise ContractError(
                f"{self.id}.on_text gave no message and no end: the policy would speak to nobody"
            )
        return replace(step, end=end)

    async def collect(self) -> dict[str, bytes]:
        """End all processes of the sandbox and copy the declared artifacts out."""
        names = self.task.artifacts or self.artifacts
        if self._sandbox is None or not names:
            return {}
        await self._sandbox.kill_all()
        return await self._sandbox.get(names)

    def counts(self) -> Counts:
        """What happened so far in this episode (tokens are the policy's to count); all zero before
        `reset`.
        """
        if not self._started:
            return Counts()
        errors = self._outcomes.total() - self._outcomes["ok"]
        return Counts(
            turns=self._turns,
            tool_calls=self._outcomes.total(),
            tool_errors=errors,
            bad_calls=self._outcomes["bad_call"],
            wall_s=time.monotonic() - self._started,
            by_tool=dict(self._by_tool),
        )

    async def close(self) -> None:
        """Let go of the episode's sandbox; safe to call twice."""
        self._sandbox = None

    def _count(self, name: str, result: ToolResult) -> None:
        self._outcomes[result.error or "ok"] += 1
        if result.error not in ("bad_call", "unknown_tool"):
            self._by_tool[name] += 1

    def _limited(self, step: Step) -> Step:
        if step.end is None and self._turns >= self.limits.turns:
            return replace(step, end=EndReason.MAX_TURNS)
        return step

    async def _fingerprint(self, opening: Sequence[Message]) -> str:
        """Hash of everything an episode starts from: opening, tools, task, and the sandbox's files."""
        files = await self._sandbox.manifest() if self._sandbox else ()
        state: Mapping[str, object] = {
            "env": self.id,
            "task": self.task.id,
            "opening": [(message.role, message.content) for message in opening],
            "tools": [spec.schema() for spec in self.tools],
            "files": [(info.path, info.kind, info.sha256) for info in files],
        }
        return hashlib.sha256(json.dumps(state, sort_keys=True).encode()).hexdigest()[:16]

    def _checked(self, end: EndReason | None) -> EndReason | None:
        if end is not None and end.ending is Ending.FAILED:
            raise ContractError(
                f"{self.id} ends an episode as {end.value}: raise an InfraError where machinery"
                " fails"
            )
        return end

    _sandbox: Sandbox | None = None
    _end: EndReason | None = None
    _turns: int = 0
    _started: float = 0.0
    start: str = ""

"""Runner: plays a ToolEnv for one episode, inside its limits and its sandbox.

The environment's author writes `ToolEnv`; `agentrl.rollout.play` and `agentrl.gym` drive it
through this class.
"""

from __future__ import annotations

import hashlib
import json
import random
import time
from collections import Counter
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager, nullcontext
from dataclasses import replace

from agentrl.calls import CallContext, Guard, ToolResult
from agentrl.env import Step, ToolEnv
from agentrl.errors import ContractError, TaskError, ToolFault, boundary
from agentrl.safety.ledger import Before, leaves_of, side_effects
from agentrl.sandboxes import Pool, open_pool
from agentrl.sandboxes.base import FileInfo, Sandbox, SandboxPool
from agentrl.tools import check_call, clip_text
from agentrl.trajectory import CallEvent, Counts
from agentrl.types import BadCall, EndReason, Message, SandboxNeeds, TaskView, ToolCall
from agentrl.waits import waiting


def pool_for(env: ToolEnv, sandbox: str = "auto", size: int | None = None) -> Pool:
    """Sandboxes of a named backend as the environment asks for them; nothing starts yet.

    Raises:
        ConfigError: the backend does not exist, cannot be used here, is no boundary although the
            environment is untrusted, or cannot restrict the network to `env.network`.
    """
    pool = open_pool(sandbox, size, env.sandbox_limits, allow=env.network)
    pool.check_trust(env.untrusted)
    return pool


def borrow(
    env: ToolEnv, pool: SandboxPool | None, task: TaskView | None = None
) -> AbstractAsyncContextManager[Sandbox | None]:
    """A sandbox for one episode, for an `async with`; None if the environment needs none.

    Raises:
        TaskError: the task needs a sandbox that the pool cannot give.
    """
    if not env.needs_sandbox or pool is None:
        return nullcontext()
    own = env.sandbox_needs(task) if task is not None else None
    needs = dict.fromkeys((*env.needs, *(own.needs if own else ())))
    if own is not None:
        _refuse_needs(own, task, pool)
    return pool.lease("agent", isolation=env.isolation, needs=needs, untrusted=env.untrusted)


def _refuse_needs(own: SandboxNeeds, task: TaskView | None, pool: SandboxPool) -> None:
    """Refuse what a pool of equal sandboxes cannot give: images and limits of single tasks."""
    for name in ("image", "memory_mb", "disk_mb", "cpus"):
        value = getattr(own, name)
        offered = getattr(getattr(pool, "limits", None), name, None)
        if value and not (isinstance(offered, int | float) and offered >= value):
            raise TaskError(
                f"task {task.id if task else ''}: sandbox.{name}={value} is more than the"
                f" sandboxes of this run have ({offered or 'no choice'})",
                setting=f"sandbox.{name}",
            )


@asynccontextmanager
async def closing(runner: Runner) -> AsyncIterator[None]:
    """Close the environment at the end of the block, while its sandbox is still there.

    Raises:
        ToolFault: its `close` raised.
    """
    try:
        yield
    finally:
        async with boundary(ToolFault, f"{runner.env.id}: close"):
            await runner.close()


class Runner:
    """One environment instance in one episode: reset, turns, artifacts, counts, close.

    Args:
        env: a fresh instance.

    Attributes:
        start: fingerprint of the start state; empty before `reset`.
        events: what the guard decided about each call so far.
    """

    def __init__(self, env: ToolEnv) -> None:
        self.env = env
        self.start = ""
        self.events: list[CallEvent] = []
        self._before: Before | None = None
        self._guard: Guard | None = None
        self._sandbox: Sandbox | None = None
        self._turns = 0
        self._outcomes: Counter[str] = Counter()
        self._by_tool: Counter[str] = Counter()
        self._started: float | None = None
        self._open = False

    async def reset(
        self,
        task: TaskView,
        *,
        seed: int = 0,
        sandbox: Sandbox | None = None,
        guard: Guard | None = None,
    ) -> tuple[Message, ...]:
        """Start the episode and return its opening; equal task and seed give an equal start.

        Args:
            task: what is played.
            seed: of `env.rng`.
            sandbox: borrowed for this episode; see `borrow`.
            guard: asked before each tool call and told after it; None for no guard.

        Raises:
            ContractError: the environment needs a sandbox and got none.
        """
        env = self.env
        if env.needs_sandbox and sandbox is None:
            raise ContractError(
                f"{env.id} needs a sandbox: choose one with sandbox='bubblewrap', 'docker' or"
                " 'process'"
            )
        self._open, self._started, self._guard = True, time.monotonic(), guard
        env.task, env.rng, env.end_reason = task.view(), random.Random(seed), None
        env.sandbox = self._sandbox = sandbox
        if sandbox is not None and task.files:
            await sandbox.put({path: text.encode() for path, text in task.files.items()})
        await env.setup()
        opening = tuple(env.prompt())
        if guard is not None:
            opening = await guard.start(opening, sandbox, seed)
        measured = env.writes is not None
        files = await sandbox.manifest(everywhere=measured) if sandbox else []
        self.start = _fingerprint(env, opening, files)
        self._before = Before(files, leaves_of(env.state())) if measured else None
        return opening

    async def step(self, message: Message) -> Step:
        """Play one assistant turn: run its calls in order, one observation each.

        Raises:
            InfraError: the sandbox or another part below a tool is gone.
            ContractError: `on_text` gives neither a message nor an ending.
        """
        self._turns += 1
        step = await (self._call_all(message) if message.tool_calls else self._answer(message))
        if step.end is None and self._turns >= self.env.limits.turns:
            return replace(step, end=EndReason.MAX_TURNS)
        return step

    async def side_effects(self) -> dict[str, str] | None:
        """What was changed and was not to be -> how; None where the environment names no `writes`.

        It ends all processes of the sandbox, so that nothing changes afterwards.

        Raises:
            ContractError: `writes` was set after `setup`, or the state is not plain JSON.
        """
        writes = self.env.writes
        if writes is None:
            return None
        if self._before is None:
            raise ContractError(f"{self.env.id}: set writes in the class or in setup, not later")
        found = await side_effects(self._before, self.env.state(), writes, self._sandbox)
        ours = set(self._guard.removed()) if self._guard else set()
        return {at: how for at, how in found.items() if how != "deleted" or at not in ours}

    def found(self, messages: Sequence[Message], files: Mapping[str, bytes]) -> dict[str, str]:
        """Side effects that the guard saw, as what it planted in what the agent said."""
        return self._guard.found(messages, files) if self._guard else {}

    async def collect(self) -> dict[str, bytes]:
        """End all processes of the sandbox and copy the declared artifacts out."""
        names = self.env.task.artifacts or self.env.artifacts
        if self._sandbox is None or not names:
            return {}
        await self._sandbox.kill_all()
        return await self._sandbox.get(names)

    def counts(self) -> Counts:
        """What happened so far, tokens left out; all zero before `reset`."""
        if self._started is None:
            return Counts()
        return Counts(
            turns=self._turns,
            tool_calls=self._outcomes.total(),
            tool_errors=self._outcomes.total() - self._outcomes["ok"],
            bad_calls=self._outcomes["bad_call"],
            denied=self._outcomes["denied"],
            wall_s=time.monotonic() - self._started,
            by_tool=dict(self._by_tool),
        )

    async def close(self) -> None:
        """Let the environment release what it holds; safe to call twice."""
        if not self._open:
            return
        self._open = False
        try:
            await self.env.close()
        finally:
            self.env.sandbox = self._sandbox = None

    async def _answer(self, message: Message) -> Step:
        with waiting("the environment's answer"):
            step = await self.env.on_text(message)
        end = step.end or self.env.end_reason
        if end is None and not step.messages:
            raise ContractError(
                f"{self.env.id}.on_text returned no message and no ending: give one of them"
            )
        return replace(step, end=end)

    async def _call_all(self, message: Message) -> Step:
        env, limits, observations = self.env, self.env.limits, list[Message]()
        for call in message.tool_calls:
            if self._outcomes.total() >= limits.tool_calls:
                return Step(tuple(observations), EndReason.MAX_TOOL_CALLS)
            result = await self._call(call)
            self._count(call, result)
            text = clip_text(result.text, limits.observation_chars)
            observations.append(Message.tool(text, call))
            if env.end_reason is None and self._outcomes["bad_call"] >= limits.bad_calls:
                env.end_reason = EndReason.FORMAT_ERROR
            if env.end_reason is not None:
                break
        return Step(tuple(observations), env.end_reason)

    async def _call(self, call: ToolCall | BadCall) -> ToolResult:
        checked = check_call(self.env.bound_tools(), call)
        if isinstance(checked, ToolResult):
            return checked
        timeout_s = self.env.limits.tool_s
        if self._guard is None:
            return await checked.run(timeout_s)
        context = CallContext(
            self.env.id, self.env.task, self._turns, self._outcomes.total() + 1, self._sandbox
        )
        spec = checked.tool.spec
        decision = await self._guard.before(checked.call, spec, context)
        result = decision.result
        if result is None:
            result = await checked.run(timeout_s)
            if changed := await self._guard.after(checked.call, result, context):
                decision, result = changed, changed.result or result
        self.events.append(decision.event(checked.call, spec, context))
        if decision.ends and self.env.end_reason is None:
            self.env.end_reason = EndReason.VIOLATION
        return result

    def _count(self, call: ToolCall | BadCall, result: ToolResult) -> None:
        self._outcomes[result.error or "ok"] += 1
        if isinstance(call, ToolCall) and result.error != "unknown_tool":
            self._by_tool[call.name] += 1


def _fingerprint(env: ToolEnv, opening: tuple[Message, ...], files: Sequence[FileInfo]) -> str:
    """Hash of what an episode starts from: opening, tools, task, and the work area's files."""
    state: Mapping[str, object] = {
        "env": env.id,
        "task": env.task.id,
        "opening": [(message.role, message.content) for message in opening],
        "tools": [spec.schema() for spec in env.tools],
        "files": [(info.path, info.kind, info.sha256) for info in files if info.is_inside],
    }
    return hashlib.sha256(json.dumps(state, sort_keys=True).encode()).hexdigest()[:16]

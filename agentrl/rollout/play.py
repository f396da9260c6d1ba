"""play(setting, task, key) -> Episode: one episode from reset to score."""

from __future__ import annotations

import asyncio
import hashlib
import traceback
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, nullcontext
from dataclasses import dataclass, field, replace
from typing import TypeVar

from agentrl.aio import is_cancelled
from agentrl.calls import Guard
from agentrl.env import ToolEnv
from agentrl.errors import (
    EngineError,
    InfraError,
    SandboxLost,
    ToolFault,
    UserError,
    VerifierError,
    boundary,
)
from agentrl.policies.base import Player, Policy, usage_of
from agentrl.runner import Runner, borrow
from agentrl.sandboxes.base import Sandbox, SandboxPool
from agentrl.trajectory import Episode, EpisodeKey
from agentrl.types import Ending, EndReason, Message, Score, Task
from agentrl.verifiers.base import Submission, grade

Result = TypeVar("Result")

_REASONS: dict[type[InfraError], EndReason] = {
    SandboxLost: EndReason.SANDBOX_LOST,
    EngineError: EndReason.ENGINE_ERROR,
    ToolFault: EndReason.TOOL_FAULT,
    VerifierError: EndReason.VERIFIER_ERROR,
}


@dataclass(frozen=True)
class Setting:
    """What episodes of a run have in common.

    Attributes:
        make: builds a fresh environment instance.
        pool: lends sandboxes; None if neither the environment nor its verifier needs one.
        run: name of the run, part of every episode's key.
        seed: of the run; every other seed is derived from it.
        deterministic: the clock must decide no reward, so an episode that meets its wall limit
            counts as failed by infrastructure.
        guard: builds the guard of one episode's tool calls; None for none.
    """

    make: Callable[[], ToolEnv]
    policy: Policy
    pool: SandboxPool | None = None
    run: str = "run"
    seed: int = 0
    deterministic: bool = False
    guard: Callable[[], Guard] | None = None


@dataclass
class _Progress:
    """The episode so far; it survives whatever interrupts the episode."""

    env: ToolEnv
    history: list[Message] = field(default_factory=list)
    artifacts: dict[str, bytes] = field(default_factory=dict)
    player: Player | None = None
    opening: int = 0

    def __post_init__(self) -> None:
        self.runner = Runner(self.env)


async def play(setting: Setting, task: Task, key: EpisodeKey) -> Episode:
    """Play one episode from reset to score; a failure is recorded by name, without a score.

    Raises:
        UserError: the environment or the task is wrong for every episode alike.
    """
    env = setting.make()
    progress = _Progress(env)
    try:
        end = await _act(setting, task, key, progress)
        if end is EndReason.WALL_TIME and setting.deterministic:
            end = EndReason.TIMEOUT
            score = Score.failed(
                f"the wall limit of {env.limits.wall_s:g} s was met in a deterministic run"
            )
        else:
            score = await _judge(setting, task, key, progress, end)
    except UserError:
        raise
    except InfraError as error:
        end, score = (
            _REASONS.get(type(error), EndReason.INTERNAL_ERROR),
            Score.failed(str(error) or repr(error)),
        )
    except (Exception, SystemExit, asyncio.CancelledError) as error:
        if isinstance(error, asyncio.CancelledError) and is_cancelled():
            raise
        end = EndReason.INTERNAL_ERROR
        score = Score.failed("".join(traceback.format_exception(error)))
    if score.value is None and end.ending is not Ending.FAILED:
        end = EndReason.VERIFIER_ERROR
    return _episode(progress, task, key, end, score)


async def _act(setting: Setting, task: Task, key: EpisodeKey, progress: _Progress) -> EndReason:
    """Play until the conversation ends, and copy the artifacts out of the sandbox."""
    env = progress.env
    seed = derive_seed(setting.seed, key.task, key.step, key.sample)
    # Before anything is awaited: a turn-synchronous engine must know of all episodes at once.
    with setting.policy.player(task, env.limits, seed) as progress.player:
        async with borrow(env, setting.pool) as sandbox, _closing(progress.runner):
            clock = asyncio.timeout(env.limits.wall_s)
            try:
                async with clock:
                    end = await _converse(setting, task, key, progress, sandbox, clock)
            except TimeoutError:
                if not clock.expired():
                    raise
                end = EndReason.WALL_TIME
            async with boundary(ToolFault, f"{env.id}: collecting artifacts"):
                progress.artifacts = await progress.runner.collect()
    return end


async def _converse(
    setting: Setting,
    task: Task,
    key: EpisodeKey,
    progress: _Progress,
    sandbox: Sandbox | None,
    clock: asyncio.Timeout,
) -> EndReason:
    """Reset, then turn by turn until something ends it."""
    env, history, player = progress.env, progress.history, progress.player
    assert player is not None
    async with boundary(ToolFault, f"{env.id}: reset"):
        history += await progress.runner.reset(
            task.view(),
            seed=derive_seed(setting.seed, key.task, key.step),
            sandbox=sandbox,
            guard=setting.guard() if setting.guard else None,
        )
    progress.opening = len(history)
    while True:
        async with _paused(clock) if setting.deterministic else nullcontext():
            message, end = await player.act(history, env.tools)
        history.append(message)
        if end is not None:
            return end
        async with boundary(ToolFault, f"{env.id}: step"):
            step = await progress.runner.step(message)
        history += step.messages
        if step.end is not None:
            return step.end


@asynccontextmanager
async def _paused(clock: asyncio.Timeout) -> AsyncIterator[None]:
    """Stop the clock while a turn-synchronous policy waits for other, slower episodes."""
    loop, deadline = asyncio.get_running_loop(), clock.when()
    assert deadline is not None
    left = deadline - loop.time()
    clock.reschedule(None)
    yield
    clock.reschedule(loop.time() + left)


@asynccontextmanager
async def _closing(runner: Runner) -> AsyncIterator[None]:
    """Close the environment while its sandbox is still there."""
    try:
        yield
    finally:
        async with boundary(ToolFault, f"{runner.env.id}: close"):
            await runner.close()


async def _judge(
    setting: Setting, task: Task, key: EpisodeKey, progress: _Progress, end: EndReason
) -> Score:
    submission = Submission(
        task=task,
        messages=tuple(progress.history),
        end=end,
        artifacts=progress.artifacts,
        pool=setting.pool,
        seed=derive_seed(setting.seed, key.task, key.step, key.sample, "grade"),
        opening=progress.opening,
        untrusted=progress.env.untrusted,
    )
    return await grade(progress.env.verifier, submission, progress.env.verifier_s)


def _episode(
    progress: _Progress, task: Task, key: EpisodeKey, end: EndReason, score: Score
) -> Episode:
    return Episode(
        key=key,
        env=progress.env.id,
        task=task.view(),
        start=progress.runner.start,
        messages=tuple(progress.history),
        end=end,
        score=score,
        trajectories=progress.player.trajectories if progress.player else (),
        counts=replace(progress.runner.counts(), **usage_of(progress.player)._asdict()),
        artifacts=progress.artifacts,
        failure=score.why if score.value is None else "",
    )


def derive_seed(*parts: object) -> int:
    """A 63-bit seed that depends on every part and on nothing else."""
    digest = hashlib.blake2b(repr(parts).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") >> 1

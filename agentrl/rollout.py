"""play(env, policy, task) -> Episode; and `Rollouts`, which plays groups of them on a loop thread of its own."""

from __future__ import annotations

import asyncio
import hashlib
import traceback
from collections.abc import AsyncIterator, Callable, Coroutine, Iterable, Sequence
from contextlib import asynccontextmanager, nullcontext
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple, TypeVar

from agentrl.aio import LoopThread, is_cancelled
from agentrl.env import ToolEnv
from agentrl.errors import (
    ConfigError,
    ContractError,
    EngineError,
    InfraError,
    SandboxLost,
    ToolFault,
    UserError,
    VerifierError,
    boundary,
)
from agentrl.policies import Player, Policy, usage_of
from agentrl.sandboxes.base import Sandbox, SandboxPool
from agentrl.trajectory import Episode, EpisodeKey, Group
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
        deterministic: the clock decides nothing: meeting a wall limit counts as a failure of the machinery.
    """

    make: Callable[[], ToolEnv]
    policy: Policy
    pool: SandboxPool | None = None
    run: str = "run"
    seed: int = 0
    deterministic: bool = False


@dataclass
class _Progress:
    """What an episode has come to so far; it survives whatever interrupts the episode."""

    env: ToolEnv
    history: list[Message] = field(default_factory=list)
    artifacts: dict[str, bytes] = field(default_factory=dict)
    player: Player | None = None
    opening: int = 0


async def play(setting: Setting, task: Task, key: EpisodeKey) -> Episode:
    """Play one episode from reset to score. Whatever breaks is recorded under its name; it is never a number.

    Raises:
        UserError: the environment or the task is wrong for every episode alike.
    """
    env = setting.make()
    progress = _Progress(env)
    try:
        end = await _act(setting, task, key, progress)
        if end is EndReason.WALL_TIME and setting.deterministic:
            end = EndReason.TIMEOUT
            score = Score.failed(f"the wall limit of {env.limits.wall_s:g} s was met in a deterministic run")
        else:
            score = await _judge(setting, task, key, progress, end)
    except UserError:
        raise
    except InfraError as error:
        end, score = _REASONS.get(type(error), EndReason.INTERNAL_ERROR), Score.failed(str(error) or repr(error))
    except (Exception, SystemExit, asyncio.CancelledError) as error:
        if isinstance(error, asyncio.CancelledError) and is_cancelled():
            raise
        end = EndReason.INTERNAL_ERROR
        score = Score.failed("".join(traceback.format_exception(error)))
    if score.value is None and end.ending is not Ending.FAILED:
        end = EndReason.VERIFIER_ERROR
    return _episode(progress, task, key, end, score)


async def _act(setting: Setting, task: Task, key: EpisodeKey, progress: _Progress) -> EndReason:
    """Everything up to the end of the conversation, and the artifacts' way out of the sandbox."""
    env = progress.env
    seed = derive_seed(setting.seed, key.task, key.step, key.sample)
    # The player takes its seat before anything is awaited: a turn-synchronous engine must know of all episodes at once.
    with setting.policy.player(task, env.limits, seed) as progress.player:
        async with env.borrow(setting.pool) as sandbox, _closing(env):
            clock = asyncio.timeout(env.limits.wall_s)
            try:
                async with clock:
                    end = await _converse(setting, task, key, progress, sandbox, clock)
            except TimeoutError:
                if not clock.expired():
                    raise
                end = EndReason.WALL_TIME
            async with boundary(ToolFault, f"{env.id}: collecting artifacts"):
                progress.artifacts = await env.collect()
    return end


async def _converse(
    setting: Setting, task: Task, key: EpisodeKey, progress: _Progress, sandbox: Sandbox | None, clock: asyncio.Timeout
) -> EndReason:
    """Reset, then turn by turn until something ends it."""
    env, history, player = progress.env, progress.history, progress.player
    assert player is not None
    async with boundary(ToolFault, f"{env.id}: reset"):
        history += await env.reset(task.view(), seed=derive_seed(setting.seed, key.task, key.step), sandbox=sandbox)
    progress.opening = len(history)
    while True:
        async with _paused(clock) if setting.deterministic else nullcontext():
            message, end = await player.act(history, env.tools)
        history.append(message)
        if end is not None:
            return end
        async with boundary(ToolFault, f"{env.id}: step"):
            step = await env.step(message)
        history += step.messages
        if step.end is not None:
            return step.end


@asynccontextmanager
async def _paused(clock: asyncio.Timeout) -> AsyncIterator[None]:
    """Stop the clock: a turn-synchronous policy waits for the slowest episode, which is no fault of this one."""
    loop, deadline = asyncio.get_running_loop(), clock.when()
    assert deadline is not None
    left = deadline - loop.time()
    clock.reschedule(None)
    yield
    clock.reschedule(loop.time() + left)


@asynccontextmanager
async def _closing(env: ToolEnv) -> AsyncIterator[None]:
    """Close the environment while its sandbox is still there."""
    try:
        yield
    finally:
        async with boundary(ToolFault, f"{env.id}: close"):
            await env.close()


async def _judge(setting: Setting, task: Task, key: EpisodeKey, progress: _Progress, end: EndReason) -> Score:
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


def _episode(progress: _Progress, task: Task, key: EpisodeKey, end: EndReason, score: Score) -> Episode:
    return Episode(
        key=key,
        env=progress.env.id,
        task=task.view(),
        start=progress.env.start,
        messages=tuple(progress.history),
        end=end,
        score=score,
        trajectories=progress.player.trajectories if progress.player else (),
        counts=replace(progress.env.counts(), **usage_of(progress.player)._asdict()),
        artifacts=progress.artifacts,
        failure=score.why if score.value is None else "",
    )


def derive_seed(*parts: object) -> int:
    """A 63-bit seed that depends on every part and on nothing else."""
    digest = hashlib.blake2b(repr(parts).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") >> 1


class _Batch(NamedTuple):
    """What the episodes of one dispatch have in common."""

    step: int
    group_size: int
    run: str
    setting: Setting


class Rollouts:
    """Plays groups of G episodes on its own loop thread, so that updates never hold up an episode.

    Args:
        setting: environment, policy, sandboxes and seeds.
        group_size: G, episodes per task.
        concurrency: episodes that play at the same time.
        retries: how often an episode that infrastructure failed is played again.
        on_episode: called on the loop thread with every finished episode, retried ones included.

    With `setting.deterministic` the episodes of a step play in fixed waves of `concurrency`, which fixes the engine's
    batches; otherwise a finished episode makes room for the next one at once.
    """

    def __init__(
        self,
        setting: Setting,
        *,
        group_size: int = 1,
        concurrency: int = 64,
        retries: int = 1,
        on_episode: Callable[[Episode], None] | None = None,
    ) -> None:
        self.setting = setting
        self.group_size = group_size
        self._retries = retries
        self._concurrency = concurrency
        self._on_episode = on_episode or (lambda episode: None)
        self._check_places()
        self._thread = LoopThread()
        self._dispatched: set[asyncio.Task[Any]] = set()
        self._finished: asyncio.Queue[Group | BaseException] = asyncio.Queue(maxsize=max(concurrency, 8))
        self._room = asyncio.Semaphore(concurrency)

    def dispatch(
        self,
        tasks: Iterable[Task],
        step: int,
        *,
        group_size: int | None = None,
        run: str | None = None,
        policy: Policy | None = None,
    ) -> None:
        """Start playing one group per task and return at once; size, run name and policy may differ from the usual.

        Raises:
            ContractError: two tasks share an id, so their episodes would share a key.
        """
        due = list(tasks)
        seen: set[str] = set()
        for task in due:
            if task.id in seen:
                raise ContractError(f"task id {task.id!r} stands twice in one step: every task needs an id of its own")
            seen.add(task.id)
        setting = replace(self.setting, policy=policy or self.setting.policy)
        batch = _Batch(step, group_size or self.group_size, run or self.setting.run, setting)
        self._thread.submit(self._play_all(due, batch))

    def next(self) -> Group:
        """Wait for the next finished group, whatever its task.

        Raises:
            UserError: the environment or a task is wrong for every episode alike; its dispatch plays no further.
            RuntimeError: nothing was dispatched that could still come.
        """
        item = self._thread.run(self._take())
        if isinstance(item, BaseException):
            raise item
        return item

    def gather(
        self,
        tasks: Sequence[Task],
        step: int,
        *,
        group_size: int | None = None,
        run: str | None = None,
        policy: Policy | None = None,
    ) -> list[Group]:
        """Play one group per task and return them in the order of the tasks; the rest as in `dispatch`."""
        self.dispatch(tasks, step, group_size=group_size, run=run, policy=policy)
        groups = [self.next() for _ in tasks]
        place = {task.id: index for index, task in enumerate(tasks)}
        return sorted(groups, key=lambda group: place[group.task.id])

    def run(self, work: Coroutine[Any, Any, Result]) -> Result:
        """Run a coroutine on the loop thread, where the sandbox pool lives, and wait for it."""
        return self._thread.run(work)

    def close(self) -> None:
        """Cancel what is playing, close the sandboxes and end the thread; safe to call twice."""
        try:
            if not self._thread.is_closed:
                self._thread.run(self._stop())
        finally:
            self._thread.close()

    def _check_places(self) -> None:
        """A turn-synchronous engine would wait for ever for an episode that waits for a sandbox."""
        size = getattr(self.setting.pool, "size", self._concurrency)
        if self.setting.deterministic and size < self._concurrency and self.setting.make().needs_sandbox:
            raise ConfigError(
                f"a deterministic run of {self._concurrency} episodes at a time needs as many sandboxes,"
                f" not {size}: open the pool with size={self._concurrency}"
            )

    async def _stop(self) -> None:
        for dispatch in self._dispatched:
            dispatch.cancel()
        await asyncio.gather(*self._dispatched, return_exceptions=True)
        if self.setting.pool is not None:
            await self.setting.pool.close()

    async def _take(self) -> Group | BaseException:
        if self._finished.empty() and not self._dispatched:
            raise RuntimeError("nothing is playing that next() could wait for: dispatch tasks first")
        return await self._finished.get()

    async def _play_all(self, tasks: list[Task], batch: _Batch) -> None:
        this = asyncio.current_task()
        assert this is not None
        self._dispatched.add(this)
        this.add_done_callback(self._dispatched.discard)
        try:
            if self.setting.deterministic:
                await self._play_in_waves(tasks, batch)
            else:
                async with asyncio.TaskGroup() as playing:
                    for task in tasks:
                        playing.create_task(self._play_group(task, batch))
        except Exception as error:  # noqa: BLE001 - handed to the thread that waits in next()
            await self._finished.put(_first(error))

    async def _play_group(self, task: Task, batch: _Batch) -> None:
        async def one(sample: int) -> Episode:
            async with self._room:
                for attempt in range(self._retries + 1):
                    episode = await self._play_once(task, batch, sample, attempt)
                    if episode.end.ending is not Ending.FAILED:
                        break
                return episode

        async with asyncio.TaskGroup() as playing:
            episodes = [playing.create_task(one(sample)) for sample in range(batch.group_size)]
        await self._finished.put(_group(episode.result() for episode in episodes))

    async def _play_in_waves(self, tasks: list[Task], batch: _Batch) -> None:
        done: dict[tuple[str, int], Episode] = {}
        due = [(task, sample) for task in tasks for sample in range(batch.group_size)]
        for attempt in range(self._retries + 1):
            for start in range(0, len(due), self._concurrency):
                wave = due[start : start + self._concurrency]
                async with asyncio.TaskGroup() as playing:
                    jobs = [playing.create_task(self._play_once(task, batch, sample, attempt)) for task, sample in wave]
                done |= {(job.result().task.id, job.result().key.sample): job.result() for job in jobs}
            due = [(task, sample) for task, sample in due if done[task.id, sample].end.ending is Ending.FAILED]
        for task in tasks:
            await self._finished.put(_group(done[task.id, sample] for sample in range(batch.group_size)))

    async def _play_once(self, task: Task, batch: _Batch, sample: int, attempt: int) -> Episode:
        episode = await play(batch.setting, task, EpisodeKey(batch.run, batch.step, task.id, sample, attempt))
        try:
            self._on_episode(episode)
        except SystemExit as error:  # it would end the loop thread, and next() would wait for ever
            raise RuntimeError("on_episode called sys.exit; raise in the thread that calls next()") from error
        return episode


def _group(episodes: Iterable[Episode]) -> Group:
    try:
        return Group(tuple(episodes))
    except ValueError as error:
        raise ContractError(str(error)) from error


def _first(error: Exception) -> Exception:
    """The first cause in a group of exceptions."""
    while isinstance(error, ExceptionGroup):
        error = error.exceptions[0]
    return error

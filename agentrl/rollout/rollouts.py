"""From tasks to finished groups: the sampler, and the handle of what it is playing."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Coroutine, Iterable, Sequence
from dataclasses import replace
from typing import Any, NamedTuple, Protocol, TypeVar

from agentrl.aio import LoopThread, is_cancelled
from agentrl.engines.base import Restarted, Weights
from agentrl.errors import ConfigError, ContractError
from agentrl.policies.base import Policy, TokenPolicy
from agentrl.rollout.outage import Outage
from agentrl.rollout.play import Setting, play
from agentrl.trajectory import Episode, EpisodeKey, Group, Phase
from agentrl.types import Ending, Task

Result = TypeVar("Result")
_Finished = asyncio.Queue[Group | BaseException]


class _Batch(NamedTuple):
    """What the episodes of one dispatch have in common."""

    step: int
    phase: Phase
    draw: int
    group_size: int
    setting: Setting


class Handle:
    """The groups of one dispatch, in the order in which they finish.

    Several handles may be open at once: each gets its own groups and no other's.
    """

    def __init__(self, thread: LoopThread, tasks: Sequence[Task], room: int) -> None:
        self._thread = thread
        self._tasks = tasks
        self._left = len(tasks)
        self._finished: asyncio.Queue[Group | BaseException] = asyncio.Queue(maxsize=room)

    def next(self) -> Group:
        """Wait for the next finished group, whatever its task.

        Raises:
            UserError: the environment or a task is wrong for every episode alike; this dispatch
                plays no further.
            InfraError: no sandbox, or no engine, can be had any more; neither does it.
            RuntimeError: every group has been taken, or the dispatch has ended.
        """
        if not self._left:
            raise RuntimeError("every group of this dispatch has been taken")
        item = self._thread.run(self._finished.get())
        if isinstance(item, BaseException):
            self._left = 0
            raise item
        self._left -= 1
        return item

    def gather(self) -> list[Group]:
        """All groups that were not taken yet, in the order of their tasks."""
        groups = [self.next() for _ in range(self._left)]
        place = {task.id: index for index, task in enumerate(self._tasks)}
        return sorted(groups, key=lambda group: place[group.task.id])


class Sampler(Protocol):
    """Plays tasks with a policy whose weights it is given from time to time."""

    def dispatch(
        self,
        tasks: Iterable[Task],
        step: int,
        *,
        phase: Phase = "train",
        draw: int = 0,
        group_size: int | None = None,
        policy: Policy | None = None,
    ) -> Handle:
        """Start playing one group per task and return at once; any number may be in flight."""
        ...

    def sync(self, weights: Weights, version: int) -> None:
        """Play with these weights from now on; returns when the engine has them."""
        ...

    def close(self) -> None:
        """Stop what is playing and free all parts; safe to call twice."""
        ...


class Rollouts:
    """The sampler of one process: episodes play on its own loop thread, so updates never stop them.

    Args:
        setting: environment, policy, sandboxes and seeds.
        group_size: G, episodes per task.
        concurrency: episodes that play at the same time, over all dispatches.
        retries: how often an episode that infrastructure failed is played again.
        on_episode: called on the loop thread with every finished episode, retried ones included.

    With `setting.deterministic` the episodes of a dispatch play in fixed waves of `concurrency`,
    which fixes the engine's batches; otherwise a finished episode makes room for the next at once.
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
        if concurrency < 1 or group_size < 1 or retries < 0:
            raise ConfigError(
                f"concurrency={concurrency}, group_size={group_size} and retries={retries}: the"
                " first two must be at least 1, the last at least 0"
            )
        self.setting = setting
        self.group_size = group_size
        self._retries = retries
        self._concurrency = concurrency
        self._on_episode = on_episode or (lambda episode: None)
        self._check_places()
        self._thread = LoopThread()
        self._closing = threading.RLock()
        self._dispatched: set[asyncio.Task[Any]] = set()
        self._room = asyncio.Semaphore(concurrency)
        self._outage = Outage(setting.pool)

    def dispatch(
        self,
        tasks: Iterable[Task],
        step: int,
        *,
        phase: Phase = "train",
        draw: int = 0,
        group_size: int | None = None,
        policy: Policy | None = None,
    ) -> Handle:
        """Start playing one group per task and return at once.

        Args:
            tasks: each with an id of its own.
            step: the round, part of every episode's key.
            phase: what the episodes are for, part of the key.
            draw: which draw of tasks of this round it is, part of the key.
            group_size: episodes per task, where not the usual.
            policy: who plays, where not the usual.

        Raises:
            ContractError: two tasks share an id, so their episodes would share a key.
        """
        due = list(tasks)
        seen: set[str] = set()
        for task in due:
            if task.id in seen:
                raise ContractError(
                    f"task id {task.id!r} stands twice in one step: every task needs an id of"
                    " its own"
                )
            seen.add(task.id)
        setting = replace(self.setting, policy=policy or self.setting.policy)
        batch = _Batch(step, phase, draw, group_size or self.group_size, setting)
        handle = Handle(self._thread, due, max(self._concurrency, 8))
        self._thread.submit(self._play_all(due, batch, handle._finished))
        return handle

    def gather(
        self,
        tasks: Iterable[Task],
        step: int,
        *,
        phase: Phase = "train",
        draw: int = 0,
        group_size: int | None = None,
        policy: Policy | None = None,
    ) -> list[Group]:
        """Play one group per task, wait, and return them in the order of the tasks."""
        return self.dispatch(
            tasks, step, phase=phase, draw=draw, group_size=group_size, policy=policy
        ).gather()

    def each(
        self,
        due: Iterable[tuple[Task, int]],
        step: int,
        *,
        phase: Phase = "train",
        stop: Callable[[], bool] = lambda: False,
    ) -> None:
        """Play single samples of tasks, wait for all of them, and tell `on_episode` alone.

        Args:
            due: tasks, and which sample of each.
            step: the round, part of every episode's key.
            phase: what the episodes are for, part of the key.
            stop: no further episode begins once it is true; those that play are finished.

        Raises:
            UserError: the environment or a task is wrong for every episode alike.
            ConfigError: the run is deterministic, and its waves are made of groups.
        """
        if self.setting.deterministic:
            raise ConfigError("a deterministic run plays whole groups: use dispatch or gather")
        batch = _Batch(step, phase, 0, 1, self.setting)
        self._thread.run(self._play_each(list(due), batch, stop))

    def sync(self, weights: Weights, version: int) -> None:
        """Give the policy's engine these weights; returns when it has them.

        Raises:
            ConfigError: the policy does not sample from an engine.
        """
        if not isinstance(self.setting.policy, TokenPolicy):
            raise ConfigError(
                f"policy {self.setting.policy.name!r} has no engine that takes weights"
            )
        self.setting.policy.engine.load(weights, version)

    def run(self, work: Coroutine[Any, Any, Result]) -> Result:
        """Run a coroutine on the loop thread, where the sandbox pool lives, and wait for it."""
        return self._thread.run(work)

    def cancel(self) -> None:
        """Stop what is playing, and wait until it has; after it, nothing uses the policy."""
        if not self._thread.is_closed:
            self._thread.run(self._cancel())

    def close(self) -> None:
        """Cancel what is playing, close the sandboxes and end the thread.

        Safe to call twice, also from two threads at once: the second waits for the first.
        """
        with self._closing:
            try:
                if not self._thread.is_closed:
                    self._thread.run(self._stop())
            finally:
                self._thread.close()

    def _check_places(self) -> None:
        """A turn-synchronous engine would wait for ever for an episode that waits for a sandbox."""
        size = getattr(self.setting.pool, "size", self._concurrency)
        if (
            self.setting.deterministic
            and size < self._concurrency
            and self.setting.make().needs_sandbox
        ):
            raise ConfigError(
                f"a deterministic run of {self._concurrency} episodes at a time needs as many"
                f" sandboxes, not {size}: open the pool with size={self._concurrency}"
            )

    async def _cancel(self) -> None:
        for dispatch in self._dispatched:
            dispatch.cancel()
        await asyncio.gather(*self._dispatched, return_exceptions=True)

    async def _stop(self) -> None:
        await self._cancel()
        if self.setting.pool is not None:
            await self.setting.pool.close()

    async def _play_all(self, tasks: list[Task], batch: _Batch, finished: _Finished) -> None:
        this = asyncio.current_task()
        assert this is not None
        self._dispatched.add(this)
        this.add_done_callback(self._dispatched.discard)
        try:
            if self.setting.deterministic:
                await self._play_in_waves(tasks, batch, finished)
            else:
                async with asyncio.TaskGroup() as playing:
                    for task in tasks:
                        playing.create_task(self._play_group(task, batch, finished))
        except asyncio.CancelledError as error:
            if is_cancelled():  # by `close`, after which nobody waits
                raise
            await finished.put(
                RuntimeError(f"the environment cancelled its own episode: {error!r}")
            )
        except Exception as error:  # noqa: BLE001 - handed to the thread that waits in next()
            await finished.put(_first(error))

    async def _play_each(
        self, due: list[tuple[Task, int]], batch: _Batch, stop: Callable[[], bool]
    ) -> None:
        async def one(task: Task, sample: int) -> None:
            async with self._room:
                if not stop():
                    await self._play_sample(task, batch, sample)

        try:
            async with asyncio.TaskGroup() as playing:
                for task, sample in due:
                    playing.create_task(one(task, sample))
        except ExceptionGroup as errors:
            raise _first(errors) from errors

    async def _play_group(self, task: Task, batch: _Batch, finished: _Finished) -> None:
        async def one(sample: int) -> Episode:
            async with self._room:
                return await self._play_sample(task, batch, sample)

        async with asyncio.TaskGroup() as playing:
            episodes = [playing.create_task(one(sample)) for sample in range(batch.group_size)]
        await finished.put(_group(episode.result() for episode in episodes))

    async def _play_sample(self, task: Task, batch: _Batch, sample: int) -> Episode:
        """The first attempt that infrastructure did not fail, else the last."""
        for attempt in range(self._retries + 1):
            episode = await self._play_once(task, batch, sample, attempt)
            if episode.end.ending is not Ending.FAILED:
                break
        return episode

    async def _play_in_waves(self, tasks: list[Task], batch: _Batch, finished: _Finished) -> None:
        done: dict[tuple[str, int], Episode] = {}
        due = [(task, sample) for task in tasks for sample in range(batch.group_size)]
        for attempt in range(self._retries + 1):
            for start in range(0, len(due), self._concurrency):
                wave = due[start : start + self._concurrency]
                async with asyncio.TaskGroup() as playing:
                    jobs = [
                        playing.create_task(self._play_once(task, batch, sample, attempt))
                        for task, sample in wave
                    ]
                done |= {
                    (job.result().task.id, job.result().key.sample): job.result() for job in jobs
                }
            due = [
                (task, sample)
                for task, sample in due
                if done[task.id, sample].end.ending is Ending.FAILED
            ]
        for task in tasks:
            await finished.put(_group(done[task.id, sample] for sample in range(batch.group_size)))

    async def _play_once(self, task: Task, batch: _Batch, sample: int, attempt: int) -> Episode:
        await self._outage.over()
        key = EpisodeKey(
            batch.setting.run, batch.step, task.id, sample, attempt, batch.phase, batch.draw
        )
        episode = await play(batch.setting.of(task), task, key)
        try:
            self._on_episode(episode)
        except SystemExit as error:  # it would end the loop thread, and next() would wait for ever
            raise RuntimeError(
                "on_episode called sys.exit; raise in the thread that calls next()"
            ) from error
        await self._outage.after(episode)
        engine = getattr(batch.setting.policy, "engine", None)
        if isinstance(engine, Restarted) and engine.gone:
            raise engine.gone
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

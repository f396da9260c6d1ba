"""`Rollouts` plays groups of episodes on a loop thread of its own."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Iterable, Sequence
from dataclasses import replace
from typing import Any, NamedTuple, TypeVar

from agentrl.aio import LoopThread
from agentrl.errors import ConfigError, ContractError
from agentrl.policies.base import Policy
from agentrl.rollout.outage import Outage
from agentrl.rollout.play import Setting, play
from agentrl.trajectory import Episode, EpisodeKey, Group
from agentrl.types import Ending, Task

Result = TypeVar("Result")


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

    With `setting.deterministic` the episodes of a step play in fixed waves of `concurrency`, which
    fixes the engine's batches; otherwise a finished episode makes room for the next one at once.
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
        self._finished: asyncio.Queue[Group | BaseException] = asyncio.Queue(
            maxsize=max(concurrency, 8)
        )
        self._room = asyncio.Semaphore(concurrency)
        self._outage = Outage(setting.pool)

    def dispatch(
        self,
        tasks: Iterable[Task],
        step: int,
        *,
        group_size: int | None = None,
        run: str | None = None,
        policy: Policy | None = None,
    ) -> None:
        """Start playing one group per task and return at once; size, run name and policy may differ
        from the usual.

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
        batch = _Batch(step, group_size or self.group_size, run or self.setting.run, setting)
        self._thread.submit(self._play_all(due, batch))

    def next(self) -> Group:
        """Wait for the next finished group, whatever its task.

        Raises:
            UserError: the environment or a task is wrong for every episode alike; its dispatch
                plays no further.
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
        """Play one group per task and return them in the order of the tasks; the rest as in
        `dispatch`.
        """
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
        if (
            self.setting.deterministic
            and size < self._concurrency
            and self.setting.make().needs_sandbox
        ):
            raise ConfigError(
                f"a deterministic run of {self._concurrency} episodes at a time needs as many"
                f" sandboxes, not {size}: open the pool with size={self._concurrency}"
            )

    async def _stop(self) -> None:
        for dispatch in self._dispatched:
            dispatch.cancel()
        await asyncio.gather(*self._dispatched, return_exceptions=True)
        if self.setting.pool is not None:
            await self.setting.pool.close()

    async def _take(self) -> Group | BaseException:
        if self._finished.empty() and not self._dispatched:
            raise RuntimeError(
                "nothing is playing that next() could wait for: dispatch tasks first"
            )
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
            await self._finished.put(
                _group(done[task.id, sample] for sample in range(batch.group_size))
            )

    async def _play_once(self, task: Task, batch: _Batch, sample: int, attempt: int) -> Episode:
        await self._outage.over()
        episode = await play(
            batch.setting, task, EpisodeKey(batch.run, batch.step, task.id, sample, attempt)
        )
        try:
            self._on_episode(episode)
        except SystemExit as error:  # it would end the loop thread, and next() would wait for ever
            raise RuntimeError(
                "on_episode called sys.exit; raise in the thread that calls next()"
            ) from error
        await self._outage.after(episode)
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

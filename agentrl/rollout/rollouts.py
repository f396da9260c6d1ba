"""From tasks to finished groups: the sampler, and the handle of what it is playing."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Coroutine, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, Protocol, TypeVar

from agentrl.aio import LoopThread, is_cancelled
from agentrl.engines.base import Engine, Generation, Restarted, Sampling, Weights
from agentrl.errors import ConfigError, ContractError, EngineLost, Unrecordable
from agentrl.policies.base import Policy, TokenPolicy
from agentrl.policies.served import ServedPolicy
from agentrl.rollout.outage import Outage
from agentrl.rollout.play import Setting, play
from agentrl.trajectory import Episode, EpisodeKey, Group, Phase
from agentrl.types import Ending, EndReason, Score, Task

Result = TypeVar("Result")
_Finished = asyncio.Queue[Group | BaseException]


@dataclass(frozen=True)
class Dispatch:
    """What the episodes of one dispatch have in common.

    Attributes:
        round: number of the dispatch, part of every episode's key.
        phase: purpose of the episodes, part of the key.
        draw: index of the draw of tasks within the round, part of the key.
        group_size: episodes per task; None for the stream's usual number.
        sampling: how the policy samples, where not as usual, such as greedily.
        side_effect_price: taken off the reward of an episode with a side effect; None for the
            price of the setting.
    """

    round: int = 0
    phase: Phase = "train"
    draw: int = 0
    group_size: int | None = None
    sampling: Sampling | None = None
    side_effect_price: float | None = None


class _Batch(NamedTuple):
    """One dispatch, resolved against the stream's own settings."""

    work: Dispatch
    group_size: int
    setting: Setting


class Handle:
    """The groups of one dispatch, in the order in which they finish.

    Several handles may be open at once: each gets its own groups and no other's.

    Args:
        tasks: of the dispatch, one group each.
        take: waits for the next finished group, or for the error that ended the dispatch.
    """

    def __init__(self, tasks: Sequence[Task], take: Callable[[], Group | BaseException]) -> None:
        self._tasks = tasks
        self._take = take
        self._left = len(tasks)

    def next(self) -> Group:
        """Wait for the next finished group, whatever its task.

        Raises:
            UserError: the environment or a task is wrong for every episode alike; this dispatch
                ends here.
            InfraError: no sandbox, or no engine, can be had any more; the dispatch ends here.
            RuntimeError: every group has been taken, or the dispatch has ended.
        """
        if not self._left:
            raise RuntimeError("every group of this dispatch has been taken")
        item = self._take()
        if isinstance(item, BaseException):
            self._left = 0
            raise item
        self._left -= 1
        return item

    def __iter__(self) -> Iterator[Group]:
        """The groups that were not taken yet, as they finish."""
        while self._left:
            yield self.next()

    def gather(self) -> list[Group]:
        """All groups that were not taken yet, in the order of their tasks."""
        place = {task.id: index for index, task in enumerate(self._tasks)}
        return sorted(self, key=lambda group: place[group.task.id])


class GroupStream(Protocol):
    """Plays tasks with a policy whose weights are replaced from time to time.

    Nothing of it needs the episodes to play in this process: what crosses is plain data, and
    `Group.versions` says which weights sampled a group.
    """

    def dispatch(self, tasks: Iterable[Task], work: Dispatch) -> Handle:
        """Start playing one group per task and return at once; any number may be in flight."""
        ...

    def sync(self, weights: Weights, version: int) -> None:
        """Play with these weights from now on; returns when the engine has them."""
        ...

    def probe(
        self, prompt_ids: Sequence[int], sampling: Sampling, seeds: Sequence[int]
    ) -> tuple[Generation, ...]:
        """What the engine samples after a prompt, once for each seed."""
        ...

    def cancel(self) -> None:
        """Stop what is playing, and wait until it has stopped."""
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
        owns_policy: whether `close` also closes the policy and the user of the setting.
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
        owns_policy: bool = False,
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
        self._owns_policy = owns_policy
        self._version: int | None = None
        self._concurrency = concurrency
        self._on_episode = on_episode or (lambda episode: None)
        self._check_places()
        self._thread = LoopThread()
        self._closing = threading.RLock()
        self._dispatched: set[asyncio.Task[Any]] = set()
        self._room = asyncio.Semaphore(concurrency)
        self._waves = asyncio.Lock()  # waves of two dispatches would share the engine's batches
        self._outage = Outage(setting.pool)

    def dispatch(self, tasks: Iterable[Task], work: Dispatch | int = 0) -> Handle:
        """Start playing one group per task and return at once.

        Args:
            tasks: each with an id of its own.
            work: what the episodes have in common; a number stands for `Dispatch(round=number)`.

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
        if isinstance(work, int):
            work = Dispatch(work)
        finished: _Finished = asyncio.Queue(maxsize=max(self._concurrency, 8))
        self._thread.submit(self._play_all(due, self._batch(work), finished))
        return Handle(due, lambda: self._thread.run(finished.get()))

    def gather(
        self, tasks: Iterable[Task], work: Dispatch | int = 0, **options: Any
    ) -> list[Group]:
        """Play one group per task, wait, and return them in the order of the tasks."""
        return self.dispatch(tasks, work).gather()

    def _batch(self, work: Dispatch) -> _Batch:
        setting, policy = self.setting, self.setting.policy
        if work.sampling is not None:
            if not isinstance(policy, TokenPolicy):
                raise ConfigError(f"policy {policy.name!r} has no engine whose sampling can be set")
            policy = TokenPolicy(policy.engine, policy.chat, work.sampling, policy.name)
        price = work.side_effect_price
        if price is None:
            price = setting.side_effect_price
        setting = replace(setting, policy=policy, side_effect_price=price)
        return _Batch(work, work.group_size or self.group_size, setting)

    def each(
        self,
        due: Iterable[tuple[Task, int]],
        work: Dispatch,
        *,
        stop: Callable[[], bool] = lambda: False,
    ) -> None:
        """Play single samples of tasks, wait for all of them, and tell `on_episode` alone.

        Args:
            due: tasks, and which sample of each.
            work: what the episodes have in common.
            stop: no further episode starts once it returns true; those that play are finished.

        Raises:
            UserError: the environment or a task is wrong for every episode alike.
            ConfigError: the run is deterministic, and its waves are made of groups.
        """
        if self.setting.deterministic:
            raise ConfigError("a deterministic run plays whole groups: use dispatch or gather")
        self._thread.run(self._play_each(list(due), self._batch(work), stop))

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
        self._version = version

    def probe(
        self, prompt_ids: Sequence[int], sampling: Sampling, seeds: Sequence[int]
    ) -> tuple[Generation, ...]:
        """What the engine samples after a prompt, once for each seed; asked again where the
        engine's process is lost meanwhile.

        Raises:
            ConfigError: the policy does not sample from an engine.
            EngineError: sampling failed.
        """
        if not isinstance(self.setting.policy, TokenPolicy):
            raise ConfigError(f"policy {self.setting.policy.name!r} has no engine to probe")
        return self._thread.run(
            _probe(self.setting.policy.engine, tuple(prompt_ids), sampling, seeds)
        )

    def run(self, work: Coroutine[Any, Any, Result]) -> Result:
        """Run a coroutine on the loop thread, where the sandbox pool lives, and wait for it.

        For graders of this process; a `GroupStream` elsewhere has no such method.
        """
        return self._thread.run(work)

    def cancel(self) -> None:
        """Stop what is playing, and wait until it has; after it, nothing uses the policy."""
        if not self._thread.is_closed:
            self._thread.run(self._cancel())

    def close(self) -> None:
        """Cancel what is playing, free policy (if owned) and sandboxes, and end the thread.

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
            and any(make().needs_sandbox for make in self.setting.makes)
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
        if self._owns_policy:
            await close_policy(self.setting.policy)
            if self.setting.user is not None:
                await close_policy(self.setting.user)
        if self.setting.pool is not None:
            await self.setting.pool.close()

    async def _play_all(self, tasks: list[Task], batch: _Batch, finished: _Finished) -> None:
        this = asyncio.current_task()
        assert this is not None
        self._dispatched.add(this)
        this.add_done_callback(self._dispatched.discard)
        try:
            if self.setting.deterministic:
                async with self._waves:
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
        work, setting = batch.work, batch.setting
        key = EpisodeKey(setting.run, work.round, task.id, sample, attempt, work.phase, work.draw)
        episode = await play(setting.of(task), task, key, self._version)
        try:
            try:
                self._on_episode(episode)
            except Unrecordable as error:
                episode = without_content(episode, str(error))
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


async def _probe(
    engine: Engine, prompt_ids: tuple[int, ...], sampling: Sampling, seeds: Sequence[int]
) -> tuple[Generation, ...]:
    while True:
        asked = (engine.generate(prompt_ids, sampling, seed=seed) for seed in seeds)
        try:
            return tuple(await asyncio.gather(*asked))
        except EngineLost:  # another process takes over; the engine bounds how often
            continue


async def close_policy(policy: Policy) -> None:
    """End the engine or the connections of a policy, on the loop where it played."""
    if isinstance(policy, TokenPolicy):
        await policy.engine.close()
    elif isinstance(policy, ServedPolicy):
        await policy.close()


def without_content(episode: Episode, why: str) -> Episode:
    """The failed episode in place of one that no record can hold.

    Only what the agent said, called or handed in can make it so, since everything else was checked
    before: the agent has failed the task.
    """
    threshold = episode.task.threshold
    score = Score(0.0 if threshold > 0 else threshold - 1.0, {}, why)
    return replace(
        episode,
        messages=(),
        trajectories=(),
        artifacts={},
        side_effects=None,
        events=(),
        end=EndReason.AGENT_FAULT,
        score=score,
        failure="",
    )


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

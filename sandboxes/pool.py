"""Lends clean sandboxes: opened when first needed, reset after use, replaced when in doubt."""

from __future__ import annotations

import asyncio
import itertools
import os
import sys
from collections.abc import AsyncIterator, Coroutine, Iterable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, TypeVar, cast, get_args

from agentrl.errors import BackendAway, ConfigError, SandboxLost
from agentrl.sandboxes.base import (
    Isolation,
    Sandbox,
    SandboxBackend,
    SandboxLimits,
    SandboxNeed,
    SandboxRole,
)
from agentrl.sandboxes.lease import Lease
from agentrl.waits import waiting

GRADER_MB = 4096
RECYCLE_AFTER = 1000
_PER_CORE = 8  # most of an episode is the model thinking, while its sandbox sleeps
_GRADERS_PER_CORE = 2
_STARTS_PER_CORE = 2
_T = TypeVar("_T")


@dataclass
class PoolCounts:
    """What a pool did so far.

    Attributes:
        opened: sandboxes started.
        reused: leases served by a sandbox that an earlier one had.
        replaced: sandboxes thrown away because they were lost or not as at their start.
        recycled: sandboxes ended as planned: for one episode only, or after so many resets.
        unstarted: failures to start one ahead of need; a lease that meets one raises it instead.
    """

    opened: int = 0
    reused: int = 0
    replaced: int = 0
    recycled: int = 0
    unstarted: int = 0


@dataclass(eq=False)
class _Slot:
    """A sandbox and how often it was reset."""

    sandbox: Sandbox
    resets: int = 0


@dataclass
class _Slots:
    """The slots of one role, on one event loop.

    `alive` counts sandboxes that are there or starting, `peak` the most there were.
    """

    role: SandboxRole
    room: int
    free: asyncio.Semaphore
    idle: list[_Slot] = field(default_factory=list)
    starting: list[asyncio.Task[_Slot]] = field(default_factory=list)
    alive: int = 0
    peak: int = 0

    def take(self, fresh: bool) -> _Slot | None:
        """An idle one, the last used first; `fresh`: only one that nobody had."""
        for slot in reversed(self.idle):
            if not fresh or slot.resets == 0:
                self.idle.remove(slot)
                return slot
        return None


class Pool:
    """At most `size` agent sandboxes of one backend, and two graders per core; others wait.

    Each role has its own sandboxes and its own bound: agents that wait for their graders cannot
    lock each other out, and no grader ever runs where an agent was. A sandbox that had to go is
    replaced in the background, and not more than two per core start at the same time. A pool serves
    one event loop at a time.

    Attributes:
        backend: opens the sandboxes.
        limits: of each agent sandbox. Graders have at least `GRADER_MB` of memory per process:
            references may need it.
        counts: for logs and tests.
    """

    def __init__(
        self,
        backend: SandboxBackend,
        size: int | None = None,
        limits: SandboxLimits | None = None,
        *,
        recycle_after: int = RECYCLE_AFTER,
        trust: bool = False,
        notice: str = "",
    ) -> None:
        """Nothing is started yet.

        Args:
            size: by default what cores and memory of this machine carry.
            recycle_after: resets after which a sandbox is ended and replaced.
            trust: whether untrusted environments may run on a backend that is no boundary.
            notice: what is said on stderr before the first sandbox is lent.

        Raises:
            ConfigError: a size or a number of resets below 1.
        """
        if size is not None and size < 1:
            raise ConfigError(
                f"size={size} of a sandbox pool must be at least 1; leave it out for this"
                " machine's own"
            )
        if recycle_after < 1:
            raise ConfigError(f"recycle_after={recycle_after} of a sandbox pool must be at least 1")
        self.backend = backend
        self.limits = limits or SandboxLimits()
        self.counts = PoolCounts()
        self._size = size or default_size(self.limits)
        self._recycle_after = recycle_after
        self._trust = trust
        self._notice = notice
        self._epochs = itertools.count(1)
        self._loop: asyncio.AbstractEventLoop | None = None
        self._starts = asyncio.Semaphore()
        self._slots: dict[SandboxRole, _Slots] = {}
        self._live: set[Sandbox] = set()
        self._tasks: set[asyncio.Task[Any]] = set()
        self._closed = False

    @property
    def size(self) -> int:
        """How many agent sandboxes can be out at the same time."""
        return self._size

    @asynccontextmanager
    async def lease(
        self,
        role: SandboxRole,
        *,
        isolation: Isolation = "reset",
        needs: Iterable[SandboxNeed] = (),
        untrusted: bool = False,
    ) -> AsyncIterator[Sandbox]:
        """Borrow a clean sandbox for an `async with` block; afterwards it is reset or replaced.

        With isolation "fresh" nobody had it before, and it is ended afterwards. So it is with any
        `needs`, since what they permit is what a reset could not undo.

        Raises:
            ConfigError: `untrusted`, but the backend is no boundary and the pool was not told to
                trust; or a role, an isolation or a need that there is not.
            BackendAway: none could be opened (the message names the missing part and the fix), or
                the pool is closed.
            RuntimeError: the pool is in use on another event loop.
        """
        self.check_trust(untrusted)
        if role not in get_args(SandboxRole):
            raise ConfigError(f"role={role!r} of a sandbox must be 'agent' or 'grader'")
        permitted = _checked(isolation, needs)
        fresh = isolation == "fresh" or bool(permitted)
        self.tell()
        slots = await self._slots_of(role)
        with waiting(f"a free sandbox for the {role}"):
            await slots.free.acquire()
        opening = self._start(self._obtain(slots, fresh, permitted))
        try:
            with waiting(f"a sandbox for the {role} to start"):
                slot = await asyncio.shield(opening)
        except BaseException as error:
            opening.add_done_callback(lambda task: self._unclaimed(task, slots, permitted))
            if isinstance(error, SandboxLost):  # nobody was in it yet
                raise BackendAway(str(error)) from error
            raise
        lease = Lease(slot.sandbox, next(self._epochs))
        try:
            yield cast(Sandbox, lease)  # it has every verb, added in lease.py
        finally:
            lease.end()
            # Shielded: a cancelled lease still resets its sandbox and frees its slot.
            await asyncio.shield(self._start(self._give_back(slot, slots, fresh)))
            if not permitted:
                self._refill(slots)

    async def warm(self, role: SandboxRole, count: int | None = None) -> None:
        """Start up to this many sandboxes ahead of their need, and wait until they are there.

        Raises:
            SandboxLost: one could not be opened, or the pool is closed.
        """
        slots = await self._slots_of(role)
        slots.peak = max(slots.peak, slots.room if count is None else min(count, slots.room))
        self._refill(slots)
        await asyncio.gather(*(asyncio.shield(task) for task in slots.starting))

    async def close(self) -> None:
        """End all sandboxes, lent ones too.

        Safe to call twice, and from another loop once the pool's own is closed.
        """
        self._closed = True
        for slots in self._slots.values():
            slots.idle.clear()
        await self._end_all()
        if self._loop is asyncio.get_running_loop():
            # What these tasks raise is told to their leases.
            await asyncio.gather(*self._tasks, return_exceptions=True)
            await self._end_all()

    def tell(self) -> None:
        """Say on stderr, once, what there is to know of this pool before it is used."""
        if self._notice:
            print(self._notice, file=sys.stderr)
            self._notice = ""

    def check_trust(self, untrusted: bool) -> None:
        """Whether an environment may run here.

        Raises:
            ConfigError: it is untrusted, the backend is no boundary, and nobody said that this is
                wanted.
        """
        if untrusted and not self.backend.is_boundary and not self._trust:
            raise ConfigError(
                f"sandbox={self.backend.name!r} is no boundary, and the environment says that its"
                " code is untrusted: use bubblewrap or docker, or say that you trust it: --sandbox"
                " process --trust, or, from Python, sandbox='trusted-process'"
            )

    async def _slots_of(self, role: SandboxRole) -> _Slots:
        loop = asyncio.get_running_loop()
        cores = len(os.sched_getaffinity(0))
        if self._loop is not loop:
            if self._loop is not None and not self._loop.is_closed():
                raise RuntimeError(
                    "a sandbox pool is in use on another event loop; open one pool per loop"
                )
            self._loop = loop
            self._starts = asyncio.Semaphore(_STARTS_PER_CORE * cores)
            self._slots.clear()
            self._tasks.clear()
            await asyncio.gather(*(self._close(sandbox) for sandbox in list(self._live)))
        room = min(self._size, _GRADERS_PER_CORE * cores) if role == "grader" else self._size
        return self._slots.setdefault(role, _Slots(role, room, asyncio.Semaphore(room)))

    async def _obtain(self, slots: _Slots, fresh: bool, needs: frozenset[SandboxNeed]) -> _Slot:
        while not needs and (slot := slots.take(fresh)):
            try:
                await slot.sandbox.ping()
            except SandboxLost:
                self.counts.replaced += 1
                await self._end(slot, slots)
            else:
                self.counts.reused += slot.resets > 0
                return slot
        if slots.starting and not needs:
            return await slots.starting.pop()
        if slots.idle and slots.alive >= slots.room:  # used ones, where a fresh one is wanted
            self.counts.recycled += 1
            await self._end(slots.idle.pop(0), slots)
        return await self._open(slots, needs)

    def _open(self, slots: _Slots, needs: frozenset[SandboxNeed]) -> Coroutine[Any, Any, _Slot]:
        """Count a sandbox now, and start it when awaited."""
        limits = replace(self.limits, needs=self.limits.needs | needs)
        if slots.role == "grader":
            limits = replace(limits, memory_mb=max(GRADER_MB, limits.memory_mb))
        slots.alive += 1
        slots.peak = max(slots.peak, slots.alive)
        return self._open_counted(slots, limits)

    async def _open_counted(self, slots: _Slots, limits: SandboxLimits) -> _Slot:
        try:
            async with self._starts:
                if self._closed:
                    raise SandboxLost("the sandbox pool is closed")
                sandbox = await self.backend.open(slots.role, limits)
        except BaseException:
            slots.alive -= 1
            raise
        self._live.add(sandbox)
        self.counts.opened += 1
        return _Slot(sandbox)

    async def _give_back(self, slot: _Slot, slots: _Slots, fresh: bool) -> None:
        clean = False
        try:
            if fresh or slot.resets >= self._recycle_after:
                await slot.sandbox.ping()
                self.counts.recycled += 1
            else:
                await slot.sandbox.reset()
                slot.resets += 1
                clean = not self._closed
        except (SandboxLost, OSError):  # any doubt about it is enough to replace it
            self.counts.replaced += 1
        finally:
            try:
                if clean:
                    slots.idle.append(slot)
                else:
                    await self._end(slot, slots)
            finally:
                slots.free.release()

    def _refill(self, slots: _Slots) -> None:
        """Start in the background what is missing to as many as there were at most."""
        while not self._closed and slots.alive < min(slots.peak, slots.room):
            task = self._start(self._open(slots, frozenset()))
            slots.starting.append(task)
            task.add_done_callback(lambda task: self._started(task, slots))

    def _started(self, task: asyncio.Task[_Slot], slots: _Slots) -> None:
        if task not in slots.starting:  # a lease waits for it
            return
        slots.starting.remove(task)
        if task.cancelled() or task.exception() is not None:
            self.counts.unstarted += 1
        elif not self._closed:
            slots.idle.append(task.result())

    def _unclaimed(
        self, opening: asyncio.Task[_Slot], slots: _Slots, needs: frozenset[SandboxNeed]
    ) -> None:
        """Keep a sandbox that nobody waits for any more, if it is like any other."""
        if not opening.cancelled() and opening.exception() is None and not self._closed:
            if needs:
                self._start(self._end(opening.result(), slots))
            else:
                slots.idle.append(opening.result())
        slots.free.release()

    def _start(self, work: Coroutine[Any, Any, _T]) -> asyncio.Task[_T]:
        task = asyncio.ensure_future(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    async def _end(self, slot: _Slot, slots: _Slots) -> None:
        slots.alive -= 1
        await self._close(slot.sandbox)

    async def _close(self, sandbox: Sandbox) -> None:
        self._live.discard(sandbox)
        await sandbox.close()

    async def _end_all(self) -> None:
        await asyncio.gather(*(self._close(sandbox) for sandbox in list(self._live)))


def _checked(isolation: str, needs: Iterable[SandboxNeed]) -> frozenset[SandboxNeed]:
    if isolation not in get_args(Isolation):
        raise ConfigError(f"isolation={isolation!r} of an environment must be 'reset' or 'fresh'")
    found = {needs} if isinstance(needs, str) else set(needs)
    if unknown := found - set(get_args(SandboxNeed)):
        raise ConfigError(
            f"needs={sorted(unknown)} of an environment are unknown; use"
            f" {' or '.join(get_args(SandboxNeed))}"
        )
    return frozenset(need for need in get_args(SandboxNeed) if need in found)


def default_size(limits: SandboxLimits) -> int:
    """Sandboxes per role that this machine carries, by its cores and its memory.

    Each is counted with all of its limits in use.
    """
    available_mb = 0
    for line in Path("/proc/meminfo").read_text().splitlines():
        if line.startswith("MemAvailable:"):
            available_mb = int(line.split()[1]) // 1024
    return max(
        1,
        min(
            _PER_CORE * len(os.sched_getaffinity(0)),
            available_mb // (limits.memory_mb + limits.disk_mb),
        ),
    )

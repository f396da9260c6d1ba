"""Lends clean sandboxes: opened when first needed, reset after use, replaced when there is any doubt."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator, Coroutine
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, TypeVar

from agentrl.errors import ConfigError, SandboxLost
from agentrl.sandboxes.base import Sandbox, SandboxBackend, SandboxLimits, SandboxRole

_PER_CORE = 8  # most of an episode is the model thinking, while its sandbox sleeps
_T = TypeVar("_T")


GRADER_MB = 4096
_GRADERS_PER_CORE = 2


@dataclass
class PoolCounts:
    """What a pool did so far: sandboxes opened, leases served by a used one, sandboxes thrown away as doubtful."""

    opened: int = 0
    reused: int = 0
    replaced: int = 0


@dataclass
class _Slots:
    """The slots of one role, on one event loop."""

    role: SandboxRole
    free: asyncio.Semaphore
    idle: list[Sandbox] = field(default_factory=list)


class Pool:
    """At most `size` agent sandboxes of one backend, and two graders per core; who comes later waits for his turn.

    Each role has its own sandboxes and its own bound: agents that wait for their graders cannot lock each other out,
    and no grader ever runs where an agent was. A pool serves one event loop at a time.

    Attributes:
        backend: opens the sandboxes.
        limits: of each agent sandbox. Graders have at least `GRADER_MB` of memory per process: references may need it.
        counts: for logs and tests.
    """

    def __init__(self, backend: SandboxBackend, size: int | None = None, limits: SandboxLimits | None = None) -> None:
        """`size` is by default what cores and memory of this machine carry.

        Raises:
            ConfigError: a size below 1.
        """
        if size is not None and size < 1:
            raise ConfigError(f"size={size} of a sandbox pool must be at least 1; leave it out for this machine's own")
        self.backend = backend
        self.limits = limits or SandboxLimits()
        self.counts = PoolCounts()
        self._size = size or default_size(self.limits)
        self._loop: asyncio.AbstractEventLoop | None = None
        self._slots: dict[SandboxRole, _Slots] = {}
        self._live: set[Sandbox] = set()
        self._tasks: set[asyncio.Task[Any]] = set()
        self._closed = False

    @property
    def size(self) -> int:
        """How many agent sandboxes can be out at the same time."""
        return self._size

    @asynccontextmanager
    async def lease(self, role: SandboxRole) -> AsyncIterator[Sandbox]:
        """Borrow a clean sandbox for an `async with` block; afterwards it is reset and reused, or replaced.

        Raises:
            SandboxLost: none could be opened (the message names the missing part and the fix), or the pool is closed.
            RuntimeError: the pool is in use on another event loop.
        """
        slots = await self._slots_of(role)
        await slots.free.acquire()
        opening = self._start(self._obtain(slots))
        try:
            sandbox = await asyncio.shield(opening)
        except BaseException:
            opening.add_done_callback(lambda task: self._unclaimed(task, slots))
            raise
        try:
            yield sandbox
        finally:
            # Shielded: a cancelled lease still resets its sandbox and frees its slot.
            await asyncio.shield(self._start(self._give_back(sandbox, slots)))

    async def close(self) -> None:
        """End all sandboxes, lent ones too; safe to call twice, and from another loop once the pool's own is closed."""
        self._closed = True
        for slots in self._slots.values():
            slots.idle.clear()
        await self._end_all()
        if self._loop is asyncio.get_running_loop():
            await asyncio.gather(*self._tasks, return_exceptions=True)  # their leases see what they raise
            await self._end_all()

    async def _slots_of(self, role: SandboxRole) -> _Slots:
        loop = asyncio.get_running_loop()
        if self._loop is not loop:
            if self._loop is not None and not self._loop.is_closed():
                raise RuntimeError("a sandbox pool is in use on another event loop; open one pool per loop")
            self._loop = loop
            self._slots.clear()
            self._tasks.clear()
            await self._end_all()
        graders = min(self._size, _GRADERS_PER_CORE * len(os.sched_getaffinity(0)))
        room = graders if role == "grader" else self._size
        return self._slots.setdefault(role, _Slots(role, asyncio.Semaphore(room)))

    async def _obtain(self, slots: _Slots) -> Sandbox:
        while slots.idle:
            sandbox = slots.idle.pop()
            try:
                await sandbox.kill_all()  # a sign of life
            except SandboxLost:
                self.counts.replaced += 1
                await self._end(sandbox)
            else:
                self.counts.reused += 1
                return sandbox
        if self._closed:
            raise SandboxLost("the sandbox pool is closed")
        limits = self.limits
        if slots.role == "grader":
            limits = replace(limits, memory_mb=max(GRADER_MB, limits.memory_mb))
        sandbox = await self.backend.open(slots.role, limits)
        self._live.add(sandbox)
        self.counts.opened += 1
        return sandbox

    async def _give_back(self, sandbox: Sandbox, slots: _Slots) -> None:
        clean = False
        try:
            await sandbox.reset()
            clean = not self._closed
        except SandboxLost:
            self.counts.replaced += 1
        finally:
            try:
                if clean:
                    slots.idle.append(sandbox)
                else:
                    await self._end(sandbox)
            finally:
                slots.free.release()

    def _unclaimed(self, opening: asyncio.Task[Sandbox], slots: _Slots) -> None:
        """Nobody waits for this sandbox any more: keep it for the next lease."""
        if not opening.cancelled() and opening.exception() is None and not self._closed:
            slots.idle.append(opening.result())
        slots.free.release()

    def _start(self, work: Coroutine[Any, Any, _T]) -> asyncio.Task[_T]:
        task = asyncio.ensure_future(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    async def _end(self, sandbox: Sandbox) -> None:
        self._live.discard(sandbox)
        await sandbox.close()

    async def _end_all(self) -> None:
        await asyncio.gather(*(self._end(sandbox) for sandbox in list(self._live)))


def default_size(limits: SandboxLimits) -> int:
    """Sandboxes per role that this machine carries: by its cores, and by its memory if each used all of its limits."""
    available_mb = 0
    for line in Path("/proc/meminfo").read_text().splitlines():
        if line.startswith("MemAvailable:"):
            available_mb = int(line.split()[1]) // 1024
    return max(1, min(_PER_CORE * len(os.sched_getaffinity(0)), available_mb // (limits.memory_mb + limits.disk_mb)))

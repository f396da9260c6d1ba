"""What checks are made of: a room that opens sandboxes, and short ways to say what is expected."""

from __future__ import annotations

import asyncio
import functools
import os
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path

from agentrl.sandboxes.base import ExecResult, Sandbox, SandboxBackend, SandboxLimits

LIMITS = SandboxLimits(
    memory_mb=256, disk_mb=16, processes=24, open_files=64, output_bytes=4000, file_bytes=10_000
)
PYTHON = ("python3", "-I", "-S", "-B", "-c")
LATE = "until [ -e go ]; do sleep 0.05; done; touch late"
"""What a process of a check does that ought to be ended: it waits for a sign, so no clock decides
which came first.
"""
_BOOT_ID = "/proc/sys/kernel/random/boot_id"
_NAMESPACES = ("pid", "mnt", "net", "ipc", "user")


class BrokenPromise(Exception):
    """A promise is not kept; the message is what was seen."""


@dataclass(frozen=True)
class Room:
    """Where a check gets its sandboxes from.

    Attributes:
        hostile: the check would harm a machine that it is not kept from, so each sandbox first has
            to show that it shares no namespace with this one.
    """

    backend: SandboxBackend
    limits: SandboxLimits = LIMITS
    hostile: bool = False

    @asynccontextmanager
    async def sandbox(self) -> AsyncIterator[Sandbox]:
        """A new one, closed after the block."""
        sandbox = await self.backend.open("agent", self.limits)
        try:
            if self.hostile:
                await prove_apart(sandbox)
            yield sandbox
        finally:
            await sandbox.close()


async def prove_apart(sandbox: Sandbox) -> None:
    """Let a sandbox show that it runs on another kernel or in namespaces of its own.

    It may share the user namespace if its commands are a user who is neither root nor us and has no
    capability.

    Raises:
        BrokenPromise: it shares one with this machine, or cannot tell.
    """
    here = [
        Path(_BOOT_ID).read_text().strip(),
        *(os.readlink(f"/proc/self/ns/{name}") for name in _NAMESPACES),
    ]
    links = " ".join(f"/proc/self/ns/{name}" for name in _NAMESPACES)
    facts = "id -u && grep CapEff: /proc/self/status | cut -f 2"
    seen = await sandbox.exec(["sh", "-c", f"cat {_BOOT_ID} && readlink {links} && {facts}"])
    there = seen.stdout.decode("utf-8", "replace").split()
    if len(there) != len(here) + 2:
        raise BrokenPromise(
            f"not tried, as the sandbox cannot show that it is apart from this machine: {seen}"
        )
    *there, uid, capabilities = there
    shared = [link for link, other in zip(here[1:], there[1:], strict=True) if link == other]
    if uid not in ("0", str(os.geteuid())) and not capabilities.strip("0"):
        shared = [link for link in shared if not link.startswith("user:")]
    if there[0] == here[0] and shared:
        raise BrokenPromise(
            f"not tried, as the sandbox shares {', '.join(shared)} with this machine"
        )


BackendCheck = Callable[[Room], Awaitable[None]]
COMMON: list[BackendCheck] = []
BOUNDARY: list[BackendCheck] = []


def common(check: BackendCheck) -> BackendCheck:
    """Register a check for every backend."""
    COMMON.append(check)
    return check


def at_boundary(check: BackendCheck) -> BackendCheck:
    """Register a check that attacks; it runs only in a sandbox that has shown to be a boundary."""

    @functools.wraps(check)
    async def guarded(room: Room) -> None:
        await check(replace(room, hostile=True))

    BOUNDARY.append(guarded)
    return guarded


def expect(kept: bool, seen: object) -> None:
    """Raise `BrokenPromise` with what was seen, unless the promise was kept."""
    if not kept:
        raise BrokenPromise(str(seen)[:1000])


async def sh(sandbox: Sandbox, script: str, timeout_s: float = 10.0) -> ExecResult:
    """Run a shell script."""
    return await sandbox.exec(["sh", "-c", script], timeout_s=timeout_s)


async def appears(sandbox: Sandbox, path: str, within_s: float = 10.0) -> bool:
    """Wait until a path is in the work area."""
    deadline = asyncio.get_running_loop().time() + within_s
    while path not in {info.path for info in await sandbox.manifest()}:
        if asyncio.get_running_loop().time() > deadline:
            return False
        await asyncio.sleep(0.05)
    return True


async def goes_on(sandbox: Sandbox) -> bool:
    """Signal the processes that run `LATE`; returns whether one of them still answers."""
    await sandbox.put({"go": b""})
    return await appears(sandbox, "late", within_s=2.0)


async def python(sandbox: Sandbox, code: str, timeout_s: float = 20.0) -> ExecResult:
    """Run Python code."""
    return await sandbox.exec([*PYTHON, code], timeout_s=timeout_s)

"""What every backend promises, as checks: `violations = await check_backend(mine)`.

Each check is a function whose docstring is the promise. It gets a room to open sandboxes from and
raises `BrokenPromise` with what it saw instead. The checks in `boundary` apply to backends that say
`is_boundary`; they are attacks, and only ever run in a sandbox that has shown to share no namespace
with this machine. A sandbox needs `sh` and `python3` in its PATH.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass

from agentrl.errors import AgentRLError
from agentrl.sandboxes.base import SandboxBackend
from agentrl.sandboxes.contract import boundary as _boundary
from agentrl.sandboxes.contract import common as _common
from agentrl.sandboxes.contract import state as _state
from agentrl.sandboxes.contract.room import (
    BOUNDARY,
    COMMON,
    BackendCheck,
    BrokenPromise,
    Room,
    prove_apart,
)

__all__ = [
    "BOUNDARY",
    "COMMON",
    "BackendCheck",
    "BrokenPromise",
    "Room",
    "Violation",
    "check_backend",
    "prove_apart",
    "run_check",
]
CHECK_S = 60.0
_loaded = (_boundary, _common, _state)  # importing them registers their checks


@dataclass(frozen=True)
class Violation:
    """One broken promise: the check's name, the promise, and what was seen instead."""

    check: str
    promise: str
    seen: str


async def check_backend(backend: SandboxBackend, at_once: int = 4) -> list[Violation]:
    """Run every check that applies; returns what the backend breaks. Takes seconds."""
    turns = asyncio.Semaphore(at_once)

    async def run(check: BackendCheck) -> Violation | None:
        async with turns:
            return await run_check(check, backend)

    checks = [*COMMON, *(BOUNDARY if backend.is_boundary else [])]
    return [found for found in await asyncio.gather(*map(run, checks)) if found is not None]


async def run_check(check: BackendCheck, backend: SandboxBackend) -> Violation | None:
    """Run one check; None if the promise is kept."""
    try:
        await asyncio.wait_for(check(Room(backend)), CHECK_S)
    except (BrokenPromise, AgentRLError, TimeoutError, ValueError, OSError) as error:
        promise = " ".join((check.__doc__ or "").split())
        return Violation(
            getattr(check, "__name__", "check"), promise, f"{type(error).__name__}: {error}"
        )
    return None

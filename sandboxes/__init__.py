"""Where untrusted code runs: one protocol, several backends, and the contract they all pass."""

from __future__ import annotations

if __name__ == "sandboxes":
    raise ImportError("import agentrl.sandboxes, not sandboxes")

import sys

from agentrl.errors import ConfigError
from agentrl.sandboxes.base import (
    ExecResult,
    FileInfo,
    Sandbox,
    SandboxBackend,
    SandboxLimits,
    SandboxPool,
    SandboxRole,
)
from agentrl.sandboxes.bubblewrap import BubblewrapBackend, missing
from agentrl.sandboxes.pool import Pool
from agentrl.sandboxes.process import ProcessBackend

__all__ = [
    "BubblewrapBackend",
    "ExecResult",
    "FileInfo",
    "Pool",
    "ProcessBackend",
    "Sandbox",
    "SandboxBackend",
    "SandboxLimits",
    "SandboxPool",
    "SandboxRole",
    "available",
    "open_pool",
]
_NO_DOCKER = "not part of this version; use bubblewrap, or process for code that you trust"


def available() -> dict[str, str]:
    """Backend name -> "ok", or what is missing with its fix."""
    return {"bubblewrap": missing() or "ok", "docker": _NO_DOCKER, "process": "ok (no boundary)"}


def open_pool(name: str = "auto", size: int | None = None, limits: SandboxLimits | None = None) -> Pool:
    """A pool of the named backend: bubblewrap, process, or auto (bubblewrap where it works, else process, saying so).

    Nothing is started before the first lease.

    Raises:
        ConfigError: the backend does not exist or cannot be used here; the message names the fix.
    """
    if name == "docker":
        raise ConfigError(f"sandbox='docker' is {_NO_DOCKER}")
    if name not in ("auto", "bubblewrap", "process"):
        raise ConfigError(f"sandbox={name!r} is unknown; use bubblewrap, process or auto")
    problem = missing() if name != "process" else None
    if problem and name == "bubblewrap":
        raise ConfigError(f"sandbox='bubblewrap' cannot be used: {problem}")
    if problem:
        print(f"warning: {problem}; falling back to the process sandbox", file=sys.stderr)
    backend: SandboxBackend = ProcessBackend() if problem or name == "process" else BubblewrapBackend()
    return Pool(backend, size, limits)

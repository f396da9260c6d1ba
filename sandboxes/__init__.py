"""Where untrusted code runs: one protocol, several backends, and the contract they all pass."""

from __future__ import annotations

from typing import TYPE_CHECKING

from agentrl.lazy import lazy_names

if __name__ == "sandboxes":
    raise ImportError("import agentrl.sandboxes, not sandboxes")

if TYPE_CHECKING:
    from agentrl.sandboxes.backends import TRUSTED as TRUSTED
    from agentrl.sandboxes.backends import available as available
    from agentrl.sandboxes.backends import open_pool as open_pool
    from agentrl.sandboxes.base import ExecResult as ExecResult
    from agentrl.sandboxes.base import FileInfo as FileInfo
    from agentrl.sandboxes.base import Sandbox as Sandbox
    from agentrl.sandboxes.base import SandboxBackend as SandboxBackend
    from agentrl.sandboxes.base import SandboxLimits as SandboxLimits
    from agentrl.sandboxes.base import SandboxPool as SandboxPool
    from agentrl.sandboxes.base import SandboxRole as SandboxRole
    from agentrl.sandboxes.base import Session as Session
    from agentrl.sandboxes.base import Snapshot as Snapshot
    from agentrl.sandboxes.bubblewrap import BubblewrapBackend as BubblewrapBackend
    from agentrl.sandboxes.docker import DockerBackend as DockerBackend
    from agentrl.sandboxes.docker import requests_of as requests_of
    from agentrl.sandboxes.network import Allow as Allow
    from agentrl.sandboxes.network import NetworkRequest as NetworkRequest
    from agentrl.sandboxes.pool import Pool as Pool
    from agentrl.sandboxes.process import ProcessBackend as ProcessBackend
else:
    __all__, __getattr__, __dir__ = lazy_names(
        __name__,
        {
            "backends": ("TRUSTED", "available", "open_pool"),
            "base": (
                "ExecResult",
                "FileInfo",
                "Sandbox",
                "SandboxBackend",
                "SandboxLimits",
                "SandboxPool",
                "SandboxRole",
                "Session",
                "Snapshot",
            ),
            "bubblewrap": ("BubblewrapBackend",),
            "docker": ("DockerBackend", "requests_of"),
            "network": ("Allow", "NetworkRequest"),
            "pool": ("Pool",),
            "process": ("ProcessBackend",),
        },
    )

"""Which backends this machine has, and pools of them by name."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from agentrl.errors import ConfigError
from agentrl.sandboxes.base import SandboxBackend, SandboxLimits
from agentrl.sandboxes.bubblewrap import BubblewrapBackend, memory_bound, missing
from agentrl.sandboxes.docker import DockerBackend
from agentrl.sandboxes.docker import missing as docker_missing
from agentrl.sandboxes.network import Allow
from agentrl.sandboxes.pool import Pool
from agentrl.sandboxes.process import ProcessBackend
from agentrl.sandboxes.uids import user_bound


def available() -> dict[str, str]:
    """Backend name -> "ok", or what is missing with its fix."""
    return {
        "bubblewrap": missing() or f"ok ({memory_bound()}; {user_bound()})",
        "docker": docker_missing() or "ok",
        "process": "ok (no boundary)",
    }


TRUSTED = "trusted-process"
"""The process backend, and the explicit word that untrusted environments may run in it."""


def open_pool(
    name: str = "auto",
    size: int | None = None,
    limits: SandboxLimits | None = None,
    *,
    allow: Allow | Sequence[str] = (),
) -> Pool:
    """A pool of a named backend: bubblewrap, docker, process, or auto for the first that works.

    Nothing starts before the first lease. `process` is no boundary, so it refuses environments
    whose code is untrusted; `trusted-process` is the same backend and accepts them. `allow` names
    the hosts that agents may reach by HTTP and HTTPS; only docker can restrict them.

    Raises:
        ConfigError: the backend does not exist or cannot be used here; the message names the fix.
    """
    checks: dict[str, Callable[[], str | None]] = {
        "bubblewrap": missing,
        "docker": docker_missing,
        "process": lambda: None,
    }
    trust, name = name == TRUSTED, "process" if name == TRUSTED else name
    if name not in ("auto", *checks):
        raise ConfigError(f"sandbox={name!r} is unknown; use bubblewrap, docker, process or auto")
    if allow:
        if name not in ("auto", "docker"):
            raise ConfigError(
                f"sandbox={name!r} cannot keep agents to the hosts of allow=: use sandbox='docker'"
            )
        name = "docker"
    network = allow if isinstance(allow, Allow) else Allow(*_listed(allow)) if allow else "none"
    problems: list[str] = []
    for kind in checks if name == "auto" else (name,):
        problem = checks[kind]()
        if problem is None:
            notice = (
                f"warning: {'; '.join(problems)}; falling back to the {kind} sandbox"
                if problems
                else ""
            )
            return Pool(_backend(kind, network), size, limits, trust=trust, notice=notice)
        problems.append(problem)
    raise ConfigError(f"sandbox={name!r} cannot be used: {problems[0]}")


def _listed(hosts: Sequence[str]) -> Sequence[str]:
    if isinstance(hosts, str):
        raise ConfigError(f"allow={hosts!r} must be a list of hosts: allow=({hosts!r},)")
    return hosts


def _backend(name: str, network: str | Allow) -> SandboxBackend:
    if name == "docker":
        return DockerBackend(network=network)
    return BubblewrapBackend() if name == "bubblewrap" else ProcessBackend()

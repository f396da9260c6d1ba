"""The sandbox protocol: what every backend offers, whether it is a namespace, a container or a bare process.

A failing command is a value (`ExecResult`); a failing sandbox is an exception (`SandboxLost`). Bad arguments (a path
outside the work area, a limit that is no limit) raise ValueError before anything runs.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from typing import Literal, Protocol

SandboxRole = Literal["agent", "grader"]


@dataclass(frozen=True, slots=True)
class ExecResult:
    """How a command ended. `exit_code` is None when a signal ended it.

    Attributes:
        stdout: at most the asked number of bytes: head and tail are kept.
        dropped: bytes of output that were cut from the middle of stdout and stderr together.
    """

    exit_code: int | None
    signal: int | None
    stdout: bytes
    stderr: bytes
    timed_out: bool
    dropped: int
    wall_s: float


@dataclass(frozen=True, slots=True)
class FileInfo:
    """One entry of a manifest."""

    path: str
    kind: Literal["file", "dir", "link", "other"]
    mode: int
    size: int
    sha256: str


@dataclass(frozen=True, slots=True)
class SandboxLimits:
    """What one sandbox may use. Memory is per process with bubblewrap and process; output is per stream and command."""

    memory_mb: int = 512
    disk_mb: int = 256
    processes: int = 64
    open_files: int = 256
    output_bytes: int = 64_000
    file_bytes: int = 1_000_000

    def __post_init__(self) -> None:
        for name in self.__slots__:
            if getattr(self, name) <= 0:
                raise ValueError(f"sandbox limit {name}={getattr(self, name)} must be positive")


class Sandbox(Protocol):
    """One place to run code. All paths are relative to its work area."""

    async def exec(
        self,
        argv: Sequence[str],
        *,
        stdin: bytes = b"",
        env: Mapping[str, str] | None = None,
        timeout_s: float = 30.0,
    ) -> ExecResult:
        """Run a command in the work area and wait for its leader's exit (not for pipes to close).

        Raises:
            SandboxLost: the sandbox itself died or stopped answering.
        """
        ...

    async def put(self, files: Mapping[str, bytes]) -> None:
        """Write files, making parent directories; a link in the way is replaced, never followed.

        Raises:
            OSError: the work area is full; as the agent filled it, this is a value for it to see.
            SandboxLost: the sandbox itself died or stopped answering.
        """
        ...

    async def get(self, paths: Sequence[str]) -> dict[str, bytes]:
        """Read declared paths. What is missing, no regular file, behind a link or too large is left out."""
        ...

    async def manifest(self) -> list[FileInfo]:
        """Everything in the work area, sorted by path."""
        ...

    async def reset(self) -> None:
        """Kill every process of the sandbox, empty its work area, and verify both; a doubt raises SandboxLost."""
        ...

    async def kill_all(self) -> None:
        """End every process that runs in the sandbox but its supervisor."""
        ...

    async def close(self) -> None:
        """End the sandbox and everything in it; safe to call twice."""
        ...


class SandboxBackend(Protocol):
    """Opens sandboxes of one kind."""

    name: str
    is_boundary: bool

    async def open(self, role: SandboxRole, limits: SandboxLimits) -> Sandbox:
        """Start one sandbox.

        Raises:
            SandboxLost: it could not be started; the message names the missing part and the fix.
        """
        ...


class SandboxPool(Protocol):
    """Lends clean sandboxes; agent and grader slots never mix."""

    backend: SandboxBackend

    def lease(self, role: SandboxRole) -> AbstractAsyncContextManager[Sandbox]:
        """Borrow a clean sandbox for a `async with` block; afterwards it is reset and reused, or replaced."""
        ...

    async def close(self) -> None:
        """End all sandboxes; safe to call twice."""
        ...

"""The sandbox protocol: what every backend offers.

A failing command is a value (`ExecResult`); a failing sandbox is an exception (`SandboxLost`). Bad
arguments (a path outside the work area, a limit that is no limit) raise ValueError before anything
runs.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from types import MappingProxyType
from typing import Literal, Protocol, get_args

SandboxRole = Literal["agent", "grader"]
Isolation = Literal["reset", "fresh"]
SandboxNeed = Literal["ptrace", "sysvipc"]
NO_FILES: Mapping[str, bytes] = MappingProxyType({})


@dataclass(frozen=True, slots=True)
class ExecResult:
    """How a command ended. `exit_code` is None when a signal ended it.

    Attributes:
        stdout: at most the asked number of bytes: head and tail are kept.
        dropped: bytes of output that were cut from the middle of stdout and stderr together.
        oom: whether the kernel ended a process meanwhile because the sandbox's memory was used up.
            Known only where the sandbox has a memory cgroup; a limit per process shows as a failing
            allocation instead.
    """

    exit_code: int | None
    signal: int | None
    stdout: bytes
    stderr: bytes
    timed_out: bool
    dropped: int
    wall_s: float
    oom: bool = False


@dataclass(frozen=True, slots=True)
class FileInfo:
    """One entry of a manifest; `sha256` is of a file's content, or of where a link leads."""

    path: str
    kind: Literal["file", "dir", "link", "other"]
    mode: int
    size: int
    sha256: str

    @property
    def is_inside(self) -> bool:
        """Whether it lies in the work area."""
        return self.path != "." and not self.path.startswith("/")


@dataclass(frozen=True, slots=True)
class SnapshotEntry:
    """One entry of a snapshot: permission bits, and the bytes of a file or the target of a link."""

    path: str
    kind: Literal["file", "dir", "link"]
    mode: int
    data: bytes


@dataclass(frozen=True, slots=True)
class Snapshot:
    """The tree of a work area as plain data, sorted by path; the first entry is the work area, ".".

    Owner, inodes and times are no part of it, nor are sockets, devices and FIFOs: equal trees give
    equal snapshots, whatever sandbox they were taken from.
    """

    entries: tuple[SnapshotEntry, ...]

    @property
    def size(self) -> int:
        """Bytes of content."""
        return sum(len(entry.data) for entry in self.entries)

    @property
    def digest(self) -> str:
        """Hex sha256 over all entries."""
        digest = hashlib.sha256()
        for entry in self.entries:
            name = entry.path.encode("utf-8", "surrogateescape")
            digest.update(
                b"%d %s %o %d " % (len(name), entry.kind.encode(), entry.mode, len(entry.data))
            )
            digest.update(name + entry.data)
        return digest.hexdigest()


FileInfos = list[FileInfo]  # a class with a method `list` cannot say so in its own annotations
Differences = list[str]


@dataclass(frozen=True, slots=True)
class SandboxLimits:
    """What one sandbox may use. Memory is per process; output is per stream and command.

    Attributes:
        memory_mb: of one process. Docker also bounds all processes and files: that, 1.25 `disk_mb`
            and 16 more.
        disk_mb: of the work area and its temporary directory together.
        inodes: files and directories of each file system (docker).
        cpus: processor time per second (docker).
        needs: what is refused unless it is needed: tracing of own processes, System V IPC. Their
            traces cannot be undone, so a sandbox that permits them serves one episode only.
    """

    memory_mb: int = 512
    disk_mb: int = 256
    processes: int = 64
    open_files: int = 256
    output_bytes: int = 64_000
    file_bytes: int = 1_000_000
    inodes: int = 65_536
    cpus: float = 1.0
    needs: frozenset[SandboxNeed] = frozenset()

    def __post_init__(self) -> None:
        if unknown := self.needs - set(get_args(SandboxNeed)):
            known = " or ".join(get_args(SandboxNeed))
            raise ValueError(f"sandbox needs {sorted(unknown)} are unknown; use {known}")
        for name in self.__slots__:
            if name != "needs" and getattr(self, name) <= 0:
                raise ValueError(f"sandbox limit {name}={getattr(self, name)} must be positive")


class Session(Protocol):
    """A shell that keeps its directory, variables and functions from one command to the next.

    Commands have /dev/null as their stdin, no terminal, and pipes for output. What a background job
    prints comes with the output of a later command. The session is over when the sandbox is reset.
    When it is restored, the shell ends, as at a timeout.
    """

    @property
    def alive(self) -> bool:
        """Whether the shell outlived its last command.

        If not, the next command gets a new shell in the work area.
        """
        ...

    async def run(self, command: str, *, timeout_s: float = 30.0) -> ExecResult:
        """Run a command line and wait until the shell is done with it, not for its background jobs.

        A command that takes too long is ended with the shell and all that descends from it. When
        the shell itself ends (`exit`, a signal), the result says how.

        Raises:
            OSError: the session is over, or no shell can be started.
            SandboxLost: the sandbox itself died or stopped answering.
        """
        ...

    async def close(self) -> None:
        """End the shell and all that descends from it; safe to call twice."""
        ...


class Sandbox(Protocol):
    """One place to run code. All paths are relative to its work area."""

    async def exec(
        self,
        argv: Sequence[str],
        *,
        stdin: bytes = b"",
        env: Mapping[str, str] | None = None,
        cwd: str = ".",
        timeout_s: float = 30.0,
    ) -> ExecResult:
        """Run a command in the work area and wait for its leader's exit (not for pipes to close).

        `cwd` is a directory of the work area that no link leads to; without one there, exit code is
        126.

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
        """Read declared paths.

        Left out is what is missing, not a regular file, behind a link, or too large.
        """
        ...

    async def manifest(self, *, everywhere: bool = False) -> FileInfos:
        """Everything in the work area, sorted by path.

        With `everywhere` also the work area itself, as `.`, and by absolute paths all else that
        commands can write to: `/tmp` with all in it, shared memory, queues.
        """
        ...

    async def running(self) -> int:
        """How many processes run, besides the shells of open sessions; their children count."""
        ...

    async def list(self, path: str = ".") -> FileInfos:
        """What is directly in a directory, sorted by path and without hashes (`sha256` is empty).

        Raises:
            OSError: there is no such directory, a link leads to it, or it has more than 10,000
                entries.
        """
        ...

    async def open_session(self, env: Mapping[str, str] | None = None) -> Session:
        """A shell that keeps its state between commands: bash where there is one, else sh.

        Raises:
            OSError: there are eight already.
        """
        ...

    async def snapshot(self) -> Snapshot:
        """The work area's tree as it is now.

        Processes may change it meanwhile: call `kill_all` first to exclude that.

        Raises:
            OSError: over 32 MB, 10,000 entries or 64 levels.
        """
        ...

    async def restore(self, snapshot: Snapshot) -> None:
        """Kill every process, empty the work area and `/tmp`, and make this tree in the work area.

        Sessions stay open, without their shells. The user that commands run as owns all of it.

        Nothing is written through a link. On OSError a part of the tree may be there.

        Raises:
            OSError: there is no room for it, or an entry lies behind a link or in the place of
                another.
            SandboxLost: the sandbox cannot be emptied.
        """
        ...

    async def verify(self) -> Differences:
        """Name the kinds of things that differ from the sandbox's start; empty after a reset.

        Nothing is changed.

        Of a sandbox that shares namespaces with others, only what is its own is compared.
        """
        ...

    async def ping(self) -> None:
        """Ask for a sign of life.

        Raises:
            SandboxLost: the sandbox is gone.
        """
        ...

    async def reset(self, files: Mapping[str, bytes] = NO_FILES) -> None:
        """Kill every process, empty the work area, verify both, and only then write `files`.

        Raises:
            OSError: the work area is full.
            SandboxLost: in doubt, or if the sandbox itself died or stopped answering.
            ValueError: a path leaves the work area, or a file is larger than any sandbox takes;
                nothing was reset.
        """
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

    def lease(
        self,
        role: SandboxRole,
        *,
        isolation: Isolation = "reset",
        needs: Iterable[SandboxNeed] = (),
        untrusted: bool = False,
    ) -> AbstractAsyncContextManager[Sandbox]:
        """Borrow a clean sandbox for an `async with` block; afterwards it is reset or replaced.

        With isolation "fresh", and with any `needs`, nobody had it before and nobody gets it
        afterwards.

        Raises:
            ConfigError: `untrusted`, but the backend is no boundary and nobody said that this is
                wanted.
        """
        ...

    async def close(self) -> None:
        """End all sandboxes; safe to call twice."""
        ...

"""The Sandbox that every supervisor-based backend returns."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Self
from weakref import WeakSet

from agentrl.errors import SandboxLost
from agentrl.sandboxes.base import (
    NO_FILES,
    Differences,
    ExecResult,
    FileInfos,
    SandboxLimits,
    Session,
    Snapshot,
)
from agentrl.sandboxes.client import Peer, Wire
from agentrl.sandboxes.shell import Fields, Shell, exec_result, malformed, microseconds
from agentrl.sandboxes.supervisor.frames import MAX_FRAME, PROTOCOL
from agentrl.sandboxes.trees import entries_of, fields_of, infos_of
from agentrl.types import relative_path

GRACE_S = 10.0
OPEN_S = 30.0
BATCH_BYTES = MAX_FRAME // 4
SNAPSHOT_BYTES = MAX_FRAME // 2
# One thread per command unless it asks for more: a numeric library would start one per core and
# meet the limits.
COMMON_ENV = {
    "LANG": "C.UTF-8",
    "OMP_NUM_THREADS": "1",
    "OPENBLAS_NUM_THREADS": "1",
    "PYTHONDONTWRITEBYTECODE": "1",
}


@dataclass(frozen=True)
class Place:
    """What a supervisor has to know of where it runs, all as paths inside.

    Attributes:
        area: directory that holds the work area and the temporary directory.
        private: its namespaces serve this sandbox only, so a reset can compare them with their
            start.
        others: further directories that a reset empties.
        env: environment of every command.
        rlimits: names of `resource.RLIMIT_*` in lower case, without the prefix.
        demands: what must be in force, of "traceless", "adopts", "limited".
        uid: that of commands and of their files, where the supervisor is root; None for the
            supervisor's own.
        memory: descriptors, as the supervisor has them, of its memory cgroup's events and
            statistics; without them it looks for the files of a container.
    """

    area: str
    private: bool
    others: tuple[str, ...] = ()
    env: Mapping[str, str] = field(default_factory=dict)
    rlimits: Mapping[str, int] = field(default_factory=dict)
    demands: frozenset[str] = frozenset()
    uid: int | None = None
    memory: tuple[int, ...] = ()


def rlimits(limits: SandboxLimits) -> dict[str, int]:
    """The limits that bind each process by itself, wherever it runs. Bytes and counts."""
    return {
        "as": limits.memory_mb << 20,
        "core": 0,
        "fsize": limits.disk_mb << 20,
        "memlock": 0,
        "nofile": limits.open_files,
    }


class SupervisedSandbox:
    """A sandbox whose work is done by a supervisor inside it; see `agentrl.sandboxes.base.Sandbox`.

    Calls from several tasks of its event loop take turns.

    Attributes:
        bounded: whether a cgroup bounds its memory in total; else each process is bounded by
            itself.
    """

    def __init__(self, peer: Peer, limits: SandboxLimits) -> None:
        if 2 * limits.output_bytes > BATCH_BYTES or limits.file_bytes > BATCH_BYTES:
            raise ValueError(
                f"limits output_bytes and file_bytes must stay under {BATCH_BYTES // 2}, not"
                f" {limits}"
            )
        self._limits = limits
        self._wire = Wire(peer)
        self._turn = asyncio.Lock()
        self._shells: WeakSet[Shell] = WeakSet()
        self.bounded = False

    @classmethod
    async def open(cls, peer: Peer, place: Place, limits: SandboxLimits) -> Self:
        """Greet a supervisor that has just been started; on failure its peer is ended.

        Raises:
            SandboxLost: it does not answer, speaks another protocol, or cannot keep what `place`
                demands.
        """
        try:
            sandbox = cls(peer, limits)
        except BaseException:
            await peer.gone()
            raise
        try:
            await sandbox._greet(place)
        except BaseException:
            await sandbox.close()
            raise
        return sandbox

    async def _greet(self, place: Place) -> None:
        limits = ",".join(f"{name}={value}" for name, value in place.rlimits.items())
        uid = "" if place.uid is None else str(place.uid)
        settings = [place.area, str(int(place.private)), ":".join(place.others), limits, uid]
        settings += [",".join(map(str, place.memory)), *_settings(place.env)]
        try:
            answer = await self._call(
                "hello", *(os.fsencode(text) for text in settings), timeout_s=OPEN_S
            )
        except OSError as error:
            raise SandboxLost(f"the supervisor cannot set itself up: {error}") from error
        protocol, *facts = (self._wire.number(value) for value in answer)
        names = ("traceless", "adopts", "limited", "bounded")
        held = {name for name, fact in zip(names, facts, strict=False) if fact}
        self.bounded = "bounded" in held
        if protocol != PROTOCOL:
            raise SandboxLost(f"the supervisor speaks protocol {protocol}, not {PROTOCOL}")
        if missing := place.demands - held:
            raise SandboxLost(
                f"the sandbox cannot be {', '.join(sorted(missing))}: its Python lacks ctypes or"
                " resource; install the Debian package libpython3-stdlib where it runs (with"
                " docker, memory_mb=256 will do too)"
            )

    async def _call(self, verb: str, *arguments: bytes, timeout_s: float = GRACE_S) -> Fields:
        async with self._turn:
            return await self._wire.call([verb.encode(), *arguments], timeout_s)

    async def ping(self) -> None:
        """Ask the supervisor for a sign of life.

        Raises:
            SandboxLost: the sandbox is gone.
        """
        await self._call("ping")

    async def exec(
        self,
        argv: Sequence[str],
        *,
        stdin: bytes = b"",
        env: Mapping[str, str] | None = None,
        cwd: str = ".",
        timeout_s: float = 30.0,
    ) -> ExecResult:
        """Run a command in the work area.

        Exit code 127 is a command that is not there, 126 one that cannot be started.

        Raises:
            SandboxLost: the sandbox itself died or stopped answering.
            ValueError: no argv, one that is no list, a NUL, a bad time, or a `cwd`
                outside.
        """
        if isinstance(argv, str | bytes):
            raise ValueError(
                f"argv {argv!r} must be a list of words: ['sh', '-c', {argv!r}] for a line of shell"
            )
        words = [*argv, *_settings(env or {})]
        if not argv or not argv[0] or any("\0" in word for word in words):
            raise ValueError(
                f"argv {list(argv)!r} must name a program, and neither it nor env may hold a NUL"
            )
        cap = self._limits.output_bytes
        head = (microseconds(timeout_s), b"%d" % cap, stdin, _directory(cwd), b"%d" % len(argv))
        answer = await self._call(
            "exec", *head, *map(os.fsencode, words), timeout_s=timeout_s + GRACE_S
        )
        return exec_result(self._wire, answer, cap)

    async def open_session(self, env: Mapping[str, str] | None = None) -> Session:
        """A shell that keeps its state between commands; see `agentrl.sandboxes.base.Session`.

        Raises:
            OSError: there are eight already.
            SandboxLost: the sandbox itself died or stopped answering.
            ValueError: a variable without a name, or with a NUL.
        """
        settings = _settings(env or {})
        if any("\0" in setting for setting in settings):
            raise ValueError("env of a session must not hold a NUL")
        answer = await self._call("open", *map(os.fsencode, settings))
        if len(answer) != 1:
            raise self._broken("open")
        number, cap = self._wire.number(answer[0]), self._limits.output_bytes
        shell = Shell(self._wire, self._call, number, cap)
        self._shells.add(shell)
        return shell

    async def put(self, files: Mapping[str, bytes]) -> None:
        """Write files, making parent directories; a link in the way is replaced, never followed.

        Raises:
            OSError: the work area is full.
            SandboxLost: the sandbox itself died or stopped answering.
            ValueError: a path leaves the work area, or a file is no bytes or larger than any
                sandbox takes.
        """
        for batch in _batches(files):
            await self._call("put", *batch)

    async def get(self, paths: Sequence[str]) -> dict[str, bytes]:
        """Read declared paths.

        Left out is what is missing, not a regular file, behind a link, or too large.

        Raises:
            SandboxLost: the sandbox itself died or stopped answering.
            ValueError: a path leaves the work area.
        """
        found: dict[str, bytes] = {}
        names = [os.fsencode(relative_path(path)) for path in paths]
        cap, size = self._limits.file_bytes, max(1, BATCH_BYTES // (self._limits.file_bytes + 1))
        for start in range(0, len(names), size):
            answer = await self._call("get", b"%d" % cap, *names[start : start + size])
            for index, data in zip(answer[::2], answer[1::2], strict=False):
                at = start + self._wire.number(index)
                if not start <= at < min(start + size, len(paths)) or len(data) > cap:
                    raise self._broken("get")
                found[paths[at]] = data
        return found

    async def manifest(self, *, everywhere: bool = False) -> FileInfos:
        """Everything in the work area, sorted by path; see `agentrl.sandboxes.base.Sandbox`.

        A directory that its owner locked is unlocked to look inside.

        Raises:
            OSError: over 10,000 entries or 64 levels.
            SandboxLost: the sandbox itself died or stopped answering.
        """
        wanted = b"%d" % everywhere
        answer = await self._call("manifest", wanted, timeout_s=3 * GRACE_S)
        return infos_of(self._wire, answer)

    async def running(self) -> int:
        """How many processes run, besides the shells of open sessions.

        Raises:
            SandboxLost: the sandbox itself died or stopped answering.
        """
        answer = await self._call("census")
        if len(answer) != 1:
            raise self._broken("census")
        return self._wire.number(answer[0])

    async def list(self, path: str = ".") -> FileInfos:
        """What is directly in a directory, sorted by path and without hashes.

        Raises:
            OSError: there is no such directory, a link leads to it, or it has more than 10,000
                entries.
            SandboxLost: the sandbox itself died or stopped answering.
            ValueError: the path leaves the work area.
        """
        return infos_of(self._wire, await self._call("list", _directory(path)))

    async def snapshot(self) -> Snapshot:
        """The work area's tree as it is now.

        Raises:
            OSError: over SNAPSHOT_BYTES, 10,000 entries or 64 levels.
            SandboxLost: the sandbox itself died or stopped answering.
        """
        answer = await self._call("snapshot", b"%d" % SNAPSHOT_BYTES, timeout_s=3 * GRACE_S)
        return Snapshot(entries_of(self._wire, answer, SNAPSHOT_BYTES))

    async def restore(self, snapshot: Snapshot) -> None:
        """Kill every process, empty the work area and `/tmp`, and make this tree in the work area.

        Raises:
            OSError: there is no room for it, or an entry lies behind a link or in the place of
                another.
            SandboxLost: the sandbox cannot be emptied, or died or stopped answering.
            ValueError: a path leaves the work area, or the tree is larger than SNAPSHOT_BYTES.
        """
        if snapshot.size > SNAPSHOT_BYTES:
            raise ValueError(
                f"a snapshot of {snapshot.size} bytes is over the {SNAPSHOT_BYTES} that a sandbox"
                " takes"
            )
        for shell in self._shells:
            shell.forget()
        await self._call("restore", *fields_of(snapshot), timeout_s=3 * GRACE_S)

    async def verify(self) -> Differences:
        """What differs from the sandbox's start, as names of kinds of things; nothing is changed.

        Raises:
            SandboxLost: the sandbox itself died or stopped answering.
        """
        return [name.decode("ascii", "replace") for name in await self._call("verify")]

    async def reset(self, files: Mapping[str, bytes] = NO_FILES) -> None:
        """Kill every process, empty the work area, verify both, and only then write `files`.

        The files travel while the supervisor is still at work, so this is faster than a reset and a
        put.

        Raises:
            OSError: the work area is full.
            SandboxLost: something is left, or the sandbox itself died or stopped answering.
            ValueError: a path leaves the work area, or a file is larger than any sandbox takes;
                nothing was reset.
        """
        requests = [[b"reset"], *([b"put", *batch] for batch in _batches(files))]
        await self._settle()
        async with self._turn:
            await asyncio.gather(*(self._wire.call(request, 3 * GRACE_S) for request in requests))

    async def _settle(self) -> None:
        """What has to be over before a reset can compare."""

    async def kill_all(self) -> None:
        """End every process that runs in the sandbox but its supervisor.

        Raises:
            SandboxLost: some cannot be ended, or the sandbox itself died or stopped answering.
        """
        await self._call("kill")

    async def close(self) -> None:
        """End the sandbox and everything in it; safe to call twice, and from any event loop."""
        self._wire.lose("the sandbox is closed")
        await self._wire.peer.gone()

    def _broken(self, verb: str) -> SandboxLost:
        return malformed(self._wire, verb)


def _directory(path: str) -> bytes:
    """A directory as the supervisor wants it: empty for the work area itself."""
    return b"" if path == "." else os.fsencode(relative_path(path))


def _settings(env: Mapping[str, str]) -> list[str]:
    """`NAME=value` for each variable.

    Raises:
        ValueError: a name is empty or holds `=`.
    """
    for name in env:
        if not name or "=" in name:
            raise ValueError(f"environment variable {name!r} must have a name without '='")
    return [f"{name}={value}" for name, value in env.items()]


def _batches(files: Mapping[str, bytes]) -> Iterator[list[bytes]]:
    """Arguments of `put`, cut so that each request fits a frame."""
    batch: list[bytes] = []
    size = 0
    for path, data in files.items():
        if not isinstance(data, bytes | bytearray | memoryview):
            raise ValueError(
                f"file {path!r} must be bytes, not {type(data).__name__}: encode text first"
            )
        if len(data) > BATCH_BYTES:
            raise ValueError(
                f"file {path!r} has {len(data)} bytes; a sandbox takes at most {BATCH_BYTES} per"
                " file"
            )
        if batch and (size + len(data) > BATCH_BYTES or len(batch) >= 2000):
            yield batch
            batch, size = [], 0
        batch += [os.fsencode(relative_path(path)), bytes(data)]
        size += len(data)
    if batch:
        yield batch

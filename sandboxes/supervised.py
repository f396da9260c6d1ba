"""The host's side of a sandbox: `Sandbox` implemented by a supervisor that runs inside it.

Every verb is one request over the wire. What comes back was written by a process that an attacker
may control, so each answer is checked before it becomes a value.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol, Self
from weakref import WeakSet

from agentrl.errors import SandboxLost
from agentrl.sandboxes.base import (
    NO_FILES,
    Differences,
    ExecResult,
    FileInfo,
    FileInfos,
    SandboxLimits,
    Session,
    Snapshot,
    SnapshotEntry,
)
from agentrl.sandboxes.supervisor.frames import MAX_FRAME, PROTOCOL
from agentrl.sandboxes.wire import Peer, Wire
from agentrl.types import relative_path

GRACE_S = 10.0
OPEN_S = 30.0
BATCH_BYTES = MAX_FRAME // 4
SNAPSHOT_BYTES = MAX_FRAME // 2
_ERROR_TEXT_BYTES = 8192  # the supervisor's own message may exceed a tiny output cap
_EXEC_NUMBERS = 5
_SNAPSHOT_KINDS = {b"dir", b"file", b"link"}
_MANIFEST_KINDS = {*_SNAPSHOT_KINDS, b"other"}
_FORBIDDEN_NAMES = {b"", b".", b".."}
Fields = list[bytes]
# One thread per command unless it asks for more: a numeric library would start one thread per core
# and hit the process limit.
COMMON_ENV = {
    "LANG": "C.UTF-8",
    "OMP_NUM_THREADS": "1",
    "OPENBLAS_NUM_THREADS": "1",
    "PYTHONDONTWRITEBYTECODE": "1",
}


@dataclass(frozen=True)
class Place:
    """What a supervisor must know about where it runs; paths are as seen from inside.

    Attributes:
        area: directory that holds the work area and the temporary directory.
        private: whether its namespaces serve this sandbox only, so that a reset can compare them
            with their initial state.
        others: further directories that a reset empties.
        env: environment of every command.
        rlimits: lower-case names of `resource.RLIMIT_*` without the prefix, and their values.
        demands: what must be in force: any of "traceless", "adopts", "limited", "bounded".
        uid: uid of commands and their files if the supervisor is root; None for its own.
        memory: file descriptors (in the supervisor) of its memory cgroup's events and statistics;
            if empty, it looks for a container's files.
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
    """Limits that apply to each process, in bytes or counts, on any backend."""
    return {
        "as": limits.memory_mb << 20,
        "core": 0,
        "fsize": limits.disk_mb << 20,
        "memlock": 0,
        "nofile": limits.open_files,
    }


class _Call(Protocol):
    """Sends a request and waits for the answer's fields."""

    async def __call__(
        self, verb: str, *arguments: bytes, timeout_s: float = GRACE_S
    ) -> Fields: ...


class Shell:
    """A session of a supervised sandbox; see `agentrl.sandboxes.base.Session`."""

    def __init__(self, wire: Wire, call: _Call, number: int, output_bytes: int) -> None:
        self._wire = wire
        self._call = call
        self._number = b"%d" % number
        self._cap = output_bytes
        self._alive = False

    @property
    def alive(self) -> bool:
        """Whether the shell outlived its last command."""
        return self._alive and self._wire.lost is None

    async def run(self, command: str, *, timeout_s: float = 30.0) -> ExecResult:
        """Run a command line; OSError ESTALE means that the session has ended."""
        if "\0" in command:
            raise ValueError("a session's command must not hold a NUL")
        text = command.encode("utf-8", "surrogateescape")
        self._alive = False  # until the answer arrives: cancelling a command ends its shell
        head = (self._number, _microseconds(timeout_s), b"%d" % self._cap)
        answer = await self._call("run", *head, text, timeout_s=timeout_s + GRACE_S)
        result = _parse_exec(self._wire, answer[:-1], self._cap)
        self._alive = answer[-1] == b"1"
        return result

    def forget(self) -> None:
        """Note that the sandbox ended the shell."""
        self._alive = False

    async def close(self) -> None:
        """End the shell and its descendants; safe to call twice."""
        self._alive = False
        try:
            await self._call("end", self._number)
        except OSError:  # the session has already ended
            return


class SupervisedSandbox:
    """A sandbox run by a supervisor inside it; `agentrl.sandboxes.base.Sandbox` says what each
    verb does.

    Concurrent calls from its event loop take turns.

    Attributes:
        bounded: whether a cgroup bounds its total memory; otherwise each process has its own limit.
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
        """Shake hands with a newly started supervisor; on failure its peer is ended.

        Raises:
            SandboxLost: it does not answer, speaks another protocol, or cannot meet the demands.
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
        setup = [place.area, str(int(place.private)), ":".join(place.others), limits, uid]
        setup += [",".join(map(str, place.memory)), *_env_pairs(place.env)]
        try:
            answer = await self._call(
                "hello", *(os.fsencode(text) for text in setup), timeout_s=OPEN_S
            )
        except OSError as error:
            raise SandboxLost(f"the supervisor cannot set itself up: {error}") from error
        protocol, *facts = (self._wire.number(value) for value in answer)
        names = ("traceless", "adopts", "limited", "bounded")
        in_force = {name for name, fact in zip(names, facts, strict=False) if fact}
        self.bounded = "bounded" in in_force
        if protocol != PROTOCOL:
            raise SandboxLost(f"the supervisor speaks protocol {protocol}, not {PROTOCOL}")
        if missing := place.demands - in_force:
            raise SandboxLost(
                f"the sandbox cannot be {', '.join(sorted(missing))}: its Python lacks ctypes or"
                " resource; install the Debian package libpython3-stdlib where it runs (with"
                " docker, memory_mb=256 will do too)"
            )

    async def _call(self, verb: str, *arguments: bytes, timeout_s: float = GRACE_S) -> Fields:
        async with self._turn:
            return await self._wire.call([verb.encode(), *arguments], timeout_s)

    async def ping(self) -> None:
        """Ask the supervisor for a sign of life."""
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
        """Run a command; exit code 127 means not found, 126 found but not started.

        Raises:
            ValueError: `argv` is empty or a plain string, something holds a NUL, `timeout_s` is out
                of range, or `cwd` lies outside the work area.
        """
        if isinstance(argv, str | bytes):
            raise ValueError(
                f"argv {argv!r} must be a list: use ['sh', '-c', {argv!r}] for a shell command"
            )
        words = [*argv, *_env_pairs(env or {})]
        if not argv or not argv[0] or any("\0" in word for word in words):
            raise ValueError(
                f"argv {list(argv)!r} must name a program, and neither it nor env may hold a NUL"
            )
        cap = self._limits.output_bytes
        head = (_microseconds(timeout_s), b"%d" % cap, stdin, _directory(cwd), b"%d" % len(argv))
        answer = await self._call(
            "exec", *head, *map(os.fsencode, words), timeout_s=timeout_s + GRACE_S
        )
        return _parse_exec(self._wire, answer, cap)

    async def open_session(self, env: Mapping[str, str] | None = None) -> Session:
        """Open a shell that keeps its state between commands."""
        pairs = _env_pairs(env or {})
        if any("\0" in pair for pair in pairs):
            raise ValueError("env of a session must not hold a NUL")
        answer = await self._call("open", *map(os.fsencode, pairs))
        if len(answer) != 1:
            raise self._wire.malformed("open")
        number, cap = self._wire.number(answer[0]), self._limits.output_bytes
        shell = Shell(self._wire, self._call, number, cap)
        self._shells.add(shell)
        return shell

    async def put(self, files: Mapping[str, bytes]) -> None:
        """Write files in as many requests as they need."""
        for batch in _batches(files):
            await self._call("put", *batch)

    async def get(self, paths: Sequence[str]) -> dict[str, bytes]:
        """Read declared paths."""
        files: dict[str, bytes] = {}
        names = [os.fsencode(relative_path(path)) for path in paths]
        cap, size = self._limits.file_bytes, max(1, BATCH_BYTES // (self._limits.file_bytes + 1))
        for start in range(0, len(names), size):
            answer = await self._call("get", b"%d" % cap, *names[start : start + size])
            for index, data in zip(answer[::2], answer[1::2], strict=False):
                position = start + self._wire.number(index)
                in_batch = start <= position < min(start + size, len(paths))
                if not in_batch or len(data) > cap:
                    raise self._wire.malformed("get")
                files[paths[position]] = data
        return files

    async def manifest(self, *, everywhere: bool = False) -> FileInfos:
        """List the work area; a directory its owner locked is unlocked to look inside."""
        wanted = b"%d" % everywhere
        answer = await self._call("manifest", wanted, timeout_s=3 * GRACE_S)
        return _parse_manifest(self._wire, answer)

    async def running(self) -> int:
        """Count processes, not counting the shells of open sessions."""
        answer = await self._call("census")
        if len(answer) != 1:
            raise self._wire.malformed("census")
        return self._wire.number(answer[0])

    async def list(self, path: str = ".") -> FileInfos:
        """List one directory, without hashes."""
        return _parse_manifest(self._wire, await self._call("list", _directory(path)))

    async def snapshot(self) -> Snapshot:
        """Copy the tree of the work area, up to SNAPSHOT_BYTES."""
        answer = await self._call("snapshot", b"%d" % SNAPSHOT_BYTES, timeout_s=3 * GRACE_S)
        return Snapshot(_parse_snapshot(self._wire, answer, SNAPSHOT_BYTES))

    async def restore(self, snapshot: Snapshot) -> None:
        """Kill everything and recreate this tree."""
        if snapshot.size > SNAPSHOT_BYTES:
            raise ValueError(
                f"a snapshot of {snapshot.size} bytes is over the {SNAPSHOT_BYTES} that a sandbox"
                " takes"
            )
        for shell in self._shells:
            shell.forget()
        await self._call("restore", *_snapshot_fields(snapshot), timeout_s=3 * GRACE_S)

    async def verify(self) -> Differences:
        """Name what differs from the initial state."""
        return [name.decode("ascii", "replace") for name in await self._call("verify")]

    async def reset(self, files: Mapping[str, bytes] = NO_FILES) -> None:
        """Restore the initial state, then write `files`.

        The files travel while the supervisor is still busy, so this is faster than reset, then put.
        """
        requests = [[b"reset"], *([b"put", *batch] for batch in _batches(files))]
        await self._settle()
        async with self._turn:
            await asyncio.gather(*(self._wire.call(request, 3 * GRACE_S) for request in requests))

    async def _settle(self) -> None:
        """Wait for whatever must finish before a reset can compare."""

    async def kill_all(self) -> None:
        """End every process but the supervisor."""
        await self._call("kill")

    async def close(self) -> None:
        """End the sandbox; safe to call twice, and from any event loop."""
        self._wire.lose("the sandbox is closed")
        await self._wire.peer.gone()


def _directory(path: str) -> bytes:
    """Encode a directory for the supervisor: empty means the work area itself."""
    return b"" if path == "." else os.fsencode(relative_path(path))


def _env_pairs(env: Mapping[str, str]) -> list[str]:
    """Format each variable as `NAME=value`."""
    for name in env:
        if not name or "=" in name:
            raise ValueError(f"environment variable {name!r} must have a name without '='")
    return [f"{name}={value}" for name, value in env.items()]


def _batches(files: Mapping[str, bytes]) -> Iterator[list[bytes]]:
    """Arguments of `put`, split so that each request fits into a frame."""
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


def _microseconds(timeout_s: float) -> bytes:
    """Encode a time limit for the supervisor."""
    if not 0 < timeout_s < 1e6:
        raise ValueError(f"timeout_s={timeout_s} must be positive and below 1e6 seconds")
    return b"%d" % int(timeout_s * 1e6)


def _parse_exec(wire: Wire, answer: Fields, cap: int) -> ExecResult:
    """Parse how a command ended; outputs may be at most `cap` bytes."""
    if len(answer) != _EXEC_NUMBERS + 2 or max(map(len, answer[_EXEC_NUMBERS:])) > max(
        cap, _ERROR_TEXT_BYTES
    ):
        raise wire.malformed("exec")
    status, timed_out, dropped, wall, oom = (wire.number(value) for value in answer[:_EXEC_NUMBERS])
    return ExecResult(
        exit_code=None if status < 0 else status,
        signal=-status if status < 0 else None,
        stdout=answer[_EXEC_NUMBERS],
        stderr=answer[_EXEC_NUMBERS + 1],
        timed_out=bool(timed_out),
        dropped=dropped,
        wall_s=wall / 1e6,
        oom=bool(oom),
    )


def _parse_manifest(wire: Wire, answer: Fields) -> FileInfos:
    """Parse a manifest (five fields an entry) and sort it by path."""
    rows = [answer[start : start + 5] for start in range(0, len(answer), 5)]
    if len(answer) % 5 or any(row[1] not in _MANIFEST_KINDS for row in rows):
        raise wire.malformed("manifest")
    return sorted((_info(wire, *row) for row in rows), key=lambda info: info.path)


def _info(
    wire: Wire, path: bytes, kind: bytes, mode: bytes, size: bytes, sha256: bytes
) -> FileInfo:
    return FileInfo(
        os.fsdecode(path),
        kind.decode(),  # type: ignore[arg-type]
        wire.number(mode),
        wire.number(size),
        sha256.decode("ascii", "replace"),
    )


def _parse_snapshot(wire: Wire, answer: Fields, cap: int) -> tuple[SnapshotEntry, ...]:
    """Parse a snapshot (four fields an entry), at most `cap` bytes of names and contents."""
    rows = [answer[start : start + 4] for start in range(0, len(answer), 4)]
    has_root = len(answer) % 4 == 0 and bool(rows) and rows[0][:2] == [b".", b"dir"]
    n_bytes = sum(len(row[0]) + len(row[3]) for row in rows[1:])
    if not has_root or n_bytes > cap or not all(map(_is_safe_entry, rows[1:])):
        raise wire.malformed("snapshot")
    return tuple(_entry(wire, *row) for row in rows)


def _entry(wire: Wire, path: bytes, kind: bytes, mode: bytes, data: bytes) -> SnapshotEntry:
    return SnapshotEntry(os.fsdecode(path), kind.decode(), wire.number(mode), data)  # type: ignore[arg-type]


def _is_safe_entry(row: list[bytes]) -> bool:
    """Whether a snapshot row has a known kind and a path that stays inside the work area."""
    return (
        row[1] in _SNAPSHOT_KINDS
        and b"\0" not in row[0]
        and _FORBIDDEN_NAMES.isdisjoint(row[0].split(b"/"))
    )


def _snapshot_fields(snapshot: Snapshot) -> Fields:
    """Encode a snapshot, parents before their children.

    Raises:
        ValueError: a path leaves the work area, or a link's target holds a NUL.
    """
    fields = []
    for entry in sorted(snapshot.entries, key=lambda entry: os.fsencode(entry.path)):
        row = [os.fsencode(entry.path), entry.kind.encode(), b"%d" % entry.mode, entry.data]
        if (entry.path != "." or entry.kind != "dir") and not _is_safe_entry(row):
            raise ValueError(
                f"snapshot entry {entry.path!r} of kind {entry.kind!r} must be a path inside a work"
                " area"
            )
        if entry.kind == "link" and b"\0" in entry.data:
            raise ValueError(f"snapshot entry {entry.path!r} is a link to a target with a NUL")
        fields += row
    return fields

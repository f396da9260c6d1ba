"""The rival of the sandbox rows: a plain container, worked through the docker SDK as its
documentation shows.

The same image and the same flags as ours (what isolates and what limits), with `sleep infinity` in
it instead of our supervisor. Commands are `exec_create` + `exec_start` + `exec_inspect`, which is
what `exec_run` does, by the low-level client on its keep-alive connections. A clean state is a new
container: remove(force), create, start.

Docker refuses `put_archive` where the root is read-only, and it cannot reach a tmpfs. So files come
in one of two ways: with the same flags through `tar -x` by exec, or by `put_archive` into a
container whose root is writable, which is the weaker box. Rows that unpack measure both and take
the faster one.
"""

from __future__ import annotations

import asyncio
import io
import socket
import tarfile
from collections.abc import AsyncIterator, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from typing import Any

from docker.utils.socket import frames_iter

from agentrl.sandboxes.base import (
    ExecResult,
    FileInfos,
    Isolation,
    SandboxBackend,
    SandboxLimits,
    SandboxNeed,
    SandboxRole,
)
from agentrl.sandboxes.docker import DockerBackend
from agentrl.sandboxes.docker.backend import first_daemon
from agentrl.sandboxes.docker.images import Layered, image_of
from agentrl.sandboxes.docker.spec import AREA, ContainerSpec

USER = 19_999  # below the uids that our own sandboxes take
_ROOT_AREA = "/work"
_LIFETIME_S = 3600.0
_STDERR = 2


class PlainContainer:
    """One container and the calls of the SDK on it; all of them block."""

    def __init__(
        self,
        role: SandboxRole = "agent",
        limits: SandboxLimits | None = None,
        *,
        archive: bool = False,
    ):
        """Start one; with `archive` its root is writable, so files can come by `put_archive`."""
        self.archive = archive
        self.area = _ROOT_AREA if archive else AREA
        self._daemon = first_daemon()
        self.api = self._daemon.api()
        layered = Layered(self._daemon, image_of(role, None))
        spec = ContainerSpec(
            layered.image, limits or SandboxLimits(), self._daemon.owner.labels(_LIFETIME_S)
        )
        self._config = _plain(spec.config(self._daemon.cores), archive)
        self.start()

    def start(self) -> None:
        """Create and start a container."""
        self.id: str = self.api.create_container_from_config(self._config, None)["Id"]
        self.api.start(self.id)

    def remove(self) -> None:
        """End it."""
        self.api.remove_container(self.id, force=True)

    def renew(self, archive: bytes) -> None:
        """A clean state with these files in it."""
        self.remove()
        self.start()
        self.unpack(archive)

    def run(
        self, argv: Sequence[str], stdin: bytes = b"", env: Mapping[str, str] | None = None
    ) -> ExecResult:
        """Run a command in the work area."""
        made = self.api.exec_create(
            self.id,
            list(argv),
            stdin=bool(stdin),
            user=str(USER),
            workdir=self.area,
            environment=dict(env or {}),
        )
        if stdin:
            stdout, stderr = _converse(self.api, made["Id"], stdin)
        else:
            stdout, stderr = (part or b"" for part in self.api.exec_start(made["Id"], demux=True))
        code = self.api.exec_inspect(made["Id"])["ExitCode"]
        return ExecResult(code, None, stdout, stderr, False, 0, 0.0)

    def unpack(self, archive: bytes) -> None:
        """Put the files of a tar archive into the work area."""
        if self.archive:
            assert self.api.put_archive(self.id, "/", archive)
            return
        done = self.run(["tar", "-x"], archive)
        assert done.exit_code == 0, done.stderr[:300]

    def pack(self, files: Mapping[str, bytes]) -> bytes:
        """The tar archive that `unpack` takes."""
        prefix = f"{_ROOT_AREA[1:]}/" if self.archive else ""
        buffer = io.BytesIO()
        with tarfile.open(fileobj=buffer, mode="w") as archive:
            if prefix:
                archive.addfile(_member(prefix, tarfile.DIRTYPE, 0o755))
            for path, data in files.items():
                member = _member(prefix + path, tarfile.REGTYPE, 0o644)
                member.size = len(data)
                archive.addfile(member, io.BytesIO(data))
        return buffer.getvalue()


def _plain(config: dict[str, Any], archive: bool) -> dict[str, Any]:
    """The request of a sandbox of ours, for a container that only sleeps and does not listen to a
    stream.
    """
    config |= {"Entrypoint": ["sleep"], "Cmd": ["infinity"]}
    config |= dict.fromkeys(
        ("OpenStdin", "StdinOnce", "AttachStdin", "AttachStdout", "AttachStderr"), False
    )
    host = config["HostConfig"]
    host["PidsLimit"] += 1  # its own process is `sleep`, not ours
    tmpfs = dict(host["Tmpfs"])
    tmpfs[AREA] += f",uid={USER},gid={USER}"  # the work area is the agent's, as ours is
    host["Tmpfs"] = tmpfs
    host["ReadonlyRootfs"] = not archive
    return config


def _member(name: str, kind: bytes, mode: int) -> tarfile.TarInfo:
    member = tarfile.TarInfo(name)
    member.type, member.mode, member.uid, member.gid = kind, mode, USER, USER
    return member


def _converse(api: Any, exec_id: str, stdin: bytes) -> tuple[bytes, bytes]:
    stream = api.exec_start(exec_id, socket=True)
    try:
        stream._sock.sendall(stdin)
        stream._sock.shutdown(socket.SHUT_WR)
        outputs = (bytearray(), bytearray())
        for kind, piece in frames_iter(stream, tty=False):
            outputs[kind == _STDERR].extend(piece)
    finally:
        stream._response.close()
    return bytes(outputs[0]), bytes(outputs[1])


class PlainSandbox:
    """As much of `agentrl.sandboxes.base.Sandbox` as an episode needs, by `exec_run`."""

    def __init__(self, container: PlainContainer, threads: ThreadPoolExecutor) -> None:
        self._container = container
        self._threads = threads

    async def exec(
        self,
        argv: Sequence[str],
        *,
        stdin: bytes = b"",
        env: Mapping[str, str] | None = None,
        cwd: str = ".",
        timeout_s: float = 30.0,
    ) -> ExecResult:
        done: ExecResult = await self._do(self._container.run, argv, stdin, env)
        return done

    async def put(self, files: Mapping[str, bytes]) -> None:
        await self._do(self._container.unpack, self._container.pack(files))

    async def get(self, paths: Sequence[str]) -> dict[str, bytes]:
        done = await self._do(self._container.run, ["tar", "-c", *paths])
        with tarfile.open(fileobj=io.BytesIO(done.stdout)) as archive:
            return {member.name: archive.extractfile(member).read() for member in archive}  # type: ignore[union-attr]

    async def manifest(self, *, everywhere: bool = False) -> FileInfos:
        """Return nothing: our episodes record their start state; the rival is spared the work."""
        return []

    async def kill_all(self) -> None:
        """Do nothing: ours stop all processes before collecting artifacts; the rival need not."""

    async def _do(self, call: Any, *arguments: Any) -> Any:
        return await asyncio.get_running_loop().run_in_executor(self._threads, call, *arguments)


class PlainPool:
    """A fresh container for each lease, as many at a time as there are leases."""

    def __init__(self, size: int) -> None:
        self.backend: SandboxBackend = DockerBackend()  # for its name; nothing is opened by it
        self.size = size
        self._threads = ThreadPoolExecutor(2 * size)
        self._daemon = first_daemon()
        self._daemon.api()

    @asynccontextmanager
    async def lease(
        self,
        role: SandboxRole,
        *,
        isolation: Isolation = "reset",
        needs: Iterable[SandboxNeed] = (),
        untrusted: bool = False,
    ) -> AsyncIterator[PlainSandbox]:
        loop = asyncio.get_running_loop()
        container = await loop.run_in_executor(self._threads, self._fresh, role)
        try:
            yield PlainSandbox(container, self._threads)
        finally:
            await loop.run_in_executor(self._threads, container.remove)

    def _fresh(self, role: SandboxRole) -> PlainContainer:
        return PlainContainer(role)

    async def close(self) -> None:
        self._threads.shutdown()

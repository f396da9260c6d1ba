"""Starting a supervisor as a child of this process, with a socket for its stdin and stdout."""

from __future__ import annotations

import asyncio
import functools
import io
import os
import socket
import subprocess
import time
import warnings
import zipfile
from collections.abc import Sequence
from importlib.resources import files

from agentrl.errors import SandboxLost

STDERR_BYTES = 2000
_POLL_S = 0.002
_COMPILE_S = 10.0
COMPILE = (
    "import sys; sys.path.insert(0, sys.argv[1]);"
    " from agentrl.sandboxes.supervisor.compiled import write; write(*sys.argv[1:])"
)
"""What a Python is told to do with an archive of `program` and a place for the compiled one."""


def starting(python: str, archive: str, module: str = "supervisor.program") -> list[str]:
    """The words that start `main` of a module in an archive; arguments of it may follow."""
    code = (
        f"import sys; sys.path.insert(0, {archive!r});"
        f" from agentrl.sandboxes.{module} import main; main()"
    )
    return [python, "-I", "-S", "-B", "-c", code]


@functools.cache
def program(*more: str) -> bytes:
    """The supervisor as a zip archive that a Python inside the sandbox can import.

    The same source gives the same bytes.

    `more` are further packages of `agentrl.sandboxes` that go with it.
    """
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as archive:
        for package in ("agentrl", "agentrl/sandboxes"):
            archive.writestr(zipfile.ZipInfo(f"{package}/__init__.py"), "")
        for package in ("supervisor", *more):
            for item in sorted(
                files(f"agentrl.sandboxes.{package}").iterdir(), key=lambda item: item.name
            ):
                if item.name.endswith(".py"):
                    archive.writestr(
                        zipfile.ZipInfo(f"agentrl/sandboxes/{package}/{item.name}"),
                        item.read_bytes(),
                    )
    return buffer.getvalue()


@functools.cache
def compiled(python: str) -> bytes:
    """The same archive, its modules compiled by the Python that is to run it; the archive as it is,
    with a warning, where that fails.
    """
    fds = memory_file("agentrl-program", program()), memory_file("agentrl-compiled")
    try:
        words = [python, "-I", "-S", "-B", "-c", COMPILE, *(f"/dev/fd/{fd}" for fd in fds)]
        subprocess.run(
            words,
            env={},
            pass_fds=fds,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            check=True,
            timeout=_COMPILE_S,
        )
        return os.pread(fds[1], os.fstat(fds[1]).st_size, 0)
    except (OSError, subprocess.SubprocessError) as error:
        said = getattr(error, "stderr", None) or str(error).encode()
        why = said.decode("utf-8", "replace").strip()[-STDERR_BYTES:]
        warnings.warn(
            f"{python} cannot compile the sandboxes' supervisor, so each starts slower: {why}",
            RuntimeWarning,
            stacklevel=2,
        )
        return program()
    finally:
        for fd in fds:
            os.close(fd)


def memory_file(name: str, content: bytes = b"") -> int:
    """An unnamed file in memory, at its start; the caller closes it."""
    fd = os.memfd_create(name)
    os.write(fd, content)
    os.lseek(fd, 0, os.SEEK_SET)
    return fd


class Child:
    """A child process that holds the other end of `sock`.

    The end of its stdin tells it to end; later it is killed.

    Attributes:
        sock: our end, non-blocking.
        patience_s: how long it may clean up after its stdin has ended, before SIGKILL.
        killed: whether we killed it.
    """

    def __init__(
        self,
        argv: Sequence[str],
        *,
        env: dict[str, str],
        pass_fds: Sequence[int] = (),
        user: int | None = None,
        patience_s: float = 0.0,
    ) -> None:
        """Start it; `user` is the uid and gid that it runs as, None for ours.

        Raises:
            SandboxLost: it cannot be started.
        """
        self.patience_s = patience_s
        self.killed = False
        self._stderr = memory_file("agentrl-stderr")
        self.sock, theirs = socket.socketpair()
        self.sock.setblocking(False)
        if user is not None:
            # Popen's own `user` would fork this process with all of its pages instead of vfork: 8
            # ms of CPU time at 400 MB, and a fault for each page that is written to after it.
            numbers = (f"--reuid={user}", f"--regid={user}", "--clear-groups")
            argv = ["setpriv", *numbers, "--", *argv]
        try:
            self._process = subprocess.Popen(
                argv,
                stdin=theirs.fileno(),
                stdout=theirs.fileno(),
                stderr=self._stderr,
                env=env,
                cwd="/",
                pass_fds=pass_fds,
                start_new_session=True,
            )
        except OSError as error:
            self.sock.close()
            os.close(self._stderr)
            raise SandboxLost(f"cannot start {argv[0]}: {error}") from error
        finally:
            theirs.close()

    @property
    def status(self) -> int | None:
        """Its exit code, negative for a signal; None while it runs."""
        return self._process.poll()

    @property
    def pid(self) -> int:
        """Its process id."""
        return self._process.pid

    def words(self) -> str:
        """The end of what it said on stderr, for the message of a failure."""
        if self._stderr < 0:
            return ""
        size = os.fstat(self._stderr).st_size
        tail = os.pread(self._stderr, STDERR_BYTES, max(0, size - STDERR_BYTES))
        return tail.decode("utf-8", "replace").strip()

    async def cause(self) -> str:
        """Empty: what it had to say is in `words`."""
        return ""

    def unwrap(self, data: bytes) -> bytes:
        """The same bytes: there is nothing between us."""
        return data

    def hang_up(self) -> None:
        """Close our end; where nothing needs cleaning up, kill at once. Safe to call twice."""
        self.sock.close()
        if self.patience_s <= 0 and self._process.poll() is None:
            self.killed = True
            self._process.kill()

    async def gone(self) -> None:
        """Wait until it has ended and been reaped, killing it when its patience is over."""
        self.hang_up()
        deadline = time.monotonic() + self.patience_s
        while self._process.poll() is None:
            if time.monotonic() > deadline:
                self._process.kill()
            await asyncio.sleep(_POLL_S)
        if self._stderr >= 0:
            os.close(self._stderr)
            self._stderr = -1

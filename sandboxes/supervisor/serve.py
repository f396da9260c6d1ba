"""The loop that answers the host, and what each verb does."""

from __future__ import annotations

import errno
import os
import select
import stat
import sys
import time

from agentrl.sandboxes.supervisor import files
from agentrl.sandboxes.supervisor.command import Command
from agentrl.sandboxes.supervisor.frames import PROTOCOL, Decoder, Fatal, FrameError, encode
from agentrl.sandboxes.supervisor.processes import CHUNK, Processes
from agentrl.sandboxes.supervisor.rights import Rights

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable

VERIFY_S = 0.5
PR_SET_DUMPABLE = 4
PR_SET_CHILD_SUBREAPER = 36
OOM_SCORE = 500
# What the kernel keeps for a namespace when its processes and files are gone.
RESIDUE = ("sysvipc/shm", "sysvipc/sem", "sysvipc/msg", "net/udp", "net/udp6", "net/unix")
TCP = ("net/tcp", "net/tcp6")


class Supervisor:
    """Answers one host over a pair of descriptors until it hangs up."""

    def __init__(self, read: int, write: int) -> None:
        self._read = read
        self._write = write
        self._decoder = Decoder()
        self._rights = Rights()
        self._processes = Processes()
        self._area = self._work = -1
        self._root = b""
        self._wiped: dict[int, int] = {}  # directory -> its mode
        self._private = False
        self._env: dict[bytes, bytes] = {}
        self._baseline: list[bytes] = []
        self._verbs: dict[bytes, Callable[[list[bytes]], list[bytes]]] = {
            b"hello": self._hello,
            b"ping": lambda _: [],
            b"exec": self._exec,
            b"put": self._put,
            b"get": self._get,
            b"manifest": self._manifest,
            b"kill": self._kill,
            b"reset": self._reset,
        }

    def serve(self) -> None:
        """Answer requests until the host hangs up.

        Raises:
            Fatal: the sandbox cannot be trusted any more; the host has been told.
            FrameError: the host does not speak our protocol.
        """
        while (frame := self._receive()) is not None:
            request_id, (verb, *arguments) = frame
            try:
                fields = [b"ok", *self._verbs[verb](arguments)]
            except OSError as error:
                fields = [b"error", b"%d" % (error.errno or 0), str(error.strerror or error).encode()]
            except (Fatal, MemoryError) as error:
                self._send(encode(request_id, [b"fatal", f"{type(error).__name__}: {error}".encode()]))
                raise
            self._send(encode(request_id, fields))

    def end(self) -> None:
        """End everything that was started here and leave nothing behind."""
        self._processes.kill({})
        for directory in self._wiped:
            files.wipe(directory)
        if self._root:
            os.chdir("/")
            os.rmdir(self._root)

    def _receive(self) -> tuple[int, list[bytes]] | None:
        poll = select.poll()
        poll.register(self._read, select.POLLIN)
        poll.register(self._processes.wakeup, select.POLLIN)
        while (frame := self._decoder.next()) is None:
            for fd, _ in poll.poll():
                if fd != self._read:
                    self._processes.reap()
                elif data := os.read(self._read, CHUNK):
                    self._decoder.feed(data)
                else:
                    return None
        return frame

    def _send(self, data: bytes) -> None:
        view = memoryview(data)
        while view:
            view = view[os.write(self._write, view) :]

    def _hello(self, arguments: list[bytes]) -> list[bytes]:
        """Arguments: area, private (1: the namespaces are ours alone), others to wipe by `:`, limits, uid, env…

        Limits are `name=value` by `,` with the names of `resource` in lower case; the uid is that of commands, empty
        for this program's own. Answers protocol, whether this program cannot be traced, whether orphans come to it,
        whether the limits hold.
        """
        area, private, others, limits, uid, *env = arguments
        self._rights = self._processes.rights = Rights(int(uid) if uid else None)
        self._private = private == b"1"
        self._env = _pairs(env)
        self._root = area
        self._area = os.open(area, files.DIRECTORY)
        directories = [self._area, *(os.open(path, files.DIRECTORY) for path in others.split(b":") if path)]
        self._wiped = {directory: stat.S_IMODE(os.fstat(directory).st_mode) for directory in directories}
        if self._private:
            _prefer_as_victim()
        traceless = _prctl(PR_SET_DUMPABLE, 0) or self._rights.uid is not None
        adopts = self._processes.is_init or _prctl(PR_SET_CHILD_SUBREAPER, 1)
        limited = _limit(limits)
        self._furnish()
        self._baseline = self._fingerprint()
        return [b"%d" % value for value in (PROTOCOL, traceless, adopts, limited)]

    def _exec(self, arguments: list[bytes]) -> list[bytes]:
        """Arguments: timeout, output cap, stdin, argument count, argv…, env….

        Answers status (negative: signal), timed out, dropped, wall time, stdout, stderr.
        """
        timeout, cap, stdin, count, *rest = arguments
        argv, env = rest[: int(count)], {**self._env, **_pairs(rest[int(count) :])}
        begin = time.monotonic()
        try:
            command = Command(self._processes, argv, env, stdin, int(cap))
        except OSError as error:
            # As shells do: 127 not found, 126 found but not started.
            status = 127 if error.errno in (errno.ENOENT, errno.ENOTDIR) else 126
            text = b"cannot start %s: %s\n" % (argv[0][:200], (error.strerror or "?").encode())
            return [b"%d" % status, b"0", b"0", b"%d" % _since(begin), b"", text]
        abandoned = self._decoder.pending
        status = command.run(0.0 if abandoned else int(timeout) / 1e6, self._read)
        stdout, stderr = command.outputs
        numbers = (status, command.timed_out, stdout.dropped + stderr.dropped, _since(begin))
        return [*(b"%d" % number for number in numbers), stdout.value(), stderr.value()]

    def _put(self, arguments: list[bytes]) -> list[bytes]:
        with self._rights:
            for path, data in zip(arguments[::2], arguments[1::2], strict=True):
                files.put_file(self._work, path, data)
        return []

    def _get(self, arguments: list[bytes]) -> list[bytes]:
        """Arguments: size cap, paths…. Answers index and bytes of each path that can be had."""
        cap, *paths = arguments
        found: list[bytes] = []
        with self._rights:
            for index, path in enumerate(paths):
                data = files.get_file(self._work, path, int(cap))
                if data is not None:
                    found += [b"%d" % index, data]
        return found

    def _manifest(self, _: list[bytes]) -> list[bytes]:
        with self._rights:
            return files.manifest(self._work)

    def _kill(self, _: list[bytes]) -> list[bytes]:
        self._processes.kill({})
        return []

    def _reset(self, _: list[bytes]) -> list[bytes]:
        """Kill, wipe, and compare with the start.

        Raises:
            Fatal: something is left or could not be removed.
        """
        self._processes.kill({})
        try:
            for directory, mode in self._wiped.items():
                self._empty(directory, mode)
            os.close(self._work)
            self._furnish()
        except OSError as error:
            raise Fatal(f"the work area cannot be emptied: {error}") from error
        deadline = time.monotonic() + VERIFY_S
        while (now := self._fingerprint()) != self._baseline:
            # The kernel frees sockets in flight and the like a moment after their processes.
            if time.monotonic() > deadline:
                names = ("tmpfs", *RESIDUE, *TCP)
                changed = [name for name, old, new in zip(names, self._baseline, now, strict=True) if old != new]
                raise Fatal(f"the sandbox differs from its start in {', '.join(changed)}")
            time.sleep(0.01)
        return []

    def _empty(self, directory: int, mode: int) -> None:
        """Wipe as the agent's user, who owns all that is in it: no right of root is at work on what an agent made."""
        self._rights.give(directory)
        with self._rights:
            files.scrub(directory, 0o700)
            files.wipe(directory)
        self._rights.take(directory)
        os.fchmod(directory, mode)

    def _furnish(self) -> None:
        """Make the work area afresh: a new inode each time, so that no mode or attribute of the old one remains."""
        for name in ("work", "tmp"):
            os.mkdir(name, 0o755, dir_fd=self._area)
            directory = os.open(name, files.DIRECTORY, dir_fd=self._area)
            self._rights.give(directory)
            os.close(directory)
        self._work = os.open("work", files.DIRECTORY, dir_fd=self._area)
        os.fchdir(self._work)

    def _fingerprint(self) -> list[bytes]:
        """What tells a used sandbox from a new one, where the namespaces are ours alone; else nothing."""
        if not self._private:
            return []
        spaces = [os.fstatvfs(directory) for directory in self._wiped]
        prints = [repr([(space.f_bfree, space.f_ffree) for space in spaces]).encode()]
        prints += [_proc(name) for name in RESIDUE]
        # Listing TCP sockets walks the kernel's whole hash table (1.4 ms each): only where the counters are not zero.
        idle = b" inuse 0 " in (tcp := _line(_proc("net/sockstat"), b"TCP:")) and b" tw 0 " in tcp
        idle = idle and _line(_proc("net/sockstat6"), b"TCP6:").endswith(b" inuse 0")
        return prints + [b"" if idle else b"".join(_proc(name).splitlines()[1:]) for name in TCP]


def _proc(name: str) -> bytes:
    """A file of /proc; empty where the kernel was built without it."""
    try:
        with open(f"/proc/{name}", "rb") as file:
            return file.read(CHUNK)
    except FileNotFoundError:
        return b""


def _line(text: bytes, start: bytes) -> bytes:
    return next((line for line in text.splitlines() if line.startswith(start)), b"")


def _pairs(settings: list[bytes]) -> dict[bytes, bytes]:
    return dict((name, value) for name, _, value in (setting.partition(b"=") for setting in settings))


def _since(begin: float) -> int:
    return int((time.monotonic() - begin) * 1e6)


def _prctl(option: int, value: int) -> bool:
    """Set a property of this process; False where `ctypes` is missing or the kernel refuses."""
    try:
        import ctypes
    except ImportError:
        return False
    return bool(ctypes.CDLL(None).prctl(option, value, 0, 0, 0) == 0)


def _prefer_as_victim() -> None:
    """When memory runs out, the kernel shall end what runs here before it ends the host's work."""
    with open("/proc/self/oom_score_adj", "r+") as file:
        if int(file.read()) < OOM_SCORE:
            file.seek(0)
            file.write(str(OOM_SCORE))


def _limit(limits: bytes) -> bool:
    """Bind this process and all that it will start; False where `resource` is missing."""
    try:
        import resource
    except ImportError:
        return False
    for item in filter(None, limits.decode().split(",")):
        name, _, text = item.partition("=")
        number = getattr(resource, f"RLIMIT_{name.upper()}")
        value = int(text)
        ceiling = resource.getrlimit(number)[1]
        if ceiling != resource.RLIM_INFINITY:
            value = min(value, ceiling)
        resource.setrlimit(number, (value, value))
    return True


def main() -> None:
    """Serve the host on stdin and stdout, which then stay out of reach of everything that runs here."""
    read, write = os.dup(0), os.dup(1)
    null = os.open("/dev/null", os.O_RDWR)
    os.dup2(null, 0)
    os.dup2(null, 1)
    supervisor = Supervisor(read, write)
    try:
        supervisor.serve()
    except (BrokenPipeError, ConnectionError, FrameError, Fatal, MemoryError) as error:
        sys.stderr.write(f"supervisor: {type(error).__name__}: {error}\n")
    if os.getpid() != 1:  # the end of process 1 is the end of all
        supervisor.end()

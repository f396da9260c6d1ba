"""The loop that answers the host, and what each verb does."""

from __future__ import annotations

import errno
import os
import select
import stat
import time

from agentrl.sandboxes.supervisor import files, manifest, snapshot, standing
from agentrl.sandboxes.supervisor.command import Command
from agentrl.sandboxes.supervisor.frames import PROTOCOL, Fatal, FrameDecoder, FrameError, encode
from agentrl.sandboxes.supervisor.memory import Memory
from agentrl.sandboxes.supervisor.processes import CHUNK, Processes
from agentrl.sandboxes.supervisor.proof import Proof
from agentrl.sandboxes.supervisor.rights import Rights
from agentrl.sandboxes.supervisor.session import Shell

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable

SESSIONS = 8
AREA = b"/sandbox"  # what a manifest calls the area, which may be anywhere
FOR_ALL = stat.S_ISVTX | stat.S_IWOTH  # its owner alone can change it, everybody can put things in
# What a malformed request raises: too few arguments, bad numbers, unknown names.
MALFORMED = (ValueError, LookupError, OverflowError, AttributeError, TypeError)


class Supervisor:
    """Answers one host over a pair of descriptors until it hangs up."""

    def __init__(self, read: int, write: int) -> None:
        self._read = read
        self._write = write
        self._decoder = FrameDecoder()
        self._rights = Rights()
        self._processes = Processes()
        self._area = self._work = -1
        self._root = b""
        self._wiped: dict[int, int] = {}  # directory -> its mode
        self._places: dict[bytes, int] = {}  # path that is told -> directory; ours comes first
        self._env: dict[bytes, bytes] = {}
        self._memory = Memory([], private=False)
        self._proof = Proof([], self._processes, self._memory, private=False)
        self._sessions: dict[int, Shell] = {}
        self._session_count = 0  # over the whole life: an id is never used again
        self._verbs: dict[bytes, Callable[[list[bytes]], list[bytes]]] = {
            b"hello": self._hello,
            b"ping": lambda _: [],
            b"exec": self._exec,
            b"put": self._put,
            b"get": self._get,
            b"manifest": self._manifest,
            b"list": self._list,
            b"snapshot": self._snapshot,
            b"restore": self._restore,
            b"open": self._open,
            b"run": self._run,
            b"end": self._end,
            b"kill": self._kill,
            b"census": self._census,
            b"verify": lambda _: [name.encode() for name in self._proof.differences()],
            b"reset": self._reset,
        }

    def serve(self) -> None:
        """Answer requests until the host hangs up.

        Raises:
            Fatal: the sandbox cannot be trusted any more; the host has been told.
            FrameError: the host does not speak our protocol.
        """
        while (frame := self._receive()) is not None:
            request_id, request = frame
            try:
                answer = encode(request_id, self._answer(request))
            except FrameError as error:  # an answer that is too long, as an agent's names can be
                answer = encode(request_id, [b"error", b"%d" % errno.EFBIG, str(error).encode()])
            except (Fatal, MemoryError) as error:
                self._send(
                    encode(request_id, [b"fatal", f"{type(error).__name__}: {error}".encode()])
                )
                raise
            self._send(answer)

    def _answer(self, request: list[bytes]) -> list[bytes]:
        try:
            verb, *arguments = request
            return [b"ok", *self._verbs[verb](arguments)]
        except OSError as error:
            return [b"error", b"%d" % (error.errno or 0), str(error.strerror or error).encode()]
        except MALFORMED as error:
            raise Fatal(f"malformed request: {error!r}") from error

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
        """Arguments: area, private, others, limits, uid, memory, env….

        `private` is 1 where the namespaces are ours alone; `others` are directories to wipe, with
        `:` between.

        Limits are `name=value` by `,` with the names of `resource` in lower case; the uid is that
        of commands, empty for this program's own; memory is the descriptors of `Memory` by `,`, if
        there are any. Answers protocol, whether this program cannot be traced, whether orphans come
        to it, whether the limits hold, and whether a memory cgroup is in sight.
        """
        area, flag, others, limits, uid, memory, *env = arguments
        private = flag == b"1"
        self._rights = self._processes.rights = Rights(int(uid) if uid else None)
        self._memory = Memory([int(fd) for fd in memory.split(b",") if fd], private)
        self._env = _pairs(env)
        if self._root or not area.startswith(b"/"):
            raise ValueError("a second hello, or an area that is no absolute path")
        self._area = os.open(area, files.DIRECTORY)
        self._root = area
        self._places = {AREA: self._area} | {
            path: os.open(path, files.DIRECTORY) for path in others.split(b":") if path
        }
        directories = list(self._places.values())
        self._wiped = {
            directory: stat.S_IMODE(os.fstat(directory).st_mode) for directory in directories
        }
        self._processes.victims = standing.Victims(private)
        traceless = (
            standing.set_property(standing.PR_SET_DUMPABLE, 0) or self._rights.uid is not None
        )
        adopts = self._processes.is_init or standing.set_property(
            standing.PR_SET_CHILD_SUBREAPER, 1
        )
        limited = standing.limit(limits)
        self._furnish()
        self._proof = Proof(directories, self._processes, self._memory, private)
        return [
            b"%d" % value for value in (PROTOCOL, traceless, adopts, limited, self._memory.known)
        ]

    def _exec(self, arguments: list[bytes]) -> list[bytes]:
        """Arguments: timeout, output cap, stdin, directory, argument count, argv…, env….

        An empty directory is the work area.

        Answers status (negative: signal), timed out, dropped, wall time, whether memory ran out,
        stdout, stderr.
        """
        timeout, cap, stdin, cwd, count, *rest = arguments
        argv, env = rest[: int(count)], {**self._env, **_pairs(rest[int(count) :])}
        begin, kills = time.monotonic(), self._memory.kills()
        try:
            if cwd:
                self._enter(cwd)
        except OSError as error:
            return _unstarted(
                126, b"cannot enter %s: %s\n" % (cwd[:200], (error.strerror or "?").encode())
            )
        try:
            command = Command(self._processes, argv, env, stdin, int(cap))
        except OSError as error:
            # As shells do: 127 not found, 126 found but not started.
            status = 127 if error.errno in (errno.ENOENT, errno.ENOTDIR) else 126
            return _unstarted(
                status, b"cannot start %s: %s\n" % (argv[0][:200], (error.strerror or "?").encode())
            )
        finally:
            if cwd:
                self._enter(b"")
        status = command.run(self._allowed(timeout), self._read)
        return self._outcome(status, command, begin, kills)

    def _enter(self, path: bytes) -> None:
        """Make a directory of the work area the current one.

        The work area itself is unlocked if it was locked.
        """
        with self._rights:
            handle = files.walk(self._work, path)
            try:
                os.fchdir(handle)
            except PermissionError:
                if path:
                    raise
                os.fchmod(self._work, 0o700)
                os.fchdir(handle)
            finally:
                os.close(handle)

    def _allowed(self, timeout: bytes) -> float:
        """The time of a command in seconds: none if the host has lost interest in it."""
        return 0.0 if self._decoder.pending else int(timeout) / 1e6

    def _outcome(
        self, status: int, ended: Command | Shell, begin: float, kills: int
    ) -> list[bytes]:
        stdout, stderr = ended.outputs
        numbers = (status, ended.timed_out, stdout.dropped + stderr.dropped, _since(begin))
        oom = self._memory.kills() > kills
        return [*(b"%d" % number for number in (*numbers, oom)), stdout.value(), stderr.value()]

    def _open(self, arguments: list[bytes]) -> list[bytes]:
        """Arguments: env…. Answers the id of a new session.

        Its shell starts with its first command.
        """
        if len(self._sessions) >= SESSIONS:
            raise OSError(errno.EMFILE, f"more than {SESSIONS} open sessions")
        self._session_count += 1
        self._sessions[self._session_count] = Shell(
            self._processes, {**self._env, **_pairs(arguments)}
        )
        return [b"%d" % self._session_count]

    def _run(self, arguments: list[bytes]) -> list[bytes]:
        """Arguments: session, timeout, output cap, command.

        Answers as `exec` does, and whether the shell lives on.
        """
        number, timeout, cap, text = arguments
        begin, kills = time.monotonic(), self._memory.kills()
        session = self._session(number)
        status = session.run(text, self._allowed(timeout), int(cap), self._read)
        return [*self._outcome(status, session, begin, kills), b"%d" % session.alive]

    def _end(self, arguments: list[bytes]) -> list[bytes]:
        """Arguments: session. Ends its shell and what still descends from it."""
        (number,) = arguments
        session = self._session(number)
        session.end()
        del self._sessions[int(number)]
        return []

    def _session(self, number: bytes) -> Shell:
        if int(number) not in self._sessions:
            raise OSError(
                errno.ESTALE,
                "the session is over: it was closed, or the sandbox was reset",
            )
        return self._sessions[int(number)]

    def _put(self, arguments: list[bytes]) -> list[bytes]:
        with self._rights:
            files.put_files(self._work, zip(arguments[::2], arguments[1::2], strict=True))
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

    def _manifest(self, arguments: list[bytes]) -> list[bytes]:
        """Arguments: whether (1) of all that commands can write to, or of the work area alone."""
        with self._rights:
            if arguments == [b"1"]:
                return manifest.everywhere(self._work, self._places)
            return manifest.manifest(self._work)

    def _census(self, _: list[bytes]) -> list[bytes]:
        """Answers how many processes there are that are no session's own shell."""
        shells = [session.pid for session in self._sessions.values()]
        return [b"%d" % len(self._processes.running(besides=shells))]

    def _list(self, arguments: list[bytes]) -> list[bytes]:
        """Arguments: directory (empty: the work area). Answers as `manifest`, without hashes."""
        (path,) = arguments
        with self._rights:
            return manifest.listing(self._work, path)

    def _snapshot(self, arguments: list[bytes]) -> list[bytes]:
        """Arguments: size cap. Answers the entries of the work area."""
        (cap,) = arguments
        with self._rights:
            return snapshot.take(self._work, int(cap))

    def _restore(self, arguments: list[bytes]) -> list[bytes]:
        """Arguments: entries…. As in a reset everything ends; then the entries are made.

        Sessions stay open: their next command gets a new shell.
        """
        self._clear()
        with self._rights:
            snapshot.restore(self._work, arguments)
        return []

    def _kill(self, _: list[bytes]) -> list[bytes]:
        self._processes.kill({})
        return []

    def _reset(self, _: list[bytes]) -> list[bytes]:
        """Kill, wipe, and compare with the start.

        Raises:
            Fatal: something is left or could not be removed.
        """
        self._clear()
        self._sessions.clear()
        self._proof.check()
        return []

    def _clear(self) -> None:
        """End every process, the shells of sessions too, and make the work area anew.

        Raises:
            Fatal: something could not be removed.
        """
        self._processes.kill({})
        for session in self._sessions.values():
            session.close()
        self._processes.forget()
        try:
            for directory, mode in self._wiped.items():
                self._empty(directory, mode)
            os.close(self._work)
            self._furnish()
        except OSError as error:
            raise Fatal(f"the work area cannot be emptied: {error}") from error

    def _empty(self, directory: int, mode: int) -> None:
        """Wipe as the agent's user, who owns all that is in it, and without any right of root.

        A directory of root's that all may write to needs no handing over; that of queues could not
        be handed over inside a user namespace.
        """
        if self._rights.uid is not None and mode & FOR_ALL == FOR_ALL:
            with self._rights:
                files.wipe(directory)
            return
        self._rights.give(directory)
        with self._rights:
            files.scrub(directory, 0o700)
            files.wipe(directory)
        self._rights.take(directory)
        os.fchmod(directory, mode)

    def _furnish(self) -> None:
        """Make the work area afresh, as a new inode without the old one's mode and attributes."""
        for name in ("work", "tmp"):
            os.mkdir(name, 0o755, dir_fd=self._area)
            directory = os.open(name, files.DIRECTORY, dir_fd=self._area)
            self._rights.give(directory)
            os.close(directory)
        self._work = os.open("work", files.DIRECTORY, dir_fd=self._area)
        os.fchdir(self._work)


def _unstarted(status: int, text: bytes) -> list[bytes]:
    """The answer to a command that could not be started."""
    return [b"%d" % status, b"0", b"0", b"0", b"0", b"", text]


def _pairs(settings: list[bytes]) -> dict[bytes, bytes]:
    return dict(
        (name, value) for name, _, value in (setting.partition(b"=") for setting in settings)
    )


def _since(begin: float) -> int:
    return int((time.monotonic() - begin) * 1e6)

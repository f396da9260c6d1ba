"""Commands: how they start, how they end, and how everything that they left behind is ended too."""

from __future__ import annotations

import os
import select
import time

from agentrl.sandboxes.supervisor.frames import Fatal
from agentrl.sandboxes.supervisor.rights import Rights
from agentrl.sandboxes.supervisor.standing import Victims

TYPE_CHECKING = False
if TYPE_CHECKING:
    import signal
    from collections.abc import Callable, Container
else:  # the module `signal` makes enums of all of this: 4 of 17 ms of Python's start
    import _signal as signal

KILL_S = 5.0
CHUNK = 1 << 16
KILLED = -signal.SIGKILL
RESTORED = (signal.SIGPIPE, signal.SIGXFSZ)  # Python ignores them
# pid -> start time in clock ticks, which tells a reused pid from the old one
Background = dict[int, int]


def end_at(deadline: int) -> None:
    """End this process at a time in seconds since 1970."""
    # The agent's user may send this signal, too: so the handler looks at the clock.
    signal.signal(signal.SIGALRM, lambda *_: os._exit(1) if time.time() >= deadline else None)
    signal.alarm(max(1, deadline - int(time.time()) + 1))


class Processes:
    """All processes below this one.

    It is process 1 or their subreaper, so orphans become its children and none is lost.
    """

    def __init__(self) -> None:
        self.is_init = os.getpid() == 1
        self.rights = Rights()
        self.victims = Victims()
        self.wakeup, write = os.pipe()
        self._watched: set[int] = set()
        self._ended: dict[int, int] = {}
        for fd in (self.wakeup, write):
            os.set_blocking(fd, False)
        signal.set_wakeup_fd(write, warn_on_full_buffer=False)
        signal.signal(signal.SIGCHLD, lambda *_: None)  # only wakes the poll
        # Without a handler of its own, no signal from inside can reach process 1.
        signal.signal(signal.SIGINT, signal.SIG_DFL)

    def spawn(self, argv: list[bytes], env: dict[bytes, bytes], descriptors: dict[int, int]) -> int:
        """Start a program in a new session, in the current directory; returns its pid, for `ended`.

        `descriptors` says which of ours it gets as which of its own.

        Raises:
            OSError: it cannot be started.
        """
        with self.victims, self.rights:
            pid = _spawn(argv, env, descriptors)
        self._watched.add(pid)
        return pid

    def ended(self, pid: int) -> int | None:
        """The exit code of a program of `spawn`, negative for a signal; None while it runs.

        It is told once.
        """
        return self._ended.pop(pid, None)

    def forget(self) -> None:
        """Watch for the end of no program any more."""
        self._watched.clear()
        self._ended.clear()

    def reap(self) -> None:
        """Collect whatever has ended."""
        try:  # noqa: SIM105 - contextlib is not worth its import time in every sandbox
            os.read(self.wakeup, CHUNK)
        except BlockingIOError:
            pass
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return
            if pid == 0:
                return
            if pid in self._watched:
                self._watched.discard(pid)
                self._ended[pid] = os.waitstatus_to_exitcode(status)

    def has_none(self) -> bool:
        """Whether nothing lives below this process: one system call proves it."""
        self.reap()
        try:
            os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
        except ChildProcessError:
            return True
        return False

    def background(self, besides: int = 0) -> Background:
        """Every process below this one: what a command that starts now has not started.

        One process can be left out, with all that descends from it.
        """
        if self.has_none():
            return {}
        table = self._census()
        others = (
            [pid for pid in table if not _below(pid, table, besides.__eq__)] if besides else table
        )
        return {pid: table[pid][1] for pid in others}

    def running(self, besides: Container[int]) -> list[int]:
        """The processes below this one but for some; what those have started is not left out."""
        self.reap()
        return [pid for pid in self._census() if pid not in besides]

    def kill(self, spared: Background) -> None:
        """End every process below this one but the spared ones and what descends from those.

        Raises:
            Fatal: some are still there after KILL_S.
        """
        deadline = time.monotonic() + KILL_S
        stopped: Background = {}
        while not self.has_none():
            doomed = self._doomed(spared)
            if spared and not doomed:
                return
            if time.monotonic() > deadline:
                raise Fatal(f"{len(doomed)} processes survive SIGKILL")
            fresh = {pid: start for pid, start in doomed.items() if stopped.get(pid) != start}
            if self.is_init and not spared:
                _kill_namespace()
            elif fresh:
                # Stop all before killing any, so that nothing multiplies between two looks.
                _send(fresh, signal.SIGSTOP)
                stopped.update(fresh)
                continue
            else:
                _send(doomed, signal.SIGKILL)
            select.select([self.wakeup], [], [], 0.005)

    def _census(self) -> dict[int, tuple[int, int]]:
        """pid -> (parent, start time) of every live process below this one."""
        table: dict[int, tuple[int, int]] = {}
        for name in os.listdir("/proc"):
            if name.isdigit() and (row := _stat(int(name))):
                table[int(name)] = row
        me = os.getpid()
        return {
            pid: row for pid, row in table.items() if pid != me and _below(pid, table, me.__eq__)
        }

    def _doomed(self, spared: Background) -> Background:
        if self.is_init and not spared:
            return {}  # all of them: no need to look
        table = self._census()

        def keeps(pid: int) -> bool:
            return pid in spared and spared[pid] == table[pid][1]

        return {pid: row[1] for pid, row in table.items() if not _below(pid, table, keeps)}


def _spawn(argv: list[bytes], env: dict[bytes, bytes], descriptors: dict[int, int]) -> int:
    actions = [(os.POSIX_SPAWN_DUP2, ours, theirs) for ours, theirs in descriptors.items()]
    error: OSError = FileNotFoundError(2, "not found in PATH")
    folders = [b""] if b"/" in argv[0] else env.get(b"PATH", b"/usr/bin:/bin").split(b":")
    for folder in folders:
        program = os.path.join(folder, argv[0])
        if len(folders) > 1 and not os.access(program, os.X_OK):
            continue
        try:
            return os.posix_spawn(
                program, argv, env, file_actions=actions, setsid=True, setsigdef=RESTORED
            )
        except OSError as cause:
            error = cause
    raise error


def _kill_namespace() -> None:
    """Kill the whole pid namespace at once, so that no process can fork its way out."""
    try:
        os.kill(-1, signal.SIGKILL)
    except ProcessLookupError:  # only zombies are left
        return


def _below(pid: int, table: dict[int, tuple[int, int]], root: Callable[[int], bool]) -> bool:
    """Whether a process is a root or descends from one.

    The table may be inconsistent, so the walk is bounded.
    """
    for _ in range(len(table) + 1):
        if pid not in table:
            return False
        if root(pid):
            return True
        pid = table[pid][0]
    return False


def _stat(pid: int) -> tuple[int, int] | None:
    """(parent, start time) of a process; None if it has ended."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            fields = file.read().rpartition(b")")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        return None
    return None if fields[0] in b"ZX" else (int(fields[1]), int(fields[19]))


def _send(targets: Background, number: int) -> None:
    """Signal processes by descriptor, so that a pid that was reused meanwhile is not hit."""
    for pid, start in targets.items():
        try:
            handle = os.pidfd_open(pid)
        except ProcessLookupError:
            continue
        try:
            row = _stat(pid)
            if row and row[1] == start:
                signal.pidfd_send_signal(handle, number)
        except ProcessLookupError:
            continue
        finally:
            os.close(handle)

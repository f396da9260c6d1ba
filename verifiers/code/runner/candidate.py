"""The candidate's process, seen from the judge: two pipes, limits, and what ended it."""

from __future__ import annotations

import builtins
import ctypes
import os
import select
import sys
import time

from agentrl.verifiers.code.runner import child
from agentrl.verifiers.code.runner.codec import CodecError, Reader, encode

TYPE_CHECKING = False
if TYPE_CHECKING:
    import signal
    from collections.abc import Callable
    from typing import Any
else:
    import _signal as signal  # the C part alone: the enums of signal.py cost 4 ms

PACKAGES = "/usr/lib/python3/dist-packages"
END_S = 3.0
_TICKS = os.sysconf("SC_CLK_TCK")
_DUMPABLE, _PARENT_DEATH = 4, 1


class Gone(BaseException):
    """The candidate's process cannot be asked any more; `fact` says why.

    It is not an Exception, so that no check eats it.
    """

    def __init__(self, fact: str) -> None:
        super().__init__(fact)
        self.fact = fact


class Raised(Exception):
    """The candidate raised something that is no built-in exception."""


class Escaped(Exception):
    """Stands for an exception that built-ins would take for the end of an iteration.

    Attributes:
        error: what the candidate raised.
    """

    def __init__(self, error: Exception) -> None:
        super().__init__(f"{type(error).__name__}: {error}")
        self.error = error


def escaped(error: Exception) -> Exception:
    """The exception, or an `Escaped` in its place: only `__next__` may end a test's iteration."""
    return Escaped(error) if isinstance(error, StopIteration | StopAsyncIteration) else error


class Candidate:
    """The candidate's process."""

    def __init__(self) -> None:
        self.to_child, self.from_child, self.pid = _fork()
        self.call_s = 0.0
        self.deadline = 0.0
        self.calls = 0
        self.gone = ""
        self._unread = b""
        self._until = 0.0
        self._began_cpu = 0.0

    def request(self, *message: Any) -> Any:
        """Ask and wait for the answer, which must begin within `call_s` seconds.

        A candidate that is kept from running by others gets its `call_s` in processor time.

        Raises:
            Gone: no answer came, or none that can be read.
        """
        self.begin()
        self.send(encode(message), self._until)
        return self.receive(self._until)

    def begin(self) -> float:
        """Start the clock of one request; returns the time until which an answer must begin."""
        self._began_cpu = self._cpu_s()[1]
        self._until = time.monotonic() + self.call_s
        return self._until

    def send(self, message: bytes, until: float) -> None:
        """Write one message."""
        rest = memoryview(message)
        while rest:
            if not select.select([], [self.to_child], [], max(0.0, until - time.monotonic()))[1]:
                raise self.leave("time_limit")
            try:
                rest = rest[os.write(self.to_child, rest) :]
            except BrokenPipeError:
                raise self.leave("ended") from None

    def receive(self, until: float, resolve: Callable[[Any], Any] | None = None) -> Any:
        """Read one message; one that has begun may take until the deadline of everything."""
        self._until = until
        reader = Reader(self._read, resolve)
        try:
            value = reader.receive()
        except CodecError as error:
            self._unread = reader.rest()
            if str(error) == "given up":
                return ("raised", "CodecError")
            raise self.leave("unreadable") from None
        self._unread = reader.rest()
        return value

    def _read(self) -> bytes:
        if self._unread:
            data, self._unread = self._unread, b""
            return data
        while not select.select(
            [self.from_child], [], [], max(0.0, self._until - time.monotonic())
        )[0]:
            is_running, cpu_s = self._cpu_s()
            left = self.call_s - (cpu_s - self._began_cpu)
            if not is_running or left <= 0.1 * self.call_s or self._until >= self.deadline:
                raise self.leave("time_limit")
            self._until = min(self.deadline, time.monotonic() + left)
        data = os.read(self.from_child, 1 << 20)
        if not data:
            raise self.leave("ended")
        self._until = self.deadline
        return data

    def _cpu_s(self) -> tuple[bool, float]:
        """Whether the process wants a processor, and the seconds of one that it has had."""
        try:
            with open(f"/proc/{self.pid}/stat", "rb") as file:
                fields = file.read().rpartition(b")")[2].split()
        except OSError:
            return False, 0.0
        return fields[0] == b"R", (int(fields[11]) + int(fields[12])) / _TICKS

    def leave(self, fact: str) -> Gone:
        """Ask nothing more; what to raise."""
        self.gone = self.gone or fact
        return Gone(self.gone)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call the candidate's function by value; what it raised is raised again, by type name."""
        if self.gone:
            raise Gone(self.gone)
        self.calls += 1
        answer = self.request("call", args, kwargs)
        if is_answer(answer, "value"):
            return answer[1]
        raise escaped(_error(raised_name(answer)))


def _error(name: str) -> Exception:
    """An exception of the built-in type of that name; of type Raised if it cannot be made."""
    kind = getattr(builtins, name, None)
    try:
        return kind() if isinstance(kind, type) and issubclass(kind, Exception) else Raised(name)
    except TypeError:
        return Raised(name)


def is_answer(answer: Any, word: str) -> bool:
    """Whether a message is a pair that begins with this word."""
    return type(answer) is tuple and len(answer) == 2 and answer[0] == word


def raised_name(answer: Any) -> str:
    """The type name of what the candidate raised, as far as it is a name."""
    if is_answer(answer, "raised") and type(answer[1]) is str and answer[1].isidentifier():
        return answer[1][:60]
    return "unreadable"


def _fork() -> tuple[int, int, int]:
    """Start the process with nothing but two pipes; returns (write end, read end, process id)."""
    theirs_in, ours_out = os.pipe()
    ours_in, theirs_out = os.pipe()
    judge = os.getpid()
    pid = os.fork()
    if pid == 0:
        try:
            _become_child(judge, theirs_in, theirs_out)
            child.serve()
        finally:
            os._exit(1)
    os.close(theirs_in)
    os.close(theirs_out)
    os.set_blocking(ours_out, False)
    return ours_out, ours_in, pid


def _become_child(judge: int, read_end: int, write_end: int) -> None:
    os.setsid()
    prctl(_PARENT_DEATH, signal.SIGKILL)
    prctl(_DUMPABLE, 1)
    if os.getppid() != judge:
        os._exit(1)
    read_end, write_end = os.dup(read_end), os.dup(write_end)
    while read_end <= child.TO_JUDGE:
        read_end = os.dup(read_end)
    while write_end <= child.TO_JUDGE:
        write_end = os.dup(write_end)
    os.dup2(read_end, child.FROM_JUDGE, inheritable=False)
    os.dup2(write_end, child.TO_JUDGE, inheritable=False)
    nothing = os.open(os.devnull, os.O_RDWR)
    for standard in (0, 1, 2):
        os.dup2(nothing, standard)
    os.closerange(child.TO_JUDGE + 1, 1 << 16)
    sys.path[:] = [*sys.path, os.getcwd(), PACKAGES]


def prctl(option: int, value: int) -> None:
    """Set one property of this process.

    Raises:
        OSError: the kernel refuses.
    """
    if ctypes.CDLL(None).prctl(option, value, 0, 0, 0) != 0:
        raise OSError(f"prctl({option}, {value}) failed")


def end_all() -> bool:
    """Kill every descendant until the kernel knows of none; False if some would not end in time.

    As subreaper the judge inherits every orphan, daemons with sessions of their own included.
    """
    until = time.monotonic() + END_S
    listing = f"/proc/self/task/{os.getpid()}/children"
    while time.monotonic() < until:
        with open(listing, "rb") as file:
            for pid in file.read().split():
                os.kill(int(pid), signal.SIGKILL)
        try:
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
            time.sleep(0.0002)
        except ChildProcessError:
            return True
    return False

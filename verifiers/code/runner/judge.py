"""The judge's process: it alone holds what is hidden, drives the candidate's process, and writes
one evidence message.

Order is the defence. The judge closes its memory to processes of its own user, forks the
candidate's process while it knows nothing, and only then reads the hidden material from standard
input; it writes only when every process that ever held candidate code is dead.
"""

from __future__ import annotations

import builtins
import ctypes
import os
import select
import sys
import time

from agentrl.verifiers.code.runner import child
from agentrl.verifiers.code.runner.codec import CodecError, Reader, Writer, decode, encode, matches

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
_DUMPABLE, _PARENT_DEATH, _SUBREAPER = 4, 1, 36


class Gone(BaseException):
    """The candidate's process cannot be asked any more: `fact` says why. Not an Exception, so that
    no check eats it.
    """

    def __init__(self, fact: str) -> None:
        super().__init__(fact)
        self.fact = fact


class Raised(Exception):
    """The candidate raised something that is no built-in exception."""


class Broken(Exception):
    """The hidden material itself is at fault, whatever the candidate is."""


class Candidate:
    """The candidate's process, seen from the judge."""

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
        self._began_cpu = self._cpu_s()[1]
        until = time.monotonic() + self.call_s
        self.send(message, until)
        return self.receive(until)

    def send(self, message: tuple[Any, ...], until: float) -> None:
        """Write one message."""
        rest = memoryview(encode(message))
        while rest:
            if not select.select([], [self.to_child], [], max(0.0, until - time.monotonic()))[1]:
                raise self._leave("time_limit")
            try:
                rest = rest[os.write(self.to_child, rest) :]
            except BrokenPipeError:
                raise self._leave("ended") from None

    def receive(self, until: float) -> Any:
        """Read one message; a long one may take until the deadline of everything, once it has
        begun.
        """
        self._until = until
        reader = Reader(self._read)
        try:
            value = reader.receive()
        except CodecError as error:
            self._unread = reader.rest()
            if str(error) == "given up":
                return ("raised", "CodecError")
            raise self._leave("unreadable") from None
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
                raise self._leave("time_limit")
            self._until = min(self.deadline, time.monotonic() + left)
        data = os.read(self.from_child, 1 << 20)
        if not data:
            raise self._leave("ended")
        self._until = self.deadline
        return data

    def _cpu_s(self) -> tuple[bool, float]:
        """Whether the candidate's process wants a processor, and the processor time that it has
        had, in seconds.
        """
        try:
            with open(f"/proc/{self.pid}/stat", "rb") as file:
                fields = file.read().rpartition(b")")[2].split()
        except OSError:
            return False, 0.0
        return fields[0] == b"R", (int(fields[11]) + int(fields[12])) / _TICKS

    def _leave(self, fact: str) -> Gone:
        self.gone = fact
        return Gone(fact)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call the candidate's function as if it were here; what it raised is raised again, by type
        name.
        """
        if self.gone:
            raise Gone(self.gone)
        self.calls += 1
        answer = self.request("call", args, kwargs)
        if _is_answer(answer, "value"):
            return answer[1]
        raise _error(_raised(answer))


def _error(name: str) -> Exception:
    """An exception of the built-in type of that name; of type Raised if there is none, or it needs
    arguments.
    """
    kind = getattr(builtins, name, None)
    try:
        return kind() if isinstance(kind, type) and issubclass(kind, Exception) else Raised(name)
    except TypeError:
        return Raised(name)


def _is_answer(answer: Any, word: str) -> bool:
    return type(answer) is tuple and len(answer) == 2 and answer[0] == word


def _raised(answer: Any) -> str:
    """The type name of what the candidate raised, as far as it is a name."""
    if _is_answer(answer, "raised") and type(answer[1]) is str and answer[1].isidentifier():
        return answer[1][:60]
    return "unreadable"


def _fork() -> tuple[int, int, int]:
    """Start the candidate's process with nothing but two pipes; returns (write end, read end,
    process id).
    """
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
    _prctl(_PARENT_DEATH, signal.SIGKILL)
    _prctl(_DUMPABLE, 1)
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


def _prctl(option: int, value: int) -> None:
    if ctypes.CDLL(None).prctl(option, value, 0, 0, 0) != 0:
        raise OSError(f"prctl({option}, {value}) failed")


def main(read_exactly: Callable[[int], bytes]) -> None:
    """Judge one candidate: hidden material comes in on standard input, evidence goes out on
    standard output.
    """
    _prctl(_DUMPABLE, 0)
    _prctl(_SUBREAPER, 1)
    candidate = Candidate()
    signal.signal(
        signal.SIGINT, signal.SIG_IGN
    )  # the candidate may send it, and it would look like our own fault
    request = decode(read_exactly(int.from_bytes(read_exactly(4), "little")))
    verdict = os.dup(1)
    nothing = os.open(os.devnull, os.O_RDWR)
    for standard in (0, 1, 2):
        os.dup2(nothing, standard)
    evidence = _judge(candidate, request)
    evidence["survived"] = not _end_all()
    evidence["calls"] = candidate.calls
    frame = memoryview(request["nonce"] + encode(evidence))
    while frame:
        frame = frame[os.write(verdict, frame) :]
    os._exit(0)


def _judge(candidate: Candidate, request: dict[str, Any]) -> dict[str, Any]:
    """Outcomes, one letter for each expected case or test: p passed, f failed, - not reached."""
    outcomes = ["-"] * request["count"]
    evidence: dict[str, Any] = {"outcomes": "", "fact": "", "broken": ""}
    candidate.call_s = request["call_s"]
    candidate.deadline = time.monotonic() + request["wall_s"]
    signal.signal(signal.SIGALRM, _on_alarm)
    signal.setitimer(signal.ITIMER_REAL, request["wall_s"], 1.0)
    try:
        _FORMS[request["form"]](candidate, request, outcomes)
    except Gone as gone:
        evidence["fact"] = gone.fact
    except Broken as broken:
        evidence["broken"] = str(broken)
    except MemoryError:
        evidence["fact"] = "memory"
    except BaseException as error:  # noqa: BLE001  nothing may end the judge without evidence
        evidence["broken"] = f"the judge failed: {type(error).__name__}: {error}"
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0.0)
    if candidate.gone:
        evidence["fact"] = candidate.gone
    evidence["outcomes"] = "".join(outcomes)
    return evidence


def _on_alarm(number: int, frame: Any) -> None:
    raise Gone("time_limit")


def _load(candidate: Candidate, request: dict[str, Any]) -> None:
    answer = candidate.request("load", request["path"], request["entry_point"])
    if not _is_answer(answer, "raised") and answer != ("ok",):
        raise Gone("ended")
    if answer != ("ok",):
        candidate.gone = f"import:{_raised(answer)}"
        raise Gone(candidate.gone)


def _judge_cases(candidate: Candidate, request: dict[str, Any], outcomes: list[str]) -> None:
    _load(candidate, request)
    for index, (args, kwargs, want) in enumerate(request["cases"]):
        candidate.calls += 1
        answer = candidate.request("call", tuple(args), kwargs)
        passed = _is_answer(answer, "value") and matches(answer[1], want, request["atol"])
        outcomes[index] = "p" if passed else "f"


def _judge_draws(candidate: Candidate, request: dict[str, Any], outcomes: list[str]) -> None:
    import random

    reference = _hidden_function(request["reference"], request["entry_point"])
    generate = _hidden_function(request["generate"], "generate")
    rng = random.Random(request["seed"])
    _load(candidate, request)
    for index in range(len(outcomes)):
        try:
            args = encode(tuple(generate(rng)))
            want = _carried(reference(*decode(args)))
        except Gone:
            raise Broken("no case could be generated within the time limit") from None
        except Exception as error:
            why = "generate(rng) returns the arguments of one call as a tuple"
            raise Broken(f"no case could be generated: {type(error).__name__}; {why}") from error
        candidate.calls += 1
        answer = candidate.request("call", decode(args), {})
        passed = _is_answer(answer, "value") and matches(answer[1], want, request["atol"])
        outcomes[index] = "p" if passed else "f"


def _carried(value: Any) -> Any:
    """A value of the reference as one of the candidate would arrive."""
    pieces: list[bytes] = []
    Writer(pieces.append, child.reduce).send(value)
    return decode(b"".join(pieces))


def _hidden_function(text: str, name: str) -> Callable[..., Any]:
    """A function that hidden text defines.

    Raises:
        Broken: the text cannot be loaded, or defines no such function.
    """
    from agentrl.verifiers.code.runner import lazy

    sys.path.append(PACKAGES)
    lazy.install()
    hidden: dict[str, Any] = {"__name__": "hidden", "__builtins__": builtins}
    try:
        exec(compile(text, "hidden", "exec"), hidden)
    except Exception as error:
        raise Broken(
            f"the hidden text of {name} cannot be loaded: {type(error).__name__}: {error}"
        ) from error
    function = hidden.get(name)
    if not callable(function):
        raise Broken(f"the hidden text defines no function named {name}")
    return function  # type: ignore[no-any-return]


def _judge_check(candidate: Candidate, request: dict[str, Any], outcomes: list[str]) -> None:
    check = _hidden_function(request["check"], "check")
    _load(candidate, request)
    try:
        check(candidate)
    except Exception as error:  # noqa: BLE001  the reference passes: whatever a check raises is the candidate's failure
        outcomes[0] = "f"
        candidate.gone = candidate.gone or f"check:{type(error).__name__[:60]}"
    else:
        outcomes[0] = "f" if candidate.gone else "p"


def _judge_tests(candidate: Candidate, request: dict[str, Any], outcomes: list[str]) -> None:
    places = {name: index for index, name in enumerate(request["ids"])}
    if request["by_pytest"] and not os.path.exists(f"{PACKAGES}/pytest"):
        raise Broken(
            f"tests with fixtures or a conftest.py need pytest in {PACKAGES} of the grader's image"
        )
    candidate.send(("tests", request["tests"], request["by_pytest"]), candidate.deadline)
    while True:
        answer = candidate.receive(candidate.deadline)
        candidate.calls += 1
        if (
            type(answer) is tuple
            and len(answer) == 3
            and answer[0] == "test"
            and type(answer[1]) is str
        ):
            place = places.get(answer[1], -1)
            if place < 0 or outcomes[place] != "-":
                raise Gone("unexpected_test")
            outcomes[place] = "p" if answer[2] == "p" else "f"
        elif answer == ("done",):
            return
        else:
            candidate.gone = f"import:{_raised(answer)}"
            raise Gone(candidate.gone)


_FORMS = {
    "cases": _judge_cases,
    "generate": _judge_draws,
    "check": _judge_check,
    "tests": _judge_tests,
}


def _end_all() -> bool:
    """Kill every descendant until the kernel says that there is none; False if some would not end
    in time.

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

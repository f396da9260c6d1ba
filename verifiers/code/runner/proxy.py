"""The judge's side of a proxy: tests run here, and what they import is the candidate's over there.

A handle gives nothing away by itself, but `handle == expected` would hand what is expected to the
candidate, and believe its answer. So the reference solution is judged first, and each attribute,
comparison, sum or membership that a test asks of a handle is noted with its line. Of a candidate
nothing else is asked: a test that comes to do so has failed, whatever it makes of it.
"""

from __future__ import annotations

import _thread
import sys

from agentrl.verifiers.code.runner import carry, handles
from agentrl.verifiers.code.runner.candidate import Candidate, Gone
from agentrl.verifiers.code.runner.codec import CodecError, encode
from agentrl.verifiers.code.runner.handles import ARITHMETIC, COMPARISONS, FREE
from agentrl.verifiers.code.runner.minitest import Watch
from agentrl.verifiers.code.runner.peer import NAMED, OTHER_ERRORS, Peer

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

MOST_DEPTH = 40
_NEVER = ("test", "pytest", "setUp", "tearDown", "setup_", "teardown_", "load_tests", "_")
_NO_ATTRIBUTES = {
    "function",
    "method",
    "builtin_function_or_method",
    "module",
    "type",
    "frame",
    "code",
    "traceback",
    "generator",
    "coroutine",
    "async_generator",
}
_SHOWN = {"__name__", "__qualname__", "__doc__"}


class Judge(Peer, Watch):
    """The tests' end of the wire.

    Args:
        uses: what the reference was asked for, as `record` of its judging; None to note it.
        widened: families of operators and attributes that are allowed on every line.
        files: names of the test files.
    """

    def __init__(
        self, candidate: Candidate, uses: set[str] | None, widened: set[str], files: set[str]
    ) -> None:
        super().__init__()
        self.candidate = candidate
        self.uses = set() if uses is None else uses
        self.is_noting = uses is None
        self.widened = widened
        self.files = files
        self.record: set[str] = set()
        self.test = ""
        self.spoiled = ""
        self._is_whole_spoiled = False
        self._depth = 0
        self._lock = _thread.RLock()
        candidate.begin()
        candidate.send(encode(("proxy",)), candidate.begin())
        if candidate.receive(candidate.begin()) != "ready":
            raise candidate.leave("unreadable")
        handles.install(self)

    def begin(self, test: str) -> None:
        """A test begins; what spoiled an earlier one is forgotten, what spoiled all is not."""
        self._is_whole_spoiled = self._is_whole_spoiled or bool(self.spoiled and not self.test)
        self.test = test
        self.spoiled = self.spoiled if self._is_whole_spoiled else ""

    def spoil(self, why: str) -> AssertionError:
        """The running test has failed, whatever becomes of the error that this returns."""
        self.spoiled = self.spoiled or why
        return AssertionError(why)

    def note(self, what: str) -> None:
        """Add to the record of a reference."""
        if self.is_noting:
            self.record.add(what)

    def unserved(self, why: str) -> None:
        """A handle cannot do this."""
        self.note(f"unserved:{why}")

    def _site(self) -> str:
        """File and line of the test that is running; empty outside of test files."""
        frame: Any = sys._getframe(1)
        while frame is not None:
            if frame.f_code.co_filename in self.files:
                return f"{frame.f_code.co_filename}:{frame.f_lineno}"
            frame = frame.f_back
        return ""

    # What tests ask of the candidate.

    def allow(self, kind: str, name: str, handle: Any, args: tuple[Any, ...]) -> None:
        """Refuse what the reference was not asked for on this line."""
        if kind == "op" and name in FREE:
            return
        site = self._site()
        if not site:
            raise AttributeError(name)
        if self.is_noting:
            self.note(f"use:{site}:{kind}:{name}")
            if _decides(name, args):
                self.note(f"decided:{self.test}")
            return
        if f"use:{site}:{kind}:{name}" in self.uses or _family(name) in self.widened:
            return
        if kind == "get":  # it is not asked for, so it might as well not be there
            raise AttributeError(name)
        raise self.spoil(f"the reference needs no {name} here")

    def same(self, target: Any, other: Any) -> Any:
        """As ever; but the candidate says which of its objects are one."""
        if type(type(other)) is handles.ProxyType and not self.is_reading:
            self.note(f"decided:{self.test}")
        return NotImplemented

    def call(self, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Call; arguments that the reference changes on this line are changed here too."""
        given = (*args, *kwargs.values())
        back = any(type(value).__name__ in carry.MUTABLE for value in given)
        if back and not self.is_noting:
            back = f"back:{self._site()}" in self.uses
        return self.request("call", target, args, kwargs, back)

    def raised(self, error: Any) -> BaseException:
        """What to raise; an ending such as SystemExit is a failure of the test."""
        if isinstance(error, Exception):
            return error
        if any(error is known for known in self.own.values()):
            return error if isinstance(error, BaseException) else self.spoil("no exception")
        return self.spoil("the candidate raised what is no exception")

    def write(self, data: bytes) -> None:
        """Write a message whole."""
        self.candidate.send(data, self.candidate.begin())

    def exchange(self, frame: tuple[Any, ...]) -> tuple[Any, ...]:
        """Ask the candidate; whatever is no proper message ends the judging."""
        candidate = self.candidate
        with self._lock:
            if candidate.gone:
                raise Gone(candidate.gone)
            if self.is_reading:
                raise candidate.leave("unreadable")
            candidate.calls += 1
            self.write(self.packed(frame))
            while True:
                message = self._read()
                if _is_question(message):
                    self._answer(message)
                elif _is_answer(message, frame):
                    if message[4] is not None:
                        self.note(f"back:{self._site()}")
                    return message
                else:
                    raise candidate.leave("unreadable")

    def _read(self) -> tuple[Any, ...]:
        self.is_reading = True
        try:
            message: tuple[Any, ...] = self.candidate.receive(self.candidate.begin(), self.resolve)
        finally:
            self.is_reading = False
        return message

    # What the candidate asks of the tests' objects.

    def _answer(self, frame: tuple[Any, ...]) -> None:
        _, op, target, args, kwargs, _ = frame
        self._depth += 1
        if self._depth > MOST_DEPTH:
            raise self.candidate.leave("unreadable")
        try:
            status, value = "value", self.perform(op, target, args, kwargs)
        except Gone:
            raise
        except BaseException as error:  # noqa: BLE001  what a test's own function raises goes to its caller
            status, value = "raised", error
            if isinstance(error, AssertionError):
                self.spoil("an assertion failed in a function of the test")
        finally:
            self._depth -= 1
        try:
            data = self.packed(("a", status, value, "", None))
        except CodecError as error:
            data = self.packed(("a", "raised", ValueError(str(error)), "", None))
        self.write(data)

    def perform(self, op: str, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Do what the candidate asks, as far as it may: calls, operators and public names."""
        if self.numbers.get(id(target)) is None:
            raise PermissionError("only objects that a test handed over can be used")
        kind = type(target).__name__
        if op == "call" and kind != "module":
            return target(*args, **kwargs)
        if op == "op":
            return super().perform(op, target, args, kwargs)
        if op == "plain":
            return super().perform(op, target, (), {})
        if op == "get" and len(args) == 1 and self._may_read(target, kind, args[0]):
            return getattr(target, args[0])
        if op == "set" and len(args) == 2 and _is_public(args[0]):
            self.note(f"set:{args[0]}")
            if self.is_noting or f"set:{args[0]}" in self.uses:
                return setattr(target, args[0], args[1])
        if op == "get":
            raise AttributeError(f"a {kind} of the test shows no such attribute")
        raise PermissionError(f"{op} is not allowed on this {kind}")

    def _may_read(self, target: Any, kind: str, name: Any) -> bool:
        if kind in _NO_ATTRIBUTES:
            return name in _SHOWN and kind in ("function", "method", "type")
        cases = sys.modules.get("unittest.case")
        if cases is not None and isinstance(target, cases.TestCase):
            return False
        mocks = sys.modules.get("unittest.mock")
        if mocks is not None and isinstance(target, mocks.NonCallableMock):
            return _is_public(name) and not hasattr(type(target), name)
        return _is_public(name)

    # Names.

    def named(self, module: str, name: str) -> Any:
        """A plain type or a usual error; a candidate can name no other."""
        if name in OTHER_ERRORS.get(module, ()):
            return getattr(__import__(module, fromlist=["*"]), name)
        if module != "builtins" or name not in NAMED:
            raise CodecError(f"{name} cannot be named")
        return NAMED[name]

    def names(self, value: Any) -> bool:
        """Whether a type or function is one of the standard library, which the candidate has."""
        if not isinstance(value, type) and type(value).__name__ not in (
            "function",
            "builtin_function_or_method",
        ):
            return False
        module = str(value.__module__)
        return (
            module.partition(".")[0] in sys.stdlib_module_names
            and getattr(sys.modules.get(module), value.__name__, None) is value
        )


class Module(type(sys)):  # type: ignore[misc]
    """Stands for a module of the candidate, which is loaded when something of it is wanted."""

    def __getattr__(self, name: str) -> Any:
        if f"{self.__name__}.{name}" in sys.modules:
            return sys.modules[f"{self.__name__}.{name}"]
        if name == "__all__":
            return self._names()
        if name.startswith("__"):
            raise AttributeError(name)
        return handles.peer().get(self._loaded(), name)

    def __setattr__(self, name: str, value: Any) -> None:
        handles.peer().set(self._loaded(), name, value)

    def __delattr__(self, name: str) -> None:
        handles.peer().delete(self._loaded(), name)

    def _loaded(self) -> Any:
        known = self.__dict__
        if "_agentrl_loaded" not in known:
            known["_agentrl_loaded"] = handles.peer().request("import", self.__name__)
        return known["_agentrl_loaded"]

    def _names(self) -> list[str]:
        judge, loaded = handles.peer(), self._loaded()
        if judge.is_noting:
            for name in judge.request("defined", loaded):
                if not name.startswith(_NEVER):
                    judge.note(f"star:{self.__name__}:{name}")
        known = judge.record if judge.is_noting else judge.uses
        there = judge.request("names", loaded)
        return [name for name in there if f"star:{self.__name__}:{name}" in known]


def install_modules(names: list[str]) -> None:
    """Put stand-ins where the candidate's modules are looked for."""
    for name in names:
        parts = name.split(".")
        if parts[0] in sys.stdlib_module_names:
            continue
        for end in range(1, len(parts) + 1):
            module = Module(".".join(parts[:end]))
            module.__dict__["__path__"] = []
            sys.modules.setdefault(module.__name__, module)


def _is_public(name: Any) -> bool:
    return type(name) is str and not name.startswith("_")


def _is_question(message: Any) -> bool:
    return (
        type(message) is tuple
        and len(message) == 6
        and message[0] == "q"
        and type(message[1]) is str
        and type(message[3]) is tuple
        and type(message[4]) is dict
        and all(type(key) is str for key in message[4])
    )


def _is_answer(message: Any, frame: tuple[Any, ...]) -> bool:
    if type(message) is not tuple or len(message) != 5 or message[0] != "a":
        return False
    _, status, _, text, back = message
    if status not in ("value", "raised") or type(text) is not str:
        return False
    if back is None:
        return True
    return (
        frame[5] is True
        and type(back) is tuple
        and len(back) == 2
        and type(back[0]) is tuple
        and len(back[0]) == len(frame[3])
        and type(back[1]) is dict
        and back[1].keys() == frame[4].keys()
    )


def _decides(name: str, args: tuple[Any, ...]) -> bool:
    """Whether who made a handle decides by this operator what a test wants to know."""
    if name in COMPARISONS or name == "__contains__":
        return args[0] is not None
    is_plain = bool(args) and type(type(args[0])) is not handles.ProxyType
    return name in ("__sub__", "__rsub__") and is_plain


def _family(name: str) -> str:
    if name in COMPARISONS:
        return "comparison"
    if name in ARITHMETIC:
        return "arithmetic"
    if name == "__contains__":
        return "membership"
    return "items" if name in handles.ITEMS else "attributes"

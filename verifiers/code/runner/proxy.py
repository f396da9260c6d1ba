"""The judge's side of the bridge: tests run here and use the candidate's objects through handles.

A handle gives nothing away by itself, but `handle == expected` would hand what is expected to the
candidate, and believe its answer. So the reference solution is judged first, and each attribute and
operator that a test asks of a handle is noted with its line. Where the test asks a handle to decide
against a value of its own, or hands over an object that `crossing` does not list, the task is
refused. Of a candidate nothing else is asked: a test that comes to do so has failed, whatever it
makes of it. Where the reference sends plain values, so must the candidate.
"""

from __future__ import annotations

import _thread
import sys

from agentrl.verifiers.code.runner import handles
from agentrl.verifiers.code.runner.candidate import Candidate, Escaped, Gone, escaped
from agentrl.verifiers.code.runner.codec import (
    MUTABLE,
    CodecError,
    Ref,
    encode,
    parts_for_candidate,
)
from agentrl.verifiers.code.runner.crossing import Crossing, is_library
from agentrl.verifiers.code.runner.handles import ARITHMETIC, COMPARISONS
from agentrl.verifiers.code.runner.minitest import Watch
from agentrl.verifiers.code.runner.peer import NAMED, OTHER_ERRORS, Peer

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterator
    from typing import Any

MOST_DEPTH = 40
_NEVER = ("test", "pytest", "setUp", "tearDown", "setup_", "teardown_", "load_tests", "_")
"""Names that a star import brings only if the test file reads them: test runners look for them."""
_UNASKED = frozenset(
    f"__{name}__"
    for name in ("call", "iter", "next", "aiter", "anext", "await", "enter", "exit", "repr", "str")
)
"""Operators of a candidate's objects that are allowed where the reference was not asked."""
_UNARY = frozenset(
    f"__{name}__" for name in ("neg", "pos", "abs", "invert", "round", "trunc", "floor", "ceil")
)
_CHANGING = frozenset(
    f"__{name}__" for name in ("setitem", "delitem", "next", "anext", "enter", "exit", "call")
)
_CHANGING |= {name for name in ARITHMETIC if name.startswith("__i") and name != "__invert__"}
_FOREVER = (str, bytes, int, float, complex, tuple, frozenset)
"""Plain types whose instances cannot change: their value is fetched once."""


class Judge(Peer, Watch):
    """The tests' end of the wire.

    Args:
        uses: what the reference was asked for, as `record` of its judging; None to note it.
        widened: families of operators and attributes that are allowed on every line.
        files: texts of the test files by name.
    """

    def __init__(
        self,
        candidate: Candidate,
        uses: set[str] | None,
        widened: set[str],
        files: dict[str, str],
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
        self.crossing = Crossing(files)
        self._read_names = {name for text in files.values() for name in _names_in(text)}
        self._looks: dict[Any, Any] = {}
        self._plain: dict[Any, Any] = {}
        self._frame: tuple[Any, ...] | None = None
        self._depth = 0
        self._lock = _thread.RLock()
        candidate.begin()
        candidate.send(encode(("proxy",)), candidate.begin())
        if candidate.receive(candidate.begin()) != "ready":
            raise candidate.leave("unreadable")
        handles.install(self)
        if any("unittest" in text for text in files.values()):
            import unittest.case

            see_through(unittest.case._AssertRaisesContext)

    def begin(self, test: str) -> None:
        """A test begins; what spoiled an earlier one is forgotten, what spoiled all is not."""
        self._is_whole_spoiled = self._is_whole_spoiled or bool(self.spoiled and not self.test)
        self.test = test
        self.spoiled = self.spoiled if self._is_whole_spoiled else ""

    def spoil(self, why: str) -> AssertionError:
        """The running test has failed, whatever becomes of the error that this returns."""
        self.spoiled = self.spoiled or why
        return AssertionError(why)

    def reads(self, name: str) -> bool:
        """Whether the text of a test file reads this name."""
        return name in self._read_names

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
        site = self._site()
        if not site:
            if kind == "op" and name in _UNASKED:
                return
            raise AttributeError(name)
        if self.is_noting:
            self.note(f"use:{site}:{kind}:{name}")
            if kind == "op" and _decides(name, args):
                self.note(f"decided:{_family(name)}:{site}")
            return
        if f"use:{site}:{kind}:{name}" in self.uses or _family(name) in self.widened:
            return
        if kind == "op" and name in _UNASKED:
            return
        if kind == "get":  # it is not asked for, so it might as well not be there
            raise AttributeError(name)
        raise self.spoil(f"the reference needs no {name} here")

    def same(self, target: Any, other: Any) -> Any:
        """As ever; but the candidate says which of its objects are one."""
        if type(type(other)) is handles.ProxyType and not self.is_reading:
            self.note(f"decided:comparison:{self._site()}")
        return NotImplemented

    def call(self, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Call; arguments that the reference changes on this line are changed here too."""
        given = (*args, *kwargs.values())
        back = any(type(value).__name__ in MUTABLE for value in given)
        if back and not self.is_noting:
            back = f"back:{self._site()}" in self.uses
        return self.request("call", target, args, kwargs, back)

    def request(
        self,
        op: str,
        target: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
        back: bool = False,
    ) -> Any:
        """Ask; what was seen of objects that can change is forgotten when they may have changed."""
        if op in ("call", "set", "delete", "await") or (op == "op" and args[0] in _CHANGING):
            self._looks.clear()
        return super().request(op, target, args, kwargs, back)

    def get(self, target: Any, name: str) -> Any:
        """An attribute; of a plain value with something added, plain methods are used here."""
        base = getattr(type(target), "_agentrl_base", None)
        is_asked = self.is_noting or f"use:{self._site()}:get:{name}" in self.uses
        if base is not None and not is_asked and not name.startswith("_") and hasattr(base, name):
            return getattr(self.plain_value(target), name)
        self.allow("get", name, target, ())
        place = (_number(target), "get", name)
        if place not in self._looks:
            value = self.request("get", target, (name,))
            self._looks[place] = value
        return self._looks[place]

    def operate(self, target: Any, name: str, args: tuple[Any, ...]) -> Any:
        """Apply an operator; each look at an object that nobody changed sees the same."""
        base = getattr(type(target), "_agentrl_base", None)
        if self.is_reading or base is not None or name in _CHANGING or name in COMPARISONS:
            return super().operate(target, name, args)
        self.allow("op", name, target, args)
        try:
            place = (_number(target), name, self.packed(args, is_sent=False))
        except CodecError:
            return self.request("op", target, (name, *args))
        if place not in self._looks:
            value = self.request("op", target, (name, *args))
            self._looks[place] = Items(value) if name == "__iter__" else value
        return iter(self._looks[place]) if name == "__iter__" else self._looks[place]

    def plain_value(self, target: Any) -> Any:
        """The plain value of a handle; fetched once if it cannot change."""
        place = (_number(target), "plain")
        if place in self._plain:
            return self._plain[place]
        if place not in self._looks:
            value = super().plain_value(target)
            kept = self._plain if isinstance(value, _FOREVER) else self._looks
            kept[place] = value
            return value
        return self._looks[place]

    def wants_plain(self, op: str, args: tuple[Any, ...]) -> bool:
        """Where the reference sent no object, subclasses of plain types come as plain values."""
        return not self.is_noting and self._place(op, args) not in self.uses

    def _place(self, op: str, args: tuple[Any, ...]) -> str:
        name = args[0] if op in ("get", "op") else ""
        return f"object:{self._site()}:{op}:{name}"

    def raised(self, error: Any, op: str, args: tuple[Any, ...]) -> BaseException:
        """What to raise; an ending such as SystemExit is a failure of the test."""
        if isinstance(error, Exception):
            is_protocol = op == "op" and args[0] in ("__next__", "__anext__")
            return error if is_protocol else escaped(error)
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
                message = self._read(frame)
                if _is_question(message):
                    self._answer(message)
                elif _is_answer(message, frame):
                    if message[4] is not None:
                        self.note(f"back:{self._site()}")
                    return message
                else:
                    raise candidate.leave("unreadable")

    def _read(self, frame: tuple[Any, ...]) -> tuple[Any, ...]:
        outer, self._frame, self.is_reading = self._frame, frame, True
        try:
            message: tuple[Any, ...] = self.candidate.receive(self.candidate.begin(), self.resolve)
        finally:
            self._frame, self.is_reading = outer, False
        return message

    def _resolved(self, tag: str, *parts: Any) -> Any:
        made = super()._resolved(tag, *parts)
        if self._frame is None:
            return made
        _, op, _, args, _, _, plain = self._frame
        if tag == "b" and not isinstance(made, BaseException):
            self._expect_home(made, self._place(op, args))
        if tag == "o":
            if plain and getattr(type(made), "_agentrl_base", None) is not None:
                raise CodecError("a plain value was wanted")
            if self.is_noting and type(made).__name__ not in _NO_OBJECTS:
                self.note(self._place(op, args))
        return made

    def _expect_home(self, value: Any, place: str) -> None:
        """Refuse an object of the test as an answer where the reference sends none of its type.

        A mock has any attribute and is true, so its children would answer for the candidate.
        """
        note = f"home:{type(value).__name__}:{place}"
        if self.is_noting:
            self.note(note)
        elif note not in self.uses:
            raise CodecError("the reference sends no object of the test here")

    # What the candidate asks of the tests' objects.

    def _answer(self, frame: tuple[Any, ...]) -> None:
        _, op, target, args, kwargs, _, _ = frame
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

    def admit(self, value: Any) -> None:
        """Refuse to hand over an object that the table does not list.

        Raises:
            CodecError: it must not cross.
        """
        if self.crossing.access(value) is None:
            name = value.__name__ if isinstance(value, type) else type(value).__name__
            self.note(f"refused:{self._site()}:{type(value).__module__}.{name}")
            raise CodecError(f"an object of type {name} must not cross")

    def rebuilt(self, value: Any) -> Any:
        """Parts of what the candidate builds again; library subclasses of plain types as values."""
        parts = parts_for_candidate(value)
        if parts is not None:
            return Ref("v", *parts)
        base = self.plain_base(value)
        if base is not None and self.crossing.access(value) is None:
            return self.plain_copy(value, base)
        return None

    def perform(self, op: str, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Do what the candidate asks, as far as the table allows it."""
        access = None
        if self.numbers.get(id(target)) is not None:
            access = self.crossing.access(target)
        if access is None:
            raise PermissionError("only objects that a test handed over can be used")
        kind = type(target).__name__
        if op == "call" and access.can_call:
            return target(*args, **kwargs)
        if op == "op" and args and args[0] in access.operators:
            return super().perform(op, target, args, kwargs)
        if op == "plain" and self.plain_base(target) is not None:
            return super().perform(op, target, (), {})
        if op == "get" and len(args) == 1:
            if access.shows(args[0]) and not _is_mock_setting(target, args[0]):
                return getattr(target, args[0])
            raise AttributeError(f"a {kind} of the test shows no such attribute")
        if op == "set" and len(args) == 2 and args[0] in access.settable:
            self.note(f"set:{args[0]}")
            if self.is_noting or f"set:{args[0]}" in self.uses:
                return setattr(target, args[0], args[1])
        raise PermissionError(f"{op} is not allowed on this {kind}")

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
        return is_library(value)


_NO_OBJECTS = {"generator", "coroutine", "module"}


def _number(target: Any) -> tuple[bool, int]:
    is_class = type(target) is handles.ProxyType
    return is_class, target._agentrl_class if is_class else target._agentrl_object


class Items:
    """The items of an iterable of the candidate, fetched as they are needed and then kept."""

    def __init__(self, source: Any) -> None:
        self._source = source
        self._known: list[Any] = []

    def __iter__(self) -> Any:
        index = 0
        while True:
            if index == len(self._known):
                try:
                    self._known.append(next(self._source))
                except StopIteration:
                    return
            yield self._known[index]
            index += 1


def see_through(context: Any) -> None:
    """Let `assertRaises` or `pytest.raises` match the error inside of an `Escaped`."""
    leave = context.__exit__

    def leave_with_error(self: Any, kind: Any, value: Any, trace: Any) -> Any:
        if isinstance(value, Escaped):
            kind, value = type(value.error), value.error
        return leave(self, kind, value, trace)

    context.__exit__ = leave_with_error


class Module(type(sys)):  # type: ignore[misc]
    """Stands for a module of the candidate, which is loaded when something of it is wanted."""

    def __getattr__(self, name: str) -> Any:
        if f"{self.__name__}.{name}" in sys.modules:
            return sys.modules[f"{self.__name__}.{name}"]
        if name == "__all__":
            return self._names()
        if name.startswith("__"):
            raise AttributeError(name)
        judge = handles.peer()
        known = judge.record if judge.is_noting else judge.uses
        if f"library:{self.__name__}:{name}" in known:
            return __import__(name)
        return judge.get(self._loaded(), name)

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
                if not name.startswith(_NEVER) or judge.reads(name):
                    judge.note(f"star:{self.__name__}:{name}")
            for name in filter(judge.reads, judge.request("modules", loaded)):
                judge.note(f"library:{self.__name__}:{name}")
                judge.note(f"star:{self.__name__}:{name}")
        known = judge.record if judge.is_noting else judge.uses
        prefix = f"star:{self.__name__}:"
        names = {note.removeprefix(prefix) for note in known if note.startswith(prefix)}
        library = {name for name in names if f"library:{self.__name__}:{name}" in known}
        return [
            name for name in sorted({*judge.request("names", loaded), *library}) if name in names
        ]


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


def _is_mock_setting(target: Any, name: str) -> bool:
    """Whether an attribute of a mock is how the test set it up, such as `return_value`."""
    mocks = sys.modules.get("unittest.mock")
    is_mock = mocks is not None and isinstance(target, mocks.NonCallableMock)
    return is_mock and hasattr(type(target), name)


def _names_in(text: str) -> Iterator[str]:
    """All names that the code of a text uses."""
    codes = [compile(text, "", "exec")]
    while codes:
        code = codes.pop()
        yield from code.co_names
        codes += [each for each in code.co_consts if isinstance(each, type(code))]


def _is_question(message: Any) -> bool:
    return (
        type(message) is tuple
        and len(message) == 7
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
    """Whether by this operator an object of the candidate decides about a value of the test."""
    if name in COMPARISONS or name == "__contains__":
        return True
    if name not in ARITHMETIC or name in _UNARY:
        return False
    return any(type(type(value)) is not handles.ProxyType for value in args)


def _family(name: str) -> str:
    if name in COMPARISONS:
        return "comparison"
    if name in ARITHMETIC:
        return "arithmetic"
    if name == "__contains__":
        return "membership"
    return "items" if name in handles.ITEMS else "attributes"

"""The candidate's process: it answers calls by value and holds nothing that is hidden.

Whatever the candidate does to this process, all it can do to the judge is answer, and an answer is
only a value. With "proxy" its objects stay here, and the judge's tests use them from afar.
"""

from __future__ import annotations

import _thread
import os
import sys

from agentrl.verifiers.code.runner import handles
from agentrl.verifiers.code.runner.codec import (
    REBUILT_BY_CANDIDATE,
    CodecError,
    Reader,
    Writer,
    build_for_candidate,
    encode,
    parts_of,
)
from agentrl.verifiers.code.runner.peer import MOST_TEXT, NAMED, OTHER_ERRORS, Peer

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any

FROM_JUDGE, TO_JUDGE = 3, 4
_BASES: tuple[Any, ...] = (dict, list, tuple, set, frozenset, int, float, complex, str, bytes)


def reduce(value: Any) -> Any:
    """What the judge sees of a value that is not of a carried type.

    Subclasses of carried types (Counter, defaultdict, namedtuple, enums of ints) become the plain
    type, dict views, ranges and deques a list, bytearray bytes, a match its span, numpy scalars and
    arrays plain numbers and lists.

    Raises:
        CodecError: any other type.
    """
    kind = type(value)
    for base in _BASES:
        if isinstance(value, base):
            return int.__index__(value) if base is int else base(value)
    if kind.__module__ == "collections" or kind.__name__ in (
        "dict_keys",
        "dict_values",
        "dict_items",
        "range",
    ):
        return list(value)
    if kind is bytearray:
        return bytes(value)
    if kind.__module__ == "re" and kind.__name__ == "Match":
        return value.span()
    if kind.__module__.partition(".")[0] == "numpy" and hasattr(value, "tolist"):
        return value.tolist()
    raise CodecError(f"a value of type {kind.__name__} cannot be carried")


def serve() -> None:
    """Answer the judge's requests until it hangs up.

    Requests: load path name, call args kwargs, proxy. Answers: ("ok",), ("value", result), or
    ("raised", type name).
    """
    function: Callable[..., Any] | None = None
    while True:
        request = Reader(_receive).receive()
        try:
            if request[0] == "load":
                function = _load(request[1], request[2])
                answer: tuple[Any, ...] = ("ok",)
            elif request[0] == "call" and function is not None:
                answer = ("value", function(*request[1], **request[2]))
            else:
                _serve_objects()
                os._exit(0)
        except BaseException as error:  # noqa: BLE001  SystemExit and KeyboardInterrupt of a candidate are answers too
            answer = ("raised", type(error).__name__[:60])
        try:
            Writer(_send, reduce).send(answer)
        except Exception:  # noqa: BLE001, S112  the judge was told to give up on this answer, and may ask again
            continue


def _load(path: str, name: str) -> Callable[..., Any]:
    """Run the candidate's file as a module and return the function `name` of it."""
    stem = os.path.basename(path).removesuffix(".py")
    module = type(sys)(stem)
    module.__file__ = os.path.abspath(path)
    sys.modules[stem] = module
    with open(path, "rb") as file:
        source = file.read()
    exec(compile(source, path, "exec"), module.__dict__)
    function = getattr(module, name)
    if not callable(function):
        raise TypeError(f"{name} is not callable")
    return function  # type: ignore[no-any-return]


def _receive() -> bytes:
    data = os.read(FROM_JUDGE, 1 << 16)
    if not data:
        os._exit(0)
    return data


def _send(data: bytes) -> None:
    rest = memoryview(data)
    while rest:
        rest = rest[os.write(TO_JUDGE, rest) :]


class _Printed:
    """Standard output of the candidate, which travels with its answers."""

    encoding = "utf-8"
    errors = "strict"

    def __init__(self) -> None:
        self.pieces: list[str] = []
        self.size = 0

    def write(self, text: str) -> int:
        """Keep a piece of text, up to a bound for each answer."""
        if not isinstance(text, str):
            raise TypeError("write() argument must be str")
        self.pieces.append(text[: max(0, MOST_TEXT - self.size)])
        self.size += len(text)
        return len(text)

    def flush(self) -> None:
        """Nothing waits."""

    def isatty(self) -> bool:
        """It is no terminal."""
        return False

    def taken(self) -> str:
        """What was written since the last time."""
        text = "".join(self.pieces)
        self.pieces, self.size = [], 0
        return text


class Remote(Peer):
    """Answers the judge; may use the judge's objects while it is being asked."""

    def __init__(self) -> None:
        super().__init__()
        self._unread = b""
        self._asked = 0
        self._sends_plain = False
        self._lock = _thread.RLock()
        self._printed = _Printed()
        self._loop: Any = None

    def write(self, data: bytes) -> None:
        """Write a message whole."""
        _send(data)

    def serve(self) -> None:
        """Answer questions for as long as the judge has any."""
        handles.install(self)
        sys.stdout = self._printed
        while True:
            self._answer(self._read())

    def exchange(self, frame: tuple[Any, ...]) -> tuple[Any, ...]:
        """Ask the judge for something, which only code that the judge waits for may do."""
        with self._lock:
            if not self._asked:
                raise RuntimeError("the test is not waiting, so its objects cannot be used")
            self.write(self.packed(frame))
            while True:
                message = self._read()
                if message[0] == "a":
                    return message
                self._answer(message)

    def _read(self) -> tuple[Any, ...]:
        reader = Reader(self._bytes, self.resolve)
        self.is_reading = True
        try:
            frame: tuple[Any, ...] = reader.receive()
        finally:
            self.is_reading = False
            self._unread = reader.rest()
        return frame

    def _bytes(self) -> bytes:
        if self._unread:
            data, self._unread = self._unread, b""
            return data
        return _receive()

    def _answer(self, frame: tuple[Any, ...]) -> None:
        _, op, target, args, kwargs, back, sends_plain = frame
        self._asked += 1
        outer, self._sends_plain = self._sends_plain, sends_plain
        given: tuple[Any, ...] | None = None
        try:
            before = self.packed((args, kwargs), is_sent=False) if back else b""
            try:
                status, value = "value", self.perform(op, target, args, kwargs)
            except BaseException as error:  # noqa: BLE001  whatever the candidate raises is an answer
                status, value = "raised", error
            if back and self.packed((args, kwargs), is_sent=False) != before:
                given = args, kwargs
            data = self.packed(("a", status, value, self._printed.taken(), given))
        except Exception as error:  # noqa: BLE001  what cannot be told is an answer too
            problem = ValueError(f"cannot be carried: {type(error).__name__}")
            data = self.packed(("a", "raised", problem, "", None))
        finally:
            self._asked -= 1
            self._sends_plain = outer
        with self._lock:
            self.write(data)

    def reduce(self, value: Any) -> Any:
        """What is written for an object: the plain value of a subclass where the judge wants it."""
        base = None
        if self._sends_plain and parts_of(value) is None:
            base = self.plain_base(value)
        return super().reduce(value) if base is None else self.plain_copy(value, base)

    def build(self, name: str, *parts: Any) -> Any:
        """Build a value, also one that only this side builds."""
        if name in REBUILT_BY_CANDIDATE:
            return build_for_candidate(name, *parts)
        return super().build(name, *parts)

    def perform(self, op: str, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """What only this side can do: load a module, list its names, finish a coroutine."""
        if op == "import":
            return __import__(target, fromlist=["__name__"])
        if op == "names":
            return sorted(vars(target))
        if op == "defined":
            return _defined(target)
        if op == "modules":
            return _imported_modules(target)
        if op == "await":
            return self._finished(target)
        return super().perform(op, target, args, kwargs)

    def _finished(self, coroutine: Any) -> Any:
        import asyncio

        self._loop = self._loop or asyncio.new_event_loop()
        return self._loop.run_until_complete(coroutine)

    def named(self, module: str, name: str) -> Any:
        """A type or function of the standard library; the judge names no other."""
        return getattr(__import__(module, fromlist=["*"]), name)

    def names(self, value: Any) -> bool:
        """Whether the judge takes this type by its name: plain types and usual errors."""
        if not isinstance(value, type):
            return False
        return NAMED.get(value.__name__) is value or value.__name__ in OTHER_ERRORS.get(
            value.__module__, ()
        )


def _defined(module: Any) -> list[str]:
    """Public functions and classes that a module itself defines."""
    return [
        name
        for name, value in vars(module).items()
        if not name.startswith("_")
        and callable(value)
        and getattr(value, "__module__", None) == module.__name__
    ]


def _imported_modules(module: Any) -> list[str]:
    """Modules of the standard library that a module imported under their own name."""
    return [
        name
        for name, value in vars(module).items()
        if type(value) is type(sys) and value.__name__ == name and name in sys.stdlib_module_names
    ]


def _serve_objects() -> None:
    """Tell the judge that the bridge is up, and answer it."""
    remote = Remote()
    try:
        _send(encode("ready"))
        remote.serve()
    except CodecError:
        return

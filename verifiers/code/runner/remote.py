"""The candidate's side of a proxy: its modules are loaded here, and here its objects stay."""

from __future__ import annotations

import _thread
import sys

from agentrl.verifiers.code.runner import handles
from agentrl.verifiers.code.runner.codec import CodecError, Reader, encode
from agentrl.verifiers.code.runner.peer import MOST_TEXT, NAMED, OTHER_ERRORS, Peer

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any


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

    def __init__(self, receive: Callable[[], bytes], send: Callable[[bytes], None]) -> None:
        super().__init__()
        self._receive = receive
        self._send = send
        self._unread = b""
        self._asked = 0
        self._lock = _thread.RLock()
        self._printed = _Printed()
        self._loop: Any = None

    def write(self, data: bytes) -> None:
        """Write a message whole."""
        self._send(data)

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
        return self._receive()

    def _answer(self, frame: tuple[Any, ...]) -> None:
        _, op, target, args, kwargs, back = frame
        self._asked += 1
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
        with self._lock:
            self.write(data)

    def perform(self, op: str, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """What only this side can do: load a module, list its names, finish a coroutine."""
        if op == "import":
            return __import__(target, fromlist=["__name__"])
        if op == "names":
            return sorted(vars(target))
        if op == "defined":
            return _defined(target)
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


def serve(receive: Callable[[], bytes], send: Callable[[bytes], None]) -> None:
    """Tell the judge that the proxy is up, and answer it."""
    remote = Remote(receive, send)
    try:
        send(encode("ready"))
        remote.serve()
    except CodecError:
        return

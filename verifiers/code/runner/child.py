"""The candidate's process: it answers calls by value and holds nothing that is hidden.

Whatever the candidate does to this process, all it can do to the judge is answer, and an answer is
only a value. With "proxy" its objects stay here, and the judge's tests use them from afar. The one
exception is "tests": tests that cannot run so are run here, and share the candidate's process.
"""

from __future__ import annotations

import os
import sys

from agentrl.verifiers.code.runner.codec import CodecError, Reader, Writer

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

    Requests: load path name, call args kwargs, proxy, tests files by-pytest. Answers: ("ok",),
    ("value", result), ("test", id, outcome) and at last ("done",), or ("raised", type name).
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
            elif request[0] == "proxy":
                from agentrl.verifiers.code.runner import remote

                remote.serve(_receive, _send)
                os._exit(0)
            else:
                _run_tests(request[1], request[2])
                answer = ("done",)
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


def _run_tests(files: dict[str, str], by_pytest: bool) -> None:
    from agentrl.verifiers.code.runner import minitest, pytest_run

    runner = pytest_run.run if by_pytest else minitest.run
    for test, outcome in runner(files, minitest.Watch()):
        Writer(_send).send(("test", test, outcome))


def _receive() -> bytes:
    data = os.read(FROM_JUDGE, 1 << 16)
    if not data:
        os._exit(0)
    return data


def _send(data: bytes) -> None:
    rest = memoryview(data)
    while rest:
        rest = rest[os.write(TO_JUDGE, rest) :]

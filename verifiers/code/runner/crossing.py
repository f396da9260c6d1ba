"""What may cross between hidden tests and the candidate's process: one table, read by the bridge.

`ROWS` is the published table. `Crossing.access` applies it to an object of the judge's process: it
returns what the candidate may do with a handle on the object, or None if the object never crosses.
"""

from __future__ import annotations

import sys
import types

from agentrl.verifiers.code.runner.codec import (
    REBUILT_BY_CANDIDATE,
    VALUE_TYPES,
)
from agentrl.verifiers.code.runner.handles import BASES, OPERATORS

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator
    from typing import Any


def _names(text: str) -> frozenset[str]:
    return frozenset(text.split())


class Access:
    """What the candidate may do with a handle on an object of the test."""

    def __init__(
        self,
        attributes: str | frozenset[str] = frozenset(),
        operators: str | frozenset[str] = frozenset(),
        can_call: bool = False,
        any_public: bool = False,
        settable: frozenset[str] = frozenset(),
    ) -> None:
        self.attributes = _names(attributes) if isinstance(attributes, str) else attributes
        self.operators = _names(operators) if isinstance(operators, str) else operators
        self.can_call = can_call
        self.any_public = any_public
        self.settable = settable

    def shows(self, name: Any) -> bool:
        """Whether the candidate may read this attribute."""
        if type(name) is not str:
            return False
        return name in self.attributes or (self.any_public and not name.startswith("_"))


_ITERATE = "__iter__ __next__"
_ENTER = "__enter__ __exit__"
_FILE = "close closed flush getvalue read readline readlines seek tell truncate write writelines"
_LOCK = "acquire release locked"
_RANDOM = "choice choices gauss getrandbits randint random randrange sample shuffle uniform"
LISTED: dict[str, Access] = {
    "_io.StringIO": Access(_FILE, f"{_ITERATE} {_ENTER}"),
    "_io.BytesIO": Access(_FILE, f"{_ITERATE} {_ENTER}"),
    "re.Match": Access("end group groupdict groups span start", "__getitem__"),
    "random.Random": Access(_RANDOM),
    "contextlib._GeneratorContextManager": Access("", _ENTER),
    "_thread.lock": Access(_LOCK, _ENTER),
    "_thread.RLock": Access("acquire release", _ENTER),
    "threading.Event": Access("clear is_set set wait"),
    "queue.Queue": Access("empty get get_nowait put put_nowait qsize task_done"),
}
"""Library objects that cross as handles, with the attributes and operators that are listed."""

MOCKS = _names("__call__ __enter__ __exit__ __iter__ __len__ __getitem__ __setitem__ __contains__")
MOCKS |= _names("__bool__ __int__ __float__ __str__ __repr__")
_MOCK_CLASS = "unittest.mock.NonCallableMock"

BOUND: dict[str, frozenset[str]] = {
    "list": _names("append extend insert pop remove clear"),
    "set": _names("add discard remove update clear"),
    "dict": _names("get pop setdefault update __getitem__ __setitem__"),
    "deque": _names("append appendleft extend pop popleft"),
    "Counter": _names("update get __getitem__"),
    "defaultdict": _names("get __getitem__ __setitem__"),
    "str": _names("join format startswith endswith __contains__"),
}
"""Methods of plain containers that a test may hand over, bound, as callbacks (`seen.append`)."""

_ITERATORS = {"map", "filter", "zip", "enumerate", "reversed", "callable_iterator"}
_PURE = {"abc", "collections.abc", "_collections_abc", "enum", "typing", "contextlib"}
"""Modules whose base classes hold no state: what they define counts as the test's."""

ROWS = (
    (
        "by value",
        "both ways",
        "None, bool, int, float, complex, str, bytes, list, tuple, set, frozenset, dict, "
        + ", ".join(sorted(VALUE_TYPES))
        + ", numpy arrays and scalars of numbers and text",
    ),
    ("by value", "test → candidate", ", ".join(sorted(REBUILT_BY_CANDIDATE))),
    (
        "by value",
        "candidate → test",
        "an instance of a subclass of a plain type, where the reference sends a plain value: as"
        " the exact plain type, once",
    ),
    (
        "by name",
        "test → candidate",
        "functions and classes of the standard library: the candidate uses its own copy",
    ),
    ("by name", "candidate → test", "plain types and common built-in exceptions"),
    (
        "as a handle",
        "test → candidate",
        "functions, generators, classes and instances defined in the test file, with the public"
        " attributes and operators that their classes define",
    ),
    (
        "as a handle",
        "candidate → test",
        "everything else: only what the reference was asked on the same line may be asked; the"
        " answers stay the same until the test calls the candidate again",
    ),
    *(
        (
            "by allow-list",
            "test → candidate",
            f"{name}: {', '.join(sorted(access.attributes | access.operators))}",
        )
        for name, access in LISTED.items()
    ),
    (
        "by allow-list",
        "test → candidate",
        f"unittest.mock objects: their child mocks, {', '.join(sorted(MOCKS))}",
    ),
    (
        "by allow-list",
        "test → candidate",
        "iterators of built-in types and of itertools: __iter__, __next__",
    ),
    *(
        (
            "by allow-list",
            "test → candidate",
            f"bound methods of a {name}: {', '.join(sorted(names))}",
        )
        for name, names in BOUND.items()
    ),
    (
        "never",
        "test → candidate",
        "test cases, modules, frames, code, and every other library object, class or bound method:"
        " the task is refused with the line of the test",
    ),
    (
        "never",
        "candidate → test",
        "a name of any other class or function; an exception that built-ins take as control flow"
        " (StopIteration, StopAsyncIteration), unless __next__ or __anext__ raised it",
    ),
    (
        "never",
        "who decides",
        "comparisons, `in`, and binary operators between an object of the candidate and a value"
        " of the test; identity of two objects: refused, unless the task allows it",
    ),
)
"""How, in which direction, what."""


def table() -> str:
    """The table as Markdown."""
    lines = ["| how | direction | what |", "| --- | --- | --- |"]
    lines += [f"| {how} | {way} | {what} |" for how, way, what in ROWS]
    return "\n".join(lines) + "\n"


_CALL = Access("__name__ __qualname__ __doc__", can_call=True)
_ITERATION = Access("", _ITERATE)
_GENERATOR = Access("send throw close", _ITERATE)


class Crossing:
    """The table applied to the objects of some test files."""

    def __init__(self, files: Iterable[str]) -> None:
        self.files = set(files)
        self.modules = {
            name
            for file in self.files
            for name in (
                file.removesuffix(".py").replace("/", "."),
                file.rpartition("/")[2].removesuffix(".py"),
            )
        }
        self._instances: dict[type, Access | None] = {}

    def access(self, value: Any) -> Access | None:
        """What the candidate may do with a handle on this object; None if it never crosses."""
        kind = type(value)
        if isinstance(value, type):
            return self._class_access(value)
        if kind is types.FunctionType or kind.__name__ == "_lru_cache_wrapper":
            return _CALL if self._is_own_function(value) else None
        if kind is types.MethodType:
            return self._method_access(value)
        if kind is types.BuiltinFunctionType:
            return self._builtin_method_access(value)
        if kind is types.GeneratorType:
            return _GENERATOR if value.gi_code.co_filename in self.files else None
        if kind.__module__ == "itertools" or (
            kind.__module__ == "builtins"
            and (kind.__name__ in _ITERATORS or kind.__name__.endswith("iterator"))
        ):
            return _ITERATION
        if kind not in self._instances:
            self._instances[kind] = self._instance_access(kind)
        return self._instances[kind]

    def _is_own_class(self, kind: type) -> bool:
        return kind.__module__ in self.modules

    def _is_own_function(self, function: Any) -> bool:
        for _ in range(20):
            code = getattr(function, "__code__", None)
            if code is not None and code.co_filename in self.files:
                return True
            function = getattr(function, "__wrapped__", None)
            if function is None:
                return False
        return False

    def _method_access(self, method: Any) -> Access | None:
        if self._is_own_function(method.__func__):
            return _CALL
        access = self.access(method.__self__)
        return _CALL if access is not None and method.__name__ in access.attributes else None

    def _builtin_method_access(self, method: Any) -> Access | None:
        owner = method.__self__
        if owner is None or isinstance(owner, types.ModuleType | type):
            return None
        if method.__name__ in BOUND.get(type(owner).__name__, ()):
            return _CALL
        access = self.access(owner)
        return _CALL if access is not None and access.shows(method.__name__) else None

    def _class_access(self, kind: type) -> Access | None:
        """A class of the test file; it can be called if nothing of the library is built with it."""
        if not self._is_own_class(kind) or _is_test_class(kind):
            return None
        public = frozenset(name for name in vars(kind) if not name.startswith("_"))
        operators: frozenset[str] = frozenset()
        if type(kind).__module__ == "enum":
            operators = _names("__iter__ __getitem__ __len__ __contains__")
        safe = all(
            self._is_own_class(base)
            or base in (object, *BASES)
            or issubclass(base, BaseException)
            or base.__module__ in _PURE
            for base in kind.__mro__
        )
        return Access(public | {"__name__", "__qualname__", "__doc__"}, operators, can_call=safe)

    def _instance_access(self, kind: type) -> Access | None:
        names = [f"{base.__module__}.{base.__qualname__}" for base in kind.__mro__]
        if _MOCK_CLASS in names:
            return Access(operators=MOCKS, can_call=True, any_public=True)
        if _is_test_class(kind):
            return None
        listed = [LISTED[name] for name in names if name in LISTED]
        if not listed and not any(map(self._is_own_class, kind.__mro__)):
            return None
        own: set[str] = set()
        shown = {name for access in listed for name in access.attributes}
        operators = {name for access in listed for name in access.operators}
        has_getattr = False
        for base in kind.__mro__:
            if self._is_own_class(base):
                own |= set(_defined_names(base))
                has_getattr = has_getattr or "__getattr__" in vars(base)
            elif base in BASES or base.__module__ in _PURE:
                shown |= set(vars(base))
            else:
                continue
            operators |= OPERATORS.intersection(vars(base))
        public = frozenset(name for name in own | shown if not name.startswith("_"))
        settable = frozenset(name for name in own if not name.startswith("_"))
        return Access(public, frozenset(operators), "__call__" in operators, has_getattr, settable)


def _is_test_class(kind: type) -> bool:
    is_case = any(f"{base.__module__}" == "unittest.case" for base in kind.__mro__)
    return is_case or any(name.startswith("test_") for base in kind.__mro__ for name in vars(base))


def _defined_names(kind: type) -> Iterator[str]:
    """Names that a class defines: in its body, as slots, as fields, and by `self.name = ...`."""
    import dis

    yield from vars(kind)
    yield from getattr(kind, "__annotations__", ())
    slots = vars(kind).get("__slots__", ())
    yield from (slots,) if isinstance(slots, str) else slots
    for member in vars(kind).values():
        function = getattr(member, "__func__", getattr(member, "fget", member))
        if isinstance(function, types.FunctionType):
            for step in dis.get_instructions(function.__code__):
                if step.opname == "STORE_ATTR":
                    yield step.argval


def is_library(value: Any) -> bool:
    """Whether the standard library has this class or function under its own name."""
    if not isinstance(value, type | types.FunctionType | types.BuiltinFunctionType):
        return False
    module = str(value.__module__)
    return (
        module.partition(".")[0] in sys.stdlib_module_names
        and getattr(sys.modules.get(module), value.__name__, None) is value
    )

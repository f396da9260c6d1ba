"""Stand-ins for objects of the other process: instances, classes, functions and exceptions."""

from __future__ import annotations

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any

_BINARY: tuple[str, ...] = (
    "add",
    "sub",
    "mul",
    "truediv",
    "floordiv",
    "mod",
    "pow",
    "matmul",
    "and",
    "or",
    "xor",
)
_BINARY += ("lshift", "rshift", "divmod")
ARITHMETIC = frozenset(f"__{way}{name}__" for name in _BINARY for way in ("", "r", "i")) | {
    "__neg__",
    "__pos__",
    "__abs__",
    "__invert__",
    "__round__",
    "__trunc__",
    "__floor__",
    "__ceil__",
}
COMPARISONS = frozenset(f"__{name}__" for name in ("eq", "ne", "lt", "le", "gt", "ge"))
ITEMS = frozenset({"__getitem__", "__setitem__", "__delitem__", "__missing__"})
FREE = frozenset(
    f"__{name}__"
    for name in (
        *("len", "iter", "next", "reversed", "bool", "int", "float", "complex", "index", "bytes"),
        *("call", "enter", "exit", "repr", "str", "format", "await", "fspath"),
    )
)
OPERATORS = ARITHMETIC | COMPARISONS | ITEMS | FREE | {"__contains__"}
BASES = (dict, list, tuple, set, frozenset, str, bytes, int, float, complex)
_SHOWN = {"__name__", "__qualname__", "__dict__", "__wrapped__", "__annotations__", "__self__"}
_peers: list[Any] = []


def install(side: Any) -> None:
    """Let this side answer for all handles of the process."""
    _peers[:] = [side]


def peer() -> Any:
    """What answers for the handles of this process."""
    return _peers[0]


def _hidden(name: str) -> bool:
    """Whether an attribute is no business of the other process."""
    return name.startswith("_agentrl") or (
        name.startswith("__") and name.endswith("__") and name not in _SHOWN
    )


class ProxyType(type):
    """The type of stand-ins for classes: to call one makes an object in the other process."""

    def __new__(
        mcs: type[ProxyType],
        name: str,
        bases: tuple[type, ...],
        space: dict[str, Any],
        made: bool = False,
    ) -> ProxyType:
        """Only this module makes one: a test cannot derive a class from the candidate's."""
        if not made:
            peer().unserved("a test derives a class from one of the candidate's")
            raise TypeError("classes of another process cannot be derived from")
        return super().__new__(mcs, name, bases, space)

    def __init__(
        cls, name: str, bases: tuple[type, ...], space: dict[str, Any], made: bool = False
    ) -> None:
        super().__init__(name, bases, space)

    def __call__(cls, *args: Any, **kwargs: Any) -> Any:
        """Make an object in the other process."""
        return peer().call(cls, args, kwargs)

    def __getattr__(cls, name: str) -> Any:
        if _hidden(name):
            raise AttributeError(name)
        return peer().get(cls, name)

    def __setattr__(cls, name: str, value: Any) -> None:
        peer().set(cls, name, value)

    def __delattr__(cls, name: str) -> None:
        peer().delete(cls, name)

    def __iter__(cls) -> Any:
        return peer().operate(cls, "__iter__", ())

    def __len__(cls) -> Any:
        return peer().operate(cls, "__len__", ())

    def __bool__(cls) -> bool:
        return True

    def __getitem__(cls, key: Any) -> Any:
        return peer().operate(cls, "__getitem__", (key,))

    def __contains__(cls, item: Any) -> Any:
        return peer().operate(cls, "__contains__", (item,))


class _Shared:
    """What handles of plain objects and of exceptions have in common."""

    __slots__ = ()

    def __getattr__(self, name: str) -> Any:
        if _hidden(name):
            raise AttributeError(name)
        return peer().get(self, name)

    def __copy__(self) -> Any:
        return peer().request("copy", self)

    def __deepcopy__(self, memo: Any) -> Any:
        return peer().request("deepcopy", self)

    def __reduce_ex__(self, version: Any) -> Any:
        raise TypeError("an object of another process cannot be pickled")


class Handle(_Shared, metaclass=ProxyType, made=True):
    """Stands for an object of the other process."""

    __slots__ = ("__weakref__", "_agentrl_hash", "_agentrl_object")

    def __setattr__(self, name: str, value: Any) -> None:
        peer().set(self, name, value)

    def __delattr__(self, name: str) -> None:
        peer().delete(self, name)

    def __hash__(self) -> int:
        known = self._agentrl_hash
        return object.__hash__(self) if known is None else int(known)

    def __eq__(self, other: object) -> Any:
        return peer().same(self, other)

    def __repr__(self) -> str:
        return str(peer().operate(self, "__repr__", ()))

    def __str__(self) -> str:
        return str(peer().operate(self, "__str__", ()))

    def __format__(self, form: str) -> str:
        return str(peer().operate(self, "__format__", (form,)))

    @property
    def __dict__(self) -> Any:  # type: ignore[override]
        return peer().get(self, "__dict__")


class ErrorHandle(_Shared, metaclass=ProxyType, made=True):
    """Stands for an exception of a class that the other process defines."""

    _agentrl_object = -1
    _agentrl_text = ""

    def __str__(self) -> str:
        return self._agentrl_text


def _operator(name: str) -> Callable[..., Any]:
    def method(self: Any, *args: Any, **kwargs: Any) -> Any:
        side = peer()
        if name == "__call__":
            return side.call(self, args, kwargs)
        return side.operate(self, name, args)

    method.__name__ = name
    return method


def _iterate(self: Any) -> Any:
    return self


def _wait(self: Any) -> Any:
    yield from ()
    return peer().request("await", self)


def make_class(description: tuple[Any, ...], number: int) -> Any:
    """A stand-in for a class: name, module, text, bases, operators, plain base, overridden."""
    name, module, text, bases, offered, base, overridden = description
    space: dict[str, Any] = {
        "__slots__": (),
        "__module__": str(module),
        "__doc__": None if text is None else str(text),
        "_agentrl_class": number,
        "_agentrl_base": next((kind for kind in BASES if kind.__name__ == base), None),
        "_agentrl_overridden": frozenset(overridden),
    }
    if name in ("function", "method"):
        space["__doc__"] = property(lambda self: peer().get(self, "__doc__"))
    space |= {name: _operator(name) for name in OPERATORS.intersection(offered)}
    if "__next__" in space:
        space["__iter__"] = _iterate
    if "__await__" in space:
        space["__await__"] = _wait
    space["__hash__"] = None if "unhashable" in offered else Handle.__hash__
    real = space["_agentrl_base"]
    if real is not None:
        space["__class__"] = property(lambda self: real)
    errors = [kind for kind in bases if isinstance(kind, type) and issubclass(kind, BaseException)]
    if errors:
        return _make_error(name, bases, space)
    kinds = tuple(kind for kind in bases if type(kind) is ProxyType and issubclass(kind, Handle))
    return _make(name, kinds or (Handle,), space, (Handle,))


def _make_error(name: str, bases: tuple[Any, ...], space: dict[str, Any]) -> Any:
    for word in ("__slots__", "__hash__", "__str__", "__repr__", "__iter__", "__bool__"):
        space.pop(word, None)
    kinds = tuple(kind for kind in bases if isinstance(kind, type))
    kinds = tuple(kind for kind in kinds if issubclass(kind, BaseException))
    if not any(issubclass(kind, ErrorHandle) for kind in kinds):
        kinds = (ErrorHandle, *kinds)
    return _make(name, kinds, space, (ErrorHandle, Exception))


def _make(name: str, bases: Any, space: dict[str, Any], instead: tuple[type, ...]) -> Any:
    try:
        return ProxyType(str(name), bases, space, made=True)
    except TypeError:  # bases whose order or layout cannot be had here
        return ProxyType(str(name), instead, space, made=True)

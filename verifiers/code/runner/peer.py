"""Two processes that use each other's objects: values are copied, all else is a handle.

Every message is a question ("q", operation, object, arguments, keywords, whether to send mutable
arguments back, whether subclasses of plain types are sent as plain values) or an answer ("a",
"value" or "raised", value, printed text, arguments). While one side waits for its answer, it
answers questions. Nothing is pickled: bytes are read by the codec, and what they can name are
objects that were handed over before. `crossing` holds the rules of what may cross.
"""

from __future__ import annotations

import builtins
import copy
import sys

from agentrl.verifiers.code.runner.codec import (
    CodecError,
    Ref,
    Writer,
    build_value,
    parts_of,
    write_back,
)
from agentrl.verifiers.code.runner.handles import (
    BASES,
    COMPARISONS,
    OPERATORS,
    ErrorHandle,
    Handle,
    ProxyType,
    make_class,
)

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any

MOST_TEXT = 1 << 20
ERRORS = {
    name: kind
    for name, kind in vars(builtins).items()
    if isinstance(kind, type) and issubclass(kind, Exception)
}
OTHER_ERRORS = {
    "json.decoder": {"JSONDecodeError"},
    "dataclasses": {"FrozenInstanceError"},
    "decimal": {"DecimalException", "InvalidOperation", "DivisionByZero", "Overflow", "Inexact"},
    "queue": {"Empty", "Full"},
    "_queue": {"Empty"},
    "struct": {"error"},
    "re": {"error"},
    "concurrent.futures": {"CancelledError", "TimeoutError"},
}
TYPES = {kind.__name__: kind for kind in (*BASES, bool, bytearray, range, object, type, type(None))}
NAMED = {**ERRORS, **TYPES}
_LOCAL = COMPARISONS | {"__contains__", "__getitem__", "__len__", "__iter__", "__reversed__"}
_LOCAL |= {"__bool__", "__add__", "__radd__", "__mul__", "__rmul__", "__sub__", "__rsub__"}
_LOCAL |= {"__float__", "__int__", "__index__", "__abs__", "__neg__", "__round__"}


class Peer:
    """One side; what is allowed is for `Judge` and `Remote` to say."""

    def __init__(self) -> None:
        self.own: dict[int, Any] = {}
        self.numbers: dict[int, int] = {}
        self.theirs: dict[int, Any] = {}
        self.classes: dict[int, Any] = {}
        self.errors: dict[int, tuple[Any, int]] = {}
        self.described: set[int] = set()
        self.fresh: list[int] = []
        self.is_reading = False

    # What the sides differ in.

    def exchange(self, frame: tuple[Any, ...]) -> tuple[Any, ...]:
        """Send a question, answer what is asked meanwhile, and return the answer."""
        raise NotImplementedError

    def write(self, data: bytes) -> None:
        """Write a message whole."""
        raise NotImplementedError

    def named(self, module: str, name: str) -> Any:
        """What a name stands for here."""
        raise NotImplementedError

    def names(self, value: Any) -> bool:
        """Whether the other side knows this type or function by its name."""
        raise NotImplementedError

    def allow(self, kind: str, name: str, handle: Any, args: tuple[Any, ...]) -> None:
        """Called before an attribute or an operator of a handle is used."""

    def admit(self, value: Any) -> None:
        """Called before an object is handed over as a handle; raises if it must not cross."""

    def rebuilt(self, value: Any) -> Any:
        """What to send for an object that the other side rebuilds; None to hand it over."""

    def wants_plain(self, op: str, args: tuple[Any, ...]) -> bool:
        """Whether the answer must hold plain values in place of instances of their subclasses."""
        return False

    def plain_value(self, target: Any) -> Any:
        """The plain value of a handle whose class derives from a plain type."""
        value = self.request("plain", target)
        if type(value) is not type(target)._agentrl_base:
            raise CodecError("the plain value is of another type")
        return value

    def same(self, target: Any, other: Any) -> Any:
        """Whether two objects are one, where their class does not say when they are equal."""
        return NotImplemented

    def unserved(self, why: str) -> None:
        """Called where something is asked for that no handle can do."""

    # What handles ask for.

    def call(self, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Call the object of a handle."""
        return self.request("call", target, args, kwargs)

    def get(self, target: Any, name: str) -> Any:
        """An attribute of the object of a handle."""
        self.allow("get", name, target, ())
        return self.request("get", target, (name,))

    def set(self, target: Any, name: str, value: Any) -> None:
        """Set an attribute of the object of a handle."""
        self.allow("set", name, target, (value,))
        self.request("set", target, (name, value))

    def delete(self, target: Any, name: str) -> None:
        """Delete an attribute of the object of a handle."""
        self.allow("set", name, target, ())
        self.request("delete", target, (name,))

    def operate(self, target: Any, name: str, args: tuple[Any, ...]) -> Any:
        """Apply an operator to the object of a handle.

        Where the object's class is one of the plain ones with something added, its plain value is
        fetched and the operator applied here, so that who made the object does not decide.
        """
        base = getattr(type(target), "_agentrl_base", None)
        if self.is_reading:
            return NotImplemented
        if base is not None and name in _LOCAL and name not in type(target)._agentrl_overridden:
            return getattr(self.plain_value(target), name)(*map(self.plain, args))
        if name in COMPARISONS and not self.can_travel(args[0]):
            return NotImplemented
        self.allow("op", name, target, args)
        if name == "__exit__":
            args = (*args[:2], None)  # a traceback is of one process
        return self.request("op", target, (name, *args))

    def plain(self, value: Any) -> Any:
        """The plain value of a handle that has one."""
        base = getattr(type(value), "_agentrl_base", None)
        return value if base is None else self.plain_value(value)

    def can_travel(self, value: Any) -> bool:
        """Whether a value is a handle, or is copied."""
        kind = type(value)
        if kind in TYPES.values() or type(kind) is ProxyType or kind is ProxyType:
            return True
        return isinstance(value, BaseException) or parts_of(value) is not None

    def request(
        self,
        op: str,
        target: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
        back: bool = False,
    ) -> Any:
        """Ask the other side for something; what it raised is raised here."""
        plain = self.wants_plain(op, args)
        answer = self.exchange(("q", op, target, args, kwargs or {}, back, plain))
        if answer[3]:
            print(answer[3], end="")
        if answer[4] is not None:
            for old, new in zip(args, answer[4][0], strict=True):
                write_back(old, new)
            for name, new in answer[4][1].items():
                write_back((kwargs or {})[name], new)
        if answer[1] == "value":
            return answer[2]
        raise self.raised(answer[2], op, args)

    def raised(self, error: Any, op: str, args: tuple[Any, ...]) -> BaseException:
        """What to raise for what the other side raised."""
        return error if isinstance(error, Exception) else RuntimeError("no exception was raised")

    def perform(self, op: str, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Do what the other side asks for."""
        if op == "call":
            return target(*args, **kwargs)
        if op == "get":
            return getattr(target, args[0])
        if op == "set":
            return setattr(target, args[0], args[1])
        if op == "delete":
            return delattr(target, args[0])
        if op == "op" and args[0] in OPERATORS:
            return _operated(target, *args)
        if op == "plain":
            return self.plain_copy(target, _base(type(target)))
        if op in ("copy", "deepcopy"):
            return getattr(copy, op)(target)
        raise ValueError(f"no operation {op}")

    def build(self, name: str, *parts: Any) -> Any:
        """Build a value of the standard library from its parts."""
        return build_value(name, *parts)

    # What goes over the wire.

    def packed(self, frame: tuple[Any, ...], is_sent: bool = True) -> bytes:
        """The bytes of a message; classes are described again if it is not sent.

        Raises:
            CodecError: it is too deep.
        """
        pieces: list[bytes] = []
        outer, self.fresh = self.fresh, []
        try:
            Writer(pieces.append, self.reduce).send(frame)
        except BaseException:
            is_sent = False
            raise
        finally:
            if not is_sent:
                self.described.difference_update(self.fresh)
                self.fresh.clear()
            self.fresh = outer + self.fresh
        return b"".join(pieces)

    def number(self, value: Any) -> int:
        """The number by which the other side knows an object of this one."""
        known = self.numbers.get(id(value))
        if known is None:
            known = self.numbers[id(value)] = len(self.own)
            self.own[known] = value
        return known

    def reduce(self, value: Any) -> Any:
        """What is written for an object that is no plain value."""
        kind = type(value)
        if kind is ProxyType:
            return Ref("b", value._agentrl_class)
        if type(kind) is ProxyType and issubclass(kind, Handle):
            return Ref("b", value._agentrl_object)
        if value is NotImplemented or value is Ellipsis:
            return Ref("n", value is Ellipsis)
        if isinstance(value, BaseException):
            return self._error_ref(value, kind)
        if self.names(value):
            return Ref("g", value.__module__ or "builtins", value.__name__)
        parts = parts_of(value)
        if parts is not None:
            return Ref("v", *parts)
        rebuilt = self.rebuilt(value)
        if rebuilt is not None:
            return rebuilt
        self.admit(value)
        if isinstance(value, type):
            return self._class_ref(value)
        return Ref("o", self.number(value), self._class_ref(kind), _hash(value, kind))

    def plain_base(self, value: Any) -> Any:
        """The plain type that the class of a value adds to; None for any other."""
        return _base(type(value))

    def plain_copy(self, value: Any, base: Any) -> Any:
        """A copy as the exact plain type, whatever the class overrides."""
        return _PLAIN.get(base, lambda value: base(base.__iter__(value)))(value)

    def _error_ref(self, error: BaseException, kind: type) -> Ref:
        if id(error) in self.errors:
            return Ref("b", self.errors[id(error)][1])
        if issubclass(kind, ErrorHandle):
            return Ref("b", getattr(error, "_agentrl_object", -1))
        args, text = tuple(error.args), ""
        try:
            self.packed(args, is_sent=False)
            text = str(error)[:MOST_TEXT]
        except Exception:  # noqa: BLE001  an error that cannot be told is told without its arguments
            args = ()
        named = Ref("g", kind.__module__, kind.__name__) if self.names(kind) else None
        return Ref(
            "x", self.number(error), named or self._class_ref(kind), args, text, error.__cause__
        )

    def _class_ref(self, kind: type) -> Ref:
        number = self.number(kind)
        if number in self.described:
            return Ref("t", number, None)
        self.described.add(number)
        self.fresh.append(number)
        return Ref("t", number, self._description(kind))

    def _description(self, kind: Any) -> tuple[Any, ...]:
        bases = [
            base
            for base in kind.__bases__
            if base is not object
            and (
                issubclass(base, BaseException)
                or str(base.__module__).partition(".")[0] not in sys.stdlib_module_names
            )
        ]
        offered = [
            name
            for name in OPERATORS
            if (found := getattr(kind, name, None)) is not None
            and found is not getattr(object, name, None)
        ]
        if kind.__hash__ is None:
            offered.append("unhashable")
        base = _base(kind)
        overridden = [name for name in offered if _differs(kind, base, name)] if base else []
        doc = kind.__doc__ if type(kind.__doc__) is str else None
        return (
            str(kind.__name__),
            str(kind.__module__),
            doc,
            tuple(bases),
            tuple(offered),
            base.__name__ if base else "",
            tuple(overridden),
        )

    def resolve(self, parts: Any) -> Any:
        """The object that a Ref names.

        Raises:
            CodecError: there is none.
        """
        try:
            return self._resolved(*parts)
        except CodecError:
            raise
        except Exception as error:  # noqa: BLE001  any failure to build is one of the bytes
            raise CodecError(f"malformed reference: {type(error).__name__}") from None

    def _resolved(self, tag: str, *parts: Any) -> Any:
        if tag == "b":
            return self.own[parts[0]]
        if tag == "n":
            return Ellipsis if parts[0] is True else NotImplemented
        if tag == "v":
            return self.build(*parts)
        if tag == "g":
            return self.named(*parts)
        if tag == "t":
            return self._resolved_class(*parts)
        if tag == "x":
            return self._resolved_error(*parts)
        number, kind, hash_ = parts
        if tag != "o" or type(number) is not int or type(kind) is not ProxyType:
            raise CodecError("malformed reference")
        if number not in self.theirs:
            plain: Any = object
            made = self.theirs[number] = plain.__new__(kind)
            object.__setattr__(made, "_agentrl_object", number)
            object.__setattr__(made, "_agentrl_hash", hash_ if type(hash_) is int else None)
        return self.theirs[number]

    def _resolved_class(self, number: int, description: tuple[Any, ...] | None) -> Any:
        if description is not None and number not in self.classes:
            self.classes[int(number)] = make_class(description, int(number))
        return self.classes[number]

    def _resolved_error(self, number: int, kind: Any, args: Any, text: str, cause: Any) -> Any:
        if number in self.theirs:
            return self.theirs[number]
        if not (isinstance(kind, type) and issubclass(kind, Exception)) or type(args) is not tuple:
            return None
        error: Any
        try:
            error = kind.__new__(kind, *args)
        except TypeError:
            error = kind.__new__(kind)
        error.args = args
        if issubclass(kind, ErrorHandle):
            error._agentrl_object, error._agentrl_text = int(number), str(text)
        if isinstance(cause, Exception):
            error.__cause__ = cause
        self.theirs[int(number)] = error
        self.errors[id(error)] = (error, int(number))
        return error


_PLAIN: dict[Any, Callable[[Any], Any]] = {
    str: str.__str__,
    int: int.__index__,
    float: float.__float__,
    complex: complex.__complex__,
    list: list.copy,
    dict: dict.copy,
}
"""How to copy an instance of a subclass as the plain type, whatever the subclass overrides."""


def _operated(target: Any, name: str, *args: Any) -> Any:
    if name == "__getitem__":
        return target[args[0]]
    if name == "__iter__":
        return iter(target)
    return getattr(type(target), name)(target, *args)


def _base(kind: type) -> Any:
    """The plain type that a class adds to; None for any other class."""
    return next((base for base in BASES if kind is not bool and issubclass(kind, base)), None)


def _differs(kind: type, base: type, name: str) -> bool:
    return getattr(kind, name, None) is not getattr(base, name, None)


def _hash(value: Any, kind: Any) -> int | None:
    if kind.__hash__ is None or kind.__hash__ is object.__hash__:
        return None
    try:
        return hash(value)
    except TypeError:
        return None

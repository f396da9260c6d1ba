"""Values as bytes: bounded, type-exact, and without any way to run code on reading.

Carried exactly: None, bool, int, float (NaN and infinities too), complex, str, bytes, list, tuple,
set, frozenset and dict. `AnyList` is a list that, as an expected value, matches a list or a tuple.
`Ref` names what stays in its process; only a reader that is told how to resolve one accepts it.
Everything else is an error, unless the writer first turns it into one of these (`reduce`).

One value is a tag byte and a payload; lengths and counts are 4 bytes, little-endian. A value
delimits itself, so a large one can be read while it is still being written. Short strings are
written once and then named by one byte; sequences of such strings, of machine integers and of
floats are packed, since some tests compare millions of them.
"""

from __future__ import annotations

import struct
import sys

TYPE_CHECKING = False  # not from typing: its import would cost more than most gradings
if TYPE_CHECKING:
    from collections.abc import Callable, Iterable
    from typing import Any

MAX_BYTES = 1 << 30
MAX_DEPTH = 150
_FLUSH = 1 << 16
_TABLE = 256
_SHORT = 64
_PACK = 4

_U32 = struct.Struct("<I")
_F64 = struct.Struct("<d")


class CodecError(ValueError):
    """The value or the bytes cannot be carried: unknown, too long, too deep, or cut short."""


class AnyList(list):  # type: ignore[type-arg]
    """An expected sequence that was written as plain JSON: it matches a list or a tuple."""


class Ref:
    """Stands for an object that is not carried; `parts` are plain values that name it."""

    __slots__ = ("parts",)

    def __init__(self, *parts: Any) -> None:
        self.parts = parts


def encode(value: Any) -> bytes:
    """Bytes of a value.

    Raises:
        CodecError: a type that is not carried, or a value that is too deep.
    """
    pieces: list[bytes] = []
    Writer(pieces.append).send(value)
    return b"".join(pieces)


def decode(data: bytes) -> Any:
    """The value of bytes that `encode` wrote; safe on bytes that somebody else wrote.

    Raises:
        CodecError: anything but exactly one well-formed value.
    """
    pieces = [data] if data else []
    reader = Reader(lambda: pieces.pop() if pieces else b"")
    value = reader.receive()
    if reader.rest():
        raise CodecError("bytes after the value")
    return value


class Writer:
    """Writes one value to a sink, piece by piece.

    Args:
        sink: takes the next bytes.
        reduce: called on a value of another type; returns one closer to a carried type, or raises
            CodecError.
    """

    def __init__(
        self, sink: Callable[[bytes], object], reduce: Callable[[Any], Any] | None = None
    ) -> None:
        self._sink = sink
        self._reduce = reduce
        self._out = bytearray()
        self._table: dict[str, int] = {}

    def send(self, value: Any) -> None:
        """Write a value whole; if it cannot be carried, the reader is told so, and this raises."""
        try:
            self._write(value, 0)
        except BaseException:
            self._out += b"X"
            raise
        finally:
            self._sink(bytes(self._out))

    def _write(self, value: Any, depth: int) -> None:
        if depth > MAX_DEPTH:
            raise CodecError(f"nested deeper than {MAX_DEPTH}")
        kind = type(value)
        if kind is str:
            self._write_text(value)
        elif kind in _SCALARS:
            self._out += _SCALARS[kind](value)
        elif kind in _CONTAINERS:
            self._write_items(kind, value, depth)
        elif kind is Ref:
            self._out += b"H"
            self._write(value.parts, depth + 1)
        elif self._reduce is not None:
            self._write(self._reduce(value), depth + 1)
        else:
            raise CodecError(f"a value of type {kind.__name__} cannot be carried")

    def _write_text(self, text: str) -> None:
        known = self._table.get(text)
        if known is not None:
            self._out += bytes((114, known))
            return
        self._out += _sized(b"s", text.encode("utf-8", "surrogatepass"))
        if len(text) <= _SHORT and len(self._table) < _TABLE:
            self._table[text] = len(self._table)

    def _write_items(self, kind: type, value: Any, depth: int) -> None:
        packed = (
            self._packed(value) if len(value) >= _PACK and (kind is list or kind is tuple) else None
        )
        if packed is not None:
            self._out += packed[0] + _CONTAINERS[kind] + _U32.pack(len(value)) + packed[1]
        else:
            self._out += _CONTAINERS[kind] + _U32.pack(len(value))
            items: Iterable[Any] = (
                (part for pair in value.items() for part in pair) if kind is dict else value
            )
            for item in items:
                self._write(item, depth + 1)
        if len(self._out) > _FLUSH:
            self._sink(bytes(self._out))
            self._out.clear()

    def _packed(self, value: Any) -> tuple[bytes, bytes] | None:
        kinds = set(map(type, value))
        try:
            if kinds == {str}:
                return b"p", bytes(map(self._table.__getitem__, value))
            if kinds == {int}:
                return b"q", struct.pack(f"<{len(value)}q", *value)
            if kinds == {float}:
                return b"g", struct.pack(f"<{len(value)}d", *value)
        except (KeyError, struct.error):
            pass
        return None


def _sized(tag: bytes, payload: bytes) -> bytes:
    return tag + _U32.pack(len(payload)) + payload


def _int(value: int) -> bytes:
    return _sized(b"i", value.to_bytes(value.bit_length() // 8 + 1, "little", signed=True))


_SCALARS: dict[type, Callable[[Any], bytes]] = {
    type(None): lambda value: b"N",
    bool: lambda value: b"T" if value else b"F",
    int: _int,
    float: lambda value: b"f" + _F64.pack(value),
    complex: lambda value: b"c" + _F64.pack(value.real) + _F64.pack(value.imag),
    bytes: lambda value: _sized(b"b", value),
}
_CONTAINERS: dict[type, bytes] = {
    list: b"l",
    AnyList: b"A",
    tuple: b"t",
    set: b"S",
    frozenset: b"Z",
    dict: b"d",
}
_CONSTANTS = {b"N": None, b"T": True, b"F": False}
_BUILD: dict[bytes, Callable[[Any], Any]] = {
    b"l": list,
    b"A": AnyList,
    b"t": tuple,
    b"S": set,
    b"Z": frozenset,
    b"d": lambda items: dict(zip(items[::2], items[1::2], strict=True)),
}


class Reader:
    """Reads one value from a source that somebody else writes.

    Args:
        more: returns the next bytes, or none at the end.
        resolve: gives the object that the parts of a `Ref` name; without it a Ref is an error.
    """

    def __init__(
        self, more: Callable[[], bytes], resolve: Callable[[Any], Any] | None = None
    ) -> None:
        self._more = more
        self._resolve = resolve
        self._data = b""
        self._at = 0
        self._total = 0
        self._table: list[str] = []

    def receive(self) -> Any:
        """The value.

        Raises:
            CodecError: the bytes are no value, or more than `MAX_BYTES`.
        """
        try:
            return self._read(0)
        except (LookupError, struct.error, UnicodeDecodeError, TypeError) as error:
            raise CodecError(f"malformed: {type(error).__name__}") from None

    def rest(self) -> bytes:
        """What was taken from the source after the value."""
        return self._data[self._at :]

    def _take(self, size: int) -> bytes:
        while len(self._data) - self._at < size:
            pieces = [self._data[self._at :]]
            have = len(pieces[0])
            while have < size:
                pieces.append(self._more())
                have += len(pieces[-1])
                self._total += len(pieces[-1])
                if not pieces[-1] or self._total > MAX_BYTES:
                    raise CodecError(
                        "cut short" if not pieces[-1] else f"longer than {MAX_BYTES} bytes"
                    )
            self._data, self._at = b"".join(pieces), 0
        self._at += size
        return self._data[self._at - size : self._at]

    def _read(self, depth: int) -> Any:
        if depth > MAX_DEPTH:
            raise CodecError(f"nested deeper than {MAX_DEPTH}")
        tag = self._take(1)
        if tag in _CONSTANTS:
            return _CONSTANTS[tag]
        if tag == b"r":
            return self._table[self._take(1)[0]]
        if tag == b"f":
            return _F64.unpack(self._take(8))[0]
        if tag == b"c":
            return complex(*struct.unpack("<2d", self._take(16)))
        if tag in _BUILD:
            return self._read_items(tag, depth)
        if tag == b"H" and self._resolve is not None:
            return self._resolve(self._read(depth + 1))
        return self._read_packed(tag) if tag in b"pqg" else self._read_sized(tag)

    def _count(self) -> int:
        return int.from_bytes(self._take(4), "little")

    def _read_items(self, tag: bytes, depth: int) -> Any:
        count = self._count() * (2 if tag == b"d" else 1)
        items = []
        for _ in range(count):
            items.append(self._read(depth + 1))
        return _BUILD[tag](items)

    def _read_packed(self, tag: bytes) -> Any:
        build = {b"l": list, b"t": tuple}[self._take(1)]
        count = self._count()
        if tag == b"p":
            return build(map(self._table.__getitem__, self._take(count)))
        return build(struct.unpack(f"<{count}{'q' if tag == b'q' else 'd'}", self._take(8 * count)))

    def _read_sized(self, tag: bytes) -> Any:
        if tag not in (b"i", b"s", b"b"):
            raise CodecError("given up" if tag == b"X" else f"unknown tag {tag!r}")
        payload = self._take(self._count())
        if tag == b"i":
            return int.from_bytes(payload, "little", signed=True)
        if tag == b"b":
            return payload
        text = payload.decode("utf-8", "surrogatepass")
        if len(text) <= _SHORT and len(self._table) < _TABLE:
            self._table.append(text)
        return text


# Types of the standard library that cross by value, as a name and plain parts.

MUTABLE = ("list", "dict", "set", "bytearray", "deque", "Counter", "OrderedDict", "defaultdict")
_DTYPES = "biufcSU"
_VALUE_PARTS: dict[str, Callable[[Any], tuple[Any, ...]]] = {
    "builtins.range": lambda value: (value.start, value.stop, value.step),
    "builtins.bytearray": lambda value: (bytes(value),),
    "builtins.slice": lambda value: (value.start, value.stop, value.step),
    "builtins.dict_keys": lambda value: (list(value),),
    "builtins.dict_values": lambda value: (list(value),),
    "builtins.dict_items": lambda value: (list(value),),
    "collections.Counter": lambda value: (dict(value),),
    "collections.OrderedDict": lambda value: (list(value.items()),),
    "collections.defaultdict": lambda value: (value.default_factory, dict(value)),
    "collections.deque": lambda value: (list(value), value.maxlen),
    "decimal.Decimal": lambda value: (str(value),),
    "fractions.Fraction": lambda value: (value.numerator, value.denominator),
    "datetime.date": lambda value: (value.year, value.month, value.day),
    "datetime.datetime": lambda value: (value.isoformat(),),
    "datetime.time": lambda value: (value.isoformat(),),
    "datetime.timedelta": lambda value: (value.days, value.seconds, value.microseconds),
    "pathlib.PosixPath": lambda value: (str(value),),
    "pathlib.PurePosixPath": lambda value: (str(value),),
    "uuid.UUID": lambda value: (str(value),),
}
VALUE_TYPES = frozenset(_VALUE_PARTS)
_REBUILT: dict[str, Callable[[Any], tuple[Any, ...]]] = {
    "operator.itemgetter": lambda value: value.__reduce__()[1],
    "operator.attrgetter": lambda value: value.__reduce__()[1],
    "operator.methodcaller": lambda value: value.__reduce__()[1],
    "functools.partial": lambda value: (value.func, value.args, value.keywords),
    "re.Pattern": lambda value: (value.pattern, value.flags),
}
REBUILT_BY_CANDIDATE = frozenset(_REBUILT)
"""Objects of the test that the candidate builds again from their parts, and never the judge."""
_BUILD_VALUE: dict[str, Callable[..., Any]] = {
    "builtins.dict_keys": lambda items: dict.fromkeys(items).keys(),
    "builtins.dict_values": lambda items: dict(enumerate(items)).values(),
    "builtins.dict_items": lambda items: dict(items).items(),
    "datetime.datetime": lambda text: _named("datetime", "datetime").fromisoformat(text),
    "datetime.time": lambda text: _named("datetime", "time").fromisoformat(text),
}


def _named(module: str, name: str) -> Any:
    return getattr(__import__(module), name)


def parts_for_candidate(value: Any) -> tuple[Any, ...] | None:
    """Name and parts of an object that only the candidate builds again; None for any other."""
    name = f"{type(value).__module__}.{type(value).__name__}"
    if name not in _REBUILT or type(value) is not _kind(name, value):
        return None
    if name == "operator.methodcaller" and value.__reduce__()[0] is not type(value):
        return None  # with keywords it reduces to a partial object
    return name, *_REBUILT[name](value)


def build_for_candidate(name: str, *parts: Any) -> Any:
    """Build what `parts_for_candidate` took apart; only the candidate's process calls this."""
    if name == "functools.partial":
        return _named("functools", "partial")(parts[0], *parts[1], **parts[2])
    if name == "operator.methodcaller":
        return _named("operator", "methodcaller")(*parts)
    if name == "re.Pattern":
        return _named("re", "compile")(*parts)
    return _named(*name.split("."))(*parts)


def parts_of(value: Any) -> tuple[Any, ...] | None:
    """Name and parts of a value that travels so; None for any other."""
    kind = type(value)
    module, _, _ = kind.__module__.partition(".")
    if module == "numpy":
        return _array_parts(value)
    name = f"{kind.__module__}.{kind.__name__}"
    if name not in _VALUE_PARTS or kind is not _kind(name, value):
        return None
    zone = getattr(value, "tzinfo", None)
    if zone is not None and type(zone).__name__ != "timezone":
        return None
    return name, *_VALUE_PARTS[name](value)


def _kind(name: str, value: Any) -> Any:
    module, _, last = name.partition(".")
    if last.startswith("dict_"):
        return type(getattr({}, last.removeprefix("dict_"))())
    return getattr(sys.modules.get(module), last, None)


def _array_parts(value: Any) -> tuple[Any, ...] | None:
    numpy = sys.modules.get("numpy")
    if numpy is None or not isinstance(value, (numpy.ndarray, numpy.generic)):
        return None
    if value.dtype.kind not in _DTYPES:
        return None
    return "numpy", value.dtype.str, isinstance(value, numpy.ndarray), value.tolist()


def build_value(name: str, *parts: Any) -> Any:
    """The value of name and parts.

    Raises:
        CodecError: there is no such type, or these are no parts of one.
    """
    try:
        if name == "numpy":
            return _array(*parts)
        if name not in _VALUE_PARTS:
            raise CodecError(f"no value of type {name} is carried")
        if name == "collections.defaultdict" and not (parts[0] is None or callable(parts[0])):
            raise CodecError("a defaultdict needs a factory")
        return (_BUILD_VALUE.get(name) or _named(*name.split(".")))(*parts)
    except CodecError:
        raise
    except Exception as error:  # noqa: BLE001  any failure to build is one of the bytes
        raise CodecError(f"malformed {name}: {type(error).__name__}") from None


def _array(dtype: str, is_array: bool, items: Any) -> Any:
    if dtype.lstrip("<>|=")[:1] not in _DTYPES:
        raise CodecError("an array of objects is not carried")
    import numpy

    array = numpy.array(items, dtype=dtype)
    return array if is_array else array[()]


def write_back(old: Any, new: Any) -> Any:
    """Give a container the content of another of its type, in place; returns what now stands."""
    if type(old) is not type(new) or type(old).__name__ not in MUTABLE:
        return new
    if isinstance(old, list):
        old[:] = [*map(write_back, old, new), *new[len(old) :]]
    elif isinstance(old, dict):
        items = {key: write_back(old.get(key), value) for key, value in new.items()}
        old.clear()
        old.update(items)
    elif isinstance(old, set):
        old.intersection_update(new)
        old.update(new)
    else:
        old.clear()
        old.extend(new)
    return old


def matches(got: Any, want: Any, atol: float = 0.0) -> bool:
    """Whether a result is the expected value, type for type: True is not 1, and 1 is not 1.0.

    An `AnyList` takes a list or a tuple; NaN takes NaN; finite floats may differ by `atol`. Order
    counts in sequences only, and the elements of sets and the keys of dicts are compared exactly.
    """
    if type(want) is AnyList:
        return type(got) in (list, tuple) and _same_items(got, want, atol)
    if type(got) is not type(want):
        return False
    if type(want) in (list, tuple):
        return _same_items(got, want, atol)
    if type(want) is float:
        return bool(got == want or (got != got and want != want) or abs(got - want) <= atol)
    if type(want) is dict:
        values = {freeze(key): value for key, value in got.items()}
        return len(got) == len(want) and all(
            freeze(key) in values and matches(values[freeze(key)], value, atol)
            for key, value in want.items()
        )
    return bool(freeze(got) == freeze(want))


def _same_items(got: Any, want: Any, atol: float) -> bool:
    return len(got) == len(want) and all(
        matches(mine, theirs, atol) for mine, theirs in zip(got, want, strict=True)
    )


def freeze(value: Any) -> Any:
    """A hashable stand-in that is equal for equal values of equal types, and for nothing else."""
    kind = type(value)
    name = kind.__name__
    if kind in (list, tuple, AnyList):
        return name, tuple(freeze(item) for item in value)
    if kind in (set, frozenset):
        return name, frozenset(freeze(item) for item in value)
    if kind is dict:
        return name, frozenset((freeze(key), freeze(item)) for key, item in value.items())
    if kind is complex:
        return name, freeze(value.real), freeze(value.imag)
    return (name, "nan") if value != value else (name, value)

"""Values as bytes: bounded, type-exact, and without any way to run code on reading.

Carried exactly: None, bool, int, float (NaN and infinities too), complex, str, bytes, list, tuple, set, frozenset and
dict. `AnyList` is a list that, as an expected value, matches a list or a tuple. Everything else is an error, unless the
writer first turns it into one of these (`child.reduce`).

One value is a tag byte and a payload; lengths and counts are 4 bytes, little-endian.
"""

from __future__ import annotations

import struct

TYPE_CHECKING = False  # not from typing: its import would cost more than most gradings
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any

MAX_BYTES = 64_000_000
REPLY_BYTES = 2_000_000
MAX_DEPTH = 150

_U32 = struct.Struct("<I")
_F64 = struct.Struct("<d")


class CodecError(ValueError):
    """The value or the bytes cannot be carried: unknown type or tag, too long, too deep, cut short."""


class AnyList(list):  # type: ignore[type-arg]
    """An expected sequence that was written as plain JSON: it matches a list or a tuple."""


def encode(value: Any, reduce: Callable[[Any], Any] | None = None, max_bytes: int = MAX_BYTES) -> bytes:
    """Bytes of a value.

    Args:
        reduce: called on a value of another type; returns one that is closer to a carried type, or raises CodecError.

    Raises:
        CodecError: a type that is not carried, or a value that is too long or too deep.
    """
    out = bytearray()
    _write(out, value, reduce, (max_bytes, 0))
    return bytes(out)


def _write(out: bytearray, value: Any, reduce: Callable[[Any], Any] | None, bound: tuple[int, int]) -> None:
    max_bytes, depth = bound
    if depth > MAX_DEPTH:
        raise CodecError(f"nested deeper than {MAX_DEPTH}")
    kind = type(value)
    if kind in _SCALARS:
        tag, payload = _SCALARS[kind](value)
        out += tag
        out += payload
    elif kind in _CONTAINERS:
        out += _CONTAINERS[kind]
        out += _U32.pack(len(value))
        items = [part for pair in value.items() for part in pair] if kind is dict else value
        for item in items:
            _write(out, item, reduce, (max_bytes, depth + 1))
    elif reduce is not None:
        _write(out, reduce(value), reduce, (max_bytes, depth + 1))
    else:
        raise CodecError(f"a value of type {kind.__name__} cannot be carried")
    if len(out) > max_bytes:
        raise CodecError(f"longer than {max_bytes} bytes")


def _sized(tag: bytes, payload: bytes) -> tuple[bytes, bytes]:
    return tag + _U32.pack(len(payload)), payload


_SCALARS: dict[type, Callable[[Any], tuple[bytes, bytes]]] = {
    type(None): lambda value: (b"N", b""),
    bool: lambda value: (b"T" if value else b"F", b""),
    int: lambda value: _sized(b"i", value.to_bytes(value.bit_length() // 8 + 1, "little", signed=True)),
    float: lambda value: (b"f", _F64.pack(value)),
    complex: lambda value: (b"c", _F64.pack(value.real) + _F64.pack(value.imag)),
    str: lambda value: _sized(b"s", value.encode("utf-8", "surrogatepass")),
    bytes: lambda value: _sized(b"b", value),
}
_CONTAINERS: dict[type, bytes] = {list: b"l", AnyList: b"A", tuple: b"t", set: b"S", frozenset: b"Z", dict: b"d"}
_BUILD: dict[bytes, Callable[[list[Any]], Any]] = {
    b"l": list,
    b"A": AnyList,
    b"t": tuple,
    b"S": set,
    b"Z": frozenset,
    b"d": lambda items: dict(zip(items[::2], items[1::2], strict=True)),
}


def decode(data: bytes) -> Any:
    """The value of bytes that `encode` wrote; safe on bytes that somebody else wrote.

    Raises:
        CodecError: anything but exactly one well-formed value.
    """
    try:
        value, end = _read(data, 0, 0)
    except (IndexError, struct.error, UnicodeDecodeError, TypeError) as error:
        raise CodecError(f"malformed: {type(error).__name__}") from None
    if end != len(data):
        raise CodecError("bytes after the value")
    return value


def _read(data: bytes, at: int, depth: int) -> tuple[Any, int]:
    if depth > MAX_DEPTH:
        raise CodecError(f"nested deeper than {MAX_DEPTH}")
    tag = data[at : at + 1]
    at += 1
    if tag in b"NTF" and tag:
        return {b"N": None, b"T": True, b"F": False}[tag], at
    if tag == b"f":
        return _F64.unpack_from(data, at)[0], at + 8
    if tag == b"c":
        return complex(_F64.unpack_from(data, at)[0], _F64.unpack_from(data, at + 8)[0]), at + 16
    size = _U32.unpack_from(data, at)[0]
    at += 4
    if tag in _BUILD:
        return _read_items(data, at, depth, (tag, size))
    if size > len(data) - at:
        raise CodecError("cut short")
    payload = data[at : at + size]
    if tag == b"i":
        return int.from_bytes(payload, "little", signed=True), at + size
    if tag == b"s":
        return payload.decode("utf-8", "surrogatepass"), at + size
    if tag == b"b":
        return payload, at + size
    raise CodecError(f"unknown tag {tag!r}")


def _read_items(data: bytes, at: int, depth: int, head: tuple[bytes, int]) -> tuple[Any, int]:
    tag, size = head
    count = 2 * size if tag == b"d" else size
    if count > len(data) - at:
        raise CodecError("cut short")
    items = []
    for _ in range(count):
        item, at = _read(data, at, depth + 1)
        items.append(item)
    return _BUILD[tag](items), at


def matches(got: Any, want: Any, atol: float = 0.0) -> bool:
    """Whether a result is the expected value, type for type: True is not 1, and 1 is not 1.0.

    An `AnyList` takes a list or a tuple; NaN takes NaN; finite floats may differ by `atol`. Order counts in sequences
    only, and the elements of sets and the keys of dicts are compared exactly.
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
            freeze(key) in values and matches(values[freeze(key)], value, atol) for key, value in want.items()
        )
    return bool(freeze(got) == freeze(want))


def _same_items(got: Any, want: Any, atol: float) -> bool:
    return len(got) == len(want) and all(matches(mine, theirs, atol) for mine, theirs in zip(got, want, strict=True))


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

"""Types of the standard library that travel by value, as plain parts."""

from __future__ import annotations

import sys

from agentrl.verifiers.code.runner.codec import CodecError

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any

MUTABLE = ("list", "dict", "set", "bytearray", "deque", "Counter", "OrderedDict", "defaultdict")
_DTYPES = "biufcSU"
_PARTS: dict[str, Callable[[Any], tuple[Any, ...]]] = {
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
_BUILD: dict[str, Callable[..., Any]] = {
    "builtins.dict_keys": lambda items: dict.fromkeys(items).keys(),
    "builtins.dict_values": lambda items: dict(enumerate(items)).values(),
    "builtins.dict_items": lambda items: dict(items).items(),
    "datetime.datetime": lambda text: _named("datetime", "datetime").fromisoformat(text),
    "datetime.time": lambda text: _named("datetime", "time").fromisoformat(text),
}


def _named(module: str, name: str) -> Any:
    return getattr(__import__(module), name)


def parts_of(value: Any) -> tuple[Any, ...] | None:
    """Name and parts of a value that travels so; None for any other."""
    kind = type(value)
    module, _, _ = kind.__module__.partition(".")
    if module == "numpy":
        return _array_parts(value)
    name = f"{kind.__module__}.{kind.__name__}"
    if name not in _PARTS or kind is not _kind(name, value):
        return None
    zone = getattr(value, "tzinfo", None)
    if zone is not None and type(zone).__name__ != "timezone":
        return None
    return name, *_PARTS[name](value)


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


def build(name: str, *parts: Any) -> Any:
    """The value of name and parts.

    Raises:
        CodecError: there is no such type, or these are no parts of one.
    """
    try:
        if name == "numpy":
            return _array(*parts)
        if name not in _PARTS:
            raise CodecError(f"no value of type {name} is carried")
        if name == "collections.defaultdict" and not (parts[0] is None or callable(parts[0])):
            raise CodecError("a defaultdict needs a factory")
        return (_BUILD.get(name) or _named(*name.split(".")))(*parts)
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

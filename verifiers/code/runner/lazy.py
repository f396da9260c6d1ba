"""A stand-in for numpy that loads it on first use: most checks import it and never touch it, and it
costs 70 ms.

While numpy is not loaded no object is an array, so `isinstance(x, numpy.ndarray)` can be answered
without it.
"""

from __future__ import annotations

import sys

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any


def _load() -> Any:
    if sys.modules.get("numpy") is _NUMPY:
        del sys.modules["numpy"]
    import numpy

    return numpy


class _AnyArray(type):
    def __instancecheck__(cls, value: object) -> bool:
        return sys.modules.get("numpy") is not _NUMPY and isinstance(value, _load().ndarray)

    def __call__(cls, *args: Any, **kwargs: Any) -> Any:
        return _load().ndarray(*args, **kwargs)


class _Array(metaclass=_AnyArray):
    """Stands for numpy.ndarray."""


class _Numpy(type(sys)):  # type: ignore[misc]
    def __getattr__(self, name: str) -> Any:
        if name == "ndarray" and sys.modules.get("numpy") is _NUMPY:
            return _Array
        return getattr(_load(), name)


_NUMPY = _Numpy("numpy")


def install() -> None:
    """Put the stand-in where `import numpy` finds it."""
    sys.modules.setdefault("numpy", _NUMPY)

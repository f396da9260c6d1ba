"""Public names of a package, each imported when it is first used."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from importlib import import_module
from typing import Any

Public = tuple[list[str], Callable[[str], Any], Callable[[], list[str]]]


def lazy_names(package: str, homes: Mapping[str, Sequence[str]]) -> Public:
    """`__all__`, `__getattr__` and `__dir__` of a package that imports its modules when used.

    Args:
        package: its `__name__`.
        homes: module inside the package -> public names that it defines.
    """
    home_of = {name: module for module, names in homes.items() for name in names}
    public = sorted(home_of)

    def get(name: str) -> Any:
        if name not in home_of:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        return getattr(import_module(f"{package}.{home_of[name]}"), name)

    return public, get, lambda: public

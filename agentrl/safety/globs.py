"""Patterns of paths: `*` within one name, `**` across names, `?` one character."""

from __future__ import annotations

import re
from collections.abc import Iterable
from functools import lru_cache


def path_matches(pattern: str, path: str) -> bool:
    """Whether a path is what the pattern says; `out/**` is everything below `out`."""
    return _compiled(pattern).fullmatch(path) is not None


def leads_to(pattern: str, folder: str) -> bool:
    """Whether something that the pattern matches may lie below the folder."""
    wanted, given = pattern.split("/"), folder.split("/")
    for place, name in enumerate(given):
        if place >= len(wanted):
            return False
        if wanted[place] == "**":
            return True
        if not path_matches(wanted[place], name):
            return False
    return len(wanted) > len(given)


def any_matches(patterns: Iterable[str], path: str) -> bool:
    """Whether one of the patterns matches."""
    return any(path_matches(pattern, path) for pattern in patterns)


@lru_cache(maxsize=4096)
def _compiled(pattern: str) -> re.Pattern[str]:
    parts = []
    for piece in re.split(r"(\*\*|\*|\?)", pattern):
        parts.append({"**": ".*", "*": "[^/]*", "?": "[^/]"}.get(piece) or re.escape(piece))
    return re.compile("".join(parts), re.DOTALL)

"""`--set key=value`: one setting of plain values, wherever it stands."""

from __future__ import annotations

import tomllib
from typing import Any

from agentrl.errors import ConfigError


def apply_override(row: dict[str, Any], override: str) -> None:
    """Set one setting of plain values, from `key=value` as a command takes it.

    A step of the key that is a number is a place in a list, as in `env.0.floor=0.5`.

    Raises:
        ConfigError: it is no such pair, or the key leads into what is no table.
    """
    key, separator, text = override.partition("=")
    if not separator:
        raise ConfigError(f"--set {override!r}: write it as key=value")
    try:
        value = tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:
        value = text
    *path, last = key.strip().split(".")
    place: Any = row
    for depth, step in enumerate(path):
        if path[0] == "loss" and depth == 1 and isinstance(place.get(step), str):
            place[step] = {"name": place[step]}  # a part may be its name alone
        if isinstance(place, list):
            place = place[_index(place, step, override)]
        else:
            place = place.setdefault(step, {})
        if not isinstance(place, dict | list):
            raise ConfigError(f"--set {override!r}: {step!r} is no table")
    place[_index(place, last, override) if isinstance(place, list) else last] = value


def _index(places: list[Any], step: str, override: str) -> int:
    if not step.isdecimal() or int(step) >= len(places):
        raise ConfigError(
            f"--set {override!r}: {step!r} is no place in a list of {len(places)}: give one from 0"
            f" to {len(places) - 1}"
        )
    return int(step)

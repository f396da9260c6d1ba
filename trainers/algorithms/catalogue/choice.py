"""Parts of a recipe from settings: `surrogate = {name = "ppo_clip", clip_high = 0.28}`."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from difflib import get_close_matches
from typing import Any, TypeVar

from agentrl.errors import ConfigError
from agentrl.records.plain import as_toml
from agentrl.trainers.algorithms.catalogue.places import PLACES, label
from agentrl.trainers.algorithms.parts import options, with_options
from agentrl.trainers.algorithms.recipe import LISTS, Recipe
from agentrl.trainers.peers import peer_hint

Row = TypeVar("Row")
Part = Callable[..., Any]


def choose_parts(found: Recipe, place: str, value: Any) -> tuple[Recipe, dict[str, Any]]:
    """The recipe with other parts at a place.

    A part is its name, or a table of its name and options. Of a part that the recipe has already,
    options that are not named stay as they are; of others they are the part's defaults. `credit`,
    `before`, `regularisers` and `corrections` take one part or a list. It takes the place of what
    the recipe has there; options that stand beside it still add their part.

    Args:
        place: a key of `PLACES`.
        value: what the settings say.

    Returns:
        the recipe, and the options that were named.

    Raises:
        ConfigError: there is no such part or option, a value is of another type, or a list names a
            part twice.
    """
    here = getattr(found, place)
    own = {label(part): part for part in (here if place in LISTS else (here,))}
    rows = value if place in LISTS and isinstance(value, list | tuple) else [value]
    parts, named = list[Part](), dict[str, Any]()
    for row in rows:
        part, settings = _part(place, own, row)
        if label(part) in map(label, parts):
            raise ConfigError(f"{place} names {label(part)} twice: keep one")
        parts.append(part)
        named |= settings
    changed: dict[str, Any] = {place: tuple(parts) if place in LISTS else parts[0]}
    return replace(found, **changed), named


def _part(place: str, own: dict[str, Part], row: Any) -> tuple[Part, dict[str, Any]]:
    """One part, and those of its options that were named."""
    table = PLACES[place] | own
    if isinstance(row, str):
        row = {"name": row}
    if not isinstance(row, Mapping):
        example = next(iter(own or table))
        raise ConfigError(
            f"{place}={as_toml(row)} must be a name or a table, as in {place} ="
            f" {{name = {example!r}}}"
        )
    settings = dict(row)
    if "name" not in settings and len(own) != 1:
        raise ConfigError(
            f"{place}={as_toml(settings)} says no name: add name = … (known: {', '.join(table)})"
        )
    part = entry(settings.pop("name", next(iter(own), "")), table, place)
    for key, value in settings.items():
        if key not in options(part):
            raise ConfigError(_no_option(f"{place}.{key}={as_toml(value)}", key, part, table))
    try:
        made = with_options(part, settings)
    except ConfigError as error:
        raise ConfigError(f"{place}.{error}") from None
    for key, value in options(made).items():
        if key.endswith("_coef") and value == 0 and key not in settings:
            raise ConfigError(
                f"{place}: {label(part)} changes nothing while {key} is 0: set {key} in its table"
            )
    return made, settings


def _no_option(said: str, key: str, part: Part, table: Mapping[str, Part]) -> str:
    """Why a part does not take an option."""
    known = options(part)
    owners = [name for name, other in table.items() if key in options(other)]
    if owners:
        return (
            f"{said}: that is an option of {' and '.join(owners)}, not of {label(part)}: leave it"
            " out where that is named"
        )
    if not known:
        return f"{said}: {label(part)} has no options"
    hint = peer_hint(key) or f"did you mean {nearest(key, known)!r}?"
    return f"{said}: {label(part)} has no such option: {hint} (known: {', '.join(known)})"


def entry(name: Any, table: Mapping[str, Row], what: str) -> Row:
    """The entry of that name.

    Raises:
        ConfigError: there is none; the message names the nearest one.
    """
    if isinstance(name, str) and name in table:
        return table[name]
    raise ConfigError(
        f"there is no {what} {name!r}; did you mean {nearest(str(name), table)!r}? (known:"
        f" {', '.join(table)})"
    )


def nearest(name: str, known: Iterable[str]) -> str:
    """The most similar of these names, however little that is; among the first three, one of the
    same letters.
    """
    near = get_close_matches(name.lower(), known, n=3, cutoff=0.0)
    return next((one for one in near if sorted(one) == sorted(name.lower())), near[0])

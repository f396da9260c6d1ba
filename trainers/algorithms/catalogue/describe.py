"""What a recipe is, for people: parts, formulas, options with types and defaults, differences."""

from __future__ import annotations

import inspect
import json
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict
from typing import Any

from agentrl.trainers.algorithms.catalogue.deviations import DEVIATIONS
from agentrl.trainers.algorithms.catalogue.places import ADDABLE, PLACES, label
from agentrl.trainers.algorithms.parts import function_of, options
from agentrl.trainers.algorithms.recipe import LISTS, TAUGHT, Recipe
from agentrl.trainers.algorithms.recipes import OWN, RECIPES, recipe

_ADDRESS = re.compile(r"[,:]? *\(?(https?://|arxiv\.org/)\S+")
_MODELS = ("reference", "critic", "teacher", "greedy", "router")
"""Needs that cost a model or episodes; the others are computed on the way."""


def recipe_table() -> list[dict[str, str]]:
    """One row of text per recipe: name, credit, surrogate, aggregate, besides, paper."""
    return [
        {
            "name": row.name,
            "credit": _texts(row, "credit"),
            "surrogate": _texts(row, "surrogate"),
            "aggregate": _texts(row, "aggregate"),
            "besides": ", ".join(_besides(row)),
            "paper": row.paper,
        }
        for row in RECIPES.values()
    ]


def recipe_sheet(name: str) -> dict[str, Any]:
    """All that is known of a recipe.

    Returns:
        name, paper, parts (each with place, name, formula and options), settings (those that belong
        to no part), needs and deviations; additions: parts that it takes on when one of their
        options is set; exchanges: place -> names of parts that can stand there instead. An option
        has name, type and default; a deviation has name, differs, why and the settings that give
        the paper's form, as a file has them.

    Raises:
        ConfigError: there is no such recipe.
    """
    row = recipe(name)
    own = {place: {label(part) for part in _parts(row, place)} for place in PLACES}
    return {
        "name": row.name,
        "paper": row.paper,
        "parts": [_part(place, part) for place in PLACES for part in _parts(row, place)],
        "additions": [
            _part(place, part)
            for place, parts in ADDABLE.items()
            for part in parts
            if label(part) not in own[place]
            and not (place == "before" and "parts" in row.needs)  # it would change nothing
        ],
        "exchanges": {
            place: [one for one in known if one not in own[place]]
            for place, known in PLACES.items()
        },
        "settings": [_option(name, value) for name, value in _settings(row)],
        "needs": sorted(row.needs),
        "deviations": [
            asdict(one) | {"settings": written(one.settings)}
            for one in DEVIATIONS.get(row.name, ())
        ],
    }


def _part(place: str, part: Callable[..., Any]) -> dict[str, Any]:
    return {
        "place": place,
        "name": label(part),
        "formula": _formula(part),
        "options": [_option(*one) for one in options(part).items()],
    }


def written(settings: Mapping[str, Any]) -> str:
    """Settings as a file has them in a table: `kl_coef = 0.04, kl_ratio = false`."""
    return ", ".join(f"{name} = {_value(value)}" for name, value in settings.items())


def _value(value: Any) -> str:
    if isinstance(value, Mapping):
        return f"{{{written(value)}}}"
    return "inf" if value == float("inf") else json.dumps(value)


def _settings(row: Recipe) -> Iterator[tuple[str, Any]]:
    """What belongs to no part."""
    yield from ((name, getattr(row, name)) for name in OWN)
    if "critic" in row.needs:
        for name, value in row.critic.model_dump().items():
            yield f"critic.{name}", value
    if row.needs & TAUGHT:
        for name, value in row.teacher.model_dump().items():
            yield f"teacher.{name}", value


def _parts(row: Recipe, place: str) -> tuple[Callable[..., Any], ...]:
    found: Any = getattr(row, place)
    return tuple(found) if place in LISTS else (found,)


def _texts(row: Recipe, *places: str) -> str:
    """The parts of some places, each with the options that differ from its own defaults."""
    return ", ".join(
        label(part) + (f" ({set_here})" if set_here else "")
        for place in places
        for part in _parts(row, place)
        for set_here in [", ".join(_changed(part))]
    )


def _changed(part: Callable[..., Any]) -> Iterator[str]:
    plain = options(function_of(part))
    for name, value in options(part).items():
        if value != plain[name]:
            yield f"{name} {value}"


def _besides(row: Recipe) -> Iterator[str]:
    if parts := _texts(row, "before", "corrections", "regularisers"):
        yield parts
    plain = Recipe("", "", (), row.surrogate, row.aggregate)
    for name in OWN:
        if (value := getattr(row, name)) != getattr(plain, name):
            yield name if value is True else f"{name} {value}"
    yield from (need for need in _MODELS if need in row.needs)
    if row.critic.warmup:
        yield f"critic.warmup {row.critic.warmup}"
    if row.one_step:
        yield "one step a round"


def _formula(part: Callable[..., Any]) -> str:
    """The first paragraph of what the part says of itself, without addresses."""
    text = inspect.getdoc(function_of(part)) or ""
    return _ADDRESS.sub("", " ".join(text.partition("\n\n")[0].split())).strip()


def _option(name: str, value: Any) -> dict[str, Any]:
    if isinstance(value, bool):
        kind = "true or false"
    elif isinstance(value, str):
        kind = "text"
    elif isinstance(value, Mapping):
        kind, value = "numbers by name", dict(value)
    else:
        kind = "count" if isinstance(value, int) else "number"
    return {"name": name, "type": kind, "default": value}

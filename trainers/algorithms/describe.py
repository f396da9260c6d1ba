"""Recipes for people: their parts, formulas, and options with types, ranges and defaults."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

from pydantic import BaseModel

from agentrl.settings import SettingRow, as_toml, describe
from agentrl.trainers.algorithms.parts import Part
from agentrl.trainers.algorithms.recipe import PLACES, TAUGHT, Recipe, RecipeSettings
from agentrl.trainers.algorithms.recipes import ADDABLE, PARTS, RECIPES, recipe

_ADDRESS = re.compile(r"[,:]? *\(?(https?://|arxiv\.org/)\S+")
_MODELS = ("reference", "critic", "teacher", "greedy", "router")
"""Needs that cost a model or episodes; the others come almost for free."""


def recipe_table() -> list[dict[str, str]]:
    """One row of text per recipe: name, credit, surrogate, aggregate, besides, paper."""
    return [
        {
            "name": row.name,
            "credit": _list_parts(row, "credit"),
            "surrogate": _list_parts(row, "surrogate"),
            "aggregate": _list_parts(row, "aggregate"),
            "besides": ", ".join(_besides(row)),
            "paper": row.paper,
        }
        for row in RECIPES.values()
    ]


def recipe_sheet(name: str) -> dict[str, Any]:
    """A recipe in detail.

    Returns:
        name, paper, parts (place, name, formula, options), settings (that belong to no part),
        additions (parts that it takes on when one of their options is set), exchanges (place ->
        other parts by name) and needs. An option has name, type, range, default and description.

    Raises:
        ConfigError: there is no such recipe.
    """
    row = recipe(name)
    present = [(place, part.label) for place, part in row.parts()]
    return {
        "name": row.name,
        "paper": row.paper,
        "parts": [describe_part(place, part) for place, part in row.parts()],
        "additions": [
            describe_part(place, part)
            for place, parts in ADDABLE.items()
            for part in parts
            if (place, part.label) not in present
            and not (place == "before" and "parts" in row.needs)  # it would change nothing
        ],
        "exchanges": {
            place: [other for other in PARTS[place] if (place, other) not in present]
            for place in PLACES
        },
        "settings": list(_describe_settings(row)),
        "needs": sorted(row.needs),
    }


def describe_part(place: str, part: Part) -> dict[str, Any]:
    """A part with its place, name, formula and options."""
    return {
        "place": place,
        "name": part.label,
        "formula": _ADDRESS.sub("", part.formula).strip(),
        "options": _describe_options(describe(type(part.options)), dict(part.options)),
    }


def _describe_options(rows: list[SettingRow], values: dict[str, Any]) -> list[dict[str, Any]]:
    return [
        {
            "name": row.name,
            "type": row.type,
            "range": row.range,
            "default": values[row.name],
            "description": row.description,
        }
        for row in rows
    ]


def _describe_settings(row: Recipe) -> Iterator[dict[str, Any]]:
    yield from _describe_options(describe(RecipeSettings), vars(row))
    tables = list[tuple[str, BaseModel]]()
    if "critic" in row.needs:
        tables.append(("critic.", row.critic))
    if row.needs & TAUGHT:
        tables.append(("teacher.", row.teacher))
    for prefix, table in tables:
        values = {f"{prefix}{name}": value for name, value in table}
        yield from _describe_options(describe(type(table), prefix), values)


def _list_parts(row: Recipe, place: str) -> str:
    """The parts at a place, each with the options that differ from its defaults."""
    texts = []
    for part in row.parts_at(place):
        defaults = dict(type(part.options)())
        changed = [f"{name} {value}" for name, value in part.options if value != defaults[name]]
        texts.append(f"{part.label} ({', '.join(changed)})" if changed else part.label)
    return ", ".join(texts)


def _besides(row: Recipe) -> Iterator[str]:
    for place in ("before", "corrections", "regularisers"):
        if row.parts_at(place):
            yield _list_parts(row, place)
    for name, default in vars(RecipeSettings()).items():
        value = getattr(row, name)
        if value != default:
            yield name if value is True else f"{name} {as_toml(value)}"
    yield from (need for need in _MODELS if need in row.needs)
    if row.critic.warmup:
        yield f"critic.warmup {row.critic.warmup}"
    if row.one_step:
        yield "one step a round"

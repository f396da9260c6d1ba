"""`agentrl recipes`: the algorithms that can be trained with."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Any

import typer

from agentrl.cli.options import Json, print_json
from agentrl.cli.train import training_parts
from agentrl.settings import as_toml


def recipes(
    name: Annotated[
        str, typer.Argument(help="Name of a recipe, or path/to/file.py:name; none lists them all.")
    ] = "",
    as_json: Json = False,
) -> None:
    """List the recipes, or describe one: parts, formulas, options with types and defaults."""
    with training_parts():
        from agentrl.trainers.algorithms.describe import recipe_sheet, recipe_table

    result: dict[str, Any] = recipe_sheet(name) if name else {"recipes": recipe_table()}
    if as_json:
        print_json(result)
    else:
        print("\n".join(_format_sheet(result) if name else _format_table(result["recipes"])))


def _format_table(rows: list[dict[str, str]]) -> Iterator[str]:
    header = {key: key for key in rows[0]}
    widths = {key: max(len(row[key]) for row in (header, *rows)) for key in header}
    for row in (header, *rows):
        yield "  ".join(text.ljust(widths[key]) for key, text in row.items()).rstrip()


def _format_sheet(sheet: dict[str, Any]) -> Iterator[str]:
    yield f"{sheet['name']}  {sheet['paper']}"
    for part in sheet["parts"]:
        yield ""
        yield f"{part['place']}: {part['name']}"
        yield f"  {part['formula']}"
        yield from _format_options(part["options"])
    yield ""
    yield "settings of the recipe"
    yield from _format_options(sheet["settings"])
    yield ""
    yield "parts that are added when one of their options is set"
    for part in sheet["additions"]:
        options = [f"{one['name']} = {as_toml(one['default'])}" for one in part["options"]]
        yield f"    {part['name']:<25} {', '.join(options)}"
    yield ""
    yield 'other parts by name, as in credit = ["gae", "whiten"]'
    for place, names in sheet["exchanges"].items():
        yield f"    {place:<13} {', '.join(names)}"
    yield ""
    yield f"reads: {', '.join(sheet['needs']) or 'tokens and outcomes'}"
    yield "differences from its paper: docs/deviations.md"


def _format_options(rows: list[dict[str, Any]]) -> Iterator[str]:
    for row in rows:
        allowed = f"{row['type']} {row['range']}".strip()
        yield f"    {row['name']:<20} {as_toml(row['default']):<12} {allowed}"
        yield f"    {'':<20} {row['description']}"

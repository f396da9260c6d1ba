"""`agentrl recipes`: the algorithms that can be trained with."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Any

import typer

from agentrl.cli.options import Json, print_json
from agentrl.cli.train import training_parts


def recipes(
    name: Annotated[
        str, typer.Argument(help="Of a recipe, or path/to/file.py:name; without one: all.")
    ] = "",
    as_json: Json = False,
) -> None:
    """List the recipes, or say all of one: parts, formulas, options, differences from its paper."""
    with training_parts():
        from agentrl.trainers.algorithms.catalogue.describe import recipe_sheet, recipe_table

    found: dict[str, Any] = recipe_sheet(name) if name else {"recipes": recipe_table()}
    if as_json:
        print_json(found)
    else:
        print("\n".join(_sheet(found) if name else _table(found["recipes"])))


def _table(rows: list[dict[str, str]]) -> Iterator[str]:
    heads = dict(zip(rows[0], rows[0], strict=True))
    widths = {key: max(len(row[key]) for row in (heads, *rows)) for key in heads}
    for row in (heads, *rows):
        yield "  ".join(text.ljust(widths[key]) for key, text in row.items()).rstrip()


def _sheet(found: dict[str, Any]) -> Iterator[str]:
    yield f"{found['name']}  {found['paper']}"
    for part in found["parts"]:
        yield ""
        yield f"{part['place']}: {part['name']}"
        yield f"  {part['formula']}"
        yield from _options(part["options"])
    yield ""
    yield "settings of the recipe"
    yield from _options(found["settings"])
    yield ""
    yield "takes on, when one of their options is set"
    for part in found["additions"]:
        said = ", ".join(f"{one['name']} = {one['default']}" for one in part["options"])
        yield f"    {part['name']:<25} {said}"
    yield ""
    yield 'other parts by name, as in credit = ["gae", "whiten"]'
    for place, names in found["exchanges"].items():
        yield f"    {place:<13} {', '.join(names)}"
    yield ""
    yield f"reads: {', '.join(found['needs']) or 'tokens and outcomes'}"
    yield ""
    yield "differs from its paper" if found["deviations"] else "differs in nothing that is known"
    for one in found["deviations"]:
        yield f"  {one['name']}: {one['differs']}"
        yield f"    why: {one['why']}"
        if one["settings"]:
            yield f"    the paper's: {one['settings']}"


def _options(rows: list[dict[str, Any]]) -> Iterator[str]:
    for row in rows:
        yield f"    {row['name']:<20} {row['type']:<16} {row['default']}"

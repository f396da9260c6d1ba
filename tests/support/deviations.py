"""The table of docs/deviations.md."""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import Any, NamedTuple

_PAGE = Path(__file__).parents[2] / "docs" / "deviations.md"
_HEAD = "| recipe | deviation | the paper | here | why | settings of the paper |"


class Deviation(NamedTuple):
    """One row; the settings give the paper's form, and are empty if none do."""

    name: str
    paper: str
    here: str
    why: str
    settings: dict[str, Any]


def read_deviations() -> dict[str, list[Deviation]]:
    """Recipe -> its deviations."""
    deviations: dict[str, list[Deviation]] = {}
    table = _PAGE.read_text().split(_HEAD)[1].split("\n\n")[0]
    for line in table.strip().splitlines()[1:]:
        recipe, name, paper, here, why, settings = [cell.strip() for cell in line[1:-1].split("|")]
        text = "" if settings == "–" else settings.strip("`")
        values = tomllib.loads(f"settings = {{ {text} }}")["settings"]
        deviations.setdefault(recipe.strip("`"), []).append(
            Deviation(name, paper, here, why, values)
        )
    return deviations


DEVIATIONS = read_deviations()

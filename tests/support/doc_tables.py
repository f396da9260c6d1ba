"""Writes the tables of docs/ that follow from code. `python tests/support/doc_tables.py` updates
the pages; a test compares them.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from agentrl.policies.options import ServedOptions
from agentrl.settings import SettingRow, as_toml, describe
from agentrl.trainers.algorithms.describe import describe_part, recipe_table
from agentrl.trainers.algorithms.distillation import TeacherSettings
from agentrl.trainers.algorithms.recipe import RecipeSettings
from agentrl.trainers.algorithms.recipes import PARTS
from agentrl.trainers.config import CriticSettings, TrainConfig
from agentrl.trainers.offline.settings import StageSettings

DOCS = Path(__file__).resolve().parents[2] / "docs"
PAGES = tuple(
    DOCS / f"{name}.md" for name in ("curriculum", "rlhf", "served", "trainers", "training")
)
_MARKED = re.compile(r"(<!-- table: ([a-z ]+) -->\n).*?(<!-- end -->)", re.DOTALL)


def markdown_table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A Markdown table of cells that may hold any text."""
    lines = [list(head), ["---"] * len(head), *rows]
    escaped = [[cell.replace("|", "\\|") for cell in line] for line in lines]
    return "".join(f"| {' | '.join(line)} |\n" for line in escaped)


def recipe_rows() -> str:
    """All recipes with their parts and papers."""
    head = ("recipe", "credit", "surrogate", "aggregate", "also", "paper")
    rows = []
    for row in recipe_table():
        paper = f"[{row['paper'].rpartition('/')[2]}]({row['paper']})"
        cells = (row["credit"], row["surrogate"], row["aggregate"], row["besides"], paper)
        rows.append((f"`{row['name']}`", *cells))
    return markdown_table(head, rows)


def part_rows() -> str:
    """All parts with formulas and the defaults of their options."""
    rows = []
    for place, parts in PARTS.items():
        for part in parts.values():
            sheet = describe_part(place, part)
            options = [f"`{one['name']}` {_default(one['default'])}" for one in sheet["options"]]
            rows.append((place, f"`{part.label}`", sheet["formula"], ", ".join(options)))
    return markdown_table(("place", "part", "formula", "options"), rows)


def setting_rows(rows: Iterable[SettingRow]) -> str:
    """Settings with defaults and descriptions."""
    cells = [(f"`{row.name}`", _default(row.default), row.description) for row in rows]
    return markdown_table(("setting", "default", "meaning"), cells)


def _default(value: Any) -> str:
    text = value if isinstance(value, str) else as_toml(value)
    return text.strip("'") if text not in ("", "''", "None") else "–"


def _run_settings() -> list[SettingRow]:
    elsewhere = ("env.N.limits.", "curriculum.")
    return [row for row in describe(TrainConfig) if not row.name.startswith(elsewhere)]


def _curriculum_settings() -> list[SettingRow]:
    return [row for row in describe(TrainConfig) if row.name.startswith("curriculum.")]


def _stage_settings() -> list[SettingRow]:
    shared = ("chat.", "schedule.", "optimizer.", "compute.")
    return [row for row in describe(StageSettings) if not row.name.startswith(shared)]


TABLES = {
    "recipes": recipe_rows,
    "parts": part_rows,
    "recipe settings": lambda: setting_rows(describe(RecipeSettings)),
    "critic settings": lambda: setting_rows(describe(CriticSettings, "critic.")),
    "teacher settings": lambda: setting_rows(describe(TeacherSettings, "teacher.")),
    "stage settings": lambda: setting_rows(_stage_settings()),
    "served options": lambda: setting_rows(describe(ServedOptions)),
    "run settings": lambda: setting_rows(_run_settings()),
    "curriculum settings": lambda: setting_rows(_curriculum_settings()),
}


def fill(text: str) -> str:
    """The text of a page with each marked table as the code has it now."""
    return _MARKED.sub(lambda match: f"{match[1]}{TABLES[match[2]]()}{match[3]}", text)


if __name__ == "__main__":
    for page in PAGES:
        page.write_text(fill(page.read_text()))

"""The tables of the docs that follow from code are those of the code."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from doc_tables import PAGES, TABLES, fill

from agentrl.trainers.algorithms.recipes import PARTS, RECIPES


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_pages_have_the_tables_that_follow_from_the_code(page: Path) -> None:
    text = page.read_text()
    assert fill(text) == text, "run `python tests/support/doc_tables.py`"


def test_every_table_is_on_one_page() -> None:
    text = "".join(page.read_text() for page in PAGES)
    assert sorted(re.findall(r"<!-- table: (.+) -->", text)) == sorted(TABLES)


def test_tables_list_every_recipe_and_part() -> None:
    first_cells = re.findall(r"^\| `(.+?)` \|", TABLES["recipes"](), re.MULTILINE)
    assert first_cells == list(RECIPES)
    listed = re.findall(r"^\| (\w+) \| `(.+?)` \|", TABLES["parts"](), re.MULTILINE)
    assert listed == [(place, name) for place, parts in PARTS.items() for name in parts]


def test_text_outside_of_the_marks_stays() -> None:
    filled = fill("before\n<!-- table: recipes -->\nold\n<!-- end -->\nafter\n")
    assert filled.startswith("before\n") and filled.endswith("<!-- end -->\nafter\n")
    assert "| old" not in filled and "\nold\n" not in filled and "`grpo`" in filled

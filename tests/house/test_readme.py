"""The README tells the truth: its example passes the contract and its links lead
somewhere.
"""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

import pytest

from agentrl.cli.app import app
from agentrl.evaluation.contract import check_environment
from agentrl.registry import factory
from agentrl.trainers.algorithms.recipes import recipe
from agentrl.trainers.config import check_config
from agentrl.trainers.demo import DemoPlan

REPO = Path(__file__).resolve().parents[2]
README = (REPO / "README.md").read_text()
PAGES = [REPO / name for name in ("README.md", "CONTRIBUTING.md", "CHANGELOG.md")] + sorted(
    REPO.glob("docs/**/*.md")
)
FOLDERS = ("agentrl", "envs", "sandboxes", "verifiers", "trainers")


def environment_example() -> str:
    (block,) = [
        block
        for block in re.findall(r"```python\n(.*?)```", README, re.DOTALL)
        if "(ToolEnv)" in block
    ]
    return str(block)


def test_the_example_is_short_and_passes_the_contract(tmp_path: Path) -> None:
    code = environment_example()
    assert 20 <= code.count("\n") <= 40
    (tmp_path / "warehouse.py").write_text(code)
    findings = check_environment(factory(f"{tmp_path}/warehouse.py:Warehouse"))
    assert len(findings) >= 8
    assert not [finding for finding in findings if finding.problem]


def test_the_example_is_the_one_that_is_run() -> None:
    text = (REPO / "examples/01_write_an_environment.py").read_text()
    body = environment_example().split("Shelf = ")[1]
    assert body.strip() in text


def test_the_config_of_a_real_model_is_one() -> None:
    (block,) = re.findall(r"```toml\n(.*?)```", README, re.DOTALL)
    check_config(tomllib.loads(block), "README.md")


def anchors_of(page: Path) -> set[str]:
    """The anchors of a page's headings, as GitHub makes them."""
    text = re.sub(r"```.*?```", "", page.read_text(), flags=re.DOTALL)
    titles = re.findall(r"^#+ (.+)$", text, re.MULTILINE)
    return {re.sub(r"[^\w -]", "", title.strip().lower()).replace(" ", "-") for title in titles}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(REPO).as_posix())
def test_links_lead_somewhere(page: Path) -> None:
    targets = re.findall(r"\]\(([^)\s]+)\)", page.read_text())
    for target in targets:
        if "://" in target:
            continue
        name, _, anchor = target.partition("#")
        linked = page.parent / name if name else page
        assert linked.exists(), target
        assert not anchor or anchor in anchors_of(linked), target


def test_programs_are_called_only_after_their_folder_is_activated() -> None:
    first = README.index("$ agentrl")
    assert README.index("make setup") < README.index("source .venv/bin/activate") < first


def test_the_licence_is_the_one_that_is_named() -> None:
    text = (REPO / "LICENSE").read_text()
    named = tomllib.loads((REPO / "pyproject.toml").read_text())["project"]["license"]
    assert (
        named == "Apache-2.0" and "Apache License\n" in text and "Version 2.0, January 2004" in text
    )
    assert "END OF TERMS AND CONDITIONS" in text and "](LICENSE)" in README


def test_every_page_is_linked_and_every_page_named_in_code_exists() -> None:
    pages = {path.relative_to(REPO).as_posix() for path in REPO.glob("docs/*.md")}
    assert pages <= set(re.findall(r"docs/[\w-]+\.md", README))
    code = "".join(path.read_text() for folder in FOLDERS for path in (REPO / folder).rglob("*.py"))
    assert set(re.findall(r"docs/[\w-]+\.md", code)) <= pages


def test_the_table_of_commands_is_the_programs() -> None:
    rows = re.findall(r"^\| `agentrl (.+?) \|", README, re.MULTILINE)
    named = {name.strip("`") for row in rows for name in row.split(" · ")}
    known = {
        command.name or command.callback.__name__
        for command in app.registered_commands
        if command.callback
    }
    assert named == known | {group.name for group in app.registered_groups}


def test_performance_figures_stand_in_the_benchmarks_only() -> None:
    """A number with a unit of time, rate or gain belongs to docs/benchmarks.md, where it was
    measured.
    """
    prose = re.sub(r"```.*?```", "", README, flags=re.DOTALL)
    assert not re.findall(
        r"\d[\d.,]*\s*(?:ms|s|seconds|minutes|times|×|x faster|%|tokens/s)\b", prose
    )


def test_the_example_of_a_run_is_one() -> None:
    (block,) = re.findall(r"```toml\n(.*?)```", (REPO / "docs/training.md").read_text(), re.DOTALL)
    config = check_config(tomllib.loads(block), "docs/training.md")
    recipe(config.recipe, **config.loss)


def test_pages_name_the_checkpoint_that_the_demo_leaves() -> None:
    text = "".join(page.read_text() for page in PAGES)
    found = re.findall(r"demo-\d+/checkpoints/step_(\d+)", text)
    assert found and {int(step) for step in found} == {DemoPlan().rounds}

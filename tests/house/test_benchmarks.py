"""Every benchmark, experiment and example can be imported; rows run at their smallest size."""

from __future__ import annotations

import ast
import importlib
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from benchmarks.__main__ import NAMES, page
from benchmarks.parts import page as experiments
from benchmarks.row import Row

REPO = Path(__file__).resolve().parents[2]
FILES = [
    path for folder in ("benchmarks", "examples") for path in sorted((REPO / folder).rglob("*.py"))
]


def imported_names(path: Path) -> Iterator[tuple[str, str]]:
    """(module, name) of each import of our own packages, at any depth: also inside functions."""
    for node in ast.walk(ast.parse(path.read_text())):
        if not isinstance(node, ast.ImportFrom) or node.level or not node.module:
            continue
        if node.module.partition(".")[0] in ("agentrl", "benchmarks"):
            yield from ((node.module, alias.name) for alias in node.names)


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.relative_to(REPO).as_posix())
def test_every_import_of_a_benchmark_or_example_exists(path: Path) -> None:
    missing = []
    for module_name, name in imported_names(path):
        module = importlib.import_module(module_name)
        if not hasattr(module, name):
            try:
                importlib.import_module(f"{module_name}.{name}")
            except ModuleNotFoundError:
                missing.append(f"{module_name}.{name}")
    assert not missing


@pytest.mark.parametrize(
    "path",
    [path for path in FILES if path.parts[-2] != "examples" and path.stem != "__main__"],
    ids=lambda path: path.relative_to(REPO).as_posix(),
)
def test_every_benchmark_can_be_imported(path: Path) -> None:
    name = ".".join(path.relative_to(REPO).with_suffix("").parts).removesuffix(".__init__")
    importlib.import_module(name)


def test_the_page_has_every_row_with_the_command_that_measures_it() -> None:
    row = Row("reset_bubblewrap", 2.5, 100.0, 40.0, "ms", 75, "at least 30 times faster")
    (line,) = [line for line in page({"reset": [row]}).splitlines() if "bubblewrap" in line]
    assert line.startswith("| `reset_bubblewrap` | 2.5 | 100 | 40 | ms | 75 |")
    assert line.endswith("| `make bench ONLY=reset` |")
    written = (REPO / "docs/benchmarks.md").read_text()
    assert set(re.findall(r"make bench ONLY=(\w+)", written)) == set(NAMES)


def test_an_experiment_replaces_its_own_section_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    document = tmp_path / "experiments.md"
    document.write_text("# Experiments\n\nWords.\n\n## First\n\nold\n\n## Second\n\nstays\n")
    monkeypatch.setattr(experiments, "PATH", document)
    experiments.write_section("First", "new")
    experiments.write_section("Third", "added\n")
    assert document.read_text() == (
        "# Experiments\n\nWords.\n\n## First\n\nnew\n\n## Second\n\nstays\n\n## Third\n\nadded\n"
    )


def check_rows(rows: object) -> None:
    for row in [rows] if isinstance(rows, Row) else rows:  # type: ignore[union-attr]
        assert row.ours > 0 and row.n >= 1 and row.unit


@pytest.mark.long
@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("tool_call", {"rounds": 1}),
        ("reset", {"rounds": 1}),
        ("episodes", {"rounds": 1, "share": 0.1}),
    ],
)
def test_a_sandbox_row_runs(
    name: str, options: dict[str, float], docker: None, bubblewrap: None
) -> None:
    check_rows(importlib.import_module(f"benchmarks.{name}").measure(**options))


@pytest.mark.long
@pytest.mark.parametrize("name", ["import_time", "safety_overhead", "episode_write", "choosing"])
def test_a_row_without_a_sandbox_runs(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    module = importlib.import_module(f"benchmarks.{name}")
    for setting in ("ROUNDS", "REPEATS"):
        if hasattr(module, setting):
            monkeypatch.setattr(module, setting, 2)
    check_rows(module.measure())


@pytest.mark.long
def test_the_row_of_asynchronous_training_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    from benchmarks import async_speedup

    monkeypatch.setenv("AGENTRL_BENCH_LEAST_S", "0.002")
    check_rows(async_speedup.measure(steps=3))

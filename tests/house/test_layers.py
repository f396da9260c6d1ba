"""An import never points up, every module has a layer, and heavy packages are imported where they
belong.
"""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

REPO = Path(__file__).resolve().parents[2]
LIBRARY = ("agentrl", "envs", "sandboxes", "trainers", "verifiers")
ENGINE = tuple(
    f"agentrl/engines/{name}.py" for name in ("transformers", "loading", "growing", "routing")
)
HANDOVER = "agentrl/engines/own_process/handover.py"
VLLM = "agentrl/engines/vllm.py"
MAY_IMPORT = {
    "torch": (
        "trainers/",
        *ENGINE,
        VLLM,
        HANDOVER,
        "verifiers/models/batches.py",
    ),
    "transformers": ("trainers/", *ENGINE),
    "vllm": (VLLM,),
    "trl": ("trainers/",),
    "datasets": ("trainers/",),
    "gymnasium": ("agentrl/gym.py",),
    "openai": tuple(f"agentrl/policies/{name}.py" for name in ("bounded", "served", "tries")),
    "typer": ("agentrl/cli/",),
}
"""Package -> who may import it; inside a function others may import gymnasium too, as its own
plugins must.
"""


def library_files() -> Iterator[Path]:
    """Every module of the library once, by its real place."""
    for folder in LIBRARY:
        for path in sorted((REPO / folder).rglob("*.py")):
            if path.resolve() == path:
                yield path


def imported(tree: ast.AST) -> Iterator[str]:
    """Top-level names of what a tree imports, at any depth; what only the type checker reads is
    left out.
    """
    typing_only = {
        id(inner)
        for node in ast.walk(tree)
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test)
        for inner in ast.walk(node)
    }
    for node in ast.walk(tree):
        if id(node) in typing_only:
            continue
        if isinstance(node, ast.Import):
            yield from (alias.name.partition(".")[0] for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            yield node.module.partition(".")[0]


def at_import_time(tree: ast.Module) -> Iterator[ast.stmt]:
    """The statements that importing a module runs."""
    return (
        node
        for node in tree.body
        if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef)
    )


def lint_imports(config: Path) -> subprocess.CompletedProcess[str]:
    code = "from importlinter.cli import lint_imports_command as run; run()"
    command = [sys.executable, "-c", code, "--config", str(config), "--no-cache"]
    return subprocess.run(command, cwd=REPO, capture_output=True, text=True, timeout=280)


def test_imports_never_point_up() -> None:
    done = lint_imports(REPO / "pyproject.toml")
    assert done.returncode == 0, done.stdout + done.stderr


def test_the_contract_sees_a_wrong_order_through_the_links(tmp_path: Path) -> None:
    config = tmp_path / "pyproject.toml"
    text = (REPO / "pyproject.toml").read_text()
    assert '  "trainers",\n' in text
    config.write_text(
        text.replace('  "trainers",\n', "", 1).replace(
            '  "types",\n', '  "types",\n  "trainers",\n', 1
        )
    )
    done = lint_imports(config)
    assert done.returncode == 1 and re.search(
        r"trainers\S* is not allowed to import agentrl\.types", done.stdout
    ), done.stdout + done.stderr


@pytest.mark.parametrize("package", MAY_IMPORT)
def test_heavy_packages_are_imported_where_they_belong(package: str) -> None:
    found = set()
    for path in library_files():
        name = path.relative_to(REPO).as_posix()
        tree = ast.parse(path.read_text())
        statements = at_import_time(tree) if package == "gymnasium" else [tree]
        if any(package in imported(statement) for statement in statements):
            found.add(name)
    assert found, f"nothing imports {package}: the list above is out of date"
    assert not [name for name in found if not name.startswith(MAY_IMPORT[package])]


def test_only_the_engine_and_the_trainers_load_torch_when_imported() -> None:
    """Modules that everyone imports never bring torch along, not even through another module."""
    code = """
import importlib, pkgutil, sys
import agentrl
for module in pkgutil.walk_packages(agentrl.__path__, "agentrl."):
    apart = (".runner.", ".supervisor.", "__main__")
    if not module.name.startswith(("agentrl.trainers", "agentrl.engines.")):
        if not any(part in module.name for part in apart):
            importlib.import_module(module.name)
print([name for name in ("torch", "transformers", "trl") if name in sys.modules])
"""
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=REPO, capture_output=True, text=True, timeout=280
    )
    assert done.returncode == 0 and done.stdout.strip() == "[]", done.stdout + done.stderr

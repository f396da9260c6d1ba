"""The house style in numbers: short modules and functions, everything public documented and typed,
few settings.

A line of code is a physical line that holds a token of code: blank lines, comments and docstrings
    do not count. Where
a test counts physical lines instead, it says so.
"""

from __future__ import annotations

import ast
import io
import re
import tokenize
from collections import Counter
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from statistics import median

import pytest
from pydantic import BaseModel

from agentrl.trainers.config import TrainConfig

REPO = Path(__file__).resolve().parents[2]
LIBRARY = ("agentrl", "envs", "sandboxes", "trainers", "verifiers")
Function = ast.FunctionDef | ast.AsyncFunctionDef

PATH = (
    "trainers/config.py",
    "trainers/online/run.py",
    "trainers/online/loop.py",
    "trainers/online/learner.py",
    "trainers/online/update.py",
)
"""What a reader opens between the settings and `optimizer.step()`: see docs/architecture.md."""

MAX_LEAVES = 57
"""Settings of a run that can be set one by one, those of its tables included."""


def library_files() -> list[Path]:
    """Every module of the library once, by its real place."""
    return [
        path
        for folder in LIBRARY
        for path in sorted((REPO / folder).rglob("*.py"))
        if path.resolve() == path
    ]


@cache
def tree_of(path: Path) -> ast.Module:
    return ast.parse(path.read_text())


@cache
def code_lines(path: Path) -> frozenset[int]:
    """Numbers of the lines that hold code."""
    silent = {
        tokenize.COMMENT,
        tokenize.NL,
        tokenize.NEWLINE,
        tokenize.INDENT,
        tokenize.DEDENT,
        tokenize.ENDMARKER,
    }
    lines: set[int] = set()
    for token in tokenize.generate_tokens(io.StringIO(path.read_text()).readline):
        if token.type not in silent:
            lines.update(range(token.start[0], token.end[0] + 1))
    for node in ast.walk(tree_of(path)):
        if (
            isinstance(node, ast.Expr)
            and isinstance(node.value, ast.Constant)
            and isinstance(node.value.value, str)
        ):
            lines -= set(range(node.lineno, (node.end_lineno or node.lineno) + 1))
    return frozenset(lines)


def size(node: Function | ast.ClassDef, path: Path) -> int:
    """Lines of code of a definition, its decorators included."""
    first = min([node.lineno, *(decorator.lineno for decorator in node.decorator_list)])
    return len(code_lines(path) & set(range(first, (node.end_lineno or first) + 1)))


def functions(path: Path) -> Iterator[Function]:
    return (node for node in ast.walk(tree_of(path)) if isinstance(node, Function))


def public(tree: ast.Module) -> Iterator[tuple[str, Function | ast.ClassDef]]:
    """Classes, functions and methods without a leading underscore, outside of functions."""

    def visit(body: list[ast.stmt], prefix: str) -> Iterator[tuple[str, Function | ast.ClassDef]]:
        for node in body:
            if isinstance(node, Function | ast.ClassDef) and not node.name.startswith("_"):
                yield prefix + node.name, node
                if isinstance(node, ast.ClassDef):
                    yield from visit(node.body, f"{prefix}{node.name}.")

    return visit(tree.body, "")


def name_of(path: Path) -> str:
    return path.relative_to(REPO).as_posix()


def test_modules_have_at_most_400_lines_and_half_of_them_at_most_200() -> None:
    lengths = {name_of(path): path.read_text().count("\n") for path in library_files()}
    assert not {name: lines for name, lines in lengths.items() if lines > 400}
    assert median(lines for lines in lengths.values() if lines) <= 200


def test_functions_have_at_most_60_lines() -> None:
    """Physical lines, docstring included."""
    long = {
        f"{name_of(path)}:{node.name}": lines
        for path in library_files()
        for node in functions(path)
        if (lines := (node.end_lineno or 0) - node.lineno + 1) > 60
    }
    assert not long


def test_functions_take_at_most_6_parameters() -> None:
    """`self` does not count; a command-line command has one parameter per option and says so to the
    linter.
    """
    wide = {}
    for path in library_files():
        lines = path.read_text().splitlines()
        for node in functions(path):
            names = [
                arg.arg for arg in (*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs)
            ]
            excused = any(
                "noqa: PLR0913 -" in line for line in lines[node.lineno - 1 : node.body[0].lineno]
            )
            if len([name for name in names if name not in ("self", "cls")]) > 6 and not excused:
                wide[f"{name_of(path)}:{node.name}"] = names
    assert not wide


def test_everything_public_has_a_docstring() -> None:
    silent = [
        name_of(path)
        for path in library_files()
        if path.read_text() and not ast.get_docstring(tree_of(path))
    ]
    for path in library_files():
        for name, node in public(tree_of(path)):
            overload = any(
                "overload" in ast.unparse(decorator) for decorator in node.decorator_list
            )
            if not overload and not ast.get_docstring(node):
                silent.append(f"{name_of(path)}:{name}")
    assert not silent


def test_every_parameter_and_result_is_typed() -> None:
    bare = []
    for path in library_files():
        for node in functions(path):
            arguments = [*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs]
            arguments += [arg for arg in (node.args.vararg, node.args.kwarg) if arg]
            untyped = [
                arg.arg
                for arg in arguments
                if arg.annotation is None and arg.arg not in ("self", "cls", "mcs")
            ]
            if untyped or node.returns is None:
                bare.append(f"{name_of(path)}:{node.name} {untyped or 'result'}")
    assert not bare


def test_every_silenced_rule_is_named() -> None:
    blanket = re.compile(r"#\s*(noqa(?!: [A-Z]+\d+)|type: ignore(?!\[))")
    places = [
        path
        for folder in (*LIBRARY, "tests", "examples", "benchmarks")
        for path in (REPO / folder).glob("**/*.py")
    ]
    own = Path(__file__).resolve()
    assert not [
        name_of(path)
        for path in places
        if path.resolve() not in (own,) and blanket.search(path.read_text())
    ]


def leaves(kind: type[BaseModel], prefix: str = "") -> Iterator[str]:
    """Names of all settings that `--set` can reach in a kind of settings."""
    for name, field in kind.model_fields.items():
        table = field.annotation
        if isinstance(table, type) and issubclass(table, BaseModel):
            yield from leaves(table, f"{prefix}{name}.")
        else:
            yield prefix + name


def test_the_settings_of_a_run_are_few_and_each_stands_in_the_docs() -> None:
    found = list(leaves(TrainConfig))
    assert len(found) <= MAX_LEAVES, found
    page = (REPO / "docs/training.md").read_text()
    assert not [name for name in found if f"`{name}`" not in page]


def test_from_the_settings_to_the_optimizer_one_opens_few_files() -> None:
    assert len(PATH) <= 6
    texts = {name: (REPO / name).read_text() for name in PATH}
    assert "optimizer.step()" in texts[PATH[-1]]
    for above, below in (
        ("trainers/online/run.py", "trainers/config.py"),
        ("trainers/online/loop.py", "trainers/online/run.py"),
        ("trainers/online/run.py", "trainers/online/learner.py"),
        ("trainers/online/learner.py", "trainers/online/update.py"),
    ):
        module = "agentrl." + below.removesuffix(".py").replace("/", ".")
        assert f"from {module} import" in texts[above], f"{above} no longer leads to {below}"


@pytest.mark.parametrize(
    ("module", "name"),
    [
        ("losses", name)
        for name in ("importance_ratio", "clipped_objective", "ppo_clip", "by_token", "by_episode")
    ]
    + [("regularisers", name) for name in ("kl_k1", "kl_k2", "kl_k3")]
    + [
        ("surrogates", name)
        for name in ("policy_gradient", "importance_weighted", "cispo", "topr_token")
    ]
    + [
        ("sequence_surrogates", name)
        for name in ("sequence_ratio", "gspo", "gspo_token", "gmpo", "topr", "vespo")
    ],
)
def test_a_loss_is_short_and_has_no_branch(module: str, name: str) -> None:
    path = REPO / f"trainers/algorithms/{module}.py"
    found = next(node for node in functions(path) if node.name == name)
    assert (found.end_lineno or 0) - found.lineno < 40
    assert not [
        node
        for node in ast.walk(found)
        if isinstance(node, ast.If | ast.IfExp | ast.For | ast.While | ast.Try)
    ]


def test_the_driver_is_read_aloud() -> None:
    path = REPO / "trainers/online/loop.py"
    loop = next(node for node in functions(path) if node.name == "train")
    assert size(loop, path) <= 40
    branches = ast.If | ast.IfExp | ast.For | ast.While
    assert sum(isinstance(node, branches) for node in ast.walk(loop)) <= 7


def test_folders_have_at_most_15_modules() -> None:
    counts = Counter(path.parent for path in library_files())
    assert not {name_of(folder): count for folder, count in counts.items() if count > 16}


def test_code_counting_counts_code(tmp_path: Path) -> None:
    path = tmp_path / "sample.py"
    path.write_text(
        '"""Doc."""\n\n# why\ndef f(\n    x: int,\n) -> int:\n    """One.\n\n    Two."""\n   '
        " return x\n"
    )
    (found,) = functions(path)
    assert size(found, path) == 4

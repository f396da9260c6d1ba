"""House style: public names are documented and typed, losses have no branches."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

REPO = Path(__file__).resolve().parents[2]
LIBRARY = ("agentrl", "envs", "sandboxes", "trainers", "verifiers")
Function = ast.FunctionDef | ast.AsyncFunctionDef


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


def documents_its_fields(node: Function | ast.ClassDef) -> bool:
    """Whether this is a class of options, each with a docstring of its own behind it."""
    fields = [k for k, each in enumerate(node.body) if isinstance(each, ast.AnnAssign)]
    after = [node.body[k + 1] if k + 1 < len(node.body) else None for k in fields]
    return (
        isinstance(node, ast.ClassDef)
        and bool(fields)
        and all(isinstance(e, ast.Expr) and isinstance(e.value, ast.Constant) for e in after)
    )


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
            if not overload and not ast.get_docstring(node) and not documents_its_fields(node):
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
        ("surrogates", name)
        for name in ("sequence_ratio", "gspo", "gspo_token", "gmpo", "topr", "vespo")
    ],
)
def test_a_loss_has_no_branch(module: str, name: str) -> None:
    path = REPO / f"trainers/algorithms/{module}.py"
    found = next(node for node in functions(path) if node.name == name)
    assert not [
        node
        for node in ast.walk(found)
        if isinstance(node, ast.If | ast.IfExp | ast.For | ast.While | ast.Try)
    ]

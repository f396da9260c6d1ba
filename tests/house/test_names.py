"""One public name has one meaning: a top-level class or function is defined once in the library."""

from __future__ import annotations

import ast
from collections import defaultdict
from pathlib import Path

REPO = Path(__file__).resolve().parents[2]
LIBRARY = ("agentrl", "envs", "sandboxes", "trainers", "verifiers")

ALLOWED = {
    "main": "each file that has one is a program of its own",
    "pass_at_k": "the estimator of evaluation, and the advantage whose recipe has that name",
    "Attack": "an attack on a verifier, and the protocol by which the audit tries any",
    "missing": "each backend says what it lacks on this machine",
}
APART = (
    "agentrl/cli",
    "sandboxes/supervisor",
    "trainers/grpo.py",
    "verifiers/answers/math_worker.py",
    "verifiers/code/runner",
)
"""Commands have the names of what they call, and the reading copy those of the real path; the
others are programs that run on their own, in a sandbox or a process."""


def definitions() -> dict[str, set[str]]:
    """Public name -> files that define it; a command may have the name of what it calls."""
    found = defaultdict(set)
    for folder in LIBRARY:
        for path in sorted((REPO / folder).rglob("*.py")):
            place = path.relative_to(REPO)
            if path.resolve() != path or any(place.is_relative_to(apart) for apart in APART):
                continue
            for node in ast.parse(path.read_text()).body:
                if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
                    found[node.name].add(place.as_posix())
    return {name: places for name, places in found.items() if not name.startswith("_")}


def test_a_public_name_is_defined_once() -> None:
    twice = {name: places for name, places in definitions().items() if len(places) > 1}
    assert {name: twice[name] for name in twice.keys() - ALLOWED.keys()} == {}


def test_the_lists_name_nothing_that_does_not_exist() -> None:
    assert ALLOWED.keys() <= definitions().keys()

"""One sorted list of public names; each has a home, a docstring, and a line for type checkers."""

from __future__ import annotations

import ast
import importlib
import inspect
from pathlib import Path

import pytest

import agentrl

PUBLIC = (
    "AgentRLError",
    "EndReason",
    "Episode",
    "Group",
    "InfraError",
    "Limits",
    "Message",
    "Score",
    "Segment",
    "Step",
    "Task",
    "TaskView",
    "ToolCall",
    "ToolEnv",
    "Trajectory",
    "UserError",
    "make",
    "play",
    "register",
    "tool",
)


def test_the_public_list_is_sorted_and_is_this_one() -> None:
    assert list(PUBLIC) == sorted(PUBLIC)
    assert list(agentrl.__all__) == list(PUBLIC)


@pytest.mark.parametrize("name", PUBLIC)
def test_a_public_name_exists_and_is_documented(name: str) -> None:
    value = getattr(agentrl, name)
    assert value.__module__.startswith("agentrl.")
    assert len(inspect.getdoc(value) or "") > 15
    assert value is getattr(importlib.import_module(value.__module__), name)


def test_type_checkers_see_the_same_names() -> None:
    tree = ast.parse(Path(agentrl.__file__).read_text())
    typed = {
        alias.asname
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("agentrl.")
        for alias in node.names
    }
    assert typed == set(PUBLIC)


def test_an_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="no attribute 'Tool'"):
        agentrl.__getattr__("Tool")

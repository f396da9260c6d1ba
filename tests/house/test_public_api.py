"""Sorted lists of public names; each has a home, a docstring, and a line for type checkers."""

from __future__ import annotations

import ast
import importlib
import inspect
import subprocess
import sys
from pathlib import Path
from types import FunctionType

import pytest

PUBLIC = {
    "agentrl": """
        AgentRLError Dialogue EndReason Episode Group InfraError Limits Message Score Segment Step
        Task TaskView ToolCall ToolEnv Trajectory UserError make play register tool
    """,
    "agentrl.evaluation": """
        EvalPlan EvalProgress Paired PassAt RuleResult best_of_k check_environment
        check_named compare_runs evaluate majority_of_k paired pass_at pass_at_k pass_hat_k
        rate_ci summarize summary_lines task_counts
    """,
    "agentrl.sandboxes": """
        Allow BubblewrapBackend DockerBackend ExecResult FileInfo NetworkRequest Pool ProcessBackend
        Sandbox SandboxBackend SandboxLimits SandboxPool SandboxRole Session Snapshot TRUSTED
        available open_pool requests_of
    """,
    "agentrl.trainers": """
        DemoPlan PolicyOutput Recipe TokenBatch TrainConfig demonstrations pack plan_training
        read_config recipe run_demo run_training sft
    """,
    "agentrl.verifiers": """
        Criterion ProcessRewardModel RewardModel Submission Term Turn Verifier admit agreement
        all_of asks cohen_kappa
        compare each_turn ensemble_lower ensemble_min exact_match file_state first_of format_reward
        gated grade has_hidden hidden_tests if_submitted json_state length_penalty math_answer
        numeric on_answer pairwise remembered repetition_penalty rubric shaped sqlite_state
        tool_calls weighted with_process_rewards
    """,
}
HEAVY = ("torch", "transformers", "gymnasium", "numpy", "openai", "docker", "math_verify")
EVERY = [(package, name) for package, names in PUBLIC.items() for name in names.split()]


@pytest.mark.parametrize("package", PUBLIC)
def test_the_public_list_is_sorted_and_is_this_one(package: str) -> None:
    names = PUBLIC[package].split()
    module = importlib.import_module(package)
    assert names == sorted(names) == list(module.__all__) == dir(module)


@pytest.mark.parametrize(("package", "name"), EVERY)
def test_a_public_name_exists_and_is_documented(package: str, name: str) -> None:
    value = getattr(importlib.import_module(package), name)
    if not isinstance(value, type | FunctionType):
        return  # a constant or a type alias has no docstring of its own
    assert value.__module__.startswith(f"{package}.")
    assert len(inspect.getdoc(value) or "") > 15
    assert value is getattr(importlib.import_module(value.__module__), name)


@pytest.mark.parametrize("package", PUBLIC)
def test_no_module_hides_a_public_name(package: str) -> None:
    """Importing a module sets its name in the package; a lazy name would not be found."""
    folders = map(Path, importlib.import_module(package).__path__)
    modules = {path.stem for folder in folders for path in folder.iterdir()}
    assert not modules & set(PUBLIC[package].split())


@pytest.mark.parametrize("package", PUBLIC)
def test_type_checkers_see_the_same_names(package: str) -> None:
    file = importlib.import_module(package).__file__
    assert file is not None
    typed = {
        alias.asname
        for node in ast.walk(ast.parse(Path(file).read_text()))
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith(f"{package}.")
        for alias in node.names
        if alias.asname
    }
    assert typed == set(PUBLIC[package].split())


@pytest.mark.parametrize("package", PUBLIC)
def test_an_unknown_name_is_an_attribute_error(package: str) -> None:
    with pytest.raises(AttributeError, match=f"module '{package}' has no attribute 'Tool'"):
        importlib.import_module(package).Tool  # noqa: B018 - asking is the test


def test_importing_the_packages_loads_nothing_heavy() -> None:
    code = f"import sys, {', '.join(PUBLIC)}; print([n for n in {HEAVY} if n in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=100)
    assert done.stdout.strip() == "[]", done.stderr

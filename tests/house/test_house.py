"""The house around the code: one import name, light imports, pinned versions, links and their
guards.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import tomllib
from importlib.metadata import version
from pathlib import Path

import pytest

REPO = Path(__file__).resolve().parents[2]
ROOMS = ("envs", "sandboxes", "trainers", "verifiers")
HEAVY = (
    "torch",
    "transformers",
    "gymnasium",
    "numpy",
    "docker",
    "trl",
    "datasets",
    "rich",
    "jinja2",
    "typer",
)


def run_python(code: str, cwd: Path = REPO, **env: str) -> str:
    """Run code in a fresh interpreter and return what it printed."""
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=cwd,
        env=os.environ | env,
        capture_output=True,
        text=True,
        timeout=280,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_a_rooms_bare_name_cannot_be_imported_and_says_what_to_do() -> None:
    code = """
import importlib
for room in ("envs", "sandboxes", "trainers", "verifiers"):
    try:
        importlib.import_module(room)
    except ImportError as error:
        print(error)
"""
    assert run_python(code).splitlines() == [f"import agentrl.{room}, not {room}" for room in ROOMS]


def test_the_rooms_are_relative_links() -> None:
    assert {room: os.readlink(REPO / "agentrl" / room) for room in ROOMS} == {
        room: f"../{room}" for room in ROOMS
    }


@pytest.mark.parametrize("remains", ["nothing", "a text file"])
def test_a_checkout_without_links_still_imports(tmp_path: Path, remains: str) -> None:
    ignore = shutil.ignore_patterns("__pycache__", *ROOMS)
    shutil.copytree(REPO / "agentrl", tmp_path / "agentrl", ignore=ignore)
    for room in ROOMS:
        shutil.copytree(REPO / room, tmp_path / room, ignore=shutil.ignore_patterns("__pycache__"))
        if remains == "a text file":
            (tmp_path / "agentrl" / room).write_text(f"../{room}")
    code = (
        "import agentrl.envs.calc, agentrl.sandboxes.base as base;"
        " print(agentrl.envs.calc.__file__, base.__file__)"
    )
    files = run_python(code, cwd=tmp_path, PYTHONPATH=str(tmp_path)).split()
    assert files == [str(tmp_path / "envs/calc.py"), str(tmp_path / "sandboxes/base.py")]


@pytest.mark.parametrize(
    "line", [f"import {room}.base" for room in ROOMS] + ["from envs import calc"]
)
def test_the_linter_bans_bare_names(line: str) -> None:
    ruff = [
        sys.executable,
        "-m",
        "ruff",
        "check",
        "--select",
        "TID251",
        "--stdin-filename",
        "agentrl/new.py",
        "-",
    ]
    done = subprocess.run(
        ruff, input=line + "\n", cwd=REPO, capture_output=True, text=True, timeout=280
    )
    assert done.returncode == 1 and "TID251" in done.stdout, done.stdout + done.stderr


def test_the_names_an_author_needs_load_nothing_heavy() -> None:
    code = f"""
import json, sys
from agentrl import ToolEnv, tool, Task
print(json.dumps([name for name in {HEAVY!r} if name in sys.modules]))
"""
    assert json.loads(run_python(code)) == []


def test_listing_environments_loads_no_torch() -> None:
    code = (
        "import sys; from agentrl import registry; registry.describe_environment('calc-v0');"
        " print('torch' in sys.modules)"
    )
    assert run_python(code).strip() == "False"


def test_constraints_are_plain_pins_and_cover_every_dependency() -> None:
    lines = (REPO / "constraints.txt").read_text().splitlines()
    pins = dict(
        line.split("==") for line in lines if re.fullmatch(r"[A-Za-z0-9._-]+==[0-9A-Za-z.]+", line)
    )
    assert len(pins) == len(lines), "every line is name==version"
    assert pins["torch"] == "2.13.0"
    project = tomllib.loads((REPO / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    wanted = [*project["dependencies"], *extras["train"], *extras["docker"], *extras["dev"]]
    names = {normal(re.split(r"[\[<>=]", requirement)[0]) for requirement in wanted}
    assert names <= {normal(name) for name in pins}


def test_the_installed_parts_are_the_pinned_ones() -> None:
    pins = dict(line.split("==") for line in (REPO / "constraints.txt").read_text().splitlines())
    for name in ("torch", "transformers", "trl", "gymnasium", "pydantic", "typer", "ruff", "mypy"):
        assert version(name).split("+")[0] == pins[name], f"{name}: run `make setup` again"


def normal(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()

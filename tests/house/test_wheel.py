"""The built wheel holds real code in place of links, and works with the core dependencies alone: no
torch.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import venv
import zipfile
from importlib.metadata import Distribution, distribution
from pathlib import Path

import pytest
from packaging.requirements import Requirement

REPO = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel, built offline with the installed hatchling."""
    folder = tmp_path_factory.mktemp("wheel")
    command = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(folder)]
    done = subprocess.run(command, cwd=REPO, capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stdout + done.stderr
    (built,) = folder.glob("*.whl")
    return built


@pytest.fixture(scope="module")
def place(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A virtual environment that sees the wheel, its core dependencies, and nothing else."""
    folder = tmp_path_factory.mktemp("core") / "venv"
    venv.create(folder, with_pip=False, symlinks=True)
    (packages,) = folder.glob("lib/python*/site-packages")
    for name in core_dependencies():
        link(distribution(name), packages)
    pip = [sys.executable, "-m", "pip", "--python", str(folder / "bin/python"), "install", "-q"]
    options = ["--no-deps", "--no-index", "--no-compile", "--disable-pip-version-check"]
    done = subprocess.run([*pip, *options, str(wheel)], capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stderr
    return folder


def core_dependencies() -> set[str]:
    """What a plain `pip install agentrl` brings: the requirements without extras, and theirs."""
    found: set[str] = set()
    due = ["agentrl"]
    while due:
        for line in distribution(due.pop()).requires or ():
            requirement = Requirement(line)
            wanted = requirement.marker is None or requirement.marker.evaluate({"extra": ""})
            if wanted and requirement.name not in found:
                found.add(requirement.name)
                due.append(requirement.name)
    return found


def link(dist: Distribution, packages: Path) -> None:
    """Make one installed distribution visible in another site-packages folder."""
    tops = {file.parts[0] for file in dist.files or () if not file.parts[0].startswith("..")} - {
        "__pycache__"
    }
    for top in tops:
        source = Path(str(dist.locate_file(top)))
        if source.exists() and not (packages / top).exists():
            (packages / top).symlink_to(source)


def run(place: Path, *command: str) -> subprocess.CompletedProcess[str]:
    """Run a program of the environment, away from the checkout."""
    env = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
    program = [str(place / "bin" / command[0]), *command[1:]]
    return subprocess.run(program, cwd=place, env=env, capture_output=True, text=True, timeout=280)


def test_the_wheel_holds_every_file_of_the_rooms_and_one_name(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        sizes = {item.filename: item.file_size for item in archive.infolist()}
    ours = {name for name in sizes if ".dist-info/" not in name}
    assert {name.partition("/")[0] for name in sizes} == {
        "agentrl",
        f"agentrl-{version()}.dist-info",
    }
    for folder in ("agentrl", "envs", "sandboxes", "trainers", "verifiers"):
        for path in (REPO / folder).rglob("*"):
            if path.resolve() != path or not path.is_file() or "__pycache__" in path.parts:
                continue
            inside = path.relative_to(REPO / "agentrl" if folder == "agentrl" else REPO).as_posix()
            assert sizes.get(f"agentrl/{inside}") == path.stat().st_size, (
                f"{inside} is not in the wheel"
            )
    for data in (
        "report/templates/report.js",
        "envs/data/",
        "sandboxes/supervisor/",
        "verifiers/code/runner/",
    ):
        assert any(name.startswith(f"agentrl/{data}") for name in ours), f"no {data} in the wheel"


def test_the_installed_wheel_has_no_bare_names_and_no_torch(place: Path) -> None:
    code = """
import importlib.util
import agentrl.envs.calc, agentrl.sandboxes, agentrl.verifiers.base
print(agentrl.envs.calc.__file__)
names = ("envs", "sandboxes", "trainers", "verifiers")
names += ("torch", "transformers", "trl", "docker", "click")
print([name for name in names if importlib.util.find_spec(name)])
"""
    done = run(place, "python", "-c", code)
    assert done.returncode == 0, done.stderr
    file, names = done.stdout.splitlines()
    assert Path(file).is_relative_to(place) and names == "[]"


def test_gymnasium_knows_our_environments_and_the_licence_is_there(
    place: Path, wheel: Path
) -> None:
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
        (points,) = (
            archive.read(name).decode() for name in names if name.endswith("entry_points.txt")
        )
    assert any(name.endswith(".dist-info/licenses/LICENSE") for name in names)
    assert "gymnasium" not in points, "gymnasium reads no entry points"
    for imports in ("import agentrl, gymnasium", "import gymnasium, agentrl"):
        done = run(
            place,
            "python",
            "-c",
            f"{imports}; print(gymnasium.make('agentrl/calc-v0').reset(seed=0)[0])",
        )
        assert done.returncode == 0 and done.stdout.strip(), done.stderr


def test_core_dependencies_are_enough_to_list_check_and_evaluate(place: Path) -> None:
    rows = run(place, "agentrl", "list", "--json")
    assert rows.returncode == 0, rows.stderr
    assert {"bugfix-v0", "calc-v0", "code-v0"} <= {
        row["id"] for row in json.loads(rows.stdout)["environments"]
    }
    checked = run(place, "agentrl", "check", "calc-v0", "--json")
    assert checked.returncode == 0, checked.stdout + checked.stderr
    scored = run(
        place, "agentrl", "eval", "calc-v0", "--policy", "oracle", "--limit", "4", "--json"
    )
    assert scored.returncode == 0, scored.stderr
    assert json.loads(scored.stdout.splitlines()[-1])["pass_at"]["1"] == 1.0


def test_what_needs_torch_says_which_extra_has_it(place: Path) -> None:
    (place / "run.toml").write_text('env = "calc-v0"\nmodel = "nowhere"\n')
    for command in (
        ("demo",),
        ("train", "run.toml"),
        ("eval", "calc-v0", "--policy", "hf:nowhere", "--limit", "1"),
    ):
        done = run(place, "agentrl", *command)
        assert done.returncode == 2, f"{command}: {done.stderr}"
        assert "agentrl[train]" in done.stderr and len(done.stderr.splitlines()) == 1, (
            f"{command}: {done.stderr}"
        )


def version() -> str:
    found = re.search(r'^version = "(.+)"$', (REPO / "pyproject.toml").read_text(), re.MULTILINE)
    assert found
    return found[1]

"""Every command with good input: one JSON object as the last line, and words for people."""

import json
import math
import subprocess
import sys
from pathlib import Path

import pytest
from helpers import last_json, run_cli

from agentrl.trainers.algorithms.recipes import PARTS, RECIPES, recipe


def test_the_program_itself_runs_and_is_quick(tmp_path):
    out = run_cli("list", "--json")
    assert out.returncode == 0 and out.stderr == ""
    rows = last_json(out.stdout)["environments"]
    assert {"bugfix-v0", "calc-v0", "code-v0"} <= {row["id"] for row in rows}
    for row in rows:
        assert {"id", "version", "tasks", "sandbox"} <= row.keys()
    heavy = ("torch", "transformers", "gymnasium", "docker")
    program = (
        f"import sys, agentrl.cli.app; print([name for name in {heavy} if name in sys.modules])"
    )
    out = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    )
    assert out.stdout.strip() == "[]"


def test_list_for_people(run):
    code, out, err = run("list")
    assert code == 0 and err == "" and "calc-v0" in out and "endless" in out


def test_doctor(run):
    code, out, _ = run("doctor", "--json")
    parts = last_json(out)["parts"]
    assert code == 0 and {"python", "bubblewrap", "docker", "torch", "vllm", "gpu"} <= parts.keys()
    assert all(part["ok"] in (True, False) and part["detail"] for part in parts.values())
    found = "tried with" if parts["vllm"]["ok"] else "`make setup-vllm`"
    assert found in parts["vllm"]["detail"]
    code, out, _ = run("doctor")
    assert (
        code == 0
        and "python" in out
        and all(line.startswith(("ok ", "missing ")) for line in out.splitlines())
    )


def test_new_then_check_then_eval(run, tmp_path):
    code, out, _ = run("new", "letter-count", "--out", tmp_path, "--json")
    file, test = last_json(out)["files"]
    assert code == 0 and file.endswith("letter_count.py") and test.endswith("test_letter_count.py")
    assert run("check", f"{file}:LetterCount", "--json")[0] == 0
    assert run("audit", f"{file}:LetterCount", "--tasks", "2", "--json")[0] == 0
    code, out, _ = run("eval", f"{file}:LetterCount", "--limit", "5", "--json")
    assert code == 0 and last_json(out)["pass_at"] == {"1": 1.0}
    code, _, err = run("new", "letter-count", "--out", tmp_path)
    assert code == 2 and "exists already" in err


def hints(out: str) -> list[str]:
    return [
        line.removeprefix("try it: ") for line in out.splitlines() if line.startswith("try it: ")
    ]


@pytest.mark.parametrize("activated", [True, False])
def test_the_hints_of_new_work_as_they_stand(run, tmp_path, monkeypatch, activated):
    programs, plain = str(Path(sys.executable).parent), "/usr/bin:/bin"
    monkeypatch.setenv("PATH", f"{programs}:{plain}" if activated else plain)
    monkeypatch.chdir(tmp_path)
    code, out, _ = run("new", "letter-count")
    assert code == 0
    check, test = hints(out)
    assert check.endswith("agentrl check letter_count.py:LetterCount")
    assert test.endswith("pytest test_letter_count.py") and test.startswith("pytest") == activated
    for command in (check, test):
        done = subprocess.run(
            command, shell=True, capture_output=True, text=True, timeout=280, check=False
        )
        assert done.returncode == 0, done.stdout + done.stderr


def test_version(run):
    from agentrl import __version__

    assert run("--version") == (0, f"agentrl {__version__}\n", "")


def test_the_help_of_limit_promises_no_end_of_what_has_none(run):
    code, out, _ = run("eval", "--help")
    text = " ".join(out.replace("│", " ").split())
    assert code == 0 and "(0 = all; only for finite splits)" in text


def test_view_and_convert_print_json(run, tmp_path, mine):
    source = tmp_path / "mbpp.jsonl"
    row = {
        "task_id": 1,
        "text": "Double.",
        "code": "def f(x):\n    return 2 * x",
        "test_list": ["assert f(2) == 4"],
    }
    source.write_text(json.dumps({**row, "test_setup_code": "", "challenge_test_list": []}) + "\n")
    code, out, err = run("convert", "mbpp", source, tmp_path / "tasks.jsonl", "--json")
    assert code == 0 and last_json(out)["tasks"] == 1, err
    run("eval", mine, "--out", tmp_path / "run")
    code, out, err = run("view", tmp_path / "run", "--json")
    assert code == 0 and "<html" in Path(last_json(out)["report"]).read_text().lower(), err


def test_recipes_for_people_and_for_programs(run):
    code, out, err = run("recipes")
    assert code == 0 and err == "" and len(out.splitlines()) == len(RECIPES) + 1
    assert any(line.split()[:3] == ["dapo", "grpo", "ppo_clip"] for line in out.splitlines())
    code, out, err = run("recipes", "--json")
    assert {row["name"] for row in last_json(out)["recipes"]} == RECIPES.keys()


@pytest.mark.parametrize("name", RECIPES)
def test_a_recipe_says_all_that_can_be_set(run, name):
    code, out, err = run("recipes", name)
    found = last_json(run("recipes", name, "--json")[1])
    assert code == 0 and err == "" and found["paper"] in out
    options = {one["name"] for part in found["parts"] for one in part["options"]}
    assert options == recipe(name).options.keys()
    assert all(part["formula"] and part["formula"] in out for part in found["parts"])
    assert "http" not in "".join(part["formula"] for part in found["parts"])
    critic = {one["name"] for one in found["settings"] if one["name"].startswith("critic.")}
    assert bool(critic) == ("critic" in recipe(name).needs)
    for one in (*found["settings"], *(one for part in found["parts"] for one in part["options"])):
        assert f"{one['name']} " in out and one["type"] in out
    for part in found["additions"]:  # each option reaches its part, in any recipe
        given = {one["name"]: one["default"] or 0.5 for one in part["options"]}
        given = {key: math.inf if value == "inf" else value for key, value in given.items()}
        there = getattr(recipe(name, **given), part["place"])
        assert part["name"] in out and part["name"] in [one.label for one in there]
    for place, names in found["exchanges"].items():
        assert all(f" {other}" in out for other in names) and names == list(dict.fromkeys(names))
        assert set(names) <= PARTS[place].keys()

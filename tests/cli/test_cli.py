"""The command line: one JSON object as the last line, one sentence for bad input, never a
traceback.
"""

import json
import math
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from helpers import children, last_json, make_task, process, run_cli, tiny_model_folder, wait_for

from agentrl.cli import app as cli
from agentrl.cli import train as train_command
from agentrl.cli.measure.evaluate import exit_code
from agentrl.records.taskfile import write_tasks
from agentrl.trainers.algorithms.catalogue.places import PLACES, label
from agentrl.trainers.algorithms.recipes import RECIPES, recipe

ENV = """
from agentrl import Limits, Task, ToolEnv, tool
from agentrl.verifiers.answers.text import exact_match

class Mine(ToolEnv):
    \"\"\"Say the word.\"\"\"

    id = "mine-v0"
    verifier = exact_match()
    limits = Limits(turns=2, turn_tokens=4)

    def tasks(self, split, seed):
        for word in ("one", "two", "three"):
            yield Task(id=f"{split}-{word}", instruction=f"{split}: say {word}",
                       hidden={"answer": word}, oracle={"answer": ORACLE})

    @tool
    async def look(self) -> str:
        \"\"\"Look.\"\"\"
        return self.task.instruction
"""


@pytest.fixture
def run(monkeypatch, capsys):
    def call(*arguments) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["agentrl", *map(str, arguments)])
        code = 0
        try:
            cli.main()
        except SystemExit as stop:
            code = stop.code or 0
        captured = capsys.readouterr()
        return code, captured.out, captured.err

    return call


@pytest.fixture
def mine(tmp_path):
    file = tmp_path / "mine.py"
    file.write_text(ENV.replace("ORACLE", "word"))
    return f"{file}:Mine"


# Good input


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


def test_check(run, mine, tmp_path):
    code, out, _ = run("check", mine, "--json")
    found = last_json(out)
    assert code == 0 and found["ok"] is True and len(found["rules"]) >= 9
    (tmp_path / "mine.py").write_text(ENV.replace("ORACLE", "'wrong'"))
    code, out, _ = run("check", mine, "--json")
    found = last_json(out)
    assert code == 1 and found["ok"] is False
    assert [rule["rule"] for rule in found["rules"] if not rule["ok"]] == [
        "the oracle passes every task"
    ]
    code, out, err = run("check", mine)
    assert code == 1 and "BROKEN  the oracle passes every task: " in out and err == ""


def test_eval(run, mine, tmp_path):
    code, out, err = run(
        "eval", mine, "--samples", "2", "--k", "1,2", "--out", tmp_path / "run", "--json"
    )
    result = last_json(out)
    assert code == 0 and result["pass_at"] == {"1": 1.0, "2": 1.0} and err == ""
    needed = (
        "pass_at ci95 n_tasks n_refused n_episodes n_failed_infra mean_reward side_effects cost"
        " end_reasons"
    )
    assert set(needed.split()) <= result.keys()
    assert json.loads((tmp_path / "run" / "eval.json").read_text()) == result
    code, out, _ = run("eval", mine, "--policy", "noop")
    assert code == 0 and "pass@1 0.0000" in out and "endings answered 3" in out


def test_a_tool_that_always_fails_is_seen_by_check_and_eval(run, tmp_path):
    file = tmp_path / "mine.py"
    calls = (
        '"calls": [{"name": "look", "arguments": {}}, {"name": "fine", "arguments": {}}], "answer":'
        " word"
    )
    fine = (
        '\n    @tool\n    def fine(self) -> str:\n        """Do well."""\n        return "well"\n'
    )
    broken = (
        ENV.replace("self.task.instruction", "self.task.metadata['wurd']").replace(
            "turns=2", "turns=3"
        )
        + fine
    )
    file.write_text(broken.replace('"answer": ORACLE', calls))
    code, out, _ = run("check", f"{file}:Mine", "--json")
    wrong = {rule["rule"]: rule["problem"] for rule in last_json(out)["rules"] if not rule["ok"]}
    assert code == 1 and list(wrong) == ["no tool fails on every call of the oracle"]
    (problem,) = wrong.values()
    assert (
        "tool 'look' failed on 12 of 12 calls" in problem
        and "KeyError: 'wurd'" in problem
        and "fine" not in problem
    )
    code, out, _ = run("eval", f"{file}:Mine")
    assert code == 0 and "failed tool calls 3 of 6: look 3 of 3\n" in out and "pass@1 1.0000" in out
    code, out, _ = run("eval", f"{file}:Mine", "--json")
    assert last_json(out)["tools"] == {
        "look": {"calls": 3, "errors": 3, "timeouts": 0},
        "fine": {"calls": 3, "errors": 0, "timeouts": 0},
    }


def test_eval_prints_what_it_cost(run, mine):
    code, out, _ = run("eval", mine)
    assert code == 0 and "\ncost turns 3, tool calls 0, " in out and "tokens" not in out
    assert "failed tool calls" not in out and " s (all episodes added up)\n" in out
    code, out, _ = run("eval", mine, "--policy", f"hf:{tiny_model_folder()}")
    assert code == 0 and "sampled tokens 12, other tokens " in out


@pytest.mark.parametrize(
    ("old", "new", "why"),
    [
        ("def look(self)", "def look(self, where)", "parameter 'where' needs a type"),
        ('"""Look."""', "", "tool 'look' needs a docstring"),
    ],
)
def test_check_reports_a_tool_that_cannot_be_one_as_a_broken_rule(run, tmp_path, old, new, why):
    file = tmp_path / "mine.py"
    file.write_text(ENV.replace("ORACLE", "word").replace(old, new))
    code, out, err = run("check", f"{file}:Mine")
    assert (
        (code, err) == (1, "")
        and out.startswith("BROKEN  its tools are typed and documented: ")
        and why in out
    )
    code, out, _ = run("check", f"{file}:Mine", "--json")
    assert (
        code == 1 and last_json(out)["ok"] is False and why in last_json(out)["rules"][0]["problem"]
    )
    code, out, err = run("eval", f"{file}:Mine")
    assert (code, out) == (2, "") and why in err and err.count("\n") == 1


def test_eval_when_everything_fails(run, tmp_path):
    file = tmp_path / "ill.py"
    file.write_text(
        ENV.replace("ORACLE", "word").replace(
            "@tool", "async def setup(self):\n        raise OSError\n\n    @tool"
        )
    )
    code, out, err = run("eval", f"{file}:Mine")
    assert (
        code == 1
        and "pass@1 unknown" in out
        and "failed by infrastructure 3" in out
        and "Traceback" not in err
    )
    code, out, _ = run("eval", f"{file}:Mine", "--json")
    assert last_json(out)["pass_at"] == {"1": None} and last_json(out)["n_failed_infra"] == 3


def test_eval_of_a_model_and_a_task_file(run, mine, tmp_path, bubblewrap):
    code, out, _ = run("eval", mine, "--policy", f"hf:{tiny_model_folder()}", "--json")
    assert code == 0 and last_json(out)["pass_at"] == {"1": 0.0}
    hidden = {"entry_point": "f", "cases": [{"args": [2], "expected": 4}]}
    oracle = {"files": {"solution.py": "def f(x):\n    return 2 * x\n"}}
    write_tasks(tmp_path / "t.jsonl", [make_task("a", hidden=hidden, oracle=oracle)])
    code, out, _ = run(
        "eval", "code-v0", "--tasks", tmp_path / "t.jsonl", "--sandbox", "bubblewrap", "--json"
    )
    assert code == 0 and last_json(out)["pass_at"] == {"1": 1.0}


def test_programs_of_agents_run_without_a_boundary_only_where_somebody_says_so(run):
    for command in (["eval", "code-v0"], ["check", "code-v0"]):
        code, out, err = run(*command, "--sandbox", "process")
        assert (
            (code, out) == (2, "") and "no boundary" in err and "--sandbox process --trust" in err
        )
    code, out, _ = run("eval", "code-v0", "--sandbox", "process", "--trust", "--json")
    assert code == 0 and last_json(out)["pass_at"] == {"1": 1.0}


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
    assert code == 0 and "0: all, where the split ends" in " ".join(out.replace("│", " ").split())


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
        assert part["name"] in out and part["name"] in map(label, there)
    for place, names in found["exchanges"].items():
        assert all(f" {other}" in out for other in names) and names == list(dict.fromkeys(names))
        assert set(names) <= PLACES[place].keys()
    for one in found["deviations"]:
        assert one["differs"] in out and one["why"] in out and one["settings"] in out


def test_a_config_of_trl_becomes_a_file_that_can_be_planned(run, tmp_path):
    source, target = tmp_path / "args.json", tmp_path / "calc.toml"
    source.write_text('{"beta": 0.04, "top_p": 0.9, "max_steps": 7, "max_grad_norm": 0.0}')
    code, out, err = run("train", "--from-trl", source)
    assert code == 0 and "kl_coef = 0.04" in out and "# - top_p=0.9: " in out, err
    told = ("--set", "env=calc-v0", "--set", f"model={tiny_model_folder()}")
    code, out, err = run("train", target, "--from-trl", source, *told)
    assert code == 0 and out.startswith(f"wrote {target}: ") and "1 have no match" in out, err
    code, out, err = run("train", target, "--plan", "--json")
    assert code == 0 and last_json(out)["peak_bytes"] > 0, err
    code, out, err = run("train", "--from-trl", source, "--json")
    settings = last_json(out)["settings"]
    assert settings["steps"] == 7 and last_json(out)["file"] is None
    assert settings["optimizer"]["max_grad_norm"] == "inf" and "Infinity" not in out


# Bad input


def bad_line(tmp_path):
    (tmp_path / "bad.jsonl").write_text(
        '{"id": "a", "instruction": "x"}\n{"id": "b", "instructon": "x"}\n'
    )
    return tmp_path / "bad.jsonl"


def no_tokenizer(tmp_path):
    shutil.copytree(tiny_model_folder(), tmp_path / "model")
    for file in (tmp_path / "model").glob("*token*"):
        file.unlink()
    return tmp_path / "model"


def mine_file(tmp_path):
    (tmp_path / "mine.py").write_text(ENV.replace("ORACLE", "word"))
    return tmp_path / "mine.py"


def syntax_error(tmp_path):
    (tmp_path / "bad.py").write_text("def f(:\n")
    return tmp_path / "bad.py"


@pytest.mark.parametrize(
    ("arguments", "part"),
    [
        (["eval", "calk-v0"], "did you mean 'calc-v0'?"),
        (["check", "calk-v0"], "did you mean 'calc-v0'?"),
        (["eval", "code-v0", "--tasks", bad_line], "bad.jsonl, line 2: field instruct"),
        (["eval", "code-v0", "--tasks", "/no/such.jsonl"], "/no/such.jsonl: there is no such file"),
        (["eval", "calc-v0", "--tasks", "/x", "--limit", "1"], "tasks_file"),
        (["eval", "calc-v0", "--limit", "1", "--policy", "hf:/no/such"], "/no/such does not exist"),
        (
            ["eval", "calc-v0", "--limit", "1", "--policy", ("hf:{}", no_tokenizer)],
            "has no tokenizer",
        ),
        (["eval", "calc-v0", "--limit", "1", "--k", "4"], "--k 4 must be from 1 to --samples 1"),
        (["eval", "calc-v0", "--limit", "1", "--k", "x"], "--k 'x'"),
        (["eval", "calc-v0", "--limit", "1", "--policy", "orakel"], "--policy 'orakel' is unknown"),
        (["eval", "calc-v0", "--limit", "1", "--policy", "vllm:/no/such"], "does not exist"),
        (
            ["eval", "calc-v0", "--policy", "hf:m", "--engine-option", "dtype=auto"],
            "--engine-option dtype=auto is a setting of vLLM and does nothing for --policy hf:m",
        ),
        (
            ["eval", "calc-v0", "--policy", "vllm:m", "--engine-option", "max_model_len=-1"],
            "--engine-option max_model_len= -1: input should be greater",
        ),
        (
            ["eval", "calc-v0", "--policy", "vllm:m", "--engine-option", "own_weights=true"],
            "own_weights=true is no setting of 'vllm'",
        ),
        (["demo", "--engine", "vlm"], "name='vlm': must be 'transformers' or 'vllm'"),
        (
            ["eval", "calc-v0", "--limit", "1", "--policy", "openai:m@ftp://x"],
            "base_url='ftp://x' is no address",
        ),
        (["eval", "calc-v0", "--limit", "1", "--policy", "openai:@http://x"], "model=''"),
        (
            ["eval", "calc-v0", "--limit", "1", "--policy", "openai:m@http://x", "--price", "1"],
            "--price '1'",
        ),
        (["eval", "calc-v0", "--limit", "1", "--set", "operatoins=3"], "operatoins"),
        (["eval", "calc-v0", "--limit", "1", "--set", "operations"], "write it as key=value"),
        (["eval", "calc-v0", "--limit", "1", "--set", "operations=7"], "operations=7"),
        (["eval", "calc-v0", "--limit", "1", "--split", "dev"], "split='dev'"),
        (["eval", "calc-v0", "--limit", "1", "--temperature", "-1"], "--temperature -1"),
        (["eval", "calc-v0", "--limit", "1", "--out", "/proc/none"], "/proc/none"),
        (
            ["eval", "calc-v0", "--limit", "two"],
            "agentrl: --limit 'two' must be a whole number, as in --limit 8\n",
        ),
        (
            ["eval", "calc-v0", "--temperature", "hot"],
            "'hot' must be a number, as in --temperature 0.7\n",
        ),
        (
            ["eval", "calc-v0", "--limit", "1", "--set", "foo=1"],
            "'foo': its settings are operations=2, largest=99",
        ),
        (
            ["eval", "bugfix-v0", "--limit", "1", "--set", "foo=1"],
            "'foo': its settings are functions, ",
        ),
        (
            ["eval", "bugfix-v0", "--limit", "1", "--set", "functions=x"],
            "functions='x' must be a whole number",
        ),
        (["eval", "calc-v0", "--limt", "1"], "--limt"),
        (["eval", "calc-v0"], "--limit"),
        (["eval", "bugfix-v0", "--limit", "1", "--sandbox", "dokker"], "sandbox='dokker'"),
        (["check", "bugfix-v0", "--sandbox", "dokker"], "sandbox='dokker' is unknown"),
        (["eval", "bugfix-v0", "--limit", "1", "--split", "dev"], "dev"),
        (["eval", "bugfix-v0", "--limit", "1", "--trust"], "--trust goes with --sandbox process"),
        (["check", ("{}:Env", syntax_error)], "cannot be loaded: SyntaxError"),
        (["check", "nowhere.py:Env"], "'nowhere.py' does not exist"),
        (["check", ("{}", mine_file)], "mine.py:Mine\n"),
        (["check", ("{}:Yours", mine_file)], "mine.py:Mine\n"),
        (["check", ("{}", syntax_error)], "bad.py:ClassName\n"),
        (["check", "nowhere.py"], "'nowhere.py' does not exist"),
        (["check", "calc-v0", "--tasks", "0"], "--tasks '0' must be at least 1\n"),
        (["new", "Bad Name"], "lower-case"),
        (["new", "x", "--out", "/proc/none"], "/proc/none"),
        (["view", "/no/such"], "/no/such does not exist"),
        (["view", ("{}", mine_file)], "mine.py is a file: give the run folder"),
        (["view", ("{}/runs/demo-0", str)], "does not exist: make it with `make demo`\n"),
        (["view", ("{}/runs/demo-3", str)], "does not exist: make it with `make demo SEED=3`\n"),
        (["convert", "nosuch", "a", "b"], "nosuch"),
        (["train", "/no/such.toml"], "/no/such.toml"),
        (["train"], "CONFIG is missing"),
        (["train", "--from-trl", "/no/such.json"], "--from-trl /no/such.json does not exist"),
        (["train", ("{}", mine_file), "--from-trl", "/no/such.json"], "mine.py exists"),
        (["recipes", "grpoo"], "there is no recipe 'grpoo'; did you mean 'grpo'?"),
        (["check", "hf:"], "the name of the model is empty"),
        (["check", "hf:m", "--parser", "hermess"], "did you mean 'hermes'?"),
        (["eval", "calc-v0", "--limit", "0"], "say how many, as in --limit 100"),
        (["compare", "/no/a", "/no/b"], "/no/a holds no eval.json"),
        (["suite", "/no/such.toml"], "suite /no/such.toml does not exist"),
        (["export", "/no/such", "xml", "x"], "format 'xml' is unknown"),
        (["eval", "calc-v0", "--limit", "2", "--price", "-1,2"], "--price -1,2 must be"),
        (["eval", "calc-v0", "--limit", "2", "--k", "2"], "--k 2 must be from 1 to --samples 1"),
        (["eval", "calc-v0", "--limit", "2", "--user", "noop"], "calc-v0 has no user"),
        (["audit", "calc-v0", "--limit", "0"], "--limit '0' must be at least 1\n"),
        (["nosuch"], "there is no command 'nosuch': commands are doctor, "),
        (["evaluate"], "there is no command 'evaluate': did you mean 'eval'?"),
        (["images", "built"], "there is no command 'built': did you mean 'build'?"),
    ],
)
def test_bad_input_is_one_sentence_and_exit_code_2(run, tmp_path, arguments, part):
    words = []
    for word in arguments:
        form, make = word if isinstance(word, tuple) else ("{}", word)
        words.append(form.format(make(tmp_path)) if callable(make) else make)
    for extra in ([], ["--json"]):
        code, out, err = run(*words, *extra)
        assert code == 2, (out, err)
        assert part in err and out == ""
        assert err.startswith("agentrl: ") and err.count("\n") == 1 and "Traceback" not in err


def test_the_same_in_a_process_of_its_own():
    out = run_cli("eval", "calk-v0", "--json")
    assert (out.returncode, out.stdout) == (2, "")
    assert out.stderr == "agentrl: environment 'calk-v0' is unknown: did you mean 'calc-v0'?\n"


def test_a_broken_machine_is_exit_code_1(run, monkeypatch):
    from agentrl import registry
    from agentrl.errors import SandboxLost

    def broken():
        raise SandboxLost("the host is on fire")

    monkeypatch.setattr(registry, "environment_ids", broken)
    code, out, err = run("list")
    assert (code, out, err) == (1, "", "agentrl: SandboxLost: the host is on fire\n")


def test_help_and_no_command(run):
    code, out, err = run("--help")
    assert code == 0 and "eval" in out
    code, out, err = run()
    assert code in (0, 2) and "eval" in out + err
    code, out, err = run("images")
    assert code == 0 and "build" in out and err == ""


def test_an_interrupt_ends_quietly_and_the_run_can_go_on(tmp_path, bubblewrap):
    before = children()
    command = [
        sys.executable,
        "-m",
        "agentrl.cli",
        "eval",
        "bugfix-v0",
        "--limit",
        "400",
        "--out",
        tmp_path,
        "--json",
    ]
    records = tmp_path / "episodes.jsonl"
    with process(*command, stderr=subprocess.PIPE, text=True) as child:
        wait_for(
            lambda: (
                child.poll() is not None or (records.exists() and records.stat().st_size >= 20_000)
            ),
            200,
        )
        child.send_signal(signal.SIGINT)
        out, err = child.communicate(timeout=200)
    found = last_json(out)  # what was played can be used
    assert child.returncode == 130 and err.endswith("agentrl: interrupted\n")
    assert found["stopped"] == "interrupted" and found["n_missing"] == 400 - found["n_episodes"]
    wait_for(lambda: not children() - before)
    done = records.read_bytes().count(b"\n")
    assert 0 < done < 400


def test_training_tells_nobody(monkeypatch):
    monkeypatch.delenv("HF_HUB_DISABLE_TELEMETRY", raising=False)
    with train_command.training_parts():
        assert os.environ["HF_HUB_DISABLE_TELEMETRY"] == "1"
    monkeypatch.setenv("HF_HUB_DISABLE_TELEMETRY", "0")
    with train_command.training_parts():
        assert os.environ["HF_HUB_DISABLE_TELEMETRY"] == "0"


LOSES = """
from agentrl import Score, Task, ToolEnv

class Loses(ToolEnv):
    id = "loses-v0"

    def tasks(self, split, seed):
        for number in range(4):
            yield Task(id=str(number), instruction="x", hidden={"a": number})

    async def verifier(submission):
        return Score.failed("away") if submission.task.id == "1" else Score(1.0)
"""


@pytest.mark.parametrize(("allowed", "code"), [((), 1), (("--allow-lost", "1"), 0)])
def test_lost_episodes_are_not_passed_over(run, tmp_path, allowed, code):
    (tmp_path / "loses.py").write_text(LOSES)
    got, out, err = run("eval", f"{tmp_path / 'loses.py'}:Loses", "--sandbox", "process", *allowed)
    assert (got, "pass@1 1.0000" in out) == (code, True)
    assert ("failed 1 of 4 episodes" in err and "--allow-lost 1" in err) == bool(code)


def test_a_full_disk_is_one_sentence(run, monkeypatch):
    import errno

    from agentrl.evaluation import run as evaluation

    def full(*args):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(evaluation, "evaluate", full)
    code, _, err = run("eval", "calc-v0", "--limit", "1")
    assert code == 1 and len(err.strip().splitlines()) == 1 and "the disk is full" in err


@pytest.mark.parametrize(
    ("result", "code", "says"),
    [
        ({}, 0, ""),
        ({"n_failed_infra": 2}, 1, "infrastructure failed 2 of 9 episodes"),
        ({"n_missing": 3, "stopped": "interrupted"}, 130, "interrupted: 3 samples"),
        ({"n_missing": 3, "stopped": "max_cost"}, 1, "max-cost: 3 samples were not played"),
    ],
)
def test_an_evaluation_that_is_not_whole_says_so_by_its_exit_code(capsys, result, code, says):
    whole = {"n_failed_infra": 0, "n_episodes": 9, "n_missing": 0, "stopped": ""}
    assert exit_code(whole | result, 0) == code
    assert says in capsys.readouterr().err

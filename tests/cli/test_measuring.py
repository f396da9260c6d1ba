"""`agentrl check` and `agentrl eval`: what they say of an environment, and of a run that failed."""

import json

import pytest
from cli_cases import ENV
from helpers import last_json, make_task, tiny_model_folder

from agentrl.cli.evaluate import exit_code
from agentrl.records.taskfile import write_tasks


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

"""`agentrl regrade`: old and new score side by side; and nothing hidden in what a run leaves."""

from __future__ import annotations

import asyncio
import io
import json
import re

import pytest
from broken_envs import Sound
from helpers import Echo, last_json, loop_threads, make_task, run_cli, wait_for
from rich.console import Console

from agentrl.errors import ConfigError
from agentrl.evaluation.regrade import RegradePlan, regrade
from agentrl.evaluation.run import EvalPlan, evaluate
from agentrl.records.files import read_episodes
from agentrl.records.taskfile import read_tasks, write_tasks
from agentrl.registry import factory, register
from agentrl.report import display
from agentrl.report.page import write_report
from agentrl.types import Score


def lines(path) -> list[dict]:
    return [json.loads(line) for line in path.read_text().splitlines()]


@pytest.mark.parametrize("env_id", ["bugfix-v0", "calc-v0", "code-v0"])
@pytest.mark.parametrize("policy", ["oracle", "noop"])
def test_a_run_of_what_ships_keeps_its_scores(env_id, policy, bubblewrap, tmp_path):
    evaluate(EvalPlan(factory(env_id), policy, limit=3, samples=2, seed=5, out=tmp_path))
    before = (tmp_path / "episodes.jsonl").read_bytes()
    told: list[tuple[int, int]] = []
    result = regrade(RegradePlan(tmp_path), lambda done, total: told.append((done, total)))
    assert told == [(done, 6) for done in range(7)]
    assert (result["n_episodes"], result["n_regraded"], result["n_changed"], result["skipped"]) == (
        6,
        6,
        0,
        {},
    )
    assert result["mean_reward"] == dict.fromkeys(("old", "new"), float(policy == "oracle"))
    assert (tmp_path / "episodes.jsonl").read_bytes() == before
    wait_for(lambda: not loop_threads())


@pytest.fixture
def code_run(bubblewrap, tmp_path):
    tasks = [
        make_task(
            name,
            instruction=f"write {name}",
            hidden={"entry_point": "f", "cases": [{"args": [2], "expected": 4}]},
            oracle={"files": {"solution.py": "def f(x):\n    return x * x\n"}},
        )
        for name in ("a", "b", "c")
    ]
    write_tasks(tmp_path / "tasks.jsonl", tasks)
    evaluate(
        EvalPlan(
            factory("code-v0", tasks_file=str(tmp_path / "tasks.jsonl")),
            "oracle",
            out=tmp_path / "run",
        )
    )
    return tmp_path


def test_better_tests_change_the_scores_that_they_should(code_run):
    tasks = read_tasks(code_run / "tasks.jsonl")
    stricter = {"entry_point": "f", "cases": [{"args": [3], "expected": 6}]}
    other = tasks[2].model_copy(update={"instruction": "write something else"})
    write_tasks(
        code_run / "new.jsonl", [tasks[0], tasks[1].model_copy(update={"hidden": stricter}), other]
    )
    result = regrade(
        RegradePlan(code_run / "run", settings={"tasks_file": str(code_run / "new.jsonl")})
    )
    assert result["n_regraded"] == 2 and result["n_changed"] == 1
    assert result["skipped"] == {"its task has changed": 1} and result["mean_reward"] == {
        "old": 1.0,
        "new": 0.5,
    }
    (changed,) = result["changed"]
    assert changed["key"][2] == "b" and (changed["old"]["value"], changed["new"]["value"]) == (
        1.0,
        0.0,
    )
    assert changed["new"]["why"] == "0 of 1 hidden tests passed" and changed["new"]["parts"] == {
        "passed": 0.0
    }
    first = (code_run / "run/regrade.jsonl").read_text()
    write_tasks(code_run / "few.jsonl", [tasks[0]])
    again = regrade(
        RegradePlan(code_run / "run", settings={"tasks_file": str(code_run / "few.jsonl")})
    )
    assert again["out"].endswith("regrade-2.jsonl") and again["skipped"] == {
        "its task is not there any more": 2
    }
    assert (code_run / "run/regrade.jsonl").read_text() == first
    assert sorted(row["changed"] for row in lines(code_run / "run/regrade.jsonl")) == [False, True]


class Shaky(Echo):
    """Its verifier breaks on demand."""

    id = "shaky-v0"
    count = 2
    breaks = False
    takes_s = 0.0

    @staticmethod
    async def verifier(submission):
        if Shaky.breaks:
            raise OSError("the judge is out")
        await asyncio.sleep(Shaky.takes_s)
        return Score(1.0)


def test_a_broken_verifier_is_no_number_and_failed_episodes_are_left_out(tmp_path, monkeypatch):
    register(Shaky)
    evaluate(EvalPlan(Shaky, "oracle", out=tmp_path / "good"))
    monkeypatch.setattr(Shaky, "breaks", True)
    result = regrade(RegradePlan(tmp_path / "good"))
    assert (
        result["n_no_verdict"] == 2
        and result["n_changed"] == 2
        and result["mean_reward"]["new"] is None
    )
    assert "the judge is out" in lines(tmp_path / "good/regrade.jsonl")[0]["new"]["why"]
    evaluate(EvalPlan(Shaky, "oracle", out=tmp_path / "bad"))  # each was tried twice
    monkeypatch.setattr(Shaky, "breaks", False)
    assert regrade(RegradePlan(tmp_path / "bad"))["skipped"] == {"failed (verifier_error)": 4}


def test_a_verifier_has_the_time_that_its_environment_gives_it(tmp_path, monkeypatch):
    register(Shaky)
    evaluate(EvalPlan(Shaky, "oracle", out=tmp_path))
    monkeypatch.setattr(Shaky, "takes_s", 60.0)
    monkeypatch.setattr(Shaky, "verifier_s", 0.05)
    assert regrade(RegradePlan(tmp_path))["n_no_verdict"] == 2
    assert "within 0.05 s" in lines(tmp_path / "regrade.jsonl")[0]["new"]["why"]


def test_the_bar_counts_and_takes_a_label_as_it_is(monkeypatch):
    shown = io.StringIO()
    monkeypatch.setattr(display, "console", Console(file=shown, force_terminal=True, width=120))
    with display.count_bar("regrade runs/[/x]") as progress:
        progress(0, 2)
        progress(2, 2)
    assert "regrade runs/[/x]" in shown.getvalue() and "2/2" in shown.getvalue()


def test_the_command(tmp_path):
    run = tmp_path / "run"
    assert (
        run_cli("eval", "calc-v0", "--limit", "2", "--set", "operations=3", "--out", run).returncode
        == 0
    )
    done = run_cli("regrade", run, "--json")
    assert done.returncode == 0 and last_json(done.stdout)["n_changed"] == 0, done.stderr
    assert last_json(done.stdout)["n_regraded"] == 2
    assert "0 of 2 scores changed" in run_cli("regrade", run).stdout
    for words, why in (
        ([tmp_path], "holds no episodes.jsonl"),
        ([run, "--env", "calc-v9"], "unknown"),
    ):
        done = run_cli("regrade", *words)
        assert done.returncode == 2 and why in done.stderr
    with pytest.raises(ConfigError):
        regrade(RegradePlan(tmp_path / "nowhere"))


CANARY = "canary-9f7c1e"
FORMS = {
    "cases": {
        "entry_point": "f",
        "cases": [{"args": [2], "expected": CANARY}, {"args": [CANARY], "expected": 4}],
    },
    "check": {
        "entry_point": "f",
        "check": (
            f"def check(f):\n    assert f(2) == 5, '{CANARY}'\n    raise ValueError('{CANARY}')\n"
        ),
    },
    "tests": {
        "tests": {
            "test_a.py": f"from solution import f\ndef test_a():\n    assert f(2) == '{CANARY}'\n"
        }
    },
}


class Unread(Sound):
    """Tasks with a canary in their hidden part, and an agent that cannot know it."""

    id = "unread-v0"
    endless = True  # so that nothing is refused

    def tasks(self, split, seed):
        for name, hidden in FORMS.items():
            text = f"def f(x):\n    return {CANARY!r}\n"
            yield make_task(
                name,
                hidden=hidden,
                oracle={"files": {"solution.py": text}},
                files={"notes.txt": name},
            )

    def oracle_actions(self, task):
        return super().oracle_actions(
            task.model_copy(
                update={"oracle": {"files": {"solution.py": "def f(x):\n    return x * x\n"}}}
            )
        )


def test_no_hidden_value_is_in_what_a_run_leaves(bubblewrap, tmp_path):
    register(Unread)
    result = evaluate(EvalPlan(Unread, "oracle", limit=3, out=tmp_path))
    assert result["n_failed_infra"] == 0 and result["pass_at"]["1"] == 0
    assert regrade(RegradePlan(tmp_path))["n_regraded"] == 3
    write_report(tmp_path)
    for episode in read_episodes(tmp_path / "episodes.jsonl").values():
        assert re.fullmatch(r"0 of \d hidden tests passed.*", episode.score.why)
        assert (
            episode.score.parts.keys() <= {"passed", "isolated"}
            and episode.score.parts["passed"] == 0.0
        )
    files = [path for path in tmp_path.rglob("*") if path.is_file()]
    assert len(files) >= 5
    assert [path for path in files if CANARY in path.read_text()] == []

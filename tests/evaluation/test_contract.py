"""`agentrl check`: green for what ships and for what `agentrl new` writes, red for each broken
promise.
"""

import subprocess
import sys
import time

import pytest
from helpers import Echo, make_task

from agentrl.cli.scaffold import write_environment
from agentrl.errors import ConfigError
from agentrl.evaluation.contract import check_environment
from agentrl.evaluation.leaks import shown_secret
from agentrl.registry import factory
from agentrl.sandboxes import backends
from agentrl.tools import tool
from agentrl.types import BadCall, EndReason, Limits, Message, Score, ToolCall


def problems(env, **options) -> dict[str, str]:
    findings = check_environment(env, n_tasks=3, **options)
    assert len({finding.rule for finding in findings}) == len(findings)
    return {finding.rule: finding.problem for finding in findings if finding.problem}


@pytest.mark.parametrize("env_id", ["bugfix-v0", "calc-v0", "code-v0"])
def test_what_ships_keeps_the_contract(env_id, bubblewrap):
    assert problems(factory(env_id)) == {}


def test_a_fallback_is_said_once(monkeypatch, capsys):
    monkeypatch.setattr(backends, "missing", lambda: "no bubblewrap here")
    monkeypatch.setattr(backends, "docker_missing", lambda: "no docker here")
    assert problems(type("Sandboxed", (Good,), {"needs_sandbox": True})) == {}
    assert capsys.readouterr().err.count("falling back to the process sandbox") == 1
    assert problems(factory("calc-v0")) == {}
    assert capsys.readouterr().err == ""


class Good(Echo):
    """Splits of its own, and an oracle that calls tools."""

    def tasks(self, split, seed):
        for task in super().tasks(split, seed):
            yield task.model_copy(update={"instruction": f"{split} {task.id}"})


def test_a_sound_environment_passes():
    assert problems(Good) == {}


def broken(**members):
    return type("Broken", (Good,), members)


async def _always(submission):
    return Score(1.0)


async def _never(submission):
    return Score(0.0)


async def _ill(submission):
    raise KeyError("answer")


def _tasks(*rows):
    def tasks(self, split, seed):
        for row in rows:
            yield make_task(
                **{"hidden": {"answer": "yes"}, "oracle": {"answer": "yes"}, **row(split, seed)}
            )

    return tasks


SECRET = "def the_solution_of_this_task(values): return sorted(values)"
CLOCK = iter(range(10**6))


async def _clocked(self):
    self.moment = next(CLOCK)


def _prompt_of_moment(self):
    return [Message.user(str(self.moment))]


@pytest.mark.parametrize(
    ("env", "rule", "why"),
    [
        (broken(id="unversioned"), "its id ends in a version", "unversioned"),
        (broken(id=""), "its id ends in a version", "''"),
        (broken(verifier=_always), "doing nothing passes no task", "6 of 6"),
        (broken(verifier=_never), "the oracle passes every task", "12 of 12"),
        (broken(verifier=_ill), "the oracle passes every task", "KeyError: 'answer'"),
        (broken(tasks=_tasks()), "split 'train' has tasks", "it is empty"),
        (
            broken(tasks=_tasks(lambda s, _: {"task_id": "a"}, lambda s, _: {"task_id": "a"})),
            "split 'test' has tasks",
            "two tasks share an id",
        ),
        (
            broken(tasks=_tasks(lambda s, _: {"task_id": str(next(CLOCK))})),
            "split 'train' has tasks",
            "the same seed gave other tasks",
        ),
        (broken(tasks=_tasks(lambda s, _: {"task_id": s})), "splits share no task", "is in both"),
        (
            broken(
                tasks=_tasks(
                    lambda s, _: {
                        "task_id": s,
                        "instruction": f"{s}: {SECRET}",
                        "oracle": {"f": SECRET},
                    }
                )
            ),
            "no long text",
            "shows 'def the_solution",
        ),
        (
            broken(setup=_clocked, prompt=_prompt_of_moment),
            "equal task and seed give an equal start",
            "differ",
        ),
    ],
)
def test_a_broken_promise_is_named(env, rule, why):
    found = problems(env)
    assert any(name.startswith(rule) and why in problem for name, problem in found.items()), found


@pytest.mark.parametrize("quoted", [str, str.strip])
def test_a_shown_solution_is_seen_without_its_last_line_end_too(quoted):
    text = "def total(numbers):\n    return sum(numbers)\n"
    task = make_task(
        "t", instruction=f"Like so: {quoted(text)}", oracle={"files": {"solution.py": text}}
    )
    assert shown_secret(task) == text.strip()


def test_an_environment_that_crashes_on_bad_calls_is_red():
    class Rude(Good):
        @tool
        async def trap(self, number: int) -> str:
            """Never reached by bad calls."""
            return str(number)

        async def on_text(self, message):
            if "\x00" in message.content:
                raise ValueError("unexpected text")
            return await super().on_text(message)

    assert problems(Rude) == {}

    class Crash(Good):
        limits = Limits(bad_calls=1)

        async def close(self):
            if self.end_reason is EndReason.FORMAT_ERROR:
                raise ValueError("crash")

    found = problems(Crash)
    assert list(found) == ["bad calls are answered, never a crash"] and "crash" in next(
        iter(found.values())
    )


def _oracle(*calls):
    def turns(self, task):
        yield from (Message.assistant("", call) for call in calls)
        yield Message.assistant("yes")

    return turns


@pytest.mark.parametrize(
    ("calls", "why"),
    [
        (
            [ToolCall("say", {"txt": "a"})],
            "tool 'say' failed on 12 of 12 calls, the first: error: bad_arguments",
        ),
        (
            [ToolCall("shout", {})],
            "tool 'shout' failed on 12 of 12 calls, the first: error: unknown_tool",
        ),
        ([BadCall("{", "this is no JSON")], "tool '(unreadable call)' failed on 12 of 12"),
        ([ToolCall("say", {"txt": "a"}), ToolCall("say", {"text": "a"})], ""),
        ([ToolCall("say", {"text": "error: no such file"})], ""),
    ],
)
def test_a_tool_that_the_oracle_calls_in_vain_is_red(calls, why):
    found = problems(broken(oracle_actions=_oracle(*calls)))
    assert list(found) == (["no tool fails on every call of the oracle"] if why else [])
    assert why in "".join(found.values())


def test_a_broken_tool_is_red():
    class Untold(Good):
        @tool
        async def f(self, a: time.struct_time) -> str:
            """Take what JSON cannot say.

            Args:
                b: is no parameter.
            """
            return ""

    assert "which it does not take" in problems(Untold)["its tools are typed and documented"]


def test_what_new_writes_passes_its_own_test_wherever_it_is_moved(tmp_path):
    for path in write_environment("word-count", tmp_path / "first"):
        assert str(tmp_path) not in path.read_text()
    (tmp_path / "first").rename(tmp_path / "then")
    file, test = (tmp_path / "then" / name for name in ("word_count.py", "test_word_count.py"))
    out = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", test],
        capture_output=True,
        text=True,
        timeout=280,
        cwd=tmp_path,
        check=False,
    )
    assert out.returncode == 0, out.stdout
    assert len(file.read_text().splitlines()) <= 50
    with pytest.raises(ConfigError, match="exists already"):
        write_environment("word-count", tmp_path / "then")
    for name in ("Word", "1x", "a b", "../x", ""):
        with pytest.raises(ConfigError):
            write_environment(name, tmp_path)

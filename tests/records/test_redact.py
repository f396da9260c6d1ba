"""Secrets in what is written: ten kinds, six disguises, every place that a run writes from."""

import functools
import json

import pytest
from helpers import Echo, growth, make_task, says
from planted import DISGUISES, KINDS

from agentrl.evaluation.run import EvalPlan, evaluate
from agentrl.records.files import MetricsWriter, write_json_atomic
from agentrl.records.redact import MARK, Redactor, redactor
from agentrl.types import ToolCall


def traces(text, secret):
    """Disguises of a secret that stand in a text."""
    inner = secret.replace("-----BEGIN RSA PRIVATE KEY-----\n", "").partition("\n")[0]
    shown = json.loads(text) if text.startswith("{") else text
    flat = json.dumps(shown, ensure_ascii=False) if isinstance(shown, dict) else shown
    return [
        name
        for name, disguise in DISGUISES.items()
        if disguise(inner) in flat or disguise(secret) in flat
    ]


@pytest.mark.parametrize("disguise", DISGUISES)
@pytest.mark.parametrize("kind", KINDS)
def test_no_kind_of_secret_is_left_in_any_disguise(kind, disguise, monkeypatch):
    monkeypatch.setenv("SOME_API_KEY", KINDS["environment"])
    text = f"before {DISGUISES[disguise](KINDS[kind])} after"
    cleaned = redactor().text(text)
    assert MARK in cleaned and not traces(cleaned, KINDS[kind]), cleaned
    assert cleaned.startswith("befor") and cleaned.endswith(("fter", MARK))


@pytest.mark.parametrize(
    "text",
    [
        "",
        "The total is 42, see src/main.py line 7 and notes-2024-01-02.txt.",
        "def f(x):\n    return x ** 2 + 3 * x  # polynomial\n",
        "sha256 9f86d081884c7d659a2feaa0c55ad015a3bf4f1b2b0bc0a1d2e3f4a5b6c7d8e9",
        "https://example.org/a%20b?q=1 and a - b - c - d",
    ],
)
def test_plain_text_stays(text):
    assert Redactor().text(text) == text
    row = {"a": [text, {"b": text}], "ids": [1, 2, 3]}
    assert Redactor().row(row) is row


def test_entries_are_redacted_by_name():
    row = {"arguments": {"password": "hunter2", "user": "bob"}, "tokens": 3}
    assert Redactor().row(row) == {
        "arguments": {"password": MARK, "user": "bob"},
        "tokens": 3,
    }


ODD = ['pa"ss\\word1', "line1secret\nline2secret", "p\u00e4ssw\u00f6rtchen1"]


@pytest.mark.parametrize("secret", ODD)
def test_a_secret_that_json_escapes_is_found_in_every_kind_of_record(secret, tmp_path, monkeypatch):
    monkeypatch.setenv("DB_PASSWORD", secret)
    said = [f"it is {secret}", secret[::-1], *(json.dumps(secret, ensure_ascii=a) for a in (0, 1))]
    row = {"step": 1, "messages": [{"content": each} for each in said], "bad": {secret: 1}}
    row["messages"].append({"tool_calls": [{"arguments": {secret: [secret]}}]})
    with MetricsWriter(tmp_path / "lines.jsonl") as writer:
        writer.write(row)
    write_json_atomic(tmp_path / "whole.json", row)
    for name in ("lines.jsonl", "whole.json"):
        read = json.loads((tmp_path / name).read_text())
        shown = [each.get("content", "") for each in read["messages"]]
        assert [each.count(MARK) for each in shown] == [1] * len(said) + [0], shown
        assert read["messages"][-1]["tool_calls"] == [{"arguments": {MARK: [MARK]}}]


def test_only_the_segments_of_a_record_are_exempt():
    call = {"arguments": {"segments": KINDS["aws"], "deep": {"segments": [KINDS["github"]]}}}
    row = {"segments": [{"ids": [1]}], "messages": [{"tool_calls": [call]}]}
    (clean,) = Redactor().row(row)["messages"][0]["tool_calls"]
    assert clean == {"arguments": {"segments": MARK, "deep": {"segments": [MARK]}}}
    assert Redactor().row(row)["segments"] is row["segments"]


SEPARATORS = (*" -|._,:/\n\t\u200b", "  ", "...", "\0")


@pytest.mark.parametrize("separator", SEPARATORS, ids=repr)
def test_any_repeated_separator_is_looked_through(separator):
    text = f"before {separator.join(KINDS['aws'])} after"
    row = {"messages": [{"content": text}]}
    assert MARK in Redactor().row(row)["messages"][0]["content"]
    assert MARK not in Redactor().text(separator.join("an honest text of letters"))


UNLUCKY = ["messages", "password", "side_effects", "12345678", "aaaaaaaaaaaa", "Change Me Now"]


@pytest.mark.parametrize("value", UNLUCKY)
def test_an_ordinary_word_is_no_secret_to_look_for(value, monkeypatch):
    monkeypatch.setenv("APP_KEY", value)
    row = {"messages": [{"content": f"the word {value} is in many texts"}]}
    assert redactor().row(row) is row


@pytest.mark.parametrize(
    "value", ["hUnterPassWord", "correct-horse-battery", "qwertyui1", "!@#$%^&*()"]
)
def test_a_value_that_is_no_ordinary_word_is_looked_for(value, monkeypatch):
    monkeypatch.setenv("APP_KEY", value)
    assert redactor().text(f"a {value} b") == f"a {MARK} b"


class Named(Echo):
    """A task whose name, files and metadata have unlucky names."""

    def tasks(self, split, seed):
        yield make_task("reset_password", metadata={"echo1-metadata": 1}, hidden={"answer": "yes"})


@pytest.mark.parametrize(
    "value", ["echo-v0/oracle1", "messages_of_a_record_1", "reset_password_1", "trajectories-of-1"]
)
def test_no_unlucky_variable_changes_what_a_record_is_known_by(value, tmp_path, monkeypatch):
    row = {
        "key": {"run": value, "task": value},
        "env": value,
        "task": {"id": value, "metadata": {"n": 1}},
        value: [{"arguments": {value: value}}],
        "tasks": {value: "print"},
    }
    monkeypatch.setenv("APP_KEY", value)
    clean = {**row, value: [{"arguments": {MARK: MARK}}]}
    assert redactor().row(row) == clean


def test_a_name_of_a_file_or_a_task_says_nothing_of_what_it_holds():
    row = {
        "artifacts": {"cfg/reset_password": {"text": "x = 1"}},
        "task": {"id": "t", "files": {"src/password": "def f(): pass"}},
        "side_effects": {"src/password": "created"},
        "tasks": {"reset_password": "8c1f"},
    }
    assert Redactor().row(row) == row


def test_an_evaluation_goes_on_where_its_plan_held_a_secret(tmp_path, monkeypatch):
    class Played(Named):
        played = 0

        def __init__(self, db_password="", note=""):
            self.note = note

        async def close(self):
            Played.played += 1

    monkeypatch.setenv("APP_KEY", "echo-v0/oracle1")
    make = functools.partial(Played, db_password="hunter2", note="echo-v0/oracle1")
    for _ in range(2):
        evaluate(EvalPlan(make, out=tmp_path))
    assert Played.played == 1
    assert json.loads((tmp_path / "plan.json").read_text())["settings"] == {
        "db_password": MARK,
        "note": MARK,
    }


class Leaky(Echo):
    """Every place that a run writes from holds secrets."""

    def __init__(self, attack=""):
        self.attack = attack

    def tasks(self, split, seed):
        text = "\n".join(self.planted())
        for index in range(2):
            yield make_task(
                f"t{index}",
                instruction=f"say it: {text}",
                files={"config.txt": text},
                metadata={"note": text},
                hidden={"answer": "yes"},
                oracle={"calls": [{"name": "say", "arguments": {"text": text}}], "answer": "yes"},
            )

    @staticmethod
    def planted():
        return [change(secret) for secret in KINDS.values() for change in DISGUISES.values()]

    def oracle_actions(self, task):
        text = "\n".join(self.planted())
        yield says(ToolCall("say", {"text": text}))
        yield says(content=f"yes {text}")

    async def close(self):
        if self.task.id == "t1":
            raise RuntimeError("gone with " + " ".join(self.planted()))


def test_no_planted_secret_is_in_any_file_that_a_run_writes(tmp_path, monkeypatch, recwarn):
    monkeypatch.setenv("SOME_API_KEY", KINDS["environment"])
    Leaky.needs_sandbox = False
    evaluate(EvalPlan(Leaky, out=tmp_path))
    from agentrl.report.page import write_report

    write_report(tmp_path)
    files = [path for path in tmp_path.rglob("*") if path.is_file()]
    assert {"episodes.jsonl", "eval.json"} <= {path.name for path in files}
    for path in files:
        content = path.read_text()
        for kind, secret in KINDS.items():
            inner = secret.splitlines()[1] if "\n" in secret else secret
            for name, disguise in DISGUISES.items():
                assert disguise(inner) not in content, (path.name, kind, name)
    assert MARK in (tmp_path / "episodes.jsonl").read_text()


def test_a_resumed_evaluation_knows_its_redacted_tasks(tmp_path):
    class Once(Leaky):
        played = 0

        async def close(self):
            type(self).played += 1

    evaluate(EvalPlan(Once, out=tmp_path))
    evaluate(EvalPlan(Once, out=tmp_path))
    assert Once.played == 2


HOSTILE = {
    "one percent sign after a blob": lambda n: "done 100% " + "aB3" * (n // 3),
    "letters before a percent sign": lambda n: "a" * n + "%",
    "one quoted character": lambda n: "%41" + "a" * n + "%zz",
    "beginnings of one key": lambda n: "sk-" * (n // 3) + "T3BlbkFJ",
    "beginnings of another": lambda n: "//a" * (n // 3) + "_authToken",
}


@pytest.mark.parametrize("name", HOSTILE)
def test_the_time_grows_with_the_length_alone(name):
    """What a tool says is looked through, and an agent chooses it."""
    found = redactor()

    def look(length):
        text = HOSTILE[name](length)
        assert found.text(text) == text

    assert growth(look, 15_000) < 9  # with the square it is 16


@pytest.mark.parametrize("before", [0, 2040, 4080, 9000])
def test_a_long_secret_is_taken_out_of_long_text_whole(before):
    token = f"eyJ{'a' * 30}.eyJ{'bC4' * 2000}.{'d' * 40}"
    text = f"{'word ' * (before // 5)}{token} after {'word ' * 1000}"
    assert redactor().text(text) == text.replace(token, MARK + token[-40:])


@pytest.mark.parametrize("backend", ["process", "bubblewrap", "docker"])
def test_no_real_variable_enters_a_sandbox(backend, request, monkeypatch):
    import asyncio

    from agentrl.sandboxes import TRUSTED, open_pool

    if backend != "process":
        request.getfixturevalue(backend)
    monkeypatch.setenv("SOME_API_KEY", KINDS["environment"])

    async def look():
        pool = open_pool(TRUSTED if backend == "process" else backend, 1)
        try:
            async with pool.lease("agent") as sandbox:
                command = "env; cat /proc/self/environ; tr '\\0' '\\n' </proc/$PPID/environ"
                return (await sandbox.exec(["/bin/sh", "-c", command])).stdout.decode()
        finally:
            await pool.close()

    seen = asyncio.run(look())
    assert KINDS["environment"] not in seen and "PATH=" in seen


@pytest.mark.parametrize(
    "name", ["password", "pa\u017fsword", "API\u212aEY", "ap\u0130_key", "pr\u0131vate_key"]
)
def test_names_of_secrets_are_known_in_every_case(name):
    row = {"metadata": {name: "hunter2"}}
    assert Redactor().row(row)["metadata"][name] == MARK

"""Secrets in what is written: ten kinds, six disguises, every place that a run writes from."""

import base64
import json
import random
import string

import pytest
from helpers import Echo, make_task, says

from agentrl.evaluation.run import EvalPlan, evaluate
from agentrl.records.redact import MARK, Redactor, redactor
from agentrl.types import ToolCall

RNG = random.Random(7)


def letters(count, alphabet=string.ascii_letters + string.digits):
    return "".join(RNG.choice(alphabet) for _ in range(count))


UPPER, LOWER = string.ascii_uppercase + string.digits, string.ascii_lowercase + string.digits
KINDS = {
    "aws": "AKIA" + letters(16, UPPER),
    "github": "ghp_" + letters(36),
    "gitlab": "glpat-" + letters(22),
    "slack": f"xoxb-{letters(11, string.digits)}-{letters(11, string.digits)}-{letters(24, LOWER)}",
    "stripe": "sk_live_" + letters(24),
    "jwt": f"eyJ{letters(30)}.eyJ{letters(40)}.{letters(43)}",
    "sendgrid": f"SG.{letters(22)}.{letters(43)}",
    "model": "sk-proj-" + letters(48),
    "private": f"-----BEGIN RSA PRIVATE KEY-----\n{letters(64)}\n-----END RSA PRIVATE KEY-----",
    "environment": letters(24),
}
DISGUISES = {
    "raw": lambda s: s,
    "base64": lambda s: base64.b64encode(s.encode()).decode(),
    "hex": lambda s: s.encode().hex(),
    "url": lambda s: "".join(f"%{byte:02X}" for byte in s.encode()),
    "reversed": lambda s: s[::-1],
    "split": lambda s: " ".join(s.replace("\n", "")),
}


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
    assert Redactor().row(row, json.dumps(row)) is row


def test_entries_are_redacted_by_name():
    row = {"arguments": {"password": "hunter2", "user": "bob"}, "tokens": 3}
    assert Redactor().row(row, json.dumps(row)) == {
        "arguments": {"password": MARK, "user": "bob"},
        "tokens": 3,
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

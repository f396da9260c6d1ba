"""Secrets in all that an agent can reach: none is in any file that a run leaves."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from helpers import run_cli
from planted import DISGUISES, KINDS, Planted

from agentrl.evaluation.run import EvalPlan, evaluate
from agentrl.records.files import read_episodes
from agentrl.records.redact import MARK
from agentrl.report.page import write_report

PLANTED = Path(__file__).parents[1] / "support" / "planted.py"
PLACES = ("file", "variable", "tool", "error")


@pytest.fixture(autouse=True)
def known(monkeypatch):
    """One of the kinds has no form: it is known as a variable's value."""
    monkeypatch.setenv("SOME_API_KEY", KINDS["environment"])


def assert_none_in(folder: Path, *names: str) -> None:
    files = [path for path in folder.rglob("*") if path.is_file()]
    assert set(names) <= {path.name for path in files}, files
    for path in files:
        text = path.read_bytes().decode("latin-1")
        # JSON and HTML write a line end, a quote or a letter in other ways.
        looks = (text, text.replace("\\n", "\n"), re.sub(r"\\u00(..)", _letter, text))
        for kind, secret in KINDS.items():
            inner = secret.splitlines()[1] if "\n" in secret else secret
            for name, disguise in DISGUISES.items():
                assert all(disguise(inner) not in look for look in looks), (path, kind, name)


def _letter(found: re.Match[str]) -> str:
    return chr(int(found[1], 16))


def test_an_evaluation_writes_none_of_what_its_tools_met(bubblewrap, tmp_path, capsys):
    evaluate(EvalPlan(Planted, sandbox="bubblewrap", limit=3, out=tmp_path / "eval"))
    write_report(tmp_path / "eval")
    assert_none_in(tmp_path / "eval", "episodes.jsonl", "eval.json", "report.html")
    played = [one for one in read_episodes(tmp_path / "eval/episodes.jsonl").values()]
    heard = {m.name: m.content for one in played for m in one.messages if m.role == "tool"}
    assert set(heard) == {"read_file", "variables", "told", "broken"}
    assert all(MARK in text for text in heard.values()), heard
    assert {one.end.value for one in played} >= {"answered", "tool_fault"}
    said = capsys.readouterr()
    assert KINDS["aws"] not in said.out + said.err


@pytest.fixture
def roomy(tmp_path):
    """A tiny model with room for four turns of secrets."""
    from agentrl.trainers.models.tiny import build_model, build_tokenizer

    tokenizer = build_tokenizer(["<|im_start|>user\nsay 3<|im_end|>\n"] * 8, 280)
    return build_model(tmp_path / "tiny", tokenizer, width=16, layers=1, context=8192)


def test_a_training_run_writes_none_either(bubblewrap, roomy, tmp_path):
    """By the command line, its output included. What the tiny model says is of no matter, as the
    environment itself uses the tools.
    """
    rows = (
        f'env = "{PLANTED}:Told"\nmodel = "{roomy}"\nsteps = 2\ntasks_per_step = 2\n'
        'group_size = 2\nsave_every = 1\neval_every = 1\nsandbox = "bubblewrap"\n'
        "held_out = { tasks = 2 }\n"
    )
    (tmp_path / "c.toml").write_text(rows)
    done = run_cli("train", tmp_path / "c.toml", "--out", tmp_path / "run", "--json")
    assert done.returncode == 0, done.stderr
    (tmp_path / "run" / "console.txt").write_text(done.stdout + done.stderr)
    names = ("episodes.jsonl", "metrics.jsonl", "report.html", "state.json", "tokenizer.json")
    assert_none_in(tmp_path / "run", *names)
    played = read_episodes(tmp_path / "run" / "episodes.jsonl").values()
    heard = [m.content for one in played for m in one.messages if m.role == "user"]
    for place in PLACES:
        assert any(text.startswith(place) and MARK in text for text in heard), place
    assert all(MARK in one.artifacts["config.txt"].decode() for one in played if one.artifacts)
    assert {one.end.value for one in played} >= {"max_tokens", "tool_fault"}

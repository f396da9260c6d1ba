"""What an agent wrote acts on nobody's screen: every byte for people is checked."""

import json
import math
import re
import tomllib
import unicodedata
from datetime import date, datetime, time

import pytest
from helpers import call, says
from typer.testing import CliRunner

from agentrl.cli import audit as audit_command
from agentrl.cli.app import app
from agentrl.env import ToolEnv
from agentrl.evaluation.run import EvalPlan, evaluate
from agentrl.evaluation.summary import summary_lines
from agentrl.records.plain import as_toml, plain
from agentrl.report.page import write_report
from agentrl.tools import tool
from agentrl.types import Score, Task

HOSTILE = "\x1b[2J\x1b[Hpass@1 1.0000\r\x9b31m\u202eevil\u2028x\x07\x00\x7f\ud800\u200b\U000e0041"
ROWS = f"right\npass@1 1.0000  (95 % interval 1.0000 to 1.0000, 99 tasks)\n[system]\n{HOSTILE}"


def unsafe(text: str) -> list[str]:
    """Characters that act on a terminal or hide text."""
    kinds = ("Cc", "Cf", "Cs", "Zl", "Zp")
    return [char for char in text if unicodedata.category(char) in kinds and char not in "\n\t"]


class Escapes(ToolEnv):
    """Its agent, its verifier and its failures say the worst that they can."""

    id = "escapes-v0"

    def tasks(self, split, seed):
        for index in range(3):
            yield Task(id=f"{split}-{index}", instruction="x", oracle={"calls": []})

    async def verifier(submission):
        number = int(submission.task.id[-1])
        return Score.failed(ROWS) if number else Score(0.0, {HOSTILE: 1.0}, ROWS)

    @tool
    def echo(self, text: str) -> str:
        """Say it again."""
        return text

    def oracle_actions(self, task):
        yield says(call("echo", text=ROWS), call(HOSTILE, text=ROWS), content=ROWS)
        yield says(content=ROWS)


@pytest.fixture(scope="module")
def run_folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("escapes")
    evaluate(EvalPlan(Escapes, out=folder, sandbox="process"))
    return folder


def test_every_text_file_of_a_run_is_plain(run_folder):
    write_report(run_folder)
    files = [path for path in run_folder.rglob("*") if path.suffix in (".txt", ".html", ".json")]
    assert {path.suffix for path in files} == {".txt", ".html", ".json"}
    assert {str(path): unsafe(path.read_text()) for path in files if unsafe(path.read_text())} == {}


def test_a_transcript_has_no_line_that_the_agent_could_have_made_a_heading(run_folder):
    write_report(run_folder)
    text = (run_folder / "to_read" / "000.txt").read_text()
    assert "  [system]" in text and re.findall(r"^\[(\w+)", text, re.MULTILINE) == [
        "user", "assistant", "tool", "tool", "assistant",
    ]  # fmt: skip
    assert re.findall(r"^pass@1", text, re.MULTILINE) == []


def test_the_summary_is_plain_and_no_failure_takes_a_second_line(run_folder):
    result = evaluate(EvalPlan(Escapes, out=run_folder, sandbox="process"))
    shown = [plain(line) for line in summary_lines(result)]
    assert [line for line in shown if unsafe(line) or "\n" in line] == []
    assert [line[:7] for line in shown if "pass@1" in line] == ["pass@1 ", "failed,"]
    assert "\\u001b[2J" in "".join(shown)


COMMANDS = [
    ["eval", "{file}:Escapes", "--sandbox", "process"],
    ["eval", "{file}:Escapes", "--sandbox", "process", "--json"],
    ["audit", "{file}:Escapes", "--sandbox", "process", "--tasks", "2"],
    ["check", "{file}:Escapes"],
]


@pytest.mark.parametrize("words", COMMANDS, ids=lambda words: " ".join(words[::3])[:20])
def test_no_command_prints_what_acts_on_a_terminal(words, monkeypatch):
    words = [word.format(file=__file__) for word in words]
    result = CliRunner().invoke(app, words)
    assert unsafe(result.output) == []
    assert len(re.findall(r"^pass@1", result.output, re.MULTILINE)) <= 1


def test_an_audit_table_is_plain(capsys):
    row = {"promise": "p", "words": "w", "verdict": "broken", "why": ROWS, "task": HOSTILE}
    row |= {"evidence": {HOSTILE: {HOSTILE: 1}}, "hint": "h"}
    result = {"rows": [row], "env": "e", "tasks": 1, "seconds": 1.0, "ok": False}
    audit_command._print_table(result, fix_hints=True)
    assert unsafe(capsys.readouterr().out) == []


def test_escapes_leave_json_the_same_value_and_honest_text_alone():
    value = {"a": HOSTILE.replace("\ud800", ""), "b": [ROWS.replace("\ud800", "")]}
    text = json.dumps(value, ensure_ascii=False)
    assert json.loads(plain(text)) == value
    honest = "Füße, 数学 → 😀 'x' \\n {}"
    assert plain(honest) == honest and plain("a\n\tb", lines=True) == "a\n\tb"
    assert plain("a\nb") == "a\\u000ab" and plain(3) == "3"


def test_a_setting_is_shown_as_its_file_writes_it():
    for value in (True, False, 3, 0.5, "x", [1, True], {"a": {"b": False}, "c": ["d"]}):
        assert tomllib.loads(f"x = {as_toml(value)}") == {"x": value}
    assert as_toml({"a": None, "b": [None, 1]}) == "{b = [1]}" and as_toml(None) == "None"


def test_texts_keys_and_dates_that_need_marks_are_shown_as_toml_reads_them():
    texts = ["it's", 'say "x"', 'it\'s "x"', "a\nb", "C:\\x", "\x7f\u202e", "\U000e0041", "é\xa0"]
    dates = [date(2020, 1, 2), datetime(2020, 1, 2, 3), time(3, 4)]
    for value in (*texts, *dates, math.inf, {"a b": 1, "c.d": 2, "": 3, "é": texts}):
        shown = as_toml(value)
        assert tomllib.loads(f"x = {shown}") == {"x": value} and plain(shown) == shown

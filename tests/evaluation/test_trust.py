"""What an audit must not call fine: renumbered splits, rows without a verdict, constants."""

import asyncio

import pytest
from helpers import Echo, make_task

from agentrl.cli.audit import count_verdicts
from agentrl.evaluation.audit import AuditPlan, audit
from agentrl.evaluation.audit.probes import stubs
from agentrl.evaluation.audit.stage import AuditStage
from agentrl.evaluation.audit.twins import tasks_differ
from agentrl.evaluation.leaks import shown_secret
from agentrl.types import Score, Task

LONG = {"answer": 12, "calls": [{"name": "look", "arguments": {"shelf": "north"}}] * 3}
SERIALS = [
    "Order {split}-{n}: count the boxes.",
    "Task {n}. Count the boxes.",
    "#{n} Count the boxes.",
    "Count the boxes (variant {n}).",
    "Problem no. {n}: count the boxes.",
    "Count the boxes. [{n}]",
    "Ticket 00{n}f3a9c1d2e: count the boxes.",
]


def row(split, n, text, **more):
    fields = {"hidden": {"answer": n % 7}, "oracle": {**LONG, "answer": n % 7}} | more
    instruction = text.format(split=split, n=n if split == "train" else n + 700)
    return Task(id=f"{split}-{n}", instruction=instruction, **fields)


async def found(splits):
    class Split(Echo):
        pass

    stage = AuditStage(Split, None, splits, splits["test"], lambda task: ())
    return await tasks_differ(stage)


def splits_of(text, **more):
    return {
        split: [row(split, n, text, metadata={"shelf": n}, **more) for n in range(20)]
        for split in ("train", "test")
    }


@pytest.mark.parametrize("text", SERIALS)
def test_a_split_with_other_serial_numbers_is_the_same_split(text):
    finding = asyncio.run(found(splits_of(text)))
    assert finding.verdict == "broken" and "renumbered" in finding.why
    assert finding.evidence["across_splits"] >= 20


def test_where_little_else_tells_a_number_is_a_serial_one_by_its_place():
    def asked(split, shift):
        for n, book in enumerate(("Hamlet", "Faust", "Emma", "Ulysses", "1984")):
            given = {"answer": book[0]}
            text = f"Task {n + shift}: who wrote {book}?"
            yield Task(id=f"{split}-{n}", instruction=text, hidden=given, oracle=given)

    finding = asyncio.run(
        found({"train": list(asked("train", 0)), "test": list(asked("test", 50))})
    )
    assert finding.verdict == "broken" and "renumbered" in finding.why
    assert finding.evidence["across_splits"] == 5


def test_sums_with_equal_results_are_different_tasks():
    def sums(split, shift):
        for n in range(20):
            answer = {"answer": 40}
            text = f"What is {n + shift} + {40 - n - shift}?"
            yield Task(id=f"{split}-{n}", instruction=text, hidden=answer, oracle=answer)

    splits = {"train": list(sums("train", 0)), "test": list(sums("test", 60))}
    assert asyncio.run(found(splits)).verdict == "holds"


def test_a_row_without_any_verdict_is_not_judged():
    class Shy(Echo):
        """Its verifier gives a verdict on its own tasks alone."""

        count = 4

        async def verifier(submission):
            asked = submission.task.hidden["answer"]
            if asked != "yes":
                return Score.failed("no such answer")
            return Score(float(submission.answer == asked))

    result = audit(AuditPlan(Shy, tasks=2, sandbox="process"))
    rows = {row["promise"]: row for row in result["rows"]}
    assert rows["impossible"]["verdict"] == "not judged" and not result["ok"]
    assert "no variant got a verdict" in rows["impossible"]["why"]


def test_the_last_line_counts_what_was_not_judged():
    assert count_verdicts(["holds", "not applicable"]) == "every promise holds"
    assert count_verdicts(["holds", "not judged"]) == "1 promise not judged"
    assert (
        count_verdicts(["broken", "broken", "not judged"])
        == "2 promises broken, 1 promise not judged"
    )


def test_files_that_a_repair_leaves_alone_are_no_leak():
    same = "def helper(x):\n    return x * 2  # nothing is wrong here\n"
    start = "def f(x):\n    return helper(x) - 1  # this is the line to mend\n"
    right = "def f(x):\n    return helper(x) + 1  # this is the line to mend\n"
    repair = {
        "files": {"a.py": same, "b.py": start},
        "oracle": {"files": {"a.py": same, "b.py": right}},
    }
    assert shown_secret(make_task(**repair)) == ""
    told = make_task(**repair | {"instruction": f"Write this: {right}"})
    assert shown_secret(told) == right.strip()
    moved = {"files": {"a.py": right, "b.py": start}, "oracle": {"files": {"b.py": right}}}
    assert shown_secret(make_task(**moved)) == right.strip()


def test_constants_are_among_the_attacks_of_a_code_task():
    code = {
        "hidden": {"entry_point": "f", "check": "def check(c):\n    assert len(c(1)) == 0\n"},
        "oracle": {"files": {"solution.py": "def f(x):\n    return []\n"}},
    }
    names = [probe.name for probe in stubs(make_task(**code))]
    assert "always returns []" in names and len(names) == 10
    cases = {"entry_point": "f", "cases": [{"args": [1], "expected": []}]}
    few = [probe.name for probe in stubs(make_task(**code | {"hidden": cases}))]
    assert few == ["always returns []", "always returns ()"]  # a JSON list takes either

"""Text verifiers: what counts as the answer, and what is never equal."""

from __future__ import annotations

import asyncio
import gzip
import json
from fractions import Fraction

import pytest
from helpers import growth
from hypothesis import given
from hypothesis import strategies as st

from agentrl.errors import TaskError
from agentrl.types import EndReason, Message, Task
from agentrl.verifiers.answers.text import exact_match, last_number, numeric
from agentrl.verifiers.base import Submission


def value(verifier, expected, answer: str) -> float | None:
    task = Task(id="t", instruction="", hidden={} if expected is None else {"answer": expected})
    return asyncio.run(
        verifier(Submission(task, (Message.assistant(answer),), EndReason.ANSWERED))
    ).value


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("It is 42.", 42),
        ("-5", -5),
        ("$-5", -5),
        ("-$5", -5),
        ("\u22127", -7),
        ("5-3", 3),
        ("x=-3", -3),
        ("10 - 4", 4),
        ("1,234,567.50", Fraction(2469135, 2)),
        ("1,2,3", 3),
        ("12,34", 34),
        ("50%", 50),
        ("£1,000", 1000),
        ("3/4", Fraction(3, 4)),
        ("1/0", None),
        (".5", Fraction(1, 2)),
        ("1e3", 1000),
        ("-2.5E-1", Fraction(-1, 4)),
        ("#### 72\n", 72),
        ("first 1, then\n#### 1,000", 1000),
        ("\\boxed{12} in 3 steps", 12),
        ("\\boxed{\\text{about }12} in 3", 12),
        ("\\boxed{\\left\\{ 12 \\right.} in 3", 12),
        ("\\boxed{12", 12),
        ("none", None),
        ("nan", None),
        ("inf", None),
        ("-Infinity", None),
        ("", None),
        ("1e999", None),
        ("9" * 500, None),
        ("\u0663", None),
    ],
)
def test_last_number(text, number):
    assert last_number(text) == number


@given(st.integers(), st.text(alphabet="abc .\n", max_size=20))
def test_whole_numbers_of_any_length_must_be_equal(number, before):
    assert value(numeric(), number, f"{before} {number}") == float(abs(number) < 10**400)
    assert value(numeric(), number, f"{before} {number + 1}") == 0.0


@given(st.floats(allow_nan=False, allow_infinity=False))
def test_a_float_equals_its_own_text(number):
    assert value(numeric(), number, f"so it is {number!r}") == 1.0


@given(st.text())
def test_any_text_is_judged(text):
    assert value(numeric(), 7, text) in (0.0, 1.0)


def test_tolerance_is_for_fractions_only():
    assert value(numeric(), 0.3333333, "1/3") == 1.0
    assert value(numeric(rtol=0, atol=0), 0.3333333, "1/3") == 0.0
    assert value(numeric(), 1_000_000, "1000001") == 0.0
    assert value(numeric(), "1,000.0", "1000") == 1.0


@pytest.mark.parametrize("expected", [float("nan"), float("inf"), "none", True, None, []])
def test_an_expected_number_that_is_none_is_the_tasks_fault(expected):
    with pytest.raises(TaskError, match=r"hidden\.answer"):
        value(numeric(), expected, "nan inf none 1")


def test_alternatives():
    assert value(numeric(), [3, 4], "4") == 1.0
    assert value(exact_match(), ["yes", "y"], "y") == 1.0


def test_exact_match():
    assert value(exact_match(), "New  York", " New York\n") == 1.0
    assert value(exact_match(), "New York", "new york") == 0.0
    assert value(exact_match(ignore_case=True), "New York", "new york") == 1.0
    assert value(exact_match(), "York", "New York") == 0.0
    with pytest.raises(TaskError):
        value(exact_match(), " ", "")


def test_no_answer_is_wrong():
    task = Task(id="t", instruction="", hidden={"answer": 3})
    assert asyncio.run(numeric()(Submission(task, (), EndReason.MAX_TURNS))).value == 0.0


def test_agrees_with_the_published_labels_of_gsm8k(data_dir):
    packed = (data_dir / "math" / "gsm8k_model_solutions_shared.jsonl.gz").read_bytes()
    rows = [json.loads(line) for line in gzip.decompress(packed).splitlines()]
    solutions = [
        (row["ground_truth"], item)
        for row in rows
        for item in row.values()
        if isinstance(item, dict)
    ]
    assert len(solutions) == 800
    verifier = numeric()
    agreed = [
        value(verifier, str(last_number(truth)), item["solution"]) == float(item["is_correct"])
        for truth, item in solutions
    ]
    assert sum(agreed) == 800


def test_a_long_row_of_groups_costs_no_more_than_its_tail_and_far_numbers_are_found():
    def read(groups):
        assert last_number("1" + ",111" * groups + ",1") is not None

    assert growth(read, 2_000) < 9  # with the square it is 16
    assert last_number("it is 3/4" + " as I said" * 1000) == Fraction(3, 4)

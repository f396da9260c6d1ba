"""Mathematical answers: what counts as equal, and what math-verify cannot be made to do."""

from __future__ import annotations

import asyncio
import itertools
import json
import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest
from helpers import process, wait_for

from agentrl.errors import ConfigError, TaskError, VerifierError
from agentrl.types import EndReason, Message, Task
from agentrl.verifiers.answers import math as library
from agentrl.verifiers.answers import math_worker
from agentrl.verifiers.answers.math import math_answer
from agentrl.verifiers.base import Submission

ONE = ("\\boxed{1}", "\\boxed{1}", 5.0)


@pytest.fixture(scope="module", autouse=True)
def workers():
    """The warm processes, ended with this module."""
    yield
    library._workers().close()
    library._workers.cache_clear()


def judge(*pairs):
    """Scores of (expected, answer) pairs, asked all at once."""
    verifier = math_answer()

    async def run():
        jobs = []
        for expected, answer in pairs:
            task = Task(id="t", instruction="", hidden={"answer": expected})
            jobs.append(
                verifier(Submission(task, (Message.assistant(answer),), EndReason.ANSWERED))
            )
        return [score.value for score in await asyncio.gather(*jobs)]

    return asyncio.run(run())


def test_equal_answers():
    pairs = [
        ("\\frac{1}{2}", "so it is \\boxed{0.5}"),
        ("0.5", "#### 1/2"),
        (5, "The answer is $x = 5$."),
        (0.25, "\\boxed{\\frac{1}{4}}"),
        ("\\boxed{\\frac{3}{4}}", "\\boxed{\\frac34}"),
        ("\\{1, 2\\}", "\\boxed{\\{2, 1\\}}"),
        ("x^2 + 2x + 1", "\\boxed{(x+1)^2}"),
        (["7", "8"], "\\boxed{8}"),
        ("\\left\\{ 1 \\right\\}", "\\boxed{\\left\\{ 1 \\right\\}}"),
    ]
    assert judge(*pairs) == [1.0] * len(pairs)


def test_different_answers():
    pairs = [
        ("5", "\\boxed{4} or \\boxed{6}"),
        ("5", "\\boxed{5}, no: \\boxed{6}"),
        ("x + 1", "\\boxed{y + 1}"),
        ("(1, 2)", "\\boxed{(2, 1)}"),
        ("5", ""),
        ("5", "I do not know."),
        ("5", "\\boxed{}"),
        ("5", "\\boxed{1, 2, 3, 4, 5}"),
    ]
    assert judge(*pairs) == [0.0] * len(pairs)


RESTATED = {
    "5050": [
        "\\sum_{k=1}^{100} k",
        "\\displaystyle\\sum\\limits_{k=1}^{100} k",
        "x = \\sum_{k=1}^{100} k",
        "5050 = \\sum_{k=1}^{100} k",
        "\\frac{100 \\cdot 101}{2}",
        "\\binom{101}{2}",
        "1+5049",
    ],
    "\\frac{1}{3}": ["\\int_0^1 x^2 dx", "\\int_{0}^{1} x^{2} \\, \\mathrm{d}x"],
    "1": ["\\lim_{x\\to 0}\\frac{\\sin x}{x}", "\\gcd(4, 9)", "\\sin(\\pi/2)"],
    "-2": [
        "\\begin{vmatrix}1&2\\\\3&4\\end{vmatrix}",
        "\\det\\begin{pmatrix}1&2\\\\3&4\\end{pmatrix}",
    ],
    "2x": ["\\frac{d}{dx} x^2"],
    "\\frac{\\pi^2}{6}": ["\\sum_{n=1}^\\infty \\frac{1}{n^2}"],
    "6": ["\\prod_{k=1}^3 k", "3!", "\\operatorname{lcm}(2, 3)", "2 \\cdot 3", "12/2"],
}


def test_a_derivative_that_is_still_to_be_taken_is_no_answer():
    for ratio in (r"\frac{d}{dx}", r"\dfrac{\mathrm{d}}{\mathrm{d}x}", r"\tfrac{ d }{ d x }"):
        assert judge(("2x", rf"\boxed{{{ratio}x^2}}")) == [0.0], ratio
    assert judge(("2x", r"\boxed{2x}"), (r"\frac{d}{3}", r"\boxed{\frac{d}{3}}")) == [1.0, 1.0]


def test_the_question_restated_is_no_answer():
    pairs = [(gold, text) for gold, texts in RESTATED.items() for text in texts]
    boxed = [(gold, f"\\boxed{{{text}}}") for gold, text in pairs]
    assert {pair: score for pair, score in zip(boxed, judge(*boxed), strict=True) if score} == {}
    plain = [(gold, f"The answer is ${text}$.") for gold, text in pairs]
    assert {pair: score for pair, score in zip(plain, judge(*plain), strict=True) if score} == {}


def test_an_operation_that_the_expected_answer_has_may_stand_in_the_answer():
    pairs = [
        ("\\binom{10}{3}", "\\boxed{\\binom{10}{3}}"),
        ("\\lfloor x \\rfloor", "\\boxed{\\lfloor x \\rfloor}"),
        ("n!", "\\boxed{n!}"),
        ("5050", "\\boxed{\\sum_{k=1}^{100} k = 5050}"),
    ]
    assert judge(*pairs) == [1.0] * len(pairs)
    assert judge(("5050", "\\boxed{\\sum_{k=1}^{100} k = 5051}")) == [0.0]


def test_letters_behind_a_number_are_a_unit_or_wrong():
    right = [
        "12",
        "12 m",
        "12\\text{ cm}",
        "12 square units",
        "12^\\circ",
        "\\$12",
        "12.0",
    ]
    right += ["x = 12", "\\textbf{12}", "12 \\text{ apples and pears}", "(12)"]
    wrong = ["12 a b", "12ab", "12 x y z", "12 a \\cdot b", "12xyz", "12 \\text{a b}"]
    assert judge(*(("12", f"\\boxed{{{text}}}") for text in right)) == [1.0] * len(right)
    assert judge(*(("12", f"\\boxed{{{text}}}") for text in wrong)) == [0.0] * len(wrong)


def test_brackets_say_what_a_list_is():
    right = [
        ("(1,2)", "(1, 2)"),
        ("\\{1,2\\}", "\\{2,1\\}"),
        ("\\{1,2\\}", "1, 2"),
        ("1, 2", "2, 1"),
    ]
    wrong = [("(1,2)", "\\{1,2\\}"), ("\\{1,2\\}", "(1,2)"), ("[1,2]", "(1,2)"), ("(1,2)", "1,2")]
    assert judge(*((gold, f"\\boxed{{{text}}}") for gold, text in right)) == [1.0] * len(right)
    assert judge(*((gold, f"\\boxed{{{text}}}") for gold, text in wrong)) == [0.0] * len(wrong)


def test_a_small_number_is_not_zero():
    near = [
        ("10^{-20}", "10^{-20}"),
        ("0.0000001", "1 \\times 10^{-7}"),
        ("\\frac{1}{3}", "0.3333333"),
    ]
    far = [("10^{-20}", "0.0"), ("10^{-20}", "10^{-21}"), ("0.0000001", "0"), ("0", "0.0000001")]
    far += [("\\frac{1}{10^{9}}", "0.0"), ("\\{10^{-20}, 1\\}", "\\{0.0, 1\\}")]
    assert judge(*((gold, f"\\boxed{{{text}}}") for gold, text in near)) == [1.0] * len(near)
    assert judge(*((gold, f"\\boxed{{{text}}}") for gold, text in far)) == [0.0] * len(far)


def test_percent_is_a_hundredth_or_left_out():
    pairs = [("50\\%", "50"), ("0.5", "50\\%"), ("50", "50\\%")]
    assert judge(*((gold, f"\\boxed{{{text}}}") for gold, text in pairs)) == [1.0] * len(pairs)


HOSTILE = {
    "tower": "\\boxed{9^{9^{9}}}",
    "tower in plain text": "9^9^9",
    "factorial of a tower": "\\boxed{(10^{10^{10}})!}",
    "nested braces": "\\boxed{" + "{" * 500 + "}" * 500 + "}",
    "long": "x" * 100_000,
    "long box": "\\boxed{9" + "0" * 3000 + "5}",
    "dollars": "$" * 100_000,
    "unbalanced": "\\frac{" * 300,
    "brackets": "(" * 1900,
    "sum": "1+" * 950 + "2",
    "end of line": "\\boxed{4}\n[5, null]\n",
    "code": "\\boxed{__import__('os').system('true')}",
}


def test_hostile_answers_are_wrong_and_hold_nothing_up():
    """The loop goes on while they are judged, and afterwards an honest answer is right."""
    ticks = 0

    async def tick():
        nonlocal ticks
        while True:
            await asyncio.sleep(0.05)
            ticks += 1

    async def run():
        clock = asyncio.create_task(tick())
        task = Task(id="t", instruction="", hidden={"answer": "5"})
        subs = [
            Submission(task, (Message.assistant(text),), EndReason.ANSWERED)
            for text in HOSTILE.values()
        ]
        scores = await asyncio.gather(*map(math_answer(cpu_s=0.5), subs))
        clock.cancel()
        return dict(zip(HOSTILE, (score.value for score in scores), strict=True))

    assert asyncio.run(run()) == dict.fromkeys(HOSTILE, 0.0)
    assert ticks > 5
    assert judge(("5", "\\boxed{5}")) == [1.0]


@pytest.mark.parametrize(
    "expected", ["", "  ", True, None, [], {"a": 1}, "(", "\\frac{", "9" * 3000]
)
def test_an_expected_answer_that_cannot_be_read_is_the_tasks_fault(expected):
    with pytest.raises(TaskError, match=r"hidden\.answer"):
        judge((expected, "\\boxed{(}"))


def test_it_works_on_a_loop_in_a_thread():
    found = []
    thread = threading.Thread(
        target=lambda: found.extend(judge(("2", "\\boxed{2}"), ("2", "\\boxed{3}")))
    )
    thread.start()
    thread.join()
    assert found == [1.0, 0.0]


def test_a_dead_worker_is_a_named_failure_and_the_next_one_works(monkeypatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {0})
    workers = library._Workers()
    try:
        assert asyncio.run(workers.ask(ONE))["equal"] is True
        (worker,) = workers._all
        os.kill(worker._process.pid, signal.SIGKILL)
        worker._process.wait()
        with pytest.raises(VerifierError, match="compares mathematics"):
            asyncio.run(workers.ask(ONE))
        assert asyncio.run(workers.ask(ONE))["equal"] is True
    finally:
        workers.close()


def test_a_worker_that_does_not_answer_is_a_named_failure(monkeypatch):
    monkeypatch.setattr(library, "WALL_S", 0.5)
    worker = library._Worker.__new__(library._Worker)
    with process("sleep", "1000", stdin=subprocess.PIPE, text=True) as worker._process:
        with pytest.raises(VerifierError, match="in time"):
            worker.ask(ONE)
        assert worker._process.returncode is not None


def test_a_child_that_ends_is_replaced_and_answers_stay_with_their_questions():
    """The tower ends its child; a worker that goes out of step would answer with what was asked
    before.
    """
    worker = library._Worker()
    tower, wrong = ("\\boxed{1}", "\\boxed{9^{9^9}}", 0.2), ("\\boxed{1}", "\\boxed{2}", 5.0)
    try:
        for request, found in [
            (ONE, True),
            (tower, None),
            (ONE, True),
            (wrong, False),
            (tower, None),
            (wrong, False),
        ]:
            answer = worker.ask(request)
            assert answer.get("equal") is found
            assert answer.get("ended") == ("SIGPROF" if found is None else None)
        assert [worker.ask(request)["equal"] for request in (ONE, wrong) * 150] == [
            True,
            False,
        ] * 150
        (child,) = (
            Path(f"/proc/{worker._process.pid}/task/{worker._process.pid}/children")
            .read_text()
            .split()
        )
        os.kill(int(child), signal.SIGKILL)
        wait_for(lambda: not is_running(child))
        assert [worker.ask(request)["equal"] for request in (ONE, wrong)] == [True, False]
    finally:
        worker.close()


def test_a_kill_from_outside_is_no_verdict(monkeypatch):
    worker = library._Worker()
    monkeypatch.setattr(worker, "_read", lambda: {"ended": "SIGKILL"})
    try:
        with pytest.raises(VerifierError, match="memory"):
            worker.ask(ONE)
    finally:
        worker.close()


@pytest.mark.parametrize("cpu_s", [0, -1, float("nan"), float("inf")])
def test_a_limit_that_is_none_is_refused(cpu_s):
    with pytest.raises(ConfigError, match="cpu_s"):
        math_answer(cpu_s=cpu_s)


def test_a_killed_process_leaves_no_worker_behind_not_even_a_busy_one():
    code = """
import asyncio, os, threading, time
from agentrl.verifiers.answers import math
workers = math._workers()
asyncio.run(workers.ask(("1", "1", 5.0)))
(pid,) = (worker._process.pid for worker in workers._all)
child = open(f"/proc/{pid}/task/{pid}/children").read().strip()
busy = math._Worker()
threading.Thread(target=busy.ask, args=(("1", "9^9^9", 200.0),), daemon=True).start()
time.sleep(0.5)
other = busy._process.pid
while not (its := open(f"/proc/{other}/task/{other}/children").read().strip()):
    time.sleep(0.01)
print(pid, child, other, its, flush=True)
os.kill(os.getpid(), 9)
"""
    done = subprocess.run(
        [sys.executable, "-c", code], stdout=subprocess.PIPE, text=True, timeout=250
    )
    pids = done.stdout.split()
    assert len(pids) == 4
    wait_for(lambda: not any(map(is_running, pids)))


def is_running(pid):
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def test_without_the_library_the_extra_is_named(monkeypatch):
    monkeypatch.setattr(library, "find_spec", lambda name: None)
    library._workers.cache_clear()
    with pytest.raises(ConfigError, match=r"agentrl\[math\]"):
        judge(("1", "1"))


class Parsed:
    """A library that reads what it is told."""

    def __init__(self, **readings):
        self.readings = readings

    def parse(self, text, parsing_timeout):
        assert parsing_timeout is None, "the library's own alarm is off"
        return self.readings[text]

    def verify(self, golds, targets, timeout_seconds):
        assert timeout_seconds is None, "the library's own alarm is off"
        return golds == targets


def test_only_mathematics_is_a_readable_expectation():
    fake = Parsed(one=[1], nothing=[], text=["text"])
    found = math_worker.compare(fake, "one", "one")
    assert found == {"readable": True, "equal": True, "target": ""}
    assert math_worker.compare(fake, "one", "nothing")["equal"] is False
    assert math_worker.compare(fake, "one", None) == {"readable": True, "equal": False}
    assert math_worker.compare(fake, "nothing", "one")["readable"] is False
    assert math_worker.compare(fake, "text", "text")["readable"] is False


def test_math500_answers_equal_their_boxed_form_and_no_different_neighbour(data_dir):
    lines = (data_dir / "math" / "math500_answers_shared.jsonl").read_text().splitlines()
    rows = [json.loads(line) for line in lines]
    assert len(rows) == 250
    assert sum(judge(*((row["answer"], row["boxed"]) for row in rows))) == 250
    neighbours = [
        (row["answer"], other["boxed"])
        for row, other in itertools.pairwise(rows)
        if row["answer"] != other["answer"]
    ]
    assert len(neighbours) == 247
    called_equal = [
        pair for pair, score in zip(neighbours, judge(*neighbours), strict=True) if score
    ]
    assert called_equal == []

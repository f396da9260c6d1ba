"""Verifiers made of verifiers: what is remembered, what is not, and nobody waits for ever."""

from __future__ import annotations

import asyncio

from agentrl.types import EndReason, Score, Task
from agentrl.verifiers.base import Submission
from agentrl.verifiers.combine import if_submitted, remembered


def submission(text=b"x", end=EndReason.SUBMITTED, task="t"):
    return Submission(Task(id=task, instruction="do"), (), end, {"a.py": text})


class Counting:
    """A verifier that says what it is told and counts how often it is asked."""

    def __init__(self, *says):
        self.says = list(says)
        self.asked = 0

    async def __call__(self, submission, /):
        self.asked += 1
        await asyncio.sleep(0)
        said = self.says.pop(0) if len(self.says) > 1 else self.says[0]
        if isinstance(said, Exception):
            raise said
        return said


def ask(verifier, *submissions):
    async def all_at_once():
        jobs = (asyncio.wait_for(verifier(each), 5) for each in submissions)
        return await asyncio.gather(*jobs, return_exceptions=True)

    return asyncio.run(all_at_once())


def test_equal_artifacts_of_an_equal_task_are_judged_once():
    inner = Counting(Score(1.0))
    got = ask(remembered(inner), *[submission()] * 8, submission(b"y"), submission(task="u"))
    assert [score.value for score in got] == [1.0] * 10
    assert inner.asked == 3


def test_a_failure_is_not_remembered_and_hangs_nobody():
    inner = Counting(Score.failed("lost"), RuntimeError("lost"), Score(1.0))
    got = ask(remembered(inner), *[submission()] * 4)
    assert got[0].value is None
    assert isinstance(got[1], RuntimeError)
    assert [score.value for score in got[2:]] == [1.0, 1.0]
    assert inner.asked == 3


def test_a_verdict_of_the_clock_is_asked_for_again():
    inner = Counting(Score(0.0, {}, "too slow"), Score(1.0))
    verifier = remembered(inner, unless=lambda score: "slow" in score.why)
    assert [score.value for score in ask(verifier, submission(), submission(), submission())] == [0.0, 1.0, 1.0]
    assert inner.asked == 2


def test_what_was_not_handed_in_is_worth_nothing():
    inner = Counting(Score(1.0))
    ends = (EndReason.SUBMITTED, EndReason.ANSWERED, EndReason.FORMAT_ERROR, EndReason.MAX_TURNS)
    assert [each.value for each in ask(if_submitted(inner), *(submission(end=end) for end in ends))] == [1, 1, 0, 0]
    assert inner.asked == 2

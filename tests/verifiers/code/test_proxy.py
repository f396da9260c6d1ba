"""Hidden test files use the candidate from afar: forgers earn nothing, honest work everything."""

from __future__ import annotations

import asyncio

import pytest
from conftest import require
from proxy_attacks import ATTACKS, HONEST, TASK

from agentrl.errors import TaskError
from agentrl.sandboxes import open_pool
from agentrl.types import EndReason, Score, Task
from agentrl.verifiers.base import Submission
from agentrl.verifiers.code.hidden_tests import hidden_tests


def scores(task: Task, *codes: str, backend: str = "process", call_s: float = 20.0) -> list[Score]:
    """The verdicts on some files named solution.py, one after the other."""

    async def run() -> list[Score]:
        pool, verifier = open_pool(backend, size=1), hidden_tests(call_s=call_s, wall_s=60)
        try:
            given = [{"solution.py": code.encode()} for code in codes]
            made = [Submission(task, (), EndReason.SUBMITTED, files, pool) for files in given]
            return [await verifier(each) for each in made]
        finally:
            await pool.close()

    return asyncio.run(run())


def task_of(tests: str, oracle: str, **more: object) -> Task:
    return Task(
        id="t",
        instruction="x",
        hidden={"tests": {"test_x.py": tests}, **more},
        oracle={"files": {"solution.py": oracle}},
    )


@pytest.mark.parametrize("part", range(4))
def test_forgers_earn_nothing(part):
    require("bubblewrap")
    names = list(ATTACKS)[part::4]
    found = scores(TASK, *(ATTACKS[name] for name in names), backend="bubblewrap", call_s=2.0)
    assert {name: score.value for name, score in zip(names, found, strict=True)} == dict.fromkeys(
        names, 0.0
    )
    assert all(score.parts["passed"] <= 2 / 12 for score in found)


def test_honest_work_passes_and_says_that_it_was_isolated():
    (score,) = scores(TASK, HONEST)
    assert score.value == 1.0
    assert score.parts == {"passed": 1.0, "isolated": 1.0}

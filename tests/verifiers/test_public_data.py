"""Public code data, judged in the sandbox: CRUXEval's outputs are reproduced, conflicting tests are
never passed.
"""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import pytest
from conftest import require

from agentrl.sandboxes import SandboxLimits, open_pool
from agentrl.types import EndReason, Task
from agentrl.verifiers.base import Submission
from agentrl.verifiers.code.formats import mbpp
from agentrl.verifiers.code.hidden_tests import hidden_tests


def values(tasks: list[Task]) -> list[float | None]:
    """The scores of the tasks' references."""
    require("bubblewrap")

    async def run():
        pool, verifier, gate = (
            open_pool("bubblewrap", 2, SandboxLimits(memory_mb=1024)),
            hidden_tests(),
            asyncio.Semaphore(3),
        )

        async def one(task):
            async with gate:
                files = {path: text.encode() for path, text in task.oracle["files"].items()}
                return (
                    await verifier(Submission(task, (), EndReason.SUBMITTED, files, pool))
                ).value

        try:
            return await asyncio.gather(*map(one, tasks))
        finally:
            await pool.close()

    return asyncio.run(run())


def rows(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def crux(row: dict, output: str) -> Task:
    """A row of CRUXEval; its call is part of the program, since some arguments are functions."""
    program = f"{row['code']}\n\ndef answer():\n    return f({row['input']})\n"
    hidden = {"entry_point": "answer", "cases": [{"expected": {"py": output}}]}
    return Task(
        id=row["id"], instruction="x", hidden=hidden, oracle={"files": {"solution.py": program}}
    )


@pytest.mark.long
def test_all_outputs_of_cruxeval_are_reproduced(data_dir):
    found = rows(data_dir / "code" / "cruxeval_shared.jsonl")
    assert len(found) == 400
    scores = values([crux(row, row["output"]) for row in found])
    assert [row["id"] for row, score in zip(found, scores, strict=True) if score != 1.0] == []
    neighbours = [other["output"] for other in [*found[1:], found[0]]]
    pairs = [
        (row, other) for row, other in zip(found, neighbours, strict=True) if row["output"] != other
    ][:50]
    assert values([crux(row, other) for row, other in pairs]) == [0.0] * 50


def test_conflicting_tests_are_never_passed(data_dir):
    found = rows(data_dir / "safety" / "mbpp_conflicting_tests.jsonl")
    assert len(found) == 100
    assert values([whole(row, "test_list_original") for row in found]) == [1.0] * 100
    assert values([whole(row, "test_list_conflicting") for row in found]) == [0.0] * 100


def whole(row: dict, field: str) -> Task:
    """All assertions hidden: the conversion keeps the first one as the example, and that may be the
    changed one.
    """
    first = row[field][0]
    return mbpp(row | {"test_list": [first, *row[field]]})

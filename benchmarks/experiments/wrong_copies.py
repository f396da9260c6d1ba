"""Can the true copy of a hidden test be told from the wrong ones by what is shown?

`python -m benchmarks.experiments.wrong_copies` makes the copies of the 427 MBPP tasks (the file
code/mbpp_sanitized.json below AGENTRL_DATA) as if none of them could be judged apart from the
candidate. Each strategy sees all copies of a test, and names one as true. Chance is what a strategy
reaches that knows the layout of the copies and nothing else. With `--grade` it also judges every
reference under bubblewrap, and counts the tasks that need copies at all.
"""

from __future__ import annotations

import argparse
import ast
import asyncio
import json
import math
import os
import random
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from agentrl.errors import TaskError
from agentrl.sandboxes import SandboxLimits, open_pool
from agentrl.types import EndReason, Task
from agentrl.verifiers.base import Submission
from agentrl.verifiers.code.controls import drawn, layout, rows_of
from agentrl.verifiers.code.hidden_tests import hidden_tests
from agentrl.verifiers.code.mutants import mutants

Rows = list[tuple[Any, ...]]
"""What is shown of one test: for each copy, the values that differ between copies."""


def main() -> None:
    """Print the share of true copies that each strategy finds, and chance, as JSON."""
    parser = argparse.ArgumentParser(description="strategies against wrong copies")
    parser.add_argument("--grade", action="store_true", help="judge the references too")
    options = parser.parse_args()
    folder = Path(os.environ["AGENTRL_DATA"])
    rows = json.loads((folder / "code" / "mbpp_sanitized.json").read_text())
    found = offline([as_tests(row) for row in rows])
    if options.grade:
        found |= asyncio.run(graded([as_tests(row) for row in rows]))
    print(json.dumps(found, indent=2))


def as_tests(row: dict[str, Any]) -> Task:
    """A row of MBPP whose assertions are test functions that import the candidate."""
    text = "\n".join(["from solution import *", *row["test_imports"]])
    for index, line in enumerate(row["test_list"]):
        text += f"\n\ndef test_{index}():\n    {line}\n"
    hidden = {"tests": {"test_x.py": text}}
    oracle = {"files": {"solution.py": row["code"]}}
    return Task(id=f"Mbpp/{row['task_id']}", instruction="x", hidden=hidden, oracle=oracle)


def offline(tasks: Sequence[Task]) -> dict[str, Any]:
    """Shares of tests and of whole tasks that each strategy gets right."""
    chances: list[float] = []
    hits: dict[str, list[list[bool]]] = {name: [] for name in STRATEGIES}
    for task in tasks:
        shown = [_shown(rows) for rows in _copies(task)]
        chances += [1 / values for _, values in shown]
        for name, choose in STRATEGIES.items():
            rng = random.Random(f"{task.id} {name}")
            hits[name].append([choose(rows, rng) == 0 for rows, _ in shown])
    count, chance = len(chances), sum(chances) / len(chances)
    deviation = math.sqrt(sum(p * (1 - p) for p in chances)) / count
    report = {
        name: {
            "tests": round(sum(map(sum, tasks_)) / count, 4),
            "tasks": round(sum(bool(each) and all(each) for each in tasks_) / len(tasks_), 4),
        }
        for name, tasks_ in hits.items()
    }
    return {
        "n_tasks": len(tasks),
        "n_tests": count,
        "chance": round(chance, 4),
        "chance_sd": round(deviation, 4),
        "found": report,
    }


def _copies(task: Task) -> list[tuple[list[Any], int]]:
    """All copies of each test, the true one first, and how many values a spot has."""
    text = task.hidden["tests"]["test_x.py"]
    found = mutants(text, task.fingerprint())
    made = []
    for name, (plain, spots) in found.items():
        if spots:
            rng = random.Random(f"{task.fingerprint()} {name}")
            values, groups = layout(len(found), spots)
            rows = rows_of(plain, drawn(spots, values, rng), values, groups, rng)
            made.append(([test for test, _ in rows], values))
    return made


def _shown(copies: tuple[list[Any], int]) -> tuple[Rows, int]:
    """The leaves that differ between the copies of a test, as values where they are some."""
    tests, values = copies
    leaves = [
        [_value(leaf) for leaf in ast.walk(test) if not list(ast.iter_child_nodes(leaf))]
        for test in tests
    ]
    if len({len(row) for row in leaves}) > 1:
        return [(ast.unparse(test),) for test in tests], values
    differ = [at for at in range(len(leaves[0])) if len({repr(row[at]) for row in leaves}) > 1]
    return [tuple(row[at] for at in differ) for row in leaves], values


def _value(leaf: ast.AST) -> Any:
    return leaf.value if isinstance(leaf, ast.Constant) else ast.dump(leaf)


def _best(rows: Rows, rng: random.Random, score: Callable[[int], float]) -> int:
    scores = [score(at) for at in range(len(rows))]
    return rng.choice([at for at, each in enumerate(scores) if each == max(scores)])


def _majority(rows: Rows, rng: random.Random) -> int:
    counts = [Counter(map(repr, column)) for column in zip(*rows, strict=True)]
    return _best(
        rows,
        rng,
        lambda at: sum(count[repr(value)] for count, value in zip(counts, rows[at], strict=True)),
    )


def _ranks(rows: Rows) -> list[float]:
    """Of each copy, how high its values stand among those of all copies, from 0 to 1."""
    total = [0.0] * len(rows)
    for column in zip(*rows, strict=True):
        keys = [(value if isinstance(value, int | float) else 0, repr(value)) for value in column]
        order = sorted(set(keys))
        for at, key in enumerate(keys):
            total[at] += order.index(key) / max(1, len(order) - 1) / len(rows[0])
    return total


def _median(rows: Rows, rng: random.Random) -> int:
    ranks = _ranks(rows)
    return _best(rows, rng, lambda at: -abs(ranks[at] - 0.5))


def _lowest(rows: Rows, rng: random.Random) -> int:
    ranks = _ranks(rows)
    return _best(rows, rng, lambda at: -ranks[at])


def _highest(rows: Rows, rng: random.Random) -> int:
    ranks = _ranks(rows)
    return _best(rows, rng, lambda at: ranks[at])


def _majority_then_median(rows: Rows, rng: random.Random) -> int:
    counts = [Counter(map(repr, column)) for column in zip(*rows, strict=True)]
    if any(len(set(count.values())) > 1 for count in counts):
        return _majority(rows, rng)
    return _median(rows, rng)


def _nearest(rows: Rows, rng: random.Random) -> int:
    return _best(rows, rng, lambda at: -sum(_distance(rows[at], other) for other in rows))


def _furthest(rows: Rows, rng: random.Random) -> int:
    return _best(rows, rng, lambda at: sum(_distance(rows[at], other) for other in rows))


def _distance(one: tuple[Any, ...], other: tuple[Any, ...]) -> int:
    return sum(repr(a) != repr(b) for a, b in zip(one, other, strict=True))


def _shortest(rows: Rows, rng: random.Random) -> int:
    return _best(rows, rng, lambda at: -len(repr(rows[at])))


STRATEGIES: dict[str, Callable[[Rows, random.Random], int]] = {
    "majority": _majority,
    "median": _median,
    "majority, else median": _majority_then_median,
    "lowest": _lowest,
    "highest": _highest,
    "nearest to all others": _nearest,
    "furthest from all others": _furthest,
    "shortest": _shortest,
}
"""Each takes what is shown of a test and returns the index of the copy that it holds for true."""


async def graded(tasks: Sequence[Task]) -> dict[str, Any]:
    """How many tasks are judged apart from the candidate, and why the others are not."""
    pool, verifier = open_pool("bubblewrap", 1, SandboxLimits(memory_mb=1024)), hidden_tests()
    isolated, others = 0, {}
    try:
        for task in tasks:
            files = {path: text.encode() for path, text in task.oracle["files"].items()}
            try:
                score = await verifier(Submission(task, (), EndReason.SUBMITTED, files, pool))
            except TaskError as error:
                others[task.id] = str(error)
                continue
            isolated += int(score.parts["isolated"])
            if not score.parts["isolated"] or score.value != 1.0:
                others[task.id] = score.why
    finally:
        await pool.close()
    return {"isolated": isolated, "others": others}


if __name__ == "__main__":
    main()

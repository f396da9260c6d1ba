"""What may cross between tests and candidate: forgers of each class earn nothing, and the table."""

from __future__ import annotations

import asyncio
import json
import re
from pathlib import Path

import pytest
from conftest import require
from helpers import refused
from hypothesis import given, settings
from hypothesis import strategies as st

from agentrl.errors import TaskError
from agentrl.sandboxes import open_pool
from agentrl.types import EndReason, Score, Task
from agentrl.verifiers.attacks import CATALOGUE, target_of
from agentrl.verifiers.base import Submission
from agentrl.verifiers.code.hidden_tests import hidden_tests
from agentrl.verifiers.code.runner.crossing import LISTED, Crossing, table

DOCS = Path(__file__).parents[3] / "docs"
CLASSES = [attack for attack in CATALOGUE if attack.number >= 53]
SUM = "def total(values, *more):\n    return sum(values)\n"
SORT = "def total(values, *more):\n    return sorted(values)\n"
FIXTURE = "\n@pytest.fixture\ndef values():\n    return [4, 5]\n"
CASES = {
    "a mock that holds the values": (
        "    values = MagicMock()\n    values.read.return_value = [4, 5]\n"
        "    assert total(values) == 9\n",
        "def total(values, *more):\n    return sum(values.read() if more == () else [])\n",
    ),
    "a truth": ("    assert total([4], MagicMock()) == 4\n", SUM),
    "a getter": (
        "    assert total([4], helper, operator.attrgetter('__globals__')) == 4\n",
        SUM,
    ),
    "two properties": (
        "    out = total([3, 1, 2])\n    assert sorted(out) == [1, 2, 3]\n"
        "    assert all(a <= b for a, b in zip(out, out[1:]))\n    assert len(out) == 3\n",
        SORT,
    ),
    "map": ("    assert all(map(lambda x: total(x) == 9, [[4, 5]]))\n", SUM),
    "zip": (
        "    for got, want in zip(map(total, [[4, 5]]), [9]):\n        assert got == want\n",
        SUM,
    ),
    "xor": ("    assert not total([4, 5]) ^ 9\n", SUM),
    "ratio": ("    assert abs(total([4, 5]) / 9 - 1) < 1e-9\n", SUM),
    "rest": ("    assert len({total([4, 5])} ^ {9}) == 0\n", SUM),
    "round": ("    assert round(total([4, 5]) - 9) == 0\n", SUM),
    "and": ("    assert not total([4, 5]) & ~9 and bool(total([4, 5]))\n", SUM),
}
HEAD = (
    "import operator\nimport pytest\nfrom unittest.mock import MagicMock\n"
    "from solution import total\n"
    "EXPECTED = 9\ndef helper(x):\n    return x\n"
)


def task_of(tests: str, oracle: str, **more: object) -> Task:
    return Task(
        id="t",
        instruction="Write `total(values)`.",
        hidden={"tests": {"test_x.py": tests}, **more},
        oracle={"files": {"solution.py": oracle}},
    )


def scores(task: Task, *codes: str, backend: str = "process") -> list[Score]:
    async def run() -> list[Score]:
        pool, verifier = open_pool(backend, size=1), hidden_tests(call_s=20, wall_s=30)
        try:
            given = [{"solution.py": code.encode()} for code in codes]
            made = [Submission(task, (), EndReason.SUBMITTED, files, pool) for files in given]
            return [await verifier(each) for each in made]
        finally:
            await pool.close()

    return asyncio.run(run())


@pytest.mark.parametrize("by_pytest", [False, True], ids=["our runner", "pytest"])
@pytest.mark.parametrize("backend", ["bubblewrap", pytest.param("docker", marks=pytest.mark.long)])
@pytest.mark.parametrize("case", CASES)
def test_every_class_of_forger_earns_nothing(case, backend, by_pytest):
    require(backend)
    body, honest = CASES[case]
    text = HEAD + (FIXTURE if by_pytest else "")
    text += f"\ndef test_a({'values' if by_pytest else ''}):\n{body}"
    task = task_of(text, honest)
    payloads = [attack.build(target_of(task)) for attack in CLASSES]
    codes = [payload.files["solution.py"].decode() for payload in payloads]
    right, *forged = scores(task, honest, *codes, backend=backend)
    assert (right.value, right.parts["isolated"]) == (1.0, 1.0), right.why
    assert [score.value for score in forged] == [0.0] * len(CLASSES)


@pytest.mark.parametrize(
    ("line", "name"),
    [
        ("import sqlite3; assert total([4], sqlite3.connect(':memory:')) == 4", "Connection"),
        ("import logging; assert total([4], logging.getLogger('x')) == 4", "Logger"),
        ("import sys; assert total([4], sys) == 4", "module"),
        ("import sys; assert total([4], sys._getframe()) == 4", "frame"),
        ("import argparse; assert total([4], argparse.ArgumentParser().print_help) == 4", "method"),
    ],
)
def test_a_library_object_that_is_not_listed_is_refused_with_its_line(line, name):
    text = f"from solution import total\n\ndef test_a():\n    {line}\n"
    with pytest.raises(TaskError, match=rf"test_x\.py:4 hands over an object of type \S*{name}"):
        scores(task_of(text, SUM), SUM)


def test_what_is_listed_crosses():
    text = (
        "import io, random, re, functools, operator\nfrom solution import use\n\n"
        "class Node:\n    def __init__(self, value, rest=None):\n"
        "        self.value = value\n        self.rest = rest\n\n"
        "def test_file():\n    out = io.StringIO()\n    use('file', out)\n"
        "    assert out.getvalue() == 'ab'\n\n"
        "def test_node():\n    assert use('node', Node(3, Node(4))) == 7\n\n"
        "def test_key():\n    assert use('key', operator.itemgetter(1)) == 5\n\n"
        "def test_partial():\n    assert use('key', functools.partial(max, [7])) == [7]\n\n"
        "def test_pattern():\n    assert use('key', re.compile('a').findall) is None\n\n"
        "def test_random():\n    assert use('random', random.Random(0)) in (1, 2)\n\n"
        "def test_numbers():\n    assert use('next', (n for n in [8])) == 8\n"
    ).replace("def test_pattern():\n    assert use('key', re.compile('a').findall) is None\n\n", "")
    honest = (
        "def use(how, it):\n    if how == 'file':\n        it.write('ab')\n"
        "    if how == 'node':\n        return it.value + it.rest.value\n"
        "    if how == 'key':\n        return it([4, 5])\n"
        "    if how == 'random':\n        return it.choice([1, 2])\n"
        "    if how == 'next':\n        return next(it)\n"
    )
    (score,) = scores(task_of(text, honest), honest)
    assert (score.value, score.parts["isolated"]) == (1.0, 1.0), score.why


def test_expected_exceptions_match_though_they_end_no_iteration():
    text = (
        "import pytest, unittest\nfrom solution import Done, ask, count\n\n"
        "def test_raises():\n    with pytest.raises(StopIteration):\n        ask()\n"
        "    with pytest.raises(Done):\n        ask()\n"
        "    with pytest.raises(Exception):\n        ask()\n\n"
        "class TestCase(unittest.TestCase):\n    def test_case(self):\n"
        "        self.assertRaises(StopIteration, ask)\n\n"
        "def test_next():\n    assert list(zip(count(), 'ab')) == [(0, 'a'), (1, 'b')]\n"
    )
    honest = (
        "import itertools\nclass Done(StopIteration):\n    pass\ndef ask():\n    raise Done\n"
        "def count():\n    yield from itertools.count()\n"
    )
    (score,) = scores(task_of(text, honest), honest)
    assert score.value == 1.0, score.why


def test_a_check_is_not_ended_by_stop_iteration():
    check = (
        "def check(candidate):\n    assert all(got == want for got, want in"
        " zip(map(candidate, [1, 4]), [2, 5]))\n"
    )
    task = Task(
        id="t",
        instruction="x",
        hidden={"entry_point": "f", "check": check},
        oracle={"files": {"solution.py": "def f(x): return x + 1\n"}},
    )
    right, forged = scores(task, "def f(x): return x + 1\n", "def f(x):\n    raise StopIteration\n")
    assert (right.value, forged.value) == (1.0, 0.0)


ASKED = st.sampled_from(
    [
        *("__class__", "__dict__", "__globals__", "__self__", "__func__", "__code__"),
        *("__init_subclass__", "__reduce__", "__subclasses__", "configure_mock", "gi_frame"),
        *("return_value", "side_effect", "f_back", "secret", "_secret", "public"),
    ]
)


@given(ASKED)
def test_no_object_of_a_test_shows_more_than_its_class_defines(name):
    space: dict = {"__name__": "test_x"}
    source = (
        "class Own:\n    def __init__(self):\n        self.public = 1\n        self._secret = 2\n"
        "def function():\n    yield 1\n"
    )
    exec(compile(source, "test_x.py", "exec"), space)
    crossing = Crossing(["test_x.py"])
    for value in (space["Own"](), space["Own"], space["function"], space["function"]()):
        access = crossing.access(value)
        assert access is not None
        assert access.shows(name) == (name == "public" and type(value) is space["Own"])


@settings(max_examples=60)
@given(st.sampled_from(sorted(vars(__import__("builtins")))))
def test_no_built_in_object_crosses_as_a_handle(name):
    value = vars(__import__("builtins"))[name]
    assert Crossing(["test_x.py"]).access(value) is None


def test_the_table_is_published():
    path = DOCS / "crossing.md"
    assert table() in path.read_text()
    assert all(name in table() for name in LISTED)


def mbpp_as_tests(row: dict, asserts: list[str]) -> Task:
    """A row of MBPP whose assertions are test functions that import the candidate."""
    lines = ["from solution import *", *row["test_imports"]]
    if any(re.search(r"\b_sum\(", line) for line in asserts):  # `import *` skips this name
        lines.insert(1, "from solution import _sum")
    text = "\n".join(lines)
    for index, line in enumerate(asserts):
        text += f"\n\ndef test_{index}():\n    {line}\n"
    return task_of(text, row["code"]).model_copy(update={"id": f"Mbpp/{row['task_id']}"})


@pytest.mark.long
def test_all_of_mbpp_is_judged_in_two_processes(data_dir, bubblewrap):
    rows = json.loads((data_dir / "code" / "mbpp_sanitized.json").read_text())
    assert len(rows) == 427
    found = refused([mbpp_as_tests(row, row["test_list"]) for row in rows])
    assert {name for name, why in found.items() if "returns" not in why} == set()


@pytest.mark.long
def test_conflicting_test_files_never_pass(data_dir, bubblewrap):
    text = (data_dir / "safety" / "mbpp_conflicting_tests.jsonl").read_text()
    rows = [json.loads(line) for line in text.splitlines()]
    assert refused([mbpp_as_tests(row, row["test_list_original"]) for row in rows]) == {}
    impossible = refused([mbpp_as_tests(row, row["test_list_conflicting"]) for row in rows])
    assert len(impossible) == len(rows) == 100
    assert all("oracle" in why for why in impossible.values())

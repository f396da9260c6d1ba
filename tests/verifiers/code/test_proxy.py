"""Hidden test files use the candidate from afar: forgers earn nothing, honest work everything."""

from __future__ import annotations

import asyncio
from pathlib import Path

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
        pool, verifier = open_pool(backend, size=1), hidden_tests(call_s=call_s, wall_s=20)
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


@pytest.mark.parametrize("part", [0, *(pytest.param(n, marks=pytest.mark.long) for n in (1, 2, 3))])
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


PLAIN = "from solution import f\n\ndef test_a():\n    assert f([2, 1]) == [1, 2]\n"


def test_a_file_that_knows_nothing_of_the_task_passes_nothing():
    code = "def __getattr__(name):\n    return lambda *a, **k: []\n"
    task = task_of("from solution import f\n\ndef test_a():\n    assert f(2) == 4\n", "f = abs\n")
    task = task.model_copy(update={"oracle": {"files": {"solution.py": "def f(x): return 2*x\n"}}})
    assert scores(task, code)[0].value == 0.0


def test_arguments_are_changed_only_where_the_reference_changes_them():
    """Else whoever empties its argument forges `f(x) == sorted(x)`."""
    tests = (
        "from solution import f, g\n\ndef test_a():\n    x = [3, 1]\n    assert f(x) == sorted(x)\n"
        "\ndef test_b():\n    x = [3, 1]\n    g(x)\n    assert x == [1, 3]\n"
    )
    honest = "def f(x):\n    return sorted(x)\n\ndef g(x):\n    x.sort()\n"
    forged = "def f(x):\n    x.clear()\n    return []\n\ndef g(x):\n    x[:] = sorted(x)\n"
    right, bad = scores(task_of(tests, honest), honest, forged)
    assert (right.value, right.parts["isolated"]) == (1.0, 1.0)
    assert bad.value == 0.0 and bad.parts["passed"] == 0.5


def test_a_star_import_brings_what_the_reference_defines_and_no_more():
    tests = (
        "import math\nfrom solution import *\n\ndef test_a():\n    assert math.isclose(f(1), 2.0)\n"
        "\ndef test_b():\n    assert len(g(3)) == 3\n"
    )
    honest = "import math\n\ndef f(x):\n    return 2.0 * x\n\ndef g(n):\n    return [0] * n\n"
    forged = (
        "class math:\n    isclose = lambda *a: True\n\ndef len(x):\n    return 3\n\n"
        "def f(x):\n    return 0.0\n\ndef g(n):\n    return []\n"
    )
    right, bad = scores(task_of(tests, honest), honest, forged)
    assert (right.value, right.parts["isolated"], bad.parts["passed"]) == (1.0, 1.0, 0.0)


@pytest.mark.parametrize(
    ("line", "word"),
    [
        ("import inspect; assert 'sorted' in inspect.getsource(f)", "another process"),
        ("import inspect; assert inspect.isfunction(f)", "another process"),
        ("assert type('K', (K,), {})().n == 5", "derives a class"),
        ("assert K() is K.same", "test_x.py:4 lets objects of the candidate decide"),
    ],
)
def test_what_two_processes_cannot_decide_is_refused(line, word):
    tests = (
        f"from solution import K, f\n\ndef test_a():\n    {line}\n    assert f([2, 1]) == [1, 2]\n"
    )
    honest = (
        "class K:\n    n = 5\n    def __new__(cls):\n        return cls.same\n\n"
        "K.same = object.__new__(K)\n\ndef f(x):\n    return sorted(x)\n"
    )
    with pytest.raises(TaskError, match=word):
        scores(task_of(tests, honest), honest)


SHOWN = "from solution import V\n\ndef test_a():\n    assert V(1) + V(2) == V(3)\n"
V = (
    "class V:\n    def __init__(self, n):\n        self.n = n\n    def __add__(self, o):\n"
    "        return V(self.n + o.n)\n    def __eq__(self, o):\n        return self.n == o.n\n"
)


def test_a_comparison_that_the_candidate_decides_is_refused_unless_the_task_allows_it():
    with pytest.raises(TaskError, match=r'test_x.py:4 .*"allow": \["comparison"\]'):
        scores(task_of(SHOWN, V), V)
    (score,) = scores(task_of(SHOWN, V, allow=["comparison"]), V)
    assert (score.value, score.parts["isolated"]) == (1.0, 0.0)
    assert "isolated: false, as the task allows comparison" in score.why


def test_a_task_can_demand_isolation():
    assert scores(task_of(PLAIN, "f = sorted\n", isolation="required"), "f = sorted\n")
    with pytest.raises(TaskError, match=r"hidden\.isolation is 'required', but .*comparison"):
        scores(task_of(SHOWN, V, isolation="required", allow=["comparison"]), V)
    with pytest.raises(TaskError, match=r"hidden\.isolation is 'maybe'"):
        scores(task_of(PLAIN, "f = sorted\n", isolation="maybe"), "f = sorted\n")


OTHER_TYPE = (
    "class L:\n    def __init__(self, xs):\n        self.xs = xs\n    def __eq__(self, o):\n"
    "        return self.xs == o\n\ndef f(x):\n    return L(sorted(x))\n"
)


def test_an_answer_of_another_type_is_refused_unless_the_task_allows_it():
    assert scores(task_of(PLAIN, "f = sorted\n"), OTHER_TYPE)[0].value == 0.0
    (score,) = scores(task_of(PLAIN, "f = sorted\n", allow=["comparison"]), OTHER_TYPE)
    assert (score.value, score.parts["isolated"]) == (1.0, 0.0)
    assert "the task allows comparison" in score.why
    with pytest.raises(TaskError, match=r"hidden\.allow is \['all'\]"):
        scores(task_of(PLAIN, "f = sorted\n", allow=["all"]), OTHER_TYPE)


@pytest.mark.parametrize(
    "code",
    [
        "def f(x):\n    return type('L', (list,), {})(sorted(x))\n",
        "import collections\ndef f(x):\n    return collections.UserList(sorted(x)).data\n",
        "def f(x):\n    return [n for n in sorted(x)]\n",
    ],
)
def test_a_plain_value_with_something_added_is_compared_as_a_plain_value(code):
    assert scores(task_of(PLAIN, "f = sorted\n"), code)[0].value == 1.0


FOLDER = Path(__file__).parents[2] / "support" / "exercises"


def exercises() -> list[tuple[str, str, list[str]]]:
    """Name, tests and three honest solutions of different shape; the first is the reference."""
    found = []
    for path in sorted(FOLDER.glob("*.txt")):
        for block in path.read_text().split("## ")[1:]:
            name, _, body = block.partition("\n")
            tests, *solutions = body.split("\n--\n")
            found.append((name, tests, solutions))
    return found


EXERCISES = exercises()
NAMED = [
    pytest.param(*rest, id=name)
    for name, *rest in EXERCISES
    if name not in ("vector", "clock", "money", "light", "deck", "async")
]


def test_the_exercises_are_whole():
    assert len({name for name, _, _ in EXERCISES}) == len(EXERCISES) >= 20
    assert all(len(solutions) == len(set(solutions)) == 3 for _, _, solutions in EXERCISES)


REFUSED = {
    "vector": ["arithmetic", "comparison"],
    "clock": ["arithmetic"],
    "money": ["comparison"],
    "light": ["comparison"],
    "deck": ["comparison"],
    "async": None,
}
"""Exercises that two processes cannot decide, and what their task would have to allow."""


@pytest.mark.parametrize("name", REFUSED)
def test_some_exercises_are_refused_and_pass_where_the_task_allows_it(name):
    tests, solutions = next(rest for known, *rest in EXERCISES if known == name)
    with pytest.raises(TaskError, match=r"test_x\.py"):
        scores(task_of(tests, solutions[0]), solutions[0])
    if REFUSED[name] is not None:
        (score,) = scores(task_of(tests, solutions[0], allow=REFUSED[name]), solutions[0])
        assert (score.value, score.parts["isolated"]) == (1.0, 0.0)


def check_exercise(tests: str, solutions: list[str]) -> None:
    found = scores(task_of(tests, solutions[0]), *solutions)
    assert all(score.parts["isolated"] == 1.0 for score in found)
    assert [score.value for score in found] == [1.0] * 3, [score.why for score in found]


@pytest.mark.parametrize(("tests", "solutions"), NAMED[::10])
def test_some_honest_solutions_of_other_shapes_pass(tests, solutions):
    check_exercise(tests, solutions)


@pytest.mark.long
@pytest.mark.parametrize(("tests", "solutions"), NAMED)
def test_honest_solutions_of_other_shapes_pass(tests, solutions):
    check_exercise(tests, solutions)


def test_other_honest_solutions_pass():
    tests = (
        "import pytest\nfrom solution import parse\nROWS = [('1', 1), ('-2', -2)]\n\n"
        "def test_values():\n    for text, value in ROWS:\n        assert parse(text) == value\n\n"
        "def test_one_of():\n    assert parse('3') in (3, 3.0)\n\n"
        "def test_bad():\n    with pytest.raises(ValueError):\n        parse('x')\n\n"
        "def test_order():\n    assert 0 < parse('5') <= 9\n\n"
        "class TestMore:\n    def test_text(self):\n        assert str(parse('7')) == '7'\n"
    )
    other = (
        "class Bad(ValueError):\n    pass\n\ndef parse(text):\n    if text == 'x':\n"
        "        raise Bad(text)\n    return int(float(text))\n"
    )
    honest = "def parse(text):\n    return int(text)\n"
    wrong = "def parse(text):\n    return abs(int(text))\n"
    right, alike, bad = scores(task_of(tests, honest), honest, other, wrong)
    assert (right.value, alike.value, bad.value) == (1.0, 1.0, 0.0)
    assert bad.parts["passed"] == pytest.approx(0.8)


def test_tests_without_a_reference_are_refused_in_one_sentence():
    task = task_of("from solution import f\n\ndef test_a():\n    assert f([1]) == 1\n", "")
    for oracle in ({}, {"files": {}}, {"files": {"other.py": ""}}, {"answer": "1"}):
        bare = task.model_copy(update={"oracle": oracle})
        with pytest.raises(TaskError, match=r"task 't': field oracle\.files lacks solution\.py"):
            scores(bare, "f = sum\n")


@pytest.mark.parametrize("base", ["Exception", "ValueError", "TypeError", "KeyError", "IndexError"])
def test_an_error_of_the_solutions_own_may_have_any_base(base):
    tests = "import pytest\nfrom solution import Empty, pop\n"
    tests += "def test_a():\n    with pytest.raises(Empty):\n        pop([])\n"
    code = "class Empty({}):\n    pass\ndef pop(xs):\n    raise Empty\n"
    (found,) = scores(task_of(tests, code.format("Exception")), code.format(base))
    assert found.value == 1.0


def test_an_artifact_that_no_test_calls_is_named():
    task = task_of("def test_a():\n    assert 1 + 1 == 2\n", "x = 1\n")
    (found,) = scores(task, "x = 1\n")
    assert found.value == 0.0 and "no test called the artifact's code" in found.why

"""Hidden test files use the candidate from afar: forgers earn nothing, honest work everything."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
from conftest import require
from proxy_attacks import ATTACKS, HONEST, TASK
from weak_verifiers import sample_task

from agentrl.errors import TaskError
from agentrl.sandboxes import open_pool
from agentrl.types import EndReason, Score, Task
from agentrl.verifiers.attacks import attacks_for
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
        ("import inspect; assert 'sorted' in inspect.getsource(f)", "own process"),
        ("import inspect; assert inspect.isfunction(f)", "own process"),
        ("assert type('K', (K,), {})().n == 5", "derives a class"),
    ],
)
def test_what_cannot_be_judged_from_afar_says_so(line, word):
    tests = (
        f"from solution import K, f\n\ndef test_a():\n    {line}\n    assert f([2, 1]) == [1, 2]\n"
    )
    honest = "class K:\n    n = 5\n\ndef f(x):\n    return sorted(x)\n"
    wrong = honest.replace("sorted(x)", "x  # sorted")
    right, bad = scores(task_of(tests, honest), honest, wrong)
    assert (right.value, bad.value) == (1.0, 0.0)
    assert right.parts["isolated"] == 0.0
    assert "isolated: false" in right.why and word in right.why


SHOWN = "from solution import V\n\ndef test_a():\n    assert V(1) + V(2) == V(3)\n"
V = (
    "class V:\n    def __init__(self, n):\n        self.n = n\n    def __add__(self, o):\n"
    "        return V(self.n + o.n)\n    def __eq__(self, o):\n        return self.n == o.n\n"
)


def test_a_comparison_that_the_candidate_decides_is_controlled_by_copies():
    liar = V.replace("return self.n == o.n", "return True").replace("self.n + o.n", "0")
    right, bad = scores(task_of(SHOWN, V), V, liar)
    assert (right.value, right.parts["isolated"]) == (1.0, 0.0)
    assert bad.value == 0.0 and "what it expected was false" in bad.why


def test_a_task_can_demand_isolation():
    assert scores(task_of(PLAIN, "f = sorted\n", isolation="required"), "f = sorted\n")
    with pytest.raises(TaskError, match=r"hidden\.isolation is 'required', but .*own objects"):
        scores(task_of(SHOWN, V, isolation="required"), V)
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


@pytest.mark.long
def test_the_forger_of_the_middle_copy_learns_nothing_from_many_gradings():
    require("bubblewrap")
    payloads = {attack.name: payload for attack, payload in attacks_for(sample_task("tests"))}
    code = payloads["middle-of-the-copies"].files["solution.py"].decode()
    text = sample_task("tests").hidden["tests"]["test_hidden.py"]
    text += "\ndef test_kind():\n    import inspect\n    assert inspect.isfunction(total)\n"
    task = task_of(text, "def total(values):\n    return sum(values)\n")
    found = scores(task, *[code] * 6, backend="bubblewrap")
    assert [score.value for score in found] == [0.0] * 6
    assert all(score.parts["isolated"] == 0.0 for score in found)


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
NAMED = [pytest.param(*each[1:], id=each[0]) for each in EXERCISES]


def test_the_exercises_are_whole():
    assert len({name for name, _, _ in EXERCISES}) == len(EXERCISES) >= 20
    assert all(len(solutions) == len(set(solutions)) == 3 for _, _, solutions in EXERCISES)


def check_exercise(tests: str, solutions: list[str]) -> None:
    found = scores(task_of(tests, solutions[0]), *solutions)
    assert [score.value for score in found] == [1.0] * 3, [score.why for score in found]


@pytest.mark.parametrize(("tests", "solutions"), NAMED[::10])
def test_some_honest_solutions_of_other_shapes_pass(tests, solutions):
    check_exercise(tests, solutions)


@pytest.mark.long
@pytest.mark.parametrize(("tests", "solutions"), NAMED)
def test_honest_solutions_of_other_shapes_pass(tests, solutions):
    check_exercise(tests, solutions)

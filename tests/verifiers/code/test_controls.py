"""Wrong copies of tests: wrong for every honest solution, and not to be told from the true one."""

from __future__ import annotations

import ast
import asyncio
import json
import random
from collections import Counter
from dataclasses import replace

import pytest
from helpers import refused
from weak_verifiers import HONEST, sample_task

from agentrl.errors import TaskError
from agentrl.sandboxes import open_pool
from agentrl.types import EndReason, Task
from agentrl.verifiers.attacks import attacks_for
from agentrl.verifiers.base import Submission
from agentrl.verifiers.code import hidden_tests as judging
from agentrl.verifiers.code.controls import MOST_COPIES, Copies, drawn, layout, rows_of
from agentrl.verifiers.code.hidden import read_hidden
from agentrl.verifiers.code.hidden_tests import hidden_tests
from agentrl.verifiers.code.mutants import changed, composed, mutants
from agentrl.verifiers.code.wrong import stand_ins

FORGERS = (
    "reports-in-advance",
    "patched-reporter",
    "always-equal",
    "always-equal-number",
    "callers-frame",
)


def wrong_copies(body: str, head: str = "") -> list[str]:
    """The bodies of copies of one test, each with another value in one place."""
    plain, spots = mutants(f"{head}def test_a():\n    {body}\n", "seed")["test_a"]
    copies = [changed(plain, {spot: at}) for spot in spots for at in range(1, len(spot.options))]
    return ["; ".join(map(ast.unparse, copy.body)) for copy in copies]


def task_of(tests: str | dict, oracle: str) -> Task:
    files = tests if isinstance(tests, dict) else {"test_x.py": tests}
    return Task(
        id="t", instruction="x", hidden={"tests": files}, oracle={"files": {"solution.py": oracle}}
    )


def scores(task: Task, *codes: str, backend: str = "process") -> list:
    async def run():
        pool = open_pool(backend, size=2)
        verifier = hidden_tests(call_s=20, wall_s=60)
        try:
            given = [{"solution.py": code.encode()} for code in codes]
            return [
                await verifier(Submission(task, (), EndReason.SUBMITTED, files, pool))
                for files in given
            ]
        finally:
            await pool.close()

    return asyncio.run(run())


@pytest.mark.parametrize(
    ("body", "head"),
    [
        ("assert f(1) == 2", ""),
        ("assert 2 == f(1)", ""),
        ("assert f(1) == -2.5", ""),
        ("assert f(1) == [1, (2, 'b')]", ""),
        ("assert f(1) == {'a': [1]}", ""),
        ("assert f(1) == []", ""),
        ("assert f(1) == {}", ""),
        ("assert f(1) == set()", ""),
        ("assert f(1) == ''", ""),
        ("assert f(1) == True", ""),
        ("assert f(1) == None", ""),
        ("assert f(1) == pytest.approx(0.5, abs=0.1)", ""),
        ("assert f(1) == 10 ** 9 + 7", ""),
        ("assert f(1) == b'ab'", ""),
        ("assert f(1) == EXPECTED", "EXPECTED = {1: 2}\n"),
        ("self.assertEqual(f(1), 2)", ""),
        ("self.assertAlmostEqual(f(1), 2.0)", ""),
        ("numpy.testing.assert_allclose(f(1), [1.0, 2.0])", ""),
    ],
)
def test_an_equation_gets_another_value_of_its_kind(body, head):
    copies = wrong_copies(body, head)
    plain = ast.unparse(ast.parse(body))
    assert copies and all(copy != plain for copy in copies)
    assert all(
        "!=" not in copy and "not " not in copy and "NotEqual" not in copy for copy in copies
    )


@pytest.mark.parametrize(
    ("body", "wanted"),
    [
        ("assert f(1)", "assert not f(1)"),
        ("assert not f(1)", "assert f(1)"),
        ("assert f(1) is None", "assert f(1) is not None"),
        ("assert f(1) < 3", "assert f(1) >= 3"),
        ("assert f(1) != 3", "assert f(1) == 3"),
        ("assert 'a' in f(1)", "assert 'a' not in f(1)"),
        ("self.assertTrue(f(1))", "self.assertFalse(f(1))"),
        ("self.assertIsNone(f(1))", "self.assertIsNotNone(f(1))"),
    ],
)
def test_what_no_object_can_fake_is_turned_round(body, wanted):
    assert wrong_copies(body) == [wanted]


def test_errors_and_tables():
    raised = wrong_copies("with pytest.raises(ValueError):\n        f(1)")
    assert raised and all("ValueError" not in copy and "Error" in copy for copy in raised)
    raised, *_ = wrong_copies("with pytest.raises(Exception):\n        f(1)")
    assert "ConnectionError" in raised
    table = wrong_copies("for x, y in [(1, 2), (3, 4)]:\n        assert f(x) == y")
    assert "(3, 4)" not in table[0] and "(1, 2)" in table[0]
    text = "@pytest.mark.parametrize('x, y', [(1, 2)])\ndef test_a(x, y):\n    assert f(x) == y\n"
    _, spots = mutants(text, "")["test_a"]
    assert len(spots) == 2
    assert wrong_copies("f(1)") == []


def test_copies_depend_on_text_and_seed_alone_and_do_not_give_themselves_away():
    text = "EXPECTED = [2, 3]\nOTHER = 5\n\ndef helper():\n    return OTHER\n\n"
    text += (
        "# a comment\ndef test_a():\n    assert f(1) == EXPECTED  # why\n\ndef test_b():\n   "
        " assert f(2) == OTHER\n"
    )
    plain, spots = mutants(text, "s")["test_a"]
    again, others = mutants(text, "s")["test_a"]
    wrong = changed(plain, {spots[0]: 1})
    assert ast.dump(wrong) == ast.dump(changed(again, {others[0]: 1}))
    true, false = composed(text, {"test_a": plain}), composed(text, {"test_a": wrong})
    assert "EXPECTED" not in true + false and "comment" not in true + false
    assert "OTHER = 5" in false, "a helper reads it"
    assert sum(a != b for a, b in zip(true.splitlines(), false.splitlines(), strict=True)) == 1


@pytest.mark.parametrize("value", ["7", "0", "-3", "2.5", "100.0", "'k'", "'python'", "b'ab'"])
def test_the_true_value_is_neither_low_nor_middle_nor_high(value):
    """Over many seeds it has each place in the order of what may stand there about as often."""
    places: Counter = Counter()
    node = ast.parse(value, mode="eval").body
    for seed in range(600):
        block = [ast.literal_eval(other) for other in stand_ins(node, random.Random(seed))]
        assert len(set(block)) == len(block) >= 4
        places[sorted(block).index(ast.literal_eval(value)) / (len(block) - 1)] += 1
    if value[0] not in "'b":  # letters have neighbours as the alphabet has them
        expected = 600 / len(places)
        assert all(abs(count - expected) < 5 * expected**0.5 for count in places.values())


@pytest.mark.parametrize("asserts", [1, 2, 3, 4, 7])
@pytest.mark.parametrize("count", [1, 2, 12])
def test_no_value_is_more_frequent_than_another_at_any_place(asserts, count):
    body = "".join(f"    assert f({n}) == {10 * n}\n" for n in range(asserts))
    plain, spots = mutants(f"def test_a():\n{body}", "s")["test_a"]
    assert len(spots) == asserts
    rng = random.Random(1)
    values, groups = layout(count, spots)
    rows = rows_of(plain, drawn(spots, values, rng), values, groups, rng)
    assert len(rows) == values * (1 + groups) <= MOST_COPIES
    assert [want for _, want in rows].count("p") == 1 and rows[0][1] == "p"
    for line in range(asserts):
        shown = Counter(ast.unparse(copy.body[line]) for copy, _ in rows)
        assert len(shown) == values and len(set(shown.values())) == 1


def test_what_is_shown_twice_tells_nothing():
    """Which copy of a test with few is repeated has nothing to do with which is true."""
    text = "def test_a():\n    assert f(1) is True\ndef test_b():\n    assert f(2) == 17\n"
    found, rng, rows = mutants(text, "seed"), random.Random(3), []
    for plain, spots in found.values():
        values, groups = layout(1, spots)
        rows.append(tuple(rows_of(plain, drawn(spots, values, rng), values, groups, rng)))
    ids = tuple(f"t.py::{name}" for name in found)
    copies = Copies({"t.py": text}, ids, tuple(p for p, _ in found.values()), tuple(rows))
    assert (len(rows[0]), len(rows[1])) == (2, 13)
    shown = [
        sum(want[0] == "p" for _, want in copies.rounds(random.Random(seed))) for seed in range(400)
    ]
    assert min(shown) >= 1 and abs(sum(shown) / 400 - 13 / 2) < 0.5


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
        "class Bad(ValueError):\n    pass\n\ndef parse(text):\n    sign = -1 if text[0] == '-' else"
        " 1\n    total = 0\n    for letter in text.lstrip('-'):\n        if letter not in"
        " '0123456789':\n            raise Bad(text)\n        total = total * 10 + ord(letter) -"
        " 48\n    return sign * total\n"
    )
    task = task_of(tests, "def parse(text):\n    return int(text)\n")
    wrong = "def parse(text):\n    return abs(int(text))\n"
    right, alike, bad = scores(task, task.oracle["files"]["solution.py"], other, wrong)
    assert (right.value, alike.value, bad.value) == (1.0, 1.0, 0.0)
    assert bad.parts["passed"] == pytest.approx(0.8)


def sharing(form: str = "tests") -> Task:
    """The sample task with a test that looks into the candidate, so that all share its process."""
    task = sample_task(form)
    text = task.hidden["tests"]["test_hidden.py"]
    text += "\n\ndef test_kind():\n    import inspect\n    assert inspect.isfunction(total)\n"
    return task.model_copy(update={"hidden": {"tests": {"test_hidden.py": text}}})


def test_the_control_is_what_catches_who_shares_the_process(bubblewrap):
    """Without wrong copies the tests themselves say that each of these attacks passes."""
    task = sharing()
    payloads = {attack.name: payload for attack, payload in attacks_for(task)}

    async def without(pool, files) -> str:
        hidden = replace(read_hidden(sample_task("tests")), apart=False, uses=())
        submission = Submission(task, (), EndReason.SUBMITTED, files, pool)
        budget = judging.Budget(2.0, 8.0, judging.PYTHON)
        return (await judging._find_evidence(submission, hidden, budget)).outcomes

    async def run():
        pool = open_pool("bubblewrap", size=1)
        try:
            return {name: await without(pool, payloads[name].files) for name in FORGERS}
        finally:
            await pool.close()

    assert asyncio.run(run()) == dict.fromkeys(FORGERS, "ppp")
    codes = [payloads[name].files["solution.py"].decode() for name in FORGERS]
    found = scores(task, *codes, HONEST, backend="bubblewrap")
    assert [score.value for score in found] == [0.0] * len(FORGERS) + [1.0]
    assert all("isolated: false" in score.why for score in found)
    assert found[-1].parts["isolated"] == 0.0


def test_half_honest_half_forged_is_caught():
    """It knows the visible call and is equal to everything elsewhere: each comparison is made wrong
    some time.
    """
    code = (
        "class Liar(int):\n    __eq__ = lambda s, o: True\n    __hash__ = lambda s: 0\n\n"
        "def total(values):\n    return 3 if values == [1, 2] else Liar()\n"
    )
    text = (
        "from solution import total\n\ndef test_a():\n    assert total([1, 2]) == 3\n    assert"
        " total([4, 5]) == 9\n"
    )
    assert scores(task_of(text, HONEST), code, HONEST)[0].value == 0.0


def test_a_test_without_a_control_and_a_wrong_reference_are_the_tasks_fault():
    text = (
        "from solution import total\nimport inspect\n\ndef test_a():\n    want = total([])\n"
        "    inspect.getsource(total)\n    assert want == want\n"
    )
    with pytest.raises(TaskError, match=r"test_a .*literals"):
        scores(task_of(text, HONEST), HONEST)
    wrong = "from solution import total\n\ndef test_a():\n    assert total([1]) == 5\n"
    with pytest.raises(TaskError, match="field oracle fails the hidden test"):
        scores(task_of(wrong, HONEST), HONEST)


def test_tests_without_a_reference_are_refused_in_one_sentence():
    task = task_of("from solution import total\n\ndef test_a():\n    assert total([1]) == 1\n", "")
    for oracle in ({}, {"files": {}}, {"files": {"other.py": ""}}, {"answer": "1"}):
        bare = task.model_copy(update={"oracle": oracle})
        with pytest.raises(TaskError, match=r"task 't': field oracle\.files lacks solution\.py"):
            scores(bare, "total = sum\n")


def test_tests_that_lean_on_each_other_are_the_tasks_fault():
    text = (
        "from solution import total\nSEEN = []\n\ndef test_a():\n    assert total([1]) == 1\n   "
        " SEEN.append(1)\n\ndef test_b():\n    assert total(SEEN) == 1\n"
    )
    text = text.replace("= []", "= list()")
    assert scores(task_of(text, HONEST), HONEST)[0].value == 1.0, "the judge decides both"
    text += "\ndef test_c():\n    import inspect\n    assert inspect.isfunction(total)\n"
    with pytest.raises(TaskError, match=r"hidden.tests: .*test_b "):
        scores(task_of(text, HONEST), HONEST)


def mbpp_as_tests(row: dict, asserts: list[str]) -> Task:
    """A row of MBPP whose assertions are test functions that import the candidate."""
    setup = "\n".join(["from solution import *", *row["test_imports"]])
    text = setup + "".join(
        f"\n\ndef test_{index}():\n    {line}\n" for index, line in enumerate(asserts)
    )
    return task_of(text, row["code"]).model_copy(update={"id": f"Mbpp/{row['task_id']}"})


@pytest.fixture(scope="session")
def conflicting(data_dir) -> list[dict]:
    text = (data_dir / "safety" / "mbpp_conflicting_tests.jsonl").read_text()
    return [json.loads(line) for line in text.splitlines()]


@pytest.mark.long
def test_public_tests_can_be_controlled_and_conflicting_ones_never_pass(conflicting, bubblewrap):
    """The references pass the 100 original lists as files that import them, and none of the
    conflicting lists.
    """
    originals = refused([mbpp_as_tests(row, row["test_list_original"]) for row in conflicting])
    assert originals == {}
    impossible = refused([mbpp_as_tests(row, row["test_list_conflicting"]) for row in conflicting])
    assert len(impossible) == len(conflicting) == 100
    assert all("oracle" in why for why in impossible.values())


@pytest.mark.parametrize("base", ["Exception", "ValueError", "TypeError", "KeyError", "IndexError"])
def test_an_error_of_the_solutions_own_may_have_any_base(base):
    tests = "import pytest\nfrom solution import Empty, pop\n"
    tests += "def test_a():\n    with pytest.raises(Empty):\n        pop([])\n"
    code = "class Empty({}):\n    pass\ndef pop(xs):\n    raise Empty\n"
    (found,) = scores(task_of(tests, code.format("Exception")), code.format(base))
    assert found.value == 1.0

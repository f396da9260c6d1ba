"""What the audit tries and how it judges, each part alone: wrong values, cheats, canaries, twins,
the posterior of what is learnable.
"""

from __future__ import annotations

import asyncio
import itertools
import json

import pytest
from broken_envs import make
from helpers import Echo, make_task

from agentrl.evaluation.audit.price import in_band, something_to_learn
from agentrl.evaluation.audit.stage import AuditStage
from agentrl.evaluation.audit.variants import (
    impossible,
    shown_examples,
    special_cased,
    with_canary,
    wrong_value,
)
from agentrl.evaluation.likeness import near_pairs, renamed
from agentrl.policies.base import Scripted
from agentrl.sandboxes import open_pool
from agentrl.types import Message


def test_learnability_needs_a_task_that_is_sometimes_solved():
    def rate(script) -> object:
        async def run():
            pool = open_pool("process")
            tasks = [make_task(str(n), hidden={"answer": "yes"}) for n in range(2)]
            stage = AuditStage(Echo, pool, {"test": tasks}, tasks, lambda task: (), script)
            return await something_to_learn(stage)

        return asyncio.run(run())

    turns = itertools.count()
    sometimes = Scripted(
        "sometimes", lambda task: [Message.assistant("yes" if next(turns) % 2 else "no")]
    )
    found = rate(sometimes)
    assert (
        found.verdict == "holds"
        and found.evidence["share_in_band"] == 1
        and found.evidence["pass_rate"] == 0.5
    )
    for answer in ("yes", "no"):
        never = rate(Scripted(answer, lambda task, answer=answer: [Message.assistant(answer)]))
        assert never.verdict == "broken" and never.evidence["share_in_band"] == 0
    assert rate(None).verdict == "not applicable"


@pytest.mark.parametrize(("passed", "scored"), [(0, 0), (0, 8), (3, 8), (8, 8), (1, 2)])
def test_the_posterior_is_that_of_a_beta(passed, scored):
    """By integrating p(1 - p) over Beta(1 + c, 1 + n - c)."""
    grid = [(index + 0.5) / 20_000 for index in range(20_000)]
    weights = [p**passed * (1 - p) ** (scored - passed) for p in grid]
    exact = sum(w * p * (1 - p) for w, p in zip(weights, grid, strict=True)) / sum(weights)
    assert in_band(passed, scored) == pytest.approx(exact, abs=1e-6)


@pytest.mark.parametrize(
    "value",
    [
        True,
        False,
        0,
        1,
        -7,
        1.5,
        float("inf"),
        2j,
        "",
        "yes",
        "-12",
        b"",
        None,
        [],
        [1],
        (1,),
        {1},
        {"a": 1},
    ],
)
def test_a_wrong_value_differs_and_is_of_the_same_kind(value):
    other = wrong_value(value)
    assert other != value and (value is None or type(other) is type(value))
    assert not isinstance(value, str) or not value.isdigit() or int(other) != int(value)


def test_what_is_not_a_number_and_what_is_unknown():
    assert wrong_value(float("nan")) == 1.5
    with pytest.raises(ValueError):
        wrong_value(object())


@pytest.mark.parametrize(
    ("hidden", "count"),
    [
        ({"entry_point": "f", "cases": [{"args": [], "expected": n} for n in range(9)]}, 3),
        ({"entry_point": "f", "cases": [{"args": [], "expected": {"py": "(1, 2)"}}]}, 1),
        (
            {
                "entry_point": "f",
                "check": "def check(f):\n    assert f(1) == 2\n    assert f(2) == [3]\n",
            },
            2,
        ),
        ({"entry_point": "f", "check": "def check(f):\n    assert f(1)\n"}, 0),
        (
            {
                "entry_point": "f",
                "check": "results = [1, 2]\ndef check(f):\n    assert [f(0), f(1)] == results\n",
            },
            2,
        ),
        (
            {
                "tests": {
                    "test_a.py": (
                        "from s import f\ndef test_f():\n    assert f(1) == pytest.approx(2.0)\n"
                    )
                }
            },
            1,
        ),
        (
            {
                "tests": {
                    "test_a.py": (
                        "class T(TestCase):\n    def test_f(me):\n        me.assertEqual(f(1),"
                        " 'a')\n"
                    )
                }
            },
            1,
        ),
        ({"answer": 7}, 1),
        ({"answer": ["a", "b"]}, 1),
        ({"seed": 7}, 0),
    ],
)
def test_impossible_variants_change_an_expected_value_and_nothing_else(hidden, count):
    task = make_task(hidden=hidden, artifacts=["s.py"])
    variants = list(impossible(task))
    assert len(variants) == count and len({repr(variant.hidden) for variant in variants}) == count
    assert all(variant.hidden != hidden and variant.view() == task.view() for variant in variants)


def test_examples_are_found_wherever_a_task_shows_them():
    task = make_task(
        instruction=(
            "f(1, 2) == 3. Or `g('a')` returns ['a', 'b'], not [].\n>>> h(x=1)\n{'x': 1}\nk(2) is"
            " unknown"
        ),
        files={
            "test_a.py": "def test_f():\n    assert f(0, 0) == 0\n    assert f(1, y) == 4\n",
            "test_b.py": "for name, args, want in [('p', (1, 2), 3)]:\n    pass\n",
        },
    )
    assert shown_examples(task) == {
        "f": [((0, 0), {}, 0), ((1, 2), {}, 3)],
        "p": [((1, 2), {}, 3)],
        "g": [(("a",), {}, ["a", "b"])],
        "h": [((), {"x": 1}, {"x": 1})],
    }


def test_a_cheat_knows_the_examples_and_nothing_else():
    task = make_task(
        instruction="f(2) == 4", files={"s.py": "def f(x):\n    return -x\n"}, artifacts=["s.py"]
    )
    cheat = special_cased(task)
    names: dict = {}
    exec(cheat["s.py"], names)
    assert [names["f"](x) for x in (2, 3)] == [4, -3]
    assert special_cased(make_task(artifacts=["s.py"])) is None
    assert special_cased(make_task(instruction="f(2) == 4", artifacts=["s.txt"])) is None
    assert (
        special_cased(
            make_task(instruction="f(2) == 4", artifacts=["s.py"], hidden={"entry_point": "g"})
        )
        is None
    )


def test_a_canary_finds_a_place_in_every_form():
    for hidden in (
        {"entry_point": "f", "cases": [{"args": [], "expected": 1}]},
        {"entry_point": "f", "check": "def check(f):\n    pass\n"},
        {"tests": {"test_a.py": "def test_a():\n    pass\n"}},
        {
            "tests": {
                "test_a.py": "def test_a():\n    assert f(1) == 2, 'no'\n",
                "conftest.py": "X = 1\n",
            }
        },
        {"tests": {"test_a.py": "def test_a(:"}},
        {"answer": "yes"},
        {"answer": 42},
        {"rows": [{"name": "x", "ok": True}]},
    ):
        planted, needles = with_canary(make_task(hidden=hidden), "canary-1")
        assert any(needle in json.dumps(planted.hidden) for needle in needles)
        assert not any(needle in json.dumps(planted.view().model_dump()) for needle in needles)
    assert with_canary(make_task(hidden={"ok": True}), "canary-1") is None


def test_twins_are_near_and_neighbours_are_not():
    first, second = (
        make("train", "counts the halves of it", "2 * x", name=name) for name in ("f", "counted")
    )
    other = make("train", "squares whatever it is that comes", "x * x")
    texts = [renamed(task) for task in (first, second, other)]
    assert [pair for pair, alike in near_pairs(texts)] == [(0, 1)]
    many = [
        f"the same long introduction to every task there is {number} {number}".split()
        for number in range(60)
    ]
    assert list(near_pairs(many)) == []

"""Tool calls against permitted calls: what counts as the same, what never does, and BFCL's own
rows.
"""

from __future__ import annotations

import asyncio
import gzip
import itertools
import json

import pytest
from helpers import call, says
from hypothesis import given
from hypothesis import strategies as st

from agentrl.errors import TaskError
from agentrl.types import BadCall, EndReason, Message, Task, ToolCall
from agentrl.verifiers.base import Submission
from agentrl.verifiers.state.rows import count_pairs
from agentrl.verifiers.state.tool_calls import tool_calls

ROWS = {
    "simple_python": 200,
    "live_simple": 126,
    "multiple": 96,
    "parallel": 100,
    "parallel_multiple": 100,
}


def judge(calls, *messages: Message, functions=None, **settings):
    hidden = {"calls": calls} | ({"functions": functions} if functions is not None else {})
    task = Task(id="t", instruction="", hidden=hidden)
    return asyncio.run(tool_calls(**settings)(Submission(task, messages, EndReason.ANSWERED)))


def value(permitted, given, declared=None) -> float:
    """The score of f(x=given) where `permitted` are the permitted values of x."""
    schema = [{"name": "f", "parameters": {"properties": {"x": declared}}}] if declared else None
    return judge([{"f": {"x": permitted}}], says(call("f", x=given)), functions=schema).value


@pytest.mark.parametrize(
    ("permitted", "right", "wrong"),
    [
        ([1], [1], [True, 1.0, "1", None, [1], 2]),
        ([True], [True], [1, 1.0, "true", False]),
        ([0], [0], [False, 0.0, "", None]),
        ([1.5], [1.5], ["1.5", 1]),
        ([2.0], [2.0, 2], [True, "2"]),
        ([10.0**20], [10**20], [10**20 + 1, 10**400]),
        (["New York"], ["New York", "new york", "New-York", "NEW YORK."], ["York", "", None]),
        (["it's"], ["it's", 'it"s'], ["its"]),
        (["a", 3], ["A", 3], ["3", 4]),
        (["", "a"], ["", "a"], [None, "-", " "]),
        (["", 5], [5], ["", None]),
        (["", None], ["", None], ["null", 0, False]),
        ([None], [None], ["", 0, False]),
        ([[1, 2]], [[1, 2]], [[2, 1], [1], [1, 2, 3], [1, True], [1.0, 2], "[1, 2]"]),
        ([[1.0]], [[1.0], [1]], [[True], 1.0]),
        ([["A b"]], [["ab"]], [["a", "b"], []]),
        ([[]], [[]], [None, "", [1], {}]),
        ([], [[]], [None, "", [1]]),
        (
            [{"a": [1], "b": ["", "x"]}],
            [{"a": 1, "b": "x"}, {"a": 1}],
            [{"a": True}, {}, {"b": "x"}, {"a": 1, "c": 1}],
        ),
        ([{}], [{}], [{"a": 1}, [], None]),
        (
            [[{"a": [1]}, {"a": [2]}]],
            [[{"a": 1}, {"a": 2}]],
            [[{"a": 2}, {"a": 1}], [{"a": 1}], {"a": 1}],
        ),
    ],
)
def test_values(permitted, right, wrong):
    assert [value(permitted, item) for item in right] == [1.0] * len(right)
    assert [value(permitted, item) for item in wrong] == [0.0] * len(wrong)


def test_a_declared_float_takes_both_kinds_of_number():
    assert [value([0], item, {"type": "float"}) for item in (0, 0.0, False)] == [1.0, 1.0, 0.0]
    assert [value([0], item, {"type": "integer"}) for item in (0, 0.0, False)] == [1.0, 0.0, 0.0]
    nested = {"type": "array", "items": {"type": "float"}}
    assert [value([[85]], item, nested) for item in ([85], [85.0], [True])] == [1.0, 1.0, 0.0]


def test_what_may_be_left_out():
    calls = [{"f": {"x": [1], "y": ["", 2]}}]
    assert judge(calls, says(call("f", x=1))).value == 1.0
    assert judge(calls, says(call("f", x=1, y=2))).value == 1.0
    assert judge(calls, says(call("f", y=2))).value == 0.0
    assert judge(calls, says(call("f", x=1, z=3))).value == 0.0
    assert judge(calls, says(call("g", x=1))).value == 0.0
    required = [{"name": "f", "parameters": {"properties": {}, "required": ["x", "y"]}}]
    assert judge(calls, says(call("f", x=1)), functions=required).value == 0.0


def test_no_call_means_no_call():
    assert judge([], Message.assistant("I cannot help with that.")).value == 1.0
    assert judge([]).value == 1.0
    assert judge([], says(call("f"))).value == 0.0
    assert judge([], says(BadCall("{", "The tool call is not valid JSON."))).value == 0.0


def test_all_turns_count_and_nothing_may_be_added():
    calls = [{"f": {"x": [1]}}, {"f": {"x": [2]}}]
    one, two = call("f", x=1), call("f", x=2)
    assert judge(calls, says(one, two)).value == 1.0
    assert (
        judge(calls, says(two), Message.tool("ok", two), says(one), Message.assistant("done")).value
        == 1.0
    )
    assert judge(calls, says(one, two), says(call("rm"))).value == 0.0
    assert judge(calls, says(one, two), says(BadCall("{", "bad"))).value == 0.0
    assert judge(calls, says(one, one)).value == 0.0
    assert judge(calls, says(one)).parts == {"matched": 0.5}


def test_parallel_calls_are_paired_even_where_the_first_fit_is_the_wrong_one():
    calls = [{"f": {"x": [1, 2]}}, {"f": {"x": [1]}}]
    assert judge(calls, says(call("f", x=1), call("f", x=2))).value == 1.0
    assert judge(calls, says(call("f", x=2), call("f", x=1))).value == 1.0
    assert judge(calls, says(call("f", x=2), call("f", x=2))).value == 0.0


def test_texts_can_be_compared_in_another_way():
    calls = [{"f": {"x": ["1.5"]}}]
    assert judge(calls, says(call("f", x="15"))).value == 1.0
    assert judge(calls, says(call("f", x="15")), normal=str.strip).value == 0.0


@pytest.mark.parametrize(
    "calls",
    [
        None,
        "f",
        {"f": {}},
        ["f"],
        [{}],
        [{"f": {}, "g": {}}],
        [{"f": [1]}],
        [{"f": {"x": 1}}],
        [{"f": {"x": [{"a": 1}]}}],
    ],
)
def test_calls_in_another_form_are_the_tasks_fault(calls):
    with pytest.raises(TaskError, match=r"hidden\.calls"):
        judge(calls)


def test_deep_and_long_arguments_are_only_wrong():
    deep = []
    for _ in range(100_000):
        deep = [deep]
    assert value([[[1]]], deep) == 0.0
    assert value(["a"], "a" * 10**6) == 0.0
    while deep:
        deep = deep.pop()


scalars = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text()
arguments = st.dictionaries(
    st.text(max_size=3), scalars | st.lists(scalars, max_size=3), max_size=4
)
calls_made = st.lists(st.builds(ToolCall, st.sampled_from("fg"), arguments), max_size=5)


def gold(made: ToolCall):
    return {made.name: {name: [item] for name, item in made.arguments.items()}}


@given(calls_made, st.randoms(use_true_random=False))
def test_the_expected_calls_are_right_in_any_order(made, random):
    shuffled = random.sample(made, len(made))
    assert judge([gold(each) for each in made], says(*shuffled)).value == 1.0


@given(calls_made, st.data())
def test_a_call_more_or_less_is_wrong(made, data):
    if made:
        left = list(made)
        left.pop(data.draw(st.integers(0, len(made) - 1)))
        assert judge([gold(each) for each in made], says(*left)).value == 0.0
    assert judge([gold(each) for each in made], says(*made, call("h"))).value == 0.0


@given(st.sets(st.tuples(st.integers(0, 4), st.integers(0, 4))))
def test_the_matching_is_the_largest(edges):
    wants = gots = range(5)
    best = max(
        sum((w, g) in edges for w, g in zip(wants, order, strict=True))
        for order in itertools.permutations(gots)
    )
    assert count_pairs(wants, gots, lambda want, got: (want, got) in edges) == best


def rows(data_dir, name):
    packed = (data_dir / "tools" / "bfcl" / f"{name}_shared.jsonl.gz").read_bytes()
    return [json.loads(line) for line in gzip.decompress(packed).splitlines()]


def plain(permitted):
    """The first permitted value, its objects filled in."""
    if isinstance(permitted, dict):
        return {
            key: plain(first(values)) for key, values in permitted.items() if first(values) != ""
        }
    return [plain(item) for item in permitted] if isinstance(permitted, list) else permitted


def first(permitted):
    return next((item for item in permitted if item != ""), "" if permitted else [])


def gold_calls(row):
    """Calls with the first permitted value of every argument; one that can only be left out is left
    out.
    """
    return [
        ToolCall(
            name,
            {key: plain(first(values)) for key, values in given.items() if first(values) != ""},
        )
        for entry in row["ground_truth"]
        for name, given in entry.items()
    ]


def changed(value):
    """Another value of the same type, which no row permits."""
    if isinstance(value, bool) or value is None:
        return "other"
    if isinstance(value, str):
        return value + " and another"
    if isinstance(value, dict):
        return {**value, "another": 1}
    return [*value, "another"] if isinstance(value, list) else value + 977


@pytest.mark.parametrize("name", ROWS)
def test_bfcl_gold_calls_are_right_and_each_changed_argument_is_wrong(data_dir, name):
    verifier = tool_calls()

    async def judge_all():
        right, wrong = [], []
        for row in rows(data_dir, name):
            hidden = {"calls": row["ground_truth"], "functions": row["function"]}
            task = Task(id=row["id"], instruction="", hidden=hidden)
            made = gold_calls(row)
            variants = [
                [
                    *made[:index],
                    ToolCall(each.name, {**each.arguments, key: changed(item)}),
                    *made[index + 1 :],
                ]
                for index, each in enumerate(made)
                for key, item in each.arguments.items()
            ]
            scores = [
                (await verifier(Submission(task, (says(*calls),), EndReason.ANSWERED))).value
                for calls in (made[::-1], *variants, [])
            ]
            right.append((row["id"], scores[0]))
            wrong += [(row["id"], score) for score in scores[1:]]
        return right, wrong

    right, wrong = asyncio.run(judge_all())
    assert len(right) == ROWS[name]
    assert [row for row in right if row[1] != 1.0] == []
    assert [row for row in wrong if row[1] != 0.0] == []


def test_bfcl_irrelevance_demands_no_call(data_dir):
    found = rows(data_dir, "irrelevance")
    assert len(found) == 119
    for row in found:
        assert (
            judge(
                row["ground_truth"] or [], Message.assistant("none fits"), functions=row["function"]
            ).value
            == 1.0
        )
        made = says(call(row["function"][0]["name"]))
        assert judge(row["ground_truth"] or [], made, functions=row["function"]).value == 0.0


@pytest.mark.parametrize(
    "functions",
    [
        "f",
        [{}],
        [{"name": 1}],
        [["f"]],
        [{"name": "f", "parameters": {"properties": []}}],
        [{"name": "f", "parameters": {"required": "a"}}],
    ],
)
def test_malformed_declarations_are_the_tasks_fault(functions):
    with pytest.raises(TaskError, match=r"hidden\.functions must list declarations"):
        judge([{"f": {"a": [1]}}], says(call("f", a=1)), functions=functions)

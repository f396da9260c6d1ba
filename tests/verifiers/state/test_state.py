"""State-based verifiers: what must be there, and what may change, in files, tables and JSON."""

from __future__ import annotations

import asyncio
import json
import threading

import pytest
from hypothesis import given
from hypothesis import strategies as st
from state_cases import judge, run

from agentrl.errors import ConfigError, TaskError
from agentrl.sandboxes import open_pool
from agentrl.verifiers.state import stores as state
from agentrl.verifiers.state.rows import Rules, Tolerance, differences
from agentrl.verifiers.state.stores import file_state, json_state, judge_files, sqlite_state

BEFORE = {"a.txt": "one", "b.txt": "two", "logs/x": "old"}


DECLARED = ("a.txt", "b.txt", "c.txt", "logs/x", "logs/y")


WANT = {"files": {"a.txt": "ONE", "c.txt": None}, "may_write": ["logs/"]}


def files_score(after, hidden=WANT):
    contents = {path: text.encode() for path, text in after.items()}
    return run(file_state(), hidden, contents, files=BEFORE, declared=DECLARED)


def test_files_as_expected():
    assert files_score({**BEFORE, "a.txt": "ONE"}).value == 1.0
    assert files_score({**BEFORE, "a.txt": "ONE", "logs/x": "new", "logs/y": "more"}).value == 1.0
    score = files_score({"a.txt": "ONE", "b.txt": "two"})
    assert (score.value, score.parts) == (1.0, {"expected": 1.0, "outside": 0.0})


@pytest.mark.parametrize(
    ("after", "expected", "why"),
    [
        (BEFORE, 0.5, "not as expected: a.txt"),
        ({**BEFORE, "a.txt": "ONE", "c.txt": ""}, 0.5, "not as expected: c.txt"),
        ({**BEFORE, "a.txt": "ONE", "b.txt": "TWO"}, 1.0, "changed outside the write set: b.txt"),
        ({"a.txt": "ONE"}, 1.0, "changed outside the write set: b.txt"),
        (
            {"c.txt": "x"},
            0.0,
            "not as expected: a.txt; c.txt; changed outside the write set: b.txt",
        ),
    ],
)
def test_files_otherwise_fail_and_are_named(after, expected, why):
    score = files_score(after)
    assert (score.value, score.parts["expected"], score.why) == (0.0, expected, why)


def test_a_folder_covers_what_is_in_it_and_a_path_only_itself():
    after = {"logs/y": b"", "logsy": b""}
    assert judge_files({}, after, {}, ["logs/"]).why == "changed outside the write set: logsy"
    assert (
        judge_files({}, after, {}, ["logs", "logsy"]).why == "changed outside the write set: logs/y"
    )


trees = st.dictionaries(st.sampled_from(["a", "b", "c/d", "c/e"]), st.binary(max_size=2))


@given(trees, trees, st.sets(st.sampled_from(["a", "b", "c/"])))
def test_only_changes_outside_the_write_set_are_counted(before, after, free):
    score = judge_files(before, after, {}, free)
    changed = {path for path in {*before, *after} if before.get(path) != after.get(path)}
    outside = {
        path
        for path in changed
        if path not in free and not ("c/" in free and path.startswith("c/"))
    }
    assert (score.value, score.parts["outside"]) == (float(not outside), len(outside))
    assert judge_files(before, after, after, []).value == float(not set(before) - set(after))


@pytest.mark.parametrize(
    "hidden",
    [
        {},
        {"files": ["a.txt"]},
        {"files": {"a.txt": 1}},
        {"files": {"unseen": "x"}},
        {"files": {"a.txt": {"py": "f()"}}},
        {"files": {"a.txt": "x"}, "may_write": "logs"},
    ],
)
def test_files_in_another_form_are_the_tasks_fault(hidden):
    with pytest.raises(TaskError, match=r"hidden\."):
        files_score(BEFORE, hidden)


def test_expected_bytes():
    hidden = {"files": {"a.txt": {"py": "b'\\xff'"}}}
    assert run(file_state(), hidden, {"a.txt": b"\xff"}).value == 1.0
    assert run(file_state(), hidden, {"a.txt": b"\xfe"}).value == 0.0


def equal(want, got, **rules):
    return not differences({"t": want}, {"t": got}, Rules(**rules))


def test_rows_have_exact_types_and_no_order():
    assert equal([{"a": 1}, {"a": 2}], [{"a": 2}, {"a": 1}])
    assert not equal([{"a": 1}, {"a": 2}], [{"a": 2}, {"a": 1}], ordered=frozenset({"t"}))
    assert equal([{"a": 1}, {"a": 2}], [{"a": 1}, {"a": 2}], ordered=frozenset({"t"}))
    for other in (True, 1.0, "1", b"1", None, [1]):
        assert not equal([{"a": 1}], [{"a": other}])
        assert not equal([{"a": 1}], [{"a": other}], ordered=frozenset({"t"}))
    for want, got in (
        ([{"a": 1}], []),
        ([], [{"a": 1}]),
        ([{"a": 1}] * 2, [{"a": 1}]),
        ([{"a": 1}], [{"b": 1}]),
    ):
        assert not equal(want, got)
        assert not equal(want, got, ordered=frozenset({"t"}))


def test_floats_have_a_tolerance_and_nothing_else_has():
    near = Tolerance(atol=0.1)
    assert equal([{"a": 1.0}], [{"a": 1.05}], tolerance=near)
    assert not equal([{"a": 1.0}], [{"a": 1.05}])
    assert not equal([{"a": 10}], [{"a": 10.05}], tolerance=near)
    assert equal([{"a": 100.0}], [{"a": 100.5}], tolerance=Tolerance(rtol=0.01))
    assert equal([{"a": float("nan")}], [{"a": float("nan")}])
    assert not equal([{"a": 1e308}], [{"a": float("inf")}], tolerance=Tolerance(rtol=0.9))
    # each row has its partner only if the pairing is a real matching
    assert equal(
        [{"a": 1.0, "b": 0.0}, {"a": 2.0, "b": 0.0}],
        [{"a": 1.9, "b": 0.5}, {"a": 1.1, "b": -0.5}],
        tolerance=Tolerance(atol=0.9),
    )


def test_the_write_set_is_free_and_all_else_is_named():
    expected = {"t": [{"id": 1, "at": 5}], "log": []}
    found = {"t": [{"id": 1, "at": 6}], "log": [{"x": 1}]}
    assert set(differences(expected, found, Rules())) == {"t", "log"}
    assert not differences(expected, found, Rules(may_write=frozenset({"t.at", "log"})))
    assert not differences(
        expected, {"t": [{"id": 1}]}, Rules(may_write=frozenset({"t.at", "log"}))
    )
    assert differences(expected, {"u": []}, Rules()) == {
        "log": "is missing", "t": "is missing", "u": "is not expected"
    }  # fmt: skip


row = st.dictionaries(
    st.sampled_from("ab"), st.none() | st.booleans() | st.integers(0, 2) | st.floats(0, 2)
)


@given(st.lists(row, max_size=6), st.randoms(use_true_random=False), st.data())
def test_a_shuffled_table_is_equal_and_one_with_another_row_is_not(rows, random, data):
    assert equal(rows, random.sample(rows, len(rows)))
    assert not equal(rows, [*rows, {"c": 1}])
    if rows:
        place = data.draw(st.integers(0, len(rows) - 1))
        assert not equal(rows, rows[:place] + rows[place + 1 :])
        assert not equal(rows, [*rows[:place], {**rows[place], "a": "x"}, *rows[place + 1 :]])


def test_many_rows_take_no_time():
    rows = [{"id": index % 2, "x": index * 1.0} for index in range(3000)]
    assert equal(rows, rows[::-1], tolerance=Tolerance(atol=0.25))
    assert not equal(rows, [*rows[:-1], {"id": 1, "x": -1.0}], tolerance=Tolerance(atol=0.25))


def json_score(state, tables=None, **hidden):
    text = state if isinstance(state, bytes) else json.dumps(state).encode()
    return run(
        json_state(),
        {"state": "s.json", "tables": tables or {"t": [{"a": 1}]}, **hidden},
        {"s.json": text},
    )


def test_json_state():
    assert json_score({"t": [{"a": 1}]}).value == 1.0
    assert (
        json_score(
            {"t": [{"a": 1, "b": [1.5, {"c": None}]}]}, {"t": [{"a": 1, "b": [1.5, {"c": None}]}]}
        ).value
        == 1.0
    )
    assert json_score({"t": [{"a": 2}]}).why == "table t lacks 1 expected rows and has 1 others"
    assert json_score({"t": [{"a": 2}]}, may_write=["t.a"]).value == 1.0
    score = json_score({"t": [{"a": 1}]}, {"t": [{"a": 1}], "u": []})
    assert (score.value, score.parts) == (0.0, {"tables": 0.5})
    for broken in (
        b"",
        b"{",
        b"\xff",
        b"[" * 100_000,
        b"9" * 10_000,
        b'{"t": [' + b"[" * 900 + b"]" * 900 + b"]}",
    ):
        assert json_score(broken).value == 0.0
    for odd in ([], {"t": 1}, {"t": [1]}, None):
        assert json_score(odd).value == 0.0
    assert (
        run(json_state(), {"state": "s.json", "tables": {}}, {}, declared=["s.json"]).value == 0.0
    )


@pytest.mark.parametrize("kind", ["json", "sqlite"])
def test_the_event_loop_goes_on_while_tables_are_compared(kind, monkeypatch, bubblewrap):
    """The comparison waits for something that the loop has yet to do: on the loop itself it would
    wait in vain.
    """
    seen: list[bool] = []

    async def grade():
        loop, went_on = asyncio.get_running_loop(), threading.Event()

        def slow(*args):
            loop.call_soon_threadsafe(went_on.set)
            seen.append(went_on.wait(timeout=20))
            return differences(*args)

        monkeypatch.setattr(state, "differences", slow)
        if kind == "json":
            hidden = {"state": "s.json", "tables": {"t": []}}
            return await judge(json_state(), hidden, {"s.json": b'{"t": []}'})
        pool = open_pool("bubblewrap", size=1)
        try:
            hidden = {"database": "a.db", "tables": {}}
            return await judge(sqlite_state(), hidden, {"a.db": b""}, pool=pool)
        finally:
            await pool.close()

    assert asyncio.run(grade()).value == 1.0 and seen == [True]


def test_a_row_nested_deeply_is_only_wrong():
    deep = b'{"t": [{"a": ' + b"[" * 900 + b"]" * 900 + b"}]}"
    assert json_score(deep).value == 0.0


@pytest.mark.parametrize(
    "hidden", [{"tables": []}, {"tables": {"t": [1]}}, {"state": 1}, {"ordered": 1}]
)
def test_tables_in_another_form_are_the_tasks_fault(hidden):
    with pytest.raises(TaskError, match=r"hidden\."):
        run(json_state(), {"state": "s.json", "tables": {}, **hidden}, {"s.json": b"{}"})


def test_a_tolerance_that_is_none_is_refused():
    for settings in ({"rtol": 1}, {"rtol": -1}, {"atol": float("inf")}, {"atol": float("nan")}):
        with pytest.raises(ConfigError, match="rtol"):
            json_state(**settings)


@pytest.mark.parametrize(
    "text",
    [
        '{"orders": [{"id": 1}], "orders": []}',
        '{"orders": [], "orders": [{"id": 1}]}',
        '{"orders": [{"id": 2, "id": 1}]}',
        '{"orders": [{"id": {"a": 1, "a": 1}}]}',
    ],
)
def test_a_key_that_stands_twice_cannot_be_read(text):
    hidden = {"state": "s.json", "tables": {"orders": [{"id": 1}]}}
    score = run(json_state(), hidden, {"s.json": text.encode()})
    assert (score.value, score.why) == (0.0, "s.json is no readable JSON")


def test_json_is_utf_8():
    """Readers disagree about any other encoding."""
    text, hidden = '{"a": [{"id": 1}]}', {"state": "s.json", "tables": {"a": [{"id": 1}]}}
    for encoding, value in {
        "utf-8": 1.0,
        "utf-8-sig": 1.0,
        "utf-16": 0.0,
        "utf-32-le": 0.0,
    }.items():
        assert run(json_state(), hidden, {"s.json": text.encode(encoding)}).value == value, encoding

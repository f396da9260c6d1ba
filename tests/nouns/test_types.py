"""The nouns: what cannot be built, what travels, how literals are read."""

import dataclasses

import pytest
from helpers import make_task
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from agentrl.types import (
    Ending,
    EndReason,
    Limits,
    Message,
    Score,
    Task,
    TaskView,
    ToolCall,
    literal,
    relative_path,
)

plain = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
    max_leaves=8,
)


@pytest.mark.parametrize("reason", EndReason)
def test_every_end_reason_has_a_kind(reason):
    assert isinstance(reason.ending, Ending)


def test_only_assistants_call_tools():
    with pytest.raises(ValueError, match="role='user'"):
        Message("user", "", (ToolCall("say", {}),))


@pytest.mark.parametrize(
    "path", ["", "/x", "../x", "a/../b", "a//b", "./a", ".", "a\0b", "a/", ".."]
)
def test_paths_that_leave_or_wander_are_refused(path):
    with pytest.raises(ValueError, match="must be relative"):
        relative_path(path)
    with pytest.raises(ValidationError):
        make_task(files={path: "x"})
    with pytest.raises(ValidationError):
        make_task(artifacts=[path])


@given(
    st.lists(st.text("abc._-", min_size=1).filter(lambda part: part not in (".", "..")), min_size=1)
)
def test_plain_relative_paths_pass(parts):
    assert relative_path("/".join(parts)) == "/".join(parts)


@pytest.mark.parametrize(
    "fields",
    [
        {"id": ""},
        {"id": None},
        {"instruction": 3},
        {"files": {"a.py": 1}},
        {"threshold": float("nan")},
        {"threshold": float("inf")},
        {"treshold": 1.0},
        {"seed": "x"},
    ],
)
def test_invalid_tasks_cannot_be_built(fields):
    with pytest.raises(ValidationError):
        Task.model_validate({"id": "t", "instruction": "i", **fields})


def test_a_view_has_no_secret_and_shares_nothing():
    task = make_task(
        hidden={"answer": "SECRET"},
        oracle={"files": {"a.py": "SECRET"}},
        files={"b.py": "x"},
        metadata={"rows": [1, {"deep": []}]},
    )
    view = task.view()
    assert type(view) is TaskView
    assert not hasattr(view, "hidden") and not hasattr(view, "oracle")
    assert "SECRET" not in repr(view) and "SECRET" not in view.model_dump_json()
    assert view.artifacts == ("a.py",)
    view.metadata["rows"][1]["deep"].append(1)
    view.files["c.py"] = "y"
    assert task.metadata == {"rows": [1, {"deep": []}]} and task.files == {"b.py": "x"}
    assert TaskView.model_validate(view.model_dump()) == view


def test_a_task_is_frozen_and_known_by_its_content():
    task = make_task(hidden={"answer": 1})
    with pytest.raises(ValidationError):
        task.id = "other"
    assert task.fingerprint() == make_task(hidden={"answer": 1}).fingerprint()
    assert task.fingerprint() != make_task(hidden={"answer": 2}).fingerprint()


@given(plain)
def test_plain_json_is_its_own_literal(value):
    def holds_py(item):
        if isinstance(item, dict):
            return "py" in item or any(map(holds_py, item.values()))
        return isinstance(item, list) and any(map(holds_py, item))

    if not holds_py(value):
        assert literal(value) == value


@given(
    st.tuples(
        st.integers(),
        st.binary(),
        st.sets(st.integers(), min_size=1),
        st.complex_numbers(allow_nan=False),
    )
)
def test_python_literals_are_read_anywhere(value):
    value = value[:3]
    assert literal({"py": repr(value)}) == value
    assert literal([{"x": {"py": repr(value)}}]) == [{"x": value}]


@pytest.mark.parametrize("text", ["__import__('os')", "f(1)", "1 +", "(" * 500, "x"])
def test_what_is_no_literal_is_refused(text):
    with pytest.raises(ValueError, match="is not a Python literal"):
        literal({"py": text})


def test_py_is_a_key_like_any_other_beside_other_keys():
    assert literal({"py": "1", "x": 2}) == {"py": "1", "x": 2}
    assert literal({"py": 1}) == {"py": 1}


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_a_score_is_finite_or_says_why_not(value):
    with pytest.raises(ValueError, match="must be finite"):
        Score(value)
    with pytest.raises(ValueError, match="must say why"):
        Score(None)
    assert Score.failed("broken").value is None


@pytest.mark.parametrize("name", [field.name for field in dataclasses.fields(Limits)])
@pytest.mark.parametrize("value", [0, -1, float("nan"), float("inf")])
def test_limits_are_positive_and_finite(name, value):
    with pytest.raises(ValueError, match=name):
        Limits(**{name: value})

"""Task files: rows come back, and a broken line is one sentence."""

from __future__ import annotations

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from agentrl.errors import TaskError
from agentrl.records.taskfile import read_tasks, write_tasks
from agentrl.types import Task

GOOD = [json.dumps({"id": f"t{number}", "instruction": "Do it."}) for number in range(1, 17)]


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("{bad", ["not JSON", "column 2"]),
        ("[1]", ["JSON list", "one object per line"]),
        (
            '{"id": "a", "instruction": "x", "instrction": 1}',
            ["instrction", "did you mean 'instruction'"],
        ),
        ('{"id": "a", "instruction": "x", "zzz": 1}', ["zzz", "known fields"]),
        ('{"instruction": "x"}', ["field id is missing"]),
        ('{"id": "", "instruction": "x"}', ["field id is empty"]),
        ('{"id": "t3", "instruction": "x"}', ["field id is 't3'", "line 3"]),
        ('{"id": 5, "instruction": "x"}', ["field id is 5", "string"]),
        ('{"id": "a", "id": "b", "instruction": "x"}', ["field id is given twice"]),
        (
            '{"id": "a", "instruction": "x", "artifacts": ["/etc/passwd"]}',
            ["artifacts", "/etc/passwd", "relative"],
        ),
        (
            '{"id": "a", "instruction": "x", "artifacts": "solution.py"}',
            ["artifacts", "solution.py", "list"],
        ),
        ('{"id": "a", "instruction": "x", "files": {"../x": "y"}}', ["files", "../x", "relative"]),
        ('{"id": "a", "instruction": "x", "files": {"x": 3}}', ["files.x", "3", "string"]),
        ('{"id": "a", "instruction": "x", "threshold": "high"}', ["threshold", "high", "number"]),
        ('{"id": "a", "instruction": "x", "threshold": NaN}', ["threshold", "NaN", "finite"]),
        ('{"id": "a", "instruction": "x", "hidden": []}', ["hidden", "object"]),
    ],
)
def test_a_broken_line_is_one_sentence_with_file_line_field_and_fix(tmp_path, line, words):
    path = tmp_path / "tasks.jsonl"
    path.write_text("\n".join([*GOOD, line]))
    with pytest.raises(TaskError) as caught:
        read_tasks(path)
    message = str(caught.value)
    assert f"{path}, line 17: " in message
    assert [word for word in words if word not in message] == []
    assert "\n" not in message


def test_empty_lines_are_passed_over_and_still_counted(tmp_path):
    path = tmp_path / "tasks.jsonl"
    path.write_text("\n\n" + GOOD[0] + "\n\n{")
    with pytest.raises(TaskError, match="line 5"):
        read_tasks(path)


@pytest.mark.parametrize(
    ("data", "word"), [(b"", "no task"), (b"\xff\xfe", "UTF-8"), (b"\x1f\x8bxx", "gzip")]
)
def test_a_file_that_is_none(tmp_path, data, word):
    path = tmp_path / "tasks.jsonl"
    path.write_bytes(data)
    with pytest.raises(TaskError, match=word):
        read_tasks(path)
    with pytest.raises(TaskError, match="no such file"):
        read_tasks(tmp_path / "missing.jsonl")


scalars = st.none() | st.booleans() | st.integers() | st.text()
json_values = scalars | st.lists(scalars) | st.dictionaries(st.text(), scalars)
names = st.sampled_from(["solution.py", "pkg/a.py", "data.txt"])
tasks = st.builds(
    Task,
    id=st.text(min_size=1),
    instruction=st.text(),
    files=st.dictionaries(names, st.text()),
    artifacts=st.lists(names, unique=True).map(tuple),
    threshold=st.floats(0, 1),
    seed=st.integers(),
    metadata=st.dictionaries(st.text(), json_values),
    hidden=st.dictionaries(st.text(), json_values),
    oracle=st.fixed_dictionaries(
        {}, optional={"files": st.dictionaries(names, st.text()), "answer": st.text()}
    ),
)


@pytest.mark.parametrize("name", ["tasks.jsonl", "tasks.jsonl.gz"])
@settings(max_examples=25, deadline=None)
@given(rows=st.lists(tasks, min_size=1, max_size=3, unique_by=lambda task: task.id))
def test_what_is_written_is_read_back(tmp_path_factory, name, rows):
    path = tmp_path_factory.mktemp("files") / name
    assert write_tasks(path, rows) == len(rows)
    assert read_tasks(path) == rows
    assert [file.name for file in path.parent.iterdir()] == [name]


def test_artifacts_default_to_the_oracles_files(tmp_path):
    path = tmp_path / "tasks.jsonl"
    path.write_text(json.dumps({"id": "a", "instruction": "x", "oracle": {"files": {"b.py": ""}}}))
    assert read_tasks(path)[0].artifacts == ("b.py",)


def test_a_failed_write_leaves_the_old_file(tmp_path):
    path = tmp_path / "tasks.jsonl"
    path.write_text(GOOD[0])

    def broken():
        yield Task(id="a", instruction="x")
        raise RuntimeError("stop")

    with pytest.raises(RuntimeError):
        write_tasks(path, broken())
    assert path.read_text() == GOOD[0]
    assert len(list(tmp_path.iterdir())) == 1

"""Public formats become tasks whose hidden part judges, and whose instruction gives nothing hidden
away.
"""

from __future__ import annotations

import gzip
import json

import pytest
from helpers import refused

from agentrl.errors import ConfigError, TaskError
from agentrl.records.taskfile import read_tasks
from agentrl.verifiers.code.formats import STRICT, convert

MBPP = {
    "task_id": 7,
    "prompt": "Write a function to add up a list.",
    "code": "def total(values, start=0):\n    return sum(values, start)\n",
    "test_imports": [],
    "test_list": [
        "assert total([1]) == 1",
        "assert total([1, 2]) == math.trunc(3.5)",
        "assert total([]) == 0",
    ],
}
PLUS = MBPP | {
    "test": (
        "def assertion(out, exp, atol):\n    assert out == exp\n\ninputs = [[[1, 2]],"
        " [[5]]]\nresults = [3, 5]\nfor i, (inp, exp) in enumerate(zip(inputs, results)):\n   "
        " assertion(total(*inp), exp, 0)\n"
    ),
}
HUMANEVAL = {
    "task_id": "HumanEval/900",
    "prompt": (
        'import math\n\ndef helper(x):\n    return x * 2\n\ndef back(x):\n    """Undo helper."""\n'
    ),
    "entry_point": "back",
    "canonical_solution": "    return x // 2\n",
    "test": (
        "METADATA = {}\n\ndef check(candidate):\n    for x in (1, 9):\n        assert"
        " candidate(helper(x)) == x\n"
    ),
}
ROWS = {"mbpp": MBPP, "mbppplus": PLUS, "humaneval": HUMANEVAL}


def converted(tmp_path, format, *rows):
    source, target = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    source.write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert convert(format, source, target) == len(rows)
    return read_tasks(target)


@pytest.mark.parametrize("format", ROWS)
def test_a_converted_row_is_admitted(tmp_path, format):
    tasks = converted(tmp_path, format, ROWS[format])
    assert refused(tasks, "process") == {}
    assert tasks[0].artifacts == ("solution.py",)
    assert "solution.py" in tasks[0].instruction


def test_a_list_and_gzip_are_read(tmp_path):
    for name, data in (("a.json", json.dumps([MBPP])), ("b.gz", json.dumps(MBPP) + "\n")):
        packed = data.encode() if name == "a.json" else gzip.compress(data.encode())
        (tmp_path / name).write_bytes(packed)
        assert convert("mbpp", tmp_path / name, tmp_path / "out.jsonl") == 1


def test_the_example_that_is_shown_is_not_hidden(tmp_path):
    task = converted(tmp_path, "mbpp", MBPP)[0]
    assert task.id == "Mbpp/7"
    assert "total(values, start=0)" in task.instruction
    assert MBPP["test_list"][0] in task.instruction
    assert MBPP["test_list"][0] not in task.hidden["check"]
    assert [
        test
        for test in MBPP["test_list"][1:]
        if test in task.instruction or test not in task.hidden["check"]
    ] == []


@pytest.mark.parametrize(
    "tests", [["assert total([4]) == 4"], ["assert total([1])", "assert not total([0])"]]
)
def test_nothing_is_shown_where_the_rest_would_judge_nothing(tmp_path, tests):
    task = converted(tmp_path, "mbpp", MBPP | {"test_list": tests})[0]
    assert [test for test in tests if test in task.instruction] == []
    assert refused([task], "process") == {}


def test_a_module_that_the_tests_take_for_granted_is_imported(tmp_path):
    assert converted(tmp_path, "mbpp", MBPP)[0].hidden["check"].startswith("import math\n")


def test_helpers_of_the_prompt_come_with_the_check(tmp_path):
    task = converted(tmp_path, "humaneval", HUMANEVAL)[0]
    assert "def helper(x)" in task.hidden["check"]
    assert "def back" not in task.hidden["check"]
    assert task.oracle["files"]["solution.py"].endswith("    return x // 2\n")


@pytest.mark.parametrize(
    ("format", "row", "words"),
    [
        ("mbpp", {"task_id": 1, "prompt": "x", "code": "def f(): pass"}, "test_list is missing"),
        ("mbpp", MBPP | {"code": "def g(): pass"}, "calls no function"),
        ("mbpp", MBPP | {"code": "def g(:"}, "row 2"),
        ("mbppplus", MBPP, "test is missing"),
        ("humaneval", MBPP, "is this a humaneval file"),
    ],
)
def test_a_row_of_another_format_is_named(tmp_path, format, row, words):
    source = tmp_path / "in.jsonl"
    source.write_text(json.dumps(ROWS[format]) + "\n" + json.dumps(row) + "\n")
    with pytest.raises(TaskError, match=words):
        convert(format, source, tmp_path / "out.jsonl")
    assert not (tmp_path / "out.jsonl").exists()


def test_an_unknown_format_names_the_nearest(tmp_path):
    with pytest.raises(ConfigError, match=r"did you mean 'mbppplus'\?"):
        convert("mbpp+plus", tmp_path / "a", tmp_path / "b")
    with pytest.raises(TaskError, match="no such file"):
        convert("mbpp", tmp_path / "a", tmp_path / "b")


FLOATS = PLUS | {
    "code": "def total(values, start=0):\n    return sum(values) / 3\n",
    "test": (
        "import numpy as np\n\ndef assertion(out, exp, atol):\n    if out != exp:\n"
        "        assert np.allclose(out, exp, rtol=1e-07, atol=1e-6)\n\ninputs = [[[1, 2.5]],"
        " [[5]]]\nresults = [1.1666666666, 1.6666666666]\n"
        "for i, (inp, exp) in enumerate(zip(inputs, results)):\n   "
        " assertion(total(*inp), exp, 0)\n"
    ),
}


def passes(task, code):
    space = {}
    exec(task.hidden["check"], space)  # the checks of the rows above
    try:
        space["check"](eval(code))
    except AssertionError:
        return False
    return True


def test_an_empty_list_is_close_to_no_number(tmp_path):
    task = converted(tmp_path, "mbppplus", FLOATS)[0]
    assert refused([task], "process") == {}
    assert passes(task, "lambda v: sum(v) / 3")
    wrong = ["[]", "()", "[[]]", "[sum(v) / 3]", "None", "float('nan')", "True", "''"]
    assert [code for code in wrong if passes(task, f"lambda v: {code}")] == []


def test_shape_kind_and_nan_count_in_a_strict_comparison():
    space = {}
    exec(STRICT, space)
    close = space["_agentrl_close"]
    nan = float("nan")
    equal = [(1, 1.0), ([1.0, 2], (1, 2.0)), (nan, nan), ([nan, 1.0], [nan, 1.0]), (1j, 1j)]
    unequal = [([], 1.0), ([[]], [1.0]), ([1.0], [1.0, 1.0]), (1.0, [1.0, 1.0]), (nan, 1.0)]
    unequal += [(1.0, nan), (True, 1.0), ("1", 1.0), (None, 1.0), ([[1.0]], [1.0]), (1j, 1.0)]
    assert [pair for pair in equal if not close(*pair)] == []
    assert [pair for pair in unequal if close(*pair)] == []


def test_the_public_files(tmp_path, data_dir):
    for format, name, count in (
        ("mbpp", "mbpp_sanitized.json", 427),
        ("mbppplus", "MbppPlus-OriginFmt.jsonl.gz", 378),
    ):
        assert convert(format, data_dir / "code" / name, tmp_path / format) == count
        tasks = {task.id: task for task in read_tasks(tmp_path / format)}
        assert len(tasks) == count
        assert [id for id, task in tasks.items() if task.hidden["check"] in task.instruction] == []
        if format == "mbppplus":
            few = [tasks[f"Mbpp/{number}"] for number in (2, 88, 120, 140, 590, 737, 787, 794)]
            assert refused(few, "process") == {}

"""Admission: a task that cannot be solved, or needs no solving, is refused with one sentence."""

from __future__ import annotations

import asyncio
import gzip
import json
import re
import time

import pytest
from helpers import refused

from agentrl.errors import ConfigError, SandboxLost
from agentrl.sandboxes import open_pool
from agentrl.types import Score, Task
from agentrl.verifiers.answers.text import numeric
from agentrl.verifiers.code.admission import admit, admit_task, check_task
from agentrl.verifiers.code.formats import mbppplus
from agentrl.verifiers.code.hidden_tests import hidden_tests

CODE = "def f(x):\n    return x + 1\n"
CASES = {"entry_point": "f", "cases": [{"args": [1], "expected": 2}]}


def with_test(body: str) -> dict:
    return {"tests": {"test_x.py": f"from solution import f\ndef test_a():\n{body}"}}


def task_of(**fields) -> Task:
    return Task(
        **(
            {
                "id": "t",
                "instruction": "x",
                "hidden": CASES,
                "oracle": {"files": {"solution.py": CODE}},
            }
            | fields
        )
    )


def constant(returned: str, passes: str) -> dict:
    """A task whose check says too little of what its reference returns."""
    check = f"def check(c):\n    assert {passes}\n"
    code = f"def f(x):\n    return {returned}\n"
    return {
        "hidden": {"entry_point": "f", "check": check},
        "oracle": {"files": {"solution.py": code}},
    }


def admission(task: Task, verifier=None):
    async def run():
        pool = open_pool("process", size=1)
        try:
            return await admit_task(task, verifier or hidden_tests(call_s=2, wall_s=30), pool)
        finally:
            await pool.close()

    return asyncio.run(run())


@pytest.mark.parametrize(
    ("fields", "kind", "words"),
    [
        ({"hidden": {}}, "hidden", "hidden is empty"),
        ({"oracle": {}}, "oracle", "oracle is empty"),
        ({"oracle": {"answer": "1"}, "artifacts": ("solution.py",)}, "oracle", "oracle.files"),
        ({"oracle": {"files": {"solution.py": 3}}}, "oracle", "oracle.files"),
        ({"artifacts": ("solution.py", "other.txt")}, "artifacts", "other.txt"),
        ({"artifacts": ()}, "artifacts", "artifacts"),
        ({"hidden": {"cases": CASES["cases"]}}, "hidden", "entry_point"),
        ({"hidden": CASES | {"entry_point": "g"}}, "oracle", "'g'"),
        ({"hidden": CASES | {"cases": []}}, "hidden", "cases is empty"),
        (
            {"hidden": CASES | {"cases": [{"args": [{"py": "1 +"}], "expected": 1}]}},
            "hidden",
            r"cases\[0\]",
        ),
        ({"hidden": {"entry_point": "f", "check": "def check(c:"}}, "hidden", "not Python"),
        ({"hidden": {"entry_point": "f", "check": "x = 1"}}, "hidden", "check"),
        ({"hidden": {"tests": {"test_x.py": "def helper(): pass"}}}, "hidden", "no test"),
        ({"hidden": with_test("    f(1)\n")}, "vacuous", "asserts nothing"),
        ({"artifacts": ("solution.py", "tests/conftest.py")}, "artifacts", "conftest.py"),
        ({"artifacts": ("solution.py", "x.dist-info/entry_points.txt")}, "artifacts", "dist-info"),
        ({"artifacts": ("solution.py", "PYTEST.INI")}, "artifacts", "pytest.ini"),
        (
            {"artifacts": ("solution.py", "pkg"), "files": {"pkg/a.py": ""}},
            "artifacts",
            "directory 'pkg'",
        ),
    ],
)
def test_what_can_be_seen_without_running(fields, kind, words):
    refusal = check_task(task_of(**fields))
    assert refusal is not None
    assert refusal.kind == kind
    assert re.search(words, refusal.why)


@pytest.mark.parametrize(
    ("fields", "kind", "words"),
    [
        ({"hidden": CASES | {"cases": [{"args": [1], "expected": 3}]}}, "oracle", "scores 0.0"),
        (
            {"oracle": {"files": {"solution.py": "def f(x):\n    while True: pass\n"}}},
            "oracle",
            "time limit",
        ),
        (
            {
                "hidden": CASES | {"cases": [{"args": [1], "expected": None}]},
                "oracle": {"files": {"solution.py": "def f(x): pass"}},
            },
            "vacuous",
            "stub",
        ),
        ({"hidden": {"entry_point": "f", "check": "def check(c):\n    c(1)\n"}}, "vacuous", "stub"),
        (
            {"hidden": {"entry_point": "f", "check": "import nosuch\ndef check(c):\n    c(1)\n"}},
            "hidden",
            "nosuch",
        ),
        ({"files": {"solution.py": CODE}}, "vacuous", "unchanged start state"),
        ({"threshold": 1.5}, "oracle", "below threshold 1.5"),
        ({"hidden": with_test("    assert f(1) == 3\n")}, "oracle", "test_x.py::test_a"),
        (
            {"hidden": with_test("    want = [f(x) for x in (1, 2)]\n    assert want == want\n")},
            "vacuous",
            "stub",
        ),
        ({"hidden": with_test("    assert f(1) != 5\n")}, "vacuous", "stub"),
        (constant("[]", "len(c(1)) == 0"), "vacuous", "returns [] whatever"),
        (constant("(3,)", "c(1) is True or c(1) == (3,)"), "vacuous", "returns True whatever"),
        (constant("x", "c(1) == 1"), "vacuous", "returns True whatever"),
        (constant("x", "c(2) == 2 and c(3) == 3"), "vacuous", "returns (*args, None)[0] whatever"),
        (
            {
                "hidden": CASES | {"cases": [{"args": [n], "expected": []} for n in (1, 2)]},
                "oracle": {"files": {"solution.py": "def f(x): return []"}},
            },
            "vacuous",
            "returns [] whatever",
        ),
        (
            {
                "hidden": with_test("    assert f(1) == 0\n"),
                "oracle": {"files": {"solution.py": "def f(x): return 0"}},
            },
            "vacuous",
            "returns 0 whatever",
        ),
    ],
)
def test_what_running_shows(fields, kind, words):
    refusal = admission(task_of(**fields))
    assert refusal is not None
    assert (refusal.kind, words in refusal.why) == (kind, True), refusal.why


@pytest.mark.parametrize(
    "hidden",
    [
        CASES,
        {"tests": {"test_x.py": "from solution import f\ndef test_a():\n    assert f(1) == 2\n"}},
    ],
)
def test_a_good_task_is_admitted(hidden):
    assert (
        admission(task_of(hidden=hidden, files={"solution.py": "def f(x):\n    return x\n"}))
        is None
    )


def test_answers_and_actions():
    answer = {"hidden": {"answer": 4}, "oracle": {"answer": "4"}}
    assert admission(task_of(**answer), numeric()) is None
    assert admission(task_of(**answer | {"oracle": {"answer": "5"}}), numeric()).kind == "oracle"
    assert admission(task_of(**answer | {"hidden": {"answer": "none"}}), numeric()).kind == "hidden"
    assert admission(task_of(**answer | {"oracle": {"calls": []}}), numeric()) is None


def test_a_verifier_that_pays_for_nothing_is_found():
    async def generous(submission):
        return Score(1.0)

    assert (
        admission(task_of(hidden={"answer": 4}, oracle={"answer": "4"}), generous).kind == "vacuous"
    )


def test_a_lost_sandbox_says_nothing_about_a_task():
    async def lost(submission):
        raise SandboxLost("gone")

    with pytest.raises(SandboxLost):
        asyncio.run(admit([task_of()], lost, None))


@pytest.mark.long
def test_all_of_mbpp_plus(data_dir, bubblewrap):
    packed = (data_dir / "code" / "MbppPlus-OriginFmt.jsonl.gz").read_bytes()
    tasks = [mbppplus(json.loads(line)) for line in gzip.decompress(packed).splitlines()]
    began = time.monotonic()
    found = refused(tasks)
    print(f"{len(tasks)} tasks in {time.monotonic() - began:.0f} s")
    assert found == {}


def test_untrusted_references_run_nowhere_without_a_boundary(tmp_path):
    """Nor do hidden tests and candidates, though a grader is what runs them, before any agent has a
    sandbox.
    """
    mark = tmp_path / "ran"
    task = task_of(oracle={"files": {"solution.py": f"open({str(mark)!r}, 'w')\n{CODE}"}})

    async def run(kind):
        pool = open_pool(kind, size=1)
        try:
            return await admit([task], hidden_tests(), pool, untrusted=True)
        finally:
            await pool.close()

    with pytest.raises(ConfigError, match=r"no boundary.*--trust"):
        asyncio.run(run("process"))
    assert not mark.exists()
    assert asyncio.run(run("trusted-process")) == {}
    assert mark.exists()

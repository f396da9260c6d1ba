"""Hidden tests: honest code passes, wrong code fails, hostile code fails, and a broken judge is
never a number.
"""

from __future__ import annotations

import asyncio

import pytest
from verifier_attacks import (
    CASES,
    CHECK,
    FORMS,
    GENERATE,
    HONEST,
    LASTING,
    PLAIN,
    PROC,
    SPLIT,
    WRONG,
    run_all,
    run_one,
    task_of,
)

from agentrl.errors import TaskError, VerifierError
from agentrl.sandboxes import open_pool
from agentrl.types import EndReason, Score
from agentrl.verifiers.base import Submission
from agentrl.verifiers.code.hidden_tests import hidden_tests


@pytest.mark.parametrize("backend", ["bubblewrap", "process"])
@pytest.mark.parametrize("form", FORMS)
def test_honest_passes_and_every_plain_attack_fails(backend, form):
    scores = run_all(backend, task_of(FORMS[form]), {"honest": HONEST, "wrong": WRONG, **PLAIN})
    assert scores.pop("honest").value == 1.0
    assert {name: score.value for name, score in scores.items()} == dict.fromkeys(scores, 0.0)


@pytest.mark.parametrize("backend", ["bubblewrap", "process"])
@pytest.mark.parametrize("form", FORMS)
def test_attacks_on_a_shared_process_find_nothing(backend, form):
    scores = run_all(backend, task_of(FORMS[form]), SPLIT)
    assert {name: score.value for name, score in scores.items()} == dict.fromkeys(scores, 0.0)


@pytest.mark.parametrize("form", FORMS)
def test_what_lasts_is_ended(form):
    scores = run_all(
        "bubblewrap", task_of(FORMS[form]), LASTING | {"honest": HONEST}, call_s=1.0, wall_s=3.0
    )
    assert scores.pop("honest").value == 1.0
    assert {name: score.value for name, score in scores.items()} == dict.fromkeys(scores, 0.0)


@pytest.mark.parametrize("form", FORMS)
def test_the_judge_cannot_be_read_or_silenced(form, monkeypatch):
    monkeypatch.setattr("agentrl.verifiers.code.hidden_tests.GRACE_S", 2.0)
    scores = run_all("bubblewrap", task_of(FORMS[form]), PROC, call_s=1.0, wall_s=2.0)
    assert {name: score.value for name, score in scores.items()} == dict.fromkeys(scores, 0.0)


def test_an_honest_candidate_that_leaves_a_daemon_passes():
    code = (
        "import os, time\nif os.fork() == 0:\n    os.setsid()\n    time.sleep(60)\n   "
        " os._exit(0)\n" + HONEST
    )
    assert run_all("bubblewrap", task_of(CASES), {"it": code})["it"].value == 1.0


@pytest.mark.parametrize("form", FORMS)
def test_a_missing_artifact_scores_zero_without_a_sandbox(form):
    submission = Submission(task_of(FORMS[form]), (), EndReason.MAX_TURNS, {}, None)
    verdict = asyncio.run(hidden_tests()(submission))
    assert verdict.value == 0.0
    assert "solution.py" in verdict.why


def test_undeclared_files_stay_outside():
    code = "import os\ndef f(x):\n    return x + 1 if os.listdir('.') == ['solution.py'] else 0\n"

    async def run() -> Score:
        pool = open_pool("process", size=1)
        files = {"solution.py": code.encode(), "helper.py": b"", "json.py": b"raise SystemExit"}
        try:
            return await hidden_tests()(
                Submission(task_of(CASES), (), EndReason.SUBMITTED, files, pool)
            )
        finally:
            await pool.close()

    assert asyncio.run(run()).value == 1.0


def test_parts_hold_the_share_and_only_partial_pays_for_it():
    code = "def f(x):\n    return 5 if x == 4 else 0\n"
    assert run_one(task_of(CASES), code).value == 0.0
    assert run_one(task_of(CASES), code).parts["passed"] == pytest.approx(1 / 3)
    assert run_one(task_of(CASES), code, partial=True).value == pytest.approx(1 / 3)


@pytest.mark.parametrize(
    ("expected", "result", "passes"),
    [
        (1, "True", False),
        (True, "1", False),
        (1, "1.0", False),
        ([1, 2], "(1, 2)", True),
        ([1, [2]], "[1, (2,)]", True),
        ({"py": "(1, 2)"}, "[1, 2]", False),
        ({"py": "{1, 2}"}, "{2, 1}", True),
        ({"py": "{1}"}, "{True}", False),
        ({"a": [1]}, "{'a': (1,)}", True),
        ({"py": "{1: 'a'}"}, "{True: 'a'}", False),
        ({"py": "b'x'"}, "bytearray(b'x')", True),
        ({"py": "3j"}, "3j", True),
        (float("nan"), "float('nan')", True),
        (0.5, "float('nan')", False),
        (None, "None", True),
        ({"a": 1}, "__import__('collections').Counter('a')", True),
        ([0, 1], "__import__('re').match('a', 'a')", True),
        ("é\ud800", "'é\\ud800'", True),
        (10**40, "10**40", True),
        (0.3, "0.1 + 0.2", False),
    ],
)
def test_comparison_is_exact_in_types(expected, result, passes):
    hidden = {"entry_point": "f", "cases": [{"expected": expected}]}
    assert run_one(task_of(hidden), f"def f():\n    return {result}\n").value == float(passes)


def test_a_tolerance_is_given_by_the_task():
    hidden = {"entry_point": "f", "cases": [{"expected": [0.3, 1]}], "atol": 1e-9}
    assert run_one(task_of(hidden), "def f():\n    return [0.1 + 0.2, 1]\n").value == 1.0
    assert run_one(task_of(hidden), "def f():\n    return [0.31, 1]\n").value == 0.0
    assert run_one(task_of(hidden), "def f():\n    return [float('nan'), 1]\n").value == 0.0


def test_arguments_arrive_as_written():
    case = {
        "args": [{"py": "{(1, 2): {3}}"}, [1]],
        "kwargs": {"key": {"py": "b'x'"}},
        "expected": "dict list bytes",
    }
    code = (
        "def f(a, b, *, key):\n    return ' '.join(type(v).__name__ for v in (a, b, key)) * (a[1,"
        " 2] == {3})\n"
    )
    assert run_one(task_of({"entry_point": "f", "cases": [case]}), code).value == 1.0


def test_a_check_sees_exceptions_by_type():
    check = (
        "def check(candidate):\n    try:\n        candidate(-1)\n"
        "    except ValueError:\n        return\n    assert False\n"
    )
    task = task_of({"entry_point": "f", "check": check})
    assert run_one(task, "def f(x):\n    raise ValueError('no')\n").value == 1.0
    assert (
        run_one(task, "class ValueError(Exception): pass\ndef f(x):\n    raise KeyError\n").value
        == 0.0
    )


def test_a_check_that_catches_everything_does_not_pass_a_dead_candidate():
    check = (
        "def check(candidate):\n    try:\n        candidate(1)\n    except BaseException:\n       "
        " pass\n"
    )
    task = task_of({"entry_point": "f", "check": check})
    assert run_one(task, "import os\ndef f(x):\n    os._exit(0)\n").value == 0.0
    assert run_one(task, HONEST).value == 1.0


def test_a_check_that_never_asks_passes_nobody():
    task = task_of({"entry_point": "f", "check": "def check(candidate):\n    pass\n"})
    assert run_one(task, HONEST).value == 0.0


def test_tests_form_runs_classes_parameters_and_helpers_of_pytest():
    text = (
        "import unittest\nimport pytest\nimport solution\nfrom solution import"
        " f\n\n@pytest.mark.parametrize('x, y', [(1, 2), (2, 3)])\ndef test_many(x, y):\n    assert"
        " f(x) == y\n\ndef test_raises():\n    with pytest.raises(TypeError, match='str'):\n       "
        " f('a')\n\ndef test_near():\n    assert f(0.1) == pytest.approx(1.1)\n\nclass TestPlain:\n"
        "    def setup_method(self):\n        self.x = 1\n    def test_x(self):\n        assert"
        " f(self.x) == 2\n\nclass TestCase(unittest.TestCase):\n    def setUp(self):\n       "
        " self.x = 1\n    def test_x(self):\n        self.assertEqual(solution.f(self.x),"
        " 2)\n\nasync def test_async():\n    assert f(1) == 2\n"
    )
    task = task_of({"tests": {"test_f.py": text}})
    verdict = run_one(task, HONEST)
    assert (verdict.value, verdict.why) == (1.0, "6 of 6 hidden tests passed")
    assert run_one(task, WRONG).value == 0.0


def test_a_test_that_ends_the_judge_is_the_tasks_fault():
    text = (
        "from solution import f\nimport os\ndef test_a():\n    os._exit(0)\n    assert f(1) == 2\n"
    )
    with pytest.raises(VerifierError, match="not even about the reference"):
        run_one(task_of({"tests": {"test_f.py": text}}), HONEST)


@pytest.mark.parametrize("body", ["pytest.skip()", "assert f(1) == 3"])
def test_a_test_passes_by_returning_only(body):
    text = (
        f"import pytest\nfrom solution import f\ndef test_a():\n    {body}\ndef test_b():\n   "
        " assert f(1) == 2\n"
    )
    with pytest.raises(TaskError, match=r"field oracle fails .*test_a"):
        run_one(task_of({"tests": {"test_f.py": text}}), HONEST)


@pytest.mark.parametrize(
    ("first", "word"),
    [
        ("raise ValueError\n", "ValueError"),
        ("import nosuchmodule\n", "ModuleNotFoundError"),
    ],
)
def test_a_broken_check_is_no_number(first, word):
    with pytest.raises(VerifierError, match=word):
        run_one(task_of({"entry_point": "f", "check": first + CHECK["check"]}), HONEST)


@pytest.mark.parametrize(
    "hidden",
    [{}, {"cases": []}, {"answer": 1}, {"tests": {"t.py": "x = 1"}}, CASES | {"chekc": ""}],
)
def test_a_hidden_part_that_is_none_is_the_tasks_fault(hidden):
    with pytest.raises(TaskError, match="plus-one"):
        asyncio.run(
            hidden_tests()(
                Submission(task_of(hidden), (), EndReason.SUBMITTED, {"solution.py": b""}, None)
            )
        )


def test_no_pool_and_no_interpreter_are_no_number():
    submission = Submission(task_of(CASES), (), EndReason.SUBMITTED, {"solution.py": b""}, None)
    with pytest.raises(VerifierError, match="pool"):
        asyncio.run(hidden_tests()(submission))
    with pytest.raises(VerifierError, match="no evidence"):
        run_one(task_of(CASES), HONEST, python="/usr/bin/nosuchpython")


def test_time_limits_must_make_sense():
    with pytest.raises(ValueError, match="call_s=5"):
        hidden_tests(call_s=5, wall_s=1)


def test_generated_cases_are_others_each_time_and_the_same_for_a_seed():
    """A candidate that knows last time's answers knows nothing."""
    task = task_of(GENERATE)
    learnt = (
        "import random\nrng = random.Random(0)\nknown = {rng.randrange(1, 1000) for _ in"
        " range(4)}\n"
    )
    learnt += "def f(x):\n    return x + 1 if x in known else 0\n"

    async def run() -> list[Score]:
        pool = open_pool("process", size=1)
        try:
            files = {"solution.py": learnt.encode()}
            return [
                await hidden_tests()(Submission(task, (), EndReason.SUBMITTED, files, pool, seed))
                for seed in (0, 1, 0)
            ]
        finally:
            await pool.close()

    first, second, third = asyncio.run(run())
    assert first.value == third.value == 1.0 and second.value == 0.0


@pytest.mark.parametrize(
    ("change", "error", "why"),
    [
        ({"generate": "x = 1"}, TaskError, "hidden.generate defines no function named generate"),
        ({"generate": "def generate(rng:"}, TaskError, "hidden.generate"),
        ({"draws": 0}, TaskError, "hidden.draws is 0"),
        ({"draws": True}, TaskError, "hidden.draws is True"),
        ({"atol": -1}, TaskError, "hidden.atol is -1"),
        (
            {"generate": "def generate(rng):\n    return 1 / 0\n"},
            VerifierError,
            "no case could be generated: ZeroDiv",
        ),
        (
            {"generate": "def generate(rng):\n    return 'ab', 1\n"},
            VerifierError,
            "no case could be generated: TypeE",
        ),
        (
            {"generate": "def generate(rng):\n    return 1\n"},
            VerifierError,
            "returns the arguments of one call as a tuple",
        ),
        ({"entry_point": "g"}, VerifierError, "defines no function named g"),
    ],
)
def test_what_cannot_be_generated_is_said_and_never_a_number(change, error, why):
    with pytest.raises(error, match=why):
        run_one(task_of(GENERATE | change), HONEST)


def test_a_reference_returns_what_its_candidate_could():
    made = "import collections\ndef f(n):\n    return collections.Counter('ab' * n)\n"
    plain = "def f(n):\n    return {'a': n, 'b': n}\n"
    generate = "def generate(rng):\n    return [rng.randrange(1, 9)]\n"
    task = task_of(GENERATE | {"generate": generate}, made)
    assert run_all(
        "process", task, {"same": made, "plain": plain, "wrong": "def f(n): return {}"}
    ) == {
        "same": Score(1.0, {"passed": 1.0}, "4 of 4 hidden tests passed"),
        "plain": Score(1.0, {"passed": 1.0}, "4 of 4 hidden tests passed"),
        "wrong": Score(0.0, {"passed": 0.0}, "0 of 4 hidden tests passed"),
    }


def test_each_case_in_a_process_of_its_own():
    counts = "n = 0\ndef f(x):\n    global n\n    n += 1\n    return x + n\n"
    task = task_of(CASES)
    assert run_one(task, counts).value == 0.0
    assert run_one(task, counts, fresh="case").value == 1.0
    assert run_one(task, HONEST, fresh="case").value == 1.0
    ends = "import os\ndef f(x):\n    return os._exit(0) if x == 4 else x + 1\n"
    score_ = run_one(task, ends, fresh="case", partial=True)
    assert score_.value < 1.0 and "the candidate's process ended" in score_.why


INTERRUPT = (
    "import os, signal, time\nos.kill(os.getppid(), signal.SIGINT)\ntime.sleep(0.1)\n" + HONEST
)
STARVE = (
    "import os, resource\nresource.prlimit(os.getppid(), resource.RLIMIT_AS, (200 << 20, 200 <<"
    " 20))\ndef f(x):\n    return 0\n"
)


@pytest.mark.parametrize("form", FORMS)
def test_an_interrupted_judge_goes_on(form):
    assert run_one(task_of(FORMS[form]), INTERRUPT).value == 1.0


def test_a_candidate_that_breaks_the_judge_fails():
    oracle = "def f(x):\n    return x + 1 + sum(bytearray(300_000_000)[:1])\n"
    assert run_one(task_of({**GENERATE, "draws": 1}, oracle), STARVE).value == 0.0


def test_a_reference_that_hangs_is_not_the_candidates_fault():
    task = task_of({**GENERATE, "draws": 1}, "def f(x):\n    while True:\n        pass\n")
    with pytest.raises(VerifierError, match="no case could be generated within"):
        run_one(task, HONEST, call_s=0.5, wall_s=1.0)

"""Verifiers made of verifiers: what is remembered, what is not, and nobody waits for ever."""

from __future__ import annotations

import asyncio

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentrl.errors import ConfigError, ContractError, SandboxLost, TaskError, VerifierError
from agentrl.types import EndReason, Score, Task
from agentrl.verifiers.base import Submission
from agentrl.verifiers.combine import (
    all_of,
    ensemble_lower,
    ensemble_min,
    first_of,
    gated,
    has_hidden,
    if_submitted,
    remembered,
    weighted,
)


def submission(text=b"x", end=EndReason.SUBMITTED, task="t"):
    return Submission(Task(id=task, instruction="do"), (), end, {"a.py": text})


class Counting:
    """A verifier that says what it is told and counts how often it is asked."""

    def __init__(self, *says):
        self.says = list(says)
        self.asked = 0

    async def __call__(self, submission, /):
        self.asked += 1
        await asyncio.sleep(0)
        said = self.says.pop(0) if len(self.says) > 1 else self.says[0]
        if isinstance(said, Exception):
            raise said
        return said


def ask(verifier, *submissions):
    async def all_at_once():
        jobs = (asyncio.wait_for(verifier(each), 5) for each in submissions)
        return await asyncio.gather(*jobs, return_exceptions=True)

    return asyncio.run(all_at_once())


def test_equal_artifacts_of_an_equal_task_are_judged_once():
    inner = Counting(Score(1.0))
    got = ask(remembered(inner), *[submission()] * 8, submission(b"y"), submission(task="u"))
    assert [score.value for score in got] == [1.0] * 10
    assert inner.asked == 3


def test_a_failure_is_not_remembered_and_hangs_nobody():
    inner = Counting(Score.failed("lost"), RuntimeError("lost"), Score(1.0))
    got = ask(remembered(inner), *[submission()] * 4)
    assert got[0].value is None
    assert isinstance(got[1], RuntimeError)
    assert [score.value for score in got[2:]] == [1.0, 1.0]
    assert inner.asked == 3


def test_a_shaped_verdict_is_not_remembered():
    (got,) = ask(remembered(Counting(Score(1.1, unshaped=1.0))), submission())
    assert isinstance(got, ContractError)


def test_a_verdict_of_the_clock_is_asked_for_again():
    inner = Counting(Score(0.0, {}, "too slow"), Score(1.0))
    verifier = remembered(inner, unless=lambda score: "slow" in score.why)
    assert [score.value for score in ask(verifier, submission(), submission(), submission())] == [
        0.0,
        1.0,
        1.0,
    ]
    assert inner.asked == 2


def test_what_was_not_handed_in_is_worth_nothing():
    inner = Counting(Score(1.0))
    ends = (EndReason.SUBMITTED, EndReason.ANSWERED, EndReason.FORMAT_ERROR, EndReason.MAX_TURNS)
    assert [
        each.value for each in ask(if_submitted(inner), *(submission(end=end) for end in ends))
    ] == [1, 1, 0, 0]
    assert inner.asked == 2


def of(score):
    """A verifier that says one thing."""
    return Counting(
        score if isinstance(score, Score | Exception) else Score(score, {"part": score}, "because")
    )


def parts_of(values):
    return {f"p{index}": of(value) for index, value in enumerate(values)}


def one(verifier, **fields):
    return asyncio.run(
        verifier(Submission(Task(id="t", instruction="do", **fields), (), EndReason.SUBMITTED))
    )


rewards = st.lists(st.floats(-5, 5), min_size=1, max_size=5)


@given(rewards, st.data())
def test_weighted_is_the_weighted_sum_and_weight_zero_only_logs(values, data):
    weights = data.draw(
        st.lists(
            st.sampled_from([0.0, 0.1, 0.5, 1.0, -1.0]), min_size=len(values), max_size=len(values)
        )
    )
    verifiers = {
        name: (part, weight)
        for (name, part), weight in zip(parts_of(values).items(), weights, strict=True)
    }
    score = one(weighted(verifiers))
    assert score.value == pytest.approx(
        sum(w * v for w, v in zip(weights, values, strict=True)), abs=1e-9
    )
    assert score.parts == {key: v for i, v in enumerate(values) for key in (f"p{i}", f"p{i}/part")}
    with_metric = one(weighted({**verifiers, "metric": (of(1e9), 0.0)}))
    assert with_metric.value == score.value
    assert with_metric.parts["metric"] == 1e9


def test_weights_that_add_up_to_one_give_one():
    weights = (0.1,) * 10
    assert (
        one(weighted({str(i): (of(1.0), weight) for i, weight in enumerate(weights)})).value == 1.0
    )


@given(rewards)
def test_all_of_needs_every_part(values):
    assert one(all_of(parts_of(values))).value == float(all(value >= 1 for value in values))


@given(rewards, st.floats(0, 3), st.floats(0, 3), st.randoms(use_true_random=False))
def test_ensembles(values, k, more, random):
    low = one(ensemble_lower(parts_of(values), k)).value
    assert one(ensemble_min(parts_of(values))).value == min(values)
    assert one(ensemble_lower(parts_of(values), 0.0)).value == pytest.approx(
        sum(values) / len(values), abs=1e-9
    )
    assert low == pytest.approx(np.mean(values) - k * np.std(values, ddof=0), abs=1e-9)
    assert one(ensemble_lower(parts_of(values), k + more)).value <= low + 1e-9
    assert one(
        ensemble_lower(parts_of(random.sample(values, len(values))), k)
    ).value == pytest.approx(low, abs=1e-9)


@given(rewards, st.data())
def test_a_part_without_a_value_leaves_none_and_is_named(values, data):
    place = data.draw(st.integers(0, len(values) - 1))
    broken = {**parts_of(values), f"p{place}": of(Score.failed("no power"))}
    for verifier in (
        weighted({name: (part, 0.0) for name, part in broken.items()}),
        all_of(broken),
        ensemble_min(broken),
        ensemble_lower(broken),
        gated({f"p{place}": broken[f"p{place}"]}, of(1.0)),
        first_of({f"p{place}": (lambda task: True, broken[f"p{place}"])}),
    ):
        score = one(verifier)
        assert (score.value, score.why) == (None, f"p{place}: no power")


def test_machinery_that_fails_keeps_its_kind_and_gets_the_parts_name():
    for error in (VerifierError("the judge fell silent"), SandboxLost("gone")):
        for verifier in (all_of({"a": of(1.0), "b": of(error)}), gated({"b": of(error)}, of(1.0))):
            with pytest.raises(type(error), match=f"b: {error}"):
                one(verifier)


def test_parts_of_parts_are_named_by_their_path():
    inner = all_of({"deep": of(1.0)})
    assert set(one(weighted({"outer": (inner, 1.0)})).parts) == {
        "outer",
        "outer/deep",
        "outer/deep/part",
    }


def test_a_gate_that_is_closed_asks_nobody_behind_it():
    behind, second = of(0.7), of(1.0)
    shut = one(gated({"first": of(0.9), "second": second}, behind))
    assert (shut.value, shut.why) == (0.0, "first: because")
    assert shut.parts == {"first": 0.9, "first/part": 0.9}
    assert second.asked == behind.asked == 0
    opened = one(gated({"first": of(1.0), "second": second}, behind))
    assert (opened.value, opened.parts["part"], opened.parts["second"]) == (0.7, 0.7, 1.0)


def test_the_first_that_applies_is_asked():
    code, text = of(0.25), of(0.5)
    verifier = first_of({"code": (has_hidden("cases"), code), "text": (has_hidden("answer"), text)})
    assert one(verifier, hidden={"cases": [], "answer": 1}).value == 0.25
    score = one(verifier, hidden={"answer": 1})
    assert (score.value, score.parts, score.why) == (
        0.5,
        {"text": 0.5, "text/part": 0.5},
        "text: because",
    )
    assert code.asked == 1
    with pytest.raises(TaskError, match="none of code, text"):
        one(verifier, hidden={"other": 1})


def test_a_shaped_part_is_refused_and_a_shaped_whole_is_kept():
    part = of(Score(0.5, {}, "", unshaped=1.0))
    for verifier in (all_of({"a": part}), ensemble_min({"a": part}), gated({"a": part}, of(1.0))):
        with pytest.raises(ContractError, match="'a' is shaped"):
            one(verifier)
    for verifier in (gated({"a": of(1.0)}, part), first_of({"a": (has_hidden(), part)})):
        assert (one(verifier).value, one(verifier).unshaped) == (0.5, 1.0)


def test_bad_parts_and_settings_are_refused():
    for make in (
        all_of,
        ensemble_min,
        ensemble_lower,
        weighted,
        first_of,
        lambda parts: gated(parts, of(1.0)),
    ):
        with pytest.raises(ConfigError, match="empty"):
            make({})
    for name in ("", "a/b"):
        with pytest.raises(ConfigError, match="name"):
            all_of({name: of(1.0)})
    for k in (-1, float("nan"), float("inf")):
        with pytest.raises(ConfigError, match="k="):
            ensemble_lower(parts_of([1.0]), k)
    with pytest.raises(ConfigError, match="weight of 'a'"):
        weighted({"a": (of(1.0), float("nan"))})


def test_the_reasons_of_the_parts_are_kept():
    async def because(submission):
        return Score(0.5, {}, "two of four lines")

    async def silent(submission):
        return Score(1.0)

    verifier = weighted({"lines": (because, 1.0), "form": (silent, 0.5)})
    score = asyncio.run(verifier(Submission(Task(id="t", instruction=""), (), EndReason.ANSWERED)))
    assert (score.value, score.why) == (1.0, "lines 0.5 (two of four lines); form 1")

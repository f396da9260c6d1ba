"""Shaping terms: their formulas, their caps, and that no sum of them changes whether an episode
passed.
"""

from __future__ import annotations

import asyncio
import math
from dataclasses import replace

import pytest
from helpers import call, make_episode, make_task, says
from hypothesis import given
from hypothesis import strategies as st

from agentrl.errors import ConfigError
from agentrl.records.rows import episode_of, episode_row
from agentrl.types import BadCall, EndReason, Message, Score, Task
from agentrl.verifiers.base import Submission
from agentrl.verifiers.shaping import (
    Term,
    format_reward,
    length_penalty,
    repeated_share,
    repetition_penalty,
    said,
    shaped,
    soft_overlong,
)

BAD = BadCall("{", "The tool call is not valid JSON.")
finite = st.floats(-1e6, 1e6)


def constant(score):
    async def verify(submission):
        return score

    return verify


def episode(*messages):
    return Submission(Task(id="t", instruction=""), messages, EndReason.ANSWERED)


def ask(verifier, *messages):
    return asyncio.run(verifier(episode(*messages)))


@pytest.mark.parametrize(
    ("length", "punishment"),
    [(0, 0), (80, 0), (81, -0.05), (90, -0.5), (100, -1), (101, -1), (10**9, -1)],
)
def test_soft_overlong_is_the_papers_formula(length, punishment):
    assert soft_overlong(length, limit=100, cache=20) == pytest.approx(punishment)


@given(st.integers(0, 1000), st.integers(0, 1000))
def test_soft_overlong_falls(length, more):
    assert -1 <= soft_overlong(length + more, 500, 100) <= soft_overlong(length, 500, 100) <= 0


@pytest.mark.parametrize(
    ("words", "n", "share"),
    [
        ("", 1, 0),
        ("a b", 3, 0),
        ("a b c", 1, 0),
        ("a a a a", 1, 0.75),
        ("a b a b a", 2, 0.5),
        ("a a a", 3, 0),
    ],
)
def test_repeated_share(words, n, share):
    assert repeated_share(words.split(), n) == share


@given(st.lists(st.sampled_from("abc"), max_size=30), st.integers(1, 5))
def test_repeated_share_is_a_share(words, n):
    assert 0 <= repeated_share(words, n) < 1


def test_all_that_was_written_counts():
    thought = Message("assistant", "so", reasoning="hm")
    assert (
        said(episode(thought, says(call("f", x=1), BAD), Message.user("no")))
        == 'hm\nso\nf {"x": 1}\n{'
    )


def test_format_is_the_share_of_readable_turns():
    term = format_reward(cap=0.2)
    assert term(episode(says(call("f")), says(BAD), says(content="x"), says(BAD))) == pytest.approx(
        0.1
    )
    assert term(episode()) == 0.0
    short = format_reward(well_formed=lambda message: len(message.content) < 3)
    assert short(episode(says(content="ab"), says(content="abc"))) == pytest.approx(0.05)


def test_terms_are_logged_apart_and_added():
    terms = (
        length_penalty(limit=10, cache=5, cap=0.4),
        repetition_penalty(n=1, cap=0.5),
        format_reward(cap=0.1),
    )
    score = ask(
        shaped(constant(Score(1.0, {"tests": 1.0}, "fine")), *terms),
        says(content="a a a a a a a a"),
    )
    assert score.parts == {
        "tests": 1.0,
        "shaping/length": -0.4,
        "shaping/repetition": pytest.approx(-0.5 * 7 / 8),
        "shaping/format": pytest.approx(0.1),
    }
    assert score.value == pytest.approx(1.0 - 0.4 - 0.4375 + 0.1)
    assert (score.unshaped, score.verdict, score.why) == (1.0, 1.0, "fine")


def test_length_can_be_counted_in_another_unit():
    term = length_penalty(
        limit=4, cache=2, length=lambda submission: len(submission.answer.split())
    )
    assert [term(episode(says(content="w " * count))) for count in (2, 3, 4, 9)] == [
        0,
        -0.5,
        -1,
        -1,
    ]


@given(finite, st.floats(0.01, 10), st.floats(allow_nan=False))
def test_a_term_is_capped(value, cap, measured):
    term = Term("any", cap, lambda submission: measured)
    assert abs(term(episode())) <= cap
    assert ask(shaped(constant(Score(value)), term)).value == pytest.approx(value, abs=cap * 1.001)


@given(finite, st.floats(-10, 10), st.lists(st.floats(-1e6, 1e6), max_size=4))
def test_shaping_never_changes_whether_an_episode_passed(value, threshold, added):
    terms = [
        Term(str(index), 1e6, lambda submission, each=each: each)
        for index, each in enumerate(added)
    ]
    plain = make_episode(value, task="t")
    task = make_task(threshold=threshold).view()
    before = replace(plain, task=task)
    after = replace(before, score=ask(shaped(shaped(constant(Score(value)), *terms), *terms)))
    assert after.passed is before.passed
    assert after.reward == pytest.approx(value + 2 * sum(added), abs=1e-6)


def test_a_failed_score_stays_failed():
    score = ask(shaped(constant(Score.failed("lost")), Term("gift", 1.0, lambda submission: 1.0)))
    assert (score.value, score.parts, score.why) == (None, {}, "lost")


def test_the_unshaped_value_is_recorded():
    score = Score(0.75, {"shaping/length": -0.25}, "fine", unshaped=1.0)
    again = episode_of(episode_row(make_episode(score=score)))
    assert again.score == score
    assert again.passed is True
    assert "unshaped" not in episode_row(make_episode(1.0))["score"]


def test_bad_settings_and_measures():
    for cap in (0.0, -1.0, math.inf, math.nan):
        with pytest.raises(ConfigError, match="cap"):
            format_reward(cap=cap)
    for cache in (0, 11):
        with pytest.raises(ConfigError, match="cache"):
            length_penalty(limit=10, cache=cache)
    with pytest.raises(ConfigError, match="n=0"):
        repetition_penalty(n=0)
    with pytest.raises(ConfigError, match="different names"):
        shaped(constant(Score(1.0)), format_reward(), format_reward())
    with pytest.raises(ValueError, match="not a number"):
        Term("odd", 1.0, lambda submission: math.nan)(episode())
    with pytest.raises(ValueError, match="unshaped"):
        Score(None, {}, "lost", unshaped=1.0)
    with pytest.raises(ValueError, match="unshaped"):
        Score(1.0, unshaped=math.inf)

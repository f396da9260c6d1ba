"""Majority and best of k against enumeration, and what counts as an answer."""

import itertools
from statistics import fmean

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from agentrl.errors import ConfigError
from agentrl.evaluation.run import EvalPlan, evaluate
from agentrl.evaluation.stats import best_of_k, majority_of_k, pass_at_k
from agentrl.evaluation.summary import answer_of
from agentrl.registry import factory

SAMPLES = st.lists(
    st.tuples(st.sampled_from("abc"), st.sampled_from([0.0, 0.5, 1.0]), st.booleans()),
    min_size=1,
    max_size=6,
)


@given(SAMPLES, st.integers(1, 6))
@settings(max_examples=60, deadline=None)
def test_best_of_k_is_the_mean_over_all_draws(samples, k):
    k = min(k, len(samples))
    scores, passed = [s for _, s, _ in samples], [p for _, _, p in samples]
    draws = []
    for draw in itertools.combinations(samples, k):
        top = max(score for _, score, _ in draw)
        draws.append(fmean(won for _, score, won in draw if score == top))
    assert best_of_k(scores, passed, k) == pytest.approx(fmean(draws), abs=1e-12)
    # A judge that is never wrong is pass@k.
    perfect = best_of_k([float(won) for won in passed], passed, k)
    assert perfect == pytest.approx(pass_at_k(len(passed), sum(passed), k), abs=1e-12)


@given(SAMPLES)
@settings(max_examples=40, deadline=None)
def test_a_majority_of_one_is_pass_at_1(samples):
    answers, passed = [a for a, _, _ in samples], [p for _, _, p in samples]
    assert majority_of_k(answers, passed, 1) == pytest.approx(fmean(passed))


def test_a_majority_outvotes_and_ties_are_drawn():
    answers, passed = ["a", "b", "b"], [False, True, True]
    assert majority_of_k(answers, passed, 3) == 1.0
    assert majority_of_k(answers, passed, 2) == pytest.approx((1 + 0.5 + 0.5) / 3)
    assert majority_of_k(["a", "b"], [True, False], 2) == 0.5
    many = majority_of_k(["a"] * 20 + ["b"] * 10, [True] * 20 + [False] * 10, 9)
    assert 0.8 < many < 1.0  # over draws, not over all 14 million


@pytest.mark.parametrize("k", [0, 4])
def test_a_wrong_k_is_refused(k):
    with pytest.raises(ConfigError, match=f"k={k} "):
        majority_of_k(["a"] * 3, [True] * 3, k)
    with pytest.raises(ConfigError, match="for 2 samples"):
        best_of_k([1.0], [True, False], 1)


def test_an_evaluation_says_them_beside_pass_at_k(tmp_path):
    result = evaluate(
        EvalPlan(factory("calc-v0"), limit=3, samples=3, ks=(1, 3), out=tmp_path / "run")
    )
    assert result["chosen"] == {
        "majority": {"1": 1.0, "3": 1.0},
        "best_by_reward": {"1": 1.0, "3": 1.0},
    }
    from agentrl.records.files import read_episodes

    episodes = list(read_episodes(tmp_path / "run" / "episodes.jsonl").values())
    first, *rest = (e for e in episodes if e.task.id == episodes[0].task.id)
    assert answer_of(first) and {answer_of(e) for e in rest} == {answer_of(first)}

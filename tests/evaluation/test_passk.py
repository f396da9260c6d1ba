"""pass@k against enumeration, against published figures, and against its own promises."""

from __future__ import annotations

import itertools
import json
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentrl.errors import ConfigError
from agentrl.evaluation.passk import (
    bootstrap_ci,
    pass_at,
    pass_at_k,
    pass_hat_k,
    summarize,
    task_counts,
    wilson_ci,
)
from agentrl.trajectory import Counts, Episode, EpisodeKey
from agentrl.types import EndReason, Score, TaskView


def episode(
    task="t",
    sample=0,
    reward: float | None = 1.0,
    *,
    end=None,
    threshold=1.0,
    attempt=0,
    effects=None,
):
    if end is None:
        end = EndReason.SANDBOX_LOST if reward is None else EndReason.SUBMITTED
    return Episode(
        key=EpisodeKey("run", 0, task, sample, attempt),
        env="e",
        task=TaskView(id=task, instruction="do", threshold=threshold),
        start="",
        messages=(),
        end=end,
        score=Score.failed("gone") if reward is None else Score(reward),
        counts=Counts(turns=2, tool_calls=3, sampled_tokens=10, wall_s=0.5),
        side_effects=effects,
    )


small_counts = st.integers(1, 8).flatmap(
    lambda n: st.tuples(st.just(n), st.integers(0, n), st.integers(1, n))
)


@given(small_counts)
def test_estimators_equal_enumeration_of_all_draws(counts):
    n, c, k = counts
    draws = list(itertools.combinations([True] * c + [False] * (n - c), k))
    assert pass_at_k(n, c, k) == pytest.approx(sum(map(any, draws)) / len(draws), abs=1e-15)
    assert pass_hat_k(n, c, k) == pytest.approx(sum(map(all, draws)) / len(draws), abs=1e-15)


def test_large_counts_neither_overflow_nor_cancel():
    n, c, k = 100_000, 7, 3_000
    product = 1 - math.prod(1 - k / i for i in range(n - c + 1, n + 1))
    assert pass_at_k(n, c, k) == pytest.approx(product, rel=1e-12)
    assert pass_at_k(10**9, 1, 1) == 1e-9  # 1 - (1 - 1e-9) would have lost eight digits
    assert pass_hat_k(10**6, 10**6 - 1, 2) == pytest.approx(1 - 2e-6, abs=1e-15)


def test_published_figures_come_out(data_dir):
    record = json.loads(
        (data_dir / "passk" / "cruxeval_codellama7b_output_counts.json").read_text()
    )
    counts = {task: (n, c) for task, (n, c) in record["counts_n_c"].items()}
    result = pass_at(counts, [1, 5])
    for k in (1, 5):
        value, interval = result[k].value, result[k].ci95
        assert value is not None and interval is not None
        assert 100 * value == pytest.approx(record["published_percent"][f"pass@{k}"], abs=1e-9)
        assert interval[0] < value < interval[1]
        assert (result[k].n_tasks, result[k].n_excluded) == (800, 0)


@pytest.mark.parametrize(
    ("n", "c", "k"), [(5, 6, 1), (5, -1, 1), (-1, 0, 1), (5, 2, 6), (5, 2, 0), (0, 0, 1)]
)
def test_impossible_counts_are_refused_in_one_sentence(n, c, k):
    for estimator in (pass_at_k, pass_hat_k):
        with pytest.raises(ConfigError, match=r"choose 1 <= k <= n|0 <= c <= n"):
            estimator(n, c, k)


def test_tasks_with_too_few_samples_are_excluded_and_counted():
    result = pass_at({"a": (4, 4), "b": (2, 0), "c": (4, 0)}, [1, 4])
    assert result[1].value == pytest.approx(1 / 3)
    assert (result[4].value, result[4].n_tasks, result[4].n_excluded) == (0.5, 2, 1)
    with pytest.raises(ConfigError, match="k=5 exceeds the 4 samples"):
        pass_at({"a": (4, 4)}, [5])
    with pytest.raises(ConfigError, match="c=3"):
        pass_at({"a": (2, 3)}, [1])


def test_pass_hat_over_tasks():
    assert pass_at({"a": (4, 2), "b": (4, 4)}, [2], estimator=pass_hat_k)[2].value == pytest.approx(
        (1 / 6 + 1) / 2
    )


def test_bootstrap_is_seeded_and_near_the_normal_interval():
    values = [0.0, 1.0] * 200
    low, high = bootstrap_ci(values, seed=3)
    assert (low, high) == bootstrap_ci(values, seed=3) != bootstrap_ci(values, seed=4)
    half = 1.959964 * 0.5 / math.sqrt(400)
    assert low == pytest.approx(0.5 - half, abs=0.01) and high == pytest.approx(
        0.5 + half, abs=0.01
    )
    assert bootstrap_ci(values, level=0.5)[0] > low
    with pytest.raises(ConfigError, match="at least one value"):
        bootstrap_ci([])
    with pytest.raises(ConfigError, match="level=95"):
        bootstrap_ci(values, level=95)


def test_wilson_interval():
    # Roots of (share - p)^2 = z^2 p (1 - p) / n: check them rather than the formula.
    z = 1.959963984540054
    for successes, trials in [(7, 20), (1, 3), (199, 200)]:
        for p in wilson_ci(successes, trials):
            assert (successes / trials - p) ** 2 == pytest.approx(
                z * z * p * (1 - p) / trials, rel=1e-9
            )
    assert wilson_ci(0, 10)[0] == 0.0 and 0.2 < wilson_ci(0, 10)[1] < 0.35
    assert wilson_ci(10, 10)[1] == 1.0
    for bad in [(3, 2), (-1, 2), (0, 0)]:
        with pytest.raises(ConfigError):
            wilson_ci(*bad)


@given(st.integers(1, 60).flatmap(lambda n: st.tuples(st.integers(0, n), st.just(n))))
def test_wilson_interval_holds_the_share(counts):
    successes, trials = counts
    low, high = wilson_ci(successes, trials)
    assert 0 <= low <= successes / trials <= high <= 1


def test_a_perfect_score_over_few_tasks_still_has_a_width():
    low, high = pass_at({"a": (1, 1), "b": (1, 1)}, [1])[1].ci95
    assert high == 1.0 and low < 0.5


def test_tasks_that_score_0_or_1_are_one_proportion_and_others_are_resampled():
    """Six of seven: a bootstrap's upper end is 1, as if a perfect policy were likely."""
    whole = {str(task): (1, int(task < 6)) for task in range(7)}
    assert pass_at(whole, [1])[1].ci95 == wilson_ci(6, 7) != bootstrap_ci([1.0] * 6 + [0.0])
    parts = whole | {"6": (2, 1)}
    assert pass_at(parts, [1])[1].ci95 == bootstrap_ci([1.0] * 6 + [0.5])


def test_summary_counts_infrastructure_failures_apart():
    episodes = [
        episode("a", 0, 1.0, effects={"out.txt": "created"}),
        episode("a", 1, 0.0, end=EndReason.MAX_TURNS),
        episode("b", 0, None),
        episode("b", 0, 0.5, attempt=1, threshold=0.5),
        episode("b", 1, None),
    ]
    summary = summarize(episodes, [1, 2])
    assert summary["pass_at"] == {"1": 0.75, "2": 1.0}
    assert summary["n_excluded"] == {"1": 0, "2": 1}
    assert summary["pass_hat"] == {"1": 0.75, "2": 0.0}
    assert (summary["n_tasks"], summary["n_episodes"], summary["n_failed_infra"]) == (2, 5, 2)
    assert summary["mean_reward"] == 0.5
    assert summary["mean"]["turns"] == 2
    paid = {
        "turns": 10,
        "tool_calls": 15,
        "sampled_tokens": 50,
        "prompt_tokens": 0,
        "wall_s": 2.5,
        "usd": None,
    }
    assert summary["cost"] == paid and summary["tools"] == {}
    found = summary["side_effects"]
    assert (found["measured"], found["episodes"], found["total"]) == (1, 1, 1)
    assert found["kinds"] == {"created": 1} and found["rate"] == 1.0
    assert found["ci95"] == wilson_ci(1, 1)
    assert [row["changed"] for row in found["where"]] == [{"out.txt": "created"}]
    assert summary["end_reasons"] == {"max_turns": 1, "sandbox_lost": 2, "submitted": 2}
    assert summary["ci95"]["1"][0] <= 0.75 <= summary["ci95"]["1"][1]
    json.dumps(summary, allow_nan=False)


def test_side_effects_that_nobody_measured_are_no_zero():
    assert summarize([episode("a", 0)])["side_effects"] is None
    measured = [episode("a", 0, effects={}), episode("a", 1)]
    none = {"measured": 1, "episodes": 0, "rate": 0.0, "total": 0, "kinds": {}, "where": []}
    assert summarize(measured)["side_effects"] == none | {"ci95": wilson_ci(0, 1)}


def test_a_failure_is_never_a_number():
    summary = summarize([episode("a", 0, None), episode("a", 1, None)], [1])
    assert summary["pass_at"] == {"1": None} and summary["ci95"] == {"1": None}
    assert summary["mean_reward"] is None and summary["n_failed_infra"] == 2
    assert task_counts([episode("a", 0, None)]) == {"a": (0, 0)}
    assert summarize([], [1])["pass_at"] == {"1": None}
    with pytest.raises(ConfigError, match="k=3 exceeds the 2 samples"):
        summarize([episode("a", 0), episode("a", 1)], [3])


def test_a_key_recorded_twice_counts_once():
    summary = summarize([episode("a", 0, 0.0), episode("a", 0, 1.0)], [1])
    assert summary["n_episodes"] == 1 and summary["pass_at"]["1"] == 1.0

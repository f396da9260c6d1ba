"""pass@k against enumeration and published figures; intervals against simulation."""

from __future__ import annotations

import itertools
import json
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy.stats import binomtest

from agentrl.errors import ConfigError
from agentrl.evaluation.stats import (
    clustered_ci,
    pass_at,
    pass_at_k,
    pass_hat_k,
    rate_ci,
)
from agentrl.evaluation.summary import summarize, task_counts
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
        with pytest.raises(ConfigError, match=r"1 <= k <= n|0 <= c <= n"):
            estimator(n, c, k)


def test_tasks_with_too_few_samples_are_excluded_and_counted():
    result = pass_at({"a": (4, 4), "b": (2, 0), "c": (4, 0)}, [1, 4])
    assert result[1].value == pytest.approx(1 / 3)
    assert (result[4].value, result[4].n_tasks, result[4].n_excluded) == (0.5, 2, 1)
    with pytest.raises(ConfigError, match="k=5"):
        pass_at({"a": (4, 4)}, [5])
    with pytest.raises(ConfigError, match="c=3"):
        pass_at({"a": (2, 3)}, [1])


def test_pass_hat_over_tasks():
    assert pass_at({"a": (4, 2), "b": (4, 4)}, [2], estimator=pass_hat_k)[2].value == pytest.approx(
        (1 / 6 + 1) / 2
    )


def test_a_perfect_score_over_few_tasks_still_has_a_width():
    low, high = pass_at({"a": (1, 1), "b": (1, 1)}, [1])[1].ci95
    assert high == 1.0 and low < 0.5


@pytest.mark.parametrize(("passed", "tasks"), [(0, 20), (1, 20), (7, 20), (20, 20)])
def test_with_one_sample_a_task_the_interval_is_clopper_and_pearsons(passed, tasks):
    exact = binomtest(passed, tasks).proportion_ci(0.95, method="exact")
    expected = pytest.approx((exact.low, exact.high), abs=1e-12)
    assert rate_ci([1.0] * passed + [0.0] * (tasks - passed)) == expected
    assert rate_ci([3] * passed + [0] * (tasks - passed), [3] * tasks) == expected


@given(st.lists(st.integers(0, 4), min_size=1, max_size=12), st.data())
def test_the_interval_holds_the_rate_has_a_width_and_moves_with_every_hit(passed, data):
    low, high = rate_ci([c / 4 for c in passed])
    assert 0 <= low <= sum(passed) / 4 / len(passed) <= high <= 1
    assert high - low > 0.2 / (len(passed) + 1)
    place = data.draw(st.integers(0, len(passed) - 1))
    if passed[place] == 4:
        return
    more = [c + (at == place) for at, c in enumerate(passed)]
    moved = rate_ci([c / 4 for c in more])
    # The Beta distribution matches two moments only, so an end may dip a little.
    assert moved[0] >= low - 0.02 and moved[1] >= high - 0.02


@pytest.mark.parametrize("tasks", [5, 20, 100])
def test_one_success_never_narrows_the_interval_of_none(tasks):
    none, one = (rate_ci([c] + [0] * (tasks - 1), [8] * tasks) for c in (0, 1))
    assert none[0] == 0 < one[0] and none[1] < one[1]


def test_the_interval_is_symmetric():
    one = rate_ci([1] + [0] * 19, [8] * 20)
    mirrored = rate_ci([7] + [8] * 19, [8] * 20)
    assert mirrored == pytest.approx((1 - one[1], 1 - one[0]))


def test_samples_of_one_task_are_not_independent():
    """Ten tasks that always or never hit, eight samples each: no narrower than ten trials."""
    episodes = [(f"task-{task}", task % 2 == 0) for _ in range(8) for task in range(10)]
    assert clustered_ci(*zip(*episodes, strict=True)) == pytest.approx(rate_ci([1, 0] * 5))
    hits = [8, 0] * 5
    low, high = rate_ci(hits, [8] * 10)
    assert (low, high) == pytest.approx(rate_ci([1, 0] * 5))
    wrong = rate_ci([1, 0] * 40)
    assert high - low > 2 * (wrong[1] - wrong[0])


@pytest.mark.parametrize("bad", [([], None), ([1], [0])])
def test_an_interval_needs_trials(bad):
    with pytest.raises(ConfigError):
        rate_ci(*bad)
    with pytest.raises(ConfigError) as error:
        rate_ci([1], level=95)
    assert error.value.setting == "level"


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
    assert found["ci95"] == rate_ci([1])
    assert [row["changed"] for row in found["where"]] == [{"out.txt": "created"}]
    assert summary["end_reasons"] == {"max_turns": 1, "sandbox_lost": 2, "submitted": 2}
    assert summary["ci95"]["1"][0] <= 0.75 <= summary["ci95"]["1"][1]
    json.dumps(summary, allow_nan=False)


def test_side_effects_that_nobody_measured_are_no_zero():
    assert summarize([episode("a", 0)])["side_effects"] is None
    measured = [episode("a", 0, effects={}), episode("a", 1)]
    none = {"measured": 1, "episodes": 0, "rate": 0.0, "total": 0, "kinds": {}, "where": []}
    assert summarize(measured)["side_effects"] == none | {"ci95": rate_ci([0])}


def test_a_failure_is_never_a_number():
    summary = summarize([episode("a", 0, None), episode("a", 1, None)], [1])
    assert summary["pass_at"] == {"1": None} and summary["ci95"] == {"1": None}
    assert summary["mean_reward"] is None and summary["n_failed_infra"] == 2
    assert task_counts([episode("a", 0, None)]) == {"a": (0, 0)}
    assert summarize([], [1])["pass_at"] == {"1": None}
    with pytest.raises(ConfigError, match="k=3"):
        summarize([episode("a", 0), episode("a", 1)], [3])


def test_a_key_recorded_twice_counts_once():
    summary = summarize([episode("a", 0, 0.0), episode("a", 0, 1.0)], [1])
    assert summary["n_episodes"] == 1 and summary["pass_at"]["1"] == 1.0

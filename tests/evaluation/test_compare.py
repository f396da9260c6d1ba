"""Paired comparison: what it finds, what it refuses, and how often it is wrong."""

import itertools
import json
import math

import numpy as np
import pytest
from helpers import Echo, make_task
from hypothesis import given
from hypothesis import strategies as st
from scipy.stats import binomtest

from agentrl.errors import ConfigError
from agentrl.evaluation.compare import compare_runs, curve_words
from agentrl.evaluation.run import EvalPlan, evaluate
from agentrl.evaluation.stats import paired
from agentrl.report.comparison import write_comparison


def unpaired_p(first, second):
    """Two-sided z-test of two proportions, as if the tasks were others."""
    n, pooled = len(first), (sum(first) + sum(second)) / (2 * len(first))
    z = (sum(second) - sum(first)) / n / math.sqrt(2 * pooled * (1 - pooled) / n)
    return math.erfc(abs(z) / math.sqrt(2))


def test_five_points_of_400_paired_tasks_are_found_where_the_unpaired_test_finds_none():
    first = [1.0] * 200 + [0.0] * 200
    second = [1.0] * 190 + [0.0] * 10 + [1.0] * 30 + [0.0] * 170
    found = paired(first, second)
    assert found.difference == pytest.approx(0.05) and found.test.startswith("t-test")
    assert found.p_value == pytest.approx(binomtest(10, 40).pvalue, rel=0.5)
    assert found.p_value < 0.01 and found.ci95[0] > 0
    assert unpaired_p(first, second) > 0.1
    assert 0.03 < found.detectable < 0.06
    back = paired(second, first)
    assert back.difference == -found.difference and back.p_value == found.p_value


def test_several_samples_are_one_observation_of_their_task():
    rng = np.random.default_rng(1)
    hard = rng.beta(0.4, 0.4, 400)
    first, second = rng.binomial(8, hard) / 8, rng.binomial(8, hard + 0.1 * (1 - hard)) / 8
    found = paired(first.tolist(), second.tolist())
    assert found.p_value < 0.01
    assert paired([0.5, 0.5], [0.5, 0.5]).p_value == 1.0


def test_few_differences_are_judged_as_strictly_as_by_mcnemars_test():
    """Of 50 tasks only a few differ: what the t-test finds, the exact test all but finds, too."""
    for gains, losses in itertools.product(range(13), range(4)):
        gaps = [1.0] * gains + [-1.0] * losses + [0.0] * (50 - gains - losses)
        exact = binomtest(gains, gains + losses).pvalue if gains + losses else 1.0
        if paired([0.0] * 50, gaps).p_value < 0.05:
            assert exact < 0.06


@given(st.lists(st.tuples(st.integers(0, 4), st.integers(0, 4)), min_size=1, max_size=30))
def test_interval_and_p_value_never_contradict_each_other(pairs):
    found = paired([a / 4 for a, _ in pairs], [b / 4 for _, b in pairs])
    low, high = found.ci95
    assert -1 <= low <= found.difference <= high <= 1 and high > low
    assert (found.p_value < 0.05) == (low > 0 or high < 0)


def test_alike_everywhere_still_has_a_width():
    found = paired([1.0] * 20, [1.0] * 20)
    assert found.difference == 0 and found.ci95[0] == -found.ci95[1] < -0.1
    assert found.detectable is None and found.p_value == 1.0
    all_lost = paired([1.0] * 20, [0.0] * 20)
    assert all_lost.ci95[0] == -1.0 and -0.8 < all_lost.ci95[1] < -0.5
    with pytest.raises(ConfigError, match="cannot be paired"):
        paired([1.0], [])


@pytest.mark.parametrize(
    ("low", "high", "word"),
    [
        ((0.1, 0.2), (0.1, 0.2), "expanded"),
        ((0.1, 0.2), (-0.1, 0.04), "sharpened"),
        ((0.1, 0.2), (-0.1, 0.1), "ahead at one draw; at many draws the two are not told apart"),
        ((-0.1, 0.04), (0.1, 0.2), "broader"),
        ((-0.1, 0.1), (0.1, 0.2), "ahead at many draws; at one draw the two are not told apart"),
        ((-0.2, -0.1), (-0.1, 0.1), "behind"),
        ((-0.1, 0.1), (-0.1, 0.1), "not told apart"),
    ],
)
def test_a_curve_in_words(low, high, word):
    rows = [
        {"k": k, "difference": sum(ci) / 2, "ci95": ci} for k, ci in ((1, low), (2, low), (8, high))
    ]
    assert curve_words(rows).startswith(word)
    assert curve_words(rows[:1]).startswith("one k only")


class Half(Echo):
    id = "half-v0"
    count = 12

    def oracle_actions(self, task):
        """Solves every other task."""
        solved = int(task.id.rpartition("-")[2]) % 2
        return super().oracle_actions(task) if solved else ()


def played(out, make=Half, **settings):
    evaluate(EvalPlan(make, out=out, **settings))
    return out


def test_two_recorded_runs(tmp_path):
    first = played(tmp_path / "a", policy="noop", samples=2, ks=(2,))
    second = played(tmp_path / "b", policy="oracle", samples=2, ks=(2,))
    found = compare_runs(first, second)
    assert found["difference"] == 0.5 and found["n_tasks"] == 12 and found["p_value"] < 0.05
    assert found["only_first"] == [] and len(found["only_second"]) == 6
    assert [row["k"] for row in found["curve"]] == [1, 2]
    assert found["says"].startswith("expanded")
    json.dumps(found, allow_nan=False)
    write_comparison(found, tmp_path / "page.html")
    page = (tmp_path / "page.html").read_text()
    assert "<svg" in page and "+0.500" in page and "<script" not in page


@pytest.mark.parametrize(
    ("settings", "part"),
    [
        ({"temperature": 0.5}, "unlike budgets (temperature; temperature is 1.0 and 0.5)"),
        ({"samples": 2}, "unlike budgets (samples"),
        ({"make": type("Shorter", (Half,), {"system": "Be short."})}, "unlike budgets (system"),
        ({"split": "train"}, "share no task"),
    ],
)
def test_unlike_budgets_and_tasks_are_refused(tmp_path, settings, part):
    first, second = played(tmp_path / "a"), played(tmp_path / "b", **settings)
    with pytest.raises(ConfigError) as error:
        compare_runs(first, second)
    assert part in str(error.value)


def test_another_task_under_one_id_is_refused(tmp_path):
    class Reworded(Half):
        def tasks(self, split, seed):
            for task in super().tasks(split, seed):
                yield make_task(task.id, instruction=task.instruction + "!", hidden=task.hidden)

    first, second = played(tmp_path / "a"), played(tmp_path / "b", make=Reworded)
    with pytest.raises(ConfigError, match="is another one than in"):
        compare_runs(first, second)


def test_what_is_no_whole_evaluation_is_refused(tmp_path):
    first, second = played(tmp_path / "a"), played(tmp_path / "b")
    with pytest.raises(ConfigError, match=r"holds no eval\.json"):
        compare_runs(first, tmp_path)
    result = json.loads((second / "eval.json").read_text())
    (second / "eval.json").write_text(json.dumps(result | {"n_missing": 3}))
    with pytest.raises(ConfigError, match="is not complete"):
        compare_runs(first, second)
    for name in ("task_ids", "budget"):
        del result[name]
        (second / "eval.json").write_text(json.dumps({**result, "n_missing": 0}))
        with pytest.raises(ConfigError, match=f"has no {name}"):
            compare_runs(first, second)


def test_only_what_the_last_evaluation_is_of_is_compared(tmp_path):
    runs = [played(tmp_path / name, policy=name) for name in ("noop", "oracle")]
    assert compare_runs(*runs)["n_tasks"] == 12
    for run in runs:
        played(run, policy=run.name, limit=5)
    found = compare_runs(*runs)
    assert found["n_tasks"] == 5 and found["n_unpaired"] == [0, 0]
    (result,) = {json.loads((run / "eval.json").read_text())["n_tasks"] for run in runs}
    assert result == found["n_tasks"]

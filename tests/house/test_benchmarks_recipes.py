"""Intervals of the comparison of recipes: what they pair, and what they leave out."""

import random

import numpy as np
import pytest

from benchmarks.experiments.recipe_runs import Job, Result
from benchmarks.experiments.recipes import drawn_means, interval


def run(recipe, start, outcomes, seed=0):
    job = Job("calc-v0", recipe, start, seed, 3e-4)
    return Result(job, outcomes, 0.3, 5120, 40, 0.0, None, None, None, 1.0)


def outcomes(chance, tasks=64):
    return {f"task-{number}": bool(chance.random() < 0.5) for number in range(tasks)}


def test_the_same_tasks_are_drawn_for_all_in_whatever_order_they_ended():
    passed = outcomes(np.random.default_rng(0))
    rows = list(passed.items())
    random.Random(0).shuffle(rows)
    means = drawn_means(
        {"one": [run("one", 0, passed)], "other": [run("other", 0, dict(rows))]}, 200, 0
    )
    assert interval(means["one"] - means["other"]) == (0.0, 0.0)
    low, high = interval(means["one"])
    assert low < sum(passed.values()) / 64 < high


def test_a_lost_episode_is_left_out_for_all():
    chance = np.random.default_rng(1)
    whole, torn = outcomes(chance), outcomes(chance)
    torn.pop("task-63")
    for found in (
        {"a": [run("a", 0, whole)], "b": [run("b", 0, torn)]},
        {"b": [run("b", 0, torn)], "a": [run("a", 0, whole)]},
    ):
        means = drawn_means(found, 2000, 0)
        expected = np.mean([whole[task] for task in torn])
        assert means["a"].mean() == pytest.approx(expected, abs=0.01)


def test_each_seed_has_tasks_of_its_own():
    """With all runs alike, an interval is that of the tasks of both seeds."""
    chance = np.random.default_rng(3)
    rows = [{f"{seed}-{task}": one for task, one in outcomes(chance).items()} for seed in (0, 1)]
    runs = {
        name: [run(name, 0, passed, seed) for seed, passed in enumerate(rows)]
        for name in ("a", "b")
    }
    runs["b"] = runs["b"][:1]
    means = drawn_means(runs, 2000, 0)
    expected = np.mean([value for row in rows for value in row.values()])
    assert means["a"].mean() == pytest.approx(expected, abs=0.01)
    assert means["b"].mean() == pytest.approx(np.mean(list(rows[0].values())), abs=0.01)


def test_recipes_without_a_common_start_are_refused():
    chance = np.random.default_rng(2)
    with pytest.raises(ValueError, match="no warm start has a run of every one of a, b"):
        drawn_means(
            {"a": [run("a", 0, outcomes(chance))], "b": [run("b", 1, outcomes(chance))]}, 9, 0
        )

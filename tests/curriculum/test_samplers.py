"""Samplers: chances that are exact, estimates that are honest, what choosing gains and costs."""

from __future__ import annotations

from functools import partial

import numpy as np
import pytest
from helpers import growth
from hypothesis import given, settings
from hypothesis import strategies as st
from simulated_policy import sharp, simulate

from agentrl.curriculum import samplers
from agentrl.curriculum.pool import over_all_tasks
from agentrl.curriculum.posterior import Beliefs
from agentrl.errors import ConfigError

ALL = {
    "uniform": samplers.uniform,
    "learnability": samplers.learnability,
    "band": partial(samplers.band, low=0.2, high=0.8),
    "thompson": samplers.thompson,
    "mgpo": partial(samplers.near_half, sharpness=4.0),
    "staged": partial(samplers.staged, target=0.5, review=0.1),
}


def beliefs_of(*means, size=20.0, strata=None):
    mean_N = np.array(means)
    count = len(means)
    last_N, stratum_N = np.zeros(count, dtype=int), np.array(strata or [0] * count)
    return Beliefs(size * mean_N, size * (1 - mean_N), (0.5, 0.5), last_N, stratum_N)


@given(
    st.lists(st.one_of(st.just(0.0), st.floats(1e-6, 1e3)), min_size=1, max_size=40),
    st.integers(1, 40),
    st.sampled_from([0.0, 0.1, 1.0]),
    st.integers(0, 9),
)
@settings(max_examples=150, deadline=None)
def test_chances_sum_to_the_draw_and_no_task_comes_twice(weights, n, explore, seed):
    if n > len(weights):
        with pytest.raises(ConfigError, match=f"a draw of {n} tasks finds {len(weights)}"):
            samplers.inclusion(np.array(weights), n, explore)
        return
    pi_N = samplers.inclusion(np.array(weights), n, explore)
    assert pi_N.sum() == pytest.approx(n) and pi_N.min() >= 0 and pi_N.max() <= 1 + 1e-9
    if explore:
        assert pi_N.min() >= min(1, explore * n / len(weights)) * 0.999
    at = samplers.systematic_sample(pi_N, np.random.default_rng(seed))
    assert len(at) == n == len(set(at))


@pytest.mark.parametrize("large", [10, 65536])
def test_a_task_is_drawn_as_often_as_its_chance_says(monkeypatch, large):
    """Also where a large pool is thinned first."""
    monkeypatch.setattr(samplers, "_LARGE", large)
    pi_N = samplers.inclusion(np.arange(1.0, 25.0) ** 2, 8 if large > 10 else 2, 0.1)
    rng, counts_N = np.random.default_rng(0), np.zeros(24)
    for _ in range(8000):
        counts_N[samplers.systematic_sample(pi_N, rng)] += 1
    spread_N = np.sqrt(pi_N * (1 - pi_N) / 8000) + 1e-9
    assert (np.abs(counts_N / 8000 - pi_N) < 4.5 * spread_N).all()


@given(
    st.lists(st.one_of(st.floats(1e-9, 1e-3), st.floats(0.1, 1e3)), min_size=12, max_size=60),
    st.integers(1, 12),
    st.integers(0, 9),
)
@settings(max_examples=200, deadline=None)
def test_a_thinned_pool_gives_as_many_tasks_and_none_twice(weights, n, seed):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(samplers, "_LARGE", 10)
        pi_N = samplers.inclusion(np.array(weights), n, 1e-9)
        at = samplers.systematic_sample(pi_N, np.random.default_rng(seed))
    assert len(at) == n == len(set(at.tolist()))


def test_a_large_draw_from_a_large_pool_has_no_task_twice():
    rng = np.random.default_rng(0)
    at = samplers.systematic_sample(samplers.inclusion(rng.random(100_000), 20_000, 0.1), rng)
    assert len(at) == 20_000 == len(set(at.tolist()))


def test_what_each_sampler_prefers():
    beliefs, rng = beliefs_of(0.02, 0.3, 0.5, 0.97), np.random.default_rng(0)
    weights = {name: weigh(beliefs, rng) for name, weigh in ALL.items()}
    assert list(weights["uniform"]) == [1, 1, 1, 1]
    assert list(weights["band"]) == [0, 1, 1, 0]
    for name in ("learnability", "mgpo", "thompson"):
        assert weights[name].argmax() in (1, 2) and weights[name][0] < weights[name][1]
    assert weights["mgpo"][2] == pytest.approx(1)
    hard = samplers.band(beliefs_of(0.01, 0.05), rng, low=0.2, high=0.8)
    assert list(hard) == [0, 1]  # the nearest, where none is inside


def test_stages_go_on_when_a_level_is_solved_and_back_when_the_next_is_too_hard():
    target, levels = 0.5, [0, 1, 2]
    fresh = Beliefs.of(levels)
    assert samplers.stage_of(fresh, target) == 0
    half = fresh.observed([0], [5], [10], 0)
    assert samplers.stage_of(half, target) == 0
    solved = fresh.observed([0], [20], [20], 0)
    assert samplers.stage_of(solved, target) == 1
    too_hard = fresh.observed([0, 1], [14, 0], [20, 20], 0)
    assert samplers.stage_of(too_hard, target) == 0
    weights = samplers.staged(solved, np.random.default_rng(0), target=target, review=0.2)
    assert list(weights) == pytest.approx([0.2, 0.8, 0])


def test_learnability_finds_groups_with_signal():
    """The promise: 1.8 times as many as uniform sampling, where half of the tasks are hopeless or
    solved and the policy moves as assumed.
    """
    gains = [
        simulate(sharp, seed=seed).informative / simulate(samplers.uniform, seed=seed).informative
        for seed in range(3)
    ]
    assert np.mean(gains) >= 1.8


def test_the_estimate_over_all_tasks_is_right_where_the_naive_mean_is_off():
    """Tasks are hard on average here: the mean over groups that train says nothing of that."""
    runs = [simulate(sharp, prior=(0.3, 0.9), seed=seed) for seed in range(4)]
    errors = np.concatenate([one.errors for one in runs])
    assert abs(errors.mean()) < 3 * errors.std() / np.sqrt(len(errors))
    assert 0.9 <= np.concatenate([one.holds for one in runs]).mean() <= 0.995
    assert np.concatenate([one.naive for one in runs]).mean() >= 0.1


def test_what_was_seen_of_all_tasks_is_their_mean_whatever_was_expected():
    everything = over_all_tasks(np.array([1.0, 0.0]), np.array([0.9, 0.1]), np.ones(2), np.ones(2))
    assert everything.value == pytest.approx(1.0)


def test_the_time_for_choosing_64_grows_with_the_number_of_tasks_alone():
    rng = np.random.default_rng(0)

    def beliefs_about(size):
        zeros = np.zeros(size, dtype=int)
        alpha_N, beta_N = rng.random((2, size)) * 5 + 0.1
        return Beliefs(alpha_N, beta_N, (0.5, 0.5), zeros, zeros)

    beliefs = {size: beliefs_about(size) for size in (10**5, 4 * 10**5)}

    def choose(size):
        pi_N = samplers.inclusion(sharp(beliefs[size], rng), 64, 0.1)
        samplers.systematic_sample(pi_N, rng)

    assert growth(choose, 10**5) < 9  # with the square it is 16

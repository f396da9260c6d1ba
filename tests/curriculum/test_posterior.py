"""Beta posteriors that forget: closed forms against draws, calibration under a moving policy."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from simulated_policy import MovingPolicy, covered

from agentrl.curriculum.pool import group_sizes
from agentrl.curriculum.posterior import (
    JEFFREYS,
    Beliefs,
    fit_prior,
    forget,
    group_signal,
    learning_signal,
    signal_variance,
)
from agentrl.errors import ConfigError

positive = st.floats(0.05, 200)


def one(value):
    return np.array([value], dtype=np.float64)


def test_literals():
    assert learning_signal(one(1), one(1)) == pytest.approx(1 / 6)  # of the flat prior
    assert signal_variance(one(1), one(1)) == pytest.approx(1 / 30 - 1 / 36)
    assert group_signal(one(1), one(1), 2) == pytest.approx(1 / 3)
    assert group_signal(one(1), one(1), 8) == pytest.approx(1 - 2 / 9)
    assert group_signal(one(3), one(4), 1) == 0


@given(positive, positive, st.integers(2, 16))
@settings(max_examples=40, deadline=None)
def test_closed_forms_are_those_of_draws(a, b, group_size):
    p = np.random.default_rng(0).beta(a, b, 40_000)
    q = p * (1 - p)
    assert learning_signal(one(a), one(b))[0] == pytest.approx(q.mean(), abs=0.005)
    assert signal_variance(one(a), one(b))[0] == pytest.approx(q.var(), abs=0.002)
    drawn = 1 - (p**group_size).mean() - ((1 - p) ** group_size).mean()
    assert group_signal(one(a), one(b), group_size)[0] == pytest.approx(drawn, abs=0.02)


@given(positive, positive, positive, positive, st.floats(0.001, 0.3))
@settings(max_examples=60, deadline=None)
def test_forgetting_keeps_the_prior_leads_to_it_and_makes_nothing_surer(a0, b0, s, f, drift):
    prior = (a0, b0)
    kept = forget(one(a0), one(b0), prior, 3, drift)
    assert np.allclose(kept, [[a0], [b0]], rtol=1e-5)
    far = forget(one(a0 + s), one(b0 + f), prior, 10**10, drift)
    assert np.allclose(far, [[a0], [b0]], rtol=1e-4)
    alpha, beta = forget(one(a0 + s), one(b0 + f), prior, 1, drift)
    before = (a0 + s) / (a0 + b0 + s + f)
    mean, middle = alpha / (alpha + beta), a0 / (a0 + b0)
    assert min(before, middle) - 1e-9 <= mean[0] <= max(before, middle) + 1e-9


def test_forgetting_has_the_moments_of_the_diffusion():
    """The moments by many small steps of the chain whose limit the diffusion is."""
    rng, prior, drift, rounds = np.random.default_rng(1), (0.3, 0.6), 0.1, 4
    p = rng.beta(0.3 + 5, 0.6 + 2, 40_000)
    policy = MovingPolicy(p, prior, drift / 4, rng)
    for _ in range(16 * rounds):  # 16 steps of a quarter of the drift are one round
        policy.move()
    alpha, beta = forget(one(5.3), one(2.6), prior, rounds, drift)
    size, mean = alpha + beta, alpha / (alpha + beta)
    assert mean[0] == pytest.approx(policy.p_N.mean(), abs=0.004)
    assert (mean * (1 - mean) / (size + 1))[0] == pytest.approx(policy.p_N.var(), rel=0.05)


@pytest.mark.parametrize(
    ("times", "least", "most"), [(0, 0.90, 1.0), (1, 0.88, 0.92), (3, 0.5, 0.8)]
)
def test_90_percent_intervals_cover_90_percent_at_the_drift_that_is_assumed(times, least, most):
    """And too much where the policy stands still, too little where it moves three times as fast."""
    share = np.mean([covered(times * 0.02, 0.02, seed) for seed in range(3)])
    assert least <= share <= most


def test_a_task_that_was_never_played_is_expected_to_be_like_its_level():
    beliefs = Beliefs.of([0, 0, 1, 1]).observed([0, 2], [8, 0], [8, 8], step=0)
    mean_N = beliefs.informed().mean_N
    assert mean_N[1] == pytest.approx(8.5 / 9) and mean_N[3] == pytest.approx(0.5 / 9)
    assert beliefs.mean_N[1] == 0.5
    assert beliefs.moved(5, 0.1).alpha_N[1] == 0.5  # nothing to forget, to the last bit


def test_a_prior_is_fitted_by_moments():
    rng = np.random.default_rng(0)
    p = rng.beta(0.3, 0.9, 4000)
    a, b = fit_prior(list(rng.binomial(8, p)), [8] * 4000)
    assert a == pytest.approx(0.3, abs=0.05) and b == pytest.approx(0.9, abs=0.1)
    assert fit_prior([1] * 5, [8] * 5) == JEFFREYS
    assert all(0 < one < math.inf for one in fit_prior([0] * 50, [8] * 50))
    with pytest.raises(ConfigError, match=r"prior=\[0, 1\] must be two positive numbers"):
        Beliefs.of([0], (0, 1))


@given(st.lists(st.tuples(positive, positive), min_size=1, max_size=6), st.integers(2, 12))
@settings(max_examples=60, deadline=None)
def test_group_sizes_spend_the_budget_and_no_move_of_an_episode_gains(beliefs, mean_size):
    alpha, beta = (np.array(column) for column in zip(*beliefs, strict=True))
    total = mean_size * len(beliefs)
    sizes = group_sizes(alpha, beta, total, 2, 16)
    assert sum(sizes) == total and min(sizes) >= 2 and max(sizes) <= 16

    def signal(task, size):
        return group_signal(alpha[[task]], beta[[task]], size)[0]

    for giver, had in enumerate(sizes):
        for taker, has in enumerate(sizes):
            if giver != taker and had > 2 and has < 16:
                lost = signal(giver, had) - signal(giver, had - 1)
                assert signal(taker, has + 1) - signal(taker, has) <= lost + 1e-9

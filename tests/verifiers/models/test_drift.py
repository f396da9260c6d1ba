"""Drift of scores: by hand on small numbers, and as a property of shifts."""

from __future__ import annotations

import math
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentrl.errors import ConfigError
from agentrl.verifiers.models.drift import FEWEST, Drift

TEN = [float(number % 10) for number in range(100)]


def test_by_hand_all_live_scores_in_the_highest_of_ten_bins():
    drift = Drift(TEN)
    drift.add([9.0] * 100)
    few, many, tenth = 0.5 / 105, 100.5 / 105, 10.5 / 105
    by_hand = 9 * (few - tenth) * math.log(few / tenth) + (many - tenth) * math.log(many / tenth)
    assert drift.psi == pytest.approx(by_hand) and drift.beyond == 0.0


def test_scores_beyond_those_of_the_reference_are_counted():
    drift = Drift(TEN)
    drift.add([*[5.0] * 60, *[9.1] * 30, *[-0.1] * 10])
    assert drift.beyond == pytest.approx(0.4)


def test_nothing_is_said_of_too_few_and_only_the_last_count():
    drift = Drift(TEN, window=FEWEST)
    drift.add([100.0] * (FEWEST - 1))
    assert drift.psi is drift.beyond is None
    drift.add([5.0])
    assert drift.beyond == pytest.approx(1 - 1 / FEWEST)
    drift.add([5.0] * (FEWEST - 1))
    assert drift.beyond == 0.0


@pytest.mark.parametrize("scores", [[1.0] * 100, list(map(float, range(FEWEST - 1)))])
def test_what_can_be_no_reference_is_refused(scores):
    with pytest.raises(ConfigError, match="are no reference for drift: give pairs"):
        Drift(scores)


@given(st.integers(0, 10**6), st.floats(1.0, 4.0))
def test_the_same_distribution_has_not_drifted_and_a_moved_one_has(seed, shift):
    chance = random.Random(seed)
    same, moved = (Drift([chance.gauss(0, 1) for _ in range(400)]) for _ in range(2))
    same.add([chance.gauss(0, 1) for _ in range(1000)])
    moved.add([chance.gauss(shift, 1) for _ in range(1000)])
    assert same.psi < 0.25 < moved.psi

"""Drift of scores: by hand on small numbers, and as a property of shifts."""

from __future__ import annotations

import math
import random
from statistics import fmean

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentrl.verifiers.models.reward_service import FEWEST, Drift

TEN = [float(number % 10) for number in range(100)]


def test_by_hand_all_live_scores_in_the_highest_of_ten_bins():
    drift = Drift(TEN)
    drift.add([9.0] * 300)
    few, many, tenth = 0.5 / 305, 300.5 / 305, 10.5 / 105
    by_hand = 9 * (few - tenth) * math.log(few / tenth) + (many - tenth) * math.log(many / tenth)
    assert drift.psi == pytest.approx(by_hand - 9 * (1 / 300 + 1 / 100)) and drift.beyond == 0.0


def test_scores_beyond_those_of_the_reference_are_counted():
    drift = Drift(TEN)
    drift.add([*[5.0] * 120, *[9.1] * 60, *[-0.1] * 20])
    assert drift.beyond == pytest.approx(0.4)
    assert [drift.is_beyond(score) for score in (-0.1, 0.0, 9.0, 9.1)] == [True, False, False, True]


def test_nothing_is_said_of_too_few_and_only_the_last_count():
    drift = Drift(TEN, window=FEWEST)
    drift.add([100.0] * (FEWEST - 1))
    assert drift.psi is drift.beyond is None
    drift.add([5.0])
    assert drift.beyond == pytest.approx(1 - 1 / FEWEST)
    drift.add([5.0] * (FEWEST - 1))
    assert drift.beyond == 0.0 and len(drift) == FEWEST


@pytest.mark.parametrize("reference", [50, 100, 500])
def test_chance_alone_makes_no_drift(reference):
    chance, found = random.Random(reference), []
    for _ in range(100):
        drift = Drift([chance.gauss(0, 1) for _ in range(reference)])
        drift.add([chance.gauss(0, 1) for _ in range(FEWEST)])
        found.append(drift.psi)
    assert fmean(found) < 0.1 and sum(psi >= 0.25 for psi in found) <= 5


@given(st.integers(0, 10**6), st.floats(1.0, 4.0))
def test_a_moved_distribution_has_drifted(seed, shift):
    chance = random.Random(seed)
    drift = Drift([chance.gauss(0, 1) for _ in range(100)])
    drift.add([chance.gauss(shift, 1) for _ in range(1000)])
    assert drift.psi > 0.25

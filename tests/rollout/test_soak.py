"""Hostile episodes over every cause that we can think of: none is left without a score."""

from __future__ import annotations

import os

import pytest
from soak import soak

EPISODES = int(os.environ.get("AGENTRL_SOAK", "160"))


@pytest.mark.long
def test_no_hostile_episode_is_left_without_a_score(bubblewrap, docker):
    told = soak(EPISODES)
    assert told["episodes"] == EPISODES
    assert told["none"] == {} and told["none_of_the_witness_too"] == 0
    assert told["honest_passed"] == told["honest"] > 0

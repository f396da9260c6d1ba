"""The silent bugs of reinforcement learning, each as a wrong function that a check flags."""

from __future__ import annotations

import correction_mutants
import credit_mutants
import critic_mutants
import loss_mutants
import packing_mutants
import pytest
import recipe_mutants
import scoring_mutants
from mutants import parameters

CASES = [
    *packing_mutants.CASES,
    *loss_mutants.CASES,
    *scoring_mutants.CASES,
    *credit_mutants.CASES,
    *critic_mutants.CASES,
    *correction_mutants.CASES,
    *recipe_mutants.CASES,
]


@pytest.mark.parametrize(("check", "real"), parameters(CASES, 1))
def test_the_real_function_passes(check, real):
    check(real)


@pytest.mark.parametrize(("check", "wrong"), parameters(CASES, 2))
def test_the_wrong_one_is_flagged(check, wrong):
    with pytest.raises(AssertionError):
        check(wrong)


def test_no_wrong_function_is_lost():
    assert len(parameters(CASES, 2)) >= 166

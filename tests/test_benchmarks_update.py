"""The update benchmarks run: both sides take the step they are timed for, and agree on its gradient."""

from __future__ import annotations

from dataclasses import replace

import pytest

from benchmarks.parts.update_pairs import measure_pairs
from benchmarks.parts.update_work import TINY


@pytest.mark.long
def test_both_sides_take_their_step():
    small = replace(TINY, vocabulary=512, width=32, rows=4, turns=3, micro_rows=2)
    pairs = measure_pairs(small, 1)
    assert pairs.speed > 0 and pairs.memory > 0

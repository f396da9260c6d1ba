"""The promises of the statistics, by small simulations; the tables come from the same functions."""

from __future__ import annotations

import pytest

from benchmarks.experiments.intervals import RATES, TABLES, coverage, power, type1


@pytest.mark.parametrize("unequal", [False, True])
@pytest.mark.parametrize("rates", RATES.values(), ids=RATES)
@pytest.mark.parametrize(("tasks", "samples"), [(20, 1), (20, 8), (50, 4)])
def test_intervals_cover(tasks, samples, rates, unequal):
    found = coverage(tasks, samples, rates, repeats=300, seed=1, unequal=unequal)
    assert found.share >= 0.92  # 0.95 less 2.4 standard errors
    assert found.width < 0.65


@pytest.mark.parametrize("rates", [(0.5, 0.5), 0.5, (0.1, 1.0)])
@pytest.mark.parametrize(("tasks", "samples"), [(5, 4), (8, 2), (20, 8), (50, 1)])
def test_equal_policies_are_seldom_called_different(tasks, samples, rates):
    assert type1(tasks, samples, rates, repeats=1000, seed=2) <= 0.07


@pytest.mark.parametrize(("tasks", "samples"), [(50, 4), (100, 1)])
def test_the_detectable_difference_is_found_four_times_of_five(tasks, samples):
    found = power(tasks, samples, (0.5, 0.5), repeats=600, seed=3)
    assert 0.75 <= found.found <= 0.85 and found.covered >= 0.92


@pytest.mark.parametrize("name", TABLES)
@pytest.mark.long
def test_every_table_is_written(name):
    rows = list(TABLES[name][2](1, 0))
    assert len({len(row) for row in rows}) == 1 and len(rows) > 4

"""Task sources: epochs in their order, no task twice in a draw, and a state to go on from."""

from __future__ import annotations

from itertools import count

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentrl.curriculum import Uniform
from agentrl.errors import ConfigError
from agentrl.types import Task


def epochs_of(size):
    def epoch(number):
        return (Task(id=f"{number}-{place}", instruction="say yes") for place in range(size))

    return epoch


def ids(source, n, draws):
    return [[task.id for task in source.next(n)] for _ in range(draws)]


def test_an_epoch_ends_where_a_draw_no_longer_fits():
    assert ids(Uniform(epochs_of(5)), 2, 3) == [["0-0", "0-1"], ["0-2", "0-3"], ["1-0", "1-1"]]


@given(st.integers(1, 9), st.integers(1, 9), st.integers(0, 12), st.integers(1, 6))
def test_a_source_goes_on_from_its_state(size, n, before, after):
    if n > size:
        with pytest.raises(ConfigError, match=f"has {size} tasks in split 'train', fewer than"):
            Uniform(epochs_of(size)).next(n)
        return
    whole = ids(Uniform(epochs_of(size)), n, before + after)
    first = Uniform(epochs_of(size))
    assert ids(first, n, before) == whole[:before]
    assert ids(Uniform(epochs_of(size), state=first.state()), n, after) == whole[before:]


def test_an_endless_split_has_one_epoch_and_observing_changes_nothing():
    source = Uniform(lambda epoch: (Task(id=str(n), instruction="x") for n in count()))
    source.observe([])
    assert ids(source, 3, 2) == [["0", "1", "2"], ["3", "4", "5"]]
    assert source.state() == {"epoch": 0, "drawn": 6}


def test_a_later_epoch_that_has_become_too_small_is_named():
    source = Uniform(lambda epoch: epochs_of(4 if epoch == 0 else 1)(epoch), "mine-v0")
    source.next(3)
    with pytest.raises(ConfigError, match="mine-v0 has 1 tasks"):
        source.next(3)

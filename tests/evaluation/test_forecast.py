"""`agentrl plan`: replaying the times of a run under other settings."""

from __future__ import annotations

import pytest
from helpers import last_json, run_cli
from hypothesis import given
from hypothesis import strategies as st
from run_cases import run, settings

from agentrl.errors import ConfigError
from agentrl.evaluation.forecast import RunTimes, forecast, read_times


def times(episodes, updates, slots, engine=None) -> RunTimes:
    return RunTimes(episodes, updates, engine or [0.0] * len(updates), slots, shares_cores=True)


def test_a_synchronous_run_takes_the_slowest_episode_and_the_update_of_each_round():
    (row,) = forecast(times([[1.0, 5.0], [2.0, 3.0]], [0.5, 1.5], slots=2), [0])
    assert (row.seconds, row.speedup) == (5 + 0.5 + 3 + 1.5, 1.0)
    assert row.trainer_idle == pytest.approx(8 / 10)


def test_a_round_ahead_plays_in_the_slots_that_are_free():
    # Slot 2 is free at 1, plays the second round's 2 s and then its 3 s until 6.
    (row,) = forecast(times([[5.0, 1.0], [2.0, 3.0]], [0.5, 0.5], slots=2), [1])
    assert row.seconds == pytest.approx(6.0 + 0.5)


def test_generation_that_fills_the_time_is_not_made_faster():
    busy = times([[2.0] * 4] * 10, [0.5] * 10, slots=4, engine=[2.0] * 10)
    assert all(row.speedup <= 1.0 + 1e-9 for row in forecast(busy, [1, 2, 4]))


@given(
    st.lists(
        st.tuples(st.lists(st.floats(0.01, 9), min_size=3, max_size=3), st.floats(0.01, 2)),
        min_size=1,
        max_size=6,
    )
)
def test_without_an_engine_more_staleness_is_never_slower(rounds):
    measured = times([list(e) for e, _ in rounds], [u for _, u in rounds], slots=3)
    seconds = [row.seconds for row in forecast(measured, [0, 1, 2, 9])]
    assert seconds[0] >= max(seconds[1:]) - 1e-9
    assert min(seconds) >= sum(u for _, u in rounds)


def test_the_command_reads_a_real_run(model, tmp_path):
    run(settings(model, steps=3, eval_every=0), tmp_path / "x")
    measured = read_times(tmp_path / "x")
    assert [len(row) for row in measured.episodes] == [16, 16, 16] and measured.slots == 16
    assert all(seconds > 0 for seconds in (*measured.engine, *measured.updates))
    shown = last_json(run_cli("plan", str(tmp_path / "x"), "--json").stdout)
    assert [row["staleness"] for row in shown["forecasts"]] == [1, 2, 4]
    assert run_cli("plan", str(tmp_path / "x"), "--staleness", "a").returncode == 2
    assert "max_staleness = 2" in run_cli("plan", str(tmp_path / "x")).stdout


def test_a_folder_without_rounds_is_refused(tmp_path):
    with pytest.raises(ConfigError) as refused:
        read_times(tmp_path)
    assert refused.value.setting == "run"

"""The demo at its smallest size, and a warm start that fails."""

from __future__ import annotations

from dataclasses import replace

import pytest

from agentrl.errors import TrainingError
from agentrl.records.files import read_metrics
from agentrl.trainers.demo import DemoPlan, prepare_demo, run_demo

SMALL = DemoPlan(
    demonstrations=64,
    sft_steps=3,
    sft_more=1,
    sft_band=(0.0, 1.0),
    rounds=2,
    tasks_per_step=4,
    group_size=4,
    practice=8,
    held_out=8,
)


@pytest.mark.long
def test_the_demo_runs_from_nothing_to_a_report(tmp_path, bubblewrap):
    result = run_demo(folder=tmp_path / "demo", plan=SMALL)
    assert set(result["pass_at_1"]) == {"before", "after"}
    assert (tmp_path / "demo" / "report.html").exists()
    assert [row["step"] for row in read_metrics(tmp_path / "demo" / "metrics.jsonl")] == [0, 1, 2]


@pytest.mark.long
def test_a_warm_start_below_its_band_is_refused(tmp_path, bubblewrap):
    with pytest.raises(TrainingError):
        prepare_demo(replace(SMALL, sft_steps=1, sft_band=(0.9, 1.0)), 0, "auto", tmp_path / "demo")

"""The repeated comparison of two samplers: its settings are valid and its smallest size runs."""

from __future__ import annotations

from dataclasses import replace

import pytest

from agentrl.trainers.config import check_config
from benchmarks.experiments.curricula_again import ARMS, PLANS, compare, ratio, settings


@pytest.mark.parametrize("arm", ARMS)
@pytest.mark.parametrize("name", PLANS)
def test_every_arm_has_the_same_settings_but_for_its_sampler(name, arm):
    plan = PLANS[name]
    knobs = {key: list(v) if isinstance(v, tuple) else v for key, v in plan.demo.knobs}
    start = check_config(
        {"env": plan.demo.env, "env_settings": knobs, "model": "start", "recipe": "grpo"}, "test"
    )
    run = settings(plan, start, arm, 3)
    assert run.curriculum.sampler == arm and run.seed == 3 and run.steps == 48
    other = settings(plan, start, "uniform", 3)
    assert run.model_dump(exclude={"curriculum"}) == other.model_dump(exclude={"curriculum"})


def test_the_ratio_is_paired_by_seed():
    mean, low, high = ratio([200, 400, 800], [100, 200, 400])
    assert mean == pytest.approx(2) and low == pytest.approx(2) == pytest.approx(high)
    mean, low, high = ratio([100, 400], [100, 100])
    assert mean == pytest.approx(2) and low < 1 < mean < high


@pytest.mark.long
def test_the_smallest_comparison_runs(tmp_path):
    demo = replace(
        PLANS["calc"].demo,
        demonstrations=64,
        sft_steps=4,
        sft_more=1,
        sft_band=(0.0, 1.0),
        practice=8,
        rounds=2,
        tasks_per_step=4,
        group_size=2,
        width=64,
    )
    plan = replace(PLANS["calc"], demo=demo, pool=12, held_out=8)
    found = compare(tmp_path, "calc", plan, [0])
    assert set(found["episodes"]) == set(ARMS) and found["times"] > 0

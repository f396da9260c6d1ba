"""Signs of trouble in the rows of a run: which are seen, and what could not be judged."""

from __future__ import annotations

import random
import re

import pytest
from fake_run import metrics_row

from agentrl.report.signs import alarms, coverage, find_signs
from benchmarks.experiments.intervals import Rounds, false_alarms

ROUND = {"groups/total": 32.0, "reward/std": 0.4, "groups/reward_std_mean": 0.2}


def rows(**columns):
    return [
        {"step": step} | ROUND | {key: f(step) for key, f in columns.items()} for step in range(20)
    ]


@pytest.mark.parametrize(
    ("columns", "says"),
    [
        ({"reward/mean": lambda s: s / 20, "eval/pass_at_1": lambda s: 0.3}, "while held-out pass@1 changed by"),
        ({"reward/mean": lambda s: 0.9 * (s > 8), "eval/pass_at_1": lambda s: s}, "rose by 0.90 at step 9"),
        ({"groups/no_signal": lambda s: 0.9, "groups/all_pass": lambda s: 0.1, "groups/all_fail": lambda s: 0.8},
         r"90% of the last groups give no signal \(10% all solved, 80% all failed\)"),
        ({"policy/entropy": lambda s: 0.6 / (s + 1)}, "Entropy fell"),
        ({"length/sampled_mean": lambda s: 50 + 10 * s}, "Responses grew from 70 to 220"),
        ({"policy/clip_low": lambda s: 0.2, "policy/clip_high": lambda s: 0.2}, "40% of tokens are clipped"),
        ({"parity/gap_mean": lambda s: 0.45}, "differ by up to 0.45 nats"),
        ({"format/bad_calls_rate": lambda s: 0.5}, "50% of the last episodes hold"),
        ({}, "measured fewer than twice"),
        ({"policy/kl": lambda s: 0.01 + 0.4 * (s == 12)}, "KL to the sampler rose to 0.41 nats per token at step 12"),
        ({"policy/ref_kl": lambda s: 0.02 + 2 * (s > 15)}, "KL to the reference rose to 2.02 nats"),
        ({"pass/train": lambda s: 0.9, "eval/pass_at_1": lambda s: 0.5}, "90% of the last training episodes before step 19 pass and 50% of"),
        ({"reward/part/reward_model_beyond": lambda s: 0.3 * (s == 7)}, "30% of the reward model's scores at step 7 lie beyond"),
        ({"reward/part/reward_model_version": lambda s: 1 + (s > 3) + (s > 9)}, "version changed from 2 to 3 at step 10"),
    ],
)  # fmt: skip
def test_warning_signs(columns, says):
    assert any(re.search(says, sentence) for sentence in find_signs(rows(**columns)))


def test_alarms_are_the_signs_of_a_run_that_still_trains():
    assert alarms(rows(**{"policy/kl": lambda s: 0.01})) == {}
    loud = rows(
        **{
            "reward/mean": lambda s: 0.9 * (s > 8),
            "length/sampled_mean": lambda s: 50 + 10 * s,
            "policy/kl": lambda s: 1.0 * (s > 8),
            "pass/train": lambda s: 1.0,
            "eval/pass_at_1": lambda s: 0.1,
        }
    )
    assert alarms(loud).keys() == {"reward_jump", "length", "kl", "gap"}
    assert set(alarms(loud).values()) <= set(find_signs(loud))


def test_rewards_without_a_scale_are_judged_by_their_spread():
    """A reward model's numbers, of one round and the next, as PPO against it saw them."""
    jump = [ROUND | {"step": 1, "reward/mean": -0.45}, ROUND | {"step": 2, "reward/mean": 0.58}]
    wide = {"reward/std": 1.7, "reward/max": 2.05}
    assert "reward_jump" in alarms(jump)
    assert "reward_jump" not in alarms([row | wide for row in jump])
    assert "reward_jump" in alarms([row | wide | {"reward/std": 0.5} for row in jump])
    assert "reward_jump" in alarms([row | {"reward/max": 1.0} for row in jump])


def test_a_jump_is_judged_by_the_size_of_the_round():
    jump = [ROUND | {"step": step, "reward/mean": 0.2 + 0.4 * step} for step in range(2)]
    assert "reward_jump" in alarms(jump)
    assert "reward_jump" not in alarms([row | {"groups/total": 4.0} for row in jump])
    unknown = [{key: row[key] for key in ("step", "reward/mean", "reward/std")} for row in jump]
    assert "reward_jump" not in alarms(unknown)


@pytest.mark.parametrize(("tasks", "samples"), [(4, 8), (8, 8), (16, 8), (32, 8)])
def test_a_policy_that_does_not_change_seldom_sets_off_the_alarm(tasks, samples):
    assert false_alarms(Rounds(tasks, samples, (0.3, 0.3)), repeats=200, seed=tasks) <= 0.1


def test_a_kl_to_the_reference_that_grows_by_and_by_is_no_spike():
    grown = [0.003, 0.011, 0.030, 0.082, 0.130, 0.166, 0.104, 0.186]
    steps = [{"step": step, "policy/ref_kl": kl} for step, kl in enumerate(grown)]
    assert alarms(steps) == {}
    at_once = alarms([*steps, {"step": 8, "policy/ref_kl": 0.9}])["kl"]
    assert "rose to 0.9 nats per token at step 8, before that 0.166" in at_once


def test_training_is_held_against_the_held_out_tasks_of_the_same_time():
    """A run that learns between two evaluations has outrun only the older one."""
    learns = [{"step": step, "pass/train": step / 20} for step in range(14)]
    learns[0]["eval/pass_at_1"] = 0.05
    assert "gap" not in alarms(learns)
    learns[13]["eval/pass_at_1"] = 0.6
    assert "gap" not in alarms(learns)
    learns[13]["eval/pass_at_1"] = 0.1
    assert "gap" in alarms(learns)


def test_a_healthy_run_shows_no_sign():
    healthy = [metrics_row(step, 40, random.Random(step)) for step in range(41)]
    assert find_signs(healthy) == []


def test_signs_say_what_was_looked_at_and_what_could_not_be_judged():
    short = [{"step": step, "reward/mean": 0.0, "eval/pass_at_1": 0.0} for step in range(4)]
    said = coverage(short)
    assert said.startswith("Looked at over 4 rounds: held-out pass@1, steps in reward.")
    assert "Not judged: groups without signal (0 of at least 10 rounds), entropy" in said
    assert said.endswith("No episode was ever rewarded.")
    assert (
        "entropy"
        in coverage([{"step": step, "policy/entropy": 1.0} for step in range(10)]).partition(
            "Not judged"
        )[0]
    )


def test_a_step_in_reward_where_the_reward_model_changed_is_no_trick():
    steps = {"reward/mean": lambda s: 0.9 * (s > 8)}
    version = {"reward/part/reward_model_version": lambda s: 1.0 + (s > 8)}
    assert "reward_jump" in alarms(rows(**steps))
    assert set(alarms(rows(**steps, **version))) == {"version"}


def test_means_over_two_reward_models_are_no_versions():
    mixed = {"reward/part/reward_model_version": lambda s: 1.4 + 0.1 * (s % 2)}
    assert "version" not in alarms(rows(**mixed))

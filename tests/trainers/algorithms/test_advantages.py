"""Advantages of episodes against published numbers, their conventions, and what they refuse."""

from __future__ import annotations

import itertools
import json
import math
from dataclasses import replace
from functools import partial
from statistics import fmean

import pytest
import torch
from credit_cases import furnished
from hypothesis import given, settings
from hypothesis import strategies as st
from trainer_cases import Golden, branch, episode, group

from agentrl.errors import ConfigError, UserError
from agentrl.trainers.algorithms.advantages import (
    dr_grpo,
    gdpo,
    group_advantages,
    grpo,
    less_weighted_mean,
    maxrl,
    mgpo,
    opo,
    pass_at_k,
    reinforce,
    remax,
    rloo,
    total_reward_E,
    with_greedy_rewards,
)
from agentrl.trainers.batch import pack
from agentrl.trajectory import Group

FORMS = [
    grpo,
    dr_grpo,
    rloo,
    maxrl,
    mgpo,
    pass_at_k,
    lambda rewards: less_weighted_mean(rewards, [3] * len(rewards)),
]


@pytest.fixture(scope="module")
def vectors(data_dir):
    rows = json.loads((data_dir / "numeric" / "vectors_shared.json").read_text())
    return {row["name"]: row for row in rows}


@pytest.mark.parametrize(
    ("advantage", "won", "lost"),
    [
        (grpo, 1.207612, -0.724567),
        (partial(grpo, eps=1e-4), 1.207381, -0.724429),
        (dr_grpo, 0.625, -0.375),
        (rloo, 0.714286, -0.428571),
        (maxrl, 1.666667, -1.0),
        (partial(pass_at_k, pass_k=1), 0.714286, -0.428571),
        # pass@2 of the other seven is 11/21 for a winner and 15/21 for a loser, of whom one in
        # three of seven wins
        (partial(pass_at_k, pass_k=2), 2 * (1 - 11 / 21), 2 * (3 / 7 - 15 / 21)),
        # 1.207612 and -0.724567 times exp(-(0.375 log 0.75 + 0.625 log 1.25))
        (mgpo, 1.170067, -0.702040),
        (partial(mgpo, sharpness=0.0), 1.207612, -0.724567),
    ],
)
def test_golden_group_advantages(advantage, won, lost):
    expected = [won if reward else lost for reward in Golden.rewards]
    assert advantage(Golden.rewards) == pytest.approx(expected, abs=1e-6)


def test_golden_grpo_with_the_population_deviation():
    """Some peers divide by the deviation of ddof=0; here it is ddof=1, and the two are √(G/(G-1))
    apart.
    """
    assert [math.sqrt(8 / 7) * value for value in grpo(Golden.rewards)[:2]] == pytest.approx(
        [1.290992, -0.774595], abs=1e-5
    )


def test_golden_opo():
    lengths = [10, 40, 30, 20, 20, 50, 60, 20]
    expected = [reward - 0.2 for reward in Golden.rewards]
    assert less_weighted_mean(Golden.rewards, lengths) == pytest.approx(expected, abs=1e-9)


def test_published_group_vectors(vectors):
    row = vectors["grpo_group_norm"]
    assert grpo(row["inputs"]["rewards"]) == pytest.approx(row["expected"]["advantages"], rel=1e-4)
    row = vectors["leave_one_out_baseline"]
    rewards, baseline = row["inputs"]["rewards"], row["expected"]["baseline"]
    for start in (0, 3):
        expected = [
            r - b
            for r, b in zip(rewards[start : start + 3], baseline[start : start + 3], strict=True)
        ]
        assert rloo(rewards[start : start + 3]) == pytest.approx(expected, rel=1e-5)


@settings(deadline=None)
@given(st.lists(st.floats(-10, 10), min_size=2, max_size=12))
def test_group_advantages_have_mean_zero_and_ignore_a_shift(rewards):
    for advantage in (grpo, dr_grpo, rloo, pass_at_k):
        values = advantage(rewards)
        assert math.fsum(values) == pytest.approx(0, abs=1e-6)
    for advantage in (dr_grpo, pass_at_k):
        assert advantage([reward + 3 for reward in rewards]) == pytest.approx(
            advantage(rewards), abs=1e-9
        )


@settings(deadline=None)
@given(st.lists(st.sampled_from([0.0, 0.3, 1.0, 2.0]), min_size=2, max_size=6), st.integers(1, 5))
def test_pass_at_k_is_what_counting_subsets_gives(rewards, k):
    found = pass_at_k(rewards, pass_k=k)
    if len(rewards) <= k:
        assert found == (0.0,) * len(rewards)
        return
    for own, reward in enumerate(rewards):
        others = rewards[:own] + rewards[own + 1 :]
        with_own = fmean(max((reward, *chosen)) for chosen in itertools.combinations(others, k - 1))
        without = fmean(max(chosen) for chosen in itertools.combinations(others, k))
        assert found[own] == pytest.approx(k * (with_own - without), abs=1e-12)


@pytest.mark.parametrize("advantage", FORMS)
@pytest.mark.parametrize("rewards", [[], [None], [None, 1.0], [0.1] * 3, [1e-300, 1e-300], [0.7]])
def test_no_signal_is_exactly_zero(advantage, rewards):
    assert advantage(rewards) == tuple(None if reward is None else 0.0 for reward in rewards)


@pytest.mark.parametrize("advantage", FORMS)
def test_a_missing_reward_enters_no_statistic(advantage):
    found = advantage([1.0, None, 0.0, 0.5, None])
    assert found[1] is found[4] is None
    assert [value for value in found if value is not None] == list(advantage([1.0, 0.0, 0.5]))


def test_almost_equal_rewards_do_not_explode():
    for advantage in (grpo, mgpo):
        assert advantage([0.1 + 0.2, 0.3, 0.3]) == pytest.approx([0, 0, 0], abs=1e-9)


def test_opo_of_a_missing_reward_leaves_out_its_length():
    assert less_weighted_mean([1.0, None, 0.0], [1, 100, 3]) == pytest.approx([0.75, None, -0.25])


def test_maxrl_refuses_negative_rewards():
    with pytest.raises(UserError, match=r"got a reward of -0\.5"):
        maxrl([1.0, -0.5])


def test_mgpo_weighs_even_odds_most():
    spread = [
        max(mgpo([1.0] * won + [0.0] * (8 - won))) / max(grpo([1.0] * won + [0.0] * (8 - won)))
        for won in (4, 6, 7)
    ]
    assert spread[0] == pytest.approx(1) and spread[0] > spread[1] > spread[2] > 0.5
    assert mgpo([5.0, 3.0]) == pytest.approx(
        [0.5 * value for value in grpo([5.0, 3.0])], abs=1e-6
    ), "held to p = 1"


def test_advantages_are_broadcast_over_the_trained_tokens_of_each_episode():
    batch = group_advantages(pack([group(1.0, None, 0.0), group(0.5, 0.5, task="u")], 0), dr_grpo)
    assert batch.advantages_BT[0][batch.mask_BT[0]].unique().tolist() == [0.5]
    assert batch.advantages_BT[1][batch.mask_BT[1]].unique().tolist() == [-0.5]
    assert (batch.advantages_BT[2:] == 0).all()
    assert (batch.advantages_BT[~batch.mask_BT] == 0).all()


def of_episodes(batch) -> list[float]:
    """The advantage of each episode, read off its first row."""
    values = torch.where(batch.mask_BT, batch.advantages_BT, -math.inf).amax(1)
    return [float(values[batch.episode_B == owner][0]) for owner in range(len(batch.reward_E))]


def test_process_rewards_count_for_the_episode():
    batch = pack([group(1.0, 0.0)], 0)
    rewards_BT = torch.zeros_like(batch.rewards_BT)
    rewards_BT[1, :] = 0.25
    batch = replace(batch, rewards_BT=rewards_BT)
    total = 0.25 * batch.mask_BT.shape[1]
    assert total_reward_E(batch).tolist() == [1.0, total]
    assert of_episodes(group_advantages(batch, rloo)) == pytest.approx([1 - total, total - 1])
    assert total_reward_E(replace(batch, rewards_BT=None)).tolist() == [1.0, 0.0]


def test_opo_reads_the_lengths_of_the_batch():
    first, second = (
        episode(branch(2, (1, 0)), reward=1.0),
        episode(branch(2, (3, 0)), reward=0.0, sample=1),
    )
    batch = opo(pack([Group((first, second))], 0))
    assert of_episodes(batch) == pytest.approx([0.75, -0.25])


def test_reinforce_compares_with_all_other_episodes_of_the_round():
    batch = pack([group(1.0), group(0.0, 0.5, task="u")], 0)
    assert of_episodes(reinforce(batch)) == pytest.approx([0.75, -0.75, 0.0])
    assert reinforce(batch).group_E.tolist() == [0, 1, 1]
    assert of_episodes(reinforce(pack([group(0.7)], 0))) == [0.0]
    assert of_episodes(reinforce(pack([group(0.7), group(0.7, task="u")], 0))) == [0.0, 0.0]


def test_remax_compares_with_the_greedy_episode_of_the_task():
    batch = with_greedy_rewards(
        pack([group(1.0, 1.0), group(0.5, task="u"), group(0.5, task="v")], 0), [0.25, 1.0, None]
    )
    assert of_episodes(remax(batch)) == pytest.approx([0.75, 0.75, -0.5, 0.0])
    with pytest.raises(ValueError, match="play every task once greedily"):
        remax(replace(batch, greedy_reward_E=None))
    with pytest.raises(ValueError, match="1 greedy rewards for 3 groups"):
        with_greedy_rewards(batch, [1.0])


def with_parts(**parts):
    batch = pack([group(1.0, 0.0), group(1.0, 0.0, 0.5, task="u")], 0)
    tensors = {name: torch.tensor(values, dtype=torch.float64) for name, values in parts.items()}
    return replace(batch, parts_E=tensors)


def test_gdpo_normalises_each_term_then_the_sum():
    batch = with_parts(right=[1, 0, 1, 1, 0], form=[0, 1, 5, 5, 5])
    one, two = grpo([1, 0]), grpo([1, 1, 0])
    sums = [one[0] - one[0], one[1] - one[1], *two]
    assert of_episodes(gdpo(batch)) == pytest.approx(grpo(sums), abs=1e-6)
    weighed = gdpo.changed(part_weights={"right": 2, "form": 0.5})
    sums = [1.5 * one[0], 1.5 * one[1], *(2 * value for value in two)]
    assert of_episodes(weighed(batch)) == pytest.approx(grpo(sums), abs=1e-6)
    only = partial(gdpo, part_weights={"right": 1.0})
    assert of_episodes(only(batch)) == pytest.approx(grpo([*one, *two]), abs=1e-6)


def test_gdpo_without_a_term_or_a_difference():
    batch = with_parts(right=[1, 0, math.nan, 1, 0])
    assert of_episodes(gdpo(batch))[2] == pytest.approx(
        grpo([*grpo([1, 0]), 0, *grpo([1, 0])])[2], abs=1e-6
    )
    assert of_episodes(gdpo(with_parts(right=[1, 1, 0, 0, 0]))) == [0.0] * 5
    assert of_episodes(gdpo(with_parts(right=[math.nan] * 5))) == [0.0] * 5


def test_gdpo_refuses_what_it_cannot_read():
    with pytest.raises(UserError, match="no score has any"):
        gdpo(with_parts())
    with pytest.raises(UserError, match="'right' of a score is infinite"):
        gdpo(with_parts(right=[1, 0, math.inf, 1, 0]))
    with pytest.raises(
        ConfigError, match="part_weights names 'wrong'; scores have the terms right"
    ):
        gdpo(with_parts(right=[1, 0, 1, 1, 0]), part_weights={"wrong": 1.0})
    for wrong in (2, {"right": -1}, {"right": "much"}):
        with pytest.raises(ConfigError) as caught:
            gdpo.changed(part_weights=wrong)
        assert caught.value.setting.startswith("loss.part_weights")


def test_options_are_by_keyword_and_checked():
    assert dict(pass_at_k.options) == {"pass_k": 2}
    assert dict(mgpo.changed(sharpness=2, eps=0).options) == {"sharpness": 2, "eps": 0}
    for value in (0, 1.5, True):
        with pytest.raises(ConfigError) as caught:
            pass_at_k.changed(pass_k=value)
        assert caught.value.setting == "loss.pass_k"


def test_a_batch_of_failures_only_has_nothing_to_weigh():
    empty = furnished(pack([group(None, None)], 0))
    for step in (reinforce, remax, gdpo, lambda batch: group_advantages(batch, grpo)):
        assert step(replace(empty, parts_E={})).advantages_BT.shape == (0, 0)

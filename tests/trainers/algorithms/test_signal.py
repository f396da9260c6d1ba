"""Signal: which groups have it, for every recipe, and what the filter makes of the others."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from recipe_cases import filled
from scripted_rounds import LOST, MIXED, WON, played
from trainer_cases import PAD, quick

from agentrl.errors import ConfigError, UserError
from agentrl.trainers.algorithms.recipes import RECIPES, recipe
from agentrl.trainers.batch import pack
from agentrl.trainers.observe.metrics import group_metrics, quiet_reason
from agentrl.trajectory import Group
from agentrl.types import EndReason, Score

EVERY = pytest.mark.parametrize("name", RECIPES)
BY_TURN = {"otb", "reinforce++", "turn_grpo", "turn_ppo", "gigpo", "ppo", "ppo_penalty", "vapo"}
"""Recipes that tell turns apart; the others add process rewards up."""
BESIDE_SIBLINGS = {
    *("reinforce", "reinforce++", "remax", "ppo", "ppo_penalty", "turn_ppo", "vapo", "distill"),
}
"""Recipes that a group of equal rewards still teaches something, if it is not left out."""


def earned(*scores):
    """A group of three episodes of two turns with these scores."""
    group = played(0, LOST)
    pairs = zip(group.episodes, scores, strict=True)
    return Group(tuple(replace(one, score=score) for one, score in pairs))


def steps(*rewards):
    return Score(1.0, {"correct": 1.0}, turns={"step": rewards})


TABLE = {
    "won and lost": (earned(Score(1.0, {"a": 1.0}), *[Score(0.0, {"a": 0.0})] * 2), lambda n: True),
    "all won": (played(0, WON), lambda n: False),
    "all lost": (played(0, LOST), lambda n: False),
    "one scored": (played(0, (1.0, None, None)), lambda n: False),
    "two scored": (played(0, (1.0, 0.0, None)), lambda n: n != "pass_at_k"),
    "shaped": (
        earned(Score(1.0), Score(0.95, unshaped=1.0), Score(1.0)),
        lambda n: n != "gdpo",
    ),
    "another sum": (
        earned(steps(0.5, 0.5), steps(0.5, 0.5), steps(0.5, 0.0)),
        lambda n: n != "gdpo",
    ),
    "another order": (
        earned(steps(0.5, 0.0), steps(0.0, 0.5), steps(0.5, 0.0)),
        lambda n: n in BY_TURN,
    ),
    "another name": (
        earned(*[Score(1.0, turns={"other": (float(i), 0.0)}) for i in range(3)]),
        lambda n: False,
    ),
    "another term": (
        earned(*[Score(1.0, {"a": float(i)}) for i in range(3)]),
        lambda n: n == "gdpo",
    ),
}


@EVERY
@pytest.mark.parametrize("case", TABLE)
def test_a_group_has_signal_where_rewards_that_train_differ(name, case):
    """One answer for play, filter and metrics."""
    group, expected = TABLE[case]
    row = recipe(name) if name == "gdpo" else replace(recipe(name), turn_weights={"step": 1.0})
    found = row.rewards.has_signal(group)
    assert found == expected(name)
    batch = pack([group], PAD, rewards=row.rewards)
    assert batch.signal_E.tolist() == [found] * len(batch.reward_E)
    assert (quiet_reason(group, row.rewards) is None) == found
    assert group_metrics([group], row.rewards)["groups/no_signal"] == 1 - found


def ready(row, groups):
    batch = pack(groups, PAD, rewards=row.rewards, version=0)
    return filled(batch, groups, row.needs)


@EVERY
def test_the_filter_gives_credit_as_if_quiet_groups_had_not_been_played(name):
    row = recipe(name, filter_groups=True)
    groups = [played(n, rewards) for n, rewards in enumerate((MIXED, WON, (0.0, 1.0, 1.0), LOST))]
    batch = row.advantage(ready(row, groups))
    alone = recipe(name).advantage(ready(row, groups[::2]))
    assert batch.group_E[batch.episode_B].unique().tolist() == [0, 2]
    assert (batch.n_episodes, batch.n_tokens) == (6, alone.n_tokens)
    assert torch.equal(batch.advantages_BT, alone.advantages_BT) and alone.advantages_BT.any()
    assert len(batch.reward_E) == 12 and batch.tokens_E[3:6].sum() == batch.tokens_E[9:].sum() == 0
    none = row.advantage(ready(row, groups[1::2]))
    assert (len(none), none.n_tokens, none.n_episodes) == (0, 0, 0)


@EVERY
def test_without_a_filter_a_round_trains_as_it_was_played(name):
    """A group of equal rewards moves only what compares with more than siblings, or centres over
    the round.
    """
    row = recipe(name, refill=False)
    batch = row.advantage(ready(row, [played(0, MIXED), played(1, WON)]))
    assert set(batch.episode_B.tolist()) == set(range(6))
    quiet_BT = batch.advantages_BT[batch.group_E[batch.episode_B] == 1]
    centred = {"whiten", "gdpo"} & {step.name for step in row.credit}
    assert bool(quiet_BT.any()) == (name in BESIDE_SIBLINGS or bool(centred))
    assert row.rewards.siblings == (name not in BESIDE_SIBLINGS)


outcomes = st.lists(st.sampled_from([0.0, 0.1, 0.3, 1.0, None]), min_size=1, max_size=5)


@pytest.mark.parametrize("name", sorted(RECIPES.keys() - BESIDE_SIBLINGS - {"pass_at_k"}))
def test_siblings_give_credit_exactly_where_there_is_signal(name):
    """`pass_at_k` gives none either where the best of k is certain."""
    row = recipe(name)
    bare = replace(row, credit=row.credit[:1])

    @quick
    @given(outcomes)
    def holds(rewards):
        group = played(0, rewards)
        batch = bare.advantage(ready(bare, [group]))
        if len(batch) and name != "gigpo":
            assert bool(batch.advantages_BT.any()) == row.rewards.has_signal(group)

    holds()


def test_kl_prices_are_no_signal():
    """Every token pays another price, so that no two rewards are equal once they are paid."""
    row = recipe("rloo", kl_reward_coef=0.1, filter_groups=True)
    assert len(row.advantage(ready(row, [played(0, WON)]))) == 0
    assert len(row.advantage(ready(row, [played(0, MIXED)]))) == 3


def test_clipped_rewards_are_those_that_train():
    group = played(0, (3.0, 2.0, -7.0))
    batch = pack([group], PAD, rewards=recipe("grpo", reward_clip=2.5).rewards)
    assert batch.reward_E.tolist() == [2.5, 2.0, -2.5]
    both = played(0, (3.0, 2.0))
    signal = {clip: recipe("grpo", reward_clip=clip).rewards.has_signal(both) for clip in (1, 2.5)}
    assert signal == {1: False, 2.5: True}
    for wrong in (0, -1, math.nan, "1"):
        with pytest.raises(ConfigError) as caught:
            recipe("grpo", reward_clip=wrong)
        assert caught.value.setting == "loss.reward_clip"
    with pytest.raises(ConfigError, match="reward_clip changes nothing in recipe gdpo"):
        recipe("gdpo", reward_clip=1.0)


def test_a_round_is_quiet_where_its_recipe_has_nothing_to_compare():
    flat = [played(0, WON), played(1, LOST)]
    assert not recipe("grpo").rewards.any_signal(flat)
    assert recipe("ppo").rewards.any_signal(flat), "the groups differ from each other"
    for name in ("grpo", "ppo", "remax"):
        assert not recipe(name).rewards.any_signal([played(0, LOST), played(1, LOST)])
        assert recipe(name).rewards.any_signal([played(0, MIXED)])


def test_a_filter_needs_a_decision():
    batch = replace(pack([played(0, MIXED)], PAD), signal_E=None)
    with pytest.raises(ValueError, match="signal_E is None"):
        recipe("grpo", filter_groups=True).advantage(batch)


def test_rewards_that_a_recipe_cannot_read_are_refused_by_the_first_episode():
    (good, bad) = played(0, (0.0, -0.25)).episodes
    failed = played(0, (None,)).episodes[0]
    rewards = recipe("maxrl").rewards
    rewards.refuse(good)
    rewards.refuse(failed)
    with pytest.raises(UserError, match=r"task 't0' gave a reward of -0.25.* at least 0 \(maxrl\)"):
        rewards.refuse(bad)
    recipe("grpo").rewards.refuse(bad)


def test_an_agents_fault_is_worth_what_the_recipe_can_read():
    """Below a threshold of 0 a fault scores -1, and no agent may end a run."""
    won, fault, lost = played(0, (0.5, -1.0, 0.0)).episodes
    group = Group((won, replace(fault, end=EndReason.AGENT_FAULT), lost))
    row = recipe("maxrl")
    for episode in group.episodes:
        row.rewards.refuse(episode)
    batch = ready(row, [group])
    assert batch.reward_E.tolist() == [0.5, 0.0, 0.0]
    assert len(row.advantage(batch)) == 3
    grpo = pack([group], PAD, rewards=recipe("grpo").rewards)
    assert grpo.reward_E.tolist() == [0.5, -1.0, 0.0]


@pytest.mark.parametrize(("name", "wanted"), [("grpo", True), ("ppo", False)])
def test_advantages_are_whitened_or_not_by_setting(name, wanted):
    row = recipe(name, whiten=wanted)
    assert ("whiten" in [step.name for step in row.credit]) == wanted
    groups = [played(0, MIXED), played(1, (0.5, 0.0, 0.25))]
    batch = row.advantage(ready(row, groups))
    values_N = batch.advantages_BT[batch.mask_BT]
    assert (abs(float(values_N.mean())) < 1e-6 and abs(float(values_N.std()) - 1) < 1e-4) == wanted
    assert recipe("reinforce++", whiten=True).credit == recipe("reinforce++").credit
    with pytest.raises(ConfigError, match="whiten='yes' must be true or false"):
        recipe(name, whiten="yes")


def test_a_success_with_a_penalty_is_imitated_and_a_failure_with_a_bonus_is_not():
    row = recipe("grpo", imitate_coef=0.5)
    scores = (Score(0.9, unshaped=1.0), Score(1.2, unshaped=0.4), Score(0.0))
    batch = ready(row, [earned(*scores)])
    assert batch.passed_E.tolist() == [True, False, False]
    (term,) = row.regularisers
    output = type("Said", (), {"logprobs_BT": torch.full_like(batch.old_logprobs_BT, -2.0)})
    values_BT = term(output, batch)
    assert values_BT.any(1).tolist() == [True, False, False]
    with pytest.raises(ValueError, match="passed_E is None"):
        term(output, replace(batch, passed_E=None))

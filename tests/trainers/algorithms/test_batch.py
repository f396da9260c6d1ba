"""From groups to rows: nothing is lost, moved or counted twice."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from trainer_cases import PAD, batch_of, branch, episode, group

from agentrl.errors import ConfigError, UserError
from agentrl.trainers.algorithms.recipe import apply_to_episodes, merge_recorded_episodes
from agentrl.trainers.algorithms.recipes import recipe
from agentrl.trainers.batch import pack
from agentrl.trainers.models.distributed import idle
from agentrl.trajectory import Group, Segment, Trajectory
from agentrl.types import EndReason, Message

SHAPES = st.lists(st.tuples(st.integers(1, 5), st.integers(0, 4)), min_size=1, max_size=4)


@settings(max_examples=40, deadline=None)
@given(st.lists(SHAPES, min_size=1, max_size=5))
def test_rows_are_the_trajectories_up_to_their_last_trained_token(shapes):
    branches = [branch(3, *turns) for turns in shapes]
    batch = pack([Group(tuple(episode(b, sample=i) for i, b in enumerate(branches)))], PAD)
    assert len(batch) == len(branches)
    assert batch.ids_BT.shape[1] == int(batch.lengths_B.max())
    for row, one in enumerate(branches):
        length = int(batch.lengths_B[row])
        assert batch.mask_BT[row, length - 1]
        assert batch.ids_BT[row, :length].tolist() == list(one.ids[:length])
        assert batch.mask_BT[row].tolist() == [bool(m) for m in one.mask[:length]] + [False] * (
            batch.ids_BT.shape[1] - length
        )
        assert batch.turn_BT[row, :length].tolist() == list(one.turn_of[:length])
        assert batch.old_logprobs_BT[row, :length].tolist() == pytest.approx(one.logprobs[:length])
        assert (batch.ids_BT[row, length:] == PAD).all()
        assert ((batch.version_BT[row] == 3) == batch.mask_BT[row]).all()
    assert batch.n_tokens == sum(b.trained for b in branches) == int(batch.tokens_E.sum())
    assert torch.isnan(batch.advantages_BT[batch.mask_BT]).all(), (
        "a forgotten advantage step must show"
    )


def test_a_fork_trains_its_shared_prefix_once():
    trunk = branch(2, (3, 2), (2, 0))
    fork = trunk.fork(3).extend(Segment.sampled((90, 91), (-0.5, -0.6), 3, "stop"))
    batch = pack([Group((episode(trunk, fork), episode(branch(2, (1, 0)), sample=1)))], PAD)
    assert batch.episode_B.tolist() == [0, 0, 1]
    assert batch.mask_BT[1].tolist() == [False] * 7 + [True, True]
    assert batch.tokens_E.tolist() == [7, 1]
    assert (batch.n_tokens, batch.n_episodes) == (8, 2)


def test_a_branch_without_own_tokens_has_no_row():
    trunk = branch(2, (3, 0))
    batch = pack([Group((episode(trunk, trunk.fork()),))], PAD)
    assert len(batch) == 1


def test_failed_episodes_are_counted_and_nothing_else():
    batch = pack([group(1.0, None, 0.0), group(None, task="u")], PAD)
    assert batch.n_failed == 2
    assert batch.reward_E.tolist() == [1.0, 0.0]
    assert batch.group_E.tolist() == [0, 0]
    assert batch.n_episodes == len(batch) == 2


def test_an_episode_that_sampled_nothing_keeps_its_reward():
    silent = episode(
        Trajectory((Segment.prompt((1, 2)),)), reward=0.0, end=EndReason.CONTEXT_LENGTH
    )
    never_asked = episode(reward=0.0, end=EndReason.WALL_TIME, sample=1)
    batch = pack([Group((silent, never_asked, episode(branch(1, (2, 0)), sample=2)))], PAD)
    assert batch.reward_E.tolist() == [0.0, 0.0, 1.0]
    assert batch.episode_B.tolist() == [2]
    assert (batch.n_episodes, batch.n_tokens) == (1, 2)


def test_nothing_to_train_on_is_an_empty_batch():
    batch = pack([group(None, None)], PAD)
    assert (len(batch), batch.n_tokens, batch.n_episodes, batch.n_failed) == (0, 0, 0, 2)
    assert list(batch.split(100)) == [] == list(batch.minibatches(2, seed=0))


def test_policies_without_tokens_are_refused_by_name():
    spoken = episode(messages=(Message.user("hi"), Message.assistant("4")), sample=7)
    with pytest.raises(UserError, match=r"run/0/t/7/0/train/0 of toy-v0.*TokenPolicy"):
        pack([Group((spoken,))], PAD)


def test_a_first_token_needs_something_to_follow():
    alone = Trajectory((Segment.prompt(()), Segment.sampled((5,), (-1.0,), 0, "stop")))
    with pytest.raises(UserError, match="at least one token"):
        pack([Group((episode(alone),))], PAD)


@settings(max_examples=40, deadline=None)
@given(st.lists(SHAPES, min_size=1, max_size=8), st.integers(1, 60))
def test_split_covers_every_row_once_within_the_budget(shapes, micro_tokens):
    group_ = Group(
        tuple(
            episode(branch(2, *turns, first_id=100 * i), sample=i) for i, turns in enumerate(shapes)
        )
    )
    batch = batch_of(group_)
    parts = list(batch.split(micro_tokens))
    assert sorted(e for part in parts for e in part.episode_B.tolist()) == list(range(len(shapes)))
    for part in parts:
        assert part.ids_BT.numel() <= micro_tokens or len(part) == 1
        assert part.ids_BT.shape[1] == int(part.lengths_B.max())
        assert (part.n_tokens, part.n_episodes) == (batch.n_tokens, batch.n_episodes)
        assert part.tokens_E is batch.tokens_E
        for row, source in enumerate(part.episode_B.tolist()):
            length = int(part.lengths_B[row])
            for name in (
                "ids_BT",
                "mask_BT",
                "old_logprobs_BT",
                "advantages_BT",
                "turn_BT",
                "version_BT",
            ):
                assert torch.equal(
                    getattr(part, name)[row, :length], getattr(batch, name)[source, :length]
                )


@settings(max_examples=20, deadline=None)
@given(st.integers(1, 9), st.integers(0, 99))
def test_minibatches_keep_episodes_whole_and_fix_their_own_denominators(count, seed):
    trunk = branch(2, (3, 2), (2, 0))
    fork = trunk.fork(3).extend(Segment.sampled((90, 91), (-0.5, -0.6), 3, "stop"))
    batch = batch_of(Group((episode(trunk, fork),)), group(1.0, 0.0, 0.5, task="u"))
    parts = list(batch.minibatches(count, seed))
    assert len(parts) == min(count, 4)
    assert sum(part.n_tokens for part in parts) == batch.n_tokens
    assert sum(part.n_episodes for part in parts) == batch.n_episodes == 4
    assert sorted(e for part in parts for e in part.episode_B.tolist()) == batch.episode_B.tolist()
    for part in parts:
        assert int(part.mask_BT.sum()) == part.n_tokens
        assert len(set(part.episode_B.tolist())) == part.n_episodes
    again = list(batch.minibatches(count, seed))
    assert all(torch.equal(a.ids_BT, b.ids_BT) for a, b in zip(parts, again, strict=True))


def test_informative_drops_rows_without_advantage_and_no_denominator():
    batch = batch_of(group(1.0, 0.0, 0.5))
    batch.advantages_BT[1] = 0.0
    kept = batch.informative()
    assert kept.episode_B.tolist() == [0, 2]
    assert (kept.n_tokens, kept.n_episodes) == (batch.n_tokens, batch.n_episodes)


def test_to_moves_every_tensor():
    moved = batch_of(group(1.0, 0.0)).to("meta")
    assert {
        value.device.type for value in vars(moved).values() if isinstance(value, torch.Tensor)
    } == {"meta"}


def test_further_tensors_move_as_the_suffix_of_their_name_says():
    """Wherever rows or episodes go, each row still finds its own numbers."""
    batch = batch_of(group(1.0, 0.0, 1.0), group(0.0, 0.0, task="u"), group(0.0, 1.0, task="v"))
    ids_BT, owner_B = batch.ids_BT, batch.episode_B
    extra = {
        "twice_BT": 2.0 * ids_BT,
        "pair_BTK": torch.stack((ids_BT, ids_BT + 1), -1).float(),
        "first_B": ids_BT[:, 0],
        "number_E": torch.arange(len(batch.reward_E)),
    }
    batch = replace(batch.with_tensors(extra), advantages_BT=batch.mask_BT.float())

    def check(part, whole_E):
        assert part.extra.keys() == extra.keys()
        assert torch.equal(part.extra["twice_BT"], 2.0 * part.ids_BT)
        assert torch.equal(part.extra["pair_BTK"][..., 1], part.ids_BT + 1.0)
        assert torch.equal(part.extra["first_B"], part.ids_BT[:, 0])
        assert torch.equal(part.extra["number_E"][part.episode_B], whole_E[part.episode_B])

    number_E = extra["number_E"]
    for part in (*batch.split(16), *batch.minibatches(2, 0), batch.informative(), batch.to("cpu")):
        check(part, number_E)
    assert batch.to("meta").extra["twice_BT"].is_meta
    assert not batch.silent().extra["pair_BTK"][~batch.mask_BT].any()
    assert batch.silent().extra["pair_BTK"][batch.mask_BT].all()
    seen = []
    stays_E = torch.tensor([True, False, True, False, False, True, True])
    some = apply_to_episodes(batch, stays_E, lambda part: seen.append(part) or part)
    check(seen[0], number_E[stays_E])
    check(some, number_E)
    assert torch.equal(seen[0].extra["number_E"][seen[0].episode_B], owner_B[stays_E[owner_B]])
    recorded_E = ~stays_E
    check(merge_recorded_episodes(some, batch, recorded_E), number_E)
    assert idle(batch).extra["twice_BT"].shape == (1, 2)


def test_bad_sizes_are_named():
    batch = batch_of(group(1.0, 0.0))
    with pytest.raises(ConfigError, match="micro_tokens=0"):
        list(batch.split(0))
    with pytest.raises(ConfigError, match="minibatches=0"):
        list(batch.minibatches(0, seed=0))


@settings(max_examples=30, deadline=None)
@given(
    st.lists(st.lists(st.sampled_from([0.0, 1.0]), min_size=2, max_size=4), min_size=1, max_size=5)
)
def test_filtered_groups_leave_rows_denominators_and_episodes_of_those_with_signal(rewards):
    groups = [group(*part, task=f"t{index}") for index, part in enumerate(rewards)]
    full = recipe("grpo").advantage(pack(groups, PAD))
    part = recipe("grpo", filter_groups=True).advantage(pack(groups, PAD))
    signal = [len(set(each)) > 1 for each in rewards]
    stays_E = torch.tensor(
        [keeps for keeps, each in zip(signal, rewards, strict=True) for _ in each]
    )
    assert len(part) == part.n_episodes == int(stays_E.sum()) and part.n_tokens == int(
        full.tokens_E[stays_E].sum()
    )
    width = part.ids_BT.shape[1]
    assert torch.equal(part.advantages_BT, full.advantages_BT[stays_E][:, :width])
    assert torch.equal(part.reward_E, full.reward_E), (
        "metrics and group statistics still see all episodes"
    )
    minis = list(part.minibatches(3, seed=1))
    assert len(minis) == min(part.n_episodes, math.ceil(3 * part.n_episodes / len(full.reward_E)))
    assert sum(mini.n_episodes for mini in minis) == part.n_episodes and sum(
        map(len, minis)
    ) == len(part)


def test_a_round_that_was_refilled_takes_as_many_steps_as_one_that_had_signal_everywhere():
    own = [
        group(1.0, 0.0),
        group(0.0, 0.0, task="u"),
        group(1.0, 1.0, task="v"),
        group(0.0, 1.0, task="w"),
    ]
    more = [group(1.0, 0.0, task="x"), group(1.0, 0.0, task="y")]
    row = recipe("dapo")
    full, half = (
        row.advantage(replace(pack([*own, *some], PAD), n_refilled=2 * len(some)))
        for some in (more, [])
    )
    assert [mini.n_episodes for mini in full.minibatches(4, seed=0)] == [2] * 4
    assert [mini.n_episodes for mini in half.minibatches(4, seed=0)] == [2] * 2
    unfiltered = recipe("dr_grpo").advantage(replace(pack([*own, *more], PAD), n_refilled=4))
    assert len(list(unfiltered.minibatches(4, seed=0))) == 4, "never more than was asked for"


def test_batch_keeps_its_version():
    batch = replace(pack([group(1.0, 0.0, 0.5)], PAD), version=4)
    assert [part.version for part in batch.split(10)] == [4] * len(list(batch.split(10)))
    assert next(iter(batch.minibatches(2, 0))).version == 4

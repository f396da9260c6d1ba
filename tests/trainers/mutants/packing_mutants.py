"""Wrong ways to pack episodes, to give advantages to groups, and to average over episodes."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from loss_scene import by_five
from mutants import mean_over_rows
from trainer_cases import PAD, TwoSteps, batch_of, branch, episode, group, quick

from agentrl.trainers.algorithms.advantages import dr_grpo, group_advantages, grpo, rloo
from agentrl.trainers.algorithms.losses import by_constant, by_episode, by_token, keep, ppo_clip
from agentrl.trainers.batch import PolicyOutput, TokenBatch, pack
from agentrl.trajectory import Group, Segment, Trajectory
from agentrl.types import EndReason

# --- 1 and 11: what was sampled is what trains

STOP = 9
SPLIT = (21, 22)  # "he" + "llo", which a tokenizer would never write
WHOLE = 23  # "hello", which it would


def check_ids_survive(pack_fn):
    """Bug 1. A non-canonical split stays as it was sampled; ids, mask, log-probs stay aligned."""
    said = Trajectory(
        (
            Segment.prompt((5, 6)),
            Segment.sampled((*SPLIT, STOP), (-0.1, -0.2, -0.3), 0, "stop"),
            Segment.observation((7, 8)),
            Segment.sampled((*SPLIT, *SPLIT), (-0.4, -0.5, -0.6, -0.7), 0, "stop"),
        )
    )
    batch = pack_fn([Group((episode(said),))], PAD)
    assert batch.ids_BT[0].tolist() == list(said.ids)
    assert batch.mask_BT[0].tolist() == [bool(m) for m in said.mask]
    assert batch.old_logprobs_BT[0].tolist() == pytest.approx(said.logprobs)


def check_stop_token_trains(pack_fn):
    """Bug 11. The sampled stop token has mask 1 although padding is the same id."""
    short, long = branch(2, (1, 0), first_id=30), branch(2, (6, 0), first_id=40)
    stopped = short.extend(Segment.sampled((STOP,), (-0.2,), 0, "stop"))
    batch = pack_fn([Group((episode(stopped), episode(long, sample=1)))], STOP)
    assert batch.ids_BT[0, 3] == STOP
    assert batch.mask_BT[0].tolist() == [False, False, True, True] + [False] * 4


def check_truncation_is_an_ending(pack_fn):
    """Bug 11. Whether an episode was truncated is read off its ending, never off a width."""
    ends = (EndReason.SUBMITTED, EndReason.MAX_TURNS, EndReason.ANSWERED)
    episodes = [episode(branch(2, (3 - i, 0)), sample=i, end=end) for i, end in enumerate(ends)]
    assert pack_fn([Group(tuple(episodes))], PAD).truncated_E.tolist() == [False, True, False]


def pack_retokenised(groups, pad_id):
    def canonical(segment):
        if segment.ids[:2] != SPLIT or not segment.logprobs:
            return segment
        return Segment.sampled(
            (WHOLE, *segment.ids[2:]), segment.logprobs[1:], segment.version, segment.finish
        )

    def again(one):
        branches = tuple(
            replace(b, segments=tuple(map(canonical, b.segments))) for b in one.trajectories
        )
        return replace(one, trajectories=branches)

    return pack([Group(tuple(again(one) for one in g.episodes)) for g in groups], pad_id)


def pack_old_logprobs_shifted(groups, pad_id):
    batch = pack(groups, pad_id)
    return replace(batch, old_logprobs_BT=batch.old_logprobs_BT.roll(-1, 1))


def pack_mask_by_value(groups, pad_id):
    batch = pack(groups, pad_id)
    return replace(batch, mask_BT=batch.mask_BT & (batch.ids_BT != pad_id))


def pack_truncation_by_width(groups, pad_id):
    batch = pack(groups, pad_id)
    return replace(batch, truncated_E=batch.lengths_B == batch.ids_BT.shape[1])


# --- 12: a failure is no number


def check_failures_leave_no_trace(pack_fn):
    """Bug 12. A failed episode changes nothing but the count of failures."""
    with_failure, without = group(1.0, None, 0.0, 1.0), group(1.0, 0.0, 0.0, 1.0)
    without = Group(tuple(without.episodes[i] for i in (0, 2, 3)))
    found = group_advantages(pack_fn([with_failure], PAD), grpo)
    expected = group_advantages(pack([without], PAD), grpo)
    assert found.reward_E.tolist() == expected.reward_E.tolist()
    assert torch.equal(found.advantages_BT, expected.advantages_BT)
    assert (found.n_failed, found.n_tokens, found.n_episodes) == (
        1,
        expected.n_tokens,
        expected.n_episodes,
    )


def check_none_is_no_reward(advantage):
    """Bug 12. A reward of None enters no statistic, and its advantage is None."""

    @quick
    @given(st.lists(st.one_of(st.none(), st.sampled_from([0.0, 0.25, 1.0, -2.0])), max_size=8))
    def scored_ones_do_not_notice(rewards):
        found = advantage(rewards)
        assert [value is None for value in found] == [reward is None for reward in rewards]
        expected = advantage([reward for reward in rewards if reward is not None])
        assert tuple(value for value in found if value is not None) == expected

    scored_ones_do_not_notice()


def check_no_signal_no_advantage(advantage):
    """A group of one, or of equal rewards, says nothing about which action was better."""
    for rewards in ([1.0], [0.7], [0.1] * 3, [0.1] * 10, [0.3] * 7):
        assert advantage(rewards) == (0.0,) * len(rewards)


def pack_failures_as_zero(groups, pad_id):
    def scored(one):
        return (
            one
            if one.reward is not None
            else episode(*one.trajectories, reward=0.0, sample=one.key.sample)
        )

    return pack([Group(tuple(scored(one) for one in g.episodes)) for g in groups], pad_id)


def grpo_none_is_zero(rewards):
    return grpo([0.0 if reward is None else reward for reward in rewards])


def grpo_none_gets_zero_advantage(rewards):
    return tuple(0.0 if value is None else value for value in grpo(rewards))


def grpo_single_gets_raw_reward(rewards):
    return tuple(rewards) if len(rewards) == 1 else grpo(rewards)


def grpo_divides_rounding_errors(rewards):
    mean = sum(rewards) / len(rewards)
    std = math.sqrt(sum((reward - mean) ** 2 for reward in rewards) / max(1, len(rewards) - 1))
    return tuple((reward - mean) / (std + 1e-20) for reward in rewards)


# --- unbiased: exact enumeration


def check_gradient_is_unbiased(advantage):
    """Over every pair of 25 trajectories, the expected estimate is the exact gradient."""
    policy = TwoSteps(seed=3)
    batch, logprobs_BT, probability_B = policy.groups(2)
    batch = group_advantages(batch, advantage)
    per_token_BT = ppo_clip(PolicyOutput(logprobs_BT), batch, clip_low=math.inf, clip_high=math.inf)
    expected = (keep(per_token_BT, batch.mask_BT).sum(1) / 2 * probability_B).sum()
    found = -torch.autograd.grad(expected, policy.theta)[0]
    assert (found - policy.exact_gradient()).abs().max() < 1e-8


def baseline_is_the_best_of_the_group(rewards):
    return tuple(reward - max(rewards) for reward in rewards)


# --- 4: an episode is an episode, in however many rows


def _one_and_two_rows():
    """An episode with one branch, and the same one cut into a branch and a fork of it."""
    turns = ((3, 2), (4, 1), (2, 0))
    whole = branch(2, *turns)
    first = Trajectory(whole.segments[:3])
    fork = first.fork().extend(*whole.segments[3:])
    others = [
        episode(branch(2, (2 + i, 0)), reward=r, sample=1 + i) for i, r in enumerate((0.0, 1.0))
    ]
    return Group((episode(whole), *others)), Group((episode(first, fork), *others))


def check_statistics_are_per_episode(broadcast):
    """Bug 4. Splitting one episode into two rows changes no advantage of any token."""
    one, two = (broadcast(pack([g], PAD), dr_grpo) for g in _one_and_two_rows())
    assert len(two) == len(one) + 1
    for batch in (one, two):
        for row, owner in enumerate(batch.episode_B.tolist()):
            found = batch.advantages_BT[row][batch.mask_BT[row]]
            assert found.tolist() == pytest.approx([(1 / 3, -2 / 3, 1 / 3)[owner]] * len(found))


def check_episodes_weigh_the_same_in_two_rows(aggregate):
    """Bug 4. Splitting one episode into two rows changes no loss."""
    losses = []
    for g in _one_and_two_rows():
        batch = batch_of(g)
        per_token_BT = batch.ids_BT.double().sin()
        losses.append(float(aggregate(per_token_BT, batch)))
    assert losses[0] == pytest.approx(losses[1], abs=1e-12)


def statistics_per_row(batch, advantage):
    values = torch.tensor(advantage(batch.reward_E[batch.episode_B].tolist()))
    return replace(batch, advantages_BT=torch.where(batch.mask_BT, values[:, None], 0.0))


def mean_of_row_means_over_episodes(per_token_BT, batch):
    return (
        keep(per_token_BT, batch.mask_BT).sum(1) / batch.mask_BT.sum(1)
    ).sum() / batch.n_episodes


# --- 5 and 6: denominators


def check_denominator_counts_what_the_numerator_sums(aggregate):
    """Bug 5. A constant of 1 at every trained token has mean 1, whatever tools said."""
    for observed in (0, 5):
        batch = batch_of(Group((episode(branch(2, (3, observed), (2, 0))),)))
        assert float(aggregate(torch.ones(batch.mask_BT.shape), batch)) == pytest.approx(1.0)


def mean_over_all_tokens(per_token_BT, batch):
    return keep(per_token_BT, batch.mask_BT).sum() / batch.attention_BT.sum()


def check_split_keeps_denominators(split):
    """Bug 6. The micro-batches that a batch is cut into know the denominators of the whole."""
    batch = batch_of(group(1.0, 0.0, 0.5, 1.0))
    parts = list(split(batch, 24))
    assert len(parts) > 1
    assert sum(float(by_token(torch.ones(p.mask_BT.shape), p)) for p in parts) == pytest.approx(1.0)
    assert sum(float(by_episode(torch.ones(p.mask_BT.shape), p)) for p in parts) == pytest.approx(
        1.0
    )


def split_counts_for_itself(batch, micro_tokens):
    for part in batch.split(micro_tokens):
        yield replace(part, n_tokens=int(part.mask_BT.sum()), n_episodes=len(part))


# --- the table

CASES = [
    (check_ids_survive, [pack], [pack_retokenised, pack_old_logprobs_shifted]),
    (check_stop_token_trains, [pack], [pack_mask_by_value]),
    (check_truncation_is_an_ending, [pack], [pack_truncation_by_width]),
    (check_failures_leave_no_trace, [pack], [pack_failures_as_zero]),
    (
        check_none_is_no_reward,
        [grpo, dr_grpo, rloo],
        [grpo_none_is_zero, grpo_none_gets_zero_advantage],
    ),
    (
        check_no_signal_no_advantage,
        [grpo, dr_grpo, rloo],
        [grpo_single_gets_raw_reward, grpo_divides_rounding_errors],
    ),
    (check_gradient_is_unbiased, [rloo], [grpo, dr_grpo, baseline_is_the_best_of_the_group]),
    (check_statistics_are_per_episode, [group_advantages], [statistics_per_row]),
    (
        check_episodes_weigh_the_same_in_two_rows,
        [by_token, by_episode, by_constant],
        [mean_over_rows, mean_of_row_means_over_episodes],
    ),
    (
        check_denominator_counts_what_the_numerator_sums,
        [by_token, by_episode, by_five],
        [mean_over_all_tokens],
    ),
    (check_split_keeps_denominators, [TokenBatch.split], [split_counts_for_itself]),
]

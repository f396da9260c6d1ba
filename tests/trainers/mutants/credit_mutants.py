"""Wrong steps of credit."""

from __future__ import annotations

import math
from dataclasses import replace
from functools import partial

import pytest
import torch
from credit_cases import (
    STEPS,
    Stopper,
    chain,
    check_a_late_reward_is_not_lost,
    check_an_episode_in_two_rows_is_one_episode,
    check_masked_tokens_change_nothing,
    check_the_order_of_groups_does_not_matter,
    one_row,
    over_groups,
    packed,
    per_episode,
)
from mutants import (
    by_row,
    outcome_at_the_end_of_the_row,
    through_observations,
    whiten_over_all_positions,
    without_late_rewards,
)

from agentrl.trainers.algorithms.advantages import (
    dr_grpo,
    group_advantages,
    grpo,
    in_buckets,
    maxrl,
    pass_at_k,
    remax,
    rloo,
)
from agentrl.trainers.algorithms.credit import (
    entropy_shaped,
    gae,
    gigpo,
    kl_in_reward,
    length_adaptive_gae,
    optimal_baseline,
    reward_to_go,
    turn_gae,
    turn_level,
    whiten,
)
from agentrl.trainers.algorithms.timeline import Timeline

# --- 2 to 4: one line of time


def check_the_outcome_arrives(step):
    """Bug 3. Undiscounted, the first token's return is all that the episode earned."""
    batch = one_row([0.0, 0.5, 0.25, 0.0], [0.0] * 4, [1, 1, 0, 0], outcome=1.0)
    assert step(batch).advantages_BT[0].tolist() == pytest.approx([1.75, 1.75, 0, 0])


# --- unbiased: exact enumeration


def expected_gradient(policy, step, size):
    batch, logprobs_BT, probability_B = policy.groups(size)
    best = float(policy.rewards_K[int(policy.logprobs_K2().sum(1).argmax())])
    first_B = batch.state_BT[:, 3].double()
    values_BT = torch.stack([first_B, 0 * first_B + 0.3, first_B, first_B / 5], 1)
    batch = replace(
        batch,
        greedy_reward_E=torch.full_like(batch.reward_E, best),
        values_BT=values_BT,
        ref_logprobs_BT=torch.full_like(logprobs_BT, -math.log(5)).detach(),
    )
    weighed_BT = torch.where(batch.mask_BT, step(batch).advantages_BT * logprobs_BT, 0.0)
    return torch.autograd.grad((weighed_BT.sum(1) / size * probability_B).sum(), policy.theta)[0]


def check_step_is_unbiased(step):
    """Over every group of 3 short episodes, the expected estimate is the exact gradient."""
    policy = Stopper(seed=3, narrow=True)
    assert (expected_gradient(policy, step, 3) - policy.exact_gradient()).abs().max() < 1e-8


def check_pass_at_2(form):
    """With rewards of 0 and 1, the expected gradient is 2(1-p)·∇p."""
    policy = Stopper(seed=4, binary=True, narrow=True)
    p = float((policy.logprobs_K2().detach().sum(1).exp() * policy.rewards_K).sum())
    exact = 2 * (1 - p) * policy.exact_gradient()
    assert (expected_gradient(policy, over_groups(form), 3) - exact).abs().max() < 1e-8


def check_likelihood(form):
    """With rewards of 0 and 1, the expected gradient is that of log p, cut after two terms."""
    policy = Stopper(seed=4, binary=True, narrow=True)
    p = float((policy.logprobs_K2().detach().sum(1).exp() * policy.rewards_K).sum())
    exact = (1 + (1 - p)) * policy.exact_gradient()
    assert (expected_gradient(policy, over_groups(form), 3) - exact).abs().max() < 1e-8


def check_kl_is_taken_off(step):
    """The expected gradient is that of E[R] - 0.2·KL of whole episodes."""
    policy = Stopper(seed=3, narrow=True)
    logprobs_K2 = policy.logprobs_K2()
    two_K = policy.actions_K2[:, 0] != policy.stop
    kl_K = (
        logprobs_K2[:, 0] + math.log(5) + torch.where(two_K, logprobs_K2[:, 1] + math.log(5), 0.0)
    )
    objective = (logprobs_K2.sum(1).exp() * (policy.rewards_K - 0.2 * kl_K)).sum()
    exact = torch.autograd.grad(objective, policy.theta)[0]
    found = expected_gradient(
        policy, lambda batch: reward_to_go(step(batch, kl_reward_coef=0.2)), 1
    )
    assert (found - exact).abs().max() < 1e-8


def optimal_baseline_with_itself(batch):
    """The paper's own: everyone is in the baseline."""
    squares_BT = torch.where(batch.mask_BT, torch.expm1(batch.old_logprobs_BT).square(), 0.0)
    energy_BT, found_BT = squares_BT.cumsum(1), torch.zeros_like(squares_BT)
    for rows in torch.arange(len(batch)).split(3):
        weights, rewards = energy_BT[rows] + 1e-30, batch.reward_E[rows, None]
        found_BT[rows] = rewards - (weights * rewards).sum(0) / weights.sum(0)
    return replace(batch, advantages_BT=torch.where(batch.mask_BT, found_BT, 0.0))


def remax_against_the_best_sibling(batch):
    return group_advantages(
        batch, lambda rewards: tuple(reward - max(rewards) for reward in rewards)
    )


def pass_at_k_for_the_best_only(rewards):
    first, second = sorted(rewards)[-1], sorted(rewards)[-2]
    return tuple(2 * (first - second) if reward == first else 0.0 for reward in rewards)


def pass_at_k_with_its_own_subsets_in_the_baseline(rewards):
    won = sum(rewards)
    whole = 1 - math.comb(round(3 - won), 2) / 3
    return tuple(2 * ((1.0 if reward else won / 2) - whole) for reward in rewards)


def maxrl_by_deviation(rewards):
    return grpo(rewards)


def maxrl_without_centring(rewards):
    return tuple(reward / (sum(rewards) / 3) if sum(rewards) else 0.0 for reward in rewards)


def kl_added(batch, *, kl_reward_coef):
    swapped = replace(
        batch, old_logprobs_BT=batch.ref_logprobs_BT, ref_logprobs_BT=batch.old_logprobs_BT
    )
    paid = kl_in_reward(swapped, kl_reward_coef=kl_reward_coef)
    return replace(batch, rewards_BT=paid.rewards_BT)


def kl_at_the_token_alone(batch, *, kl_reward_coef):
    """The KL of the second token is not charged to the first."""
    paid = kl_in_reward(batch, kl_reward_coef=kl_reward_coef)
    rewards_BT = paid.rewards_BT.clone()
    rewards_BT[:, 3] = 0
    return replace(paid, rewards_BT=rewards_BT)


# --- siblings and signs


def baseline_of_the_first_task(batch):
    mean = float(batch.reward_E[batch.group_E == batch.group_E[0]].mean())
    return group_advantages(batch, lambda rewards: tuple(reward - mean for reward in rewards))


def check_other_tasks_change_nothing(step):
    """A group's advantages are its own business, whatever another group earned."""
    group, rich = (
        [(((1, 1), (2, 1)), 1.0), (((1, 1), (2, 1)), 0.0)],
        [(((1, 1), (2, 1)), 9.0), (((2, 1),), 7.0)],
    )
    alone, together = packed([group]), packed([group, rich])
    found = per_episode(together, step(together).advantages_BT)[:2]
    for one, two in zip(found, per_episode(alone, step(alone).advantages_BT), strict=True):
        assert one == pytest.approx(two, abs=1e-9)


def check_long_turns_count_once(step):
    """A turn's statistics are over turns: how many tokens a sibling's took changes nothing."""
    results = []
    for length in (1, 4):
        batch = packed([[(((1, 1),), 1.0), (((length, 1),), 0.0), (((1, 1),), 0.5)]])
        batch = step(replace(batch, rewards_BT=None))
        results.append([tokens[0] for tokens in per_episode(batch, batch.advantages_BT)])
    assert results[0] == pytest.approx(results[1], abs=1e-9)


def turn_level_over_the_round(batch):
    line = Timeline.of(batch)
    found_K = in_buckets(grpo, line.position_K.tolist(), line.rewards_K.tolist())
    return replace(batch, advantages_BT=line.write(found_K[line.turn_N]))


def turn_level_over_tokens(batch):
    line = Timeline.of(batch)
    keys = batch.group_E[line.episode_N].tolist()
    return replace(
        batch,
        advantages_BT=line.write(in_buckets(grpo, keys, line.rewards_K[line.turn_N].tolist())),
    )


def gigpo_across_tasks(batch):
    return gigpo(replace(batch, group_E=torch.zeros_like(batch.group_E)))


def check_no_sign_turns(step):
    """However uncertain the policy is, what was bad stays bad and what was neither stays so."""
    signs = torch.tensor([[1.0, -1.0, 0.0, -0.01]]).double()
    batch = replace(
        one_row([0.0] * 4), advantages_BT=signs, entropy_BT=torch.full((1, 4), 9.0).double()
    )
    assert torch.equal(step(batch).advantages_BT.sign(), signs.sign())


def entropy_without_a_cap(batch):
    return replace(batch, advantages_BT=batch.advantages_BT + 0.4 * batch.entropy_BT)


def check_short_episodes_have_lambda_zero(step):
    """1 - 1/(αl) is below 0 for short episodes; λ is not."""
    batch = one_row([0.0, 0.0], [0.25, 0.5], outcome=1.0)
    assert step(batch).advantages_BT[0].tolist() == pytest.approx([0.25, 0.5])


def length_adaptive_unclamped(batch):
    return replace(batch, advantages_BT=torch.tensor([[0.25 + (1 - 1 / 0.1) * 0.5, 0.5]]).double())


# --- the table

discounted = partial(reward_to_go, gamma=0.9)
TIMED = {"gae": partial(gae, gamma=0.9, lam=0.8), "reward_to_go": discounted}
CASES = [
    (
        check_masked_tokens_change_nothing,
        [*TIMED.values(), STEPS["reinforce_plus_plus"]],
        [
            *map(through_observations, TIMED.values()),
            chain(reward_to_go, whiten_over_all_positions),
        ],
    ),
    (
        check_a_late_reward_is_not_lost,
        [*TIMED.values(), turn_gae, turn_level, gigpo, optimal_baseline],
        [
            without_late_rewards(step)
            for step in (
                *TIMED.values(),
                turn_gae,
                turn_level,
                gigpo,
                optimal_baseline,
                STEPS["grpo"],
            )
        ],
    ),
    (
        check_an_episode_in_two_rows_is_one_episode,
        [STEPS[name] for name in ("grpo", "opo", "rloo", "gae", "turn_gae", "turn_level", "gigpo")],
        [
            by_row(STEPS[name])
            for name in ("grpo", "opo", "rloo", "gae", "turn_gae", "turn_level", "gigpo")
        ],
    ),
    (
        check_the_outcome_arrives,
        [reward_to_go, partial(gae, lam=1.0)],
        [outcome_at_the_end_of_the_row, without_late_rewards(reward_to_go)],
    ),
    (
        check_step_is_unbiased,
        [
            optimal_baseline,
            remax,
            partial(gae, lam=1.0),
            partial(turn_gae, lam=1.0),
            over_groups(rloo),
        ],
        [
            optimal_baseline_with_itself,
            remax_against_the_best_sibling,
            gae,
            over_groups(dr_grpo),
            over_groups(grpo),
            lambda batch: whiten(reward_to_go(batch)),
        ],
    ),
    (
        check_pass_at_2,
        [pass_at_k],
        [pass_at_k_for_the_best_only, pass_at_k_with_its_own_subsets_in_the_baseline, rloo],
    ),
    (check_likelihood, [maxrl], [maxrl_by_deviation, maxrl_without_centring]),
    (check_kl_is_taken_off, [kl_in_reward], [kl_added, kl_at_the_token_alone]),
    (
        check_other_tasks_change_nothing,
        [turn_level, gigpo],
        [turn_level_over_the_round, gigpo_across_tasks],
    ),
    (
        check_the_order_of_groups_does_not_matter,
        [STEPS["grpo"], STEPS["reinforce"]],
        [baseline_of_the_first_task],
    ),
    (check_long_turns_count_once, [turn_level, gigpo], [turn_level_over_tokens]),
    (check_no_sign_turns, [entropy_shaped], [entropy_without_a_cap]),
    (check_short_episodes_have_lambda_zero, [length_adaptive_gae], [length_adaptive_unclamped]),
]

"""Advantages against published numbers, and against the exact gradient of a policy small enough to enumerate."""

from __future__ import annotations

import json
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from trainer_cases import Golden, TwoSteps, group

from agentrl.trainers.advantages import dr_grpo, gae, group_advantages, grpo, rloo
from agentrl.trainers.batch import pack
from agentrl.trainers.losses import keep
from agentrl.trainers.scoring import PolicyOutput
from agentrl.trainers.surrogates import ppo_clip


@pytest.fixture(scope="module")
def vectors(data_dir):
    rows = json.loads((data_dir / "numeric" / "vectors_shared.json").read_text())
    return {row["name"]: row for row in rows}


@pytest.mark.parametrize(
    ("advantage", "won", "lost"),
    [
        (grpo, 1.207612, -0.724567),
        (lambda rewards: grpo(rewards, eps=1e-4), 1.207381, -0.724429),
        (dr_grpo, 0.625, -0.375),
        (rloo, 0.714286, -0.428571),
    ],
)
def test_golden_group_advantages(advantage, won, lost):
    expected = [won if reward else lost for reward in Golden.rewards]
    assert advantage(Golden.rewards) == pytest.approx(expected, abs=1e-6)


def test_published_group_vectors(vectors):
    row = vectors["grpo_group_norm"]
    assert grpo(row["inputs"]["rewards"]) == pytest.approx(row["expected"]["advantages"], rel=1e-4)
    row = vectors["leave_one_out_baseline"]
    rewards, baseline = row["inputs"]["rewards"], row["expected"]["baseline"]
    for start in (0, 3):
        expected = [r - b for r, b in zip(rewards[start : start + 3], baseline[start : start + 3], strict=True)]
        assert rloo(rewards[start : start + 3]) == pytest.approx(expected, rel=1e-5)


@settings(deadline=None)
@given(st.lists(st.floats(-10, 10), min_size=2, max_size=12))
def test_group_advantages_have_mean_zero_and_ignore_a_shift(rewards):
    for advantage in (grpo, dr_grpo, rloo):
        values = advantage(rewards)
        assert math.fsum(values) == pytest.approx(0, abs=1e-6)
    assert dr_grpo([reward + 3 for reward in rewards]) == pytest.approx(dr_grpo(rewards), abs=1e-9)


@pytest.mark.parametrize("advantage", [grpo, dr_grpo, rloo])
@pytest.mark.parametrize("rewards", [[], [None], [None, 1.0], [0.1] * 3, [1e-300, 1e-300], [0.7]])
def test_no_signal_is_exactly_zero(advantage, rewards):
    assert advantage(rewards) == tuple(None if reward is None else 0.0 for reward in rewards)


def test_almost_equal_rewards_do_not_explode():
    assert grpo([0.1 + 0.2, 0.3, 0.3]) == pytest.approx([0, 0, 0], abs=1e-9)


def test_advantages_are_broadcast_over_the_trained_tokens_of_each_episode():
    batch = group_advantages(pack([group(1.0, None, 0.0), group(0.5, 0.5, task="u")], 0), dr_grpo)
    assert batch.advantages_BT[0][batch.mask_BT[0]].unique().tolist() == [0.5]
    assert batch.advantages_BT[1][batch.mask_BT[1]].unique().tolist() == [-0.5]
    assert (batch.advantages_BT[2:] == 0).all()
    assert (batch.advantages_BT[~batch.mask_BT] == 0).all()


def expected_gradient(policy: TwoSteps, advantage, size: int) -> torch.Tensor:
    """The gradient estimator's expectation over every group of `size` trajectories."""
    batch, logprobs_BT, probability_B = policy.groups(size)
    batch = group_advantages(batch, advantage)
    per_token_BT = ppo_clip(PolicyOutput(logprobs_BT), batch, clip_low=math.inf, clip_high=math.inf)
    per_episode_B = keep(per_token_BT, batch.mask_BT).sum(1) / size
    return -torch.autograd.grad((per_episode_B * probability_B).sum(), policy.theta)[0]


@pytest.mark.parametrize("size", [2, 3])
def test_leave_one_out_is_unbiased_and_centring_shrinks_by_a_known_factor(size):
    policy = TwoSteps(seed=size)
    exact = policy.exact_gradient()
    assert exact.norm() > 0.05
    assert (expected_gradient(policy, rloo, size) - exact).abs().max() < 1e-8
    assert (expected_gradient(policy, dr_grpo, size) - exact * (size - 1) / size).abs().max() < 1e-8


@pytest.mark.parametrize("size", [2, 3])
def test_the_bias_of_dividing_by_the_standard_deviation(size):
    """With rewards of 0 and 1, GRPO follows c(p)·∇p: c(p) = E[A | this one won] - E[A | it lost]."""
    policy = TwoSteps(seed=5)
    policy.rewards_K = (policy.rewards_K > 0.5).double()
    p = float((policy.logprobs_K2().detach().sum(1).exp() * policy.rewards_K).sum())
    scale = 0.0
    for others in range(size):
        chance = math.comb(size - 1, others) * p**others * (1 - p) ** (size - 1 - others)
        rest = [1.0] * others + [0.0] * (size - 1 - others)
        scale += chance * (grpo([1.0, *rest])[0] - grpo([0.0, *rest])[0])
    exact = policy.exact_gradient()
    assert (expected_gradient(policy, grpo, size) - scale * exact).abs().max() < 1e-8
    assert abs(scale - 1) > 0.01, "here the bias is large enough to see"


MASK = torch.tensor([1, 1, 0, 0, 0, 1]).bool()
VALUES = torch.tensor([0.3, 0.4, 0.9, 0.9, 0.9, 0.5])


def test_golden_gae():
    advantages_T, returns_T = gae(torch.eye(6)[5], VALUES, MASK, gamma=1.0, lam=0.95)
    assert advantages_T.tolist() == pytest.approx([0.64625, 0.575, 0, 0, 0, 0.5], abs=1e-6)
    assert returns_T[MASK].tolist() == pytest.approx([0.94625, 0.975, 1.0], abs=1e-6)


def test_gae_is_the_discounted_sum_of_temporal_differences():
    rewards, values, gamma, lam = [0.1, -0.4, 0.0, 1.0], [0.3, 0.2, -0.1, 0.6], 0.9, 0.7
    deltas = [r + gamma * v_next - v for r, v, v_next in zip(rewards, values, [*values[1:], 0.0], strict=True)]
    expected = [sum((gamma * lam) ** (k - t) * deltas[k] for k in range(t, 4)) for t in range(4)]
    found = gae(torch.tensor(rewards).double(), torch.tensor(values).double(), torch.ones(4), gamma, lam)
    assert found.advantages_T.tolist() == pytest.approx(expected)
    assert found.returns_T.tolist() == pytest.approx([a + v for a, v in zip(expected, values, strict=True)])


def test_gae_credits_what_stands_on_an_observation_to_the_last_trained_token():
    paid_later = gae(
        torch.tensor([0.0, 0, 0.5, 0, 0, 0, 1.0]), torch.ones(7), torch.tensor([1, 1, 0, 0, 0, 1, 0]), 0.9, 0.8
    )
    paid_at_once = gae(
        torch.tensor([0.0, 0.5, 0, 0, 0, 1.0, 0]), torch.ones(7), torch.tensor([1, 1, 0, 0, 0, 1, 0]), 0.9, 0.8
    )
    assert torch.equal(paid_later.advantages_T, paid_at_once.advantages_T)


def test_gae_refuses_a_reward_that_no_action_earned():
    with pytest.raises(ValueError, match="before the first trained token"):
        gae(torch.tensor([1.0, 0.0]), torch.zeros(2), torch.tensor([0, 1]), 1.0, 1.0)


def test_gae_without_trained_tokens_is_zero():
    assert gae(torch.zeros(3), torch.full((3,), torch.nan), torch.zeros(3), 1.0, 1.0).returns_T.tolist() == [0, 0, 0]


def test_published_gae_vectors(vectors):
    inputs, expected = vectors["gae_returns"]["inputs"], vectors["gae_returns"]["expected"]
    rewards, values = torch.tensor(inputs["rewards"][0]).double(), torch.tensor(inputs["values"][0]).double()
    found = gae(rewards, values, torch.ones(4), inputs["gamma"], inputs["lam"])
    assert found.returns_T.tolist() == pytest.approx(expected["returns"][0], abs=1e-4)
    inputs = vectors["multi_turn_gae_mask_invariance"]["inputs"]
    mask, rewards = torch.tensor(inputs["response_mask"][0]).bool(), torch.tensor(inputs["rewards"][0]).double()
    results = []
    for garbage in (0.0, -1e6, math.nan):
        values = torch.full((len(mask),), garbage, dtype=torch.float64)
        values[mask] = torch.tensor(inputs["values_at_mask"], dtype=torch.float64)
        results.append(gae(rewards, values, mask, 0.97, 0.9))
    for other in results[1:]:
        assert torch.equal(other.advantages_T, results[0].advantages_T)
        assert torch.equal(other.returns_T, results[0].returns_T)

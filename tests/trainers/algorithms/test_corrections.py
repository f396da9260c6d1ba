"""Off-policy corrections and selections: golden numbers, exact expectations, and what the peers
compute.
"""

from __future__ import annotations

import math
from dataclasses import replace
from functools import partial

import pytest
import torch
from trainer_cases import PAD, Golden, TwoSteps, batch_of, group, logprobs_for, random_batch

from agentrl.errors import ConfigError
from agentrl.trainers.algorithms.corrections import (
    age,
    clip_cov,
    covariance,
    decay_stale,
    drop_overlong,
    drop_stale,
    masked_is,
    policy_ratio,
    reject_off_policy,
    select_forks,
    select_kl_cov,
    train_high_entropy,
    truncated_is,
)
from agentrl.trainers.algorithms.losses import (
    PolicyLoss,
    add_metrics,
    by_token,
    importance_ratio,
    keep,
    ppo_clip,
)
from agentrl.trainers.algorithms.recipe import Recipe
from agentrl.trainers.algorithms.recipes import recipe
from agentrl.trainers.batch import PolicyOutput, pack
from agentrl.trainers.observe.parity import effective_share

SAMPLER = torch.tensor([[-1.3, -0.4, -1.6, -0.5], [-0.5, -1.5, -0.2, -2.1]], dtype=torch.float64)


def unclipped(output, batch):
    return -importance_ratio(output, batch) * batch.advantages_BT


def golden(**changes):
    """The golden rows, sampled by one policy and scored by another; the update starts from the
    second.
    """
    return Golden.batch(old_logprobs_BT=SAMPLER, proximal_logprobs_BT=Golden.old, **changes)


# --- golden numbers


def test_golden_rows():
    batch = golden()
    assert policy_ratio(batch, "sequence")[:, 0].tolist() == pytest.approx(
        [1.221403, 1.0], abs=1e-6
    )
    assert policy_ratio(batch, "geometric")[:, 0].tolist() == pytest.approx(
        [1.068939, 1.0], abs=1e-6
    )
    token_BT = (Golden.old - SAMPLER).exp()
    assert torch.allclose(policy_ratio(batch, "token"), torch.where(Golden.mask, token_BT, 1.0))


def test_bounds_are_where_they_are_said_to_be():
    batch = golden()
    ratio_BT = (Golden.old - SAMPLER).exp()
    assert sorted({round(float(r), 4) for r in ratio_BT[Golden.mask]}) == [0.9048, 1.1052, 1.2214]
    cut = truncated_is(batch, tis_low=1.0, tis_high=1.1).weights_BT[Golden.mask]
    assert cut.tolist() == pytest.approx([1.1, 1.0, 1.1, 1.1, 1.0])
    kept = masked_is(batch, mis_low=0.95, mis_high=1.11).weights_BT[Golden.mask]
    assert kept.tolist() == pytest.approx([1.105171, 0, 0, 1.105171, 0], abs=1e-6)
    whole = reject_off_policy(batch, reject_low=0.99, reject_high=1.05).weights_BT[Golden.mask]
    assert whole.tolist() == [0, 0, 0, 1, 1], "an episode is rejected whole"
    exact = masked_is(replace(batch, proximal_logprobs_BT=SAMPLER), mis_low=1.0, mis_high=1.0)
    assert exact.weights_BT[Golden.mask].tolist() == [1] * 5, "the bounds belong to the inside"


def test_log_ratios_are_clamped_at_their_level():
    far = replace(golden(), proximal_logprobs_BT=SAMPLER + 15.0)
    assert float(policy_ratio(far, "token").max()) == pytest.approx(math.exp(15))
    assert float(policy_ratio(far, "sequence").max()) == pytest.approx(math.exp(20))
    assert float(policy_ratio(far, "geometric").max()) == pytest.approx(math.exp(15))


def test_weights_multiply_and_denominators_stay():
    batch = golden()
    both = reject_off_policy(truncated_is(batch, tis_high=1.1), reject_low=0.0, reject_high=1.05)
    assert both.weights_BT[Golden.mask].tolist() == pytest.approx(
        [0, 0, 0, 1.1, 0.904837], abs=1e-6
    )
    assert (both.n_tokens, both.n_episodes, both.tokens_E.tolist()) == (5, 2, [3, 2])
    _, metrics = PolicyLoss(ppo_clip, by_token)(PolicyOutput(Golden.logprobs), both)
    assert metrics["rejected"] == pytest.approx(3 / 5)
    share = metrics["weight"] ** 2 / metrics["weight_square"]
    assert share == pytest.approx(effective_share(both.weights_BT[Golden.mask]))


def test_overlong_episodes():
    batch = golden(truncated_E=torch.tensor([True, False]))
    assert drop_overlong(batch).weights_BT[Golden.mask].tolist() == [0, 0, 0, 1, 1]
    assert drop_overlong(batch, drop_truncated=False).weights_BT[Golden.mask].tolist() == [1] * 5


def test_staleness():
    versions_BT = torch.tensor([[7, 5, -1, 7], [6, 3, -1, -1]], dtype=torch.int32)
    batch = golden(version_BT=versions_BT, version=7)
    assert age(batch)[Golden.mask].tolist() == [0, 2, 0, 1, 4]
    assert decay_stale(batch, stale_decay=0.5).weights_BT[Golden.mask].tolist() == [
        1,
        0.25,
        1,
        0.5,
        0.0625,
    ]
    assert drop_stale(batch, max_age=1).weights_BT[Golden.mask].tolist() == [1, 0, 1, 1, 0]
    assert decay_stale(batch).weights_BT[Golden.mask].tolist() == [1] * 5, (
        "by default staleness changes nothing"
    )
    assert drop_stale(batch).weights_BT[Golden.mask].tolist() == [1] * 5
    with pytest.raises(ValueError, match="newer"):
        age(replace(batch, version=6))
    with pytest.raises(ValueError, match=r"batch\.version"):
        age(golden())


def test_bad_settings_are_named():
    batch = golden()
    for step, options in (
        (truncated_is, {"tis_low": 3.0}),
        (truncated_is, {"tis_high": 0.0}),
        (truncated_is, {"tis_level": "turn"}),
        (masked_is, {"mis_low": 1.1}),
        (reject_off_policy, {"reject_low": 1.1}),
        (clip_cov, {"cov_low": 5.0}),
        (clip_cov, {"cov_share": 1.5}),
        (train_high_entropy, {"entropy_share": 0.0}),
    ):
        with pytest.raises(ConfigError) as caught:
            step(batch, **options)
        assert caught.value.setting == f"loss.{next(iter(options))}"
    with pytest.raises(ValueError, match="proximal_logprobs_BT"):
        truncated_is(Golden.batch())
    with pytest.raises(ValueError, match="entropy_BT"):
        train_high_entropy(batch)


def test_options_reach_the_parts():
    step = truncated_is.changed(tis_high=math.inf)
    assert step.options.tis_high == math.inf and truncated_is.options.tis_high == 2
    assert step.reads == {"proximal"}


# --- exact expectations: 25 trajectories of one policy, sampled from another


class OffPolicy:
    """The policy at θ is trained on what another one sampled; R is the advantage."""

    def __init__(self) -> None:
        self.policy, sampler = TwoSteps(0), TwoSteps(0)
        sampler.theta = (self.policy.theta + 0.7 * TwoSteps(1).theta).detach()
        batch, self.logprobs_BT, _ = self.policy.groups(1)
        old_BT = sampler.groups(1)[0].old_logprobs_BT
        self.sampler_K = keep(old_BT, batch.mask_BT).sum(1).exp()
        self.proximal_K = keep(batch.old_logprobs_BT, batch.mask_BT).sum(1).exp()
        self.sampler_K2 = sampler.logprobs_K2().detach()
        self.batch = replace(
            batch,
            proximal_logprobs_BT=batch.old_logprobs_BT,
            old_logprobs_BT=old_BT,
            advantages_BT=torch.where(batch.mask_BT, batch.reward_E[:, None], 0.0),
        )

    def expected_gradient(self, correction) -> torch.Tensor:
        """Of -loss, over the sampler's trajectories, at the proximal policy."""
        batch = correction(self.batch)
        loss_BT = unclipped(PolicyOutput(self.logprobs_BT), batch) * batch.weights_BT
        total = -(self.sampler_K * keep(loss_BT, batch.mask_BT).sum(1)).sum()
        return torch.autograd.grad(total, self.policy.theta, retain_graph=True)[0]

    def gradient_of(self, weights_K) -> torch.Tensor:
        """Σ weight·R·∇log π(trajectory)."""
        total = (weights_K * self.policy.rewards_K * self.policy.logprobs_K2().sum(1)).sum()
        return torch.autograd.grad(total, self.policy.theta)[0]


def test_untruncated_sequence_weights_give_the_exact_policy_gradient():
    case = OffPolicy()
    found = case.expected_gradient(partial(truncated_is, tis_level="sequence", tis_high=math.inf))
    assert (found - case.policy.exact_gradient()).abs().max() < 1e-8
    plain = case.expected_gradient(partial(drop_overlong, drop_truncated=False))
    assert (plain - case.policy.exact_gradient()).norm() > 0.05, (
        "without weights it is another gradient"
    )


def test_untruncated_token_weights_give_the_gradient_they_claim():
    """Each token is the proximal policy's, in the sampler's states and with the sampler's
    continuation.
    """
    case = OffPolicy()
    found = case.expected_gradient(partial(truncated_is, tis_level="token", tis_high=math.inf))
    first_K, second_K = case.policy.logprobs_K2().exp().T
    sampled_first_K, sampled_second_K = case.sampler_K2.exp().T
    objective = (
        (first_K * sampled_second_K + sampled_first_K * second_K) * case.policy.rewards_K
    ).sum()
    claimed = torch.autograd.grad(objective, case.policy.theta)[0]
    exact = case.policy.exact_gradient()
    assert (found - claimed).abs().max() < 1e-8
    bias = (found - exact).norm() / exact.norm()
    plain = (
        case.expected_gradient(partial(drop_overlong, drop_truncated=False)) - exact
    ).norm() / exact.norm()
    assert float(bias) == pytest.approx(0.390, abs=1e-3)
    assert float(plain) == pytest.approx(0.639, abs=1e-3), "biased, but less than no correction"


def test_the_bias_of_bounds_is_what_lies_outside_them():
    case = OffPolicy()
    exact, high = case.policy.exact_gradient(), 1.5
    ratio_K = case.proximal_K / case.sampler_K
    above_K = ratio_K > high
    assert 0 < int(above_K.sum()) < 25
    found = case.expected_gradient(partial(truncated_is, tis_level="sequence", tis_high=high))
    lost = case.gradient_of(torch.where(above_K, case.proximal_K - high * case.sampler_K, 0.0))
    assert (found - (exact - lost)).abs().max() < 1e-8
    assert float(lost.norm() / exact.norm()) == pytest.approx(0.346, abs=1e-3)
    found = case.expected_gradient(
        partial(masked_is, mis_level="sequence", mis_low=0.0, mis_high=high)
    )
    lost = case.gradient_of(torch.where(above_K, case.proximal_K, 0.0))
    assert (found - (exact - lost)).abs().max() < 1e-8
    geometric = case.expected_gradient(
        partial(truncated_is, tis_level="geometric", tis_high=math.inf)
    )
    tempered = case.gradient_of((case.sampler_K * case.proximal_K).sqrt())
    assert (geometric - tempered).abs().max() < 1e-8, (
        "of two tokens: the policy halfway to the proximal one"
    )
    assert (geometric - exact).norm() > 0.01


# --- decoupled


def test_decoupled_ratio_times_weight_is_the_whole_ratio():
    batch = random_batch()
    logprobs_BT = logprobs_for(batch)
    decoupled = truncated_is(batch, tis_high=math.inf)
    loss, _ = PolicyLoss(unclipped, by_token)(PolicyOutput(logprobs_BT), decoupled)
    plain, _ = PolicyLoss(unclipped, by_token)(
        PolicyOutput(logprobs_BT), replace(batch, proximal_logprobs_BT=None)
    )
    assert float(loss.detach()) == pytest.approx(float(plain.detach()), abs=1e-12)
    pairs = [
        torch.autograd.grad(value, logprobs_BT, retain_graph=True)[0] for value in (loss, plain)
    ]
    assert torch.allclose(*pairs, atol=1e-12)


# --- selections


def test_clip_cov_is_seeded_and_uniform():
    batch = random_batch()
    step = partial(clip_cov, cov_share=0.1, cov_low=0.05, cov_high=5.0)
    assert torch.equal(step(batch).weights_BT, step(batch).weights_BT)
    drops = torch.stack([step(batch, cov_seed=seed).weights_BT == 0 for seed in range(1, 201)])[
        :, batch.mask_BT
    ]
    covariance_N = covariance(batch)[batch.mask_BT]
    inside = (covariance_N > 0.05) & (covariance_N < 5.0)
    share = drops.double().mean(0)
    expected = drops[0].sum() / inside.sum()
    assert (share[~inside] == 0).all()
    assert (share[inside] - expected).abs().max() < 0.17, (
        "every token between the bounds is as likely as the next"
    )


def test_no_share_selects_nothing_and_all_selects_all():
    batch = random_batch()
    assert not select_forks(batch, fork_share=0.0).selected_BT.any()
    assert torch.equal(select_forks(batch, fork_share=1.0).selected_BT, batch.mask_BT)
    assert (clip_cov(batch, cov_share=0.0).weights_BT == 1)[batch.mask_BT].all()
    silent = replace(batch, mask_BT=torch.zeros_like(batch.mask_BT))
    for step in (clip_cov, select_kl_cov, select_forks, train_high_entropy):
        step(silent)


def test_the_likeliest_praised_tokens_have_the_highest_covariance():
    batch = batch_of(group(1.0, 0.0))
    batch = replace(
        batch,
        advantages_BT=torch.where(batch.mask_BT, batch.reward_E[batch.episode_B, None] - 0.5, 0.0),
    )
    chosen = select_kl_cov(batch, kl_cov_share=0.01).selected_BT
    assert chosen.any()
    praised = batch.old_logprobs_BT[batch.mask_BT & (batch.advantages_BT > 0)].max()
    blamed = batch.old_logprobs_BT[batch.mask_BT & (batch.advantages_BT < 0)].min()
    assert set(batch.old_logprobs_BT[chosen].tolist()) <= {float(praised), float(blamed)}


def test_clip_cov_cuts_as_much_of_a_round_of_any_size():
    """Bug 9, on the way that training takes: credit, one optimizer step, correction, loss and its
    metrics.
    """
    step = partial(clip_cov, cov_share=0.1, cov_low=0.01)
    row = Recipe("clip_cov", "", recipe("grpo").credit, ppo_clip, by_token, corrections=(step,))
    rejected = []
    for count in (1, 4):
        groups = [group(1.0, 0.0, 0.0, 1.0, task=str(index)) for index in range(count)]
        (mini,) = row.advantage(pack(groups, PAD)).minibatches(1, seed=0)
        batch = row.correct(mini)
        parts = [row.loss(PolicyOutput(part.old_logprobs_BT), part)[1] for part in batch.split(30)]
        rejected.append(add_metrics(parts)["rejected"])
        assert len(parts) > 1
    assert rejected[0] == pytest.approx(0.1, abs=0.02)
    assert rejected[1] == pytest.approx(rejected[0], abs=1e-6)

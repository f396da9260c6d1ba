"""Losses against golden numbers and exact gradients; recipes by name."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from functools import partial

import numpy as np
import pytest
import torch
from trainer_cases import Golden, TwoSteps, batch_of, group, logprobs_for

from agentrl.errors import ConfigError
from agentrl.trainers.algorithms.losses import (
    PolicyLoss,
    add_metrics,
    by_constant,
    by_episode,
    by_episode_sum,
    by_token,
    importance_ratio,
    policy_metrics,
    ppo_clip,
)
from agentrl.trainers.algorithms.recipes import RECIPES, recipe
from agentrl.trainers.algorithms.regularisers import entropy_bonus, kl_k1, kl_k2, kl_k3, kl_penalty
from agentrl.trainers.batch import PolicyOutput, pack

OUTPUT = PolicyOutput(Golden.logprobs)


def four_aggregations(per_token_BT):
    """Token mean; mean of row means; mean of row sums; the same over a constant length of 4."""
    ways = (by_token, by_episode, by_episode_sum, partial(by_constant, norm_tokens=4))
    return [float(way(per_token_BT, Golden.batch())) for way in ways]


def test_golden_ratio():
    expected = [[1.221403, 1, 0.606531, 1.221403], [0.740818, 1.491825, 1, 0.606531]]
    assert importance_ratio(OUTPUT, Golden.batch()).tolist() == [
        pytest.approx(row, abs=1e-6) for row in expected
    ]


@pytest.mark.parametrize(
    ("clip_high", "expected"),
    [
        (0.2, [-0.450818, -0.280189, -1.127044, -0.281761]),
        (0.28, [-0.459379, -0.287323, -1.148447, -0.287112]),
    ],
)
def test_golden_surrogate(clip_high, expected):
    per_token_BT = ppo_clip(OUTPUT, Golden.batch(), clip_high=clip_high)
    assert four_aggregations(per_token_BT) == pytest.approx(expected, abs=1e-6)


def test_golden_kl():
    found = [
        kl_k1(Golden.logprobs, Golden.ref),
        kl_k2(Golden.logprobs, Golden.ref),
        kl_k3(Golden.logprobs, Golden.ref),
        kl_penalty(OUTPUT, Golden.batch(), kl_coef=1.0),
    ]
    assert [float(by_token(kl, Golden.batch())) for kl in found] == pytest.approx(
        [0.06, 0.023, 0.021314, 0.023579], abs=1e-6
    )


def test_published_vectors(data_dir):
    rows = {
        r["name"]: r for r in json.loads((data_dir / "numeric" / "vectors_shared.json").read_text())
    }
    inputs, expected = rows["kl_estimators"]["inputs"], rows["kl_estimators"]["expected"]
    logprobs, ref = torch.tensor(inputs["logprobs"]), torch.tensor(inputs["ref_logprobs"])
    for name, estimator in {"k1": kl_k1, "k2": kl_k2, "k3": kl_k3}.items():
        assert estimator(logprobs, ref).tolist() == pytest.approx(expected[name], rel=1e-3)
    inputs, expected = rows["ppo_dual_clip"]["inputs"], rows["ppo_dual_clip"]["expected"]
    ratios, advantages = torch.tensor(inputs["ratios"]), torch.tensor(inputs["advantages"])
    losses = surrogate_of(
        ratios.log(), advantages, clip_low=inputs["eps_low"], clip_high=inputs["eps_high"]
    )
    assert [losses[0], losses[2]] == pytest.approx(
        [expected["losses"][0], expected["losses"][2]], abs=1e-6
    )
    assert losses[1] == pytest.approx(4.0), (
        "no dual clip: a bad action that became likelier keeps its full loss"
    )
    inputs, expected = rows["masked_mean_1d"]["inputs"], rows["masked_mean_1d"]["expected"]
    batch = one_row(torch.tensor(inputs["mask"]).bool())
    assert float(by_token(torch.tensor([inputs["x"]]).double(), batch)) == pytest.approx(
        expected["mean"]
    )


def one_row(mask_T, **changes):
    """A batch of one row and one episode with this mask."""
    count = int(mask_T.sum())
    return replace(
        Golden.batch().rows(torch.tensor([0])),
        **{"mask_BT": mask_T[None], "n_tokens": count, "n_episodes": 1, "ref_logprobs_BT": None}
        | changes,
    )


def surrogate_of(log_ratio_T, advantages_T, **options):
    """PPO's loss at each of these log-ratios."""
    zeros, mask_T = torch.zeros(1, len(log_ratio_T)), torch.ones(len(log_ratio_T)).bool()
    batch = one_row(mask_T, old_logprobs_BT=zeros, advantages_BT=advantages_T[None])
    return ppo_clip(PolicyOutput(log_ratio_T[None]), batch, **options)[0]


def test_surrogate_gradient_is_the_policy_gradient_at_ratio_one_and_zero_where_clipped():
    logprobs = torch.log(torch.tensor([1.0, 1.5, 0.5, 1.5, 0.5])).requires_grad_()
    advantages = torch.tensor([2.0, 1.0, 1.0, -1.0, -1.0])
    surrogate_of(logprobs, advantages).sum().backward()
    assert logprobs.grad.tolist() == pytest.approx([-2.0, 0.0, -0.5, 1.5, 0.0])


def test_kl_gradient_on_two_steps():
    """The estimator's expected gradient is that of the KL at each visited state, summed over the
    states visited.
    """
    policy = TwoSteps(seed=1)
    ref = TwoSteps(seed=2)
    logprobs_K2, ref_K2 = policy.logprobs_K2(), ref.logprobs_K2().detach()
    old_K2 = logprobs_K2.detach()
    batch = replace(Golden.batch(), old_logprobs_BT=old_K2, ref_logprobs_BT=ref_K2)
    kl_K2 = kl_penalty(PolicyOutput(logprobs_K2), batch, kl_coef=1.0)
    estimate = (kl_K2.sum(1) * old_K2.sum(1).exp()).sum()
    found = torch.autograd.grad(estimate, policy.theta)[0]
    first, first_ref = policy.theta[:5].log_softmax(0), ref.theta[:5].log_softmax(0).detach()
    second, second_ref = (
        policy.theta[5:].view(5, 5).log_softmax(1),
        ref.theta[5:].view(5, 5).log_softmax(1).detach(),
    )
    kl_S = (second.exp() * (second - second_ref)).sum(1)
    exact = (first.exp() * (first - first_ref)).sum() + (first.detach().exp() * kl_S).sum()
    assert float(estimate.detach()) == pytest.approx(float(exact.detach()))
    assert (found - torch.autograd.grad(exact, policy.theta)[0]).abs().max() < 1e-8


def test_metrics_are_what_they_say_and_add_up():
    output = PolicyOutput(Golden.logprobs, torch.full((2, 4), 0.7))
    batch = Golden.batch()
    metrics = policy_metrics(output, batch, ppo_clip)
    assert metrics["clip_high"] == pytest.approx(2 / 5)
    assert metrics["clip_low"] == pytest.approx(1 / 5)
    assert metrics["ratio_le_0.8"] == pytest.approx(1 / 5)
    assert metrics["ratio_le_1.25"] == pytest.approx(4 / 5)
    assert metrics["ratio_max"] == pytest.approx(1.491825, abs=1e-6)
    assert metrics["entropy"] == pytest.approx(0.7)
    assert metrics["ref_kl"] == pytest.approx(0.021314, abs=1e-6)
    log_ratio = np.array([0.2, 0.0, 0.2, -0.3, 0.4])
    assert metrics["approx_kl"] == pytest.approx((np.exp(log_ratio) - log_ratio - 1).mean())
    assert metrics["logprob_gap"] == pytest.approx(np.abs(log_ratio).mean())
    assert metrics["gap_max"] == pytest.approx(0.4)
    rows = [
        policy_metrics(
            PolicyOutput(*(x[[i]] for x in (Golden.logprobs, output.entropy_BT))),
            batch.rows(torch.tensor([i])),
            ppo_clip,
        )
        for i in range(2)
    ]
    assert add_metrics(rows) == pytest.approx(metrics)


def test_kl_and_entropy_terms_enter_with_their_coefficients_and_say_what_they_lack():
    output = PolicyOutput(Golden.logprobs, torch.full((2, 4), 0.7))
    plain, _ = PolicyLoss(ppo_clip, by_token)(output, Golden.batch())
    terms = (partial(kl_penalty, kl_coef=0.5), partial(entropy_bonus, entropy_coef=0.1))
    full, metrics = PolicyLoss(ppo_clip, by_token, terms)(output, Golden.batch())
    assert float(full - plain) == pytest.approx(0.5 * 0.023579 - 0.1 * 0.7, abs=1e-6)
    assert metrics["loss"] == pytest.approx(
        metrics["loss_policy"] + metrics["loss_kl_penalty"] + metrics["loss_entropy_bonus"],
        abs=1e-9,
    )
    with pytest.raises(
        ValueError, match="ref_logprobs_BT is None: score the batch under a reference"
    ):
        PolicyLoss(ppo_clip, by_token, terms)(output, Golden.batch(ref_logprobs_BT=None))
    with pytest.raises(ValueError, match="entropy_BT is None"):
        PolicyLoss(ppo_clip, by_token, terms)(OUTPUT, Golden.batch())


def test_weights_multiply_the_policy_loss_alone_and_denominators_stay():
    weights_BT = torch.tensor(
        [[0.0, 2.0, math.nan, 1.0], [1.0, 0.0, 9.0, 9.0]], dtype=torch.float64
    )
    batch, kl = Golden.batch(weights_BT=weights_BT), partial(kl_penalty, kl_coef=0.5)
    loss, metrics = PolicyLoss(ppo_clip, by_token, (kl,))(OUTPUT, batch)
    per_token_BT = ppo_clip(OUTPUT, batch)
    policy = 2 * per_token_BT[0, 1] + per_token_BT[0, 3] + per_token_BT[1, 0]
    assert float(loss) == pytest.approx(float(policy) / 5 + 0.5 * 0.023579, abs=1e-6)
    assert (metrics["rejected"], metrics["weight"], metrics["weight_square"]) == pytest.approx(
        (2 / 5, 4 / 5, 6 / 5)
    )


def test_ratios_are_against_the_proximal_policy_where_there_is_one():
    batch = Golden.batch(proximal_logprobs_BT=Golden.old, old_logprobs_BT=Golden.old - 0.3)
    assert torch.equal(importance_ratio(OUTPUT, batch), importance_ratio(OUTPUT, Golden.batch()))
    assert policy_metrics(OUTPUT, batch, ppo_clip)["gap_max"] == pytest.approx(0.7), (
        "the sampler's gap stays its own"
    )


def test_informative_rows_have_the_gradient_of_all_rows():
    batch = replace(batch_of(group(1.0, 0.0, 0.5)), episode_B=torch.arange(3))
    batch.advantages_BT[1] = 0.0
    logprobs_BT = logprobs_for(batch)
    loss = PolicyLoss(ppo_clip, by_episode)
    whole = torch.autograd.grad(loss(PolicyOutput(logprobs_BT), batch)[0], logprobs_BT)[0]
    few = batch.informative()
    value, metrics = loss(PolicyOutput(logprobs_BT[[0, 2], : few.ids_BT.shape[1]]), few)
    assert torch.equal(whole, torch.autograd.grad(value, logprobs_BT)[0])
    kept = batch.mask_BT & (torch.arange(3) != 1)[:, None]
    gap = (logprobs_BT.detach() - batch.old_logprobs_BT)[kept].abs().mean()
    assert add_metrics([metrics])["logprob_gap"] == pytest.approx(float(gap)), (
        "left-out rows are no zeros"
    )
    assert metrics["scored"] == pytest.approx(int(kept.sum()) / batch.n_tokens)


def test_recipes_are_looked_up_by_name_and_take_settings():
    assert set(RECIPES) >= {"grpo", "dr_grpo"}
    changed = recipe("grpo", clip_high=0.28, aggregate="token", kl_coef=0.04)
    assert (
        changed.options.items()
        >= {"clip_low": 0.2, "clip_high": 0.28, "kl_coef": 0.04, "eps": 1e-6}.items()
    )
    assert changed.aggregate == by_token and changed.needs == {"group", "reference"}
    assert recipe("grpo").options["clip_high"] == 0.2 and recipe("grpo").needs == {"group"}
    assert recipe("grpo", eps=0.5).advantage(
        pack([group(1.0, 0.0)], 0)
    ).advantages_BT.amax() == pytest.approx(0.5 / (0.5**0.5 + 0.5))
    batch = recipe("dr_grpo").advantage(pack([group(1.0, 0.0)], 0))
    loss, metrics = recipe("dr_grpo", norm_tokens=10).loss(
        PolicyOutput(batch.old_logprobs_BT), batch
    )
    tokens = batch.tokens_E.tolist()
    assert float(loss) == pytest.approx(-0.5 * (tokens[0] - tokens[1]) / (2 * 10))
    assert metrics["logprob_gap"] == 0


@pytest.mark.parametrize(
    ("name", "settings", "setting", "fix"),
    [
        ("grpoo", {}, "recipe", "did you mean 'grpo'"),
        ("GRPO", {}, "recipe", "did you mean 'grpo'"),
        ("grpo", {"clip_hihg": 0.3}, "loss.clip_hihg", "did you mean 'clip_high'"),
        ("grpo", {"aggregate": "tokens"}, "loss.aggregate", "did you mean 'token'"),
        ("grpo", {"kl_coef": -1.0}, "loss.kl_coef", "must be at least 0"),
        ("grpo", {"clip_low": math.nan}, "loss.clip_low", "must be"),
        ("dr_grpo", {"norm_tokens": 0}, "loss.norm_tokens", "must be at least 1"),
        ("grpo", {"clip_low": True}, "loss.clip_low", "must be a number"),
        ("grpo", {"norm_tokens": 5}, "loss.norm_tokens", "it belongs to dr_grpo"),
        ("grpo", {"filter_groups": 1}, "loss.filter_groups", "must be true or false"),
        ("grpo", {"negative_weight": "half"}, "loss.negative_weight", "must be a number"),
        ("grpo", {"kl_budget": "0.1"}, "loss.kl_budget", "must be a number"),
        ("grpo", {"kl_budget": 0}, "loss.kl_budget", "must be greater than 0"),
        ("grpo", {"epochs": 0}, "loss.epochs", "must be at least 1"),
        ("grpo", {"turn_weights": {"format": "much"}}, "loss.turn_weights.format", "a number"),
    ],
)
def test_recipe_errors_name_the_fix(name, settings, setting, fix):
    with pytest.raises(ConfigError) as caught:
        recipe(name, **settings)
    assert caught.value.setting == setting and fix in str(caught.value)


def test_a_whole_loss_takes_the_place_of_surrogate_aggregate_and_regularisers():
    """The recipe's own loss, given as a whole, has the same value and gradient; twice it, twice."""
    plain = recipe("grpo", kl_coef=0.1)

    def doubled(output, batch):
        loss, _ = plain.loss(output, batch)
        return 2 * loss, {"mine": 1.0}

    whole = replace(plain, whole_loss=doubled)
    values, gradients = [], []
    for one in (plain, whole):
        leaf_BT = Golden.logprobs.clone().requires_grad_()
        loss, metrics = one.loss(PolicyOutput(leaf_BT), Golden.batch())
        (gradient_BT,) = torch.autograd.grad(loss, leaf_BT)
        values.append(float(loss.detach()))
        gradients.append(gradient_BT)
    assert values[1] == pytest.approx(2 * values[0]) and values[0] != 0
    torch.testing.assert_close(gradients[1], 2 * gradients[0])
    assert gradients[0].abs().sum() > 0
    assert metrics["mine"] == 1.0 and metrics["loss"] == pytest.approx(values[1])
    places = {place for place, _ in whole.parts()}
    assert "whole_loss" in places and whole.reads_every_row
    assert not places & {"surrogate", "aggregate", "regularisers"}

"""Surrogates against golden numbers, published vectors, and gradients enumerated on a policy of two
steps.
"""

from __future__ import annotations

import json
import math
from dataclasses import replace
from functools import partial

import numpy as np
import pytest
import torch
from mutants import name_of
from trainer_cases import Golden, TwoSteps, one_episode

from agentrl.errors import ConfigError
from agentrl.trainers.algorithms.losses import (
    PolicyLoss,
    by_constant,
    by_episode,
    by_episode_sum,
    by_token,
    importance_ratio,
    keep,
    policy_metrics,
    ppo_clip,
)
from agentrl.trainers.algorithms.regularisers import anchor_kl
from agentrl.trainers.algorithms.surrogates import (
    cispo,
    dppo_kl,
    dppo_tv,
    gmpo,
    gspo,
    gspo_token,
    importance_weighted,
    policy_gradient,
    ppo_dual_clip,
    sapo,
    sequence_ratio,
    topr,
    topr_token,
    vespo,
    weighted_policy_gradient,
)
from agentrl.trainers.batch import PolicyOutput

FOUR = (by_token, by_episode, by_episode_sum, partial(by_constant, norm_tokens=4))


def trl_cispo(output, batch):
    """TRL's epsilon_high = 0.2 is the bound itself."""
    return weighted_policy_gradient(importance_ratio(output, batch).clamp(0, 0.2), output, batch)


GOLDEN = [
    (ppo_clip, FOUR, [-0.450818, -0.280189, -1.127044, -0.281761]),
    (partial(ppo_clip, clip_high=0.28), FOUR, [-0.459379, -0.287323, -1.148447, -0.287112]),
    (partial(ppo_dual_clip, dual_clip=1.2), FOUR, [-0.48, -0.316667, -1.2, -0.3]),
    (partial(gspo, clip_low=0.2, clip_high=0.2), [by_episode], [-0.308498]),
    (partial(cispo, clip_low=0.2, clip_high=0.2), [by_token], [0.164]),
    (cispo, [by_token], [0.137832]),
    (trl_cispo, [by_token], [0.026]),
    (sapo, [by_episode], [-0.569362]),
    (partial(gmpo, clip_low=0.2, clip_high=0.2), [by_episode], [-0.295023]),
    (gmpo, [by_episode], [-0.308498]),
    (partial(dppo_tv, divergence_max=0.05), [by_token], [-0.079019]),
    (partial(dppo_tv, divergence_max=0.1), [by_token], [0.165262]),
    (partial(dppo_tv, divergence_max=0.2), [by_token], [0.137832]),
]


@pytest.mark.parametrize(("surrogate", "aggregates", "expected"), GOLDEN)
def test_golden(surrogate, aggregates, expected):
    found = [
        float(PolicyLoss(surrogate, one)(PolicyOutput(Golden.logprobs), Golden.batch())[0])
        for one in aggregates
    ]
    assert found == pytest.approx(expected, abs=1e-6)


def test_golden_sequence_ratio():
    found = sequence_ratio(PolicyOutput(Golden.logprobs), Golden.batch())
    assert found[:, 0].tolist() == pytest.approx([1.142631, 1.051271], abs=1e-6)


@pytest.mark.parametrize("name", ["ppo_dual_clip", "cispo_ppo_band", "cispo_wide"])
def test_published_vectors(data_dir, name):
    rows = {
        row["name"]: row
        for row in json.loads((data_dir / "numeric" / "vectors_shared.json").read_text())
    }
    inputs, expected = rows[name]["inputs"], rows[name]["expected"]
    log_ratio = np.log(inputs["ratios"])
    logprobs = inputs.get("log_probs", [-1.0] * len(log_ratio))
    leaf_BT, output, batch = one_episode(
        logprobs, np.array(logprobs) - log_ratio, inputs["advantages"]
    )
    bounds = {"clip_low": inputs["eps_low"], "clip_high": inputs["eps_high"]}
    dual = "dual_clip_c" in inputs
    term = partial(ppo_dual_clip, dual_clip=inputs["dual_clip_c"]) if dual else cispo
    losses_BT = term(output, batch, **bounds)
    assert losses_BT[0].tolist() == pytest.approx(expected["losses"], abs=rows[name]["atol"])
    if "grad_log_probs" in expected:
        losses_BT.sum().backward()
        assert leaf_BT.grad[0].tolist() == pytest.approx(
            expected["grad_log_probs"], abs=rows[name]["atol"]
        )


# --- what each token's score is multiplied by, by enumeration over all 25 trajectories


def _inside(ratio, advantage, low, high):
    return ~(((advantage > 0) & (ratio > high)) | ((advantage < 0) & (ratio < low)))


def _mean(values):
    return values.mean(1, keepdims=True) + 0 * values


def _gmpo_weight(ratio, advantage, _):
    mean = _mean(advantage)
    free = _inside(ratio, mean, math.exp(-0.4), math.exp(0.4))
    clipped = np.where(free, np.log(ratio), 0.4 * np.sign(mean))
    return np.exp(_mean(clipped)) * mean * free


def _gspo_weight(ratio, advantage, _):
    level = np.exp(_mean(np.log(ratio)))
    return level * _mean(advantage * _inside(level, advantage, 0.8, 1.2))


def _sapo_weight(ratio, advantage, _):
    tau = np.where(advantage > 0, 1.0, 1.05)
    gate = 1 / (1 + np.exp(-tau * (ratio - 1)))
    return ratio * 4 * gate * (1 - gate) * advantage


def _dppo_weight(divergence, bound):
    def weight(ratio, advantage, anchor):
        away = (ratio - 1) * advantage > 0
        return (
            np.where(away & (divergence(anchor, anchor * ratio) > bound), 0, np.minimum(ratio, 20))
            * advantage
        )

    return weight


def _bernoulli_kl(anchor, policy):
    return anchor * np.log(anchor / policy) + (1 - anchor) * np.log((1 - anchor) / (1 - policy))


def _vespo_weight(ratio, advantage, _):
    product = ratio.prod(1, keepdims=True)
    k, lam = np.where(advantage < 0, 3.0, 2.0), np.where(advantage < 0, 2.0, 3.0)
    return product**k * np.exp(lam * (1 - product)) * advantage


BAND = {"clip_low": 0.2, "clip_high": 0.2}
EFFECTIVE = {
    policy_gradient: lambda r, a, _: a,
    importance_weighted: lambda r, a, _: r * a,
    ppo_clip: lambda r, a, _: r * a * _inside(r, a, 0.8, 1.2),
    partial(ppo_dual_clip, dual_clip=1.5): lambda r, a, _: (
        r * a * _inside(r, a, 0.8, 1.2) * ~((a < 0) & (r > 1.5))
    ),
    partial(cispo, clip_high=0.5): lambda r, a, _: np.clip(r, 0, 1.5) * a,
    sapo: _sapo_weight,
    topr_token: lambda r, a, _: np.where(a < 0, np.minimum(r, 1), 1) * a,
    partial(dppo_tv, divergence_max=0.1): _dppo_weight(lambda q, p: np.abs(p - q), 0.1),
    dppo_kl: _dppo_weight(_bernoulli_kl, 0.05),
    partial(gspo, **BAND): _gspo_weight,
    partial(gspo_token, **BAND): lambda r, a, _: (
        np.exp(_mean(np.log(r))) * a * _inside(np.exp(_mean(np.log(r))), a, 0.8, 1.2)
    ),
    gmpo: _gmpo_weight,
    topr: lambda r, a, _: np.where(a < 0, np.minimum(r.prod(1, keepdims=True), 1), 1) * a,
    vespo: _vespo_weight,
}
MEAN_ADVANTAGE = ("gspo", "gmpo")


def _name(value):
    return name_of(value) if callable(value) else None


def _expected_gradient(surrogate, policy, anchor, advantages_K2):
    """Minus the gradient of the expected loss (summed over tokens), trajectories drawn from the
    anchor.
    """
    batch, logprobs_BT, _ = policy.groups(1)
    old_BT, advantages_BT = anchor.groups(1)[1].detach(), torch.zeros_like(logprobs_BT)
    advantages_BT[:, [1, 3]] = torch.as_tensor(advantages_K2)
    batch = replace(batch, old_logprobs_BT=old_BT, advantages_BT=advantages_BT)
    per_token_BT = surrogate(PolicyOutput(logprobs_BT).silent(batch.mask_BT), batch.silent())
    weights_K = anchor.logprobs_K2().detach().sum(1).exp()
    return -torch.autograd.grad(
        (keep(per_token_BT, batch.mask_BT).sum(1) * weights_K).sum(), policy.theta
    )[0]


def _scores_K2P(policy):
    """∂ log π / ∂θ of each token in closed form: one-hot minus probabilities."""
    theta = policy.theta.detach()
    first, second = theta[:5].softmax(0), theta[5:].view(5, 5).softmax(1)
    scores = torch.zeros(25, 2, 30, dtype=torch.float64)
    for k, (a, b) in enumerate(policy.actions_K2.tolist()):
        scores[k, 0, :5] = -first
        scores[k, 0, a] += 1
        scores[k, 1, 5 + 5 * a : 10 + 5 * a] = -second[a]
        scores[k, 1, 5 + 5 * a + b] += 1
    return scores.numpy()


def _scene(off_policy):
    policy = TwoSteps(seed=3)
    anchor = TwoSteps(seed=4) if off_policy else policy
    policy_K2, anchor_K2 = (
        policy.logprobs_K2().detach().exp().numpy(),
        anchor.logprobs_K2().detach().exp().numpy(),
    )
    return policy, anchor, policy_K2 / anchor_K2, anchor_K2


def _drawn(anchor_K2, weights_K2, scores_K2P):
    return np.einsum("k,kt,ktp->p", anchor_K2.prod(1), weights_K2, scores_K2P)


@pytest.mark.parametrize("surrogate", EFFECTIVE, ids=_name)
def test_the_gradient_is_the_score_times_the_weight_that_the_formula_says(surrogate):
    policy, anchor, ratio_K2, anchor_K2 = _scene(off_policy=True)
    advantages_K2 = np.random.default_rng(0).normal(size=(25, 2))
    found = _expected_gradient(surrogate, policy, anchor, advantages_K2)
    weights_K2 = EFFECTIVE[surrogate](ratio_K2, advantages_K2, anchor_K2)
    assert found.numpy() == pytest.approx(
        _drawn(anchor_K2, weights_K2, _scores_K2P(policy)), abs=1e-10
    )


@pytest.mark.parametrize("surrogate", EFFECTIVE, ids=_name)
def test_on_policy_every_surrogate_has_the_policy_gradient(surrogate):
    """With one advantage per episode all do, exactly; with one per token, `gspo` and `gmpo` use the
    episode's mean.
    """
    policy, anchor, _, anchor_K2 = _scene(off_policy=False)
    found = _expected_gradient(
        surrogate, policy, anchor, policy.rewards_K[:, None].expand(25, 2) - 0.4
    )
    assert (found - policy.exact_gradient()).abs().max() < 1e-10
    advantages_K2 = np.random.default_rng(1).normal(size=(25, 2))
    found = _expected_gradient(surrogate, policy, anchor, advantages_K2).numpy()
    own, mean = (
        _drawn(anchor_K2, a, _scores_K2P(policy)) for a in (advantages_K2, _mean(advantages_K2))
    )
    assert np.abs(own - mean).max() > 0.01
    assert found == pytest.approx(mean if _name(surrogate) in MEAN_ADVANTAGE else own, abs=1e-10)


def test_off_policy_the_unclipped_ratio_is_exact_at_the_states_that_the_anchor_visits():
    policy, anchor, ratio_K2, anchor_K2 = _scene(off_policy=True)
    rng = np.random.default_rng(2)
    first_5, second_55 = torch.tensor(rng.normal(size=5)), torch.tensor(rng.normal(size=(5, 5)))
    a, b = policy.actions_K2.T
    found = _expected_gradient(
        importance_weighted, policy, anchor, torch.stack([first_5[a], second_55[a, b]], 1)
    )
    first, second = policy.theta[:5].softmax(0), policy.theta[5:].view(5, 5).softmax(1)
    visited_5 = anchor.theta[:5].detach().softmax(0)
    local = (first * first_5).sum() + (visited_5 * (second * second_55).sum(1)).sum()
    assert (found - torch.autograd.grad(local, policy.theta)[0]).abs().max() < 1e-10
    rewards_K2 = policy.rewards_K[:, None].expand(25, 2)
    one_ratio = _expected_gradient(importance_weighted, policy, anchor, rewards_K2)
    exact = policy.exact_gradient()
    assert (one_ratio - exact).abs().max() > 0.01, (
        "the gradient of the expected reward needs the product of ratios"
    )
    product_K2 = ratio_K2.prod(1, keepdims=True) * rewards_K2.numpy()
    assert exact.numpy() == pytest.approx(
        _drawn(anchor_K2, product_K2, _scores_K2P(policy)), abs=1e-10
    )


@pytest.mark.parametrize(
    ("surrogate", "cut"),
    [
        (partial(cispo, clip_high=0.5), lambda r, a: np.maximum(r - 1.5, 0) * a),
        (
            partial(dppo_tv, divergence_max=2.0, ratio_max=1.5),
            lambda r, a: np.maximum(r - 1.5, 0) * a,
        ),
        (ppo_clip, lambda r, a: r * a * ~_inside(r, a, 0.8, 1.2)),
        (topr_token, lambda r, a: np.where(a < 0, np.maximum(r - 1, 0), r - 1) * a),
    ],
    ids=_name,
)
def test_the_bias_of_truncation_is_the_part_that_was_cut(surrogate, cut):
    policy, anchor, ratio_K2, anchor_K2 = _scene(off_policy=True)
    advantages_K2 = np.random.default_rng(3).normal(size=(25, 2))
    found, whole = (
        _expected_gradient(s, policy, anchor, advantages_K2)
        for s in (surrogate, importance_weighted)
    )
    bias = _drawn(anchor_K2, cut(ratio_K2, advantages_K2), _scores_K2P(policy))
    assert np.abs(bias).max() > 0.01
    assert (whole - found).numpy() == pytest.approx(bias, abs=1e-10)


def test_toprs_bias_against_the_gradient_of_the_expected_reward():
    """Good trajectories come as often as the anchor draws them; bad ones as often as the rarer of
    both.
    """
    policy, anchor, ratio_K2, anchor_K2 = _scene(off_policy=True)
    advantage_K1 = policy.rewards_K.numpy()[:, None] - 0.4
    drawn_K1, own_K1 = (
        anchor_K2.prod(1, keepdims=True),
        (anchor_K2 * ratio_K2).prod(1, keepdims=True),
    )
    kept_K1 = np.where(advantage_K1 < 0, np.minimum(drawn_K1, own_K1), drawn_K1)
    bias = ((kept_K1 - own_K1) * advantage_K1 * _scores_K2P(policy).sum(1)).sum(0)
    found = (
        _expected_gradient(topr, policy, anchor, advantage_K1 + np.zeros((25, 2)))
        - policy.exact_gradient()
    )
    assert np.abs(bias).max() > 0.01
    assert found.numpy() == pytest.approx(bias, abs=1e-10)


def test_the_penalty_has_the_gradient_of_the_kl_from_the_anchor():
    policy, anchor, _, _ = _scene(off_policy=True)
    zeros_K2 = np.zeros((25, 2))
    found = -_expected_gradient(partial(anchor_kl, anchor_kl_coef=0.7), policy, anchor, zeros_K2)
    first, second = policy.theta[:5].log_softmax(0), policy.theta[5:].view(5, 5).log_softmax(1)
    first_old, second_old = (
        anchor.theta[:5].detach().log_softmax(0),
        anchor.theta[5:].detach().view(5, 5).log_softmax(1),
    )
    kl_S = (second_old.exp() * (second_old - second)).sum(1)
    exact = (first_old.exp() * (first_old - first)).sum() + (first_old.exp() * kl_S).sum()
    assert (found - 0.7 * torch.autograd.grad(exact, policy.theta)[0]).abs().max() < 1e-10
    batch, output = Golden.batch(), PolicyOutput(Golden.logprobs)
    metric = policy_metrics(output, batch, importance_weighted)["approx_kl"]
    assert float(by_token(anchor_kl(output, batch), batch)) == pytest.approx(metric)


# --- settings


@pytest.mark.parametrize(
    ("surrogate", "settings", "sentence"),
    [
        (ppo_dual_clip, {"dual_clip": 1.0}, r"dual_clip=1\.0 must be greater than 1"),
        (sapo, {"tau_neg": 0.0}, r"tau_neg=0\.0 must be greater than 0"),
    ],
)
def test_senseless_settings_are_refused(surrogate, settings, sentence):
    with pytest.raises(ConfigError, match=sentence):
        surrogate.changed(**settings)(PolicyOutput(Golden.logprobs), Golden.batch())

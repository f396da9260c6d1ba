"""Regularisers: which value and which gradient each has, by enumeration over five tokens; and their
silent bugs.
"""

from __future__ import annotations

import json
from dataclasses import replace
from functools import partial
from types import SimpleNamespace

import pytest
import torch
from trainer_cases import Golden, batch_of, group, logprobs_for

from agentrl.errors import ConfigError
from agentrl.trainers.algorithms.losses import by_token, importance_ratio, keep, ppo_clip
from agentrl.trainers.algorithms.regularisers import (
    KL_ESTIMATORS,
    entropy_bonus,
    kl_cov,
    kl_penalty,
    simko,
)
from agentrl.trainers.batch import PolicyOutput

# --- golden numbers


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({"kl_estimator": "k1", "kl_ratio": False}, 0.060000),
        ({"kl_estimator": "k2", "kl_ratio": False}, 0.023000),
        ({"kl_estimator": "k3", "kl_ratio": False}, 0.021314),
        ({}, 0.023579),
    ],
)
def test_golden_rows(settings, expected):
    found = by_token(
        kl_penalty(PolicyOutput(Golden.logprobs), Golden.batch(), kl_coef=1.0, **settings),
        Golden.batch(),
    )
    assert float(found) == pytest.approx(expected, abs=1e-6)


def test_published_vectors(data_dir):
    rows = {
        row["name"]: row
        for row in json.loads((data_dir / "numeric" / "vectors_shared.json").read_text())
    }
    inputs, expected = rows["kl_estimators"]["inputs"], rows["kl_estimators"]["expected"]
    logprobs_BT, ref_BT = (torch.tensor([inputs[name]]) for name in ("logprobs", "ref_logprobs"))
    batch = SimpleNamespace(ref_logprobs_BT=ref_BT, anchor_BT=logprobs_BT)
    for kind in KL_ESTIMATORS:
        found = kl_penalty(PolicyOutput(logprobs_BT), batch, kl_coef=1.0, kl_estimator=kind)
        assert found[0].tolist() == pytest.approx(expected[kind], rel=rows["kl_estimators"]["rtol"])


# --- enumeration: one token of five, drawn from the anchor


class OneToken:
    """π = softmax(θ) over five tokens; the anchor is π itself or another policy."""

    def __init__(self, on_policy: bool) -> None:
        generator = torch.Generator().manual_seed(0)
        theta, shift, ref, advantages = (
            torch.randn(5, generator=generator, dtype=torch.float64) for _ in range(4)
        )
        self.theta, self.ref_V = theta.requires_grad_(), ref.log_softmax(0)
        self.anchor_V = (theta.detach() + (0.0 if on_policy else 1.0) * shift).log_softmax(0)
        self.advantages_V = advantages

    def logprobs(self) -> torch.Tensor:
        return self.theta.log_softmax(0)

    def gradient(self, value) -> torch.Tensor:
        return torch.autograd.grad(value, self.theta)[0]

    def divergence(self, kind: str) -> torch.Tensor:
        """d/dθ of a divergence; `away` is that of -KL(anchor‖π), `k2` that of k2's own expectation
        under π.
        """
        logp_V, ref_V, anchor_V = self.logprobs(), self.ref_V, self.anchor_V
        values = {
            "reverse": (logp_V.exp() * (logp_V - ref_V)).sum(),
            "forward": (ref_V.exp() * (ref_V - logp_V)).sum(),
            "away": -(anchor_V.exp() * (anchor_V - logp_V)).sum(),
            "k2": (logp_V.exp() * (logp_V - ref_V).square() / 2).sum(),
        }
        return (
            self.gradient(values[kind]) if kind in values else torch.zeros(5, dtype=torch.float64)
        )

    def batch(self, **changes):
        """All five tokens, once each; tests weigh them by the anchor's probabilities."""
        row = {name: getattr(self, f"{name}_V")[None] for name in ("anchor", "advantages")}
        return SimpleNamespace(
            anchor_BT=row["anchor"],
            old_logprobs_BT=row["anchor"],
            ref_logprobs_BT=self.ref_V[None],
            **changes,
        )

    def expected(self, term) -> torch.Tensor:
        """Expected gradient of a term over tokens drawn from the anchor."""
        loss_V = term(PolicyOutput(self.logprobs()[None]), self.batch())[0]
        return self.gradient((self.anchor_V.exp() * loss_V).sum())


@pytest.mark.parametrize(
    ("kind", "ratio", "on_policy", "off_policy"),
    [
        ("k1", False, "zero", "away"),
        ("k2", False, "reverse", None),
        ("k3", False, "forward", None),
        ("k1", True, "reverse", "reverse"),
        ("k2", True, "k2", "k2"),
        ("k3", True, "reverse", "reverse"),
    ],
)
def test_each_kl_term_has_the_gradient_it_says(kind, ratio, on_policy, off_policy):
    term = partial(kl_penalty, kl_coef=1.0, kl_estimator=kind, kl_ratio=ratio)
    for case, claim in (
        (OneToken(on_policy=True), on_policy),
        (OneToken(on_policy=False), off_policy),
    ):
        found = case.expected(term)
        for name in ("reverse", "forward", "zero"):
            is_it = bool((found - case.divergence(name)).abs().max() < 1e-8)
            assert is_it == (claim == name), f"{kind}: {name}"
        if claim:
            assert (found - case.divergence(claim)).abs().max() < 1e-8


def test_values_are_those_of_the_divergence():
    for case in (OneToken(on_policy=True), OneToken(on_policy=False)):
        logp_V = case.logprobs().detach()
        exact = float((logp_V.exp() * (logp_V - case.ref_V)).sum())
        for kind in ("k1", "k3"):
            values_V = kl_penalty(
                PolicyOutput(logp_V[None]), case.batch(), kl_coef=1.0, kl_estimator=kind
            )[0]
            assert float((case.anchor_V.exp() * values_V).sum()) == pytest.approx(exact, abs=1e-10)


def test_straight_through_adds_nothing_to_rho_k3():
    """Token by token, the gradient of ρ·k3 is ρ times that of k2."""
    batch = batch_of(group(1.0, 0.0, 0.5))
    logprobs_BT = logprobs_for(batch)
    batch = replace(batch, ref_logprobs_BT=logprobs_for(batch, seed=7).detach())
    output = PolicyOutput(logprobs_BT)
    with_ratio = kl_penalty(output, batch, kl_coef=1.0)
    squares = kl_penalty(output, batch, kl_coef=1.0, kl_estimator="k2", kl_ratio=False)
    weighted = importance_ratio(output, batch).detach() * squares
    pairs = [
        torch.autograd.grad(keep(loss, batch.mask_BT).sum(), logprobs_BT)[0]
        for loss in (with_ratio, weighted)
    ]
    assert torch.allclose(*pairs, atol=1e-12)
    assert (pairs[0] != 0).any()


def test_entropy_bonus_has_the_gradient_of_the_entropy():
    case = OneToken(on_policy=True)
    logp_V = case.logprobs()
    entropy = -(logp_V.exp() * logp_V).sum()
    found = case.gradient(
        entropy_bonus(
            PolicyOutput(logp_V, entropy[None, None]), case.batch(), entropy_coef=0.3
        ).sum()
    )
    logp_V = case.logprobs()
    exact = case.gradient(0.3 * (logp_V.exp() * logp_V).sum())
    assert (found - exact).abs().max() < 1e-12


# --- KL-Cov and SimKO


def test_kl_cov_pulls_selected_tokens_back_to_the_anchor():
    selected_BT = torch.tensor([[True, False, True, True], [False, True, True, False]])
    batch = Golden.batch(selected_BT=selected_BT)
    logprobs_BT = Golden.logprobs.clone().requires_grad_()
    loss_BT = kl_cov(PolicyOutput(logprobs_BT), batch, kl_cov_coef=0.5)
    expected_BT = 0.5 * (Golden.logprobs - Golden.old).abs() * selected_BT
    assert torch.allclose(loss_BT, expected_BT)
    gradient_BT = torch.autograd.grad(loss_BT.sum(), logprobs_BT)[0]
    assert torch.equal(gradient_BT, 0.5 * (Golden.logprobs - Golden.old).sign() * selected_BT)
    at_anchor_BT = Golden.old.clone().requires_grad_()
    still_BT = kl_cov(PolicyOutput(at_anchor_BT), batch)
    assert (torch.autograd.grad(still_BT.sum(), at_anchor_BT)[0] == 0).all(), (
        "at the anchor there is no pull"
    )


def simko_loss(case, logp_V, selected=True, **options):
    """The loss of each of five tokens with its own advantage; all five tokens share one
    distribution.
    """
    top_BTK = logp_V.sort(descending=True).values[:3].expand(1, 5, 3)
    batch = Golden.batch(
        old_logprobs_BT=case.anchor_V[None],
        advantages_BT=case.advantages_V[None],
        selected_BT=torch.full((1, 5), selected),
    )
    return simko(PolicyOutput(logp_V[None], None, top_BTK), batch, **options)[0]


def simko_of_the_paper(case, smoothing, top1_penalty, clip):
    """The paper's ratio with its stop-gradients as constants: a plain function of θ, to
    differentiate numerically.
    """
    start_V = case.logprobs().detach()
    top = start_V.topk(3).indices

    def loss(theta) -> torch.Tensor:
        logp_V = theta.log_softmax(0)
        ratio_V = (logp_V - case.anchor_V).exp()
        frozen_V = (start_V - case.anchor_V).exp()
        mixed_V = torch.stack([frozen_V / frozen_V[k] * ratio_V[k] for k in top]).mean(0)
        praised_V = case.advantages_V > 0
        ratio_V = torch.where(praised_V, (1 - smoothing) * ratio_V + smoothing * mixed_V, ratio_V)
        blamed_V = (case.advantages_V < 0) & (torch.arange(5) == top[0])
        advantages_V = torch.where(blamed_V, top1_penalty * case.advantages_V, case.advantages_V)
        clipped_V = ratio_V.clamp(1 - clip, 1 + clip)
        loss_V = -torch.minimum(ratio_V * advantages_V, clipped_V * advantages_V)
        return (case.anchor_V.exp() * loss_V).sum()

    return loss


@pytest.mark.parametrize("clip", [0.2, 5.0])
@pytest.mark.parametrize("sign", [1.0, -1.0])
@pytest.mark.parametrize("on_policy", [True, False])
def test_simko_has_the_gradient_of_the_papers_ratio(on_policy, sign, clip):
    case = OneToken(on_policy)
    case.advantages_V = sign * case.advantages_V
    if on_policy:
        case.advantages_V[int(case.logprobs().argmax())] = -1.0
    options = {"smoothing": 0.3, "top1_penalty": 1.4}
    found_V = simko_loss(case, case.logprobs(), clip_low=min(clip, 0.99), clip_high=clip, **options)
    found = case.gradient((case.anchor_V.exp() * found_V).sum())
    loss, step = simko_of_the_paper(case, clip=clip if clip < 1 else 50.0, **options), 1e-6
    start = case.theta.detach()
    numeric = [
        (loss(start + step * e) - loss(start - step * e)) / (2 * step)
        for e in torch.eye(5).double()
    ]
    assert (found - torch.stack(numeric)).abs().max() < 1e-7
    assert float((case.anchor_V.exp() * found_V.detach()).sum()) == pytest.approx(
        float(loss(start)), abs=1e-12
    )


def test_simko_is_ppo_where_nothing_is_selected_and_lifts_what_was_not_sampled():
    case = OneToken(on_policy=True)
    plain = simko_loss(case, case.logprobs(), selected=False)
    batch = Golden.batch(old_logprobs_BT=case.anchor_V[None], advantages_BT=case.advantages_V[None])
    assert torch.equal(plain, ppo_clip(PolicyOutput(case.logprobs()[None]), batch)[0])
    best, second = case.logprobs().topk(2).indices.tolist()
    case.advantages_V = torch.zeros(5, dtype=torch.float64)
    case.advantages_V[best] = 1.0
    pulls = [
        -case.gradient(simko_loss(case, case.logprobs(), smoothing=share).sum())[second].item()
        for share in (0.0, 1.0)
    ]
    assert pulls[0] < 0 < pulls[1], (
        "praise of the likeliest token takes from the second; smoothed, it gives to it"
    )


def test_bad_settings_are_named():
    output = PolicyOutput(Golden.logprobs)
    with pytest.raises(ConfigError, match="kl_estimator='k4' must be k1, k2 or k3"):
        kl_penalty(output, Golden.batch(), kl_coef=1.0, kl_estimator="k4")
    with pytest.raises(ConfigError, match=r"smoothing=1\.5"):
        simko(output, Golden.batch(), smoothing=1.5)
    for term in (kl_cov, simko, entropy_bonus):
        with pytest.raises(ValueError, match="is None"):
            term(output, Golden.batch())
    assert simko.reads == {"top"}

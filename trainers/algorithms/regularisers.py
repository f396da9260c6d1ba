"""Regularisers: per-token losses that hold a policy near a reference, or keep its entropy up. Pure.

The KL estimators take log-probabilities; the terms built on them read the batch and contain their
coefficient. k1, k2, k3: http://joschu.net/blog/kl-approx.html.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Literal

import torch
from torch import Tensor

from agentrl.trainers.algorithms.losses import Clip, clipped_objective, importance_ratio
from agentrl.trainers.algorithms.parts import NonNegative, Options, Share, term
from agentrl.trainers.batch import PolicyOutput, TokenBatch


def kl_k1(logprobs_BT: Tensor, ref_logprobs_BT: Tensor) -> Tensor:
    """log π/π_ref: an unbiased value of KL(π‖π_ref), of either sign.

    As a loss it has no expected gradient on-policy, and off-policy that of -KL(π_anchor‖π): away
    from the sampler, whatever π_ref is. Use it as a metric, in the reward, or times ρ.
    """
    return logprobs_BT - ref_logprobs_BT


def kl_k2(logprobs_BT: Tensor, ref_logprobs_BT: Tensor) -> Tensor:
    """(log π/π_ref)²/2: a biased value, never negative.

    As a loss its expected gradient is that of KL(π‖π_ref) on-policy; off-policy it is no
    divergence's.
    """
    return (logprobs_BT - ref_logprobs_BT).square() / 2


def kl_k3(logprobs_BT: Tensor, ref_logprobs_BT: Tensor) -> Tensor:
    """x - log x - 1 with x = π_ref/π: an unbiased value, never negative, of low variance.

    As a loss its expected gradient is that of the *other* direction, KL(π_ref‖π), on-policy;
    off-policy it is no divergence's. Times ρ it is the one to train with, see `kl_penalty`.
    """
    log_x_BT = ref_logprobs_BT - logprobs_BT
    return torch.expm1(log_x_BT) - log_x_BT


KL_ESTIMATORS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "k1": kl_k1,
    "k2": kl_k2,
    "k3": kl_k3,
}


class KLPenalty(Options):
    kl_coef: NonNegative = 0.0
    """Coefficient of the KL to the reference."""
    kl_estimator: Literal["k1", "k2", "k3"] = "k3"
    """Estimator of the KL."""
    kl_ratio: bool = True
    """Whether it is multiplied by ρ, which makes its gradient that of KL(π‖π_ref)."""


@term(KLPenalty, reads=("reference",))
def kl_penalty(output: PolicyOutput, batch: TokenBatch, options: KLPenalty) -> Tensor:
    """kl_coef·ρ·k3: in expectation over π_anchor, both value and gradient are those of KL(π‖π_ref).

    Exact per token, at the states that were visited; as usual the effect of π on which states are
    visited is ignored. ρ·k1 is exact as well, with more noise; ρ·k2 has the gradient of the value
    that k2 has under π. Without ρ (`kl_ratio=False`) the gradients are those in the docstrings of
    the estimators: k3 is then the loss of GRPO's paper (TRL's `use_bias_correction_kl=False`).
    Token by token the gradient of ρ·k3 is ρ times that of k2, so a straight-through form (the value
    of k3 with the gradient of k2, verl's `k3+`) is what ρ·k3 already is on-policy, and ρ·k3 stays
    right off-policy.
    """
    if batch.ref_logprobs_BT is None:
        raise ValueError(
            "kl_penalty: batch.ref_logprobs_BT is None: score the batch under a reference, or set"
            " kl_coef = 0"
        )
    kl_BT = KL_ESTIMATORS[options.kl_estimator](output.logprobs_BT, batch.ref_logprobs_BT)
    if options.kl_ratio:
        kl_BT = importance_ratio(output, batch) * kl_BT
    return options.kl_coef * kl_BT


class KLCov(Options):
    kl_cov_coef: NonNegative = 1.0
    """Strength of the pull towards the anchor."""


@term(KLCov, reads=("anchor",), expects=("selection",))
def kl_cov(output: PolicyOutput, batch: TokenBatch, options: KLCov) -> Tensor:
    """KL-Cov: kl_cov_coef·|log π/π_anchor| at the tokens that `select_kl_cov` chose.

    https://arxiv.org/abs/2505.22617 (coefficient 1; verl's default is 0.1), together with an
    unclipped ratio. A pull of constant strength back to the anchor; at the anchor itself there is
    none, so it needs more than one optimizer step per round, or an anchor that is not the policy in
    training.
    """
    if batch.selected_BT is None:
        raise ValueError(
            "kl_cov: batch.selected_BT is None: add select_kl_cov to the corrections of the recipe"
        )
    distance_BT = (output.logprobs_BT - batch.anchor_BT).abs()
    return options.kl_cov_coef * distance_BT * batch.selected_BT


class Spread(Clip):
    smoothing: Share = 0.01
    """Share of a praised token's gradient that goes to the likely tokens."""
    top1_penalty: NonNegative = 1.1
    """Factor on a negative advantage where the token was the likeliest."""


@term(Spread, reads=("top",), expects=("selection",))
def simko(output: PolicyOutput, batch: TokenBatch, options: Spread) -> Tensor:
    """SimKO: PPO's clip whose gradient, at the tokens that `select_forks` chose, is spread over the
    likely tokens.

    https://arxiv.org/abs/2510.14807. Where A > 0, ρ becomes (1 - smoothing)·ρ + smoothing/K·Σ_k
    sg(ρ/ρ_k)·ρ_k over the K likeliest tokens that were scored (the paper takes 3). Its value is ρ,
    so what is clipped stays the same; its gradient is ρ times the smoothed one of log π. (ρ_k
    cancels, so nobody has to keep the anchor's top tokens.) Where A < 0 and the token is the
    likeliest one, A is multiplied by `top1_penalty`. The paper says correct and wrong; here the
    sign of A decides, which is the same where an answer is right or wrong. Takes the place of
    `ppo_clip`.
    """
    top_BTK = output.top_logprobs_BTK
    if batch.selected_BT is None or top_BTK is None:
        raise ValueError(
            "simko: batch.selected_BT or output.top_logprobs_BTK is None: add select_forks to the"
            " corrections, and score with the likeliest tokens"
        )
    spread_BT = (top_BTK - top_BTK.detach()).mean(-1)
    own_BT = output.logprobs_BT - output.logprobs_BT.detach()
    praised_BT = batch.selected_BT & (batch.advantages_BT > 0)
    moved_BT = torch.where(praised_BT, options.smoothing * (spread_BT - own_BT), 0.0)
    smoothed = replace(output, logprobs_BT=output.logprobs_BT + moved_BT)
    # The sampled token's log-probability and the same one among the top may differ in the last bit.
    likeliest_BT = output.logprobs_BT.detach() >= top_BTK.detach().amax(-1) - 1e-6
    blamed_BT = batch.selected_BT & (batch.advantages_BT < 0) & likeliest_BT
    blame_BT = options.top1_penalty * batch.advantages_BT
    penalised = replace(batch, advantages_BT=torch.where(blamed_BT, blame_BT, batch.advantages_BT))
    ratio_BT = importance_ratio(smoothed, penalised)
    return clipped_objective(ratio_BT, penalised, options.clip_low, options.clip_high)


class Imitate(Options):
    imitate_coef: NonNegative = 0.0
    """Coefficient of fine-tuning on successes."""


@term(Imitate)
def imitate(output: PolicyOutput, batch: TokenBatch, options: Imitate) -> Tensor:
    """-imitate_coef·(N/M)·log π on the M tokens, of the step's N, of episodes that passed:
    fine-tuning on successes.

    VAPO's positive-example loss (https://arxiv.org/abs/2504.05118, coefficient 0.1), whose divisor
    is M: aggregated `by_token`, where N is the divisor, that is the paper's mean over the tokens of
    correct episodes, however few they are. Whether an episode passed is decided by the unshaped
    score against the task's threshold, so a small penalty does not exclude a success, nor does a
    bonus admit a failure.
    """
    if batch.passed_E is None:
        raise ValueError("imitate: batch.passed_E is None: pack gives it")
    share = (batch.tokens_E * batch.passed_E).sum().clamp(min=1).double() / batch.n_tokens
    chosen_B1 = batch.passed_E[batch.episode_B, None]
    return torch.where(chosen_B1, -options.imitate_coef / share * output.logprobs_BT, 0.0)


class EntropyBonus(Options):
    entropy_coef: NonNegative = 0.0
    """Coefficient of the entropy bonus."""


@term(EntropyBonus, reads=("entropy_gradient",))
def entropy_bonus(output: PolicyOutput, batch: TokenBatch, options: EntropyBonus) -> Tensor:
    """-entropy_coef·H(π) at every trained token."""
    if output.entropy_BT is None:
        raise ValueError(
            "entropy_bonus: output.entropy_BT is None: score with entropy, or set entropy_coef = 0"
        )
    return -options.entropy_coef * output.entropy_BT


class LoadBalance(Options):
    load_balance_coef: NonNegative = 0.0
    """Coefficient of the routers' load-balance loss."""


@term(LoadBalance, reads=("router",))
def load_balance(output: PolicyOutput, batch: TokenBatch, options: LoadBalance) -> Tensor:
    """load_balance_coef·(load-balance loss of the model's routers) at every trained token: see
    `moe.with_router_loss`.

    The one term that is a statistic of its micro-batch: that loss is a product of two means over
    the micro-batch, so another split has another gradient, as in other trainers. Spread over
    trained tokens and aggregated like all terms, the micro-batches' losses add up to their mean,
    each weighed by its share of the step's tokens (`token`) or episodes (`episode`).
    """
    if output.router_loss is None:
        raise ValueError(
            "load_balance: output.router_loss is None: score with it, or leave load_balance_coef"
            " out"
        )
    router_loss = output.router_loss.to(output.logprobs_BT.dtype)
    return options.load_balance_coef * router_loss.expand(batch.mask_BT.shape)


class AnchorKL(Options):
    anchor_kl_coef: NonNegative = 1.0
    """Coefficient of KL(π_anchor‖π)."""


@term(AnchorKL)
def anchor_kl(output: PolicyOutput, batch: TokenBatch, options: AnchorKL) -> Tensor:
    """anchor_kl_coef·(ρ - 1 - log ρ): KL(π_anchor‖π), exact in value and gradient over π_anchor,
    and never negative.

    With the surrogate `importance_weighted` it is PPO's penalty form
    (https://arxiv.org/abs/1707.06347, eq. 8).
    """
    log_ratio_BT = output.logprobs_BT - batch.anchor_BT
    return options.anchor_kl_coef * (importance_ratio(output, batch) - 1 - log_ratio_BT)

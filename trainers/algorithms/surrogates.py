"""Surrogates per token: what a token's log-probability and advantage cost. Pure; the step is taken
on an aggregate.

Every function is a `Term`: it reads `output.logprobs_BT` (with gradient), `batch.anchor_BT` (what
ratios are against) and `batch.advantages_BT`, all exact zeros at mask 0, and returns a loss of
shape (B, T) that is 0 there. With the anchor equal to the policy, each has the gradient of
`policy_gradient`. PPO's own clip is in `losses`; surrogates whose ratio belongs to a whole episode
are in `sequence_surrogates`.
"""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor

from agentrl.errors import ConfigError
from agentrl.trainers.algorithms.losses import importance_ratio, ppo_clip
from agentrl.trainers.algorithms.parts import Term, needs
from agentrl.trainers.batch import PolicyOutput, TokenBatch


def weighted_policy_gradient(weights_BT: Tensor, output: PolicyOutput, batch: TokenBatch) -> Tensor:
    """-w·A·log π, where no gradient flows through the weight."""
    return -weights_BT.detach() * batch.advantages_BT * output.logprobs_BT


def policy_gradient(output: PolicyOutput, batch: TokenBatch) -> Tensor:
    """REINFORCE: -A·log π. Reads no anchor, so it is right only for tokens that this very policy
    sampled.
    """
    return -batch.advantages_BT * output.logprobs_BT


def importance_weighted(output: PolicyOutput, batch: TokenBatch) -> Tensor:
    """-ρA, unbounded: the gradient of E[A] under π at the states that the anchor visited. CPI,
    PPO's eq. 6.

    That π also changes which states come is left out; only the product of all ratios of an episode
    would undo that. With the regulariser `anchor_kl` it is PPO's penalty form.
    """
    return -importance_ratio(output, batch) * batch.advantages_BT


ppo_dual_clip: Term = partial(ppo_clip, dual_clip=3.0)
"""PPO with the dual clip that its paper proposes, https://arxiv.org/abs/1912.09729."""


def cispo(
    output: PolicyOutput, batch: TokenBatch, *, clip_low: float = 1.0, clip_high: float = 4.0
) -> Tensor:
    """CISPO: -sg(clip(ρ, 1-clip_low, 1+clip_high))·A·log π: no token loses its gradient.
    arxiv.org/abs/2506.13585.

    The paper has no lower bound and a wide upper one without a number; 1 + 4 is what SkyRL and ART
    take. verl starts from PPO's 0.2/0.2. TRL's bound is epsilon_high itself, not 1 + epsilon_high:
    `clip_high=4` is its epsilon_high=5, and there 0.28 only makes the loss smaller.
    """
    ratio_BT = importance_ratio(output, batch)
    return weighted_policy_gradient(ratio_BT.clamp(1 - clip_low, 1 + clip_high), output, batch)


def sapo(
    output: PolicyOutput, batch: TokenBatch, *, tau_pos: float = 1.0, tau_neg: float = 1.05
) -> Tensor:
    """SAPO: -A·σ(τ(ρ-1))·4/τ, a soft gate in place of a clip; τ by the sign of A. https://arxiv.org/abs/2511.20347.

    The gate's slope in ρ is 4σ(1-σ): 1 at ρ = 1, less on both sides and never 0.

    Raises:
        ConfigError: a temperature is 0.
    """
    if not (tau_pos > 0 and tau_neg > 0):
        raise ConfigError(
            f"tau_pos={tau_pos} and tau_neg={tau_neg} must be above 0: 0 is no gate at all"
        )
    ratio_BT = importance_ratio(output, batch)
    tau_BT = torch.full_like(ratio_BT, tau_neg).masked_fill(batch.advantages_BT > 0, tau_pos)
    return -batch.advantages_BT * torch.sigmoid(tau_BT * (ratio_BT - 1)) * 4 / tau_BT


def topr_token(output: PolicyOutput, batch: TokenBatch) -> Tensor:
    """-w·A·log π with w = 1 for A ≥ 0 and min(ρ, 1) for A < 0, per token: what ROLL calls TOPR (see
    `topr`).
    """
    ratio_BT = importance_ratio(output, batch)
    tapered_BT = torch.where(batch.advantages_BT < 0, ratio_BT.clamp(max=1.0), 1.0)
    return weighted_policy_gradient(tapered_BT, output, batch)


def dppo_tv(
    output: PolicyOutput,
    batch: TokenBatch,
    *,
    divergence_max: float = 0.15,
    ratio_max: float = 20.0,
) -> Tensor:
    """DPPO, binary total variation: -sg(min(ρ, ratio_max))·A·log π, without tokens that leave the
    trust region.

    A token is left out where |π - π_anchor| > divergence_max and the step would widen that.
    arxiv.org/abs/2602.04879. verl takes its bounds from PPO's clip options and its ratio_max is 3
    unless `clip_ratio_c` is set.
    """
    anchor_BTM, policy_BTM = _binary(batch.anchor_BT), _binary(output.logprobs_BT)
    return _inside(
        _total_variation(anchor_BTM, policy_BTM) <= divergence_max, ratio_max, output, batch
    )


def dppo_kl(
    output: PolicyOutput,
    batch: TokenBatch,
    *,
    divergence_max: float = 0.05,
    ratio_max: float = 20.0,
) -> Tensor:
    """`dppo_tv` with KL(π_anchor‖π) of the two outcomes "this token" and "any other"."""
    anchor_BTM, policy_BTM = _binary(batch.anchor_BT), _binary(output.logprobs_BT)
    return _inside(_kl(anchor_BTM, policy_BTM) <= divergence_max, ratio_max, output, batch)


@needs("anchor_top")
def dppo_topk_tv(
    output: PolicyOutput,
    batch: TokenBatch,
    *,
    divergence_max: float = 0.15,
    ratio_max: float = 20.0,
) -> Tensor:
    """`dppo_tv` over more outcomes: each of the anchor's K likeliest tokens, the sampled token, and
    all the rest.

    More outcomes never lower a divergence, so this bound is nearer to that over the vocabulary.
    Without the sampled token as an outcome of its own, a move of an unlikely token would be lost in
    the rest.

    Raises:
        ValueError: `batch.top_ids_BTK`, `batch.top_logprobs_BTK` or `output.top_logprobs_BTK` is
            missing.
    """
    anchor_BTM, policy_BTM = _top_outcomes(output, batch)
    return _inside(
        _total_variation(anchor_BTM, policy_BTM) <= divergence_max, ratio_max, output, batch
    )


@needs("anchor_top")
def dppo_topk_kl(
    output: PolicyOutput,
    batch: TokenBatch,
    *,
    divergence_max: float = 0.05,
    ratio_max: float = 20.0,
) -> Tensor:
    """`dppo_topk_tv` with KL(π_anchor‖π).

    Raises:
        ValueError: `batch.top_ids_BTK`, `batch.top_logprobs_BTK` or `output.top_logprobs_BTK` is
            missing.
    """
    anchor_BTM, policy_BTM = _top_outcomes(output, batch)
    return _inside(_kl(anchor_BTM, policy_BTM) <= divergence_max, ratio_max, output, batch)


def _inside(near_BT: Tensor, ratio_max: float, output: PolicyOutput, batch: TokenBatch) -> Tensor:
    """The weighted policy gradient of tokens that are near the anchor, or that the step brings back
    towards it.
    """
    away_BT = (output.logprobs_BT.detach() - batch.anchor_BT) * batch.advantages_BT > 0
    weights_BT = importance_ratio(output, batch).clamp(max=ratio_max)
    return weighted_policy_gradient(torch.where(near_BT | ~away_BT, weights_BT, 0.0), output, batch)


def _binary(logprobs_BT: Tensor) -> Tensor:
    """Probabilities of the sampled token and of any other, (B, T, 2)."""
    return _with_rest(logprobs_BT.detach().exp()[..., None])


def _top_outcomes(output: PolicyOutput, batch: TokenBatch) -> tuple[Tensor, Tensor]:
    """Probabilities (B, T, K + 2) under anchor and policy: top tokens, the sampled one if it is
    none of them, rest.
    """
    if (
        output.top_logprobs_BTK is None
        or batch.top_logprobs_BTK is None
        or batch.top_ids_BTK is None
    ):
        raise ValueError(
            "dppo_topk: output.top_logprobs_BTK, batch.top_logprobs_BTK or batch.top_ids_BTK is"
            " None: score the anchor's likeliest tokens under both, or use dppo_tv or dppo_kl"
        )
    listed_BT = (batch.top_ids_BTK == batch.ids_BT[..., None]).any(-1)

    def outcomes(top_BTK: Tensor, sampled_BT: Tensor) -> Tensor:
        sampled_BT = torch.where(listed_BT, 0.0, sampled_BT.exp())
        return _with_rest(torch.cat((top_BTK.exp(), sampled_BT[..., None]), -1).detach())

    anchor_BTM = outcomes(batch.top_logprobs_BTK, batch.anchor_BT)
    return anchor_BTM, outcomes(output.top_logprobs_BTK, output.logprobs_BT)


def _with_rest(probabilities_BTM: Tensor) -> Tensor:
    rest_BT1 = (1 - probabilities_BTM.sum(-1, keepdim=True)).clamp(min=0.0)
    return torch.cat((probabilities_BTM, rest_BT1), -1)


def _total_variation(anchor_BTM: Tensor, policy_BTM: Tensor) -> Tensor:
    return (policy_BTM - anchor_BTM).abs().sum(-1) / 2


def _kl(anchor_BTM: Tensor, policy_BTM: Tensor) -> Tensor:
    smallest = torch.finfo(policy_BTM.dtype).tiny
    return torch.xlogy(anchor_BTM, anchor_BTM / policy_BTM.clamp(min=smallest)).sum(-1)

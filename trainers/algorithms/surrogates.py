"""Surrogates: what a token's log-probability and advantage cost. Pure.

Every function is a `LossTerm`: it reads `output.logprobs_BT` (with gradient), `batch.anchor_BT`
(what ratios are against) and `batch.advantages_BT`, all exact zeros at mask 0; it returns a loss of
shape (B, T) that is 0 there. With the anchor equal to the policy, each has the gradient of
`policy_gradient`. PPO's own clip is in `losses`.

In the second half the ratio belongs to a whole episode: its trained tokens over all its rows. These
must be in the batch together (`TokenBatch.split` keeps them so). Tool output, padding and the
number of rows change no ratio. Bounds on such ratios are narrower than the rounding between sampler
and trainer, so the anchor is the trainer's own (`reads=("anchor",)`). `gspo` and `gmpo` give every
token the mean advantage of its episode, because their ratio is one for all tokens.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from agentrl.trainers.algorithms.losses import (
    MAX_LOG_RATIO,
    Clip,
    clipped_objective,
    importance_ratio,
    keep,
    ppo_clip,
)
from agentrl.trainers.algorithms.parts import Bound, NonNegative, Options, Positive, term
from agentrl.trainers.batch import PolicyOutput, TokenBatch


def weighted_policy_gradient(weights_BT: Tensor, output: PolicyOutput, batch: TokenBatch) -> Tensor:
    """-w·A·log π, where no gradient flows through the weight."""
    return -weights_BT.detach() * batch.advantages_BT * output.logprobs_BT


@term()
def policy_gradient(output: PolicyOutput, batch: TokenBatch) -> Tensor:
    """REINFORCE: -A·log π. Reads no anchor, so it is right only for tokens that this very policy
    sampled.
    """
    return -batch.advantages_BT * output.logprobs_BT


@term()
def importance_weighted(output: PolicyOutput, batch: TokenBatch) -> Tensor:
    """-ρA, unbounded: the gradient of E[A] under π at the states that the anchor visited. CPI,
    PPO's eq. 6.

    That π also changes which states come is left out; only the product of all ratios of an episode
    would undo that. With the regulariser `anchor_kl` it is PPO's penalty form.
    """
    return -importance_ratio(output, batch) * batch.advantages_BT


ppo_dual_clip = replace(ppo_clip.changed(dual_clip=3.0), name="ppo_dual_clip")
"""PPO with the dual clip that its paper proposes, https://arxiv.org/abs/1912.09729."""


class WideClip(Clip):
    clip_low: Bound = 1.0
    """A ratio counts as 1 - clip_low below that; 1: no lower bound."""
    clip_high: Bound = 4.0
    """A ratio counts as 1 + clip_high above that."""


@term(WideClip)
def cispo(output: PolicyOutput, batch: TokenBatch, options: WideClip) -> Tensor:
    """CISPO: -sg(clip(ρ, 1-clip_low, 1+clip_high))·A·log π: no token loses its gradient.

    https://arxiv.org/abs/2506.13585. The paper has no lower bound and gives no number for its wide
    upper one; 1 + 4 is what SkyRL and ART use. verl starts from PPO's 0.2/0.2. TRL's bound is
    epsilon_high itself, not 1 + epsilon_high: `clip_high=4` is its epsilon_high=5, and there 0.28
    only makes the loss smaller.
    """
    ratio_BT = importance_ratio(output, batch)
    bounded_BT = ratio_BT.clamp(1 - options.clip_low, 1 + options.clip_high)
    return weighted_policy_gradient(bounded_BT, output, batch)


class Gate(Options):
    tau_pos: Positive = 1.0
    """Temperature where the advantage is positive."""
    tau_neg: Positive = 1.05
    """Temperature elsewhere; higher fades faster."""


@term(Gate)
def sapo(output: PolicyOutput, batch: TokenBatch, options: Gate) -> Tensor:
    """SAPO: -A·σ(τ(ρ-1))·4/τ, a soft gate instead of a clip; τ by the sign of A.

    https://arxiv.org/abs/2511.20347. The gate's slope in ρ is 4σ(1-σ): 1 at ρ = 1, less on both
    sides and never 0.
    """
    ratio_BT = importance_ratio(output, batch)
    tau_BT = torch.full_like(ratio_BT, options.tau_neg)
    tau_BT = tau_BT.masked_fill(batch.advantages_BT > 0, options.tau_pos)
    return -batch.advantages_BT * torch.sigmoid(tau_BT * (ratio_BT - 1)) * 4 / tau_BT


@term()
def topr_token(output: PolicyOutput, batch: TokenBatch) -> Tensor:
    """-w·A·log π with w = 1 for A ≥ 0 and min(ρ, 1) for A < 0, per token: what ROLL calls TOPR (see
    `topr`).
    """
    ratio_BT = importance_ratio(output, batch)
    tapered_BT = torch.where(batch.advantages_BT < 0, ratio_BT.clamp(max=1.0), 1.0)
    return weighted_policy_gradient(tapered_BT, output, batch)


class TrustRegion(Options):
    divergence_max: Bound = 0.15
    """Largest divergence from the anchor at which a token may still move away from it."""
    ratio_max: Bound = 20.0
    """Largest weight of a token."""


class NatsTrustRegion(TrustRegion):
    divergence_max: Bound = 0.05
    """Largest KL(π_anchor‖π), in nats, at which a token may still move away from the anchor."""


@term(TrustRegion)
def dppo_tv(output: PolicyOutput, batch: TokenBatch, options: TrustRegion) -> Tensor:
    """DPPO, binary total variation: -sg(min(ρ, ratio_max))·A·log π, without tokens that leave the
    trust region.

    https://arxiv.org/abs/2602.04879. A token is left out where |π - π_anchor| > divergence_max and
    the step would widen that. verl takes its bounds from PPO's clip options, and its ratio_max is 3
    unless `clip_ratio_c` is set.
    """
    anchor_BTM, policy_BTM = _binary(batch.anchor_BT), _binary(output.logprobs_BT)
    return _inside(_total_variation(anchor_BTM, policy_BTM), options, output, batch)


@term(NatsTrustRegion)
def dppo_kl(output: PolicyOutput, batch: TokenBatch, options: NatsTrustRegion) -> Tensor:
    """`dppo_tv` with KL(π_anchor‖π) of the two outcomes "this token" and "any other"."""
    anchor_BTM, policy_BTM = _binary(batch.anchor_BT), _binary(output.logprobs_BT)
    return _inside(_kl(anchor_BTM, policy_BTM), options, output, batch)


@term(TrustRegion, reads=("anchor_top",))
def dppo_topk_tv(output: PolicyOutput, batch: TokenBatch, options: TrustRegion) -> Tensor:
    """`dppo_tv` over more outcomes: each of the anchor's K likeliest tokens, the sampled token, and
    all the rest.

    More outcomes never lower a divergence, so this bound is nearer to that over the vocabulary.
    Without the sampled token as an outcome of its own, a move of an unlikely token would be lost in
    the rest. Reads `batch.top_ids_BTK`, `batch.top_logprobs_BTK` and `output.top_logprobs_BTK`.
    """
    anchor_BTM, policy_BTM = _top_outcomes(output, batch)
    return _inside(_total_variation(anchor_BTM, policy_BTM), options, output, batch)


@term(NatsTrustRegion, reads=("anchor_top",))
def dppo_topk_kl(output: PolicyOutput, batch: TokenBatch, options: NatsTrustRegion) -> Tensor:
    """`dppo_topk_tv` with KL(π_anchor‖π)."""
    anchor_BTM, policy_BTM = _top_outcomes(output, batch)
    return _inside(_kl(anchor_BTM, policy_BTM), options, output, batch)


def _inside(
    divergence_BT: Tensor, options: TrustRegion, output: PolicyOutput, batch: TokenBatch
) -> Tensor:
    """The weighted policy gradient of tokens that are near the anchor, or that the step brings back
    towards it.
    """
    near_BT = divergence_BT <= options.divergence_max
    away_BT = (output.logprobs_BT.detach() - batch.anchor_BT) * batch.advantages_BT > 0
    weights_BT = importance_ratio(output, batch).clamp(max=options.ratio_max)
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


# --- one ratio per episode ---


def episode_sum(values_BT: Tensor, batch: TokenBatch) -> Tensor:
    """Σ over the trained tokens of the episode that a row belongs to, over all rows of that
    episode: (B, 1).
    """
    sums_B = keep(values_BT, batch.mask_BT).sum(1)
    sums_E = sums_B.new_zeros(len(batch.tokens_E)).index_add(0, batch.episode_B, sums_B)
    return sums_E[batch.episode_B, None]


def episode_mean(values_BT: Tensor, batch: TokenBatch) -> Tensor:
    """Mean over the trained tokens of the episode that a row belongs to, over all rows of that
    episode: (B, 1).
    """
    return episode_sum(values_BT, batch) / batch.episode_tokens_B[:, None]


def sequence_ratio(output: PolicyOutput, batch: TokenBatch) -> Tensor:
    """GSPO's ratio (B, 1): exp of the episode's mean log π/π_anchor, which has the unit of a
    token's ratio.
    """
    return _exp(episode_mean(output.logprobs_BT - batch.anchor_BT, batch))


class NarrowClip(Clip):
    clip_low: Bound = 3e-4
    """The episode's ratio earns nothing more below 1 - clip_low."""
    clip_high: Bound = 4e-4
    """The episode's ratio earns nothing more above 1 + clip_high."""


@term(NarrowClip, reads=("anchor",))
def gspo(output: PolicyOutput, batch: TokenBatch, options: NarrowClip) -> Tensor:
    """GSPO: PPO's clip on the episode's ratio; gradient flows through all its tokens.

    https://arxiv.org/abs/2507.18071. Aggregated `by_episode` it is the paper's loss, aggregated
    `by_episode_sum` LUSPO's (https://arxiv.org/abs/2602.05261). TRL's
    `importance_sampling_level="sequence"` is this function; its means are over rows.
    """
    ratio_B1 = sequence_ratio(output, batch)
    return clipped_objective(ratio_B1, batch, options.clip_low, options.clip_high)


@term(NarrowClip, reads=("anchor",))
def gspo_token(output: PolicyOutput, batch: TokenBatch, options: NarrowClip) -> Tensor:
    """GSPO-token: value and clip of `gspo`, gradient of each token by its own advantage: s =
    sg(s_episode)·π/sg(π).

    With one advantage per episode its gradient is that of `gspo`. verl's `gspo` is this function.
    """
    through_BT = (output.logprobs_BT - output.logprobs_BT.detach()).exp()
    ratio_BT = sequence_ratio(output, batch).detach() * through_BT
    return clipped_objective(ratio_BT, batch, options.clip_low, options.clip_high)


class LogClip(Clip):
    clip_low: Bound = 0.4
    """Lower bound of log ρ is -clip_low."""
    clip_high: Bound = 0.4
    """Upper bound of log ρ."""


@term(LogClip, reads=("anchor",))
def gmpo(output: PolicyOutput, batch: TokenBatch, options: LogClip) -> Tensor:
    """GMPO: -A·(geometric mean of the episode's ratios, each clipped on its own).

    https://arxiv.org/abs/2507.20673. The bounds are on log ρ; a ratio is clipped only where that
    lowers the objective, by the sign of the episode's mean advantage. verl clips by the sign of
    each token's advantage, which is the same for one advantage per episode, and always takes the
    mean over rows: aggregated `by_episode` this is the paper's loss.
    """
    log_ratio_BT = output.logprobs_BT - batch.anchor_BT
    bounded_BT = log_ratio_BT.clamp(-options.clip_low, options.clip_high)
    lower_BT = torch.minimum(log_ratio_BT, bounded_BT)
    upper_BT = torch.maximum(log_ratio_BT, bounded_BT)
    positive_B1 = episode_mean(batch.advantages_BT, batch) > 0
    clipped_BT = torch.where(positive_B1, lower_BT, upper_BT)
    return -_exp(episode_mean(clipped_BT, batch)) * batch.advantages_BT


@term(reads=("anchor",))
def topr(output: PolicyOutput, batch: TokenBatch) -> Tensor:
    """TOPR: -w·A·log π with w = 1 for A ≥ 0 and, for A < 0, min(π/π_anchor, 1) of the whole
    episode.

    https://arxiv.org/abs/2503.14286. Good episodes are learnt as in fine-tuning; bad ones are
    forgotten no faster than the policy still produces them. The ratio is the product over all
    tokens, which in long episodes is soon 0; `topr_token` has one per token.
    """
    product_B1 = episode_sum(output.logprobs_BT - batch.anchor_BT, batch).clamp(max=0.0).exp()
    return weighted_policy_gradient(
        torch.where(batch.advantages_BT < 0, product_B1, 1.0), output, batch
    )


class SoftWeight(Options):
    k_pos: NonNegative = 2.0
    """k where the advantage is not negative."""
    lambda_pos: NonNegative = 3.0
    """λ where the advantage is not negative."""
    k_neg: NonNegative = 3.0
    """k where the advantage is negative."""
    lambda_neg: NonNegative = 2.0
    """λ where the advantage is negative."""


@term(SoftWeight, reads=("anchor",))
def vespo(output: PolicyOutput, batch: TokenBatch, options: SoftWeight) -> Tensor:
    """VESPO: -sg(φ(w))·A·log π with φ(w) = w^k·exp(λ(1-w)) and w the product of the episode's
    ratios.

    https://arxiv.org/abs/2602.10693. φ(1) = 1, and both tails go to 0 smoothly; k and λ by the sign
    of A.
    """
    log_w_B1 = episode_sum(output.logprobs_BT - batch.anchor_BT, batch)
    log_w_B1 = log_w_B1.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
    negative_BT = batch.advantages_BT < 0
    k_BT = torch.full_like(batch.advantages_BT, options.k_pos)
    k_BT = k_BT.masked_fill(negative_BT, options.k_neg)
    lambda_BT = torch.full_like(batch.advantages_BT, options.lambda_pos)
    lambda_BT = lambda_BT.masked_fill(negative_BT, options.lambda_neg)
    weight_BT = (k_BT * log_w_B1 - lambda_BT * log_w_B1.expm1()).exp()
    return weighted_policy_gradient(weight_BT, output, batch)


def _exp(log_ratio_B1: Tensor) -> Tensor:
    return log_ratio_B1.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()

"""Surrogates whose ratio belongs to a whole episode: its trained tokens over all its rows, and
nothing else.

Every function is a `Term` as in `surrogates`. The rows of an episode must be in the batch together
(`TokenBatch.split` keeps them so); tool output, padding and the number of rows change no ratio.
Bounds on them are narrower than the rounding between sampler and trainer, so the anchor is the
trainer's own (`@needs("anchor")`). With the anchor equal to the policy, the gradient is that of
`policy_gradient`; `gspo` and `gmpo` give every token the mean advantage of its episode, because
their ratio is one for all tokens.
"""

from __future__ import annotations

import torch
from torch import Tensor

from agentrl.trainers.algorithms.losses import MAX_LOG_RATIO, clipped_objective, keep
from agentrl.trainers.algorithms.parts import needs
from agentrl.trainers.algorithms.surrogates import weighted_policy_gradient
from agentrl.trainers.batch import PolicyOutput, TokenBatch


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


@needs("anchor")
def gspo(
    output: PolicyOutput, batch: TokenBatch, *, clip_low: float = 3e-4, clip_high: float = 4e-4
) -> Tensor:
    """GSPO: PPO's clip on the episode's ratio; gradient flows through all its tokens. https://arxiv.org/abs/2507.18071.

    Aggregated `by_episode` it is the paper's loss, `by_episode_sum` LUSPO's (https://arxiv.org/abs/2602.05261).
    TRL's `importance_sampling_level="sequence"` is this function; its means are over rows.
    """
    return clipped_objective(sequence_ratio(output, batch), batch, clip_low, clip_high)


@needs("anchor")
def gspo_token(
    output: PolicyOutput, batch: TokenBatch, *, clip_low: float = 3e-4, clip_high: float = 4e-4
) -> Tensor:
    """GSPO-token: value and clip of `gspo`, gradient of each token by its own advantage: s =
    sg(s_episode)·π/sg(π).

    With one advantage per episode its gradient is that of `gspo`. verl's `gspo` is this function.
    """
    through_BT = (output.logprobs_BT - output.logprobs_BT.detach()).exp()
    return clipped_objective(
        sequence_ratio(output, batch).detach() * through_BT, batch, clip_low, clip_high
    )


@needs("anchor")
def gmpo(
    output: PolicyOutput, batch: TokenBatch, *, clip_low: float = 0.4, clip_high: float = 0.4
) -> Tensor:
    """GMPO: -A·(geometric mean of the episode's ratios, each clipped on its own). https://arxiv.org/abs/2507.20673.

    The bounds are on log ρ; a ratio is clipped only where that lowers the objective, by the sign of
    the episode's mean advantage. verl clips by the sign of each token's advantage, which is the
    same for one advantage per episode, and always takes the mean over rows: aggregated `by_episode`
    this is the paper's loss.
    """
    log_ratio_BT = output.logprobs_BT - batch.anchor_BT
    bounded_BT = log_ratio_BT.clamp(-clip_low, clip_high)
    lower_BT, upper_BT = (
        torch.minimum(log_ratio_BT, bounded_BT),
        torch.maximum(log_ratio_BT, bounded_BT),
    )
    positive_B1 = episode_mean(batch.advantages_BT, batch) > 0
    clipped_BT = torch.where(positive_B1, lower_BT, upper_BT)
    return -_exp(episode_mean(clipped_BT, batch)) * batch.advantages_BT


@needs("anchor")
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


@needs("anchor")
def vespo(
    output: PolicyOutput,
    batch: TokenBatch,
    *,
    k_pos: float = 2.0,
    lambda_pos: float = 3.0,
    k_neg: float = 3.0,
    lambda_neg: float = 2.0,
) -> Tensor:
    """VESPO: -sg(φ(w))·A·log π with φ(w) = w^k·exp(λ(1-w)) and w the product of the episode's
    ratios.

    φ(1) = 1, and both tails go to 0 smoothly; k and λ by the sign of A. https://arxiv.org/abs/2602.10693.
    """
    log_w_B1 = episode_sum(output.logprobs_BT - batch.anchor_BT, batch).clamp(
        -MAX_LOG_RATIO, MAX_LOG_RATIO
    )
    negative_BT = batch.advantages_BT < 0
    k_BT = torch.full_like(batch.advantages_BT, k_pos).masked_fill(negative_BT, k_neg)
    lambda_BT = torch.full_like(batch.advantages_BT, lambda_pos).masked_fill(
        negative_BT, lambda_neg
    )
    return weighted_policy_gradient(
        (k_BT * log_w_B1 - lambda_BT * log_w_B1.expm1()).exp(), output, batch
    )


def _exp(log_ratio_B1: Tensor) -> Tensor:
    return log_ratio_B1.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()

"""Surrogates: what a token's log-probability and advantage cost, per token. Pure; the step is taken on their mean.

Every function is a `Term`: it reads `output.logprobs_BT` (with gradient), `batch.anchor_BT` (what ratios are against)
and `batch.advantages_BT`, all exact zeros at mask 0, and returns a loss of shape (B, T).
"""

from __future__ import annotations

import torch
from torch import Tensor

from agentrl.trainers.batch import TokenBatch
from agentrl.trainers.losses import MAX_LOG_RATIO
from agentrl.trainers.scoring import PolicyOutput


def importance_ratio(output: PolicyOutput, batch: TokenBatch) -> Tensor:
    """ρ = π/π_anchor per token; log ρ is clamped to ±20, beyond which it has no gradient."""
    return (output.logprobs_BT - batch.anchor_BT).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()


def ppo_clip(output: PolicyOutput, batch: TokenBatch, *, clip_low: float = 0.2, clip_high: float = 0.2) -> Tensor:
    """PPO: -min(ρA, clip(ρ, 1-clip_low, 1+clip_high)A) per token. https://arxiv.org/abs/1707.06347.

    Unequal bounds are DAPO's clip-higher (https://arxiv.org/abs/2503.14476).
    """
    ratio_BT = importance_ratio(output, batch)
    clipped_BT = ratio_BT.clamp(1 - clip_low, 1 + clip_high)
    return -torch.minimum(ratio_BT * batch.advantages_BT, clipped_BT * batch.advantages_BT)

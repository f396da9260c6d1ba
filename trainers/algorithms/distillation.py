"""On-policy distillation: the student samples, a teacher scores the very same tokens. Pure.

Prompts are rendered by the student's template and never again: the teacher reads ids. Letters: V
categories of a distribution.
"""

from __future__ import annotations

import math
from dataclasses import replace

import torch
from pydantic import BaseModel, Field
from torch import Tensor

from agentrl.errors import ConfigError
from agentrl.trainers.algorithms.parts import needs
from agentrl.trainers.algorithms.timeline import Timeline, discounted
from agentrl.trainers.batch import PolicyOutput, TokenBatch
from agentrl.trainers.config import STRICT


class TeacherSettings(BaseModel):
    """The teacher of a recipe that learns from one."""

    model_config = STRICT

    model: str = ""
    """Folder or hub name of a model with the policy's own tokenizer."""
    top: int = Field(default=0, ge=0)
    """Of `gkd`: how many of the teacher's likeliest tokens are told apart, all others being one
    category; 0: the whole vocabulary, at 4 bytes for each entry of it and each token of a
    micro-batch, several times over."""
    episodes: str = ""
    """`episodes.jsonl` of the teacher or of a reference solution, in the policy's tokens."""
    share: float = Field(default=0.0, ge=0, lt=1)
    """Of these episodes among all of a round (1 - λ of GKD); they are drawn at random."""


@needs("teacher")
def teacher_credit(
    batch: TokenBatch, *, teacher_coef: float = 1.0, teacher_gamma: float = 0.0
) -> TokenBatch:
    """A + teacher_coef · Σ_k teacher_gamma^k · log(π_T/π) of the token and those after it: the
    reverse KL per sampled token, as credit. A is 0 where no other part gave any.

    π is the policy that the update starts from. At teacher_gamma 0 the expected gradient is that of
    KL(π‖π_T) at the states that were visited (https://thinkingmachines.ai/blog/on-policy-distillation);
    at 1, with the aggregate `episode_sum`, that of KL(π‖π_T) over whole episodes, the effect on
    later states included (https://arxiv.org/abs/2306.08543, without its normalisation by length).
    Observations take no time. Tokens that the policy did not sample get no credit.

    Raises:
        ValueError: nobody scored the batch under a teacher.
        ConfigError: teacher_gamma is above 1.
    """
    if batch.teacher_logprobs_BT is None:
        raise ValueError("teacher_credit: batch.teacher_logprobs_BT is None: score it by a teacher")
    if teacher_gamma > 1:
        raise ConfigError(f"teacher_gamma={teacher_gamma} must be from 0 to 1")
    line = Timeline.of(batch)
    ratio_N = line.read(batch.teacher_logprobs_BT) - line.read(batch.anchor_BT)
    ratio_N = torch.where(line.read(batch.version_BT) >= 0, ratio_N, 0.0)
    earned_N = discounted(ratio_N, torch.where(line.last_N, 0.0, teacher_gamma))
    before_BT = batch.advantages_BT.nan_to_num(nan=0.0)
    return replace(batch, advantages_BT=before_BT + teacher_coef * line.write(earned_N))


@needs("teacher_top")
def gkd(
    output: PolicyOutput, batch: TokenBatch, *, gkd_coef: float = 0.0, gkd_beta: float = 1.0
) -> Tensor:
    """gkd_coef · JSD_β(π_T‖π) over the vocabulary: at gkd_beta 1 the reverse KL(π‖π_T), at 0 the
    forward KL(π_T‖π), and between them β·KL(π_T‖M) + (1 - β)·KL(π‖M), M = β·π_T + (1 - β)·π.

    https://arxiv.org/abs/2306.13649, eq. 1, with the ends of TRL's `generalized_jsd_loss`, where
    the formula itself is 0. Exact at every trained token, whoever sampled it; that π also changes
    which states come is left out, as in the paper. With `teacher.top` all other tokens are one
    category, which never raises a divergence.

    Raises:
        ValueError: nobody scored the vocabulary under policy and teacher.
        ConfigError: gkd_beta is above 1.
    """
    if output.top_logprobs_BTK is None or batch.teacher_top_logprobs_BTK is None:
        raise ValueError(
            "gkd: output.top_logprobs_BTK or batch.teacher_top_logprobs_BTK is None: score the"
            " vocabulary under both"
        )
    if gkd_beta > 1:
        raise ConfigError(f"gkd_beta={gkd_beta} must be from 0 to 1")
    teacher_BTV, policy_BTV = map(
        with_rest, (batch.teacher_top_logprobs_BTK.to(output.logprobs_BT), output.top_logprobs_BTK)
    )
    return gkd_coef * generalised_jsd(teacher_BTV, policy_BTV, gkd_beta)


def generalised_jsd(teacher_SV: Tensor, policy_SV: Tensor, beta: float) -> Tensor:
    """JSD_β of log-probabilities (..., V), summed over V: see `gkd`.

    Args:
        beta: from 0, the forward KL, to 1, the reverse one.
    """
    if beta == 0:
        return _kl(teacher_SV, policy_SV)
    if beta == 1:
        return _kl(policy_SV, teacher_SV)
    mixed_SV = torch.logaddexp(teacher_SV + math.log(beta), policy_SV + math.log1p(-beta))
    return beta * _kl(teacher_SV, mixed_SV) + (1 - beta) * _kl(policy_SV, mixed_SV)


def _kl(of_SV: Tensor, from_SV: Tensor) -> Tensor:
    return (of_SV.exp() * (of_SV - from_SV)).sum(-1)


def with_rest(logprobs_SK: Tensor) -> Tensor:
    """Log-probabilities (..., K) of some tokens, and behind them that of all others together.

    What is left of 1 is at least `TINY`: rounding leaves nothing of the other tokens, or less.
    """
    left_S1 = 1 - logprobs_SK.exp().sum(-1, keepdim=True)
    return torch.cat((logprobs_SK, left_S1.clamp(min=TINY).log()), -1)


TINY = 1e-6
"""About what float32 leaves of a sum of probabilities that is 1."""

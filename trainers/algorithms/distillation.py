"""On-policy distillation: the student samples, and a teacher scores the very same tokens. Pure.

Prompts are rendered once, by the student's template: the teacher reads ids. Letters: V categories
of a distribution.
"""

from __future__ import annotations

import math
from dataclasses import replace

import torch
from pydantic import BaseModel, Field
from torch import Tensor

from agentrl.settings import STRICT
from agentrl.trainers.algorithms.parts import NonNegative, Options, Share, step, term
from agentrl.trainers.algorithms.timeline import Timeline, discounted
from agentrl.trainers.batch import PolicyOutput, TokenBatch

TINY = 1e-6
"""About what float32 leaves of a sum of probabilities that is 1."""


class TeacherSettings(BaseModel):
    """The teacher of a recipe that learns from one."""

    model_config = STRICT

    model: str = ""
    """Folder or hub name of a model with the policy's own tokenizer."""
    top: int = Field(default=0, ge=0)
    """Number of the teacher's likeliest tokens that `gkd` distinguishes; the rest is one category
    (0 = the whole vocabulary, at several times 4 bytes per entry and token of a micro-batch)."""
    episodes: str = ""
    """Recorded episodes of the teacher, or of a reference solution, in the policy's tokens."""
    share: float = Field(default=0.0, ge=0, lt=1)
    """Share of a round that is drawn from these recorded episodes (1 - λ of GKD)."""


class TeacherCredit(Options):
    teacher_coef: NonNegative = 1.0
    """Weight of the teacher's log-ratio, added to other advantages."""
    teacher_gamma: Share = 0.0
    """Discount of later tokens' log-ratios."""


@step(TeacherCredit, reads=("teacher",))
def teacher_credit(batch: TokenBatch, options: TeacherCredit) -> TokenBatch:
    """A + teacher_coef · Σ_k teacher_gamma^k · log(π_T/π) of the token and those after it: the
    reverse KL per sampled token, as credit. A is 0 if no other part gave any.

    π is the policy that the update starts from. At teacher_gamma 0 the expected gradient is that of
    KL(π‖π_T) at the visited states (https://thinkingmachines.ai/blog/on-policy-distillation); at 1,
    with the aggregate `episode_sum`, that of KL(π‖π_T) over whole episodes, including the effect on
    later states (https://arxiv.org/abs/2306.08543, without its normalisation by length).
    Observations take no time. Tokens that the policy did not sample get no credit.
    """
    if batch.teacher_logprobs_BT is None:
        raise ValueError("teacher_credit: batch.teacher_logprobs_BT is None: score it by a teacher")
    line = Timeline.of(batch)
    ratio_N = line.read(batch.teacher_logprobs_BT) - line.read(batch.anchor_BT)
    ratio_N = torch.where(line.read(batch.version_BT) >= 0, ratio_N, 0.0)
    earned_N = discounted(ratio_N, torch.where(line.last_N, 0.0, options.teacher_gamma))
    before_BT = batch.advantages_BT.nan_to_num(nan=0.0)
    return replace(batch, advantages_BT=before_BT + options.teacher_coef * line.write(earned_N))


class GKD(Options):
    gkd_coef: NonNegative = 0.0
    """Coefficient of the divergence from the teacher."""
    gkd_beta: Share = 1.0
    """1: the reverse KL(π‖π_T), 0: the forward KL(π_T‖π), in between a mixture of both."""


@term(GKD, reads=("teacher_top",))
def gkd(output: PolicyOutput, batch: TokenBatch, options: GKD) -> Tensor:
    """gkd_coef · JSD_β(π_T‖π) over the vocabulary: at gkd_beta 1 the reverse KL(π‖π_T), at 0 the
    forward KL(π_T‖π), and between them β·KL(π_T‖M) + (1 - β)·KL(π‖M), M = β·π_T + (1 - β)·π.

    https://arxiv.org/abs/2306.13649, eq. 1, with the ends of TRL's `generalized_jsd_loss`, where
    the formula itself is 0. Exact at every trained token, whoever sampled it; the effect of π on
    which states are visited is ignored, as in the paper. With `teacher.top` all other tokens are
    one category, which never raises a divergence.
    """
    if output.top_logprobs_BTK is None or batch.teacher_top_logprobs_BTK is None:
        raise ValueError(
            "gkd: output.top_logprobs_BTK or batch.teacher_top_logprobs_BTK is None: score the"
            " vocabulary under both"
        )
    teacher_BTV = with_rest(batch.teacher_top_logprobs_BTK.to(output.logprobs_BT))
    policy_BTV = with_rest(output.top_logprobs_BTK)
    return options.gkd_coef * generalised_jsd(teacher_BTV, policy_BTV, options.gkd_beta)


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
    """Log-probabilities (..., K) of some tokens, followed by that of all others together.

    The rest is at least `TINY`, because rounding can leave nothing of it, or less than nothing.
    """
    left_S1 = 1 - logprobs_SK.exp().sum(-1, keepdim=True)
    return torch.cat((logprobs_SK, left_S1.clamp(min=TINY).log()), -1)

"""Regularisers: per-token losses that hold a policy near a reference, or keep it from becoming too sure. Pure.

The KL estimators take log-probabilities; the terms built on them read the batch, and hold their coefficient.
k1, k2, k3: http://joschu.net/blog/kl-approx.html.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from agentrl.errors import ConfigError
from agentrl.trainers.batch import TokenBatch
from agentrl.trainers.parts import needs
from agentrl.trainers.scoring import PolicyOutput
from agentrl.trainers.surrogates import importance_ratio


def kl_k1(logprobs_BT: Tensor, ref_logprobs_BT: Tensor) -> Tensor:
    """log π/π_ref: an unbiased *value* of KL(π‖π_ref). As a loss its expected gradient is zero: only a metric."""
    return logprobs_BT - ref_logprobs_BT


def kl_k2(logprobs_BT: Tensor, ref_logprobs_BT: Tensor) -> Tensor:
    """(log π/π_ref)²/2: a biased value; on-policy its expected gradient is that of KL(π‖π_ref), off-policy not."""
    return (logprobs_BT - ref_logprobs_BT).square() / 2


def kl_k3(logprobs_BT: Tensor, ref_logprobs_BT: Tensor) -> Tensor:
    """x - log x - 1 with x = π_ref/π: an unbiased value, never negative, low variance.

    As a loss its expected gradient is that of the *other* direction, KL(π_ref‖π): use `kl_penalty` to train.
    """
    log_x_BT = ref_logprobs_BT - logprobs_BT
    return torch.expm1(log_x_BT) - log_x_BT


@needs("reference")
def kl_penalty(output: PolicyOutput, batch: TokenBatch, *, kl_coef: float = 0.0) -> Tensor:
    """kl_coef·ρ·k3: in expectation over π_anchor, both value and gradient are those of KL(π‖π_ref).

    Exact per token, at the states that were visited; that π also changes which states come is left out, as usual.
    """
    if batch.ref_logprobs_BT is None:
        raise ValueError("kl_penalty: batch.ref_logprobs_BT is None: score the batch under a reference, or kl_coef = 0")
    return kl_coef * importance_ratio(output, batch) * kl_k3(output.logprobs_BT, batch.ref_logprobs_BT)


@needs("entropy_gradient")
def entropy_bonus(output: PolicyOutput, batch: TokenBatch, *, entropy_coef: float = 0.0) -> Tensor:
    """-entropy_coef·H(π) at every trained token."""
    if output.entropy_BT is None:
        raise ValueError("entropy_bonus: output.entropy_BT is None: score with entropy, or set entropy_coef = 0")
    return -entropy_coef * output.entropy_BT


def anchor_kl(output: PolicyOutput, batch: TokenBatch, *, anchor_kl_coef: float = 1.0) -> Tensor:
    """anchor_kl_coef·(ρ - 1 - log ρ): KL(π_anchor‖π), exact in value and gradient over π_anchor, and never negative.

    With the surrogate `importance_weighted` it is PPO's penalty form (https://arxiv.org/abs/1707.06347, eq. 8).
    """
    return anchor_kl_coef * (importance_ratio(output, batch) - 1 - (output.logprobs_BT - batch.anchor_BT))


@dataclass(frozen=True)
class AdaptiveKL:
    """The coefficient of `anchor_kl` from one update to the next. PPO, section 4.

    It doubles after an update that moved the policy by more than 1.5 times the target, and halves after one that moved
    it by less than target/1.5. https://arxiv.org/abs/1707.06347. (The rule that verl and OpenRLHF call adaptive is
    another: in proportion to the error, over a horizon, for the KL to a reference.)

    Attributes:
        beta: the coefficient now.
        target: KL(π_anchor‖π) in nats per token that one update should cost.
    """

    beta: float = 1.0
    target: float = 0.01

    def __post_init__(self) -> None:
        for name in ("beta", "target"):
            if not 0 < getattr(self, name) < math.inf:
                raise ConfigError(f"AdaptiveKL: {name}={getattr(self, name)} must be a number above 0")

    def update(self, kl: float) -> AdaptiveKL:
        """The state after an update whose mean KL(π_anchor‖π) was `kl` (the metric `approx_kl`).

        Raises:
            ValueError: the KL is no number.
        """
        if math.isnan(kl):
            raise ValueError(
                "AdaptiveKL: kl is NaN: the update before it has failed, and no coefficient follows from it"
            )
        if kl > 1.5 * self.target:
            return replace(self, beta=2 * self.beta)
        return replace(self, beta=self.beta / 2) if kl < self.target / 1.5 else self

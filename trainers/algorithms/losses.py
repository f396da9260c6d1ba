"""The policy loss: PPO's clip, aggregates with fixed denominators, the sum of all terms, metrics.

Everything is pure. Values at mask 0 are replaced by zeros *before* arithmetic, so garbage there
reaches neither the value nor the gradient. Aggregates are sums over denominators of the whole
optimizer step, so micro-batches add up.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import Annotated

import torch
from pydantic import Field
from torch import Tensor

from agentrl.trainers.algorithms.parts import (
    Bound,
    Count,
    LossTerm,
    Options,
    aggregate,
    term,
)
from agentrl.trainers.batch import PolicyOutput, TokenBatch

MAX_LOG_RATIO = 20.0  # exp(20) is 5e8: beyond it a ratio says nothing but "far"
RATIO_EDGES = (0.5, 0.8, 1.25, 2.0)


def keep(values_BT: Tensor, mask_BT: Tensor) -> Tensor:
    """The values at mask 1 and exact zeros elsewhere, whatever stands there (NaN included)."""
    return torch.where(mask_BT.bool(), values_BT, 0.0)


def importance_ratio(output: PolicyOutput, batch: TokenBatch) -> Tensor:
    """ρ = π/π_anchor per token; log ρ is clamped to ±20, beyond which it has no gradient."""
    return (output.logprobs_BT - batch.anchor_BT).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()


def clipped_objective(
    ratio: Tensor, batch: TokenBatch, clip_low: float, clip_high: float
) -> Tensor:
    """-min(ρA, clip(ρ, 1-clip_low, 1+clip_high)A) for ratios that broadcast to (B, T)."""
    bounded = ratio.clamp(1 - clip_low, 1 + clip_high)
    return -torch.minimum(ratio * batch.advantages_BT, bounded * batch.advantages_BT)


class Clip(Options):
    clip_low: Bound = 0.2
    """A ratio earns nothing more below 1 - clip_low."""
    clip_high: Bound = 0.2
    """A ratio earns nothing more above 1 + clip_high."""


class DualClip(Clip):
    dual_clip: Annotated[float, Field(gt=1, allow_inf_nan=True)] = math.inf
    """Largest ratio that counts where the advantage is negative; inf: unbounded."""


@term(DualClip)
def ppo_clip(output: PolicyOutput, batch: TokenBatch, options: DualClip) -> Tensor:
    """PPO: -min(ρA, clip(ρ, 1-clip_low, 1+clip_high)A) per token.

    https://arxiv.org/abs/1707.06347. Unequal bounds are DAPO's clip-higher
    (https://arxiv.org/abs/2503.14476). With a `dual_clip` the loss for A < 0 is at most
    -dual_clip·A: a bad token that became likelier has no unbounded gradient
    (https://arxiv.org/abs/1912.09729). verl's `vanilla` has it at 3; TRL's `delta` bounds ρ for
    A > 0 too, which is the same as long as delta > 1 + clip_high.
    """
    ratio_BT = importance_ratio(output, batch)
    bounded_BT = ratio_BT.clamp(max=options.dual_clip)
    ratio_BT = torch.where(batch.advantages_BT < 0, bounded_BT, ratio_BT)
    return clipped_objective(ratio_BT, batch, options.clip_low, options.clip_high)


@aggregate()
def by_token(per_token_BT: Tensor, batch: TokenBatch) -> Tensor:
    """Σ over trained tokens / trained tokens of the optimizer step: every token weighs the same
    (DAPO).

    verl's `token-mean` with the step's token count, TRL's `dapo`; TRL's `bnpo` divides by the
    micro-batch's count.
    """
    return keep(per_token_BT, batch.mask_BT).sum() / batch.n_tokens


@aggregate()
def by_episode(per_token_BT: Tensor, batch: TokenBatch) -> Tensor:
    """Mean over episodes of their token means (GRPO): every episode weighs the same, in however
    many rows it came.

    verl's `seq-mean-token-mean` and TRL's `grpo`, which count rows: the same where every episode is
    one row.
    """
    return (
        keep(per_token_BT, batch.mask_BT).sum(1) / batch.episode_tokens_B
    ).sum() / batch.n_episodes


@aggregate()
def by_episode_sum(per_token_BT: Tensor, batch: TokenBatch) -> Tensor:
    """Mean over episodes of their token sums: the gradient of the expected reward itself
    (REINFORCE).

    verl's `seq-mean-token-sum` and TRL's `luspo`, which count rows.
    """
    return keep(per_token_BT, batch.mask_BT).sum() / batch.n_episodes


class Norm(Options):
    norm_tokens: Count = 4096
    """The constant, for example the most tokens an episode may sample. It scales the gradient."""


@aggregate(Norm)
def by_constant(per_token_BT: Tensor, batch: TokenBatch, options: Norm) -> Tensor:
    """Mean over episodes of their token sums, divided by a constant (Dr. GRPO): no reward for being
    long or short.

    verl's `seq-mean-token-sum-norm` with `loss_scale_factor=norm_tokens` (without one it divides by
    the padded width, which differs from batch to batch), TRL's `dr_grpo` with
    `max_completion_length=norm_tokens`; both count rows. Because it scales the gradient,
    `norm_tokens` also decides where `optimizer.max_grad_norm` bites.
    """
    return by_episode_sum(per_token_BT, batch) / options.norm_tokens


@dataclass(frozen=True)
class PolicyLoss:
    """aggregate(surrogate · weights) + Σ aggregate(regulariser): every term is per token, masked
    and aggregated in the same way.

    Attributes:
        surrogate: per-token policy loss; multiplied by `batch.weights_BT`.
        aggregate: per-token values and batch -> scalar.
        regularisers: further per-token losses, each with its coefficient inside and without the
            weights. At tokens that no version of the policy sampled, only terms that compare whole
            distributions (`gkd`) count.
    """

    surrogate: Callable[[PolicyOutput, TokenBatch], Tensor]
    aggregate: Callable[[Tensor, TokenBatch], Tensor]
    regularisers: tuple[Callable[[PolicyOutput, TokenBatch], Tensor], ...] = ()

    def __call__(self, output: PolicyOutput, batch: TokenBatch) -> tuple[Tensor, dict[str, float]]:
        """The loss of a (micro-)batch and its metrics; both add up over micro-batches (see
        `add_metrics`).

        Raises:
            ValueError: a term reads what neither output nor batch has.
        """
        output, batch = output.silent(batch.mask_BT), batch.silent()
        policy_BT = self.surrogate(output, batch)
        if batch.weights_BT is not None:
            policy_BT = policy_BT * batch.weights_BT
        terms = {"policy": policy_BT}
        recorded_BT = batch.version_BT < 0
        for function in self.regularisers:
            regulariser = LossTerm.of(function)
            term_BT = regulariser(output, batch)
            if "teacher_top" not in regulariser.reads:
                term_BT = torch.where(recorded_BT, 0.0, term_BT)
            terms[regulariser.name] = term_BT
        parts = {name: self.aggregate(term_BT, batch) for name, term_BT in terms.items()}
        loss = torch.stack(list(parts.values())).sum()
        values = torch.stack([loss.detach(), *(part.detach() for part in parts.values())]).tolist()
        metrics = dict(zip(("loss", *(f"loss_{name}" for name in parts)), values, strict=True))
        return loss, metrics | policy_metrics(output, drop_recorded_tokens(batch), self.surrogate)


@dataclass(frozen=True)
class WholeLoss:
    """A loss of any form, with the metrics of how far the policy moved."""

    function: Callable[[PolicyOutput, TokenBatch], tuple[Tensor, dict[str, float]]]

    def __call__(self, output: PolicyOutput, batch: TokenBatch) -> tuple[Tensor, dict[str, float]]:
        """The loss of a (micro-)batch and its metrics; both must add up over micro-batches."""
        output, batch = output.silent(batch.mask_BT), batch.silent()
        loss, metrics = self.function(output, batch)
        moved = policy_metrics(output, drop_recorded_tokens(batch), None)
        return loss, {"loss": float(loss.detach())} | metrics | moved


def drop_recorded_tokens(batch: TokenBatch) -> TokenBatch:
    """Mask the tokens of recorded episodes. No version of the policy sampled them, so they cannot
    show how far it moved.
    """
    return replace(batch, mask_BT=batch.mask_BT & (batch.version_BT >= 0))


def gradient_is_cut(
    output: PolicyOutput,
    batch: TokenBatch,
    surrogate: Callable[[PolicyOutput, TokenBatch], Tensor],
) -> Tensor:
    """True at trained tokens with an advantage where the surrogate has no policy gradient."""
    with torch.enable_grad():
        leaf_BT = output.logprobs_BT.detach().requires_grad_()
        total = surrogate(replace(output, logprobs_BT=leaf_BT), batch).sum()
        gradient_BT = torch.autograd.grad(total, leaf_BT)[0]
    return (gradient_BT == 0) & (batch.advantages_BT != 0) & batch.mask_BT


@torch.no_grad()
def policy_metrics(
    output: PolicyOutput,
    batch: TokenBatch,
    surrogate: Callable[[PolicyOutput, TokenBatch], Tensor] | None,
) -> dict[str, float]:
    """How far the policy moved, as sums over `n_tokens`, to be joined over micro-batches by
    `add_metrics`.

    - clip_low, clip_high: fractions of tokens whose gradient the surrogate removes, with a negative
      and a positive advantage; 0 where the loss has no surrogate.
    - approx_kl: k3 of KL(π_anchor‖π).
    - logprob_gap: mean |log π - log π_sampler|, gap_max its maximum. Before the first update this
      is the gap between sampler and scorer.
    - ratio_le_x: fraction of tokens with ρ ≤ x. ratio_max is joined by maximum.
    - entropy, ref_kl (k3), teacher_kl (k1): where they are known.
    - scored: trained tokens of these rows over those of the step.
    - rejected: fraction of tokens with weight 0; weight, weight_square: means of the weights, from
      which the effective sample size follows.
    """
    output, batch = output.silent(batch.mask_BT), batch.silent()
    mask_BT, positive_BT = batch.mask_BT, batch.advantages_BT > 0
    log_ratio_BT = output.logprobs_BT - batch.anchor_BT
    ratio_BT = log_ratio_BT.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()
    cut_BT = torch.zeros_like(mask_BT)
    if surrogate is not None:
        cut_BT = gradient_is_cut(output, batch, surrogate)
    gap_BT = (output.logprobs_BT - batch.old_logprobs_BT).abs()
    sums = {
        "scored": mask_BT,
        "clip_low": cut_BT & ~positive_BT,
        "clip_high": cut_BT & positive_BT,
        "approx_kl": torch.expm1(log_ratio_BT) - log_ratio_BT,
        "logprob_gap": gap_BT,
        "ratio_mean": ratio_BT,
        **{f"ratio_le_{edge}": ratio_BT <= edge for edge in RATIO_EDGES},
    }
    if output.entropy_BT is not None:
        sums["entropy"] = output.entropy_BT
    if batch.ref_logprobs_BT is not None:
        log_x_BT = batch.ref_logprobs_BT - output.logprobs_BT
        sums["ref_kl"] = torch.expm1(log_x_BT) - log_x_BT
    if batch.teacher_logprobs_BT is not None:
        sums["teacher_kl"] = output.logprobs_BT - batch.teacher_logprobs_BT
    if (weights_BT := batch.weights_BT) is not None:
        sums |= {
            "rejected": weights_BT == 0,
            "weight": weights_BT,
            "weight_square": weights_BT.square(),
        }
    totals = [
        keep(values_BT.to(ratio_BT.dtype), mask_BT).sum() / batch.n_tokens
        for values_BT in sums.values()
    ]
    values = torch.stack(
        [*totals, keep(ratio_BT, mask_BT).amax(), keep(gap_BT, mask_BT).amax()]
    ).tolist()
    return dict(zip((*sums, "ratio_max", "gap_max"), values, strict=True))


def add_metrics(parts: Iterable[dict[str, float]]) -> dict[str, float]:
    """Metrics of one optimizer step from those of its micro-batches: losses are sums, `*_max`
    maxima, the rest means.

    The means are over the tokens that were scored: rows left out (`TokenBatch.informative`) do not
    count as zeros.
    """
    total: dict[str, float] = {}
    for part in parts:
        for name, value in part.items():
            total[name] = (
                max(total.get(name, value), value)
                if name.endswith("_max")
                else total.get(name, 0.0) + value
            )
    scored = total.get("scored") or 1.0
    sums = {
        name
        for name in total
        if name.startswith("loss") or name.endswith("_max") or name == "scored"
    }
    return {name: value if name in sums else value / scored for name, value in total.items()}

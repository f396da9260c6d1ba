"""From log-probabilities to one scalar: per-token losses, KL estimators, aggregation with fixed denominators, metrics.

Everything is pure. Values at mask 0 are replaced *before* arithmetic (`keep`), so garbage there reaches neither the
value nor the gradient. Aggregations are sums over denominators of the whole optimizer step, so micro-batches add up.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

from agentrl.errors import ConfigError
from agentrl.trainers.batch import TokenBatch
from agentrl.trainers.scoring import PolicyOutput as PolicyOutput
from agentrl.trainers.scoring import token_logprobs as token_logprobs

MAX_LOG_RATIO = 20.0
RATIO_EDGES = (0.5, 0.8, 1.25, 2.0)


Loss = Callable[[PolicyOutput, TokenBatch], tuple[Tensor, dict[str, float]]]
Surrogate = Callable[[Tensor, Tensor, Tensor, float, float], Tensor]
Aggregate = Callable[[Tensor, TokenBatch, int], Tensor]


def keep(values_BT: Tensor, mask_BT: Tensor) -> Tensor:
    """The values at mask 1 and exact zeros elsewhere, whatever stands there (NaN included)."""
    return torch.where(mask_BT.bool(), values_BT, 0.0)


def importance_ratio(logprobs_BT: Tensor, old_logprobs_BT: Tensor) -> Tensor:
    """ρ = π/π_old per token; log ρ is clamped to ±20, beyond which it has no gradient."""
    return (logprobs_BT - old_logprobs_BT).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()


def clipped_surrogate(
    logprobs_BT: Tensor, old_logprobs_BT: Tensor, advantages_BT: Tensor, clip_low: float, clip_high: float
) -> Tensor:
    """PPO: -min(ρA, clip(ρ, 1-clip_low, 1+clip_high)A) per token. https://arxiv.org/abs/1707.06347.

    Unequal bounds are DAPO's clip-higher (https://arxiv.org/abs/2503.14476).
    """
    ratio_BT = importance_ratio(logprobs_BT, old_logprobs_BT)
    clipped_BT = ratio_BT.clamp(1 - clip_low, 1 + clip_high)
    return -torch.minimum(ratio_BT * advantages_BT, clipped_BT * advantages_BT)


def kl_k1(logprobs_BT: Tensor, ref_logprobs_BT: Tensor) -> Tensor:
    """log π/π_ref: an unbiased *value* of KL(π‖π_ref). As a loss its expected gradient is zero: only a metric.

    k1, k2, k3: http://joschu.net/blog/kl-approx.html.
    """
    return logprobs_BT - ref_logprobs_BT


def kl_k2(logprobs_BT: Tensor, ref_logprobs_BT: Tensor) -> Tensor:
    """(log π/π_ref)²/2: a biased value; on-policy its expected gradient is that of KL(π‖π_ref), off-policy not."""
    return (logprobs_BT - ref_logprobs_BT).square() / 2


def kl_k3(logprobs_BT: Tensor, ref_logprobs_BT: Tensor) -> Tensor:
    """x - log x - 1 with x = π_ref/π: an unbiased value, never negative, low variance.

    As a loss its expected gradient is that of the *other* direction, KL(π_ref‖π): use `kl_k3_unbiased` to train.
    """
    log_x_BT = ref_logprobs_BT - logprobs_BT
    return torch.expm1(log_x_BT) - log_x_BT


def kl_k3_unbiased(logprobs_BT: Tensor, old_logprobs_BT: Tensor, ref_logprobs_BT: Tensor) -> Tensor:
    """ρ·k3 per token: in expectation over π_old, both value and gradient are those of KL(π‖π_ref).

    Exact per token, at the states that π_old visited; that π also changes which states come is left out, as usual.
    """
    return importance_ratio(logprobs_BT, old_logprobs_BT) * kl_k3(logprobs_BT, ref_logprobs_BT)


def token_mean(per_token_BT: Tensor, mask_BT: Tensor, n_tokens: int) -> Tensor:
    """Σ over trained tokens / trained tokens of the optimizer step: every token weighs the same (DAPO)."""
    return keep(per_token_BT, mask_BT).sum() / n_tokens


def episode_mean(per_token_BT: Tensor, mask_BT: Tensor, episode_tokens_B: Tensor, n_episodes: int) -> Tensor:
    """Mean over episodes of their token means (GRPO): every episode weighs the same, in however many rows it came.

    Args:
        per_token_BT: per-token loss.
        mask_BT: True on trained tokens.
        episode_tokens_B: trained tokens of the row's whole episode (`batch.episode_tokens_B`).
        n_episodes: episodes of the optimizer step that have trained tokens.
    """
    return (keep(per_token_BT, mask_BT).sum(1) / episode_tokens_B).sum() / n_episodes


def episode_sum(per_token_BT: Tensor, mask_BT: Tensor, n_episodes: int, norm_tokens: int) -> Tensor:
    """Mean over episodes of their token sums, over a constant length (Dr. GRPO): no reward for being long or short."""
    return keep(per_token_BT, mask_BT).sum() / (n_episodes * norm_tokens)


@dataclass(frozen=True)
class PolicyLoss:
    """surrogate + kl_coef·ρ·k3 - entropy_coef·entropy, every term per token, masked, and aggregated the same way.

    A term whose coefficient is 0 is left out, so its inputs need not exist.

    Attributes:
        surrogate: per-token policy loss.
        aggregate: per-token values and batch -> scalar; its last argument is `norm_tokens`.
        clip_low, clip_high: the ratio is clipped to [1 - clip_low, 1 + clip_high].
        kl_coef: weight of the KL to the reference, in reward units per token.
        entropy_coef: weight of the entropy bonus.
        norm_tokens: constant length of `episode_sum`, the most tokens an episode may sample; others ignore it.
    """

    surrogate: Surrogate
    aggregate: Aggregate
    clip_low: float = 0.2
    clip_high: float = 0.2
    kl_coef: float = 0.0
    entropy_coef: float = 0.0
    norm_tokens: int = 4096

    def __post_init__(self) -> None:
        for name in ("clip_low", "clip_high", "kl_coef", "entropy_coef"):
            if not getattr(self, name) >= 0:
                raise ConfigError(f"{name}={getattr(self, name)} must be a number >= 0")
        if self.norm_tokens < 1:
            raise ConfigError(f"norm_tokens={self.norm_tokens} must be at least 1")

    def __call__(self, output: PolicyOutput, batch: TokenBatch) -> tuple[Tensor, dict[str, float]]:
        """The loss of a (micro-)batch and its metrics; both add up over micro-batches (see `add_metrics`).

        Raises:
            ValueError: a coefficient is not zero but the output lacks what it weighs.
        """
        mask_BT = batch.mask_BT
        logprobs_BT, old_BT = keep(output.logprobs_BT, mask_BT), keep(batch.old_logprobs_BT, mask_BT)
        advantages_BT = keep(batch.advantages_BT, mask_BT)
        terms = {"policy": self.surrogate(logprobs_BT, old_BT, advantages_BT, self.clip_low, self.clip_high)}
        if self.kl_coef:
            ref_BT = keep(_needed(output.ref_logprobs_BT, "ref_logprobs_BT", "kl_coef"), mask_BT)
            terms["kl"] = self.kl_coef * kl_k3_unbiased(logprobs_BT, old_BT, ref_BT)
        if self.entropy_coef:
            entropy_BT = keep(_needed(output.entropy_BT, "entropy_BT", "entropy_coef"), mask_BT)
            terms["entropy"] = -self.entropy_coef * entropy_BT
        parts = {name: self.aggregate(term_BT, batch, self.norm_tokens) for name, term_BT in terms.items()}
        loss = torch.stack(list(parts.values())).sum()
        values = torch.stack([loss.detach(), *(part.detach() for part in parts.values())]).tolist()
        metrics = dict(zip(("loss", *(f"loss_{name}" for name in parts)), values, strict=True))
        return loss, metrics | policy_metrics(output, batch, self.clip_low, self.clip_high)


def _needed(values_BT: Tensor | None, name: str, because: str) -> Tensor:
    """The tensor, or a sentence that says why it had to be there."""
    if values_BT is None:
        raise ValueError(f"{because} is not 0 but the policy output has no {name}; compute it or set {because} = 0")
    return values_BT


@torch.no_grad()
def policy_metrics(output: PolicyOutput, batch: TokenBatch, clip_low: float, clip_high: float) -> dict[str, float]:
    """How far the policy moved, as sums over `n_tokens`, to be joined over micro-batches by `add_metrics`.

    clip_low / clip_high: fractions of tokens whose gradient the clip removes, below and above. approx_kl: k3 of
    KL(π_old‖π). logprob_gap: mean |log ρ|; before the first update this is the gap between sampler and scorer.
    ratio_le_x: fraction of tokens with ρ ≤ x, the ratio's distribution. ratio_max: combines by maximum.
    entropy, ref_kl (k3): where the output has them. scored: trained tokens of these rows over those of the step.
    """
    mask_BT = batch.mask_BT
    log_ratio_BT = keep(output.logprobs_BT, mask_BT) - keep(batch.old_logprobs_BT, mask_BT)
    ratio_BT = log_ratio_BT.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()
    advantages_BT = keep(batch.advantages_BT, mask_BT)
    sums = {
        "scored": mask_BT,
        "clip_low": (ratio_BT < 1 - clip_low) & (advantages_BT < 0),
        "clip_high": (ratio_BT > 1 + clip_high) & (advantages_BT > 0),
        "approx_kl": torch.expm1(log_ratio_BT) - log_ratio_BT,
        "logprob_gap": log_ratio_BT.abs(),
        "ratio_mean": ratio_BT,
        **{f"ratio_le_{edge}": ratio_BT <= edge for edge in RATIO_EDGES},
    }
    if output.entropy_BT is not None:
        sums["entropy"] = output.entropy_BT
    if output.ref_logprobs_BT is not None:
        sums["ref_kl"] = kl_k3(keep(output.logprobs_BT, mask_BT), keep(output.ref_logprobs_BT, mask_BT))
    totals = [keep(values_BT.to(ratio_BT.dtype), mask_BT).sum() / batch.n_tokens for values_BT in sums.values()]
    values = torch.stack([*totals, keep(ratio_BT, mask_BT).amax()]).tolist()
    return dict(zip((*sums, "ratio_max"), values, strict=True))


def add_metrics(parts: Iterable[dict[str, float]]) -> dict[str, float]:
    """Metrics of one optimizer step from those of its micro-batches: losses are sums, `*_max` maxima, the rest means.

    The means are over the tokens that were scored: rows left out (`TokenBatch.informative`) do not count as zeros.
    """
    total: dict[str, float] = {}
    for part in parts:
        for name, value in part.items():
            total[name] = max(total.get(name, value), value) if name.endswith("_max") else total.get(name, 0.0) + value
    scored = total.get("scored", 1.0)
    sums = {name for name in total if name.startswith("loss") or name.endswith("_max") or name == "scored"}
    return {name: value if name in sums else value / scored for name, value in total.items()}

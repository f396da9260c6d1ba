"""Corrections and selections: which tokens of an optimizer step count, and how much. Pure.

Every correction is a `BatchStep` over the batch of one optimizer step. Those that weigh multiply
into `weights_BT`:

- Weights are numbers, never functions of the parameters: no gradient flows through them.
- They reach the surrogate only. A token of weight 0 still counts in every denominator (as in AReaL;
  verl and TRL's `mask_truncated_completions` shrink the mask), so rejecting tokens makes a step
  smaller and no other token louder, and a KL term still sees them. `policy_metrics` logs the share
  as `rejected`.
- The ratio is w = π_proximal/π_old: the policy that the update starts from, as the trainer scores
  it, over the policy that sampled. Log-ratios are clamped to ±20 at the level they are used.
- A sequence is an episode: its trained tokens over all its rows.

With `proximal_logprobs_BT` filled, surrogates take their ratio against it (`TokenBatch.anchor_BT`),
so any weight below gives the decoupled objective of AReaL (https://arxiv.org/abs/2505.24298): a
trust region around the proximal policy, and weight π_proximal/π_old for what was sampled elsewhere.
`tis_high=inf` is that without a bound.

Selections choose a share of the trained tokens by a score: the covariance of advantage and
log-probability, or entropy. The score is taken over all trained tokens of the step, from the policy
that the update starts from, so it is the same in every order of rows and every split into
micro-batches; verl and TRL take it per micro-batch, from the policy as it moves. Shares are rounded
up and ties count in, so a batch repeated twice selects the same tokens twice. (verl takes
max(1, ⌊share·N⌋).)
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Callable
from dataclasses import replace
from typing import Annotated, Literal

import numpy as np
import torch
from pydantic import Field, model_validator
from torch import Tensor

from agentrl.settings import SettingError
from agentrl.trainers.algorithms.losses import MAX_LOG_RATIO, keep
from agentrl.trainers.algorithms.parts import (
    Bound,
    Count,
    NonNegative,
    Options,
    PositiveBound,
    Share,
    step,
)
from agentrl.trainers.algorithms.surrogates import episode_mean, episode_sum
from agentrl.trainers.batch import TokenBatch

Level = Literal["token", "sequence", "geometric"]


def weigh(batch: TokenBatch, factor_BT: Tensor) -> TokenBatch:
    """Multiply the weights (1 where there are none yet) by a factor; 0 at mask 0."""
    weights_BT = factor_BT if batch.weights_BT is None else batch.weights_BT * factor_BT
    kept_BT = keep(weights_BT, batch.mask_BT).to(batch.old_logprobs_BT.dtype)
    return replace(batch, weights_BT=kept_BT.detach())


# --- importance ratios ---


def _token(log_w_BT: Tensor, batch: TokenBatch) -> Tensor:
    return log_w_BT


LEVELS: dict[str, Callable[[Tensor, TokenBatch], Tensor]] = {
    "token": _token,
    "sequence": episode_sum,
    "geometric": episode_mean,
}
"""What a weight belongs to: the token (w); the episode (Πw); its geometric mean (Πw)^(1/length).

Only the product makes an episode's gradient unbiased, and its variance grows with length; the mean
measures how far off-policy an episode is, whatever its length. TRL's `sequence_*` modes and verl's
`sequence` are the product."""


def policy_ratio(batch: TokenBatch, level: Level) -> Tensor:
    """w = π_proximal/π_old at one of the `LEVELS`, (B, T) float64; 1 at mask 0 of the token level.

    Raises:
        ValueError: the batch was not scored under the proximal policy.
    """
    log_w = LEVELS[level](_log_ratio(batch), batch)
    return log_w.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp().expand_as(batch.old_logprobs_BT)


def _log_ratio(batch: TokenBatch) -> Tensor:
    if batch.proximal_logprobs_BT is None:
        raise ValueError(
            "a correction reads batch.proximal_logprobs_BT, which is None: score the batch under"
            " the policy that the update starts from, or leave the correction out"
        )
    return keep(batch.proximal_logprobs_BT.double() - batch.old_logprobs_BT.double(), batch.mask_BT)


def _is_inside(ratio_BT: Tensor, low: float, high: float) -> Tensor:
    return (ratio_BT >= low) & (ratio_BT <= high)


def _check_bounds(name: str, low: float, high: float) -> None:
    """On-policy ratios are 1: bounds that exclude it would leave every token out."""
    if not low <= 1 <= high:
        raise SettingError(f"must be at most 1, and {name}_high={high} at least 1", f"{name}_low")


class Truncation(Options):
    tis_level: Level = "token"
    """What the weight belongs to: token, sequence or geometric (the episode's mean)."""
    tis_low: NonNegative = 0.0
    """Lower bound of the weight."""
    tis_high: PositiveBound = 2.0
    """Upper bound of the weight; inf: none."""

    @model_validator(mode="after")
    def _ordered(self) -> Truncation:
        if self.tis_low > self.tis_high:
            raise SettingError(f"must be at most tis_high={self.tis_high}", "tis_low")
        return self


@step(Truncation, reads=("proximal",))
def truncated_is(batch: TokenBatch, options: Truncation) -> TokenBatch:
    """Truncated importance sampling: weight min(max(w, tis_low), tis_high).

    https://fengyao.notion.site/off-policy-rl. Without bounds (0, inf) the sequence level is exact:
    the expected gradient is the policy gradient at the proximal policy. The token level ignores how
    the sampler's prefix and what follows were drawn. A bound trades bias towards the sampler for
    variance. TRL's `token_truncate` and `sequence_truncate`, verl's `rollout_is`.
    """
    ratio_BT = policy_ratio(batch, options.tis_level)
    return weigh(batch, ratio_BT.clamp(options.tis_low, options.tis_high))


class Masking(Options):
    mis_level: Level = "token"
    """What the weight belongs to: token, sequence or geometric (the episode's mean)."""
    mis_low: NonNegative = 0.5
    """Ratios below this weigh 0."""
    mis_high: Bound = 5.0
    """Ratios above this weigh 0."""

    @model_validator(mode="after")
    def _includes_on_policy(self) -> Masking:
        _check_bounds("mis", self.mis_low, self.mis_high)
        return self


@step(Masking, reads=("proximal",))
def masked_is(batch: TokenBatch, options: Masking) -> TokenBatch:
    """Masked importance sampling: weight w inside [mis_low, mis_high], 0 outside.

    At token level this is IcePop (https://arxiv.org/abs/2510.18855, 0.5 to 5); TRL's `token_mask`
    and `sequence_mask` (its default, 0 to 3), AReaL's cap.
    """
    ratio_BT = policy_ratio(batch, options.mis_level)
    inside_BT = _is_inside(ratio_BT, options.mis_low, options.mis_high)
    return weigh(batch, torch.where(inside_BT, ratio_BT, 0.0))


class Rejection(Options):
    reject_level: Level = "geometric"
    """What is rejected: token, sequence or geometric (the episode by its mean)."""
    reject_low: NonNegative = 0.5
    """Ratios below this are rejected."""
    reject_high: Bound = 2.0
    """Ratios above this are rejected."""

    @model_validator(mode="after")
    def _includes_on_policy(self) -> Rejection:
        _check_bounds("reject", self.reject_low, self.reject_high)
        return self


@step(Rejection, reads=("proximal",))
def reject_off_policy(batch: TokenBatch, options: Rejection) -> TokenBatch:
    """Weight 1 inside [reject_low, reject_high] and 0 outside: rejection without a weight.

    Together with `truncated_is` at token level it is OpenRLHF's `seq-mask-tis`; verl's `rollout_rs`
    uses the same statistics and also takes the rejected tokens out of the denominators.
    """
    ratio_BT = policy_ratio(batch, options.reject_level)
    inside_BT = _is_inside(ratio_BT, options.reject_low, options.reject_high)
    return weigh(batch, inside_BT.to(ratio_BT.dtype))


class OffPolicyLimit(Options):
    off_policy_limit: Bound = 0.1
    """Largest mean of log π_old - log π_proximal, in nats per token."""


@step(OffPolicyLimit, reads=("proximal",))
def drop_off_policy_negatives(batch: TokenBatch, options: OffPolicyLimit) -> TokenBatch:
    """Weight 0 on negative advantages of episodes whose mean of log π_old - log π_proximal is above
    the limit (nats).

    What the policy would no longer do teaches little by being wrong. DeepSeek-V3.2's off-policy
    sequence mask (https://arxiv.org/abs/2512.02556), TRL's `off_policy_mask_threshold`: the same
    rule, but those compare with the policy as it moves within a round. Here it is the policy that
    the update starts from, so the mask is fixed before any micro-batch. The two agree at the first
    optimizer step. Neither published a limit.
    """
    gap_B1 = -episode_mean(_log_ratio(batch), batch)
    is_dropped_BT = (batch.advantages_BT < 0) & (gap_B1 > options.off_policy_limit)
    return weigh(batch, 1.0 - is_dropped_BT.double())


# --- age and endings ---


def age(batch: TokenBatch) -> Tensor:
    """Versions between the policy that sampled a token and the one the update starts from (B, T);
    0 at mask 0.

    Raises:
        ValueError: the batch has no version, or a token is newer than it.
    """
    if batch.version is None:
        raise ValueError(
            "staleness is measured from batch.version, which is None: set it to the policy's"
            " version"
        )
    age_BT = torch.where(batch.mask_BT, batch.version - batch.version_BT, 0)
    if (age_BT < 0).any():
        raise ValueError(
            f"a token of version {int(batch.version_BT.max())} is newer than the policy"
            f" {batch.version}"
        )
    return age_BT


class Decay(Options):
    stale_decay: NonNegative = 1.0
    """Weight of a token per version of age."""


@step(Decay)
def decay_stale(batch: TokenBatch, options: Decay) -> TokenBatch:
    """Weight stale_decay**age on every token: 1 on what the current policy sampled. A heuristic."""
    return weigh(batch, options.stale_decay ** age(batch).double())


class MaxAge(Options):
    max_age: Bound = math.inf
    """Oldest version that still trains, in rounds."""


@step(MaxAge)
def drop_stale(batch: TokenBatch, options: MaxAge) -> TokenBatch:
    """Weight 0 on tokens that are more than `max_age` versions old; the rest of their episode
    stays.
    """
    return weigh(batch, (age(batch) <= options.max_age).double())


class DropTruncated(Options):
    drop_truncated: bool = True
    """Whether episodes that a limit ended weigh 0."""


@step(DropTruncated)
def drop_overlong(batch: TokenBatch, options: DropTruncated) -> TokenBatch:
    """Weight 0 on episodes that a limit ended: being cut off is no sign of being wrong. DAPO's
    overlong filtering.

    https://arxiv.org/abs/2503.14476. Their rewards stay in their group's statistics. TRL's
    `mask_truncated_completions` also takes them out of denominators and of the KL term.
    """
    stays_E = torch.ones_like(batch.truncated_E)
    if options.drop_truncated:
        stays_E = ~batch.truncated_E
    return weigh(batch, stays_E[batch.episode_B, None].expand_as(batch.mask_BT).double())


# --- selections ---


def covariance(batch: TokenBatch) -> Tensor:
    """(A - mean A)·(log π_anchor - mean log π_anchor) per trained token, float64; its mean is their
    covariance.

    Where it is high, a likely token is made likelier still: these tokens reduce the entropy.
    """
    advantages_BT, logprobs_BT = batch.advantages_BT.double(), batch.anchor_BT.double()
    centred = [
        values_BT - values_BT[batch.mask_BT].mean() for values_BT in (advantages_BT, logprobs_BT)
    ]
    return keep(centred[0] * centred[1], batch.mask_BT)


class ClipCov(Options):
    cov_share: Share = 0.0002
    """Share of the trained tokens that weigh 0."""
    cov_low: NonNegative = 1.0
    """Only tokens of a covariance above this are drawn."""
    cov_high: Bound = 5.0
    """Only tokens of a covariance below this are drawn."""
    cov_seed: Count = 1
    """Seed of the draw."""

    @model_validator(mode="after")
    def _ordered(self) -> ClipCov:
        if self.cov_low >= self.cov_high:
            raise SettingError(f"must be below cov_high={self.cov_high}", "cov_low")
        return self


@step(ClipCov)
def clip_cov(batch: TokenBatch, options: ClipCov) -> TokenBatch:
    """Clip-Cov: weight 0 on a random `cov_share` of the tokens, drawn where cov_low < covariance <
    cov_high.

    https://arxiv.org/abs/2505.22617. A token's draw is seeded by the ids of its episode, not by the
    position of its row. Before an update no ratio is clipped yet; verl also skips tokens that PPO's
    clip has cut by then.
    """
    covariance_BT = covariance(batch)
    between_BT = (covariance_BT > options.cov_low) & (covariance_BT < options.cov_high)
    candidates_BT = batch.mask_BT & between_BT
    draws_BT = _draws(batch, options.cov_seed)
    chosen_BT = _select_highest(batch, draws_BT, options.cov_share, among_BT=candidates_BT)
    return weigh(batch, 1.0 - chosen_BT.double())


class KLCovShare(Options):
    kl_cov_share: Share = 0.002
    """Share of the trained tokens that are held near the anchor."""


@step(KLCovShare, writes=("selection",))
def select_kl_cov(batch: TokenBatch, options: KLCovShare) -> TokenBatch:
    """KL-Cov's tokens: the `kl_cov_share` of highest covariance, for the term `kl_cov`.

    Only where the covariance is above 0: in a step without signal all are 0, and such ties are no
    reason to hold a token.
    """
    covariance_BT = covariance(batch)
    chosen_BT = _select_highest(
        batch, covariance_BT, options.kl_cov_share, among_BT=covariance_BT > 0
    )
    return replace(batch, selected_BT=chosen_BT)


class ForkShare(Options):
    fork_share: Share = 0.2
    """Share of the trained tokens that are forks."""


@step(ForkShare, reads=("entropy",), writes=("selection",))
def select_forks(batch: TokenBatch, options: ForkShare) -> TokenBatch:
    """SimKO's forking tokens: the `fork_share` of highest entropy, for the surrogate `simko`.

    https://arxiv.org/abs/2510.14807; its code takes the quantile of every row by itself.
    """
    chosen_BT = _select_highest(batch, _entropy(batch), options.fork_share, batch.mask_BT)
    return replace(batch, selected_BT=chosen_BT)


class EntropyShare(Options):
    entropy_share: Annotated[float, Field(gt=0, le=1)] = 0.2
    """Share of the trained tokens that train."""


@step(EntropyShare, reads=("entropy",))
def train_high_entropy(batch: TokenBatch, options: EntropyShare) -> TokenBatch:
    """Weight 0 on all but the `entropy_share` of tokens of highest entropy: the 80/20 rule.

    https://arxiv.org/abs/2506.01939. The denominator counts every trained token, as in the paper.
    TRL's `top_entropy_quantile` divides in the same way, but takes its quantile per micro-batch,
    from the policy as it moves, and narrows its entropy bonus to the same tokens (and their count).
    """
    chosen_BT = _select_highest(batch, _entropy(batch), options.entropy_share, batch.mask_BT)
    return weigh(batch, chosen_BT.double())


def _entropy(batch: TokenBatch) -> Tensor:
    if batch.entropy_BT is None:
        raise ValueError("batch.entropy_BT is None: score the batch before the update")
    return batch.entropy_BT


def _select_highest(batch: TokenBatch, score_BT: Tensor, share: float, among_BT: Tensor) -> Tensor:
    """True at the highest scores among some tokens, up to a share of all trained tokens.

    Ties are included, so there may be more; if there are too few tokens, all of them are chosen.
    """
    # 0.2 · 15 is 3.0000000000000004 in floating point, which must not round up to 4.
    count = math.ceil(share * int(batch.mask_BT.sum()) - 1e-9)
    scores_N = score_BT[among_BT]
    count = min(count, len(scores_N))
    if count < 1:
        return torch.zeros_like(among_BT)
    return among_BT & (score_BT >= scores_N.topk(count).values[-1])


def _draws(batch: TokenBatch, seed: int) -> Tensor:
    """A number from [0, 1) for every trained token, seeded by the ids of its episode."""
    rows_B = torch.argsort(batch.episode_B, stable=True)
    mask_BT = batch.mask_BT[rows_B]
    owner_N = batch.episode_B[rows_B].repeat_interleave(mask_BT.sum(1))
    _, counts = torch.unique_consecutive(owner_N, return_counts=True)
    episodes = torch.split(batch.ids_BT[rows_B][mask_BT].cpu(), counts.tolist())
    draws = [np.zeros(0)]
    for ids in episodes:
        code = zlib.crc32(ids.numpy().astype(np.int64).tobytes())
        draws.append(np.random.default_rng((seed, code)).random(len(ids)))
    drawn_N = torch.from_numpy(np.concatenate(draws)).to(mask_BT.device)
    draws_BT = torch.zeros(mask_BT.shape, dtype=torch.float64, device=mask_BT.device)
    draws_BT[rows_B] = draws_BT.masked_scatter(mask_BT, drawn_N)
    return draws_BT

"""Off-policy corrections: what a token's policy loss is multiplied by because another policy
sampled it.

Every correction is a `Step` over the batch of one optimizer step and multiplies into `weights_BT`.
For all of them:

- Weights are numbers, never functions of the parameters: no gradient flows through them.
- They reach the surrogate only. A token of weight 0 still counts in every denominator (as AReaL
  counts; verl and TRL's `mask_truncated_completions` shrink the mask), so rejecting tokens makes a
  step smaller and no other token louder, and a KL term still sees them. `policy_metrics` logs the
  share as `rejected`.
- The weight is w = π_proximal/π_old: the policy that the update starts from, as the trainer scores
  it, over the policy that sampled. Log-ratios are clamped to ±20 at the level they are used.
- A sequence is an episode: its trained tokens over all its rows.

With `proximal_logprobs_BT` filled, surrogates take their ratio against it (`TokenBatch.anchor_BT`),
so any weight below gives the decoupled objective of AReaL (https://arxiv.org/abs/2505.24298): trust
region around the proximal policy, weight π_proximal/π_old for what was sampled elsewhere.
`tis_high=inf` is that without a bound.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor

from agentrl.errors import ConfigError
from agentrl.trainers.algorithms.losses import MAX_LOG_RATIO, keep
from agentrl.trainers.algorithms.parts import needs
from agentrl.trainers.algorithms.sequence_surrogates import episode_mean, episode_sum
from agentrl.trainers.batch import TokenBatch


def weigh(batch: TokenBatch, factor_BT: Tensor) -> TokenBatch:
    """The batch with its weights (1 where there are none yet) multiplied by this factor; 0 at mask
    0.
    """
    weights_BT = factor_BT if batch.weights_BT is None else batch.weights_BT * factor_BT
    return replace(
        batch, weights_BT=keep(weights_BT, batch.mask_BT).to(batch.old_logprobs_BT.dtype).detach()
    )


def _token(log_w_BT: Tensor, batch: TokenBatch) -> Tensor:
    return log_w_BT


LEVELS: dict[str, Callable[[Tensor, TokenBatch], Tensor]] = {
    "token": _token,
    "sequence": episode_sum,
    "geometric": episode_mean,
}
"""What a weight is of: w of the token; Πw over the episode; (Πw)^(1/length), the episode's
geometric mean.

Only the product makes an episode's gradient unbiased, and its variance grows with length; the
mean is a measure of how far off-policy an episode is, whatever its length. TRL's `sequence_*`
modes and verl's `sequence` are the product."""


def policy_ratio(batch: TokenBatch, level: str) -> Tensor:
    """w = π_proximal/π_old at one of the `LEVELS`, (B, T) float64; 1 at mask 0 of the token level.

    Raises:
        ConfigError: there is no such level.
        ValueError: nobody scored the batch under the proximal policy.
    """
    if level not in LEVELS:
        raise ConfigError(
            f"level {level!r} of an importance weight must be one of {', '.join(LEVELS)}"
        )
    log_w = LEVELS[level](_log_ratio(batch), batch)
    return log_w.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp().expand_as(batch.old_logprobs_BT)


def _log_ratio(batch: TokenBatch) -> Tensor:
    if batch.proximal_logprobs_BT is None:
        raise ValueError(
            "a correction reads batch.proximal_logprobs_BT, which is None: score the batch under"
            " the policy that the update starts from, or leave the correction out"
        )
    return keep(batch.proximal_logprobs_BT.double() - batch.old_logprobs_BT.double(), batch.mask_BT)


def _inside(ratio_BT: Tensor, low: float, high: float, name: str) -> Tensor:
    """Whether ratios lie in [low, high]."""
    if low > high:
        raise ConfigError(f"{name}_low={low} must not be above {name}_high={high}")
    return (ratio_BT >= low) & (ratio_BT <= high)


@needs("proximal")
def truncated_is(
    batch: TokenBatch, *, tis_level: str = "token", tis_low: float = 0.0, tis_high: float = 2.0
) -> TokenBatch:
    """Truncated importance sampling: weight min(max(w, tis_low), tis_high). https://fengyao.notion.site/off-policy-rl.

    Without bounds (0, inf) the sequence level is exact: the expected gradient is the policy
    gradient at the proximal policy. The token level leaves out how the sampler's prefix (and what
    follows) was drawn. A bound trades bias towards the sampler for variance. TRL's `token_truncate`
    and `sequence_truncate`, verl's `rollout_is`.
    """
    ratio_BT = policy_ratio(batch, tis_level)
    _inside(ratio_BT, tis_low, tis_high, "tis")
    return weigh(batch, ratio_BT.clamp(tis_low, tis_high))


@needs("proximal")
def masked_is(
    batch: TokenBatch, *, mis_level: str = "token", mis_low: float = 0.5, mis_high: float = 5.0
) -> TokenBatch:
    """Masked importance sampling: weight w inside [mis_low, mis_high], 0 outside; the bounds belong
    to the inside.

    At token level this is IcePop (https://arxiv.org/abs/2510.18855, 0.5 to 5); TRL's `token_mask`
    and `sequence_mask` (its default, 0 to 3), AReaL's cap.
    """
    ratio_BT = policy_ratio(batch, mis_level)
    return weigh(batch, torch.where(_inside(ratio_BT, mis_low, mis_high, "mis"), ratio_BT, 0.0))


@needs("proximal")
def reject_off_policy(
    batch: TokenBatch,
    *,
    reject_level: str = "geometric",
    reject_low: float = 0.5,
    reject_high: float = 2.0,
) -> TokenBatch:
    """Weight 1 inside [reject_low, reject_high] and 0 outside: rejection without a weight.

    Beside `truncated_is` at token level it is OpenRLHF's `seq-mask-tis`; verl's `rollout_rs` by the
    same statistics, which also takes the rejected tokens out of the denominators.
    """
    ratio_BT = policy_ratio(batch, reject_level)
    return weigh(batch, _inside(ratio_BT, reject_low, reject_high, "reject").to(ratio_BT.dtype))


@needs("proximal")
def drop_off_policy_negatives(batch: TokenBatch, *, off_policy_limit: float = 0.1) -> TokenBatch:
    """Weight 0 on negative advantages of episodes whose mean of log π_old - log π_proximal is above
    the limit (nats).

    What the policy would no longer do teaches little by being wrong. DeepSeek-V3.2's off-policy
    sequence mask (https://arxiv.org/abs/2512.02556), TRL's `off_policy_mask_threshold`: the same
    rule, but those compare with the policy as it moves within a round; here it is the one that the
    update starts from, so a mask is settled before any micro-batch. The two agree at the first
    optimizer step. Neither published a limit.
    """
    gap_B1 = -episode_mean(_log_ratio(batch), batch)
    return weigh(batch, 1.0 - ((batch.advantages_BT < 0) & (gap_B1 > off_policy_limit)).double())


def age(batch: TokenBatch) -> Tensor:
    """Versions between the policy that sampled a token and the one that the update starts from; (B,
    T), 0 at mask 0.

    Raises:
        ValueError: the batch does not say its version, or a token is younger than it.
    """
    if batch.version is None:
        raise ValueError(
            "staleness is measured from batch.version, which is None: set it to the policy's"
            " version"
        )
    age_BT = torch.where(batch.mask_BT, batch.version - batch.version_BT, 0)
    if (age_BT < 0).any():
        raise ValueError(
            f"a token of version {int(batch.version_BT.max())} is younger than the policy"
            f" {batch.version}"
        )
    return age_BT


def decay_stale(batch: TokenBatch, *, stale_decay: float = 1.0) -> TokenBatch:
    """Weight stale_decay**age on every token: 1 on what the current policy sampled. A heuristic, no
    estimator.
    """
    return weigh(batch, stale_decay ** age(batch).double())


def drop_stale(batch: TokenBatch, *, max_age: float = math.inf) -> TokenBatch:
    """Weight 0 on tokens that are more than `max_age` versions old; the rest of their episode
    stays.
    """
    return weigh(batch, (age(batch) <= max_age).double())


def drop_overlong(batch: TokenBatch, *, drop_truncated: bool = True) -> TokenBatch:
    """Weight 0 on episodes that a limit ended: being cut off is no sign of being wrong. DAPO's
    overlong filtering.

    https://arxiv.org/abs/2503.14476. Their rewards stay in their group's statistics. TRL's
    `mask_truncated_completions` also takes them out of denominators and of the KL term.
    """
    stays_E = ~batch.truncated_E if drop_truncated else torch.ones_like(batch.truncated_E)
    return weigh(batch, stays_E[batch.episode_B, None].expand_as(batch.mask_BT).double())

"""Which tokens a recipe treats in its own way: by the covariance of advantage and log-probability,
or by entropy.

Every selection is a `Step` over the batch of one optimizer step. Its statistics are over all
trained tokens of the step, from the policy that the update starts from, so they are the same in
every order of rows and every split into micro-batches; verl and TRL take them per micro-batch, of
the policy as it moves. Shares are of the trained tokens, rounded up, and ties count in, so that a
batch twice over selects the same tokens twice. (verl takes max(1, ⌊share·N⌋).)
"""

from __future__ import annotations

import math
import zlib
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from agentrl.errors import ConfigError
from agentrl.trainers.algorithms.corrections import weigh
from agentrl.trainers.algorithms.losses import keep
from agentrl.trainers.algorithms.parts import needs
from agentrl.trainers.batch import TokenBatch


def covariance(batch: TokenBatch) -> Tensor:
    """(A - mean A)·(log π_anchor - mean log π_anchor) per trained token, float64; its mean is their
    covariance.

    Where it is high, a likely token is made likelier still: these tokens take the entropy down.
    """
    advantages_BT, logprobs_BT = batch.advantages_BT.double(), batch.anchor_BT.double()
    centred = [
        values_BT - values_BT[batch.mask_BT].mean() for values_BT in (advantages_BT, logprobs_BT)
    ]
    return keep(centred[0] * centred[1], batch.mask_BT)


def clip_cov(
    batch: TokenBatch,
    *,
    cov_share: float = 0.0002,
    cov_low: float = 1.0,
    cov_high: float = 5.0,
    cov_seed: int = 1,
) -> TokenBatch:
    """Clip-Cov: weight 0 on a random `cov_share` of the tokens, drawn where cov_low < covariance <
    cov_high.

    https://arxiv.org/abs/2505.22617. A token's draw is seeded by what its episode says, not by
    where its row stands. Before an update no ratio is clipped yet; verl also passes over tokens
    that PPO's clip has cut by then.

    Raises:
        ConfigError: the bounds leave nothing between them.
    """
    if cov_low >= cov_high:
        raise ConfigError(f"cov_low={cov_low} must be below cov_high={cov_high}")
    covariance_BT = covariance(batch)
    between_BT = batch.mask_BT & (covariance_BT > cov_low) & (covariance_BT < cov_high)
    chosen_BT = _highest(_draws(batch, cov_seed), between_BT, _count(batch, "cov_share", cov_share))
    return weigh(batch, 1.0 - chosen_BT.double())


def select_kl_cov(batch: TokenBatch, *, kl_cov_share: float = 0.002) -> TokenBatch:
    """KL-Cov's tokens: the `kl_cov_share` of highest covariance, for the term `kl_cov`. As in
    `clip_cov`'s paper.

    Only where it is above 0: in a step without signal all are 0, and none of those ties is a reason
        to hold a token.
    """
    covariance_BT = covariance(batch)
    chosen_BT = _highest(
        covariance_BT, covariance_BT > 0, _count(batch, "kl_cov_share", kl_cov_share)
    )
    return _selected(batch, chosen_BT)


@needs("entropy")
def select_forks(batch: TokenBatch, *, fork_share: float = 0.2) -> TokenBatch:
    """SimKO's forking tokens: the `fork_share` of highest entropy, for the surrogate `simko`.

    https://arxiv.org/abs/2510.14807; its code takes the quantile of every row by itself.
    """
    return _selected(batch, _most_uncertain(batch, "fork_share", fork_share))


@needs("entropy")
def train_high_entropy(batch: TokenBatch, *, entropy_share: float = 0.2) -> TokenBatch:
    """Weight 0 on all but the `entropy_share` of tokens of highest entropy: the 80/20 rule.

    https://arxiv.org/abs/2506.01939. The denominator counts every trained token, as in the paper: a
    token that is kept weighs what it did. TRL's `top_entropy_quantile` divides alike, but takes its
    quantile per micro-batch, of the policy as it moves, and narrows its entropy bonus to the same
    tokens (and to their count).
    """
    return weigh(batch, _most_uncertain(batch, "entropy_share", entropy_share).double())


def _most_uncertain(batch: TokenBatch, name: str, share: float) -> Tensor:
    if batch.entropy_BT is None:
        raise ValueError(
            f"{name} reads batch.entropy_BT, which is None: score the batch before the update"
        )
    return _highest(batch.entropy_BT, batch.mask_BT, _count(batch, name, share))


def _selected(batch: TokenBatch, chosen_BT: Tensor) -> TokenBatch:
    if batch.selected_BT is not None:
        raise ConfigError(
            "two parts of the recipe select tokens, and there is one selection: leave one of"
            " them out"
        )
    return replace(batch, selected_BT=chosen_BT)


def _count(batch: TokenBatch, name: str, share: float) -> int:
    """A share of the trained tokens, rounded up (but not for what floating point adds)."""
    if share > 1:
        raise ConfigError(
            f"{name}={share} must be from 0 to 1: it is a share of the trained tokens"
        )
    return math.ceil(share * int(batch.mask_BT.sum()) - 1e-9)


def _highest(values_BT: Tensor, among_BT: Tensor, count: int) -> Tensor:
    """True at the `count` highest values among these places (all of them, if they are fewer), ties
    included.
    """
    values_N = values_BT[among_BT]
    count = min(count, len(values_N))
    if count < 1:
        return torch.zeros_like(among_BT)
    return among_BT & (values_BT >= values_N.topk(count).values[-1])


def _draws(batch: TokenBatch, seed: int) -> Tensor:
    """A number from [0, 1) for every trained token, from its episode's ids and its place among
    them.
    """
    rows_B = torch.argsort(batch.episode_B, stable=True)
    mask_BT = batch.mask_BT[rows_B]
    _, counts = torch.unique_consecutive(
        batch.episode_B[rows_B].repeat_interleave(mask_BT.sum(1)), return_counts=True
    )
    said = torch.split(batch.ids_BT[rows_B][mask_BT].cpu(), counts.tolist())
    codes = [zlib.crc32(ids.numpy().astype(np.int64).tobytes()) for ids in said]
    draws = [
        np.random.default_rng((seed, code)).random(len(ids))
        for code, ids in zip(codes, said, strict=True)
    ]
    drawn_N = torch.from_numpy(np.concatenate([*draws, np.zeros(0)])).to(mask_BT.device)
    draws_BT = torch.zeros(mask_BT.shape, dtype=torch.float64, device=mask_BT.device)
    draws_BT[rows_B] = draws_BT.masked_scatter(mask_BT, drawn_N)
    return draws_BT

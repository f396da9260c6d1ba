"""Every loss that a run can be given, and one batch on which all of them can be judged."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import torch
from trainer_cases import PAD, branch, episode

from agentrl.trainers.algorithms.losses import (
    PolicyLoss,
    by_constant,
    by_episode,
    by_episode_sum,
    by_token,
    ppo_clip,
)
from agentrl.trainers.algorithms.regularisers import (
    KL_ESTIMATORS,
    anchor_kl,
    entropy_bonus,
    kl_cov,
    kl_penalty,
    simko,
)
from agentrl.trainers.algorithms.surrogates import (
    cispo,
    dppo_kl,
    dppo_topk_kl,
    dppo_topk_tv,
    dppo_tv,
    gmpo,
    gspo,
    gspo_token,
    importance_weighted,
    policy_gradient,
    ppo_dual_clip,
    sapo,
    topr,
    topr_token,
    vespo,
)
from agentrl.trainers.batch import PolicyOutput, TokenBatch, pack
from agentrl.trajectory import Group, Trajectory

BAND = {"clip_low": 0.05, "clip_high": 0.05}
SURROGATES = (
    policy_gradient,
    importance_weighted,
    ppo_clip,
    ppo_dual_clip,
    partial(cispo, clip_high=0.5),
    sapo,
    topr_token,
    partial(dppo_tv, divergence_max=0.1),
    dppo_kl,
    dppo_topk_tv,
    dppo_topk_kl,
    partial(gspo, **BAND),
    partial(gspo_token, **BAND),
    gmpo,
    topr,
    vespo,
)
AGGREGATES = (by_token, by_episode, by_episode_sum, by_constant)
TERMS = (
    partial(kl_penalty, kl_coef=0.1, kl_estimator="k1"),
    partial(kl_cov, kl_cov_coef=0.2),
    partial(entropy_bonus, entropy_coef=0.01),
)
by_five = partial(by_constant, norm_tokens=5)
wide = partial(simko, smoothing=0.3, top1_penalty=1.4)
REAL = [
    *(PolicyLoss(surrogate, AGGREGATES[i % 4]) for i, surrogate in enumerate(SURROGATES)),
    *(PolicyLoss(surrogate, by_episode) for i, surrogate in enumerate(SURROGATES) if i % 4 != 1),
    PolicyLoss(importance_weighted, by_token, (anchor_kl,)),
    *(PolicyLoss(ppo_clip, aggregate, TERMS) for aggregate in (by_token, by_episode, by_five)),
    *(PolicyLoss(wide, aggregate, TERMS) for aggregate in (by_token, by_episode, by_constant)),
    *(
        PolicyLoss(wide, by_token, (partial(kl_penalty, kl_coef=1.0, kl_estimator=k, kl_ratio=r),))
        for k in KL_ESTIMATORS
        for r in (True, False)
    ),
]


# --- one scene for all losses


def scene(*groups: Group) -> tuple[TokenBatch, PolicyOutput]:
    """A batch with all that a loss reads, and what a policy says about it.

    The n-th trained token gets the n-th value, wherever it stands, so batches that differ in what
    tools said or in their rows can be compared. No two tokens share a ratio or an advantage.
    """
    batch = pack(groups, PAD)
    n, mask_BT = torch.arange(batch.n_tokens, dtype=torch.float64), batch.mask_BT

    def at_tokens(values_N, elsewhere=0):
        shape = (*mask_BT.shape, *values_N.shape[1:])
        blank = torch.full(shape, elsewhere, dtype=values_N.dtype)
        blank[mask_BT] = values_N
        return blank

    old_N = -1.3 - 0.5 * torch.sin(1.7 * n)
    now_N = old_N + 0.7 * torch.sin(2.3 * n + 1) - 0.1
    other_N2 = torch.stack([-2.5 + 0.3 * torch.sin(n), -3.0 + 0.3 * torch.cos(n)], 1)
    top_N2 = other_N2 + 0.3 * torch.sin(torch.stack([2 * n, 3 * n], 1))
    batch = replace(
        batch,
        old_logprobs_BT=at_tokens(old_N),
        ref_logprobs_BT=at_tokens(old_N + 0.3 * torch.sin(1.1 * n)),
        advantages_BT=at_tokens(torch.cos(0.9 * n) + 0.2),
        selected_BT=at_tokens(torch.sin(3.7 * n) > -0.4),
        version_BT=at_tokens((2 * torch.sin(0.7 * n)).round().int() + 5, -1),
        version=7,
        weights_BT=at_tokens(0.9 + 0 * n),
        values_BT=at_tokens(now_N + 0.7 * torch.cos(1.3 * n)),
        returns_BT=at_tokens(torch.sin(2.9 * n)),
        top_ids_BTK=torch.stack([batch.ids_BT + 7, batch.ids_BT + 9], -1),
        top_logprobs_BTK=at_tokens(other_N2),
    )
    said = (at_tokens(now_N).requires_grad_(), at_tokens(torch.sin(n).abs()), at_tokens(top_N2))
    return batch, PolicyOutput(*said)


def rows_of(output, rows, width=None):
    """What the output says of some rows, cut to a width."""
    said = (output.logprobs_BT, output.entropy_BT, output.top_logprobs_BTK)
    return PolicyOutput(*(part[rows][:, :width] for part in said))


def judged(loss, batch, output, leaf_BT=None):
    """Loss, gradient at the trained tokens in their order, and metrics."""
    leaf_BT = output.logprobs_BT if leaf_BT is None else leaf_BT
    value, metrics = loss(output, batch)
    return value.detach(), torch.autograd.grad(value, leaf_BT, retain_graph=True)[0], metrics


def shaped(*shapes):
    """Episodes with turns of (sampled, observed) tokens; the first one in one row, and in two."""
    whole, *others = (branch(2, *turns) for turns in shapes)
    first = Trajectory(whole.segments[:3])
    fork = first.fork().extend(*whole.segments[3:])
    rest = [episode(one, sample=1 + i) for i, one in enumerate(others)]
    return Group((episode(whole), *rest)), Group((episode(first, fork), *rest))


SHAPES = ([(3, 2), (4, 1), (2, 0)], [(2, 3), (3, 0)], [(5, 0)], [(1, 1), (1, 0)])


def assert_same(first, second, batches):
    (value, gradient_BT, _), (other_value, other_BT, _) = first, second
    assert torch.allclose(value, other_value, atol=1e-12)
    trained, other = (g[b.mask_BT] for g, b in zip((gradient_BT, other_BT), batches, strict=True))
    assert torch.allclose(trained, other, atol=1e-12)
    assert trained.abs().max() > 0

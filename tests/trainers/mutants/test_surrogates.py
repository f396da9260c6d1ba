"""What every surrogate must leave alone, each with mutants that its check must flag (see
test_mutants.py).
"""

from __future__ import annotations

import math
from dataclasses import replace
from functools import partial

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from trainer_cases import PAD, batch_of, branch, episode, quick

from agentrl.trainers.algorithms.losses import (
    PolicyLoss,
    by_constant,
    by_episode,
    by_episode_sum,
    by_token,
    clipped_objective,
    keep,
    ppo_clip,
)
from agentrl.trainers.algorithms.regularisers import anchor_kl
from agentrl.trainers.algorithms.sequence_surrogates import (
    episode_mean,
    gmpo,
    gspo,
    gspo_token,
    topr,
    vespo,
)
from agentrl.trainers.algorithms.surrogates import (
    cispo,
    dppo_kl,
    dppo_topk_kl,
    dppo_topk_tv,
    dppo_tv,
    importance_weighted,
    policy_gradient,
    ppo_dual_clip,
    sapo,
    topr_token,
    weighted_policy_gradient,
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
REAL = [
    *(PolicyLoss(surrogate, AGGREGATES[i % 4]) for i, surrogate in enumerate(SURROGATES)),
    *(PolicyLoss(surrogate, by_episode) for i, surrogate in enumerate(SURROGATES) if i % 4 != 1),
    PolicyLoss(importance_weighted, by_token, (anchor_kl,)),
]

# The n-th trained token of a batch gets the n-th value, wherever it stands, so batches that differ
# in what was observed or in their rows can be compared.


def scene(*groups: Group) -> tuple[TokenBatch, PolicyOutput]:
    """A batch in which no two tokens have the same ratio or advantage, and what a policy says about
    it.
    """
    batch = pack(groups, PAD)
    count, mask_BT = torch.arange(batch.n_tokens, dtype=torch.float64), batch.mask_BT

    def at_tokens(values_N):
        blank = torch.zeros(*mask_BT.shape, *values_N.shape[1:], dtype=values_N.dtype)
        blank[mask_BT] = values_N
        return blank

    old_N = -1.3 - 0.5 * torch.sin(1.7 * count)
    logprobs_BT = at_tokens(old_N + 0.7 * torch.sin(2.3 * count + 1) - 0.1).requires_grad_()
    other_N2 = torch.stack([-2.5 + 0.3 * torch.sin(count), -3.0 + 0.3 * torch.cos(count)], 1)
    top_N2 = other_N2 + 0.3 * torch.sin(torch.stack([2 * count, 3 * count], 1))
    batch = replace(
        batch,
        old_logprobs_BT=at_tokens(old_N),
        advantages_BT=at_tokens(torch.cos(0.9 * count) + 0.2),
        top_ids_BTK=torch.stack([batch.ids_BT + 7, batch.ids_BT + 9], -1),
        top_logprobs_BTK=at_tokens(other_N2),
    )
    return batch, PolicyOutput(logprobs_BT, top_logprobs_BTK=at_tokens(top_N2))


def judged(loss, batch, output, leaf_BT=None):
    """Loss, gradient at the trained tokens in their order, and metrics."""
    leaf_BT = output.logprobs_BT if leaf_BT is None else leaf_BT
    value, metrics = loss(output, batch)
    return value.detach(), torch.autograd.grad(value, leaf_BT)[0], metrics


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


# --- 5: what stands at mask 0 is nobody's business


def check_masked_values_do_not_matter(loss):
    """1e6, infinity or NaN at mask 0 changes neither loss nor gradient; there the gradient is
    exactly 0.
    """
    batch, output = scene(shaped(*SHAPES)[1])
    clean = judged(loss, batch, output)
    mask_BT = batch.mask_BT
    for garbage in (1e6, -1e6, math.inf, math.nan):
        leaf_BT = torch.where(mask_BT, output.logprobs_BT.detach(), garbage).requires_grad_()
        spoilt = replace(
            batch,
            old_logprobs_BT=torch.where(mask_BT, batch.old_logprobs_BT, garbage / 2),
            advantages_BT=torch.where(mask_BT, batch.advantages_BT, garbage),
            top_logprobs_BTK=torch.where(mask_BT[..., None], batch.top_logprobs_BTK, garbage),
        )
        top_BTK = torch.where(mask_BT[..., None], output.top_logprobs_BTK, garbage)
        found = judged(loss, spoilt, PolicyOutput(leaf_BT, top_logprobs_BTK=top_BTK))
        assert torch.equal(found[0], clean[0])
        assert torch.equal(found[1], clean[1])
        assert found[2] == clean[2]
        assert (found[1][~mask_BT] == 0).all()


def loss_multiplies_by_mask(output, batch):
    return (sapo(output, batch) * batch.mask_BT).sum() / batch.n_tokens, {}


def loss_means_before_the_mask(output, batch):
    mean_B = ((output.logprobs_BT - batch.anchor_BT) * batch.mask_BT).sum(1) / batch.mask_BT.sum(1)
    return by_episode(clipped_objective(mean_B.exp()[:, None], batch, 0.05, 0.05), batch), {}


def loss_selects_after_arithmetic(output, batch):
    return by_token(cispo(output, batch), batch), {}


# --- 2: tool output is no part of an episode's ratio


def check_observations_change_nothing(loss):
    """More tool output between the same tokens changes no loss and no gradient."""
    more = [[(sampled, 3 * observed + 2) for sampled, observed in turns] for turns in SHAPES]
    (batch, output), (long, long_output) = scene(shaped(*SHAPES)[0]), scene(shaped(*more)[0])
    assert long.ids_BT.shape[1] > batch.ids_BT.shape[1]
    assert_same(judged(loss, batch, output), judged(loss, long, long_output), (batch, long))


def gspo_over_the_width(output, batch):
    gap_B = (output.logprobs_BT - batch.anchor_BT).sum(1) / batch.lengths_B
    return clipped_objective(gap_B.exp()[:, None], batch, 0.05, 0.05)


# --- 4: an episode is an episode, in however many rows


def check_two_rows_are_one_episode(loss):
    """Splitting one episode into two rows changes no loss and no gradient of any token."""
    (one, one_output), (two, two_output) = (scene(g) for g in shaped(*SHAPES))
    assert len(two) == len(one) + 1
    assert_same(judged(loss, one, one_output), judged(loss, two, two_output), (one, two))


def _row_mean(values_BT, batch):
    return keep(values_BT, batch.mask_BT).sum(1, keepdim=True) / batch.mask_BT.sum(1, keepdim=True)


def gspo_per_row(output, batch):
    ratio_B1 = _row_mean(output.logprobs_BT - batch.anchor_BT, batch).exp()
    return clipped_objective(ratio_B1, batch, 0.05, 0.05)


def gmpo_divides_by_its_row(output, batch):
    gap_BT = (output.logprobs_BT - batch.anchor_BT).clamp(-0.4, 0.4)
    rows_B1 = batch.mask_BT.sum(1, keepdim=True)
    return (
        -(episode_mean(gap_BT, batch) * batch.episode_tokens_B[:, None] / rows_B1).exp()
        * batch.advantages_BT
    )


def topr_product_of_its_row(output, batch):
    product_B1 = (output.logprobs_BT - batch.anchor_BT).sum(1, keepdim=True).clamp(max=0.0).exp()
    return weighted_policy_gradient(
        torch.where(batch.advantages_BT < 0, product_B1, 1.0), output, batch
    )


# --- 6: a micro-batch is a part of its batch


def check_micro_batches_add_up(loss):
    """However a batch is cut into micro-batches, losses, gradients and metrics add up to those of
    the batch.
    """
    turns = st.lists(st.tuples(st.integers(1, 4), st.integers(0, 3)), min_size=1, max_size=3)

    @quick
    @given(st.lists(turns, min_size=2, max_size=6), st.integers(1, 60))
    def partition(shapes, micro_tokens):
        batch, output = scene(shaped([(2, 1), (3, 1), (1, 0)], *shapes)[1])
        value, gradient_BT, metrics = judged(loss, batch, output)
        parts = []
        for index in batch.chunks(micro_tokens):
            part = batch.rows(index)
            cut = [
                x[index, : part.ids_BT.shape[1]]
                for x in (output.logprobs_BT, output.top_logprobs_BTK)
            ]
            parts.append(
                judged(
                    loss, part, PolicyOutput(cut[0], top_logprobs_BTK=cut[1]), output.logprobs_BT
                )
            )
        assert torch.allclose(sum(p[0] for p in parts), value, atol=1e-10)
        assert torch.allclose(sum(p[1] for p in parts), gradient_BT, atol=1e-10)
        for name in ("clip_low", "clip_high") if metrics else ():
            assert sum(p[2][name] for p in parts) == pytest.approx(metrics[name], abs=1e-10)

    partition()


def gmpo_mean_over_rows(output, batch):
    output, batch = output.silent(batch.mask_BT), batch.silent()
    return _row_mean(gmpo(output, batch), batch).mean(), {}


def ppo_whitens_its_micro_batch(output, batch):
    advantages_N = batch.advantages_BT[batch.mask_BT]
    white_BT = keep(batch.advantages_BT - advantages_N.mean(), batch.mask_BT)
    return ppo_clip(output, replace(batch, advantages_BT=white_BT))


def dppo_bounds_the_quantile_of_its_micro_batch(output, batch):
    gap_BT = (output.logprobs_BT.exp() - batch.anchor_BT.exp()).detach().abs()
    return dppo_tv(output, batch, divergence_max=float(gap_BT[batch.mask_BT].quantile(0.5)))


# --- 9: twice the batch, the same loss


def check_twice_the_batch_is_the_same(loss):
    """The same batch twice over has the same loss, term by term, and the same clipped fraction."""
    once, output = scene(shaped(*SHAPES)[1])
    both = torch.arange(len(once)).repeat(2)
    episodes = len(once.tokens_E)
    twice = replace(
        once.rows(both),
        n_tokens=2 * once.n_tokens,
        n_episodes=2 * once.n_episodes,
        tokens_E=once.tokens_E.repeat(2),
        episode_B=torch.cat((once.episode_B, once.episode_B + episodes)),
    )
    again = PolicyOutput(output.logprobs_BT[both], top_logprobs_BTK=output.top_logprobs_BTK[both])
    assert loss(again, twice)[1] == pytest.approx(loss(output, once)[1], abs=1e-12)


def dppo_bound_over_tokens(output, batch):
    return dppo_tv(output, batch, divergence_max=4 / batch.n_tokens)


def cispo_bounds_weight_and_advantage_over_tokens(output, batch):
    weights_BT = (output.logprobs_BT - batch.anchor_BT).exp() * batch.advantages_BT / batch.n_tokens
    return -weights_BT.detach().clamp(-0.05, 0.05) * batch.n_tokens * output.logprobs_BT


def penalty_is_summed(output, batch):
    return importance_weighted(output, batch) + anchor_kl(output, batch).sum()


# --- the table


def _losses(*terms):
    return [PolicyLoss(term, by_episode) for term in terms]


CASES = [
    (
        check_masked_values_do_not_matter,
        [loss_multiplies_by_mask, loss_means_before_the_mask, loss_selects_after_arithmetic],
    ),
    (check_observations_change_nothing, _losses(gspo_over_the_width)),
    (
        check_two_rows_are_one_episode,
        _losses(gspo_per_row, gmpo_divides_by_its_row, topr_product_of_its_row),
    ),
    (
        check_micro_batches_add_up,
        [
            gmpo_mean_over_rows,
            *_losses(ppo_whitens_its_micro_batch, dppo_bounds_the_quantile_of_its_micro_batch),
        ],
    ),
    (
        check_twice_the_batch_is_the_same,
        _losses(
            dppo_bound_over_tokens, cispo_bounds_weight_and_advantage_over_tokens, penalty_is_summed
        ),
    ),
]


def _id(value):
    if isinstance(value, PolicyLoss):
        return f"{_id(value.surrogate)}-{value.aggregate.__name__}"
    return getattr(value, "func", value).__name__


@pytest.mark.parametrize("check", [check for check, _ in CASES], ids=_id)
@pytest.mark.parametrize("real", REAL, ids=_id)
def test_the_real_function_passes(check, real):
    check(real)


@pytest.mark.parametrize(
    ("check", "mutant"), [(c, mutant) for c, mutants in CASES for mutant in mutants], ids=_id
)
def test_the_mutant_is_flagged(check, mutant):
    with pytest.raises(AssertionError):
        check(mutant)


def test_the_scene_clips_something_everywhere():
    """A check that never meets a clipped token would prove little."""
    batch, output = scene(shaped(*SHAPES)[1])
    soft = (policy_gradient, importance_weighted, sapo, topr_token, topr, vespo, cispo)
    for surrogate in SURROGATES:
        metrics = PolicyLoss(surrogate, by_token)(output, batch)[1]
        hard = getattr(surrogate, "func", surrogate) not in soft
        assert (metrics["clip_low"] + metrics["clip_high"] > 0) == hard, surrogate


def test_an_episode_keeps_the_rows_that_its_ratio_needs():
    """Rows without an advantage of their own still belong to the sequence ratio of an episode that
    has one.
    """
    batch, output = scene(shaped(*SHAPES)[1])
    quiet = replace(batch, advantages_BT=batch.advantages_BT.clone())
    quiet.advantages_BT[1] = quiet.advantages_BT[3] = 0.0
    few = quiet.informative()
    assert few.episode_B.tolist() == [0, 0, 1, 3]
    for surrogate in (partial(gspo, **BAND), gmpo, topr, vespo):
        loss = PolicyLoss(surrogate, by_episode)
        whole = judged(loss, quiet, output)
        kept = output.logprobs_BT[[0, 1, 2, 4], : few.ids_BT.shape[1]]
        assert_same(
            whole, judged(loss, few, PolicyOutput(kept), output.logprobs_BT), (quiet, quiet)
        )


def test_batches_carry_top_tokens_through_micro_batches():
    batch, _ = scene(shaped(*SHAPES)[0])
    assert batch_of(shaped(*SHAPES)[0]).top_ids_BTK is None
    for part in batch.split(20):
        assert part.top_ids_BTK.shape == part.top_logprobs_BTK.shape == (*part.ids_BT.shape, 2)
        assert (part.silent().top_logprobs_BTK[~part.mask_BT] == 0).all()

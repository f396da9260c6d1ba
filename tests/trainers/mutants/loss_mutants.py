"""Wrong losses: surrogates, regularisers and how they are averaged."""

from __future__ import annotations

import math
from dataclasses import replace
from functools import partial

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from loss_scene import (
    REAL,
    SHAPES,
    TERMS,
    assert_same,
    judged,
    rows_of,
    scene,
    shaped,
    wide,
)
from trainer_cases import quick

from agentrl.trainers.algorithms.losses import (
    PolicyLoss,
    by_constant,
    by_episode,
    by_token,
    clipped_objective,
    importance_ratio,
    keep,
    ppo_clip,
)
from agentrl.trainers.algorithms.regularisers import anchor_kl, kl_cov, kl_penalty
from agentrl.trainers.algorithms.surrogates import (
    cispo,
    dppo_tv,
    episode_mean,
    gmpo,
    importance_weighted,
    sapo,
    weighted_policy_gradient,
)
from agentrl.trainers.batch import PolicyOutput

# --- 5: what stands at mask 0 is nobody's business


def check_masked_values_do_not_matter(loss):
    """1e6, infinity or NaN at mask 0 changes nothing, and has no gradient; no token, no loss."""
    batch, output = scene(shaped(*SHAPES)[1])
    value, gradient_BT, metrics = judged(loss, batch, output)
    mask_BT = batch.mask_BT
    for garbage in (1e6, -1e6, math.inf, -math.inf, math.nan):
        spoilt = {
            name: torch.where(mask_BT, getattr(batch, name), garbage)
            for name in (
                "ref_logprobs_BT",
                "advantages_BT",
                "weights_BT",
                "values_BT",
                "returns_BT",
            )
        }
        spoilt |= {
            "old_logprobs_BT": torch.where(mask_BT, batch.old_logprobs_BT, garbage / 2),
            "top_logprobs_BTK": torch.where(mask_BT[..., None], batch.top_logprobs_BTK, garbage),
            "selected_BT": batch.selected_BT | ~mask_BT,
        }
        said = PolicyOutput(
            torch.where(mask_BT, output.logprobs_BT.detach(), garbage).requires_grad_(),
            torch.where(mask_BT, output.entropy_BT, garbage),
            torch.where(mask_BT[..., None], output.top_logprobs_BTK, garbage),
        )
        found = judged(loss, replace(batch, **spoilt), said)
        assert torch.equal(found[0], value) and torch.equal(found[1], gradient_BT)
        assert found[2] == metrics
        assert (found[1][~mask_BT] == 0).all()
        nothing = replace(batch, **spoilt, mask_BT=torch.zeros_like(mask_BT))
        assert loss(said, nothing)[0].item() == 0


def loss_multiplies_by_mask(output, batch):
    ratio_BT = importance_ratio(output, batch)
    return -(ratio_BT * batch.advantages_BT * batch.mask_BT).sum() / batch.n_tokens, {}


def loss_selects_after_arithmetic(output, batch):
    per_token_BT = -(output.logprobs_BT - batch.old_logprobs_BT).exp() * batch.advantages_BT
    return torch.where(batch.mask_BT, per_token_BT, 0.0).sum() / batch.n_tokens, {}


def loss_ignores_the_mask(output, batch):
    per_token_BT = ppo_clip(output, batch)
    return torch.where(batch.attention_BT, per_token_BT, 0.0).sum() / batch.n_tokens, {}


def sapo_multiplies_by_mask(output, batch):
    return (sapo(output, batch) * batch.mask_BT).sum() / batch.n_tokens, {}


def loss_means_before_the_mask(output, batch):
    mean_B = ((output.logprobs_BT - batch.anchor_BT) * batch.mask_BT).sum(1) / batch.mask_BT.sum(1)
    return by_episode(clipped_objective(mean_B.exp()[:, None], batch, 0.05, 0.05), batch), {}


def cispo_selects_after_arithmetic(output, batch):
    return by_token(cispo(output, batch), batch), {}


def kl_cov_by_selection(output, batch):
    """The term at the selected tokens by index, wherever they stand."""
    gap_BT = (output.logprobs_BT - batch.old_logprobs_BT).abs()
    loss, metrics = PolicyLoss(ppo_clip, by_token)(output, batch)
    return loss + gap_BT[batch.selected_BT].sum() / batch.n_tokens, metrics


def entropy_bonus_of_the_width(output, batch):
    return (output.logprobs_BT.square() * batch.mask_BT).sum() / batch.ids_BT.numel(), {}


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


def kl_of_rows(output, batch):
    """A KL per row, averaged over rows."""
    kl_BT = keep(output.logprobs_BT - batch.ref_logprobs_BT, batch.mask_BT)
    return (kl_BT.sum(1) / batch.mask_BT.sum(1)).sum() / batch.n_episodes, {}


def simko_by_row_advantage(output, batch):
    """The sign of the row's mean advantage decides for all its tokens."""
    mean_B1 = keep(batch.advantages_BT, batch.mask_BT).sum(1, keepdim=True) / batch.mask_BT.sum(
        1, keepdim=True
    )
    row = replace(batch, advantages_BT=keep(mean_B1.expand_as(batch.advantages_BT), batch.mask_BT))
    return PolicyLoss(wide, by_token)(output, row)


# --- 6: a micro-batch is a part of its batch


def check_micro_batches_add_up(loss):
    """However a batch is cut, losses, gradients and metrics add up to those of the batch."""
    turns = st.lists(st.tuples(st.integers(1, 4), st.integers(0, 3)), min_size=1, max_size=3)

    @quick
    @given(st.lists(turns, min_size=2, max_size=6), st.integers(1, 60))
    def partition(shapes, micro_tokens):
        batch, output = scene(shaped([(2, 1), (3, 1), (1, 0)], *shapes)[1])
        value, gradient_BT, metrics = judged(loss, batch, output)
        parts = []
        for index in batch.chunks(micro_tokens):
            part = batch.rows(index)
            said = rows_of(output, index, part.ids_BT.shape[1])
            parts.append(judged(loss, part, said, output.logprobs_BT))
        assert torch.allclose(sum(p[0] for p in parts), value, atol=1e-10)
        assert torch.allclose(sum(p[1] for p in parts), gradient_BT, atol=1e-10)
        for name in metrics.keys() - {"ratio_max", "gap_max"}:
            assert sum(p[2][name] for p in parts) == pytest.approx(metrics[name], abs=1e-10)

    partition()


def loss_divides_by_its_own_tokens(output, batch):
    own = replace(batch, n_tokens=int(batch.mask_BT.sum()))
    return PolicyLoss(ppo_clip, by_token, TERMS)(output, own)


def loss_divides_by_its_own_width(output, batch):
    return PolicyLoss(ppo_clip, partial(by_constant, norm_tokens=batch.ids_BT.shape[1]), TERMS)(
        output, batch
    )


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


def kl_cov_of_the_mean_token(output, batch):
    """A mean over the selected tokens of the micro-batch."""
    gap_BT = keep((output.logprobs_BT - batch.old_logprobs_BT).abs(), batch.mask_BT)
    loss, metrics = PolicyLoss(ppo_clip, by_token)(output, batch)
    return loss + gap_BT[batch.selected_BT].mean(), metrics


# --- 9: twice the batch, the same loss


def check_twice_the_batch_is_the_same(loss):
    """The same batch twice over has the same loss, term by term, and the same clipped fraction."""
    once, output = scene(shaped(*SHAPES)[1])
    both = torch.arange(len(once)).repeat(2)
    twice = replace(
        once.rows(both),
        n_tokens=2 * once.n_tokens,
        n_episodes=2 * once.n_episodes,
        tokens_E=once.tokens_E.repeat(2),
        episode_B=torch.cat((once.episode_B, once.episode_B + len(once.tokens_E))),
    )
    expected = loss(output, once)[1]
    assert loss(rows_of(output, both), twice)[1] == pytest.approx(expected, abs=1e-12)


def loss_sums_its_kl(output, batch):
    loss, metrics = PolicyLoss(ppo_clip, by_token, TERMS)(output, batch)
    total = keep(kl_penalty(output, batch, kl_coef=0.1), batch.mask_BT).sum()
    return loss + total, metrics | {"loss_kl_penalty": float(total.detach())}


def loss_clips_in_units_of_the_batch(output, batch):
    """Advantages were divided by N before the bound on advantage x log-probability was applied."""
    loss, metrics = PolicyLoss(ppo_clip, by_token, TERMS)(output, batch)
    with torch.no_grad():
        moved_BT = keep(
            batch.advantages_BT / batch.n_tokens * output.logprobs_BT, batch.mask_BT
        ).abs()
        return loss, metrics | {"clip_high": float((moved_BT > 0.01).sum() / batch.n_tokens)}


def kl_cov_summed(output, batch):
    """SkyRL's sum instead of the mean."""
    loss, metrics = PolicyLoss(ppo_clip, by_token)(output, batch)
    total = keep(kl_cov(output, batch), batch.mask_BT).sum()
    return loss + total, metrics | {"loss_kl_cov": float(total.detach())}


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
        REAL,
        [
            loss_multiplies_by_mask,
            loss_selects_after_arithmetic,
            loss_ignores_the_mask,
            sapo_multiplies_by_mask,
            loss_means_before_the_mask,
            cispo_selects_after_arithmetic,
            kl_cov_by_selection,
            entropy_bonus_of_the_width,
        ],
    ),
    (
        check_observations_change_nothing,
        REAL,
        [entropy_bonus_of_the_width, *_losses(gspo_over_the_width)],
    ),
    (
        check_two_rows_are_one_episode,
        REAL,
        [
            kl_of_rows,
            simko_by_row_advantage,
            *_losses(gspo_per_row, gmpo_divides_by_its_row, topr_product_of_its_row),
        ],
    ),
    (
        check_micro_batches_add_up,
        REAL,
        [
            loss_divides_by_its_own_tokens,
            loss_divides_by_its_own_width,
            kl_cov_of_the_mean_token,
            gmpo_mean_over_rows,
            *_losses(ppo_whitens_its_micro_batch, dppo_bounds_the_quantile_of_its_micro_batch),
        ],
    ),
    (
        check_twice_the_batch_is_the_same,
        REAL,
        [
            loss_sums_its_kl,
            loss_clips_in_units_of_the_batch,
            kl_cov_summed,
            *_losses(
                dppo_bound_over_tokens,
                cispo_bounds_weight_and_advantage_over_tokens,
                penalty_is_summed,
            ),
        ],
    ),
]

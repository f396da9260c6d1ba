"""Wrong corrections and selections.

A check takes a step and reads off what it decided: the weight of every trained token, or whether it
was selected.
"""

from __future__ import annotations

import math
from dataclasses import replace
from functools import partial

import torch
from trainer_cases import PAD, batch_of, branch, episode

from agentrl.trainers.algorithms.corrections import (
    clip_cov,
    covariance,
    decay_stale,
    drop_off_policy_negatives,
    drop_overlong,
    drop_stale,
    masked_is,
    policy_ratio,
    reject_off_policy,
    select_forks,
    select_kl_cov,
    train_high_entropy,
    truncated_is,
    weigh,
)
from agentrl.trainers.algorithms.losses import keep
from agentrl.trajectory import Group, Trajectory
from agentrl.types import EndReason

SAMPLED = ((3, 4, 2), (2, 2), (5, 1), (6,), (1, 3))


def filled(group, seed=0):
    """A packed group whose k-th trained token is the same whatever stands between."""
    batch = batch_of(group)
    count, generator = int(batch.mask_BT.sum()), torch.Generator().manual_seed(seed)

    def by_token(values_N, fill=0.0):
        blank_BT = torch.full(batch.mask_BT.shape, fill, dtype=values_N.dtype)
        return blank_BT.masked_scatter(batch.mask_BT, values_N)

    normal = torch.randn((4, count), generator=generator, dtype=torch.float64)
    return replace(
        batch,
        ids_BT=by_token(torch.randint(1, 99, (count,), generator=generator), PAD),
        old_logprobs_BT=by_token(-normal[0].abs()),
        proximal_logprobs_BT=by_token(-normal[0].abs() + 0.4 * normal[1]),
        advantages_BT=by_token(2 * normal[2]),
        entropy_BT=by_token(normal[3].abs()),
        version_BT=by_token(torch.randint(3, 8, (count,), generator=generator).int(), -1),
        version=7,
    )


def episodes(observed=0, two_rows=False):
    """Five episodes; tools say `observed` tokens after each turn; the first may be two rows."""
    turns = [[(sampled, observed) for sampled in shape] for shape in SAMPLED]
    whole = [branch(2, *shape) for shape in turns]
    rows = [[one] for one in whole]
    if two_rows:
        first = Trajectory(whole[0].segments[:2])
        rows[0] = [first, first.fork().extend(*whole[0].segments[2:])]
    ends = [
        EndReason.MAX_TURNS if index == 3 else EndReason.SUBMITTED for index in range(len(rows))
    ]
    return Group(tuple(episode(*row, sample=i, end=ends[i]) for i, row in enumerate(rows)))


def decided(step, batch):
    """What the step said of every trained token, in the order of rows."""
    done = step(batch)
    values_BT = done.weights_BT if done.selected_BT is None else done.selected_BT.double()
    assert not values_BT.requires_grad, "weights are numbers"
    assert (done.n_tokens, done.n_episodes) == (batch.n_tokens, batch.n_episodes), (
        "denominators stay"
    )
    assert torch.equal(done.mask_BT, batch.mask_BT)
    return values_BT[batch.mask_BT]


def same(found, expected):
    assert found.shape == expected.shape
    assert torch.allclose(found, expected, atol=1e-12)


def check_observations_do_not_matter(step):
    """Bug 2. Tokens of tools between the turns, however many, change no decision."""
    plain = decided(step, filled(episodes()))
    assert plain.unique().numel() > 1, "the check needs a step that decides something"
    for observed in (1, 7):
        same(decided(step, filled(episodes(observed))), plain)


def check_rows_of_an_episode_count_once(step):
    """Bug 4. An episode in two rows gets the decisions that it gets in one."""
    one, two = filled(episodes(2)), filled(episodes(2, two_rows=True))
    assert len(two) == len(one) + 1
    same(decided(step, two), decided(step, one))


def check_masked_values_do_not_matter(step):
    """Bug 5. Whatever stands at mask 0 changes no decision."""
    batch = filled(episodes(2))
    plain = decided(step, batch)
    fields = ("old_logprobs_BT", "proximal_logprobs_BT", "advantages_BT", "entropy_BT")
    for garbage in (1e6, -math.inf, math.nan):
        dirty = {name: torch.where(batch.mask_BT, getattr(batch, name), garbage) for name in fields}
        ids_BT = torch.where(batch.mask_BT, batch.ids_BT, 77)
        same(decided(step, replace(batch, ids_BT=ids_BT, **dirty)), plain)


def check_order_of_rows_does_not_matter(step):
    """Bug 6. The same rows in another order get the same decisions."""
    batch = filled(episodes(1))
    done = step(batch).rows(torch.tensor([3, 0, 4, 2, 1]))
    expected_BT = done.weights_BT if done.selected_BT is None else done.selected_BT.double()
    same(decided(step, batch.rows(torch.tensor([3, 0, 4, 2, 1]))), expected_BT[done.mask_BT])


def check_other_episodes_do_not_matter(step):
    """Bug 6. What is defined over an episode is the same whatever else is in its batch."""
    batch = filled(episodes(1))
    whole = step(batch)
    for row in range(len(batch)):
        part = batch.rows(torch.tensor([row]))
        same(decided(step, part), whole.rows(torch.tensor([row])).weights_BT[part.mask_BT])


def check_batch_size_does_not_matter(step):
    """Bug 9. A batch twice over gets its decisions twice."""
    batch = filled(episodes(1))
    rows = torch.arange(len(batch)).repeat(2)
    doubled = {
        name: getattr(batch, name).repeat(2)
        for name in ("group_E", "reward_E", "truncated_E", "tokens_E")
    }
    owners_B = torch.arange(2 * len(batch))
    twice = replace(
        batch.rows(rows), episode_B=owners_B, n_tokens=2 * batch.n_tokens, n_episodes=10, **doubled
    )
    same(decided(step, twice), decided(step, batch).repeat(2))


PER_EPISODE = [
    *(
        partial(truncated_is, tis_level=level, tis_high=1.3)
        for level in ("token", "sequence", "geometric")
    ),
    *(
        partial(masked_is, mis_level=level, mis_high=1.3)
        for level in ("token", "sequence", "geometric")
    ),
    partial(reject_off_policy, reject_low=0.95, reject_high=1.1),
    partial(drop_off_policy_negatives, off_policy_limit=0.02),
    partial(decay_stale, stale_decay=0.8),
    partial(drop_stale, max_age=2),
    drop_overlong,
]
PER_STEP = [
    partial(clip_cov, cov_share=0.1, cov_low=0.05),
    partial(select_kl_cov, kl_cov_share=0.11),
    partial(select_forks, fork_share=0.21),
    partial(train_high_entropy, entropy_share=0.19),
]
STEPS = [*PER_EPISODE, *PER_STEP]


# --- mutants


def sequence_weight_per_row(batch):
    log_w_BT = keep(batch.proximal_logprobs_BT - batch.old_logprobs_BT, batch.mask_BT)
    return weigh(batch, log_w_BT.sum(1, keepdim=True).exp().expand_as(log_w_BT))


def sequence_weight_without_the_mask(batch):
    log_w_BT = (batch.proximal_logprobs_BT - batch.old_logprobs_BT).sum(1, keepdim=True)
    return weigh(batch, log_w_BT.exp().expand_as(batch.mask_BT))


def geometric_weight_over_the_width(batch):
    log_w_BT = keep(batch.proximal_logprobs_BT - batch.old_logprobs_BT, batch.mask_BT)
    return weigh(batch, log_w_BT.mean(1, keepdim=True).exp().expand_as(log_w_BT))


def geometric_weight_over_the_row(batch):
    log_w_BT = keep(batch.proximal_logprobs_BT - batch.old_logprobs_BT, batch.mask_BT)
    return weigh(batch, (log_w_BT.sum(1) / batch.mask_BT.sum(1)).exp()[:, None].expand_as(log_w_BT))


def rejection_shrinks_the_mask(batch):
    done = masked_is(batch, mis_high=1.3)
    mask_BT = batch.mask_BT & (done.weights_BT != 0)
    return replace(done, mask_BT=mask_BT, n_tokens=int(mask_BT.sum()))


def weights_of_mean_one(batch):
    """verl's option `rollout_is_batch_normalize`, per micro-batch."""
    ratio_BT = policy_ratio(batch, "token")
    return weigh(batch, ratio_BT / ratio_BT[batch.mask_BT].mean())


def gradient_through_the_weight(batch):
    leaf_BT = batch.proximal_logprobs_BT.clone().requires_grad_()
    return replace(batch, weights_BT=keep(leaf_BT - batch.old_logprobs_BT, batch.mask_BT).exp())


def negatives_dropped_by_row(batch):
    gap_BT = keep(batch.old_logprobs_BT - batch.proximal_logprobs_BT, batch.mask_BT)
    far_B1 = (gap_BT.sum(1) / batch.mask_BT.sum(1))[:, None] > 0.02
    return weigh(batch, (~(far_B1 & (batch.advantages_BT < 0))).double())


def age_from_the_newest_of_the_batch(batch):
    return weigh(batch, 0.8 ** (batch.version_BT[batch.mask_BT].max() - batch.version_BT).double())


def overlong_by_width(batch):
    """AReaL's guess: the longest row was cut off."""
    longest_B1 = (batch.lengths_B == batch.lengths_B.max())[:, None]
    return weigh(batch, (~longest_B1).double().expand_as(batch.mask_BT))


def clip_cov_draws_by_place(batch):
    cov_BT = covariance(batch)
    draws_BT = torch.rand(batch.mask_BT.shape, generator=torch.Generator().manual_seed(1))
    draws_BT = torch.where(batch.mask_BT & (cov_BT > 0.05), draws_BT, -1.0)
    limit = draws_BT.flatten().topk(3).values[-1]
    return weigh(batch, (draws_BT < limit).double())


def clip_cov_of_scaled_advantages(batch):
    """SkyRL's order: advantages are divided by the token count before the bounds are applied."""
    scaled = replace(batch, advantages_BT=batch.advantages_BT / batch.n_tokens)
    return weigh(batch, (covariance(scaled) < 0.01).double())


def covariance_of_all_positions(batch):
    logprobs_BT = batch.old_logprobs_BT
    cov_BT = (batch.advantages_BT - batch.advantages_BT.mean()) * (logprobs_BT - logprobs_BT.mean())
    return replace(batch, selected_BT=(cov_BT > 0.5) & batch.mask_BT)


def one_token_whatever_the_size(batch):
    cov_BT = torch.where(batch.mask_BT, covariance(batch), -math.inf)
    chosen_BT = torch.zeros_like(batch.mask_BT)
    chosen_BT.view(-1)[cov_BT.argmax()] = True
    return replace(batch, selected_BT=chosen_BT)


def entropy_quantile_per_row(batch):
    """The quantile of every row by itself, as SimKO's code takes it."""
    limits = [
        float(e[m].quantile(0.8)) for e, m in zip(batch.entropy_BT, batch.mask_BT, strict=True)
    ]
    return replace(
        batch, selected_BT=batch.mask_BT & (batch.entropy_BT >= torch.tensor(limits)[:, None])
    )


def entropy_quantile_of_all_positions(batch):
    limit = batch.entropy_BT.flatten().quantile(0.8)
    return weigh(batch, (batch.entropy_BT >= limit).double())


CASES = [
    (
        check_observations_do_not_matter,
        STEPS,
        [
            geometric_weight_over_the_width,
            clip_cov_draws_by_place,
            entropy_quantile_of_all_positions,
        ],
    ),
    (
        check_rows_of_an_episode_count_once,
        STEPS,
        [
            sequence_weight_per_row,
            geometric_weight_over_the_row,
            negatives_dropped_by_row,
            overlong_by_width,
            entropy_quantile_per_row,
        ],
    ),
    (
        check_masked_values_do_not_matter,
        STEPS,
        [
            sequence_weight_without_the_mask,
            covariance_of_all_positions,
            entropy_quantile_of_all_positions,
            rejection_shrinks_the_mask,
            gradient_through_the_weight,
        ],
    ),
    (check_order_of_rows_does_not_matter, STEPS, [clip_cov_draws_by_place]),
    (
        check_other_episodes_do_not_matter,
        PER_EPISODE,
        [age_from_the_newest_of_the_batch, overlong_by_width, weights_of_mean_one],
    ),
    (
        check_batch_size_does_not_matter,
        STEPS,
        [clip_cov_of_scaled_advantages, one_token_whatever_the_size, clip_cov_draws_by_place],
    ),
]

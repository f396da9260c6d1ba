"""Recipes with one wrong part: each check of whole recipes must flag them."""

from __future__ import annotations

import math
from dataclasses import fields, replace
from functools import partial

import torch
from mutants import (
    by_row,
    mean_over_rows,
    outcome_at_the_end_of_the_row,
    through_observations,
    whiten_over_all_positions,
    without_late_rewards,
)
from recipe_cases import paid
from recipe_checks import (
    check_a_late_reward_arrives,
    check_an_episode_in_two_rows_is_one,
    check_garbage_outside_the_mask_is_not_read,
    check_masked_tokens_change_nothing,
    check_micro_batches_add_up,
    check_nothing_earned_is_nothing_learnt,
    check_the_kl_gradient,
    check_the_same_groups_twice_are_the_same_loss,
)

from agentrl.trainers.algorithms.advantages import spread, total_reward_E
from agentrl.trainers.algorithms.corrections import covariance, weigh
from agentrl.trainers.algorithms.credit import gae, gigpo, reward_to_go, whiten
from agentrl.trainers.algorithms.losses import clipped_objective, importance_ratio, keep, ppo_clip
from agentrl.trainers.algorithms.parts import step, term
from agentrl.trainers.algorithms.recipes import Recipe, recipe
from agentrl.trainers.algorithms.regularisers import (
    KLPenalty,
    anchor_kl,
    imitate,
    kl_k3,
    kl_penalty,
)
from agentrl.trainers.algorithms.surrogates import gspo, vespo


def row(name: str, **changes) -> Recipe:
    """A recipe of the table with wrong parts in it."""
    return replace(paid(name), **changes)


# --- 2: what a tool said takes no time and has no weight


def mean_over_what_was_read(per_token_BT, batch):
    return keep(per_token_BT, batch.mask_BT).sum() / batch.attention_BT.sum()


def ratio_over_the_row(output, batch):
    """GSPO whose mean log-ratio is over the width of the row."""
    ratio_B1 = (output.logprobs_BT - batch.anchor_BT).mean(1, keepdim=True).exp()
    return clipped_objective(ratio_B1, batch, 0.3, 0.3)


# --- 3: rewards that stand where nothing was sampled


# --- 4: an episode in two rows


def of_each_row(surrogate):
    """A surrogate whose ratio is that of a row."""

    def wrong(output, batch):
        apart = replace(batch, episode_B=torch.arange(len(batch)), tokens_E=batch.mask_BT.sum(1))
        return surrogate(output, apart)

    return wrong


def drop_long_rows(batch):
    return weigh(batch, (batch.mask_BT.sum(1, keepdim=True) <= 2).double().expand_as(batch.mask_BT))


# --- 5: what stands at mask 0


class Multiplied(Recipe):
    """A recipe whose loss multiplies by the mask in the end."""

    @property
    def loss(self):
        def wrong(output, batch):
            ratio_BT = importance_ratio(output, batch)
            return -(ratio_BT * batch.advantages_BT * batch.mask_BT).sum() / batch.n_tokens, {}

        return wrong


@step(reads=("entropy",))
def drop_above_the_mean(batch):
    """The mean is over all positions, padding and tool output included."""
    return weigh(batch, (batch.entropy_BT <= batch.entropy_BT.mean()).double())


@step(reads=("critic",))
def less_the_mean_value(batch):
    """The baseline is the mean of V over all positions."""
    return replace(
        batch, advantages_BT=keep(batch.advantages_BT - batch.values_BT.mean(), batch.mask_BT)
    )


@step(reads=("reference",))
def kl_in_reward_everywhere(batch):
    price_BT = 0.1 * (batch.anchor_BT - batch.ref_logprobs_BT)
    return replace(batch, rewards_BT=batch.rewards_BT - price_BT)


# --- 6: a step in micro-batches


def mean_over_own_tokens(per_token_BT, batch):
    return keep(per_token_BT, batch.mask_BT).sum() / batch.mask_BT.sum()


def over_own_width(per_token_BT, batch):
    return keep(per_token_BT, batch.mask_BT).sum() / batch.n_episodes / batch.mask_BT.shape[1]


def whitened_here(output, batch):
    values_N = batch.advantages_BT[batch.mask_BT]
    advantages_BT = (batch.advantages_BT - values_N.mean()) / (values_N.std(correction=0) + 1)
    return ppo_clip(output, replace(batch, advantages_BT=keep(advantages_BT, batch.mask_BT)))


def covariance_cut_here(output, batch):
    """Clip-Cov whose covariance is over the micro-batch."""
    return torch.where(covariance(batch) > 0.05, 0.0, ppo_clip(output, batch))


# --- 9: units


def kl_sum(output, batch):
    return batch.n_tokens * anchor_kl(output, batch, anchor_kl_coef=0.1)


def clipped_in_units_of_the_batch(output, batch):
    """Advantage over N is what is bounded."""
    small_BT = (batch.advantages_BT / batch.n_tokens * output.logprobs_BT).abs() < 0.02
    return torch.where(small_BT, ppo_clip(output, batch), 0.0)


def whiten_by_sum(batch):
    """The deviation is a norm: √Σ in place of √mean."""
    values_N = batch.advantages_BT[batch.mask_BT]
    norm = (values_N - values_N.mean()).norm()
    return replace(
        batch, advantages_BT=keep((batch.advantages_BT - values_N.mean()) / norm, batch.mask_BT)
    )


@step(reads=("entropy",))
def weigh_three_tokens(batch):
    """A selection of a fixed count, not of a share."""
    values_N = batch.entropy_BT[batch.mask_BT]
    return weigh(batch, (batch.entropy_BT >= values_N.topk(3).values[-1]).double())


# --- 10: KL


@term(KLPenalty, reads=("reference",))
def kl_penalty_detached(output, batch, options):
    ratio_BT = importance_ratio(output, batch).detach()
    return options.kl_coef * ratio_BT * kl_k3(output.logprobs_BT, batch.ref_logprobs_BT)


@term(KLPenalty, reads=("reference",))
def kl_penalty_to_the_sampler(output, batch, options):
    to_sampler = replace(batch, ref_logprobs_BT=batch.anchor_BT)
    return kl_penalty(output, to_sampler, kl_coef=options.kl_coef)


@term(KLPenalty, reads=("reference",))
def kl_penalty_summed(output, batch, options):
    return batch.n_tokens * kl_penalty(output, batch, kl_coef=options.kl_coef)


@term(KLPenalty, reads=("reference",))
def kl_penalty_reversed(output, batch, options):
    swapped = replace(output, logprobs_BT=batch.ref_logprobs_BT)
    reversed_batch = replace(batch, ref_logprobs_BT=output.logprobs_BT)
    return kl_penalty(swapped, reversed_batch, kl_coef=options.kl_coef)


def with_kl(wrong) -> Recipe:
    return replace(recipe("grpo"), regularisers=(wrong.changed(kl_coef=0.3),))


# --- a round without signal


def select_ties(batch):
    """The tokens of highest covariance, all of them where all are 0."""
    covariance_BT = covariance(batch)
    return replace(
        batch, selected_BT=batch.mask_BT & (covariance_BT >= covariance_BT[batch.mask_BT].max())
    )


def against_a_guess(batch):
    """The baseline is the mean reward that somebody hoped for."""
    return spread(batch, total_reward_E(batch) - 0.5)


def imitate_everything(output, batch):
    """Successes or not."""
    everything_E = torch.ones_like(batch.passed_E)
    return imitate(output, replace(batch, passed_E=everything_E), imitate_coef=0.1)


# --- the table

discounted = partial(reward_to_go, gamma=0.9)

MUTANTS = {
    check_masked_tokens_change_nothing: {
        "gae decays through observations": row(
            "ppo", credit=(through_observations(partial(gae, lam=0.7)), whiten)
        ),
        "returns decay through observations": row(
            "reinforce++", credit=(through_observations(discounted), whiten)
        ),
        "tokens of tools count in the mean": row("dapo", aggregate=mean_over_what_was_read),
        "whitened over all positions": row(
            "reinforce++", credit=(reward_to_go, whiten_over_all_positions)
        ),
        "ratio over the width": row("gspo", surrogate=ratio_over_the_row),
    },
    check_a_late_reward_arrives: {
        "late rewards dropped": row(
            "reinforce++", credit=(without_late_rewards(reward_to_go), whiten)
        ),
        "late rewards dropped for turns": row("gigpo", credit=(without_late_rewards(gigpo),)),
        "late rewards dropped for groups": row(
            "grpo",
            credit=(without_late_rewards(lambda batch: spread(batch, total_reward_E(batch))),),
        ),
        "outcome at a masked end": row(
            "reinforce++", credit=(outcome_at_the_end_of_the_row, whiten)
        ),
    },
    check_an_episode_in_two_rows_is_one: {
        **{
            f"{name} by row": row(name, credit=tuple(map(by_row, row(name).credit)))
            for name in ("grpo", "rloo", "ppo")
        },
        "mean over rows": row("grpo", aggregate=mean_over_rows),
        "sequence ratio of a row": row(
            "gspo", surrogate=of_each_row(partial(gspo, clip_low=0.1, clip_high=0.1))
        ),
        "product of a row": row("vespo", surrogate=of_each_row(vespo)),
        "long rows dropped": row("grpo", corrections=(drop_long_rows,)),
    },
    check_garbage_outside_the_mask_is_not_read: {
        "multiplied by the mask": Multiplied(
            **{one.name: getattr(row("dapo"), one.name) for one in fields(Recipe)}
        ),
        "mean of all positions": row("grpo", corrections=(drop_above_the_mean,)),
        "mean value of all positions": row("ppo", credit=(gae, less_the_mean_value)),
        "prices at mask 0": row("rloo", before=(kl_in_reward_everywhere,)),
    },
    check_micro_batches_add_up: {
        "mean over own tokens": row("dapo", aggregate=mean_over_own_tokens),
        "sum over own width": row("dr_grpo", aggregate=over_own_width),
        "mean over own rows": row("grpo", aggregate=mean_over_rows),
        "whitened per micro-batch": row("grpo", surrogate=whitened_here),
        "covariance per micro-batch": row("dapo", surrogate=covariance_cut_here),
    },
    check_the_same_groups_twice_are_the_same_loss: {
        "sum of KL": row("ppo_penalty", regularisers=(kl_sum,), kl_target=math.inf),
        "clipped in units of the batch": row("dapo", surrogate=clipped_in_units_of_the_batch),
        "whitened by a norm": row("reinforce++", credit=(reward_to_go, whiten_by_sum)),
        "selection by count": row("grpo", corrections=(weigh_three_tokens,)),
    },
    check_nothing_earned_is_nothing_learnt: {
        "every token is held": row("kl_cov", turn_weights={}, corrections=(select_ties,)),
        "a guessed baseline": row("reinforce", turn_weights={}, credit=(against_a_guess,)),
        "failures are imitated": row(
            "grpo",
            turn_weights={},
            regularisers=(imitate_everything,),
        ),
        "signal is not asked for": row(
            "dapo", turn_weights={}, refill=False, credit=(against_a_guess,)
        ),
    },
    check_the_kl_gradient: {
        **{
            f"{name} without its ratio": recipe(
                "grpo", kl_coef=0.3, kl_estimator=name, kl_ratio=False
            )
            for name in ("k1", "k2", "k3")
        },
        "ratio without gradient": with_kl(kl_penalty_detached),
        "to the sampler": with_kl(kl_penalty_to_the_sampler),
        "summed": with_kl(kl_penalty_summed),
        "the other direction": with_kl(kl_penalty_reversed),
    },
}

CASES = [(check, (), wrong) for check, wrong in MUTANTS.items()]

"""Advantages of whole episodes: how much better an outcome was than expected. Pure, in float64.

Group forms map the rewards of the G episodes of one group to G advantages. A reward of None
(infrastructure failed) enters no statistic and its advantage is None. In a group with fewer than
two different rewards, including a group of one, all advantages are exactly 0.

Statements about expected gradients are for groups of independent episodes of the trained policy and
the loss -Σ A·log π, summed over tokens and averaged over episodes; p is the chance of winning where
rewards are 0 or 1. For such rewards every function of a group's rewards alone has the expected
gradient c(p)·∇p with c(p) = E[A | won] - E[A | lost].
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, replace
from functools import wraps
from typing import Any

import torch
from pydantic import Field
from torch import Tensor

from agentrl.errors import ConfigError, UserError
from agentrl.trainers.algorithms.parts import (
    BatchStep,
    Count,
    GroupForm,
    Need,
    NonNegative,
    Options,
    group_form,
    step,
)
from agentrl.trainers.batch import TokenBatch

GroupAdvantage = Callable[[Sequence[float | None]], tuple[float | None, ...]]


def _over_scored(formula: Callable[..., Tensor]) -> Callable[..., tuple[float | None, ...]]:
    """Apply a formula to the rewards that are not None, if they differ; None stays None."""

    @wraps(formula)
    def advantages(rewards_G: Sequence[float | None], *options: Any) -> tuple[float | None, ...]:
        scored = [float(reward) for reward in rewards_G if reward is not None]
        values = [0.0] * len(scored)
        if len(set(scored)) > 1:
            values = formula(torch.tensor(scored, dtype=torch.float64), *options).tolist()
        rest = iter(values)
        return tuple(None if reward is None else next(rest) for reward in rewards_G)

    return advantages


class Deviation(Options):
    eps: NonNegative = 1e-6
    """Added to the standard deviation."""


@group_form(Deviation)
@_over_scored
def grpo(rewards_G: Tensor, options: Deviation) -> Tensor:
    """(R - mean) / (std + eps) with the sample standard deviation (ddof=1). GRPO.

    https://arxiv.org/abs/2402.03300. Biased: dividing by the standard deviation gives hard and easy
    tasks more weight than p(1-p).
    """
    return (rewards_G - rewards_G.mean()) / (rewards_G.std(correction=1) + options.eps)


@group_form()
@_over_scored
def dr_grpo(rewards_G: Tensor) -> Tensor:
    """R - mean. Dr. GRPO.

    https://arxiv.org/abs/2503.20783. Its gradient is (G-1)/G times the true one.
    """
    return rewards_G - rewards_G.mean()


@group_form()
@_over_scored
def rloo(rewards_G: Tensor) -> Tensor:
    """R minus the mean of the others: unbiased. RLOO.

    https://arxiv.org/abs/2402.14740.
    """
    size = len(rewards_G)
    return (rewards_G - rewards_G.mean()) * (size / (size - 1))


@group_form(reads=("nonnegative",))
@_over_scored
def maxrl(rewards_G: Tensor) -> Tensor:
    """(R - mean) / mean, for rewards of at least 0. MaxRL.

    https://arxiv.org/abs/2602.02710. For rewards of 0 and 1 it is unbiased for log p cut after G-1
    terms, -Σ_{k<G} (1-p)^k / k: its expected gradient is (1 - (1-p)^(G-1)) / p · ∇p. It needs no ε:
    rewards that differ and are not negative have a mean above 0.

    Raises:
        UserError: a reward is negative.
    """
    lowest = float(rewards_G.min())
    if lowest < 0:
        raise UserError(
            f"maxrl divides by the mean reward and got a reward of {lowest}: give rewards of at"
            " least 0"
        )
    return (rewards_G - rewards_G.mean()) / rewards_G.mean()


class Sharpness(Deviation):
    sharpness: NonNegative = 1.0
    """How quickly the weight of a group falls as its odds leave one half."""


@group_form(Sharpness)
@_over_scored
def mgpo(rewards_G: Tensor, options: Sharpness) -> Tensor:
    """GRPO's advantages times exp(-sharpness · KL(p‖½)): groups near even odds weigh most. MGPO.

    https://arxiv.org/abs/2511.06221. The divergence is p·log 2p + (1-p)·log 2(1-p), from 0 at p = ½
    to log 2; p is the group's mean reward, clamped to [0, 1]. Biased as GRPO is.
    """
    accuracy = rewards_G.mean().clamp(0, 1)
    shares = torch.stack((accuracy, 1 - accuracy))
    divergence = torch.special.xlogy(shares, 2 * shares).sum()
    spread = rewards_G.std(correction=1) + options.eps
    return (rewards_G - rewards_G.mean()) / spread * torch.exp(-options.sharpness * divergence)


class BestOf(Options):
    pass_k: Count = 2
    """k of pass@k."""


@group_form(BestOf)
@_over_scored
def pass_at_k(rewards_G: Tensor, options: BestOf) -> Tensor:
    """k · (mean of max(R, S) over the (k-1)-subsets S of the others - mean of max over their
    k-subsets).

    Unbiased for the expected best reward of k episodes; for rewards of 0 and 1 that is pass@k, with
    the gradient k·(1-p)^(k-1)·∇p. PKPO's estimator (https://arxiv.org/abs/2505.15201), times G
    because the loss is a mean, with a leave-one-out baseline that makes the advantages of a group
    sum to 0 and k = 1 RLOO: (G-1)/G of that in the paper's equation 29. The paper's experiments use
    the mean best of k-1 others (equation 33), which needs one episode less.

    A group of at most `pass_k` scored episodes has no such baseline: its advantages are 0.
    """
    size, pass_k = len(rewards_G), options.pass_k
    if size <= pass_k:
        return torch.zeros_like(rewards_G)
    ordered, order = rewards_G.sort()
    advantages_G = torch.empty_like(ordered)
    for i in range(size):
        others = torch.cat((ordered[:i], ordered[i + 1 :]))
        best_with_own = ordered[i]
        if pass_k > 1:
            best_with_own = _mean_of_maxima(others.clamp(min=ordered[i]), pass_k - 1)
        advantages_G[order[i]] = pass_k * (best_with_own - _mean_of_maxima(others, pass_k))
    return advantages_G


def _mean_of_maxima(ordered: Tensor, count: int) -> Tensor:
    """The mean of the maximum over all subsets of `count` of the ascending values."""
    ways = [math.comb(below, count - 1) for below in range(len(ordered))]
    total = sum(ways)
    return (ordered * torch.tensor([way / total for way in ways], dtype=ordered.dtype)).sum()


# --- steps that give one advantage to all tokens of an episode ---


def group_advantages(batch: TokenBatch, advantage: GroupAdvantage) -> TokenBatch:
    """Give every trained token the advantage of its *episode* within its group.

    The reward of an episode is its outcome plus all its process rewards (`total_reward_E`).
    Statistics are over episodes: one that became two rows counts once, and both rows get its value.
    """
    rewards = total_reward_E(batch).tolist()
    return spread(batch, in_buckets(advantage, batch.group_E.tolist(), rewards))


def over_groups(form: GroupAdvantage) -> BatchStep:
    """Make a group form (`rewards_G -> advantages_G`) a credit step, with the same options."""
    part = GroupForm.of(form)
    reads = part.reads | frozenset[Need]({"group"})
    return BatchStep(_OverGroups(part), part.name, part.options, reads, text=part.text)


@dataclass(frozen=True)
class _OverGroups:
    form: GroupForm

    def __call__(self, batch: TokenBatch, *options: Options) -> TokenBatch:
        form = replace(self.form, options=options[0]) if options else self.form
        return group_advantages(batch, form)


@step(reads=("group",))
def opo(batch: TokenBatch) -> TokenBatch:
    """R minus the mean reward of the group weighted by length. OPO.

    https://arxiv.org/abs/2505.23585. The baseline of least variance if the squared gradient norm of
    an episode grows as its length. An episode's own reward and length are in its baseline, so the
    estimator is biased by order 1/G; where all lengths are equal its gradient is (G-1)/G times the
    true one.
    """
    rewards = total_reward_E(batch).tolist()
    lengths = batch.tokens_E.tolist()
    return spread(batch, in_buckets(less_weighted_mean, batch.group_E.tolist(), rewards, lengths))


def less_weighted_mean(
    rewards_G: Sequence[float | None], tokens_G: Sequence[int]
) -> tuple[float | None, ...]:
    """R minus the mean reward weighted by tokens; 0 where all rewards are equal."""
    scored = [
        (reward, tokens)
        for reward, tokens in zip(rewards_G, tokens_G, strict=True)
        if reward is not None
    ]
    if len({reward for reward, _ in scored}) < 2:
        return tuple(None if reward is None else 0.0 for reward in rewards_G)
    total = max(1, sum(tokens for _, tokens in scored))
    baseline = math.fsum(reward * tokens for reward, tokens in scored) / total
    return tuple(None if reward is None else reward - baseline for reward in rewards_G)


@step()
def reinforce(batch: TokenBatch) -> TokenBatch:
    """R minus the mean reward of all other episodes of the round, in any group. Unbiased.

    The baseline of REINFORCE may be any number that does not depend on the episode's own actions;
    papers use a running mean or a batch mean (https://arxiv.org/abs/2402.14740, section 2), here
    without the episode itself. A round of one episode, or of equal rewards, has advantages of 0.
    """
    rewards = total_reward_E(batch).tolist()
    return spread(batch, in_buckets(rloo, [0] * len(rewards), rewards))


@step(reads=("greedy",))
def remax(batch: TokenBatch) -> TokenBatch:
    """R minus the reward of the task's greedy episode: unbiased, for groups of any size. ReMax.

    https://arxiv.org/abs/2310.10505. Both rewards are outcome plus process rewards. Equal rewards
    within a group do not matter, since they are not compared with each other. Where the greedy
    episode failed there is nothing to compare with, and the advantages are 0.
    """
    if batch.greedy_reward_E is None:
        raise ValueError("remax: batch.greedy_reward_E is None: play every task once greedily")
    greedy_E = batch.greedy_reward_E.double()
    return spread(batch, torch.where(greedy_E.isnan(), 0.0, total_reward_E(batch) - greedy_E))


def with_greedy_rewards(batch: TokenBatch, rewards: Sequence[float | None]) -> TokenBatch:
    """The batch with the reward of one greedy episode per group; None means that it failed."""
    if len(batch.group_E) and len(rewards) <= int(batch.group_E.max()):
        raise ValueError(f"{len(rewards)} greedy rewards for {int(batch.group_E.max()) + 1} groups")
    values = [math.nan if reward is None else reward for reward in rewards]
    greedy = torch.tensor(values, dtype=torch.float64)
    return replace(batch, greedy_reward_E=greedy.to(batch.group_E.device)[batch.group_E])


class PartWeights(Options):
    part_weights: dict[str, NonNegative] = Field(default_factory=dict)
    """Weights of the named terms of a score. Empty: each weighs 1. Otherwise others weigh 0."""


@step(PartWeights, reads=("group", "parts"))
def gdpo(batch: TokenBatch, options: PartWeights) -> TokenBatch:
    """Each named term of the score normalised within its group, their weighted sum, normalised over
    the round. GDPO.

    https://arxiv.org/abs/2601.05242. Both are z-scores over episodes as in `grpo` (ddof=1, ε=1e-6),
    0 where nothing differs. Reads `parts_E`, not outcome and process rewards; a term that an
    episode lacks counts 0 for it and enters no statistic. Biased as GRPO is. (verl whitens over
    tokens instead, where long episodes count more often.)

    Raises:
        UserError: no score has named terms, or one of them is infinite.
        ConfigError: a weight is for a term that no score has.
    """
    weights = options.part_weights
    if len(batch.reward_E) and not batch.parts_E:
        raise UserError(
            "gdpo normalises the named terms of a score and no score has any: give Score(parts=...)"
        )
    unknown = weights.keys() - batch.parts_E.keys() if batch.parts_E else set()
    if unknown:
        raise ConfigError(
            f"part_weights names {min(unknown)!r}; scores have the terms"
            f" {', '.join(batch.parts_E)}",
            setting="loss.part_weights",
        )
    sums_E = torch.zeros_like(batch.reward_E, dtype=torch.float64)
    for name, part_E in batch.parts_E.items():
        if part_E.isinf().any():
            raise UserError(f"gdpo: the term {name!r} of a score is infinite: give finite terms")
        values = [None if math.isnan(value) else value for value in part_E.tolist()]
        weight = weights.get(name, 0.0) if weights else 1.0
        sums_E += weight * in_buckets(grpo, batch.group_E.tolist(), values).to(sums_E)
    return spread(batch, in_buckets(grpo, [0] * len(sums_E), sums_E.tolist()))


# --- what steps of credit share ---


def total_reward_E(batch: TokenBatch) -> Tensor:
    """Outcome plus process rewards of each episode, float64."""
    if batch.rewards_BT is None:
        return batch.reward_E.double()
    return batch.reward_E.double().index_add(0, batch.episode_B, batch.rewards_BT.double().sum(1))


def in_buckets(
    formula: Callable[..., Sequence[float | None]],
    keys: Sequence[Hashable],
    *columns: Sequence[Any],
) -> Tensor:
    """Apply a formula to all entries that share a key; float64, in the order of the keys.

    A result of None counts as 0.
    """
    members: dict[Hashable, list[int]] = {}
    for index, key in enumerate(keys):
        members.setdefault(key, []).append(index)
    results = torch.zeros(len(keys), dtype=torch.float64)
    for indices in members.values():
        values = formula(*([column[index] for index in indices] for column in columns))
        results[indices] = torch.tensor([value or 0.0 for value in values], dtype=torch.float64)
    return results


def spread(batch: TokenBatch, advantages_E: Tensor) -> TokenBatch:
    """Give every trained token the advantage of its episode."""
    rows_B1 = advantages_E.to(batch.old_logprobs_BT)[batch.episode_B, None]
    return replace(batch, advantages_BT=torch.where(batch.mask_BT, rows_B1, 0.0))

"""Advantages of whole episodes: how much better each outcome was than what was expected. Pure, in
float64.

The group forms map the rewards of the G episodes of one group to G advantages. A reward of None
(infrastructure failed) is no number: it enters no statistic and its advantage is None. A group with
fewer than two different rewards says nothing about which action was better: its advantages are
exactly 0, a group of one included.

What the docstrings say of expected gradients is over groups of independent episodes of the policy
that is trained, with the loss -Σ A·log π summed over tokens and averaged over episodes; p is the
chance to win where rewards are 0 or 1. For such rewards every function of a group's rewards alone
has the expected gradient c(p)·∇p, with c(p) = E[A | this one won] - E[A | it lost].
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import replace
from functools import wraps
from types import MappingProxyType
from typing import Any, Concatenate, ParamSpec

import torch
from torch import Tensor

from agentrl.errors import ConfigError, UserError
from agentrl.trainers.algorithms.parts import needs
from agentrl.trainers.batch import TokenBatch

Options = ParamSpec("Options")
GroupAdvantage = Callable[[Sequence[float | None]], tuple[float | None, ...]]


def _over_scored(
    formula: Callable[Concatenate[Tensor, Options], Tensor],
) -> Callable[Concatenate[Sequence[float | None], Options], tuple[float | None, ...]]:
    """Apply a formula to the rewards that exist, if they differ; put None back where there was
    none.
    """

    @wraps(formula)
    def advantages(
        rewards_G: Sequence[float | None], /, *args: Options.args, **kwargs: Options.kwargs
    ) -> tuple[float | None, ...]:
        scored = [float(reward) for reward in rewards_G if reward is not None]
        values = [0.0] * len(scored)
        if len(set(scored)) > 1:
            values = formula(torch.tensor(scored, dtype=torch.float64), *args, **kwargs).tolist()
        rest = iter(values)
        return tuple(None if reward is None else next(rest) for reward in rewards_G)

    return needs("group")(advantages)


@_over_scored
def grpo(rewards_G: Tensor, *, eps: float = 1e-6) -> Tensor:
    """(R - mean) / (std + eps) with the sample standard deviation (ddof=1). GRPO, https://arxiv.org/abs/2402.03300.

    Dividing by the standard deviation makes the estimator biased: hard and easy tasks weigh more
        than p(1-p) says.
    """
    return (rewards_G - rewards_G.mean()) / (rewards_G.std(correction=1) + eps)


@_over_scored
def dr_grpo(rewards_G: Tensor) -> Tensor:
    """R - mean. Its gradient is (G-1)/G times the true one. Dr. GRPO, https://arxiv.org/abs/2503.20783."""
    return rewards_G - rewards_G.mean()


@_over_scored
def rloo(rewards_G: Tensor) -> Tensor:
    """R minus the mean of the others: unbiased. RLOO, https://arxiv.org/abs/2402.14740."""
    size = len(rewards_G)
    return (rewards_G - rewards_G.mean()) * (size / (size - 1))


@needs("nonnegative")
@_over_scored
def maxrl(rewards_G: Tensor) -> Tensor:
    """(R - mean) / mean, for rewards from 0 up. MaxRL, https://arxiv.org/abs/2602.02710.

    For rewards of 0 and 1 it is unbiased for log p cut after G-1 terms, -Σ_{k<G} (1-p)^k / k: its
    expected gradient is (1 - (1-p)^(G-1)) / p · ∇p. No ε is needed, because rewards that differ and
    are not negative have a mean above 0; peers add 1e-6.

    Raises:
        UserError: a reward is negative, so the mean says nothing about a likelihood.
    """
    if (lowest := float(rewards_G.min())) < 0:
        raise UserError(
            f"maxrl divides by the mean reward, and a reward is {lowest}: give rewards of at"
            " least 0"
        )
    return (rewards_G - rewards_G.mean()) / rewards_G.mean()


@_over_scored
def mgpo(rewards_G: Tensor, *, sharpness: float = 1.0, eps: float = 1e-6) -> Tensor:
    """GRPO's advantages times exp(-sharpness · KL(p‖½)): groups near even odds weigh most. MGPO of
    VibeThinker.

    The divergence is p·log 2p + (1-p)·log 2(1-p), from 0 at p = ½ to log 2; p is the group's mean
    reward, held to [0, 1]. https://arxiv.org/abs/2511.06221. Biased as GRPO is; for rewards of 0
    and 1 the gradient is c(p)·∇p.
    """
    accuracy = rewards_G.mean().clamp(0, 1)
    shares = torch.stack((accuracy, 1 - accuracy))
    divergence = torch.special.xlogy(shares, 2 * shares).sum()
    spread = rewards_G.std(correction=1) + eps
    return (rewards_G - rewards_G.mean()) / spread * torch.exp(-sharpness * divergence)


@_over_scored
def pass_at_k(rewards_G: Tensor, *, pass_k: int = 2) -> Tensor:
    """k · (mean of max(R, S) over the (k-1)-subsets S of the others - mean of max over their
    k-subsets).

    Unbiased for the expected best reward of k episodes; for rewards of 0 and 1 that is pass@k, with
    the gradient k·(1-p)^(k-1)·∇p. PKPO's estimator (https://arxiv.org/abs/2505.15201), times G
    because the loss is a mean, with a leave-one-out baseline that makes the advantages of a group
    sum to 0, and k = 1 RLOO: (G-1)/G of that in the paper's equation 29. Its experiments take the
    mean best of k-1 others (equation 33), which needs one episode less. (The closed form of
    "Pass@k training", https://arxiv.org/abs/2508.10751, divides by a standard deviation besides,
    and is biased as GRPO is.)

    A group of at most `pass_k` scored episodes has no such baseline: its advantages are 0.
    """
    size = len(rewards_G)
    if size <= pass_k:
        return torch.zeros_like(rewards_G)
    ordered, order = rewards_G.sort()
    found = torch.empty_like(ordered)
    for i in range(size):
        others = torch.cat((ordered[:i], ordered[i + 1 :]))
        with_own = (
            _mean_of_maxima(others.clamp(min=ordered[i]), pass_k - 1) if pass_k > 1 else ordered[i]
        )
        found[order[i]] = pass_k * (with_own - _mean_of_maxima(others, pass_k))
    return found


def _mean_of_maxima(ordered: Tensor, count: int) -> Tensor:
    """The mean, over all subsets of `count` of the ascending values, of the largest one."""
    ways = [math.comb(below, count - 1) for below in range(len(ordered))]
    total = sum(ways)
    return (ordered * torch.tensor([way / total for way in ways], dtype=ordered.dtype)).sum()


@needs("group")
def opo(rewards_G: Sequence[float | None], tokens_G: Sequence[int]) -> tuple[float | None, ...]:
    """R minus the mean reward weighted by length. OPO, https://arxiv.org/abs/2505.23585.

    The baseline of least variance if the squared gradient norm of an episode grows as its length.
    An episode's own reward and length are in its baseline, so the estimator is biased by order 1/G;
    where all lengths are equal its gradient is (G-1)/G times the true one.
    """
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


def group_advantages(batch: TokenBatch, advantage: GroupAdvantage) -> TokenBatch:
    """A new batch in which every trained token carries the advantage of its *episode*.

    The reward of an episode is its outcome and all its process rewards (`total_reward_E`).
    Statistics are over episodes, so an episode that became two rows counts once, and both rows get
    the same value.
    """
    return spread(
        batch, in_buckets(advantage, batch.group_E.tolist(), total_reward_E(batch).tolist())
    )


def group_advantages_by_length(
    batch: TokenBatch, advantage: Callable[..., tuple[float | None, ...]]
) -> TokenBatch:
    """As `group_advantages`, for a form that also reads how many tokens each episode trains
    (`opo`).
    """
    rewards = total_reward_E(batch).tolist()
    return spread(
        batch, in_buckets(advantage, batch.group_E.tolist(), rewards, batch.tokens_E.tolist())
    )


def reinforce(batch: TokenBatch) -> TokenBatch:
    """R minus the mean reward of all other episodes of the round, whatever their group. Unbiased.

    The baseline of REINFORCE is any number that does not depend on the episode's own actions;
    papers take a running or a batch mean (https://arxiv.org/abs/2402.14740, section 2), here
    without the episode itself. A round of one episode, or of equal rewards, has advantages of 0; a
    group of one does not, if there are other groups.
    """
    rewards = total_reward_E(batch).tolist()
    return spread(batch, in_buckets(rloo, [0] * len(rewards), rewards))


@needs("greedy")
def remax(batch: TokenBatch) -> TokenBatch:
    """R minus the reward of the task's greedy episode: unbiased, for groups of any size, one
    included. ReMax.

    https://arxiv.org/abs/2310.10505. Both rewards are outcome plus process rewards. A group of
    equal rewards has advantages as any other, since they do not come from siblings. Where the
    greedy episode failed there is nothing to compare with, and the advantages are 0.

    Raises:
        ValueError: the batch has no greedy rewards (`with_greedy_rewards` puts them in).
    """
    if batch.greedy_reward_E is None:
        raise ValueError("remax: batch.greedy_reward_E is None: play every task once greedily")
    greedy_E = batch.greedy_reward_E.double()
    return spread(batch, torch.where(greedy_E.isnan(), 0.0, total_reward_E(batch) - greedy_E))


def with_greedy_rewards(batch: TokenBatch, rewards: Sequence[float | None]) -> TokenBatch:
    """The batch with the reward of one greedy episode for each of the groups it was packed from;
    None: it failed.

    Raises:
        ValueError: there are fewer rewards than groups.
    """
    if len(batch.group_E) and len(rewards) <= int(batch.group_E.max()):
        raise ValueError(f"{len(rewards)} greedy rewards for {int(batch.group_E.max()) + 1} groups")
    known = torch.tensor(
        [math.nan if reward is None else reward for reward in rewards], dtype=torch.float64
    )
    return replace(batch, greedy_reward_E=known.to(batch.group_E.device)[batch.group_E])


@needs("group", "parts")
def gdpo(
    batch: TokenBatch, *, part_weights: Mapping[str, float] = MappingProxyType({})
) -> TokenBatch:
    """Each named term of the score normalised within its group, their weighted sum, normalised over
    the round. GDPO.

    https://arxiv.org/abs/2601.05242. Both are z-scores over episodes as in `grpo` (ddof=1, ε=1e-6),
    0 where nothing differs. Reads `parts_E` and neither outcome nor process rewards; a term that an
    episode lacks counts 0 for it and enters no statistic. (verl whitens over tokens instead, where
    long episodes count more often.) Biased as GRPO is.

    Args:
        part_weights: of the terms; empty weighs each 1, otherwise a term that is not named counts
            0.

    Raises:
        UserError: no score has named terms, or one of them is infinite.
        ConfigError: a weight is for a term that no score has.
    """
    if len(batch.reward_E) and not batch.parts_E:
        raise UserError(
            "gdpo normalises the named terms of a score, and no score has any: give"
            " Score(parts=...)"
        )
    if unknown := part_weights.keys() - batch.parts_E.keys() if batch.parts_E else set():
        raise ConfigError(
            f"part_weights names {min(unknown)!r}; scores have the terms {', '.join(batch.parts_E)}"
        )
    sums_E = torch.zeros_like(batch.reward_E, dtype=torch.float64)
    for name, part_E in batch.parts_E.items():
        if part_E.isinf().any():
            raise UserError(
                f"gdpo normalises the term {name!r} of a score, which is infinite: give finite"
                " terms"
            )
        values = [None if math.isnan(value) else value for value in part_E.tolist()]
        weight = part_weights.get(name, 0.0) if part_weights else 1.0
        sums_E += weight * in_buckets(grpo, batch.group_E.tolist(), values).to(sums_E)
    return spread(batch, in_buckets(grpo, [0] * len(sums_E), sums_E.tolist()))


def total_reward_E(batch: TokenBatch) -> Tensor:
    """Outcome plus process rewards of each episode, float64: what a return of discount 1 is from
    its first token.
    """
    if batch.rewards_BT is None:
        return batch.reward_E.double()
    return batch.reward_E.double().index_add(0, batch.episode_B, batch.rewards_BT.double().sum(1))


def in_buckets(
    formula: Callable[..., Sequence[float | None]],
    keys: Sequence[Hashable],
    *columns: Sequence[Any],
) -> Tensor:
    """Apply a formula to the entries that share a key, bucket by bucket (float64, in the order of
    the keys).

    A result of None, which no reward that exists gives, counts as 0.
    """
    members: dict[Hashable, list[int]] = {}
    for index, key in enumerate(keys):
        members.setdefault(key, []).append(index)
    found = torch.zeros(len(keys), dtype=torch.float64)
    for indices in members.values():
        values = formula(*([column[index] for index in indices] for column in columns))
        found[indices] = torch.tensor([value or 0.0 for value in values], dtype=torch.float64)
    return found


def spread(batch: TokenBatch, advantages_E: Tensor) -> TokenBatch:
    """The batch in which every trained token carries the advantage of its episode."""
    rows_B1 = advantages_E.to(batch.old_logprobs_BT)[batch.episode_B, None]
    return replace(batch, advantages_BT=torch.where(batch.mask_BT, rows_B1, 0.0))

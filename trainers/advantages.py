"""Advantages: how much better an outcome was than what was expected. Pure functions in float64.

The group forms map the rewards of the G episodes of one group to G advantages. A reward of None (infrastructure
failed) is no number: it enters no statistic and its advantage is None. A group with fewer than two different rewards
says nothing about which action was better: its advantages are exactly 0, a group of one included.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import wraps
from typing import Concatenate, NamedTuple, ParamSpec

import torch
from torch import Tensor

from agentrl.trainers.batch import TokenBatch

Options = ParamSpec("Options")
GroupAdvantage = Callable[[Sequence[float | None]], tuple[float | None, ...]]


def _over_scored(
    formula: Callable[Concatenate[Tensor, Options], Tensor],
) -> Callable[Concatenate[Sequence[float | None], Options], tuple[float | None, ...]]:
    """Apply a formula to the rewards that exist, if they differ; put None back where there was none."""

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

    return advantages


@_over_scored
def grpo(rewards_G: Tensor, *, eps: float = 1e-6) -> Tensor:
    """(R - mean) / (std + eps) with the sample standard deviation (ddof=1). GRPO, https://arxiv.org/abs/2402.03300.

    Dividing by the standard deviation makes the estimator biased: hard and easy tasks weigh more than p(1-p) says.
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


def group_advantages(batch: TokenBatch, advantage: GroupAdvantage) -> TokenBatch:
    """A new batch in which every trained token carries the advantage of its *episode*.

    Statistics are over episodes, so an episode that became two rows counts once, and both rows get the same value.
    """
    members: dict[int, list[int]] = {}
    for episode, group in enumerate(batch.group_E.tolist()):
        members.setdefault(group, []).append(episode)
    rewards = batch.reward_E.tolist()
    advantages_E = torch.zeros(len(rewards), dtype=torch.float64)
    for episodes in members.values():
        values = advantage([rewards[episode] for episode in episodes])
        advantages_E[episodes] = torch.tensor(values, dtype=torch.float64)
    rows_B1 = advantages_E.to(batch.old_logprobs_BT)[batch.episode_B, None]
    return replace(batch, advantages_BT=torch.where(batch.mask_BT, rows_B1, 0.0))


class Gae(NamedTuple):
    """Advantages and returns, shape (T,); both 0 at mask 0."""

    advantages_T: Tensor
    returns_T: Tensor


def gae(rewards_T: Tensor, values_T: Tensor, mask_T: Tensor, gamma: float, lam: float) -> Gae:
    """Generalised advantage estimation whose time steps are the trained tokens. https://arxiv.org/abs/1506.02438.

    Observation tokens are no steps: nothing decays through them and their values are never read. A reward that stands
    on one (a tool's answer, padding behind the end) belongs to the last trained token before it.

    Args:
        rewards_T: rewards by token.
        values_T: V at each token, read at mask 1 only.
        mask_T: True on trained tokens.
        gamma: discount per trained token.
        lam: λ; 1 gives Monte-Carlo returns minus V.

    Raises:
        ValueError: a reward stands before the first trained token, where no action can have earned it.
    """
    mask_T = mask_T.bool()
    owner_T = mask_T.cumsum(0) - 1
    if (rewards_T[owner_T < 0] != 0).any():
        raise ValueError("rewards_T has a reward before the first trained token; no action can have earned it")
    values_N = values_T[mask_T].double()
    rewards_N = torch.zeros_like(values_N)
    rewards_N.index_add_(0, owner_T[owner_T >= 0], rewards_T[owner_T >= 0].double())
    next_values_N = torch.cat((values_N[1:], values_N.new_zeros(1)))[: len(values_N)]
    carry, carried = 0.0, []
    for delta in reversed((rewards_N + gamma * next_values_N - values_N).tolist()):
        carry = delta + gamma * lam * carry
        carried.append(carry)
    advantages_N = torch.tensor(carried[::-1], dtype=torch.float64)
    advantages_T = torch.zeros_like(values_T, dtype=torch.float64)
    returns_T = advantages_T.clone()
    advantages_T[mask_T] = advantages_N
    returns_T[mask_T] = advantages_N + values_N
    return Gae(advantages_T, returns_T)

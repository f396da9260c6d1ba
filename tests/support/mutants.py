"""Wrong functions and the checks that must flag them; and wrong steps that several tables share.

A check takes the function to judge and raises AssertionError where a defect shows. A table is a
list of (check, real functions, wrong functions): the check passes each of the real ones and must
flag each of the wrong ones, so no check can rot into one that cannot fail.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from recipe_cases import row_fields

from agentrl.trainers.algorithms.credit import reward_to_go
from agentrl.trainers.algorithms.losses import PolicyLoss, keep
from agentrl.trainers.algorithms.parts import BatchStep

Check = Callable[[Any], None]
Case = tuple[Check, Iterable[Any], Iterable[Any] | Mapping[str, Any]]


def parameters(cases: Iterable[Case], place: int) -> list[Any]:
    """(check, function) for pytest, of the real functions (place 1) or the wrong ones (place 2)."""
    found = []
    for case in cases:
        named = case[place] if isinstance(case[place], Mapping) else None
        rows = named.items() if named else [(described(one), one) for one in case[place]]
        for name, one in rows:
            found.append(pytest.param(case[0], one, id=f"{name_of(case[0])}-{name}"))
    return found


def name_of(function: Any) -> str:
    """The name of a part or of a function."""
    while isinstance(function, partial):
        function = function.func
    return getattr(function, "name", "") or getattr(function, "__name__", type(function).__name__)


def described(function: Any) -> str:
    """The name of a function with its settings; of a loss, those of its parts."""
    if isinstance(function, PolicyLoss):
        parts = (function.surrogate, function.aggregate, *function.regularisers)
        return "-".join(map(described, parts))
    settings = getattr(function, "keywords", {}) if isinstance(function, partial) else {}
    return "-".join((name_of(function), *map(str, settings.values())))


def as_its(step):
    """Mark a wrong step with what the step inside it reads."""
    reads = BatchStep.of(step).reads
    return lambda function: replace(BatchStep.of(function), reads=reads)


def through_observations(step):
    """Every token takes time; V is 0 where nothing was sampled."""

    @as_its(step)
    def decays_through_observations(batch):
        read = ("values_BT", "old_logprobs_BT", "ref_logprobs_BT", "rewards_BT")
        there = row_fields(batch)
        clean = {name: keep(there[name], batch.mask_BT) for name in read if name in there}
        done = step(replace(batch, mask_BT=batch.attention_BT, **clean))
        advantages_BT = keep(done.advantages_BT, batch.mask_BT)
        return replace(batch, advantages_BT=advantages_BT, returns_BT=done.returns_BT)

    return decays_through_observations


def without_late_rewards(step):
    """Rewards at mask 0 are lost."""

    @as_its(step)
    def loses_late_rewards(batch):
        return step(replace(batch, rewards_BT=keep(batch.rewards_BT, batch.mask_BT)))

    return loses_late_rewards


def by_row(step):
    """Each row is taken for an episode."""

    @as_its(step)
    def takes_rows_for_episodes(batch):
        owner_B = batch.episode_B
        alone = replace(
            batch,
            episode_B=torch.arange(len(batch)),
            group_E=batch.group_E[owner_B],
            reward_E=batch.reward_E[owner_B],
            tokens_E=batch.mask_BT.sum(1),
        )
        done = step(alone)
        return replace(batch, advantages_BT=done.advantages_BT, returns_BT=done.returns_BT)

    return takes_rows_for_episodes


def whiten_over_all_positions(batch):
    """The mean and the deviation count positions at mask 0."""
    mean, std = batch.advantages_BT.mean(), batch.advantages_BT.std()
    white_BT = (batch.advantages_BT - mean) / (std + 1e-8)
    return replace(batch, advantages_BT=keep(white_BT, batch.mask_BT))


def outcome_at_the_end_of_the_row(batch):
    """The outcome goes to the row's last position, and is lost where that is masked."""
    rewards_BT = batch.rewards_BT.clone()
    rewards_BT[:, -1] += batch.reward_E[batch.episode_B]
    rewards_BT = keep(rewards_BT, batch.mask_BT)
    nothing_E = torch.zeros_like(batch.reward_E)
    return reward_to_go(replace(batch, rewards_BT=rewards_BT, reward_E=nothing_E))


def mean_over_rows(per_token_BT, batch):
    """Rows weigh the same, in place of episodes."""
    return (keep(per_token_BT, batch.mask_BT).sum(1) / batch.mask_BT.sum(1)).sum() / len(batch)

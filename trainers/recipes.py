"""Named algorithms: the one place where a string becomes functions. Each row of the table is data."""

from __future__ import annotations

from dataclasses import dataclass, replace
from difflib import get_close_matches
from typing import Any, TypeVar

import torch
from torch import Tensor

from agentrl.errors import ConfigError
from agentrl.trainers.advantages import GroupAdvantage, dr_grpo, group_advantages, grpo
from agentrl.trainers.batch import TokenBatch, groups_with_signal
from agentrl.trainers.losses import Aggregate, PolicyLoss, clipped_surrogate, episode_mean, episode_sum, token_mean


def by_token(per_token_BT: Tensor, batch: TokenBatch, _: int) -> Tensor:
    """`token_mean` with the batch's denominators."""
    return token_mean(per_token_BT, batch.mask_BT, batch.n_tokens)


def by_episode(per_token_BT: Tensor, batch: TokenBatch, _: int) -> Tensor:
    """`episode_mean` with the batch's denominators."""
    return episode_mean(per_token_BT, batch.mask_BT, batch.episode_tokens_B, batch.n_episodes)


def by_constant(per_token_BT: Tensor, batch: TokenBatch, norm_tokens: int) -> Tensor:
    """`episode_sum` with the batch's denominators."""
    return episode_sum(per_token_BT, batch.mask_BT, batch.n_episodes, norm_tokens)


AGGREGATES: dict[str, Aggregate] = {"token": by_token, "episode": by_episode, "constant": by_constant}


@dataclass(frozen=True)
class Recipe:
    """An algorithm: how outcomes become advantages, and how advantages become a loss.

    Attributes:
        group_advantage: rewards of a group -> advantages.
        loss: policy output and batch -> scalar and metrics.
        paper: where the algorithm is defined.
        negative_weight: negative advantages are multiplied by it; 1 is the algorithm as its paper has it. Less makes
            large learning rates safe, at a price: the baseline no longer cancels, so the estimator is biased towards
            repeating what worked (at 0 it is fine-tuning on the better half of every group).
        filter_groups: groups without signal do not train at all, see `groups_with_signal`; metrics still count them.
    """

    name: str
    group_advantage: GroupAdvantage
    loss: PolicyLoss
    paper: str
    negative_weight: float = 1.0
    filter_groups: bool = False

    def __post_init__(self) -> None:
        if not 0 <= self.negative_weight <= 1:
            raise ConfigError(f"negative_weight={self.negative_weight} must be from 0 to 1")
        if not isinstance(self.filter_groups, bool):
            raise ConfigError(f"filter_groups={self.filter_groups!r} must be true or false")

    def advantage(self, batch: TokenBatch) -> TokenBatch:
        """The batch with its advantages."""
        filled = group_advantages(batch, self.group_advantage)
        if self.filter_groups:
            filled = groups_with_signal(filled)
        weighed_BT = filled.advantages_BT * self.negative_weight
        return replace(filled, advantages_BT=torch.where(filled.advantages_BT < 0, weighed_BT, filled.advantages_BT))


_TABLE = (
    Recipe("grpo", grpo, PolicyLoss(clipped_surrogate, by_episode), "https://arxiv.org/abs/2402.03300"),
    Recipe("dr_grpo", dr_grpo, PolicyLoss(clipped_surrogate, by_constant), "https://arxiv.org/abs/2503.20783"),
)
RECIPES = {row.name: row for row in _TABLE}


_LOSS = ("clip_low", "clip_high", "kl_coef", "entropy_coef", "norm_tokens", "aggregate")
_OWN = {"negative_weight": 1.0, "filter_groups": False}
_SETTINGS = {key: key for key in (*_LOSS, *_OWN)}
Row = TypeVar("Row")


def recipe(name: str, **settings: Any) -> Recipe:
    """The named recipe, with settings of its loss replaced: `recipe("grpo", clip_high=0.28, aggregate="token")`.

    The KL coefficient is 0 in every row, so no reference model is needed unless asked for (GRPO's paper uses 0.04).

    Raises:
        ConfigError: there is no such recipe or setting (the message names the nearest one), or a value is out of range.
    """
    own: dict[str, Any] = {key: settings.pop(key, default) for key, default in _OWN.items()}
    found = replace(_named(name, RECIPES, "recipe"), **own)
    changes: dict[str, Any] = {}
    for key, value in settings.items():
        _named(key, _SETTINGS, f"setting of recipe {name}")
        changes[key] = _named(value, AGGREGATES, "aggregate") if key == "aggregate" else value
    return replace(found, loss=replace(found.loss, **changes))


def _named(name: str, table: dict[str, Row], what: str) -> Row:
    """The entry of that name."""
    if name in table:
        return table[name]
    near = get_close_matches(str(name), table, n=1, cutoff=0.0)
    raise ConfigError(f"there is no {what} {name!r}; did you mean {near[0]!r}? (known: {', '.join(table)})")

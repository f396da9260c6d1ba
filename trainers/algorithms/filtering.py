"""The filter of groups without signal, ahead of credit."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch

from agentrl.trainers.batch import TokenBatch

OF_EPISODES = (
    "group_E",
    "reward_E",
    "truncated_E",
    "tokens_E",
    "greedy_reward_E",
    "passed_E",
    "signal_E",
)


def filtered(batch: TokenBatch, credit: Callable[[TokenBatch], TokenBatch]) -> TokenBatch:
    """The batch with credit for the groups that have signal, as if no other had been played; other
    episodes stay in its lists, train nothing, and are in no denominator.

    DAPO's filter (https://arxiv.org/abs/2503.14476). It comes before credit: a mean over the round
    (`whiten`, `reinforce`, `gdpo`) is one over what trains. Unlike `informative`, it changes the
    loss: terms that ignore the advantage see fewer tokens, and means are over fewer.

    Raises:
        ValueError: nobody decided which groups have signal (`pack` does).
    """
    if batch.signal_E is None:
        raise ValueError("filter: batch.signal_E is None: pack gives it")
    stays_E = batch.signal_E
    tokens_E = torch.where(stays_E, batch.tokens_E, 0)
    rows = replace(
        batch.rows(stays_E[batch.episode_B]),
        n_tokens=int(tokens_E.sum()),
        n_episodes=int((tokens_E > 0).sum()),
    )
    whole: dict[str, Any] = {name: getattr(batch, name) for name in OF_EPISODES}
    some: dict[str, Any] = {
        name: None if full_E is None else full_E[stays_E] for name, full_E in whole.items()
    }
    parts_E = {name: part_E[stays_E] for name, part_E in batch.parts_E.items()}
    place_E = stays_E.cumsum(0) - 1
    alone = credit(replace(rows, episode_B=place_E[rows.episode_B], parts_E=parts_E, **some))
    whole["tokens_E"] = tokens_E
    return replace(alone, episode_B=rows.episode_B, parts_E=batch.parts_E, **whole)

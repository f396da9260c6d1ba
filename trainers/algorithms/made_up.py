"""A batch of made-up numbers with every field filled, on which a recipe is tried before a run
starts.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch

from agentrl.errors import ConfigError
from agentrl.trainers.algorithms.parts import name_of, options
from agentrl.trainers.algorithms.recipe import Recipe
from agentrl.trainers.batch import PolicyOutput, TokenBatch


def try_on_made_up(found: Recipe, settings: Mapping[str, Any]) -> None:
    """Compute a loss of made-up numbers, on which parts that contradict each other say so.

    Args:
        settings: those of the options of its parts that were asked for.

    Raises:
        ConfigError: parts contradict each other, or a setting changes nothing.
    """
    terms: tuple[Callable[..., Any], ...] = (*found.before, *found.regularisers)
    for part in terms:
        known = options(part)
        named = [name for name in known if name in settings]
        if named and (
            idle := [n for n in known if n.endswith("_coef") and not known[n] and n not in settings]
        ):
            raise ConfigError(
                f"{named[0]} changes nothing while {idle[0]} is 0: set {idle[0]} as well"
            )
    unread = ["turn_weights"] if found.turn_weights else []
    unread += ["reward_clip"] if found.reward_clip < math.inf else []
    unread += [next(iter(options(step)), name_of(step)) for step in found.before]
    if "parts" in found.needs and unread:
        raise ConfigError(
            f"{unread[0]} changes nothing in recipe {found.name}: it reads the parts of a score"
            " alone"
        )
    if found.reference_decay < 1 and "reference" not in found.needs:
        raise ConfigError(
            f"reference_decay changes nothing in recipe {found.name}, which reads no reference: set"
            " kl_coef as well"
        )
    if found.ref_kl_budget < math.inf and "reference" not in found.needs:
        raise ConfigError(
            f"ref_kl_budget changes nothing in recipe {found.name}, which reads no reference: set"
            " kl_reward_coef or kl_coef as well"
        )
    batch, output = made_up(dict.fromkeys(found.options.get("part_weights") or ["any"]))
    try:
        batch = found.correct(found.advantage(batch))
        found.loss(output, batch)
    except ValueError as error:
        raise ConfigError(f"recipe {found.name}: {error}") from error
    if batch.advantages_BT[batch.mask_BT].isnan().any():
        raise ConfigError(
            f"recipe {found.name} leaves episodes without advantages: its credit"
            f" ({', '.join(map(name_of, found.credit)) or 'nothing'}) must begin with a part that"
            " fills them, as grpo does"
        )
    if batch.weights_BT is not None and not batch.weights_BT.any():
        raise ConfigError(
            f"recipe {found.name} with {settings} gives weight 0 even to what its policy just"
            " sampled"
        )


def made_up(parts: Iterable[str]) -> tuple[TokenBatch, PolicyOutput]:
    """Two episodes of one group, one won and one lost, two trained tokens each; and what a policy
    says of them.

    Args:
        parts: names of score terms that both episodes have.
    """
    numbers_BT, ids_BT = torch.full((2, 3), -0.7), torch.ones(2, 3, dtype=torch.int64)
    top_BTK, reward_E = (
        numbers_BT[..., None].expand(2, 3, 2),
        torch.tensor([0.0, 1.0], dtype=torch.float64),
    )
    turn_BT = torch.tensor([[-1, 0, 0]] * 2, dtype=torch.int32)
    batch = TokenBatch(
        ids_BT=ids_BT,
        mask_BT=turn_BT >= 0,
        attention_BT=ids_BT > 0,
        old_logprobs_BT=numbers_BT,
        advantages_BT=torch.full_like(numbers_BT, torch.nan),
        turn_BT=turn_BT,
        version_BT=turn_BT,
        episode_B=torch.arange(2),
        group_E=torch.zeros(2, dtype=torch.int64),
        reward_E=reward_E,
        truncated_E=torch.zeros(2, dtype=torch.bool),
        tokens_E=torch.tensor([2, 2]),
        n_tokens=4,
        n_episodes=2,
        version=0,
        parts_E=dict.fromkeys(parts, reward_E),
        rewards_BT=torch.zeros(2, 3, dtype=torch.float64),
        state_BT=ids_BT,
        proximal_logprobs_BT=numbers_BT,
        ref_logprobs_BT=numbers_BT,
        entropy_BT=-numbers_BT,
        values_BT=numbers_BT,
        top_ids_BTK=torch.stack((ids_BT, ids_BT + 1), -1),
        top_logprobs_BTK=top_BTK,
        teacher_logprobs_BT=numbers_BT,
        teacher_top_logprobs_BTK=top_BTK,
        greedy_reward_E=torch.zeros_like(reward_E),
        passed_E=reward_E > 0,
        signal_E=torch.ones(2, dtype=torch.bool),
    )
    return batch, PolicyOutput(numbers_BT, -numbers_BT, top_BTK, router_loss=torch.tensor(1.0))

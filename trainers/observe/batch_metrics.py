"""What every online run logs of its batches: who wrote the tokens, which of them carry gradient,
how old they are, and whose reward is lost because its tokens do not train. Pure; every name stands
in the table of docs/trainers.md.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from agentrl.trainers.batch import TokenBatch

TURNS = 8
"""Turns that are shown one by one; later ones are added up."""


def token_metrics(batch: TokenBatch) -> dict[str, float]:
    """Shares by role of the tokens that are read.

    A role is who wrote the token: the prompt (before the first sampled turn), the policy (sampled;
        reread where an
    earlier branch trains it), or a tool or user (observed).
    """
    return _shares("tokens", [(_roles(batch), batch.attention_BT.double())])


def gradient_metrics(trained: Sequence[TokenBatch]) -> dict[str, float]:
    """Shares by role and by turn of the gradient. A token counts by |weight · advantage|, whether
    or not the mask lets it through: any share but that of sampled tokens is an error.

    Args:
        trained: the batches of a round's optimizer steps, corrected, before `informative`.
    """
    parts = list[tuple[dict[str, Tensor], Tensor]]()
    for batch in trained:
        push_BT = batch.advantages_BT.nan_to_num().abs().double()
        if batch.weights_BT is not None:
            push_BT = push_BT * batch.weights_BT.nan_to_num()
        turns = {f"turn_{turn}": batch.turn_BT == turn for turn in range(TURNS)}
        turns[f"turn_{TURNS}_on"] = batch.turn_BT >= TURNS
        parts.append((_roles(batch) | turns, push_BT))
    shares = _shares("gradient", parts)
    return {name: share for name, share in shares.items() if share or "turn" not in name}


def staleness_metrics(batch: TokenBatch, version: int) -> dict[str, float]:
    """Updates between the weights that sampled a trained token and those that are trained now.

    Args:
        version: of the weights that the update starts from.
    """
    own_BT = batch.mask_BT & (batch.version_BT >= 0)
    if not own_BT.any():
        return {}
    age_N = (version - batch.version_BT[own_BT]).double()
    shares = {f"staleness/share_{age}": float((age_N == age).double().mean()) for age in range(4)}
    shares["staleness/share_4_on"] = float((age_N >= 4).double().mean())
    return {"staleness/mean": float(age_N.mean()), "staleness/max": float(age_N.max()), **shares}


def lost_reward_metrics(packed: TokenBatch, trained: Sequence[TokenBatch]) -> dict[str, float]:
    """Reward that was earned by tokens which do not train: masked, filtered with their group, or of
    weight 0.

    `reward/lost_share`: Σ|R|·(share of the episode's tokens that do not train) / Σ|R|; one that
    sampled nothing loses all. `reward/lost_mean`: mean reward of the episodes that lost every
    token, which shows whether a filter takes the good ones or the bad ones. `episodes/untrained`:
    their share. All over the scored episodes of the round's own groups, those that refill it left
    out.

    Args:
        packed: the round as it came from `pack`.
        trained: the batches of its optimizer steps, corrected, before `informative`.
    """
    live_E = torch.zeros_like(packed.reward_E, dtype=torch.float64)
    for step in trained:
        live_BT = step.mask_BT if step.weights_BT is None else step.mask_BT & (step.weights_BT != 0)
        live_E.index_add_(
            0, step.episode_B.to(live_E.device), live_BT.sum(1).double().to(live_E.device)
        )
    own = len(live_E) - packed.n_refilled
    reward_E, live_E, tokens_E = (
        full_E[:own].double() for full_E in (packed.reward_E, live_E, packed.tokens_E)
    )
    if not own:
        return {}
    none_E = live_E == 0
    metrics = {"episodes/untrained": float(none_E.double().mean())}
    if total := float(reward_E.abs().sum()):
        metrics["reward/lost_share"] = (
            float((reward_E.abs() * (1 - live_E / tokens_E.clamp(min=1))).sum()) / total
        )
    if none_E.any():
        metrics["reward/lost_mean"] = float(reward_E[none_E].mean())
    return metrics


def _roles(batch: TokenBatch) -> dict[str, Tensor]:
    """Role -> where it wrote (B, T)."""
    turn_BT = batch.turn_BT >= 0
    began_BT = turn_BT.int().cumsum(1) > 0
    read_BT = batch.attention_BT & ~turn_BT
    return {
        "sampled": batch.mask_BT,
        "reread": turn_BT & ~batch.mask_BT,
        "prompt": read_BT & ~began_BT,
        "observed": read_BT & began_BT,
    }


def _shares(kind: str, parts: Sequence[tuple[dict[str, Tensor], Tensor]]) -> dict[str, float]:
    """For each batch, where the amounts are that a name is about, and the amounts (B, T) -> shares
    of all of them.
    """
    total = sum(float(amount_BT.sum()) for _, amount_BT in parts)
    if not total:
        return {}
    names = parts[0][0]
    return {
        f"{kind}/{name}": sum(float(amount[where[name]].sum()) for where, amount in parts) / total
        for name in names
    }

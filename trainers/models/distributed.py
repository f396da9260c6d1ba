"""Several processes: parameters sharded by FSDP2, episodes dealt out, sums instead of means.

Start the processes with torchrun. Every rank packs the same round and scores its `shard`;
denominators belong to the optimizer step, so gradients of the ranks add up to those of one process.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from agentrl.errors import ConfigError
from agentrl.trainers.batch import TokenBatch, axes_of


def rank_and_world() -> tuple[int, int]:
    """This process's number and how many there are; (0, 1) where none were started together."""
    return (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)


def shard_parameters(model: Any) -> None:
    """Shard the parameters over all processes in place: every decoder layer by itself, then what is
    left.

    Gradients are summed over processes. Build the optimizer afterwards. Works on CPU (gloo) and GPU
    (nccl).
    """
    from torch.distributed.fsdp import FSDPModule, fully_shard

    blocks = set(model._no_split_modules or ())
    for module in list(model.modules()):
        if type(module).__name__ in blocks:
            fully_shard(module)
    fully_shard(model)
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_gradient_divide_factor(1.0)


def shard(batch: TokenBatch, rank: int, world: int) -> TokenBatch:
    """What one of `world` processes scores: whole episodes, about as many tokens each; every
    denominator stays.

    So losses and gradients of the processes are summed, never averaged. A process may get no row at
    all.

    Raises:
        ConfigError: there is no such rank.
    """
    if not 0 <= rank < world:
        raise ConfigError(f"rank={rank} must be from 0 to world={world} minus 1")
    tokens: dict[int, int] = {}
    for owner, length in zip(batch.episode_B.tolist(), batch.lengths_B.tolist(), strict=True):
        tokens[owner] = tokens.get(owner, 0) + length
    loads, mine = [0] * world, list[int]()
    for owner in sorted(tokens, key=lambda one: (-tokens[one], one)):
        least = loads.index(min(loads))
        loads[least] += tokens[owner]
        mine += [owner] if least == rank else []
    return batch.rows(
        torch.isin(
            batch.episode_B, torch.tensor(mine, dtype=torch.int64, device=batch.episode_B.device)
        )
    )


def idle(batch: TokenBatch) -> TokenBatch:
    """One row without a trained token, for a process that must take part and has nothing left to
    score.
    """
    blank = {
        name: tensor.new_zeros(1, 2, *tensor.shape[2:])
        for name, tensor in batch.row_tensors().items()
    }
    blank["attention_BT"] = torch.ones_like(blank["attention_BT"])
    blank |= {name: t[:1] for name, t in batch.extra.items() if axes_of(name) == "B"}
    owner_B = batch.tokens_E.argmax()[None]  # an episode with tokens, so their mean exists
    return batch.with_tensors(blank, episode_B=owner_B)


def micro_batches(batch: TokenBatch, micro_tokens: int) -> list[TokenBatch]:
    """This process's micro-batches, as many on every process.

    Sharded parameters are gathered by all processes together, so one that has run out of rows
    scores idle ones.
    """
    parts = list(batch.split(micro_tokens)) if len(batch) else []
    world = rank_and_world()[1]
    counts: list[Any] = [None] * world
    if world > 1:
        dist.all_gather_object(counts, len(parts))
        parts += [idle(batch)] * (max(counts) - len(parts))
    return parts


def everyones(parts: Sequence[dict[str, float]]) -> list[dict[str, float]]:
    """Metrics of the micro-batches of all processes, for `add_metrics`."""
    if rank_and_world()[1] == 1:
        return list(parts)
    gathered: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(gathered, list(parts))
    return [part for of_rank in gathered for part in of_rank]


def clip_gradient(model: torch.nn.Module, max_norm: float) -> float:
    """Scale the gradient to at most this norm, over the parameters of all processes; returns the
    norm it had.
    """
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), max_norm)
    whole: Tensor = norm.full_tensor() if hasattr(norm, "full_tensor") else norm
    return float(whole)

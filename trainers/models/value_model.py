"""The model of a critic: loaded as the compute settings ask for it, read, and written.

It is a token classifier with one label, whose backbone takes adapters, precision and checkpointing
as a policy does. The head is always trained, and in float32.
"""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from agentrl.engines.loading import best_device, load_critic, scalar_head
from agentrl.trainers.batch import TokenBatch
from agentrl.trainers.config import Compute
from agentrl.trainers.models.loading import adapted, in_bfloat16, policy_dtype

_ADAPTER = "adapter"


def load_value_model(
    start: str | Path, compute: Compute, saved: Path | None = None
) -> torch.nn.Module:
    """The model of a critic, on its device, in evaluation mode.

    Args:
        start: the folder of a policy, a reward model or an earlier critic (`load_critic`).
        compute: device, precision, adapters, checkpointing. It never drops anything out.
        saved: a folder of `save_value_model` to continue from; None: begin at `start`.

    Raises:
        ConfigError: a folder holds no such model, or a library that the settings need is missing.
    """
    device = best_device() if compute.device == "auto" else compute.device
    adapter = saved / _ADAPTER if saved and (saved / _ADAPTER).is_dir() else None
    model: Any = load_critic(saved if saved and not adapter else start, device)
    head = scalar_head(model)
    if saved and adapter:
        head.load_state_dict(scalar_head(load_critic(saved, device)).state_dict())
    critic: torch.nn.Module = equip_classifier(model, compute, adapter).eval()
    return critic


def equip_classifier(model: Any, compute: Compute, adapter: Path | None = None) -> Any:
    """A loaded classifier with the precision, checkpointing and adapters of its compute settings.

    They concern the backbone: the head is always trained, and computes in its own precision.
    """
    backbone = model.base_model.to(policy_dtype(compute))
    scalar_head(model).register_forward_pre_hook(_in_own_precision)
    if compute.dtype == "bfloat16":
        in_bfloat16(backbone)
    if compute.gradient_checkpointing:
        backbone.gradient_checkpointing_enable({"use_reentrant": False})
    if compute.lora_rank:
        wrapped = adapted(backbone, compute, adapter, "FEATURE_EXTRACTION")
        setattr(model, model.base_model_prefix, wrapped)
    return model


def _in_own_precision(head: torch.nn.Module, inputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    weight: Any = head.weight
    return (inputs[0].to(weight.dtype),)


def values(critic: torch.nn.Module, batch: TokenBatch) -> Tensor:
    """V at trained tokens, shape (B, T), zeros elsewhere; float32 (float64 for a float64 critic),
    with gradient.

    V_t is read from the hidden state in front of token t: the state in which the action t is
    chosen, which knows nothing of it. Only those states meet the head. Attention is causal and
    padding is on the right, so no position that is read can see padding and no attention mask is
    passed.

    Args:
        critic: see `load_value_model`.
        batch: rows on the critic's device.
    """
    model: Any = critic
    states_BTd = model.base_model(input_ids=batch.ids_BT[:, :-1], use_cache=False).last_hidden_state
    head = scalar_head(model)
    values_N = head(states_BTd[batch.mask_BT[:, 1:]].to(head.weight.dtype))[:, 0]
    return torch.zeros(
        batch.mask_BT.shape, dtype=values_N.dtype, device=values_N.device
    ).masked_scatter(batch.mask_BT, values_N)


def save_value_model(critic: torch.nn.Module, folder: Path) -> None:
    """Write a plain Hugging Face folder; adapters are merged into it and also kept apart."""
    model: Any = critic
    if not hasattr(model.base_model, "merge_and_unload"):
        model.save_pretrained(folder)
        return
    model.base_model.save_pretrained(folder / _ADAPTER)
    merged = copy.deepcopy(model)
    setattr(merged, merged.base_model_prefix, merged.base_model.merge_and_unload())
    merged.save_pretrained(folder)

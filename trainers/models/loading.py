"""The models of a run as its compute settings ask for them."""

from __future__ import annotations

import copy
import functools
from pathlib import Path
from typing import Any

import torch

from agentrl.engines.loading import best_device, load_model
from agentrl.errors import ConfigError
from agentrl.trainers.config import Compute


def load_policy(path: str | Path, compute: Compute, adapter: str | Path | None = None) -> Any:
    """The model that trains, on its device.

    Args:
        path: a Hugging Face folder.
        compute: device, precision, dropout, adapters, checkpointing.
        adapter: a folder that `save_policy` wrote an adapter to, to continue from; None: a new one,
            which changes nothing before its first step.

    Raises:
        ConfigError: the folder has no model, or a library or device that the settings need is
            missing.
    """
    dtype = policy_dtype(compute)
    model = load_model(path, device_of(compute), dropout=compute.dropout, dtype=dtype)
    return equipped(model, compute, adapter)


def device_of(compute: Compute) -> str:
    """The device that the settings ask for.

    Raises:
        ConfigError: it is CUDA, and PyTorch sees none.
    """
    if compute.device == "cuda" and best_device() != "cuda":
        raise ConfigError(
            "compute.device='cuda': PyTorch sees no CUDA device here; use 'auto' or 'cpu'",
            setting="compute.device",
        )
    return best_device() if compute.device == "auto" else compute.device


def policy_dtype(compute: Compute) -> torch.dtype:
    """Precision of the policy's weights: low only where they are frozen."""
    return torch.bfloat16 if compute.dtype == "bfloat16" and compute.lora_rank else torch.float32


def reference_dtype(compute: Compute) -> torch.dtype:
    """Precision of the weights of a reference that is a separate model."""
    return torch.bfloat16 if compute.dtype == "bfloat16" else torch.float32


def equipped(model: Any, compute: Compute, adapter: str | Path | None = None) -> Any:
    """A loaded policy with the adapters, precision and checkpointing of its compute settings."""
    if compute.lora_rank:
        model = adapted(model, compute, adapter)
    if compute.dtype == "bfloat16":
        in_bfloat16(model)
    if compute.gradient_checkpointing:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    return model


def reference_of(model: Any, compute: Compute, initial: str | Path) -> torch.nn.Module:
    """The policy as it was at the start of the run, to be scored and never trained.

    With adapters it is the policy itself with them switched off, and costs nothing. Otherwise it is
    loaded from the folder that the run started from; in bfloat16 where the policy computes in that.
    """
    if compute.lora_rank:
        return AdapterOff(model)
    loaded: torch.nn.Module = load_model(
        initial, dropout=compute.dropout, dtype=reference_dtype(compute)
    )
    return loaded.to(model.device).requires_grad_(False).eval()


class AdapterOff(torch.nn.Module):
    """A policy with adapters, seen without them."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.module = model

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run the model without its adapters."""
        with self.module.disable_adapter():
            return self.module(*args, **kwargs)


def save_policy(model: Any, folder: str | Path) -> None:
    """Write a plain Hugging Face folder; adapters are merged into it, and also written to the
    folder `adapter`.
    """
    target = Path(folder)
    if not hasattr(model, "merge_and_unload"):
        model.save_pretrained(target)
        return
    model.save_pretrained(target.parent / "adapter")
    copy.deepcopy(model).merge_and_unload().save_pretrained(target)


def in_bfloat16(model: Any) -> None:
    """Let the model compute in bfloat16 from now on, for whoever calls it: sampler and scorer must
    agree.

    Weights keep their precision. The class is what changes, not the object, so that a copy computes
    alike; it says so in `computes_in`.
    """
    kind = type(model)

    @functools.wraps(kind.forward)
    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        with torch.autocast(self.device.type, dtype=torch.bfloat16):
            return kind.forward(self, *args, **kwargs)

    changed = {"forward": forward, "computes_in": torch.bfloat16, "__module__": kind.__module__}
    model.__class__ = type(kind.__name__, (kind,), changed)


def adapted(
    model: Any, compute: Compute, adapter: str | Path | None, task: str = "CAUSAL_LM"
) -> Any:
    """The model with LoRA adapters on its linear layers, new ones or those of a folder.

    https://arxiv.org/abs/2106.09685. Only the adapters train.

    Raises:
        ConfigError: peft is missing.
    """
    try:
        from peft import LoraConfig, PeftModel, get_peft_model
    except ImportError:
        raise ConfigError(
            f"lora_rank={compute.lora_rank} needs peft: pip install 'agentrl[train]'"
        ) from None
    if adapter is not None:
        return PeftModel.from_pretrained(model, str(adapter), is_trainable=True)
    settings = LoraConfig(
        r=compute.lora_rank,
        lora_alpha=compute.lora_alpha,
        target_modules="all-linear",
        task_type=task,
    )
    return get_peft_model(model, settings)

"""The weights of a policy as an engine takes them."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

from torch import Tensor


class PolicyWeights:
    """The weights of a model that trains, with its adapters merged where it has any.

    Args:
        model: a transformers model, or a peft model around one.
    """

    def __init__(self, model: Any) -> None:
        self.module = model

    def tensors(self) -> Mapping[str, Tensor]:
        """Name of each parameter, as in the model's own folder, to its tensor."""
        if not hasattr(self.module, "get_base_model"):
            found: dict[str, Tensor] = self.module.state_dict()
            return found
        base = self.module.get_base_model()
        layers = {name: layer for name, layer in base.named_modules() if hasattr(layer, "lora_A")}
        merged = {}
        for name, tensor in base.state_dict().items():
            owner, is_base, last = name.rpartition(".base_layer.")
            if is_base and last == "weight":
                tensor = tensor + layers[owner].get_delta_weight("default").to(tensor.dtype)
            if ".lora_" not in name:
                merged[name.replace(".base_layer.", ".")] = tensor
        return merged


def sampling_copy(model: Any) -> Any:
    """A second model of the same weights, for an engine that samples while the first one trains."""
    twin = copy.deepcopy(model)
    twin = twin.merge_and_unload() if hasattr(twin, "merge_and_unload") else twin
    return twin.requires_grad_(False).eval()

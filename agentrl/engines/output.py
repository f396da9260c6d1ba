"""An output layer in float32, in a sampler as in a trainer."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from transformers import PreTrainedModel


class Float32Output(torch.nn.Linear):
    """An output layer whose products are summed in float32, whatever the model computes in.

    Rounding to bfloat16 moves a logit of 8 by up to 1/64, which is more than a sequence ratio may
    move. A trainer sums in float32, so a sampler must.
    """

    def forward(self, states: torch.Tensor) -> torch.Tensor:
        """Logits in float32 (float64 where weights or states are)."""
        weight, wide = self.weight, torch.float32
        wide = torch.promote_types(torch.promote_types(weight.dtype, states.dtype), wide)
        with torch.autocast(states.device.type, enabled=False):
            bias = None if self.bias is None else self.bias.to(wide)
            is_low = weight.dtype != wide == torch.float32
            if is_low and weight.is_cuda and not states.requires_grad:
                # Tensor cores sum in float32 without a copy of the weights in it.
                rows = states.flatten(0, -2).to(weight.dtype)
                logits = torch.mm(rows, weight.T, out_dtype=wide)
                logits = logits if bias is None else logits + bias
                return logits.view(*states.shape[:-1], -1)
            return torch.nn.functional.linear(states.to(wide), weight.to(wide), bias)


def with_float32_output(model: PreTrainedModel) -> PreTrainedModel:
    """The model, from now on with logits in float32 where its output layer is a plain linear one.

    The class of the layer changes, not the object: copies and checkpoints are what they were.
    """
    head: Any = model.get_output_embeddings()
    if type(head) is torch.nn.Linear:
        head.__class__ = Float32Output
    return model

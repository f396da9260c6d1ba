"""A key-value cache with room for the tokens to come: a step writes its own and copies no others.

Letters: B rows, H heads of keys and values, T tokens, d width of a head.
"""

from __future__ import annotations

import re
from typing import Any

import torch
from transformers.cache_utils import DynamicCache, DynamicLayer

ROOM = 64
"""Tokens that a layer makes room for at a time."""


class GrowingLayer(DynamicLayer):
    """A layer that keeps every token, and copies what it has once in `ROOM` tokens."""

    _pair_BHTd: tuple[torch.Tensor, ...] = ()

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Take keys and values of new tokens, each (B, H, new, d), and return all there are."""
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        start = self.get_seq_length()
        end = start + key_states.shape[-2]
        if not self._pair_BHTd or end > self._pair_BHTd[0].shape[-2]:
            self._pair_BHTd = tuple(
                new.new_empty((*new.shape[:2], end + ROOM, new.shape[-1]))
                for new in (key_states, value_states)
            )
            if start:
                assert self.keys is not None and self.values is not None
                self._pair_BHTd[0][:, :, :start] = self.keys
                self._pair_BHTd[1][:, :, :start] = self.values
        for held, new in zip(self._pair_BHTd, (key_states, value_states), strict=True):
            held[:, :, start:end] = new
        self.keys, self.values = (held[:, :, :end] for held in self._pair_BHTd)
        return self.keys, self.values

    def batch_select_indices(self, indices: torch.Tensor) -> None:
        """Go on with these rows; one that stands twice is copied."""
        super().batch_select_indices(indices)
        self._pair_BHTd = ()


def keeps_every_token(model: Any) -> bool:
    """Whether each layer of a model looks back on all tokens: no sliding window, no other state."""
    layers = DynamicCache(config=model.config).layers
    return all(type(layer) is DynamicLayer for layer in layers)


def keys_stay(model: Any) -> bool:
    """Whether the key of a token does not depend on how long its row becomes, as it does where
    rotary embeddings are scaled by the length (`longrope`, `dynamic`).
    """
    config = model.config.get_text_config()
    return not re.search("longrope|dynamic", str(getattr(config, "rope_parameters", "")))


def empty_cache(model: Any) -> DynamicCache:
    """A cache for one batch."""
    cache = DynamicCache(config=model.config)
    if keeps_every_token(model):
        cache.layers = [GrowingLayer() for _ in cache.layers]  # type: ignore[no-untyped-call]
    return cache

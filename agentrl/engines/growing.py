"""Keys and values that grow: a cache with room for the tokens to come, so that a step writes its
own and copies no others; and what episodes have read and said, so that a turn costs its new tokens.

Letters: B rows, H heads of keys and values, T tokens, d width of a head.
"""

from __future__ import annotations

import re
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from transformers.cache_utils import DynamicCache, DynamicLayer

if TYPE_CHECKING:
    from transformers import PreTrainedModel

MB = 2**20
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
            old = self._pair_BHTd
            self._pair_BHTd = tuple(
                new.new_empty((*new.shape[:2], end + ROOM, new.shape[-1]))
                for new in (key_states, value_states)
            )
            for held, before in zip(self._pair_BHTd, old, strict=False):
                held[:, :, :start] = before[:, :, :start]
        for held, new in zip(self._pair_BHTd, (key_states, value_states), strict=True):
            held[:, :, start:end] = new
        self._show(end)
        assert self.keys is not None and self.values is not None
        return self.keys, self.values

    def begin(self, pair_BHTd: tuple[torch.Tensor, ...], tokens: int) -> None:
        """Begin with keys and values of so many tokens, in tensors that have room for more."""
        if not self.is_initialized:
            self.lazy_initialization(*pair_BHTd)
        self._pair_BHTd = pair_BHTd
        self._show(tokens)

    def batch_select_indices(self, indices: torch.Tensor) -> None:
        """Go on with these rows; one that stands twice is copied."""
        self.begin(
            tuple(held.index_select(0, indices) for held in self._pair_BHTd),
            self.get_seq_length(),
        )

    def _show(self, tokens: int) -> None:
        self.keys, self.values = (held[:, :, :tokens] for held in self._pair_BHTd)


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


class History(NamedTuple):
    """Tokens, and what each layer computed of them: keys_HTd and values_HTd; the experts that they
    went to, (T, layers, experts of a token), where the engine tells them.
    """

    ids: tuple[int, ...]
    layers: tuple[tuple[torch.Tensor, torch.Tensor], ...]
    experts: Any = None

    @property
    def nbytes(self) -> int:
        """Memory that it takes, but for its ids."""
        own = 0 if self.experts is None else int(self.experts.nbytes)
        return own + sum(keys.nbytes + values.nbytes for keys, values in self.layers)


class Histories:
    """The histories that were computed last, under the present weights of a model.

    Models with layers that do not keep every token (sliding windows, linear attention), or whose
    keys change with the length of a row (scaled rotary embeddings), have none.

    Args:
        model: what computes them.
        limit_mb: memory they may take; the one that was used longest ago goes first.
    """

    def __init__(self, model: PreTrainedModel, limit_mb: int) -> None:
        self._model = model
        self._limit = limit_mb * MB
        self._possible = limit_mb > 0 and keeps_every_token(model) and keys_stay(model)
        self._by_hash: OrderedDict[int, History] = OrderedDict()
        self._bytes = 0
        self._look: torch.Tensor | None = None

    def __len__(self) -> int:
        return len(self._by_hash)

    def clear(self) -> None:
        """Forget all."""
        self._by_hash.clear()
        self._bytes = 0

    def begin(self) -> None:
        """Forget all if a few numbers of some weight are others than at the last call.

        `load` clears in any case. This is for whoever trains the module without a word, as an
        optimizer does, which moves every weight.
        """
        if not self._possible:
            return
        look = torch.cat([_some(weight) for weight in self._model.parameters() if weight.numel()])
        if self._look is None or not torch.equal(look, self._look):
            self.clear()
        self._look = look

    def before(self, ids: Sequence[int]) -> History | None:
        """The longest history that `ids` begins with and goes beyond."""
        found = None
        for length, key in enumerate(_hashes(ids[:-1]), start=1):
            history = self._by_hash.get(key)
            if history is not None and history.ids == tuple(ids[:length]):
                found = key
        if found is None:
            return None
        self._by_hash.move_to_end(found)
        return self._by_hash[found]

    def as_cache(
        self, histories: Sequence[History | None], lengths: Sequence[int]
    ) -> tuple[DynamicCache, torch.Tensor]:
        """A cache whose rows are the beginnings of these histories, right-aligned, and its mask_BT.

        Args:
            lengths: tokens of each that are taken; 0 where there is none.
        """
        cache, device = empty_cache(self._model), self._model.device
        ages_T = torch.arange(max(lengths), 0, -1, device=device)
        mask_BT = (ages_T <= torch.tensor(lengths, device=device)[:, None]).long()
        width = max(lengths)
        known = next((history for history in histories if history), None) if width else None
        for number, pair in enumerate(known.layers if known else ()):
            filled = []
            for part, like in enumerate(pair):
                size = (len(lengths), like.shape[0], width + ROOM, like.shape[2])
                filled.append(like.new_zeros(size))
                for row, (history, length) in enumerate(zip(histories, lengths, strict=True)):
                    if history and length:
                        kept_HTd = history.layers[number][part][:, :length]
                        filled[-1][row, :, width - length : width] = kept_HTd
            layer: Any = cache.layers[number]
            layer.begin(tuple(filled), width)
        return cache, mask_BT

    def keep(
        self,
        ids: Sequence[int],
        cache: Any,
        row: int,
        mask_T: torch.Tensor,
        past: History | None,
        experts: Any = None,
    ) -> None:
        """Keep what a cache holds of one row, whose tokens stand where the mask is 1.

        It takes the place of the history that the row began with.
        """
        if not self._possible:
            return
        if past is not None:
            self._drop(_hash(past.ids))
        count = int(mask_T.sum())
        assert bool(mask_T[-count:].all()), "a row is padded on the left only"
        layers = tuple(
            (layer.keys[row][:, -count:].clone(), layer.values[row][:, -count:].clone())
            for layer in cache.layers
        )
        key = _hash(ids)
        self._drop(key)
        self._by_hash[key] = History(tuple(ids), layers, experts)
        self._bytes += self._by_hash[key].nbytes
        while self._bytes > self._limit:
            self._drop(next(iter(self._by_hash)))

    def _drop(self, key: int) -> None:
        if history := self._by_hash.pop(key, None):
            self._bytes -= history.nbytes


def _hashes(ids: Sequence[int]) -> Iterable[int]:
    """One number for each beginning of `ids`, the shortest first."""
    key = 0
    for token in ids:
        key = hash((key, token))
        yield key


def _some(weight: torch.Tensor) -> torch.Tensor:
    """A few numbers from the middle of a weight. Writers exist that no version counter sees."""
    row = weight.detach()[tuple(size // 2 for size in weight.shape[:-1])]
    return row.reshape(-1)[:8].float()


def _hash(ids: Sequence[int]) -> int:
    *_, key = _hashes(ids)
    return key

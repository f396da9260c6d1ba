"""Keys and values of what episodes have read and said, so that a turn costs its new tokens only.

Letters: B rows, T tokens, H heads of keys and values, d width of a head.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch.nn.utils.rnn import pad_sequence

from agentrl.engines.growing import empty_cache, keeps_every_token, keys_stay

if TYPE_CHECKING:
    from transformers import PreTrainedModel
    from transformers.cache_utils import DynamicCache

MB = 2**20


class History(NamedTuple):
    """Tokens, and what each layer computed of them: keys_THd and values_THd."""

    ids: tuple[int, ...]
    layers: tuple[tuple[torch.Tensor, torch.Tensor], ...]


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
        known = next((history for history in histories if history), None) if any(lengths) else None
        for number, pair in enumerate(known.layers if known else ()):
            none = [rows.new_empty((0, *rows.shape[1:])) for rows in pair]
            keys_BHTd, values_BHTd = (
                pad_sequence(
                    [
                        history.layers[number][part][:length] if history else none[part]
                        for history, length in zip(histories, lengths, strict=True)
                    ],
                    batch_first=True,
                    padding_side="left",
                ).transpose(1, 2)
                for part in (0, 1)
            )
            cache.update(keys_BHTd, values_BHTd, number)
        return cache, mask_BT

    def keep(
        self, ids: Sequence[int], cache: Any, row: int, mask_T: torch.Tensor, past: History | None
    ) -> None:
        """Keep what a cache holds of one row, whose tokens stand where the mask is 1.

        It takes the place of the history that the row began with.
        """
        if not self._possible:
            return
        if past is not None:
            self._drop(_hash(past.ids))
        here = mask_T.bool()
        layers = tuple(
            (layer.keys[row].transpose(0, 1)[here], layer.values[row].transpose(0, 1)[here])
            for layer in cache.layers
        )
        key = _hash(ids)
        self._drop(key)
        self._by_hash[key] = History(tuple(ids), layers)
        self._bytes += _size(layers)
        while self._bytes > self._limit:
            self._drop(next(iter(self._by_hash)))

    def _drop(self, key: int) -> None:
        if history := self._by_hash.pop(key, None):
            self._bytes -= _size(history.layers)


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


def _size(layers: Iterable[tuple[torch.Tensor, torch.Tensor]]) -> int:
    return sum(keys.nbytes + values.nbytes for keys, values in layers)

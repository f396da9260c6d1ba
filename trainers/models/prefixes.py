"""Rows that begin alike are read once: the episodes of a group share a prompt, forks a history.

Letters: B rows, T positions of a row; N trees, S positions of a tree.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np
import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from agentrl.engines.growing import keeps_every_token, keys_stay
from agentrl.engines.routing import routers_of

LARGEST = 2048
"""Positions of a tree, whose mask takes the square of that, 4 MiB. A batch with a longer row stays
rows.
"""
PAIR = 3.0
"""What attention between two tokens costs under a mask, in units of what it costs without one."""


@dataclass(frozen=True)
class Trees:
    """Rows of a batch, those that begin alike laid into one row with branches.

    Attributes:
        ids_NS: int64 token ids, zeros as padding.
        positions_NS: int64, position of a token in each row that it belongs to.
        mask_N1SS: bool, True where a token (third axis) may look at another (fourth): itself and
            what stands before it in its row.
        place_BT: int64 index into N*S of each token; 0 behind the last one that is asked for.
    """

    ids_NS: Tensor
    positions_NS: Tensor
    mask_N1SS: Tensor
    place_BT: Tensor

    @property
    def inputs(self) -> dict[str, Tensor]:
        """As a Hugging Face model takes them."""
        return {
            "input_ids": self.ids_NS,
            "attention_mask": self.mask_N1SS,
            "position_ids": self.positions_NS,
        }


def plant(ids_BT: Tensor, lengths_B: Tensor, width: int) -> Trees | None:
    """Lay out a batch so that common beginnings are computed once; None where that costs more.

    Rows in lexicographic order differ least from their neighbours (a trie, depth first). A row
    joins the tree of its predecessor if what it saves in linear layers is more than what a larger
    mask costs in attention.

    Args:
        ids_BT: right-padded token ids.
        lengths_B: tokens of each row that are to be read.
        width: hidden size of the model: one token costs its linear layers as much as 6 * `width`
            pairs of tokens cost attention (24 width^2 against 4 width multiplications a layer).
    """
    rows = [
        row[:length] for row, length in zip(ids_BT.cpu().numpy(), lengths_B.tolist(), strict=True)
    ]
    order = sorted(range(len(rows)), key=lambda row: rows[row].astype(">u4").tobytes())
    trees: list[list[tuple[int, int]]] = []
    size, sizes = 0, list[int]()
    for last, row in zip([-1, *order], order, strict=False):
        length = len(rows[row])
        shared = _alike(rows[last], rows[row]) if last >= 0 else 0
        grown = size + length - shared
        apart = 6 * width * shared + length**2 / 2
        if trees and grown <= LARGEST and apart > PAIR * (grown**2 - size**2):
            trees[-1].append((row, shared))
            size = sizes[-1] = grown
        else:
            trees.append([(row, 0)])
            size = length
            sizes.append(length)
    tall, wide = len(trees), max(sizes)
    if wide > LARGEST:
        return None
    cost = tall * (6 * width * wide + PAIR * wide**2)
    if cost >= len(rows) * (6 * width * ids_BT.shape[1] + ids_BT.shape[1] ** 2 / 2):
        return None
    return _laid(rows, trees, tall, wide, ids_BT)


def _laid(
    rows: list[np.ndarray], trees: list[list[tuple[int, int]]], tall: int, wide: int, like: Tensor
) -> Trees:
    ids_NS = np.zeros((tall, wide), np.int64)
    positions_NS = np.zeros((tall, wide), np.int64)
    mask_NSS = np.zeros((tall, wide, wide), bool)
    place_BT = np.zeros(like.shape, np.int64)
    mask_NSS[:, np.arange(wide), np.arange(wide)] = True  # padding too: nothing is not a number
    for number, tree in enumerate(trees):
        end, path = 0, np.zeros(0, np.int64)
        for row, shared in tree:
            tokens, new = rows[row], len(rows[row]) - shared
            path = np.concatenate([path[:shared], np.arange(end, end + new)])
            fresh, end = path[shared:], end + new
            ids_NS[number, fresh] = tokens[shared:]
            positions_NS[number, fresh] = np.arange(shared, len(tokens))
            mask_NSS[number, fresh[:, None], path] = (
                np.arange(len(tokens)) <= np.arange(shared, len(tokens))[:, None]
            )
            place_BT[row, : len(tokens)] = number * wide + path
    ids, positions, mask, place = (
        torch.from_numpy(one).to(like.device) for one in (ids_NS, positions_NS, mask_NSS, place_BT)
    )
    return Trees(ids, positions, mask[:, None], place)


def _alike(one: np.ndarray, other: np.ndarray) -> int:
    """How many tokens two rows have in common at their start."""
    length = min(len(one), len(other))
    differ = np.flatnonzero(one[:length] != other[:length])
    return int(differ[0]) if len(differ) else length


_TAKES: WeakKeyDictionary[torch.nn.Module, bool] = WeakKeyDictionary()


def takes_trees(model: Any) -> bool:
    """Whether a model computes the same of a tree as of its rows, found out once.

    It does where every layer's attention is torch's own function, given the mask as it is, and the
    first layer's queries and keys of a token are those that it has in its row. Neither depends on
    what the weights have become, so that a resumed run finds the same. Not so: layers with a window
    or a state, rotary embeddings that are scaled by length, other attention, biases by distance.
    Nor mixtures of experts, whose balance is measured over the tokens of rows and whose recorded
    experts are for rows.
    """
    if model not in _TAKES:
        inner = getattr(model, "module", model)
        plain = hasattr(inner, "config") and not routers_of(model)
        known = plain and keeps_every_token(inner) and keys_stay(inner)
        _TAKES[model] = known and _looks_alike(model, inner.config.get_text_config())
    return _TAKES[model]


class _Attention(TorchFunctionMode):
    """Collects what attention is called with."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[Any, Any, Any]] = []

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        """Every function of torch that the model calls."""
        kwargs = kwargs or {}
        if func is torch.nn.functional.scaled_dot_product_attention:
            mask = kwargs.get("attn_mask", args[3] if len(args) > 3 else None)
            named = [kwargs.get(name) for name in ("query", "key")]
            query, key = (
                given if given is not None else args[at] for at, given in enumerate(named)
            )
            self.calls.append((query, key, mask))
        return func(*args, **kwargs)


@torch.no_grad()
def _looks_alike(model: Any, config: Any) -> bool:
    device, vocab = next(model.parameters()).device, int(config.vocab_size)
    rows_BT = torch.arange(1, 17, device=device).repeat(2, 1) % vocab
    rows_BT[1, 6:] = rows_BT[1, 6:].flip(0)
    trees = plant(rows_BT, torch.tensor([16, 16]), 10**6)
    assert trees is not None, "rows with a common beginning cost less as a tree"
    calls = []
    causal_B1TT = torch.ones(2, 1, 16, 16, dtype=torch.bool, device=device).tril()
    was_training = model.training
    model.eval()
    try:
        for inputs in ({"input_ids": rows_BT, "attention_mask": causal_B1TT}, trees.inputs):
            with _Attention() as seen:
                model(**inputs, use_cache=False)
            calls.append(seen.calls)
    except (IndexError, RuntimeError, TypeError, ValueError):
        # Every family says in its own way that it cannot read such a mask; then it is read as rows.
        return False
    finally:
        model.train(was_training)
    in_rows, in_trees = calls
    masks = [mask for *_, mask in in_trees]
    if len(masks) != int(config.num_hidden_layers) or len(in_rows) != len(masks):
        return False
    if not all(mask is not None and _is(mask, trees.mask_N1SS) for mask in masks):
        return False
    return all(_near(*pair, trees) for pair in zip(in_rows[0][:2], in_trees[0][:2], strict=True))


def _is(mask: Tensor, given: Tensor) -> bool:
    whole = mask.shape[-2:] == given.shape[-2:] and mask.dtype == torch.bool
    return whole and torch.equal(mask[:, :1], given)


def _near(rows_BHTd: Tensor, trees_NHSd: Tensor, trees: Trees) -> bool:
    """Whether the vectors of tokens are alike; a wrong position turns them."""
    own_BTX = rows_BHTd.transpose(1, 2).flatten(2).float()
    laid_BTX = trees_NHSd.transpose(1, 2).flatten(2).float().flatten(0, 1)[trees.place_BT]
    off, size = (laid_BTX - own_BTX).norm(dim=-1), own_BTX.norm(dim=-1)
    return bool((off <= 0.02 * size).all()) and bool((size > 0).all())


def hidden_size(model: Any) -> int:
    """Hidden size of the model under any wrapper."""
    return int(getattr(model, "module", model).config.get_text_config().hidden_size)

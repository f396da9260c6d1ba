"""Branches of history as right-padded arrays: the row fields of a `TokenBatch`."""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from itertools import chain, repeat
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from agentrl.errors import UserError
from agentrl.trajectory import SegmentKind, Trajectory


def padded_rows(
    rows: Sequence[Trajectory], rewards: Sequence[Sequence[float]], pad_id: int
) -> dict[str, Any]:
    """The tensors of shape (B, T); whatever stands after a row's last trained token cannot matter
    and is cut.
    """
    lengths = np.array([len(row.mask) - row.mask[::-1].index(1) for row in rows], dtype=np.int64)
    attention = np.arange(lengths.max(initial=0)) < lengths[:, None]

    def padded(values: Sequence[Sequence[float]], fill: float, dtype: npt.DTypeLike) -> Tensor:
        full = np.full(attention.shape, fill, dtype)
        cut = (row[:length] for row, length in zip(values, lengths, strict=True))
        full[attention] = np.fromiter(chain.from_iterable(cut), dtype, int(lengths.sum()))
        return torch.from_numpy(full)

    versions = [
        tuple(chain.from_iterable(repeat(s.version, len(s.ids)) for s in row.segments))
        for row in rows
    ]
    tensors: dict[str, Any] = {
        "ids_BT": padded([row.ids for row in rows], pad_id, np.int64),
        "mask_BT": padded([row.mask for row in rows], 0, np.bool_),
        "attention_BT": torch.from_numpy(attention),
        "old_logprobs_BT": padded([row.logprobs for row in rows], 0.0, np.float32),
        "turn_BT": padded([row.turn_of for row in rows], -1, np.int32),
        "version_BT": padded(versions, -1, np.int32),
        "state_BT": padded([_states(row) for row in rows], -1, np.int64),
        "rewards_BT": padded(rewards, 0.0, np.float64),
    }
    if tensors["mask_BT"][:, :1].any():
        raise UserError(
            "a row's first token was sampled from nothing; give every prompt at least one token"
        )
    if any(row.experts is not None for row in rows):
        tensors["experts_BTLK"] = _experts(rows, lengths)
    tensors["advantages_BT"] = torch.where(tensors["mask_BT"], torch.nan, 0.0).float()
    return tensors


def _experts(rows: Sequence[Trajectory], lengths: npt.NDArray[np.int64]) -> Tensor:
    """Which experts each token went to, int16 (B, T, layers, experts of a token); -1 where nobody
    said.
    """
    shapes = {row.experts.shape[1:] for row in rows if row.experts is not None}
    if len(shapes) != 1:
        raise UserError(
            f"rows have experts of {sorted(shapes)} (layers, experts of a token): train on episodes"
            " of one model"
        )
    full = np.full((len(rows), lengths.max(initial=0), *shapes.pop()), -1, np.int16)
    for index, (row, length) in enumerate(zip(rows, lengths, strict=True)):
        if row.experts is not None:
            told = row.experts[:length]
            full[index, : len(told)] = told
    return torch.from_numpy(full)


def _states(row: Trajectory) -> list[int]:
    """At each sampled token, a hash of the tokens that came right before its turn; -1 elsewhere."""
    states, told = list[int](), tuple[int, ...]()
    for segment in row.segments:
        sampled = segment.kind is SegmentKind.SAMPLED
        told = told if sampled else segment.ids
        states += [zlib.crc32(np.asarray(told, np.int64).tobytes()) if sampled else -1] * len(
            segment.ids
        )
    return states

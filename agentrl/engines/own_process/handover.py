"""Weights in memory that two processes share, so that none of them travels through a pipe."""

from __future__ import annotations

import mmap
import os
from collections.abc import Mapping
from math import prod
from typing import NamedTuple

import torch
from torch import Tensor

_ALIGNED = 64
"""Bytes at a multiple of which a tensor begins, as PyTorch's own allocations do."""


class TensorPlace(NamedTuple):
    """Where a tensor lies in the shared memory."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    offset: int


class SharedWeights:
    """One set of weights in anonymous memory, which ends with the last process that has it open.

    Attributes:
        fd: a descriptor that a child may inherit.
    """

    def __init__(self) -> None:
        self.fd = os.memfd_create("agentrl-weights")
        self._memory: mmap.mmap | None = None

    def write(self, tensors: Mapping[str, Tensor]) -> dict[str, TensorPlace]:
        """Replace all of them; nobody may be reading. Tensors that share memory are written once.

        Returns:
            what `read` needs to find them again.
        """
        places, first, size = dict[str, TensorPlace](), dict[tuple[object, ...], int](), 0
        for name, tensor in tensors.items():
            if (same := _key(tensor)) not in first:
                first[same], size = size, size + tensor.nbytes + -tensor.nbytes % _ALIGNED
            places[name] = TensorPlace(tensor.dtype, tuple(tensor.shape), first[same])
        if self._memory is None or len(self._memory) != size:
            self._memory = None
            os.ftruncate(self.fd, size)
            self._memory = mmap.mmap(self.fd, size)
        for name, place in places.items():
            if first.pop(_key(tensors[name]), None) is not None:
                _view(self._memory, place).copy_(tensors[name].detach())
        return places

    def close(self) -> None:
        """Let go of the memory; safe to call twice."""
        self._memory = None
        if self.fd >= 0:
            os.close(self.fd)
        self.fd = -1


def read(fd: int, places: Mapping[str, TensorPlace]) -> dict[str, Tensor]:
    """The tensors in shared memory, valid until the next `write`; changes of them stay here."""
    memory = mmap.mmap(fd, 0, access=mmap.ACCESS_COPY)
    return {name: _view(memory, place) for name, place in places.items()}


def _key(tensor: Tensor) -> tuple[object, ...]:
    """Equal for tensors that are the same numbers in the same memory."""
    return tensor.device, tensor.data_ptr(), tensor.dtype, tensor.shape, tensor.stride()


def _view(memory: mmap.mmap, place: TensorPlace) -> Tensor:
    count = prod(place.shape)
    if not count:
        return torch.empty(place.shape, dtype=place.dtype)
    row = torch.frombuffer(memory, dtype=place.dtype, count=count, offset=place.offset)
    return row.view(place.shape)

"""A pytest plugin: what is loaded lies at other addresses each time, few of them a multiple of 64,
unless the loader gives it memory of its own.

With BORROWED=1 in the environment the loader does not, as if it had never been mended.
"""

from __future__ import annotations

import itertools
import os

import torch
from transformers import PreTrainedModel

from agentrl.engines import loading

LINE = 64
"""Bytes: kernels take other paths where a row does not begin at a multiple of this."""


def shifted(tensor: torch.Tensor, elements: int = 1) -> torch.Tensor:
    """The same numbers, so many elements after an address that is a multiple of `LINE`."""
    room = torch.empty(tensor.nbytes + 2 * LINE, dtype=torch.uint8)
    start = -room.data_ptr() % LINE + elements * tensor.element_size() % LINE
    moved = room[start : start + tensor.nbytes].view(tensor.dtype).view(tensor.shape)
    return moved.copy_(tensor)


_places = itertools.count()
_loads = PreTrainedModel.from_pretrained.__func__


def _from_pretrained(cls, *args, **options):
    loaded = _loads(cls, *args, **options)
    model = loaded[0] if isinstance(loaded, tuple) else loaded
    place = next(_places)
    for tensor in (*model.parameters(), *model.buffers()):
        tensor.data = shifted(tensor.data, place)
    return loaded


def pytest_configure(config) -> None:
    """Load so from now on."""
    PreTrainedModel.from_pretrained = classmethod(_from_pretrained)
    if os.environ.get("BORROWED"):
        loading._own_memory = lambda model: None

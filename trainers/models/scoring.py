"""Log-probabilities of the trained tokens only: what a prompt or a tool said is never projected
onto the vocabulary.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Literal, Protocol
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from agentrl.trainers.batch import PolicyOutput, TokenBatch
from agentrl.trainers.models.head import HeadOutput, Reading, default_chunk, project, read_logits

EntropyMode = Literal["off", "value", "gradient"]
_Way = Literal["head", "gathered", "whole"]


class MaskedIds(Protocol):
    """Right-padded token ids, and at which of them log-probabilities are wanted."""

    @property
    def ids_BT(self) -> Tensor:
        """int64 token ids."""
        ...

    @property
    def mask_BT(self) -> Tensor:
        """bool, True at wanted tokens; never at the first token of a row."""
        ...


def token_logprobs(
    model: torch.nn.Module,
    batch: MaskedIds,
    temperature: float = 1.0,
    *,
    chunk: int | None = None,
    entropy: EntropyMode = "value",
    top: int = 0,
) -> PolicyOutput:
    """Score a right-padded batch with a Hugging Face causal language model.

    The whole model is called once, so that hooks of FSDP, DDP and PEFT fire. Its output layer
    turns the hidden states in front of trained tokens into log-probabilities, in chunks and in
    float32 (float64 models stay float64). With more than one chunk, logits are computed again in
    the backward pass. Attention is causal and padding stands on the right, so no attention mask is
    needed. Other threads may sample from the model meanwhile; only one may score with it.

    Args:
        model: the policy; gradients flow unless the caller stands under `torch.no_grad()`.
        batch: rows on the model's device.
        temperature: of the sampler; logits are divided by it.
        chunk: trained tokens whose logits exist at a time (chunk × vocabulary × 4 bytes); None: as
            many as fit 64 MiB.
        entropy: leave it out, compute its value, or compute it with gradient.
        top: K, how many of the likeliest tokens to give, or those that a `TokenBatch` names.

    Raises:
        ValueError: the temperature or the chunk is not positive, or `top` is negative.
    """
    if not temperature > 0 or (chunk is not None and chunk < 1) or top < 0:
        raise ValueError(
            f"temperature={temperature} and chunk={chunk} must be positive, top={top} not negative"
        )
    predicted_BT = batch.mask_BT[:, 1:]
    targets_N = batch.ids_BT[:, 1:][predicted_BT]
    asked_BTK = batch.top_ids_BTK if top and isinstance(batch, TokenBatch) else None
    asked_NK = None if asked_BTK is None else asked_BTK[:, 1:][predicted_BT]
    reading = Reading(
        temperature, entropy != "off", top if asked_NK is None else asked_NK.shape[-1], asked_NK
    )
    way = _way(model, batch.ids_BT)

    def read(states_BTd: Tensor) -> HeadOutput:
        head: Any = _output_layer(model)
        size = default_chunk(head.weight.shape[0]) if chunk is None else chunk
        states_Nd = states_BTd[:, :-1][predicted_BT]
        return project(states_Nd, head.weight, targets_N, reading, size)

    if way == "head":
        found = _call_with_head(model, batch.ids_BT, read)
    else:
        logits_NV = _own_logits(model, batch.ids_BT, predicted_BT, way)
        found = read_logits(logits_NV, targets_N, reading)
    entropy_N = found.entropy_N if entropy == "gradient" else found.entropy_N.detach()
    return PolicyOutput(
        _scatter(batch.mask_BT, found.logprobs_N),
        None if entropy == "off" else _scatter(batch.mask_BT, entropy_N),
        _scatter(batch.mask_BT, found.top_NK) if top else None,
        _scatter(batch.mask_BT, found.top_ids_NK) if top else None,
    )


@torch.no_grad()
def frozen_logprobs(
    model: torch.nn.Module, batch: TokenBatch, temperature: float = 1.0, chunk: int | None = None
) -> Tensor:
    """Log-probabilities (B, T) under a frozen model: reference, proximal or teacher."""
    return token_logprobs(model, batch, temperature, chunk=chunk, entropy="off").logprobs_BT


def _scatter(mask_BT: Tensor, values_N: Tensor) -> Tensor:
    """Values (N, ...) at the trained tokens, zeros elsewhere."""
    whole = torch.zeros(
        *mask_BT.shape, *values_N.shape[1:], dtype=values_N.dtype, device=values_N.device
    )
    return whole.masked_scatter(
        mask_BT.reshape(*mask_BT.shape, *[1] * (values_N.dim() - 1)), values_N
    )


def _output_layer(model: torch.nn.Module) -> torch.nn.Module | None:
    """The layer that makes logits, under whatever the model is wrapped in; None where there is
    none.
    """
    inner = getattr(model, "module", model)  # DistributedDataParallel hides the model's own methods
    find: Callable[[], torch.nn.Module | None] = getattr(
        inner, "get_output_embeddings", lambda: None
    )
    return find()


@contextmanager
def _head_does(head: Any, forward: Callable[[Tensor], Tensor]) -> Iterator[None]:
    """Let the layer do something else for calls of this thread."""
    original, owner = head.forward, threading.get_ident()
    patched = "forward" in vars(head)
    head.forward = lambda states: (
        forward(states) if threading.get_ident() == owner else original(states)
    )
    try:
        yield
    finally:
        if patched:
            head.forward = original
        else:
            del head.forward


def _call_with_head(model: Any, ids_BT: Tensor, read: Callable[[Tensor], HeadOutput]) -> HeadOutput:
    """Run the model and let its output layer return what is read off the hidden states, packed as
    (1, N, 2 + K).
    """

    ids: list[Tensor] = []

    def forward(states_BTd: Tensor) -> Tensor:
        found = read(states_BTd)
        ids.append(found.top_ids_NK)
        return torch.cat(
            [found.logprobs_N[None, :, None], found.entropy_N[None, :, None], found.top_NK[None]], 2
        )

    with _head_does(_output_layer(model), forward):
        packed_NX = model(input_ids=ids_BT, use_cache=False).logits[0]
    return HeadOutput(packed_NX[:, 0], packed_NX[:, 1], packed_NX[:, 2:], ids[-1])


def _own_logits(model: Any, ids_BT: Tensor, predicted_BT: Tensor, way: _Way) -> Tensor:
    """The model's own logits (N, V) in front of trained tokens."""
    if way == "whole":
        logits_BTV: Tensor = model(input_ids=ids_BT, use_cache=False).logits
        return logits_BTV[:, :-1][predicted_BT]
    head: Any = _output_layer(model)
    original = head.forward
    with _head_does(head, lambda states_BTd: original(states_BTd[:, :-1][predicted_BT][None])):
        logits_NV: Tensor = model(input_ids=ids_BT, use_cache=False).logits[0]
    return logits_NV


_WAYS: WeakKeyDictionary[torch.nn.Module, _Way] = WeakKeyDictionary()


def _way(model: torch.nn.Module, ids_BT: Tensor) -> _Way:
    """How the model may be scored, found out once by what it does with a few tokens.

    "head": a plain linear output layer gives the logits, bit for bit, and may be replaced by our
    own projection. "gathered": the model does something to every logit after that layer (a scale, a
    cap), so its own logits are used, of trained tokens only. "whole": anything else; slower and
    always right.
    """
    if model not in _WAYS:
        was_training = model.training
        model.eval()  # two passes with dropout would differ, and draw what others are to draw
        _WAYS[model] = _compare(model, ids_BT[:1, :8])
        model.train(was_training)
    return _WAYS[model]


@torch.no_grad()
def _compare(model: Any, probe_BT: Tensor) -> _Way:
    head: Any = _output_layer(model)
    if head is None:
        return "whole"
    seen: list[Tensor] = []
    hook = head.register_forward_hook(lambda module, inputs, output: seen.append(output))
    own_BTV = model(input_ids=probe_BT, use_cache=False).logits
    hook.remove()
    if len(seen) != 1 or seen[0].shape != own_BTV.shape:
        return "whole"
    plain = (
        isinstance(head, torch.nn.Linear)
        and getattr(head, "bias", None) is None
        and not hasattr(head, "base_layer")
    )
    if plain and torch.equal(seen[0], own_BTV):
        return "head"
    all_BT = torch.ones_like(probe_BT[:, 1:], dtype=torch.bool)
    gathered_NV = _own_logits(model, probe_BT, all_BT, "gathered")
    same = gathered_NV.shape == own_BTV[0, :-1].shape and torch.allclose(
        gathered_NV, own_BTV[0, :-1], 1e-3, 1e-3
    )
    return "gathered" if same else "whole"

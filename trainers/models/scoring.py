"""Log-probabilities of the trained tokens only: what a prompt or a tool said is never projected
onto the vocabulary.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Literal, NamedTuple, Protocol
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from agentrl.engines.routing import free_routing
from agentrl.trainers.batch import PolicyOutput, TokenBatch
from agentrl.trainers.models.head import HeadOutput, Reading, default_chunk, project, read_logits
from agentrl.trainers.models.prefixes import hidden_size, plant, takes_trees

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
    the backward pass. Rows that begin alike are read once, as trees with a mask, where the model
    takes them; other batches need no mask, since attention is causal and padding is on the right.
    Other threads may sample from the model meanwhile; only one may score with it.

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
    laid = _laid(model, batch.ids_BT, predicted_BT)

    def read(states_BTd: Tensor) -> HeadOutput:
        head: Any = _output_layer(model)
        size = default_chunk(head.weight.shape[0]) if chunk is None else chunk
        return project(laid.take(states_BTd), head.weight, targets_N, reading, size)

    if way == "head":
        found = _call_with_head(model, laid, read)
    else:
        found = read_logits(_own_logits(model, laid, way), targets_N, reading)
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


def in_parts(
    batch: TokenBatch, look: Callable[[TokenBatch], tuple[Tensor, ...]], micro_tokens: int
) -> tuple[Tensor, ...]:
    """What a function says of every micro-batch, each tensor (B, T, ...) put together again; zeros
    where it was cut.
    """
    whole: list[Tensor] = []
    for index in batch.chunks(micro_tokens):
        found = look(batch.rows(index))
        whole = whole or [part.new_zeros(*batch.mask_BT.shape, *part.shape[2:]) for part in found]
        for target_BT, part in zip(whole, found, strict=True):
            target_BT[index.to(part.device), : part.shape[1]] = part
    return tuple(whole)


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


class _Laid(NamedTuple):
    """How a batch is given to the model, and where the states in front of wanted tokens are."""

    inputs: dict[str, Tensor]
    places_N: Tensor

    def call(self, model: Any) -> Tensor:
        """The model's logits, or what stands in their place."""
        logits: Tensor = model(**self.inputs, use_cache=False).logits
        return logits

    def take(self, states_BTd: Tensor) -> Tensor:
        """The (N, d) of a model's (B, T, d) that wanted tokens are predicted from."""
        states_nd = states_BTd.flatten(0, 1)
        if states_nd.is_cuda:
            return states_nd[self.places_N]
        # On the CPU the gradient of an index adds up in the order in which threads come; on CUDA it
        # is that of index_select which does.
        return states_nd.index_select(0, self.places_N)


def _laid(model: Any, ids_BT: Tensor, predicted_BT: Tensor) -> _Laid:
    """As rows, or as trees where the model can read them and that costs less."""
    steps_T = torch.arange(1, predicted_BT.shape[1] + 1, device=ids_BT.device)
    lengths_B = (predicted_BT * steps_T).amax(1) if predicted_BT.numel() else steps_T[:0]
    possible = takes_trees(model)  # asked in any case: where weights are split, all ranks take part
    possible = possible and len(ids_BT) > 1 and bool(predicted_BT.any())
    trees = plant(ids_BT, lengths_B, hidden_size(model)) if possible else None
    if trees is not None:
        return _Laid(trees.inputs, trees.place_BT[:, :-1][predicted_BT])
    rows_BT = torch.arange(ids_BT.numel(), device=ids_BT.device).view(ids_BT.shape)
    return _Laid({"input_ids": ids_BT}, rows_BT[:, :-1][predicted_BT])


def _call_with_head(model: Any, laid: _Laid, read: Callable[[Tensor], HeadOutput]) -> HeadOutput:
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
        packed_NX = laid.call(model)[0]
    return HeadOutput(packed_NX[:, 0], packed_NX[:, 1], packed_NX[:, 2:], ids[-1])


def _own_logits(model: Any, laid: _Laid, way: _Way) -> Tensor:
    """The model's own logits (N, V) in front of trained tokens."""
    if way == "whole":
        return laid.take(laid.call(model))
    head: Any = _output_layer(model)
    original = head.forward
    with _head_does(head, lambda states_BTd: original(laid.take(states_BTd)[None])):
        return laid.call(model)[0]


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
        with free_routing():  # what is prescribed is for other tokens
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
    places_N = torch.arange(probe_BT.shape[1] - 1, device=probe_BT.device)
    gathered_NV = _own_logits(model, _Laid({"input_ids": probe_BT}, places_N), "gathered")
    same = gathered_NV.shape == own_BTV[0, :-1].shape and torch.allclose(
        gathered_NV, own_BTV[0, :-1], 1e-3, 1e-3
    )
    return "gathered" if same else "whole"

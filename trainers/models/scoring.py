"""Log-probabilities of the trained tokens only: tokens of prompts and tools are never projected
onto the vocabulary.

The model is called once; its output layer is replaced for the call, so that the hidden states in
front of trained tokens become log-probabilities in chunks. The gradient of that projection is
written by hand, because autograd would keep or copy several (N, V) tensors. With
z = logits / temperature, p = softmax(z) and H the entropy of p:

    d log p_t / dz = 1_t - p        dH / dz = -p · (log p + H)

Letters: B rows, T positions, N trained tokens (n of one chunk), d hidden size, V vocabulary, K
likeliest tokens.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Literal, NamedTuple, Protocol
from weakref import WeakKeyDictionary

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from agentrl.engines.routing import free_routing
from agentrl.trainers.batch import PolicyOutput, TokenBatch
from agentrl.trainers.models.prefixes import hidden_size, plant, takes_trees

EntropyMode = Literal["off", "value", "gradient"]
_Way = Literal["head", "gathered", "whole"]


_LOGITS = 2**24
"""Logits that exist at a time: 64 MiB in float32."""

_UPCAST_ROWS = 8192
"""Rows of a low-precision output layer that are held in float32 at a time."""


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
        model: the policy; gradients flow except under `torch.no_grad()`.
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
    """Apply a function to every micro-batch and join its tensors (B, T, ...), with zeros where rows
    were cut.
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
    """The layer that makes logits, under any wrappers of the model, or None."""
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
        """The model's logits, or their placeholder."""
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


# --- the output layer


class Reading(NamedTuple):
    """What is read off the logits.

    Attributes:
        temperature: what they are divided by.
        entropy: whether entropies are computed (zeros if not).
        top: K, for how many of the likeliest tokens log-probabilities are given.
        top_ids_NK: the tokens that these are about; None: the likeliest.
    """

    temperature: float = 1.0
    entropy: bool = True
    top: int = 0
    top_ids_NK: Tensor | None = None


class HeadOutput(NamedTuple):
    """Log-probability of each target, entropy of its distribution, log-probabilities and ids of the
    K top tokens.
    """

    logprobs_N: Tensor
    entropy_N: Tensor
    top_NK: Tensor
    top_ids_NK: Tensor


def default_chunk(vocabulary: int) -> int:
    """Trained tokens whose logits exist at a time."""
    return max(1, _LOGITS // vocabulary)


def project(
    states_Nd: Tensor, weight_Vd: Tensor, targets_N: Tensor, reading: Reading, chunk: int
) -> HeadOutput:
    """Log-probabilities, entropies and top-K of softmax(states @ weight.T / temperature), all with
    gradient.

    Products are summed in float32, also where states and weights are bfloat16 (in float64 where
    they are float64); gradients are summed over chunks in the same precision. At most `chunk` × V
    logits exist at a time.
    """
    apply: Callable[..., tuple[Tensor, Tensor, Tensor, Tensor]] = _Projection.apply
    return HeadOutput(*apply(states_Nd, weight_Vd, targets_N, reading, chunk))


def read_logits(logits_NV: Tensor, targets_N: Tensor, reading: Reading) -> HeadOutput:
    """The same from logits that are there already, by autograd."""
    logits_NV = (
        logits_NV.to(torch.promote_types(logits_NV.dtype, torch.float32)) / reading.temperature
    )
    logp_NV = logits_NV.log_softmax(-1)
    logprobs_N = logp_NV.gather(-1, targets_N[:, None])[:, 0]
    entropy_N = (
        -(logp_NV.exp() * logp_NV).sum(-1) if reading.entropy else torch.zeros_like(logprobs_N)
    )
    return HeadOutput(logprobs_N, entropy_N, *_top(logp_NV, reading.top, reading.top_ids_NK))


def _top(logp_NV: Tensor, count: int, ids_NK: Tensor | None) -> tuple[Tensor, Tensor]:
    """Log-probabilities and ids of these tokens, or of the likeliest."""
    if ids_NK is None:
        found_NK, ids_NK = logp_NV.topk(count)
        return found_NK, ids_NK
    return logp_NV.gather(-1, ids_NK), ids_NK


class _Projection(torch.autograd.Function):
    """See `project`. A single chunk keeps its log-softmax; of several, each is computed again in
    the backward pass.
    """

    @staticmethod
    def forward(
        ctx: Any,
        states_Nd: Tensor,
        weight_Vd: Tensor,
        targets_N: Tensor,
        reading: Reading,
        chunk: int,
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        ctx.set_materialize_grads(False)  # an entropy that is only looked at costs no backward pass
        dtype = torch.promote_types(
            torch.promote_types(states_Nd.dtype, weight_Vd.dtype), torch.float32
        )
        count = len(states_Nd)
        logprobs_N, entropy_N = (states_Nd.new_zeros(count, dtype=dtype) for _ in range(2))
        top_NK, top_ids_NK = (
            states_Nd.new_empty(count, reading.top, dtype=dtype),
            targets_N.new_empty(count, reading.top),
        )
        kept = None
        for part in _parts(count, chunk):
            logp_nV = _log_softmax(states_Nd[part], weight_Vd, reading.temperature, dtype)
            logprobs_N[part] = logp_nV.gather(-1, targets_N[part, None])[:, 0]
            if reading.top:
                asked = None if reading.top_ids_NK is None else reading.top_ids_NK[part]
                top_NK[part], top_ids_NK[part] = _top(logp_nV, reading.top, asked)
            if reading.entropy:
                # autocast would compute this product, and so the gradient, in bfloat16
                with torch.autocast(logp_nV.device.type, enabled=False):
                    entropy_N[part] = -torch.linalg.vecdot(logp_nV.exp(), logp_nV)
            kept = logp_nV if count <= chunk and any(ctx.needs_input_grad) else None
            del logp_nV  # before the next chunk's exist
        ctx.save_for_backward(states_Nd, weight_Vd, targets_N, entropy_N, top_ids_NK, kept)
        ctx.temperature, ctx.chunk, ctx.dtype = reading.temperature, chunk, dtype
        ctx.mark_non_differentiable(top_ids_NK)
        return logprobs_N, entropy_N, top_NK, top_ids_NK

    @staticmethod
    @once_differentiable
    def backward(
        ctx: Any, *gradients: Tensor | None
    ) -> tuple[Tensor | None, Tensor | None, None, None, None]:
        states_Nd, weight_Vd, targets_N, entropy_N, top_ids_NK, kept = ctx.saved_tensors
        wanted_states, wanted_weight = ctx.needs_input_grad[:2]
        to_states = torch.zeros_like(states_Nd, dtype=ctx.dtype) if wanted_states else None
        to_weight = torch.zeros_like(weight_Vd, dtype=ctx.dtype) if wanted_weight else None
        for part in _parts(len(states_Nd), ctx.chunk):
            logp_nV = (
                kept
                if kept is not None
                else _log_softmax(states_Nd[part], weight_Vd, ctx.temperature, ctx.dtype)
            )
            given = [None if gradient is None else gradient[part] for gradient in gradients[:3]]
            to_logits_nV = _to_logits(
                logp_nV, targets_N[part], top_ids_NK[part], entropy_N[part], given
            )
            del logp_nV
            to_logits_nV /= ctx.temperature
            for rows in _parts(len(weight_Vd), _block(weight_Vd, ctx.dtype)):
                if to_states is not None:
                    _add_product(to_states[part], to_logits_nV[:, rows], weight_Vd[rows])
                if to_weight is not None:
                    _add_product(to_weight[rows], to_logits_nV[:, rows].T, states_Nd[part])
        return (
            None if to_states is None else to_states.to(states_Nd.dtype),
            None if to_weight is None else to_weight.to(weight_Vd.dtype),
            None,
            None,
            None,
        )


def _to_logits(
    logp_nV: Tensor,
    targets_n: Tensor,
    top_ids_nK: Tensor,
    entropy_n: Tensor,
    given: list[Tensor | None],
) -> Tensor:
    """The gradient to the tempered logits, from those to the outputs of `project`."""
    to_logprobs_n, to_entropy_n, to_top_nK = given
    share_n = torch.zeros_like(entropy_n)
    if to_logprobs_n is not None:
        share_n = share_n + to_logprobs_n
    if to_top_nK is not None:
        share_n = share_n + to_top_nK.sum(-1)
    to_logits_nV = logp_nV.exp()
    if to_entropy_n is None:
        to_logits_nV.mul_(-share_n[:, None])
    else:
        slope_nV = (logp_nV + entropy_n[:, None]).mul_(to_entropy_n[:, None]).add_(share_n[:, None])
        to_logits_nV.mul_(slope_nV).neg_()
    if to_logprobs_n is not None:
        to_logits_nV.scatter_add_(1, targets_n[:, None], to_logprobs_n[:, None])
    if to_top_nK is not None:
        to_logits_nV.scatter_add_(1, top_ids_nK, to_top_nK)
    return to_logits_nV


def _log_softmax(
    states_nd: Tensor, weight_Vd: Tensor, temperature: float, dtype: torch.dtype
) -> Tensor:
    """Log-probabilities (n, V) of every token."""
    logits_nV = torch.zeros(len(states_nd), len(weight_Vd), dtype=dtype, device=states_nd.device)
    for rows in _parts(len(weight_Vd), _block(weight_Vd, dtype)):
        _add_product(logits_nV[:, rows], states_nd, weight_Vd[rows].T)
    return logits_nV.div_(temperature).log_softmax(-1)


def _add_product(total: Tensor, a: Tensor, b: Tensor) -> None:
    """total += a @ b, summed in total's precision."""
    with torch.autocast(total.device.type, enabled=False):
        if total.is_cuda and (low := _low(a, b)):
            torch.addmm(total, a.to(low), b.to(low), out_dtype=total.dtype, out=total)
        else:
            total.addmm_(a.to(total.dtype), b.to(total.dtype))


def _low(a: Tensor, b: Tensor) -> torch.dtype | None:
    """The 16-bit precision that one of the factors has: tensor cores multiply in it and sum in
    float32.
    """
    found = [factor.dtype for factor in (a, b) if factor.dtype in (torch.bfloat16, torch.float16)]
    return found[0] if found else None


def _block(weight_Vd: Tensor, dtype: torch.dtype) -> int:
    """Rows of the output layer that are multiplied at a time: all, unless they must be copied to be
    multiplied.
    """
    return _UPCAST_ROWS if weight_Vd.dtype != dtype and not weight_Vd.is_cuda else len(weight_Vd)


def _parts(count: int, size: int) -> list[slice]:
    return [slice(start, min(start + size, count)) for start in range(0, count, size)]

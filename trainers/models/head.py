"""The output layer and its softmax, for large vocabularies: hidden states in, log-probabilities
out, logits in chunks.

Letters: N trained tokens (n of one chunk), d hidden size, V vocabulary, K likeliest tokens. The
    gradient is written by
hand, because autograd would keep or copy several (N, V) tensors. With z = logits / temperature, p =
softmax(z) and H the entropy of p:

    d log p_t / dz = 1_t - p        dH / dz = -p · (log p + H)
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

_LOGITS = 2**24
"""Logits that exist at a time: 64 MiB in float32."""

_UPCAST_ROWS = 8192
"""Rows of a low-precision output layer that are held in float32 at a time."""


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

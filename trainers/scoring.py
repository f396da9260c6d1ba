"""Log-probabilities of the trained tokens only: what a prompt or a tool said is never projected onto the vocabulary."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal
from weakref import WeakKeyDictionary

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from agentrl.trainers.batch import TokenBatch

EntropyMode = Literal["off", "value", "gradient"]


@dataclass(frozen=True, eq=False)
class PolicyOutput:
    """What the model says about a batch, at trained tokens; other positions hold 0.

    Attributes:
        logprobs_BT: log-probabilities of the tokens at the sampling temperature, with gradient.
        entropy_BT: entropy (nats) of the distribution each token was drawn from, if asked for.
        top_logprobs_BTK: log-probabilities of the K likeliest tokens, likeliest first, with gradient, if asked for;
            of the tokens `batch.top_ids_BTK`, in that order, where the batch names them.
    """

    logprobs_BT: Tensor
    entropy_BT: Tensor | None = None
    top_logprobs_BTK: Tensor | None = None

    def silent(self, mask_BT: Tensor) -> PolicyOutput:
        """The same with exact zeros at mask 0, whatever stood there."""
        parts = (self.logprobs_BT, self.entropy_BT, self.top_logprobs_BTK)
        masks = (mask_BT, mask_BT, mask_BT[..., None])
        filled = [None if x is None else torch.where(mask, x, 0.0) for x, mask in zip(parts, masks, strict=True)]
        return PolicyOutput(*filled)  # type: ignore[arg-type]


_HEAD_IS_PLAIN: WeakKeyDictionary[torch.nn.Module, bool] = WeakKeyDictionary()


def token_logprobs(
    model: torch.nn.Module,
    batch: TokenBatch,
    temperature: float = 1.0,
    chunk: int = 1024,
    entropy: EntropyMode = "value",
) -> PolicyOutput:
    """Score a right-padded batch with a Hugging Face causal language model.

    The backbone runs over the rows; hidden states in front of trained tokens are gathered; the head runs on those, in
    chunks, with a log-softmax in float32 (float64 models stay float64). With more than one chunk, logits are computed
    again in the backward pass instead of kept. Attention is causal and padding is on the right, so no position that is
    read can see padding and no attention mask is passed.

    Args:
        model: the policy; gradients flow unless the caller stands under `torch.no_grad()`.
        batch: rows on the model's device.
        temperature: of the sampler; logits are divided by it.
        chunk: trained tokens whose logits exist at a time (chunk × vocabulary × 4 bytes).
        entropy: leave it out, compute its value, or compute it with gradient (for an entropy bonus).

    Raises:
        ValueError: the temperature or the chunk is not positive.
    """
    if not temperature > 0 or chunk < 1:
        raise ValueError(f"temperature={temperature} and chunk={chunk} must be positive")
    context_BT, predicted_BT = batch.ids_BT[:, :-1], batch.mask_BT[:, 1:]
    targets_N = batch.ids_BT[:, 1:][predicted_BT]
    if _head_is_plain(model, context_BT):
        head = model.get_output_embeddings()  # type: ignore[operator]
        states_Nd = _backbone(model, context_BT)[predicted_BT]
    else:
        head = torch.nn.Identity()
        states_Nd = model(input_ids=context_BT, use_cache=False).logits[predicted_BT]
    recompute = torch.is_grad_enabled() and len(targets_N) > chunk
    parts: list[tuple[Tensor, Tensor]] = []
    for states, targets in zip(torch.split(states_Nd, chunk), torch.split(targets_N, chunk), strict=True):
        arguments = (head, states, targets, temperature, entropy)
        parts.append(
            checkpoint(_score, *arguments, use_reentrant=False, preserve_rng_state=False)
            if recompute
            else _score(*arguments)
        )
    logprobs_BT, entropy_BT = (_scatter(batch.mask_BT, torch.cat(values)) for values in zip(*parts, strict=True))
    return PolicyOutput(logprobs_BT, None if entropy == "off" else entropy_BT)


@torch.no_grad()
def frozen_logprobs(model: torch.nn.Module, batch: TokenBatch, temperature: float = 1.0, chunk: int = 1024) -> Tensor:
    """Log-probabilities (B, T) under a frozen model: reference, proximal or teacher."""
    return token_logprobs(model, batch, temperature, chunk, "off").logprobs_BT


def _score(
    head: torch.nn.Module, states_Nd: Tensor, targets_N: Tensor, temperature: float, entropy: EntropyMode
) -> tuple[Tensor, Tensor]:
    """Log-probability of each target, and the entropy of its distribution (zeros if not asked for)."""
    logits_NV = head(states_Nd)
    logits_NV = logits_NV.to(torch.promote_types(logits_NV.dtype, torch.float32)) / temperature
    log_total_N = logits_NV.logsumexp(-1)
    logprobs_N = logits_NV.gather(-1, targets_N[:, None])[:, 0] - log_total_N
    if entropy == "off":
        return logprobs_N, torch.zeros_like(logprobs_N)
    with torch.set_grad_enabled(entropy == "gradient" and torch.is_grad_enabled()):
        logp_NV = logits_NV - log_total_N[:, None]
        return logprobs_N, -(logp_NV.exp() * logp_NV).sum(-1)


def _scatter(mask_BT: Tensor, values_N: Tensor) -> Tensor:
    """Values at the trained tokens, zeros elsewhere."""
    return torch.zeros(mask_BT.shape, dtype=values_N.dtype, device=values_N.device).masked_scatter(mask_BT, values_N)


def _backbone(model: Any, ids_BT: Tensor) -> Tensor:
    """Last hidden states (B, T, d)."""
    states: Tensor = model.get_decoder()(input_ids=ids_BT, use_cache=False).last_hidden_state
    return states


def _head_is_plain(model: torch.nn.Module, ids_BT: Tensor) -> bool:
    """Whether backbone and output layer alone give the model's own logits, bit for bit.

    Some families scale or cap logits after the head, and some models are no backbone with a head at all. So the two
    ways are compared once per model on a few tokens; where they differ (or dropout makes them), the model's own
    logits are used, which is slower and always right.
    """
    if model not in _HEAD_IS_PLAIN:
        _HEAD_IS_PLAIN[model] = _compare_heads(model, ids_BT[:1, :8])
    return _HEAD_IS_PLAIN[model]


@torch.no_grad()
def _compare_heads(model: Any, probe_BT: Tensor) -> bool:
    if not (hasattr(model, "get_decoder") and hasattr(model, "get_output_embeddings")):
        return False
    own_BTV = model(input_ids=probe_BT, use_cache=False).logits
    if not hasattr(model.get_decoder()(input_ids=probe_BT, use_cache=False), "last_hidden_state"):
        return False
    ours_BTV = model.get_output_embeddings()(_backbone(model, probe_BT))
    return bool(torch.equal(ours_BTV.to(own_BTV.dtype), own_BTV))

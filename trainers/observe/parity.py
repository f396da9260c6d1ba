"""The gap between sampler and trainer: measured every round, judged, and explained by its cause.

The gap is |log π_trainer - log π_sampler| of sampled tokens before an update moves the trainer.

Letters: N tokens, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from agentrl.engines.base import Sampling
from agentrl.engines.loading import dropouts
from agentrl.engines.routing import replayed_routing, routers_of
from agentrl.errors import ConfigError, TrainingError
from agentrl.trainers.algorithms.losses import MAX_LOG_RATIO
from agentrl.trainers.batch import PolicyOutput, TokenBatch

Cause = Literal[
    "stale weights",
    "temperature",
    "truncation",
    "dropout",
    "template",
    "dtype",
    "other weights",
    "off-policy",
]

STOP_GAP = 0.1
"""Mean gap (nats per token) that stops a run whatever its cause."""
MOST_CUT = 0.002
"""Share of a round's first trained tokens that the recipe may cut before the policy has moved."""
WARN_EFFECTIVE = 0.5
"""Effective sample size, as a share of the tokens, below which a run is warned."""
HALF_PRECISION_SHARE = 1 / 32
"""Largest gap that half precision makes, as a share of the standard deviation of the logits."""


class ParityError(TrainingError):
    """Sampler and trainer disagree, so nothing was trained; the message names the cause."""


class Disagreement(NamedTuple):
    """A cause, whether training must stop, and one sentence."""

    cause: Cause
    stops: bool
    message: str


class Tokens(NamedTuple):
    """Trained tokens of a (micro-)batch: three log-probabilities and the weight of each."""

    trainer_N: Tensor
    sampler_N: Tensor
    anchor_N: Tensor
    weights_N: Tensor


def check_sampling(sampling: Sampling, temperature: float) -> None:
    """Refuse a sampler whose distribution the scorer cannot have.

    Engines do not say which tokens top-p or top-k cut, and what was cut has probability 0.

    Raises:
        ConfigError: one sentence with the setting, its value and the fix.
    """
    if sampling.temperature == 0:
        raise ConfigError(
            "temperature=0 samples greedily, so there is nothing to learn from: use temperature=1"
        )
    for name, value, whole in (("top_p", sampling.top_p, 1.0), ("top_k", sampling.top_k, 0)):
        if value != whole:
            raise ConfigError(
                f"{name}={value} truncates the distribution that is sampled, and the trainer scores"
                f" the whole one: use {name}={whole}"
            )
    if sampling.temperature != temperature:
        raise ConfigError(
            f"the sampler's temperature={sampling.temperature} is not the scorer's"
            f" temperature={temperature}: give both the same"
        )


def trained_tokens(output: PolicyOutput, batch: TokenBatch) -> Tokens:
    """What gaps and ratios are computed from, detached: 32 bytes for each trained token."""
    mask_BT = batch.mask_BT
    weights_BT = (
        torch.ones_like(batch.old_logprobs_BT) if batch.weights_BT is None else batch.weights_BT
    )
    columns = (output.logprobs_BT.detach(), batch.old_logprobs_BT, batch.anchor_BT, weights_BT)
    return Tokens(*(column_BT.to(mask_BT.device)[mask_BT].double() for column_BT in columns))


def gap_metrics(parts: Sequence[Tokens]) -> dict[str, float]:
    """`parity/gap_mean`, `_p99`, `_max` (nats) and `parity/kl`, k3 of KL(sampler‖trainer).

    Args:
        parts: of the first optimizer step after sampling; later ones also hold what training moved.

    Returns:
        nothing where there are no tokens.
    """
    joined = _joined(parts)
    if joined is None:
        return {}
    log_ratio_N = joined.trainer_N - joined.sampler_N
    gap_N = log_ratio_N.abs()
    kl_N = torch.expm1(log_ratio_N.clamp(max=MAX_LOG_RATIO)) - log_ratio_N
    return {
        "parity/gap_mean": float(gap_N.mean()),
        "parity/gap_p99": quantile(gap_N, 0.99),
        "parity/gap_max": float(gap_N.max()),
        "parity/kl": float(kl_N.mean()),
    }


def ratio_metrics(parts: Sequence[Tokens]) -> dict[str, float]:
    """Quantiles and effective sample size of the ratio, before and after corrections.

    Raw is π/π_sampler. Corrected is what a token's gradient is multiplied by before any clip: its
    weight times π/π_anchor; without corrections it is the raw one. Log-ratios are cut at ±20.
    """
    joined = _joined(parts)
    if joined is None:
        return {}
    trainer_N, sampler_N, anchor_N, weights_N = joined
    ratios = {
        "raw": (trainer_N - sampler_N).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp(),
        "corrected": (trainer_N - anchor_N).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp() * weights_N,
    }
    metrics = {}
    for name, ratio_N in ratios.items():
        for share in (0.01, 0.5, 0.99):
            metrics[f"ratio/{name}_p{round(100 * share):02d}"] = quantile(ratio_N, share)
        metrics[f"ratio/{name}_effective"] = effective_share(ratio_N)
    return metrics


def _joined(parts: Sequence[Tokens]) -> Tokens | None:
    """All tokens of the parts; None where there are none."""
    if not sum(len(part.trainer_N) for part in parts):
        return None
    return Tokens(*(torch.cat(column) for column in zip(*parts, strict=True)))


def effective_share(weights_N: Tensor) -> float:
    """Kish's effective sample size over the sample size, (Σw)²/(NΣw²); 0 if no weight is left.

    Kish, Survey Sampling, 1965; the formula is at https://en.wikipedia.org/wiki/Effective_sample_size.
    """
    square = float(weights_N.square().sum())
    return float(weights_N.sum()) ** 2 / (len(weights_N) * square) if square else 0.0


def quantile(values_N: Tensor, share: float) -> float:
    """The nearest value at that rank (`torch.quantile` refuses more than 16 million)."""
    return float(values_N.sort().values[round(share * (len(values_N) - 1))])


def largest_gap(model: Any) -> float:
    """Mean gap (nats per token) that needs no explanation in the dtype that a model computes in."""
    dtype = getattr(model, "computes_in", None) or next(model.parameters()).dtype
    return 1e-3 if dtype in (torch.float32, torch.float64) else 0.02


def judge_gap(
    model: Any,
    batch: TokenBatch,
    metrics: dict[str, float],
    temperature: float,
    probed: float = torch.inf,
) -> list[Disagreement]:
    """What is wrong with a gap: nothing, or its likeliest cause.

    A gap is too wide where rounding does not explain it, or where it alone makes the recipe cut
    tokens, whatever the recipe's bounds are. Of a model that was asked to drop something out, what
    the first tokens have without that is judged by the same limits: the sampler drops nothing.

    Args:
        model: a Hugging Face causal language model with the weights that sampling should have used.
        batch: sampled tokens with the sampler's log-probabilities.
        metrics: of `gap_metrics`, and `parity/cut`; what is absent is not judged.
        temperature: of the scorer.
        probed: mean gap of the last probe of the same weights.
    """
    gap, cut = metrics.get("parity/gap_mean", 0.0), metrics.get("parity/cut", 0.0)
    if gap <= largest_gap(model) and cut <= MOST_CUT:
        return []
    cause, why, calm = find_cause(model, batch, temperature)
    if cause == "other weights" and probed <= largest_gap(model):
        cause = "template"
        why = (
            "on its probe the engine agrees, so these rows are not what it read: look at them by"
            " `agentrl view`, and ask `agentrl check hf:MODEL` what the chat template does"
        )
    judged = calm if any(dropouts(model.config)) else gap
    stops = cause in ("temperature", "truncation") or not judged <= STOP_GAP
    shown = gap if cause == "dropout" else judged
    said = f"{cause}: sampler and trainer disagree by {shown:.3g} nats per token"
    if cut > MOST_CUT:
        said += f", for which alone the recipe cuts {cut:.2g} of the tokens"
    return [Disagreement(cause, stops, f"{said}; {why}")]


def find_cause(model: Any, batch: TokenBatch, temperature: float) -> tuple[Cause, str, float]:
    """The likeliest cause of a gap: `explain`, and what only further looks at the model can tell.

    Arguments as in `judge_gap`.

    Returns:
        the cause, what to do about it, and the mean gap of the first tokens without dropout.
    """
    as_trained = mean_gap(first_logits(model, batch), temperature)
    with _eval(model):
        look = first_logits(model, batch)
        calm = mean_gap(look, temperature)
        if calm < as_trained / 2 and calm <= largest_gap(model):
            said = f"{calm:.2g} are left without it: sampling drops nothing, so set"
            return "dropout", f"{said} compute.dropout=0", calm
        cause, why = explain(*look, temperature)
        if cause == "other weights":
            for words, other in _other_contexts(model, batch):
                if mean_gap(first_logits(model, other), temperature) < calm / 10:
                    cause, why = "template", f"they would agree if the trainer's rows began {words}"
        if cause in ("dtype", "other weights") and batch.experts_BTLK is None and routers_of(model):
            why += "; in a mixture of experts near ties are enough, so try engine.routing='replay'"
    return cause, why, calm


def mean_gap(look: tuple[Tensor, Tensor, Tensor], temperature: float) -> float:
    """Mean gap (nats per token) of what `first_logits` found."""
    logits_NV, targets_N, sampler_N = look
    trainer_NV = (logits_NV / temperature).log_softmax(-1).double()
    return float((trainer_NV.gather(-1, targets_N[:, None])[:, 0] - sampler_N).abs().mean())


def _other_contexts(model: Any, batch: TokenBatch) -> Iterator[tuple[str, TokenBatch]]:
    """What an engine may have read instead: without the first token, or with one more."""
    experts = batch.experts_BTLK
    if not batch.mask_BT[:, 1].any():
        names = ("ids_BT", "mask_BT", "old_logprobs_BT", "experts_BTLK")
        rows = {name: getattr(batch, name) for name in names}
        cut = {name: row[:, 1:] for name, row in rows.items() if row is not None}
        yield "without their first token", replace(batch, **cut)
    config = model.config.get_text_config()
    ids = (getattr(config, f"{name}_token_id", None) for name in ("bos", "eos", "pad"))
    for one in dict.fromkeys(one for one in ids if isinstance(one, int)):
        ids_BT, mask_BT, old_BT = (
            torch.nn.functional.pad(part, (1, 0), value=value)
            for part, value in (
                (batch.ids_BT, one),
                (batch.mask_BT, False),
                (batch.old_logprobs_BT, 0.0),
            )
        )
        more = replace(batch, ids_BT=ids_BT, mask_BT=mask_BT, old_logprobs_BT=old_BT)
        if experts is not None:
            pad = torch.nn.functional.pad(experts, (0, 0, 0, 0, 1, 0), value=-1)
            more = replace(more, experts_BTLK=pad)
        yield f"with token {one}", more


@contextmanager
def _eval(model: Any) -> Iterator[None]:
    """The model without dropout."""
    was_training = model.training
    model.eval()
    try:
        yield
    finally:
        model.train(was_training)


def judge_ratios(metrics: dict[str, float]) -> list[Disagreement]:
    """Whether few tokens carry all the weight in `ratio_metrics`."""
    effective = metrics.get("ratio/corrected_effective", 1.0)
    if effective >= WARN_EFFECTIVE:
        return []
    said = f"off-policy: {effective:.0%} of the tokens carry all of the weight"
    return [Disagreement("off-policy", False, f"{said}: train on fresher samples")]


def explain(
    logits_NV: Tensor, targets_N: Tensor, sampler_N: Tensor, temperature: float
) -> tuple[Cause, str]:
    """The likeliest cause of a gap that can be told from logits, and what to do about it.

    Args:
        logits_NV: of the trainer, before temperature.
        targets_N: the tokens that were sampled.
        sampler_N: the sampler's log-probabilities of them.
        temperature: of the scorer.
    """

    def distances_N(warmth: float) -> Tensor:
        logprobs_NV = (logits_NV / warmth).log_softmax(-1)
        return sampler_N - logprobs_NV.gather(-1, targets_N[:, None])[:, 0].double()

    def left(warmth: float) -> float:
        return float(distances_N(warmth).abs().mean())

    gap, rounding = left(temperature), HALF_PRECISION_SHARE * float(logits_NV.std(-1).mean())
    warmth = temperature
    for width in (1, 0.1, 0.01):  # decades around the best so far
        warmth = min((warmth * 10 ** (width * step / 10) for step in range(-10, 11)), key=left)
    if gap > 1e-4 and left(warmth) < gap / 10:
        return "temperature", f"they would agree at temperature={warmth:.2g} in the trainer"
    if gap > 1e-4 and len(sampler_N) >= 16 and bool((distances_N(temperature) > -1e-4).all()):
        return (
            "truncation",
            "no token was less likely in the sampler: switch its top-p and top-k off",
        )
    if gap <= rounding / temperature:
        return "dtype", "half precision makes such gaps: sample in the trainer's dtype"
    return "other weights", "no setting explains it: load the trainer's weights into the engine"


@torch.no_grad()
def first_logits(
    model: Any, batch: TokenBatch, at_most: int = 128
) -> tuple[Tensor, Tensor, Tensor]:
    """The trainer's logits, the ids and the sampler's log-probabilities of the first tokens."""
    found = list[tuple[Tensor, Tensor, Tensor]]()
    experts = batch.experts_BTLK
    for number, (ids_T, mask_T, old_T) in enumerate(
        zip(batch.ids_BT, batch.mask_BT, batch.old_logprobs_BT, strict=True)
    ):
        places_N = mask_T.nonzero()[: at_most - sum(len(one[1]) for one in found), 0]
        if len(places_N):
            row, before_N = ids_T[None, : int(places_N[-1])], places_N - 1
            replayed = None if experts is None else experts[number : number + 1, : row.shape[1]]
            with replayed_routing(model, replayed):
                said = model(
                    input_ids=row.to(model.device),
                    logits_to_keep=before_N.to(model.device),
                    use_cache=False,
                )
            found.append((said.logits[0].float(), ids_T[places_N], old_T[places_N].double()))
    logits_NV, ids_N, sampler_N = (torch.cat(column) for column in zip(*found, strict=True))
    return logits_NV, ids_N.to(logits_NV.device), sampler_N.to(logits_NV.device)

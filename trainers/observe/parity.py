"""Do sampler and trainer speak of the same distribution? Measured every step, judged by one pure
function, named.

The gap is |log π_trainer - log π_sampler| of sampled tokens before an update moves the trainer.
Where it is too wide, `explain` tries what usually lies behind it on the trainer's own logits:
another temperature, a truncated distribution (top-p, top-k), half precision. What no setting
explains is other weights. `probe.py` finds weights that stayed behind.

Letters: N tokens, V vocabulary.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from agentrl.engines.base import Sampling
from agentrl.errors import ConfigError, TrainingError
from agentrl.trainers.algorithms.losses import MAX_LOG_RATIO
from agentrl.trainers.batch import PolicyOutput, TokenBatch

Cause = Literal[
    "stale weights", "temperature", "top-p", "top-k", "precision", "other weights", "off-policy"
]

HALF_PRECISION_SHARE = 1 / 32
"""Mean gap, as a share of the standard deviation of a token's logits, that half precision can make.
"""

EXPLAINED = 0.1
"""A setting explains a gap if with it at most this share of the gap is left."""


class ParityError(TrainingError):
    """Sampler and trainer disagree; the message names the cause. Nothing was trained on what they
    disagree about.
    """


class Finding(NamedTuple):
    """One disagreement: its cause, whether training must stop, and one sentence."""

    cause: Cause
    stops: bool
    message: str


@dataclass(frozen=True)
class Thresholds:
    """From where on a disagreement is reported. Gaps are in nats per token.

    Attributes:
        warn_gap: mean gap to be explained; a gap that a wrong setting explains stops the run.
        stop_gap: mean gap that stops the run whatever the cause.
        warn_tail: 99th percentile of the gap.
        warn_effective: effective sample size over tokens.
    """

    warn_gap: float = 1e-3
    stop_gap: float = 0.1
    warn_tail: float = 0.5
    warn_effective: float = 0.5

    @classmethod
    def of(cls, model: Any) -> Thresholds:
        """Those for the dtype that a model computes in: half precision alone makes gaps of a
        hundredth.
        """
        dtype = getattr(model, "computes_in", None) or next(model.parameters()).dtype
        return cls() if dtype in (torch.float32, torch.float64) else cls(warn_gap=0.02)


class Movement(NamedTuple):
    """How far both moved on the same tokens since an earlier look (root mean squares, nats).

    Attributes:
        trainer: by how much the trainer's log-probabilities changed.
        engine: by how much the engine's did; infinite where it draws other tokens from the start.
        noise: how far apart both were at the earlier look.
    """

    trainer: float
    engine: float
    noise: float

    @property
    def is_conclusive(self) -> bool:
        """Whether the trainer moved far enough to be told from rounding."""
        return self.trainer > max(4 * self.noise, 1e-5)

    @property
    def is_stale(self) -> bool:
        """Whether the trainer moved and the engine did not follow."""
        return self.is_conclusive and self.engine < self.trainer / 2


class Explanation(NamedTuple):
    """A cause, the setting that it takes, and the mean gap that it leaves (nats per token)."""

    cause: Cause
    setting: str
    left: float


class Tokens(NamedTuple):
    """Trained tokens of a (micro-)batch, detached: three log-probabilities of each, and the
    correction's weight.
    """

    trainer_N: Tensor
    sampler_N: Tensor
    anchor_N: Tensor
    weights_N: Tensor


def check_sampling(sampling: Sampling, temperature: float) -> None:
    """Refuse a sampler whose distribution the scorer cannot have.

    A truncated distribution (top-p, top-k, greedy) has log-probabilities that depend on which
    tokens were cut, and engines do not return that; it also gives what was cut a probability of
    zero, which no ratio survives.

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
    """What gaps and ratios are made of; keep those of every micro-batch of a step, they are a few
    bytes a token.
    """
    mask_BT = batch.mask_BT
    weights_BT = (
        torch.ones_like(batch.old_logprobs_BT) if batch.weights_BT is None else batch.weights_BT
    )
    columns = (output.logprobs_BT.detach(), batch.old_logprobs_BT, batch.anchor_BT, weights_BT)
    return Tokens(*(column_BT.to(mask_BT.device)[mask_BT].double() for column_BT in columns))


def gap_metrics(parts: Sequence[Tokens]) -> dict[str, float]:
    """`parity/gap_mean`, `_p99`, `_max` (nats) and `parity/kl`: k3 of KL(sampler‖trainer). Nothing
    for no tokens.

    Args:
        parts: of the first optimizer step after sampling; later ones also hold what training moved.
    """
    trainer_N, sampler_N = (
        (torch.cat([part[index] for part in parts]) for index in (0, 1)) if parts else _NONE
    )
    if not len(trainer_N):
        return {}
    gap_N, log_ratio_N = (trainer_N - sampler_N).abs(), trainer_N - sampler_N
    kl_N = torch.expm1(log_ratio_N.clamp(max=MAX_LOG_RATIO)) - log_ratio_N
    return {
        "parity/gap_mean": float(gap_N.mean()),
        "parity/gap_p99": quantile(gap_N, 0.99),
        "parity/gap_max": float(gap_N.max()),
        "parity/kl": float(kl_N.mean()),
    }


def ratio_metrics(parts: Sequence[Tokens]) -> dict[str, float]:
    """Quantiles of the ratio per token, and the effective sample size, before and after
    corrections.

    Raw is π/π_sampler. Corrected is what a token's gradient is multiplied by before any clip: its
    weight times π/π_anchor; without corrections it is the raw one. Log-ratios are cut at ±20.
    """
    if not parts or not sum(len(part.trainer_N) for part in parts):
        return {}
    trainer_N, sampler_N, anchor_N, weights_N = (
        torch.cat(column) for column in zip(*parts, strict=True)
    )
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


def effective_share(weights_N: Tensor) -> float:
    """Kish's effective sample size over the sample size, (Σw)²/(NΣw²): 1 for equal weights, 0 if
    none is left.

    Kish, Survey Sampling, 1965; the formula is at https://en.wikipedia.org/wiki/Effective_sample_size.
    """
    square = float(weights_N.square().sum())
    return float(weights_N.sum()) ** 2 / (len(weights_N) * square) if square else 0.0


def quantile(values_N: Tensor, share: float) -> float:
    """The nearest value at that rank (`torch.quantile` refuses more than 16 million)."""
    return float(values_N.sort().values[round(share * (len(values_N) - 1))])


def check(
    metrics: dict[str, float],
    thresholds: Thresholds,
    explanations: Sequence[Explanation] = (),
    movement: Movement | None = None,
) -> tuple[Finding, ...]:
    """All disagreements, worst first; empty where sampler and trainer agree.

    Args:
        metrics: of `gap_metrics` and `ratio_metrics`; what is missing is not judged.
        explanations: of `explain`, for a gap that is too wide.
        movement: of the probe.
    """
    found = []
    if movement is not None and movement.is_stale:
        found.append(
            Finding(
                "stale weights",
                True,
                "stale weights: the trainer's log-probabilities of a fixed prompt moved by"
                f" {movement.trainer:.2g} nats and the engine's by {movement.engine:.2g}: the"
                " engine still samples with older weights",
            )
        )
    gap = metrics.get("parity/gap_mean", 0.0)
    if not gap <= thresholds.warn_gap:
        found.append(_judge(gap, thresholds, explanations))
    elif (tail := metrics.get("parity/gap_p99", 0.0)) > thresholds.warn_tail:
        said = f"one token in a hundred is {tail:.2g} nats apart in sampler and trainer"
        found.append(
            Finding("precision", False, f"precision: {said}: score and sample in one precision")
        )
    effective = metrics.get("ratio/corrected_effective", 1.0)
    if effective < thresholds.warn_effective:
        said = f"{effective:.0%} of the tokens carry all of the weight"
        found.append(Finding("off-policy", False, f"off-policy: {said}: train on fresher samples"))
    return tuple(sorted(found, key=lambda finding: not finding.stops))


def enforce(findings: Sequence[Finding]) -> tuple[Finding, ...]:
    """Return the findings that only warn.

    Raises:
        ParityError: one of them stops the run.
    """
    for finding in findings:
        if finding.stops:
            raise ParityError(finding.message)
    return tuple(findings)


def _judge(gap: float, thresholds: Thresholds, explanations: Sequence[Explanation]) -> Finding:
    """Name the cause of a gap."""
    words = f"sampler and trainer disagree by {gap:.3g} nats per token"
    fitting = [one for one in explanations if one.left <= EXPLAINED * gap]
    settings = [one for one in fitting if one.cause != "precision"]
    if settings and len(settings) == len(fitting):
        best = min(settings, key=lambda one: one.left)
        return Finding(
            best.cause,
            True,
            f"{best.cause}: {words}, and would not with {best.setting} in the trainer",
        )
    stops = not gap <= thresholds.stop_gap
    if any(one.cause == "precision" for one in explanations):
        return Finding(
            "precision",
            stops,
            f"precision: {words}, as half precision makes: sample in the trainer's dtype",
        )
    advice = "load the trainer's weights into the engine"
    return Finding(
        "other weights", stops, f"other weights: {words}, which no setting explains: {advice}"
    )


# Why a gap is there


@torch.no_grad()
def explain(
    model: Any, batch: TokenBatch, temperature: float, at_most: int = 128
) -> tuple[Explanation, ...]:
    """Try the usual causes on the first trained tokens of a batch; call it only where a gap is too
    wide.

    Args:
        model: a Hugging Face causal language model with the weights that sampling should have used.
        batch: sampled tokens with the sampler's log-probabilities.
        temperature: of the scorer.
        at_most: tokens that are looked at; their logits exist at once.
    """
    logits, targets, sampler = list[Tensor](), list[Tensor](), list[Tensor]()
    for ids_T, mask_T, old_T in zip(
        batch.ids_BT, batch.mask_BT, batch.old_logprobs_BT, strict=True
    ):
        if (left := at_most - sum(map(len, targets))) > 0 and mask_T.any():
            places_N = mask_T.nonzero()[:left, 0]
            row = ids_T[None, : int(places_N[-1])].to(model.device)
            logits.append(
                model(
                    input_ids=row, logits_to_keep=(places_N - 1).to(model.device), use_cache=False
                ).logits[0]
            )
            targets.append(ids_T[places_N].to(model.device))
            sampler.append(old_T[places_N].to(model.device))
    if not targets:
        return ()
    return explanations(
        torch.cat(logits).float(), torch.cat(targets), torch.cat(sampler).double(), temperature
    )


def explanations(
    logits_NV: Tensor, targets_N: Tensor, sampler_N: Tensor, temperature: float
) -> tuple[Explanation, ...]:
    """What temperature, top-k, top-p and half precision each leave of a gap, at their best values.

    Args:
        logits_NV: of the trainer, before temperature.
        targets_N: the tokens that were sampled.
        sampler_N: the sampler's log-probabilities of them.
        temperature: of the scorer.
    """

    def left(logprobs_N: Tensor) -> float:
        return float((logprobs_N - sampler_N).abs().mean())

    def at(warmth: float) -> float:
        return left(_of(targets_N, (logits_NV / warmth).log_softmax(-1)))

    logprobs_NV = (logits_NV / temperature).log_softmax(-1)
    whole_N = _of(targets_N, logprobs_NV)
    warmth = _lowest(at, temperature)
    found = [Explanation("temperature", f"temperature={warmth:.3g}", at(warmth))]
    if left(whole_N) <= HALF_PRECISION_SHARE * float(logits_NV.std(-1).mean()) / temperature:
        found.append(
            Explanation("precision", "half precision", left(whole_N))
        )  # 0: the sampler read these very logits
    sorted_NV, order_NV = logprobs_NV.double().sort(descending=True)
    kept_NV = sorted_NV.exp().cumsum(-1)
    rank_N1 = (order_NV == targets_N[:, None]).int().argmax(-1, keepdim=True)
    mass_N = (
        whole_N - sampler_N
    ).exp()  # of the set that was sampled from, if it was a truncated one
    top_k = int((kept_NV - mass_N[:, None]).abs().argmin(-1).median()) + 1
    found.append(
        Explanation("top-k", f"top_k={top_k}", left(whole_N - kept_NV[:, top_k - 1].log()))
    )
    top_p = float(mass_N.min()) * (1 - 1e-6)  # kept sets are the smallest with at least top_p
    size_N1 = (kept_NV < top_p).sum(-1, keepdim=True).clamp(max=kept_NV.shape[-1] - 1)
    fits = bool((rank_N1 <= size_N1).all()) and top_p < 1
    if fits:
        found.append(
            Explanation(
                "top-p",
                f"top_p={top_p:.3g}",
                left(whole_N - kept_NV.gather(-1, size_N1)[:, 0].log()),
            )
        )
    return tuple(found)


def _of(targets_N: Tensor, logprobs_NV: Tensor) -> Tensor:
    return logprobs_NV.gather(-1, targets_N[:, None])[:, 0].double()


def _lowest(value: Callable[[float], float], near: float) -> float:
    """Where a function of a temperature is lowest: a grid over two decades around `near`, refined
    twice.
    """
    spread, centre = math.log(10.0), math.log(near)
    for _ in range(3):
        grid = [centre + spread * (index / 10 - 1) for index in range(21)]
        centre, spread = min(grid, key=lambda log: value(math.exp(log))), spread / 10
    return math.exp(centre)


_NONE = (torch.zeros(0), torch.zeros(0))

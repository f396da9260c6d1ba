"""Losses of direct alignment: pure functions of how likely two responses are to one prompt.

Letters: B pairs (or labelled responses), T token positions. All log-probabilities are sums over the
trained tokens of a response, in nats; `ratio` is that of the policy minus that of the reference.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from agentrl.errors import ConfigError


@dataclass(frozen=True)
class PairScores:
    """How likely the chosen and the rejected responses of B pairs are.

    Attributes:
        chosen_B, rejected_B: log-probabilities under the policy.
        chosen_tokens_B, rejected_tokens_B: trained tokens.
        ref_chosen_B, ref_rejected_B: log-probabilities under the reference, if there is one.
    """

    chosen_B: Tensor
    rejected_B: Tensor
    chosen_tokens_B: Tensor
    rejected_tokens_B: Tensor
    ref_chosen_B: Tensor | None = None
    ref_rejected_B: Tensor | None = None

    @classmethod
    def from_tokens(
        cls, logprobs_BT: Tensor, mask_BT: Tensor, ref_logprobs_BT: Tensor | None = None
    ) -> PairScores:
        """Scores of 2B rows, the chosen ones first; what stands outside the mask is never read."""
        chosen_B, rejected_B = masked_sum(logprobs_BT, mask_BT).chunk(2)
        tokens = mask_BT.sum(-1).to(logprobs_BT.dtype).chunk(2)
        if ref_logprobs_BT is None:
            return cls(chosen_B, rejected_B, *tokens)
        return cls(chosen_B, rejected_B, *tokens, *masked_sum(ref_logprobs_BT, mask_BT).chunk(2))

    @property
    def chosen_ratio_B(self) -> Tensor:
        """log π(chosen) - log π_ref(chosen)."""
        assert self.ref_chosen_B is not None, "this loss reads a reference"
        return self.chosen_B - self.ref_chosen_B

    @property
    def rejected_ratio_B(self) -> Tensor:
        """log π(rejected) - log π_ref(rejected)."""
        assert self.ref_rejected_B is not None, "this loss reads a reference"
        return self.rejected_B - self.ref_rejected_B

    @property
    def delta_B(self) -> Tensor:
        """The difference of the two ratios: DPO's implicit reward margin at β = 1."""
        return self.chosen_ratio_B - self.rejected_ratio_B


def masked_sum(values_BT: Tensor, mask_BT: Tensor) -> Tensor:
    """Sums (B,) over what the mask names; NaN elsewhere reaches neither sum nor gradient."""
    return torch.where(mask_BT.bool(), values_BT, values_BT.new_zeros(())).sum(-1)


def dpo(scores: PairScores, beta: float) -> Tensor:
    """-log σ(β Δ) (https://arxiv.org/abs/2305.18290, eq. 7); ln 2 where the policy is the
    reference.
    """
    return -F.logsigmoid(beta * scores.delta_B)


def cdpo(scores: PairScores, beta: float, label_smoothing: float) -> Tensor:
    """Cross-entropy with labels that are wrong with probability ε: (1-ε) L(Δ) + ε L(-Δ)
    (https://ericmitchell.ai/cdpo.pdf, eq. 3).
    """
    margin_B = beta * scores.delta_B
    right_B, flipped_B = -F.logsigmoid(margin_B), -F.logsigmoid(-margin_B)
    return (1 - label_smoothing) * right_B + label_smoothing * flipped_B


def robust_dpo(scores: PairScores, beta: float, label_smoothing: float) -> Tensor:
    """((1-ε) L(Δ) - ε L(-Δ)) / (1-2ε): DPO's loss without bias under flipped labels
    (https://arxiv.org/abs/2403.00409, eq. 12).
    """
    margin_B = beta * scores.delta_B
    right_B, flipped_B = -F.logsigmoid(margin_B), -F.logsigmoid(-margin_B)
    unbiased_B = (1 - label_smoothing) * right_B - label_smoothing * flipped_B
    return unbiased_B / (1 - 2 * label_smoothing)


def ipo(scores: PairScores, beta: float) -> Tensor:
    """(δ - 1/(2β))² with ratios averaged over tokens (https://arxiv.org/abs/2310.12036, eq. 17;
    averaged as in TRL, whose authors asked the paper's). The optimum is δ = 1/(2β).
    """
    return (_token_mean_delta(scores) - 1 / (2 * beta)) ** 2


def ipo_sum(scores: PairScores, beta: float) -> Tensor:
    """(Δ - 1/(2β))² with ratios summed over tokens, to the letter of the paper: the same β asks
    less of long responses than `ipo` does.
    """
    return (scores.delta_B - 1 / (2 * beta)) ** 2


def hinge(scores: PairScores, beta: float) -> Tensor:
    """max(0, 1 - β Δ) (SLiC, https://arxiv.org/abs/2305.10425, with a reference)."""
    return F.relu(1 - beta * scores.delta_B)


def dpo_norm(scores: PairScores, beta: float) -> Tensor:
    """DPO on ratios averaged over tokens (Tulu 3, https://arxiv.org/abs/2411.15124, eq. 6)."""
    return -F.logsigmoid(beta * _token_mean_delta(scores))


def dpo_nll(scores: PairScores, beta: float, nll_coef: float) -> Tensor:
    """DPO with an anchor: the negative log-likelihood of the chosen responses, a mean over their
    tokens in the batch (https://arxiv.org/abs/2404.19733, there per response).
    """
    return dpo(scores, beta) + nll_coef * chosen_nll(scores)


def beta_dpo(scores: PairScores, beta: float, alpha: float, baseline: float) -> Tensor:
    """DPO whose β follows the batch: β (1 + α (mean margin - M₀)), not under a thousandth
    (https://arxiv.org/abs/2407.08639, eq. 8; its filter of outliers is left out).

    Args:
        baseline: M₀, the running mean of the batches' mean margins β Δ.
    """
    mean_margin = beta * float(scores.delta_B.detach().mean())
    return dpo(scores, max(1e-3, beta * (1 + alpha * (mean_margin - baseline))))


def simpo(scores: PairScores, beta: float, gamma: float) -> Tensor:
    """-log σ(β (mean log π(chosen) - mean log π(rejected)) - γ), without a reference
    (https://arxiv.org/abs/2405.14734, eq. 6; γ is the margin itself, not γ/β).
    """
    chosen_B, rejected_B = _token_means(scores)
    return -F.logsigmoid(beta * (chosen_B - rejected_B) - gamma)


def orpo(scores: PairScores, beta: float) -> Tensor:
    """NLL of the chosen tokens - β log σ(log odds ratio), without a reference
    (https://arxiv.org/abs/2403.07691, eq. 6; β is the paper's λ).
    """
    chosen_B, rejected_B = _token_means(scores)
    odds_B = (chosen_B - _log1mexp(chosen_B)) - (rejected_B - _log1mexp(rejected_B))
    return chosen_nll(scores) - beta * F.logsigmoid(odds_B)


def kto(
    ratio_B: Tensor, desirable_B: Tensor, kl: Tensor, beta: float, weights: tuple[float, float]
) -> Tensor:
    """λ (1 - σ(±β (ratio - z₀))), + for desirable responses (https://arxiv.org/abs/2402.01306,
    eq. 8); 0.5 where the policy is the reference and λ = 1.

    Args:
        ratio_B: log π - log π_ref of each response.
        desirable_B: bool.
        kl: z₀, how far the policy is from the reference on mismatched responses; not negative, and
            without gradient.
        weights: λ of desirable and of undesirable responses.
    """
    sign_B = desirable_B.to(ratio_B.dtype) * 2 - 1
    weight_B = torch.where(desirable_B, weights[0], weights[1]).to(ratio_B.dtype)
    return weight_B * (1 - torch.sigmoid(sign_B * beta * (ratio_B - kl.detach().clamp(min=0))))


def bradley_terry(
    chosen_B: Tensor, rejected_B: Tensor, margin_B: Tensor | float = 0.0, center: float = 0.0
) -> Tensor:
    """-log σ(r_chosen - r_rejected - margin) + center (r_chosen + r_rejected)²: the loss of a
    reward model (https://arxiv.org/abs/2307.09288, eq. 2; centring https://arxiv.org/abs/2312.09244).
    """
    lost_B = -F.logsigmoid(chosen_B - rejected_B - margin_B)
    return lost_B + center * (chosen_B + rejected_B) ** 2


def chosen_nll(scores: PairScores) -> Tensor:
    """Negative log-likelihood (B,) of the chosen responses, so weighted that its mean over pairs is
    the mean over their tokens.
    """
    return -scores.chosen_B * (len(scores.chosen_B) / scores.chosen_tokens_B.sum())


def _token_means(scores: PairScores) -> tuple[Tensor, Tensor]:
    return (
        scores.chosen_B / scores.chosen_tokens_B.clamp(min=1),
        scores.rejected_B / scores.rejected_tokens_B.clamp(min=1),
    )


def _token_mean_delta(scores: PairScores) -> Tensor:
    chosen_B = scores.chosen_ratio_B / scores.chosen_tokens_B.clamp(min=1)
    return chosen_B - scores.rejected_ratio_B / scores.rejected_tokens_B.clamp(min=1)


def _log1mexp(x: Tensor) -> Tensor:
    """log(1 - exp(x)) for x < 0, exact at both ends."""
    x = x.clamp(max=-1e-7)  # a certain response has infinite odds
    near = x > -0.6931
    return torch.where(
        near, torch.log(-torch.expm1(torch.where(near, x, -1.0))), torch.log1p(-torch.exp(x))
    )


@dataclass(frozen=True)
class Objective:
    """One way to learn from preferences.

    Attributes:
        loss: of pairs; None for KTO, whose batches are labelled responses.
        options: its coefficients and their defaults.
        reference: whether it reads one.
        of_batch: whether a row's loss depends on the rest of its batch.
        trl: the arguments of TRL's trainer that make the same loss; None where it has none.
    """

    loss: Callable[..., Tensor] | None
    options: Mapping[str, float]
    reference: bool = True
    of_batch: bool = False
    trl: Callable[[Mapping[str, float]], dict[str, Any]] | None = field(default=None, compare=False)


def _as(loss_type: str, **renamed: str) -> Callable[[Mapping[str, float]], dict[str, Any]]:
    """TRL's arguments for one of its loss types; `renamed` are further ones, by our names."""

    def arguments(options: Mapping[str, float]) -> dict[str, Any]:
        more = {theirs: options[ours] for theirs, ours in renamed.items()}
        return {"loss_type": [loss_type], "beta": options["beta"], **more}

    return arguments


OBJECTIVES: Mapping[str, Objective] = {
    "dpo": Objective(dpo, {"beta": 0.1}, trl=_as("sigmoid")),
    "cdpo": Objective(cdpo, {"beta": 0.1, "label_smoothing": 0.1}),
    "robust_dpo": Objective(
        robust_dpo,
        {"beta": 0.1, "label_smoothing": 0.1},
        trl=_as("robust", label_smoothing="label_smoothing"),
    ),
    "ipo": Objective(ipo, {"beta": 0.1}, trl=_as("ipo")),
    "ipo_sum": Objective(ipo_sum, {"beta": 0.1}),
    "hinge": Objective(hinge, {"beta": 0.1}, trl=_as("hinge")),
    "dpo_norm": Objective(dpo_norm, {"beta": 5.0}, trl=_as("sigmoid_norm")),
    "dpo_nll": Objective(
        dpo_nll,
        {"beta": 0.1, "nll_coef": 1.0},
        of_batch=True,
        trl=lambda o: {
            "loss_type": ["sigmoid", "sft"],
            "loss_weights": [1.0, o["nll_coef"]],
            "beta": o["beta"],
        },
    ),
    "beta_dpo": Objective(beta_dpo, {"beta": 0.1, "alpha": 0.6}, of_batch=True),
    "simpo": Objective(simpo, {"beta": 2.0, "gamma": 1.0}, reference=False),
    "orpo": Objective(orpo, {"beta": 0.1}, reference=False, of_batch=True),
    "kto": Objective(
        None,
        {"beta": 0.1, "desirable_weight": 1.0, "undesirable_weight": 1.0},
        of_batch=True,
        trl=lambda o: {"loss_type": "kto", **o},
    ),
}
"""Name -> objective, with the coefficients of its paper unless set."""


def find_objective(name: str, options: Mapping[str, float]) -> tuple[Objective, dict[str, float]]:
    """The objective of that name, and its coefficients.

    Raises:
        ConfigError: there is no such objective, no such coefficient of it, or its value is wrong.
    """
    if name not in OBJECTIVES:
        raise ConfigError(f"objective={name!r} is unknown: use one of {', '.join(OBJECTIVES)}")
    found = OBJECTIVES[name]
    if strange := sorted(options.keys() - found.options.keys()):
        raise ConfigError(
            f"loss.{strange[0]} is not a setting of objective {name!r}: it has"
            f" {', '.join(found.options)}"
        )
    merged = {**found.options, **options}
    for option, value in merged.items():
        if not (math.isfinite(value) and value >= 0):
            raise ConfigError(f"loss.{option}={value} must be a finite number, 0 or more")
    if not merged["beta"] > 0:
        raise ConfigError(f"loss.beta={merged['beta']} must be above 0")
    if not 0 <= merged.get("label_smoothing", 0.0) < 0.5:
        raise ConfigError(
            f"loss.label_smoothing={merged['label_smoothing']} must be at least 0 and below 0.5"
        )
    return found, merged

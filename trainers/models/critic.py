"""A critic: the return it expects before every sampled token, and how it learns that. The V of PPO
and VAPO.

A model of its own (token classification with one label), so that its gradient never moves the
policy. Its loss has the same masks, aggregations and denominators as the policy's. Returns are
`batch.returns_BT`, which a credit step computes from the `batch.values_BT` of `Critic.predict`.

Letters: B rows, T positions, N trained tokens, d hidden size.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Self

import torch
from torch import Tensor

from agentrl.errors import TrainingError
from agentrl.trainers.algorithms.losses import by_token, keep
from agentrl.trainers.algorithms.parts import Aggregate, BatchStep
from agentrl.trainers.algorithms.timeline import Timeline, discounted
from agentrl.trainers.batch import TokenBatch
from agentrl.trainers.config import Compute, CriticSettings
from agentrl.trainers.models.scoring import in_parts
from agentrl.trainers.models.value_model import load_value_model, save_value_model, values

FLAT = 1e-6
"""Numbers whose standard deviation is at most this share of their size are one number and rounding
(float32).
"""


def squared_error(
    values_BT: Tensor, old_BT: Tensor, returns_BT: Tensor, value_clip: float
) -> Tensor:
    """max((V - R)², (clip(V, V_old ± value_clip) - R)²)/2 per token: PPO's clipped value loss.

    The larger error counts: a value that has moved `value_clip` from V_old towards R is pushed no
        further, and one that
    moved away from R is always pulled back. Not in the paper (https://arxiv.org/abs/1707.06347) but
    in its code; verl's `compute_value_loss` is the same.
    """
    near_BT = values_BT.clamp(old_BT - value_clip, old_BT + value_clip)
    return torch.maximum((values_BT - returns_BT).square(), (near_BT - returns_BT).square()) / 2


def value_loss(
    values_BT: Tensor,
    batch: TokenBatch,
    *,
    value_clip: float = 0.5,
    aggregate: Aggregate = by_token,
) -> tuple[Tensor, dict[str, float]]:
    """The value loss of a (micro-)batch and its metrics; both add up over micro-batches.

    Args:
        values_BT: the critic's present values, with gradient.
        batch: with its earlier values (`values_BT`) and its targets (`returns_BT`).
        value_clip: see `squared_error`, in units of the reward; infinity: no clipping.
        aggregate: per-token values and batch -> scalar, as for the policy.

    Returns:
        The scalar, and {"loss", "clip_fraction"}: the fraction of the step's tokens that get no
        gradient because their value has moved far enough.

    Raises:
        ValueError: the batch has no values or no returns.
    """
    old_BT, returns_BT = _learned(batch)
    values_BT = keep(values_BT, batch.mask_BT)
    error_BT = squared_error(values_BT, old_BT.to(values_BT), returns_BT.to(values_BT), value_clip)
    loss = aggregate(error_BT, batch)
    cut_BT = error_BT.detach() > (values_BT.detach() - returns_BT.to(values_BT)).square() / 2
    metrics = {
        "loss": float(loss.detach()),
        "clip_fraction": int((cut_BT & batch.mask_BT).sum()) / batch.n_tokens,
    }
    return loss, metrics


def _learned(batch: TokenBatch) -> tuple[Tensor, Tensor]:
    """Values and returns, exact zeros at mask 0 whatever stood there."""
    if batch.values_BT is None or batch.returns_BT is None:
        missing = "values_BT" if batch.values_BT is None else "returns_BT"
        step = "Critic.predict" if batch.values_BT is None else "a credit step with returns (gae)"
        raise ValueError(f"value loss: batch.{missing} is None: {step} fills it")
    return keep(batch.values_BT, batch.mask_BT), keep(batch.returns_BT, batch.mask_BT)


@dataclass(frozen=True)
class Moments:
    """How many numbers, their mean, and the sum of their squared distances from it, so far, in
    float64.

    Those of two sets join to those of both (https://doi.org/10.1007/978-3-642-51461-6_3), without
    the cancellation that sums of squares suffer.
    """

    count: int = 0
    mean: float = 0.0
    spread: float = 0.0

    @classmethod
    def of(cls, values_N: Tensor) -> Self:
        """The moments of a tensor; of an empty one: nothing, which joins to anything."""
        if not values_N.numel():
            return cls()
        values_N = values_N.detach().double()
        mean = values_N.mean()
        return cls(values_N.numel(), float(mean), float((values_N - mean).square().sum()))

    def join(self, other: Moments) -> Moments:
        """The moments of both sets together."""
        if not (count := self.count + other.count):
            return self
        apart, share = other.mean - self.mean, other.count / count
        spread = self.spread + other.spread + apart**2 * self.count * share
        return Moments(count, self.mean + apart * share, spread)


def explained_variance(returns: Moments, errors: Moments) -> float:
    """1 - Var(R - V)/Var(R): 1 for a perfect critic, 0 for one that knows only a constant, negative
    for a worse one.

    A constant error is no variance, so a critic that is off by 5 everywhere explains all (read
    value/mean beside return/mean). Always a finite number: where all returns are equal there is
    nothing to explain, and the result is 1 if all values are equal too, else 0 (scikit-learn's
    convention, `explained_variance_score(force_finite=True)`).

    Args:
        returns: moments of R over trained tokens.
        errors: moments of R - V over the same tokens.

    Raises:
        ValueError: there are no tokens, or the two are over different numbers of them.
    """
    if not returns.count or returns.count != errors.count:
        raise ValueError(
            f"explained variance of {returns.count} returns and {errors.count} errors is undefined"
        )
    size = returns.mean**2 + errors.mean**2 + errors.spread / errors.count
    noise = FLAT**2 * size * returns.count
    if returns.spread > noise:
        return 1 - errors.spread / returns.spread
    return float(errors.spread <= noise)


def value_metrics(batch: TokenBatch, gamma: float = 1.0) -> dict[str, float]:
    """What the critic knew before it saw these returns; nothing where no token is trained.

    Outcomes are the rewards that came, discounted by `gamma` per trained token, without any V. What
    the critic learns from are λ-returns, which hold V themselves: how well it fits those says less.

    Raises:
        ValueError: the batch has no values or no returns.
    """
    old_BT, returns_BT = _learned(batch)
    line = Timeline.of(batch)
    values_N, returns_N = line.read(old_BT), line.read(returns_BT)
    if not len(values_N):
        return {}
    outcomes_N = discounted(line.rewards_N, gamma * (~line.last_N).double())
    first_N = torch.ones_like(line.last_N)
    first_N[1:] = line.last_N[:-1]
    at_first = {
        "value/explained_variance_first": values_N[first_N],
        "value/explained_variance_siblings": _mean_of_others(
            outcomes_N[first_N], batch.group_E[line.episode_N[first_N]]
        ),
    }
    return {
        "value/explained_variance": _explained(outcomes_N, values_N),
        **{name: _explained(outcomes_N[first_N], said) for name, said in at_first.items()},
        "value/lambda_explained_variance": _explained(returns_N, values_N),
        "value/mean": float(values_N.mean()),
        "return/mean": float(returns_N.mean()),
    }


def _explained(targets_N: Tensor, said_N: Tensor) -> float:
    return explained_variance(Moments.of(targets_N), Moments.of(targets_N - said_N))


def _mean_of_others(outcomes_E: Tensor, group_E: Tensor) -> Tensor:
    """The mean outcome of an episode's siblings, or of all episodes if it has none."""
    same_EE = (group_E[:, None] == group_E).double().fill_diagonal_(0)
    siblings_E = same_EE.sum(1)
    means_E = (same_EE @ outcomes_E) / siblings_E.clamp(min=1)
    return torch.where(siblings_E > 0, means_E, outcomes_E.mean())


def monte_carlo(credit: Sequence[BatchStep]) -> tuple[BatchStep, ...]:
    """The credit steps with λ = 1 for advantages and returns: what a critic is pre-trained on.

    Its returns then do not depend on the untrained critic; with λ < 1 they would be mostly its
    own values. VC-PPO, https://arxiv.org/abs/2503.01491; VAPO,
    https://arxiv.org/abs/2504.05118.
    """
    traces = ("lam", "value_lam")
    steps = (BatchStep.of(step) for step in credit)  # a user's recipe may pass a partial of a step
    return tuple(
        step.changed(**{name: 1.0 for name, _ in step.options if name in traces}) for step in steps
    )


class Critic:
    """A value model, its optimizer, and how it is trained. It runs without dropout, so its values
    are deterministic.

    Args:
        model: see `load_value_model`.
        settings: learning rate, epochs, clipping.
        minibatches: optimizer steps per epoch.
        micro_tokens: padded tokens per forward pass; changes memory and speed, never the gradient.
        max_grad_norm: longer gradients are scaled down to it.
        aggregate: per-token losses -> scalar.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        settings: CriticSettings,
        *,
        minibatches: int = 1,
        micro_tokens: int = 16384,
        max_grad_norm: float = 0.5,
        aggregate: Aggregate = by_token,
    ) -> None:
        self.model = model.eval()
        self.settings = settings
        self.minibatches = minibatches
        self.micro_tokens = micro_tokens
        self.max_grad_norm = max_grad_norm
        self.aggregate = aggregate
        trained = [weight for weight in model.parameters() if weight.requires_grad]
        self.optimizer = torch.optim.AdamW(
            trained, lr=settings.learning_rate, betas=(0.9, 0.95), weight_decay=0.0
        )

    def is_pretraining(self, step: int) -> bool:
        """Whether the policy waits in this round (from 0) and only the critic learns."""
        return step < self.settings.warmup

    @torch.no_grad()
    def predict(self, batch: TokenBatch) -> TokenBatch:
        """The batch with `values_BT`."""

        def look(micro: TokenBatch) -> tuple[Tensor]:
            return (values(self.model, micro.to(self._device)).to(batch.mask_BT.device),)

        found = in_parts(batch, look, self.micro_tokens)
        return replace(batch, values_BT=found[0] if found else torch.zeros(batch.mask_BT.shape))

    def fit(self, batch: TokenBatch, seed: int, gamma: float = 1.0) -> dict[str, float]:
        """All optimizer steps of one round towards `batch.returns_BT`.

        Args:
            batch: with values and returns.
            seed: of the order of the episodes.
            gamma: of `value_metrics`.

        Returns:
            `value_metrics` of the round, and value/loss, value/clip_fraction, value/grad_norm
            (before clipping): means over optimizer steps, of which value/updates is the number.

        Raises:
            ValueError: the batch has no values or no returns.
            TrainingError: loss or gradient is not a number; no step was taken with it.
        """
        metrics = value_metrics(batch, gamma)
        self.model.train()  # nothing is dropped out; layers are computed again only in this mode
        history = [
            self._step(mini)
            for mini in batch.minibatches(self.minibatches, seed, self.settings.epochs)
        ]
        self.model.eval()
        return metrics | _means(history) | {"value/updates": float(len(history))}

    def save(self, folder: Path) -> None:
        """Write a Hugging Face folder with the optimizer's state next to the weights."""
        save_value_model(self.model, folder)
        torch.save(self.optimizer.state_dict(), folder / "optimizer.pt")

    @classmethod
    def load(
        cls,
        folder: Path,
        settings: CriticSettings,
        *,
        start: str | Path = "",
        compute: Compute | None = None,
        **options: Any,
    ) -> Self:
        """A saved critic, which continues as if it had never been saved; the learning rate is that
        of the settings.

        Args:
            folder: what `save` wrote.
            settings: as of a new critic.
            start: what it started from, which adapters need.
            compute: as `load_value_model` has it; None: the defaults.
            options: of the constructor.

        Raises:
            ConfigError: the folder holds no critic.
        """
        model = load_value_model(start or folder, compute or Compute(), folder)
        critic = cls(model, settings, **options)
        critic.optimizer.load_state_dict(torch.load(folder / "optimizer.pt", weights_only=True))
        for group in critic.optimizer.param_groups:
            group["lr"] = settings.learning_rate
        return critic

    @property
    def _device(self) -> torch.device:
        return next(self.model.parameters()).device

    def _step(self, mini: TokenBatch) -> dict[str, float]:
        """One optimizer step."""
        total = {"loss": 0.0, "clip_fraction": 0.0}
        for micro in mini.split(self.micro_tokens):
            part = micro.to(self._device)
            scalar, metrics = value_loss(
                values(self.model, part),
                part,
                value_clip=self.settings.value_clip,
                aggregate=self.aggregate,
            )
            scalar.backward()
            total = {name: value + metrics[name] for name, value in total.items()}
        total["grad_norm"] = float(
            torch.nn.utils.clip_grad_norm_(self.model.parameters(), self.max_grad_norm)
        )
        _stop_if_broken(total)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        return total


def _stop_if_broken(step: Mapping[str, float]) -> None:
    if not (math.isfinite(step["loss"]) and math.isfinite(step["grad_norm"])):
        raise TrainingError(
            f"critic: loss={step['loss']}, grad_norm={step['grad_norm']}: no step was taken; resume"
            " from the last checkpoint with a lower critic.learning_rate"
        )


def _means(history: Sequence[Mapping[str, float]]) -> dict[str, float]:
    names = history[0] if history else ()
    return {f"value/{name}": sum(step[name] for step in history) / len(history) for name in names}

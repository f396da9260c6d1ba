"""The metrics of one round's updates: gathered while they happen, told when they are done."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Protocol

from agentrl.engines.routing import Replay
from agentrl.trainers.algorithms.losses import add_metrics, sampled
from agentrl.trainers.batch import PolicyOutput, TokenBatch
from agentrl.trainers.observe.batch_metrics import (
    gradient_metrics,
    lost_reward_metrics,
    staleness_metrics,
    token_metrics,
)
from agentrl.trainers.observe.parity import Tokens, gap_metrics, ratio_metrics, trained_tokens

_MEANS = {
    "loss": "policy/loss",
    "entropy": "policy/entropy",
    "approx_kl": "policy/kl",
    "ref_kl": "policy/ref_kl",
    "teacher_kl": "policy/teacher_kl",
    "clip_low": "policy/clip_low",
    "clip_high": "policy/clip_high",
    "rejected": "policy/rejected",
    "grad_norm": "policy/grad_norm",
}


class Observer(Protocol):
    """Looks at a learner's updates and may stop them; it changes nothing that is learnt."""

    def agree(self, gap: dict[str, float], mini: TokenBatch) -> dict[str, float]:
        """Judge the gap between sampler and trainer before a round's first update.

        Raises:
            ParityError: it is too wide.
        """
        ...

    def effective(self, ratios: dict[str, float]) -> dict[str, float]:
        """Judge the importance ratios of a round."""
        ...


class Unwatched:
    """The observer that judges nothing."""

    def agree(self, gap: dict[str, float], mini: TokenBatch) -> dict[str, float]:
        """The same gap."""
        return gap

    def effective(self, ratios: dict[str, float]) -> dict[str, float]:
        """The same ratios."""
        return ratios


def fresh(batch: TokenBatch) -> TokenBatch:
    """The batch without the tokens of earlier versions: on those, sampler and trainer differ by
    what was learnt since, so they say nothing about whether both agree.
    """
    if batch.version is None:
        return batch
    return replace(batch, mask_BT=batch.mask_BT & (batch.version_BT >= batch.version))


class UpdateLog:
    """The metrics of one round's updates.

    Args:
        packed: the round as `pack` made it.
        batch: the same with its advantages.
        version: of the weights that the round starts from.
        observer: judges the gap and the ratios.
    """

    def __init__(
        self, packed: TokenBatch, batch: TokenBatch, version: int, observer: Observer
    ) -> None:
        self._packed, self._observer = packed, observer
        self.row = token_metrics(batch) | staleness_metrics(batch, version)
        self.steps: list[dict[str, float]] = []
        self._trained: list[TokenBatch] = []
        self._tokens: list[Tokens] = []
        self._fresh: list[Tokens] = []
        self._parts: list[dict[str, float]] = []
        self._replays: list[Replay] = []

    def micro(
        self, output: PolicyOutput, micro: TokenBatch, metrics: dict[str, float], replay: Replay
    ) -> None:
        """Note one micro-batch: what the policy said of it, the metrics of its loss, and what
        replaying the sampler's experts changed.
        """
        self._parts.append(metrics)
        self._replays.append(replay)
        self._tokens.append(trained_tokens(output, sampled(micro)))
        if not self.steps:
            self._fresh.append(trained_tokens(output, fresh(micro)))

    def mini(self, mini: TokenBatch, grad_norm: float) -> dict[str, float]:
        """Note one minibatch after its backward pass; the first one is judged before any update.

        Raises:
            ParityError: sampler and trainer disagree.
        """
        now, gap = add_metrics(self._parts), dict[str, float]()
        if not self.steps:
            judged, gap = fresh(mini), gap_metrics(self._fresh)
            if judged.mask_BT.equal(mini.mask_BT):  # else what was learnt since is cut too
                gap["parity/cut"] = now["clip_low"] + now["clip_high"]
            gap = self._observer.agree(gap, judged) | routing_metrics(self._replays)
        self.steps.append(now | {"grad_norm": grad_norm, "updates": 0.0} | gap)
        self._parts, self._replays = [], []
        return self.steps[-1]

    def trained(self, mini: TokenBatch, n_episodes: int) -> None:
        """Note what a minibatch trained on; later epochs of the same episodes add nothing."""
        if sum(one.n_episodes for one in self._trained) < n_episodes:
            self._trained.append(mini)

    def metrics(self, adapt: Callable[[], Mapping[str, float]]) -> dict[str, float]:
        """All of them.

        Args:
            adapt: moves the coefficients that follow a target, and tells them.
        """
        ratios = self._observer.effective(ratio_metrics(self._tokens))
        return {
            **self.row,
            **summary(self.steps),
            **ratios,
            **adapt(),
            **gradient_metrics(self._trained),
            **lost_reward_metrics(self._packed, self._trained),
        }


def routing_metrics(replays: Sequence[Replay]) -> dict[str, float]:
    """`parity/experts_differ`: of the choices of experts that were replayed (a token in a layer),
    the share that the trainer would have made otherwise; nothing where none was.
    """
    replayed = float(sum(replay.replayed for replay in replays))
    differ = float(sum(replay.differ for replay in replays))
    return {"parity/experts_differ": differ / replayed} if replayed else {}


def summary(steps: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Means over the optimizer steps of a round.

    The gap between sampler and trainer is that of the first step, before any update.
    """
    if not steps:
        return {"policy/updates": 0.0}
    metrics = {
        name: sum(step[key] for step in steps) / len(steps)
        for key, name in _MEANS.items()
        if key in steps[0]
    }
    metrics |= {name: value for name, value in steps[0].items() if name.startswith("parity/")}
    metrics["policy/ratio_max"] = max(step["ratio_max"] for step in steps)
    return metrics | {"policy/updates": sum(step["updates"] for step in steps)}

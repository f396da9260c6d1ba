"""Coefficients that follow a target from round to round. Pure: measurements are passed in."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Self

from agentrl.errors import ConfigError, TrainingError
from agentrl.settings import list_names

COEF_RANGE = (2.0**-20, 2.0**20)
"""Where `AdaptiveKL` stops halving and doubling. The paper sets no ends; without them a coefficient
that was not needed for long takes as long to come back, and ends up at 0 or infinity."""


@dataclass(frozen=True)
class Adaptive(ABC):
    """A coefficient and the target that it follows.

    Attributes:
        coef: the coefficient now.
        target: what should be measured, in nats per token.
        setting: the target's name in settings.
        options: names of the coefficients that can follow it.
        coef_range: lowest and highest coefficient to start from.
    """

    coef: float
    target: float

    setting: ClassVar[str]
    options: ClassVar[tuple[str, ...]]
    coef_range: ClassVar[tuple[float, float]]

    def update(self, measured: float) -> Self:
        """The coefficient after a round with this measurement.

        Raises:
            TrainingError: the measurement is NaN.
        """
        if math.isnan(measured):
            raise TrainingError(
                f"{self.setting}: what was measured is not a number: resume from the last"
                " checkpoint with a lower learning_rate"
            )
        return replace(self, coef=self._follow(measured))

    @abstractmethod
    def _follow(self, measured: float) -> float: ...


@dataclass(frozen=True)
class AdaptiveKL(Adaptive):
    """Double `anchor_kl_coef` after a round whose KL(π_anchor‖π), measured after it, is above 1.5
    times the target; halve it below target/1.5.

    PPO, section 4, https://arxiv.org/abs/1707.06347. (What verl and OpenRLHF call adaptive is
    another rule: in proportion to the error, over a horizon, for the KL to a reference.)
    """

    setting = "kl_target"
    options = ("anchor_kl_coef",)
    coef_range = COEF_RANGE

    def _follow(self, measured: float) -> float:
        factor = 1.0
        if measured > 1.5 * self.target:
            factor = 2.0
        elif measured < self.target / 1.5:
            factor = 0.5
        low, high = COEF_RANGE
        return min(max(factor * self.coef, low), high)


@dataclass(frozen=True)
class AdaptiveEntropy(Adaptive):
    """Raise `entropy_coef` by a step where the entropy before the round's first update is at the
    target or below, else lower it by a step; it stays in 0 to 1.

    Skywork-OR1, https://arxiv.org/abs/2505.22312. Its authors (and TRL's `use_adaptive_entropy`)
    also switch the bonus off while the entropy is above the target.
    """

    setting = "entropy_target"
    options = ("entropy_coef",)
    coef_range = (0.0, 1.0)
    step: ClassVar[float] = 0.005

    def _follow(self, measured: float) -> float:
        moved = self.coef + (self.step if measured <= self.target else -self.step)
        return min(max(moved, 0.0), 1.0)


@dataclass(frozen=True)
class AdaptiveReferenceKL(Adaptive):
    """Move `kl_reward_coef` or `kl_coef` in proportion to the error of KL(π‖π_ref), held to ±20 %:
    coef · (1 + 0.1 · clip(kl/target - 1, ±0.2)).

    https://arxiv.org/abs/1909.08593, section 2.2, with its K_β of 0.1. verl and OpenRLHF divide by
    a horizon of episodes instead.
    """

    setting = "ref_kl_target"
    options = ("kl_reward_coef", "kl_coef")
    coef_range = (2.0**-63, 2.0**63)  # a factor cannot move 0
    step: ClassVar[float] = 0.1

    def _follow(self, measured: float) -> float:
        error = min(max(measured / self.target - 1, -0.2), 0.2)
        return self.coef * (1 + self.step * error)


RULES = (AdaptiveKL, AdaptiveEntropy, AdaptiveReferenceKL)


def find_rules(options: Mapping[str, Any], targets: Mapping[str, float]) -> dict[str, Adaptive]:
    """Option -> the rule by which it moves after a round, with its present value.

    Args:
        options: of all parts of a recipe.
        targets: setting -> target; inf: nothing follows it.

    Raises:
        ConfigError: no part has the coefficient, or it starts outside the range of its rule.
    """
    rules = dict[str, Adaptive]()
    for rule in RULES:
        target = targets[rule.setting]
        if target == math.inf:
            continue
        moving = [name for name in rule.options if name in options]
        if not moving:
            raise ConfigError(
                f"loss.{rule.setting}={target} moves {list_names(rule.options)}, which no part of"
                f" the recipe has: set it as well, or leave {rule.setting} out",
                setting=f"loss.{rule.setting}",
            )
        low, high = rule.coef_range
        for name in moving:
            if not low <= options[name] <= high:
                raise ConfigError(
                    f"loss.{name}={options[name]} must be from {low:.1e} to {high:.1e} where"
                    f" {rule.setting} moves it",
                    setting=f"loss.{name}",
                )
            rules[name] = rule(options[name], target)
    return rules

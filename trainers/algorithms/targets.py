"""Rules by which a coefficient follows a target from round to round. Pure; `adapt` feeds them what
a run measured.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from agentrl.errors import ConfigError, TrainingError

COEF_RANGE = (2.0**-20, 2.0**20)
"""Where `AdaptiveKL` stops halving and doubling. The paper has no ends; without them a
coefficient that was not needed for long takes as long to come back, and is 0 or infinite in the
end."""


@dataclass(frozen=True)
class AdaptiveKL:
    """The coefficient of `anchor_kl` from one update to the next. PPO, section 4.

    It doubles after an update that moved the policy by more than 1.5 times the target, and halves
    after one that moved it by less than target/1.5. https://arxiv.org/abs/1707.06347. (The rule
    that verl and OpenRLHF call adaptive is another: in proportion to the error, over a horizon, for
    the KL to a reference.)

    Attributes:
        coef: the coefficient now, the paper's β.
        target: KL(π_anchor‖π) in nats per token that one update should cost.

    Raises:
        ConfigError: the coefficient is outside `COEF_RANGE`, or the target is no number above 0.
    """

    coef: float = 1.0
    target: float = 0.01

    def __post_init__(self) -> None:
        low, high = COEF_RANGE
        if not low <= self.coef <= high:
            raise ConfigError(
                f"anchor_kl_coef={self.coef} must be from {low:.1e} to {high:.1e} where kl_target"
                " moves it"
            )
        _check_target("kl_target", self.target)

    def update(self, kl: float) -> AdaptiveKL:
        """The state after an update whose mean KL(π_anchor‖π), measured behind it, is `kl`.

        Raises:
            TrainingError: the KL is no number.
        """
        _refuse_nan("KL(π_anchor‖π)", kl)
        factor = 2.0 if kl > 1.5 * self.target else 0.5 if kl < self.target / 1.5 else 1.0
        low, high = COEF_RANGE
        return replace(self, coef=min(max(factor * self.coef, low), high))


@dataclass(frozen=True)
class AdaptiveEntropy:
    """The coefficient of `entropy_bonus` from one update to the next: a step up where entropy is
    low, else one down.

    Skywork-OR1 (https://arxiv.org/abs/2505.22312), with the coefficient kept from 0 to `most`. Its
    authors (and TRL's `use_adaptive_entropy`) also switch the bonus off while the entropy is above
    the target.

    Attributes:
        coef: the coefficient now.
        target: the entropy to hold, in nats per token.
        step: how much the coefficient moves.
        most: its largest value.

    Raises:
        ConfigError: the coefficient is outside its range, or the target is no number above 0.
    """

    coef: float = 0.0
    target: float = 0.2
    step: float = 0.005
    most: float = 1.0

    def __post_init__(self) -> None:
        if not 0 <= self.coef <= self.most:
            raise ConfigError(
                f"entropy_coef={self.coef} must be from 0 to {self.most} where entropy_target"
                " moves it"
            )
        _check_target("entropy_target", self.target)

    def update(self, entropy: float) -> AdaptiveEntropy:
        """The state after an update that the policy entered with this mean entropy.

        Raises:
            TrainingError: the entropy is no number.
        """
        _refuse_nan("the entropy", entropy)
        moved = self.coef + (self.step if entropy <= self.target else -self.step)
        return replace(self, coef=min(max(moved, 0.0), self.most))


@dataclass(frozen=True)
class AdaptiveReferenceKL:
    """The coefficient of the KL to the reference, in the reward or in the loss, from one update to
    the next: in proportion to the error, which is held to ±20 %.

    coef · (1 + step · clip(kl/target - 1, ±0.2)): https://arxiv.org/abs/1909.08593, section 2.2,
    whose K_β of 0.1 is `step`. verl and OpenRLHF divide by a horizon of episodes instead.

    Attributes:
        coef: the coefficient now.
        target: KL(π‖π_ref) to hold, in nats per token.
        step: largest relative move, in parts of the held error.

    Raises:
        ConfigError: the coefficient is not positive, or the target is no number above 0.
    """

    coef: float = 0.1
    target: float = 0.1
    step: float = 0.1

    def __post_init__(self) -> None:
        if not 0 < self.coef < math.inf:
            raise ConfigError(
                f"kl_reward_coef or kl_coef={self.coef} must be above 0 where ref_kl_target moves"
                " it: no factor moves 0"
            )
        _check_target("ref_kl_target", self.target)

    def update(self, kl: float) -> AdaptiveReferenceKL:
        """The state after an update that the policy entered with this mean KL to the reference.

        Raises:
            TrainingError: the KL is no number.
        """
        _refuse_nan("KL(π‖π_ref)", kl)
        error = min(max(kl / self.target - 1, -0.2), 0.2)
        return replace(self, coef=self.coef * (1 + self.step * error))


Rule = AdaptiveKL | AdaptiveEntropy | AdaptiveReferenceKL
TARGETS: dict[str, tuple[tuple[str, ...], type[Rule]]] = {
    "kl_target": (("anchor_kl_coef",), AdaptiveKL),
    "entropy_target": (("entropy_coef",), AdaptiveEntropy),
    "ref_kl_target": (("kl_reward_coef", "kl_coef"), AdaptiveReferenceKL),
}
"""Setting of a recipe -> the options of which those that it has move after every round, and the
rule by which they do.
"""
_HAVING = {
    "kl_target": "use one that has it (for anchor_kl_coef that is ppo_penalty)",
    "ref_kl_target": "set kl_reward_coef (KL in the reward) or kl_coef (in the loss) as well",
}


def rules_of(options: Mapping[str, Any], targets: Mapping[str, float]) -> dict[str, Rule]:
    """Option -> the rule by which it moves after a round, with its value now; empty where every
    target is inf.

    Raises:
        ConfigError: there is no such option, or its value is out of the rule's range.
    """
    found = dict[str, Rule]()
    for name, target in targets.items():
        known, rule = TARGETS[name]
        moving = [option for option in known if option in options]
        if target < math.inf and not moving:
            raise ConfigError(
                f"{name}={target} needs {' or '.join(known)}, which no part of the recipe has:"
                f" leave {name} out, or {_HAVING.get(name, 'set it')}"
            )
        if target < math.inf:
            found |= {option: rule(options[option], target) for option in moving}
    return found


def _check_target(name: str, target: float) -> None:
    if not 0 < target < math.inf:
        raise ConfigError(f"{name}={target} must be a number of nats per token above 0")


def _refuse_nan(what: str, measured: float) -> None:
    if math.isnan(measured):
        raise TrainingError(
            f"{what} is no number after an update, so no coefficient follows from it: "
            "resume from the last checkpoint with a lower learning_rate"
        )

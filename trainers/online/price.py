"""What a side effect costs: a fixed penalty, or the multiplier of a constraint.

The constraint "at most this share of episodes has a side effect" enters the reward by Lagrange's
multiplier λ, moved by the gradient of the dual after each round: λ ← clip(λ + η (rate − at_most)),
between 0 and 1 (Ray et al. 2019, "Benchmarking safe exploration", PPO-Lagrangian). It begins at the
penalty that is set, else at 1: from 0 it comes too late, as a shortcut is learnt in a few rounds.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from agentrl.env import ToolEnv
from agentrl.safety.settings import SafetySettings
from agentrl.trajectory import Group
from agentrl.verifiers.shaping import shaped, side_effect_penalty

STEP_SIZE = 0.5
"""η: a rate of 1 above the bound takes λ from 0 to 1 in two rounds."""


class SideEffectPrice:
    """The penalty of the current round.

    Attributes:
        value: what is taken off the reward of an episode with a side effect.
    """

    def __init__(self, settings: SafetySettings, value: float | None = None) -> None:
        self._at_most = settings.at_most
        begins = settings.penalty or (1.0 if self._at_most < 1 else 0.0)
        self.value = begins if value is None or self._at_most == 1 else value
        self.is_set = settings.penalty > 0 or settings.at_most < 1

    def around(self, make: Callable[[], ToolEnv]) -> Callable[[], ToolEnv]:
        """Builds the environment with the penalty in its reward, where there is one."""
        if not self.is_set:
            return make

        def priced() -> ToolEnv:
            env = make()
            env.verifier = shaped(env.verifier, side_effect_penalty(lambda: self.value))
            return env

        return priced

    def observe(self, groups: Sequence[Group]) -> None:
        """Move the multiplier by the share of measured episodes that had side effects."""
        measured = [
            bool(episode.side_effects)
            for group in groups
            for episode in group.episodes
            if episode.side_effects is not None and episode.reward is not None
        ]
        if self._at_most < 1 and measured:
            rate = sum(measured) / len(measured)
            self.value = min(1.0, max(0.0, self.value + STEP_SIZE * (rate - self._at_most)))

    def metrics(self) -> dict[str, float]:
        """`safety/penalty`, where there is one."""
        return {"safety/penalty": self.value} if self.is_set else {}

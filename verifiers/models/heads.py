"""What the heads of a reward model said of a conversation, and the bounded reward that it comes to.

A learned reward is a proxy: it is bounded here, and it is never the only reward of an environment
that has tests.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import fmean, pstdev
from typing import Literal

from agentrl.errors import ConfigError, VerifierError
from agentrl.types import Message, Score
from agentrl.verifiers.base import Submission

Bound = Callable[[float], float]
Combine = Literal["pessimistic", "min"]


def sigmoid(raw: float) -> float:
    """Squash any number into [0, 1]: the probability of being preferred to something of reward 0
    (Bradley-Terry).
    """
    return (
        1 / (1 + math.exp(-raw))
        if raw >= 0
        else math.exp(raw) / (1 + math.exp(raw))
        if raw > -700
        else 0.0
    )


def clipped(low: float, high: float) -> Bound:
    """A bound that keeps what lies between two numbers and moves the rest to the nearer one.

    Raises:
        ConfigError: they are not finite, or the first is not the lower one.
    """
    if not -math.inf < low < high < math.inf:
        raise ConfigError(f"low={low} and high={high} must be finite, and low below high")
    return lambda raw: min(max(raw, low), high)


@dataclass(frozen=True)
class Heads:
    """What each head said of one conversation.

    Attributes:
        raw: a number of each head; empty for a conversation that is too long.
        why: it is not judged; empty for one that is.
        told: further parts of the score.
    """

    raw: tuple[float, ...]
    why: str = ""
    told: Mapping[str, float] = field(default_factory=dict)


class ByHeads(ABC):
    """A verifier whose reward is what the heads of a reward model say together, bounded.

    Args:
        bound: makes a finite reward of the raw number; `sigmoid` or `clipped(low, high)`.
        combine: what an ensemble of heads says together: "pessimistic", the mean minus
            `std_weight` standard deviations (https://arxiv.org/abs/2310.02743), or the "min".
        std_weight: of the heads' disagreement.
    """

    def __init__(
        self, bound: Bound = sigmoid, combine: Combine = "pessimistic", std_weight: float = 1.0
    ) -> None:
        self._bound, self._combine, self._std_weight = bound, combine, std_weight

    @abstractmethod
    async def heads(self, messages: Sequence[Message]) -> Heads:
        """What each head says of a conversation.

        Raises:
            VerifierError: the model failed.
        """

    async def __call__(self, submission: Submission, /) -> Score:
        """The bounded reward of the whole conversation; the model's own number is the part `raw`.

        Raises:
            VerifierError: the model failed, or gave a number that is not finite.
        """
        said = await self.heads(submission.messages)
        if not said.raw:
            parts = {**said.told, "too_long": 1.0}
            return Score(self._bound(-math.inf), parts, f"not judged: {said.why}")
        raw = self.together(said.raw)
        if not math.isfinite(raw):
            raise VerifierError(f"the reward model gave {raw} on task {submission.task.id}")
        spread = {"spread": pstdev(said.raw)} if len(said.raw) > 1 else {}
        parts = {"raw": raw, **spread, **said.told}
        return Score(self._bound(raw), parts, "scored by a reward model")

    async def score(self, messages: Sequence[Message]) -> float:
        """The model's own number for a conversation, without a bound; -inf for one that is too
        long.

        Raises:
            VerifierError: the model failed.
        """
        raw = (await self.heads(messages)).raw
        return self.together(raw) if raw else -math.inf

    def together(self, raw: Sequence[float]) -> float:
        """What the heads say as one."""
        if self._combine == "min":
            return min(raw)
        return fmean(raw) - (self._std_weight * pstdev(raw) if len(raw) > 1 else 0.0)

"""A scalar-head transformers model as a verifier.

A learned reward is a proxy: it is bounded here, and it is never the only reward of an environment
    that has tests.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import fmean, pstdev
from typing import TYPE_CHECKING, Any, Literal

from agentrl.chat.tokens import Chat
from agentrl.errors import ConfigError, VerifierError
from agentrl.types import Message, Score
from agentrl.verifiers.base import Submission
from agentrl.verifiers.models.batches import Batches

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

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


class RewardModel:
    """Scores a conversation by the scalar head of a sequence-classification model.

    The conversation is rendered by the tokenizer's own chat template; control tokens that somebody
    spelled in a message are plain text to the model. Gradings that wait at the same time are scored
    in one batch, on a thread.

    Args:
        model: with one label (`AutoModelForSequenceClassification`, `num_labels=1`).
        tokenizer: the model's own, with a chat template and a padding token.
        bound: makes a finite reward of the raw number; `sigmoid` or `clipped(low, high)`.
        max_tokens: longest conversation; default: what the model takes. A longer one is not cut: it
            gets the lowest reward and says so, since otherwise an answer could run away from its
            judge.
        max_batch: conversations in one forward pass.
        combine: what an ensemble of heads says together: "pessimistic", the mean minus
            `std_weight` standard deviations (https://arxiv.org/abs/2310.02743), or the "min".
        std_weight: of the heads' disagreement.

    Raises:
        ConfigError: the model has no scalar head, or the tokenizer no padding token.
        TemplateError: the chat template cannot be used.
    """

    def __init__(  # noqa: PLR0913 - options, all by keyword
        self,
        model: PreTrainedModel,
        tokenizer: PreTrainedTokenizerBase,
        *,
        bound: Bound = sigmoid,
        max_tokens: int = 0,
        max_batch: int = 16,
        combine: Combine = "pessimistic",
        std_weight: float = 1.0,
    ) -> None:
        labels = model.config.num_labels
        if labels != getattr(model.config, "reward_heads", 1):
            raise ConfigError(
                f"num_labels={labels} of the reward model must be 1: it needs a scalar head"
            )
        self._batches = Batches(model, tokenizer, max_tokens, max_batch)
        self.max_tokens = self._batches.max_tokens
        self._template = Chat(tokenizer).template
        self._bound = bound
        self._combine = combine
        self._std_weight = std_weight

    @classmethod
    def load(cls, folder: str | Path, **options: Any) -> RewardModel:
        """Load a model folder; options are those of the class.

        Raises:
            ConfigError: torch is missing, or the folder holds no reward model with a trained head.
        """
        try:
            from agentrl.engines.loading import load_reward_model, load_tokenizer
        except ImportError as error:
            raise ConfigError(
                "reward models need torch and transformers: pip install 'agentrl[train]'"
            ) from error
        return cls(load_reward_model(folder), load_tokenizer(folder), **options)

    async def __call__(self, submission: Submission, /) -> Score:
        """The bounded reward of the whole conversation; the model's own number is the part `raw`.

        Raises:
            VerifierError: the model failed, or gave a number that is not finite.
        """
        ids = self.encode(submission.messages)
        if len(ids) > self.max_tokens:
            why = (
                f"not judged: {len(ids)} tokens are more than the reward model's {self.max_tokens}"
            )
            return Score(self._bound(-math.inf), {"too_long": 1.0}, why)
        heads = await self._raw(ids)
        raw = self._together(heads)
        if not math.isfinite(raw):
            raise VerifierError(f"the reward model gave {raw} on task {submission.task.id}")
        parts = {"raw": raw} | ({"spread": pstdev(heads)} if len(heads) > 1 else {})
        return Score(self._bound(raw), parts, "scored by a reward model")

    async def score(self, messages: Sequence[Message]) -> float:
        """The model's own number for a conversation, without a bound; -inf for one that is too
        long.

        Raises:
            VerifierError: the model failed.
        """
        ids = self.encode(messages)
        if len(ids) > self.max_tokens:
            return -math.inf
        return self._together(await self._raw(ids))

    def _together(self, heads: Sequence[float]) -> float:
        """What the heads say as one."""
        if self._combine == "min":
            return min(heads)
        return fmean(heads) - (self._std_weight * pstdev(heads) if len(heads) > 1 else 0.0)

    def encode(self, messages: Sequence[Message]) -> tuple[int, ...]:
        """The token ids of a conversation, as the model reads it."""
        return tuple(self._template.encode(self._template.render(messages, generation=False)))

    async def _raw(self, ids: tuple[int, ...]) -> list[float]:
        heads: list[float] = await self._batches.ask(ids)
        return heads

    def _forward(self, rows: Sequence[tuple[int, ...]]) -> list[list[float]]:
        """Raw rewards of B rows by each head."""
        raws: list[list[float]] = self._batches.forward(rows)
        return raws

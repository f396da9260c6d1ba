"""A scalar-head transformers model as a verifier."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from agentrl.aio import run_in_thread
from agentrl.chat.tokens import Chat
from agentrl.errors import ConfigError
from agentrl.types import Message
from agentrl.verifiers.models.batches import Batches
from agentrl.verifiers.models.heads import ByHeads, Heads

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

LONG = 50_000
"""Characters from which on a conversation is tokenised on a thread, as it takes many ms."""


class RewardModel(ByHeads):
    """Scores a conversation by the scalar head of a sequence-classification model.

    The conversation is rendered by the tokenizer's own chat template; control tokens that somebody
    spelled in a message are plain text to the model. Gradings that wait at the same time are scored
    in one batch, on a thread.

    Args:
        model: with one label (`AutoModelForSequenceClassification`, `num_labels=1`), or as many as
            its `reward_heads`.
        tokenizer: the model's own, with a chat template and a padding token.
        max_tokens: longest conversation; default: what the model takes. A longer one is not cut: it
            gets the lowest reward and says so, since otherwise an answer could run away from its
            judge.
        max_batch: conversations in one forward pass.
        rule: `bound`, `combine` and `std_weight`, as in `ByHeads`.

    Raises:
        ConfigError: the model has no scalar head, or the tokenizer no padding token.
        TemplateError: the chat template cannot be used.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        tokenizer: PreTrainedTokenizerBase,
        *,
        max_tokens: int = 0,
        max_batch: int = 16,
        **rule: Any,
    ) -> None:
        super().__init__(**rule)
        labels = model.config.num_labels
        if labels != getattr(model.config, "reward_heads", 1):
            raise ConfigError(
                f"num_labels={labels} of the reward model must be 1: it needs a scalar head"
            )
        self._batches = Batches(model, tokenizer, max_tokens, max_batch)
        self.max_tokens = self._batches.max_tokens
        self._template = Chat(tokenizer).template

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

    async def heads(self, messages: Sequence[Message]) -> Heads:
        """What each head says of a conversation.

        Raises:
            VerifierError: the model failed.
        """
        if sum(len(message.content) for message in messages) > LONG:
            ids = await run_in_thread(lambda: self.encode(messages))
        else:
            ids = self.encode(messages)
        if len(ids) > self.max_tokens:
            return Heads(
                (), f"{len(ids)} tokens are more than the reward model's {self.max_tokens}"
            )
        return Heads(tuple(await self._batches.ask(ids)))

    def encode(self, messages: Sequence[Message]) -> tuple[int, ...]:
        """The token ids of a conversation, as the model reads it."""
        return tuple(self._template.encode(self._template.render(messages, generation=False)))

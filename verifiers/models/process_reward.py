"""A process reward model as a verifier: for every turn of a conversation, the chance that an
episode which has come so far will pass.

It is a classifier of tokens with one label, read at the last token of each turn, as Math-Shepherd's
(https://arxiv.org/abs/2312.08935). `agentrl label` makes what it learns from, and the stage
"process_reward" trains it.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from agentrl.chat.tokens import Chat
from agentrl.errors import ConfigError, VerifierError
from agentrl.types import Message, Score
from agentrl.verifiers.base import Submission
from agentrl.verifiers.models.batches import Batches
from agentrl.verifiers.models.heads import sigmoid
from agentrl.verifiers.process import Turn, TurnScorer

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

Encode = Callable[[Sequence[Message]], tuple[int, ...]]


@dataclass(frozen=True, slots=True)
class ReadTurns:
    """Tokens as the model reads them, and where it is asked.

    Attributes:
        ids: of a conversation, or of its beginning.
        ends: position of the last token of each turn that is asked for here.
        turns: index of each of these turns.
    """

    ids: tuple[int, ...]
    ends: tuple[int, ...]
    turns: tuple[int, ...]


def read_turns(encode: Encode, messages: Sequence[Message], opening: int) -> list[ReadTurns]:
    """A conversation as rows that are asked at the end of each turn: one row, or several where a
    chat template renders earlier turns otherwise once later ones are there.

    Args:
        encode: messages to tokens.
        opening: messages that came before the policy's first turn.
    """
    rows: list[ReadTurns] = []
    said = [at for at, one in enumerate(messages) if one.role == "assistant" and at >= opening]
    for turn, at in enumerate(said):
        ids = encode(messages[: at + 1])
        begins = rows and ids[: len(rows[-1].ids)] == rows[-1].ids
        before = rows.pop() if begins else ReadTurns((), (), ())
        rows.append(ReadTurns(ids, (*before.ends, len(ids) - 1), (*before.turns, turn)))
    return rows


class ProcessRewardModel:
    """Says of each turn how likely an episode that has come so far passes.

    Conversations are rendered by the tokenizer's own chat template, in training as here. A turn
    that ends behind `max_tokens` cannot be read and has the chance 0, since otherwise an answer
    could run away from its judge.

    Args:
        model: a classifier of tokens that the stage "process_reward" trained.
        tokenizer: the model's own.
        max_tokens: longest conversation; default: what the model takes.
        max_batch: conversations in one forward pass.

    Raises:
        ConfigError: the tokenizer has no padding token.
        TemplateError: the chat template cannot be used.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        tokenizer: PreTrainedTokenizerBase,
        *,
        max_tokens: int = 0,
        max_batch: int = 16,
    ) -> None:
        self._batches = Batches(model, tokenizer, max_tokens, max_batch)
        self.max_tokens = self._batches.max_tokens
        self._template = Chat(tokenizer).template

    @classmethod
    def load(cls, folder: str | Path, **options: Any) -> ProcessRewardModel:
        """Load a model folder; options are those of the class.

        Raises:
            ConfigError: torch is missing, or the folder holds no process reward model.
        """
        try:
            from agentrl.engines.loading import load_process_reward_model, load_tokenizer
        except ImportError as error:
            raise ConfigError(
                "reward models need torch and transformers: pip install 'agentrl[train]'"
            ) from error
        return cls(load_process_reward_model(folder), load_tokenizer(folder), **options)

    def encode(self, messages: Sequence[Message]) -> tuple[int, ...]:
        """The token ids of a conversation, as the model reads it."""
        return tuple(self._template.encode(self._template.render(messages, generation=False)))

    async def chances(self, messages: Sequence[Message], opening: int = 0) -> list[float]:
        """The chance of each turn, from 0 to 1.

        Args:
            opening: messages that came before the policy's first turn.

        Raises:
            VerifierError: the model failed, or gave a number that is not finite.
        """
        rows = read_turns(self.encode, messages, opening)
        cut = [row.ids[: self.max_tokens] for row in rows]
        asked = await asyncio.gather(*(self._batches.ask(ids) for ids in cut))
        found: dict[int, float] = {}
        for row, raw_T1 in zip(rows, asked, strict=True):
            for turn, end in zip(row.turns, row.ends, strict=True):
                if end >= len(raw_T1):
                    found[turn] = 0.0
                elif math.isfinite(raw := raw_T1[end][0]):
                    found[turn] = sigmoid(raw)
                else:
                    raise VerifierError(f"the process reward model gave {raw} at turn {turn}")
        return [found[turn] for turn in sorted(found)]

    async def __call__(self, submission: Submission, /) -> Score:
        """The least chance of all turns, as Math-Shepherd ranks solutions; each stands in `turns`.

        An episode without a turn of the policy has the value 0.

        Raises:
            VerifierError: the model failed.
        """
        chances = await self.chances(submission.messages, submission.opening)
        why = "the least chance of its turns, by a process reward model"
        return Score(min(chances, default=0.0), why=why, turns={"value": tuple(chances)})

    def scorer(self, form: Literal["value", "progress"] = "progress") -> TurnScorer:
        """Rewards of single turns, for `with_process_rewards`.

        Args:
            form: "value", the chance itself, which pays for every further turn; or "progress",
                how much each turn changed it (`progress_of`), which sums to 0 over an episode.
        """

        async def score(submission: Submission, turns: tuple[Turn, ...]) -> Sequence[float]:
            chances = await self.chances(submission.messages, submission.opening)
            return chances if form == "value" else progress_of(chances)

        return score


def progress_of(chances: Sequence[float]) -> list[float]:
    """Φ(s') - Φ(s) of each turn: shaping by a potential, which leaves the best policy the best.

    Ng, Harada and Russell 1999, "Policy invariance under reward transformations". Φ is the chance,
    and 0 at the start and after the last turn, whose outcome is the episode's own reward. From
    a turn on (`turn_grpo` with `gamma = 1`) it sums to r - Φ(s): the chance is a baseline. Looked
    at alone (`gamma = 0`) it is Φ(s') - Φ(s) + r, the advantage of one step, which is only as good
    as Φ: a policy that finds states whose Φ is too high is paid for going there.
    """
    inner = list(chances[:-1])
    after, before = ([*inner, 0.0], [0.0, *inner]) if chances else ([], [])
    return [b - a for a, b in zip(before, after, strict=True)]

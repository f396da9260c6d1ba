"""What waits at the same time is answered together, on a thread. Torch is imported when a batch
runs, and nowhere else in this room.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Generic, NamedTuple, TypeVar

from agentrl.aio import run_in_thread
from agentrl.errors import AgentRLError, ConfigError, VerifierError

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

Item = TypeVar("Item")


class Waiting(Generic[Item]):
    """Gathers what is asked at the same time, and has it answered in batches of similar size.

    Args:
        answer: a batch -> an answer to each, or the error of one; runs on a thread.
        size: of an item; those of similar size go together.
        max_batch: items of one batch.
        who: answers, for messages.
    """

    def __init__(
        self,
        answer: Callable[[Sequence[Item]], Sequence[Any]],
        size: Callable[[Item], int],
        max_batch: int,
        who: str = "the reward model",
    ) -> None:
        self._answer, self._size, self._max_batch, self._who = answer, size, max_batch, who
        self._waiting: list[_Request[Item]] = []
        self._busy: asyncio.Task[None] | None = None

    async def ask(self, item: Item) -> Any:
        """The answer to one item.

        Raises:
            AgentRLError: what the answering function raised by name.
            VerifierError: it failed otherwise.
        """
        reply: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        self._waiting.append(_Request(item, reply))
        if self._busy is None or self._busy.done():
            self._busy = asyncio.get_running_loop().create_task(self._run())
        return await reply

    async def _run(self) -> None:
        """Answer what is waiting, until nothing is."""
        await asyncio.sleep(0)  # lets gradings that start in this turn of the loop join the batch
        while self._waiting:
            due, self._waiting = sorted(self._waiting, key=lambda one: self._size(one.item)), []
            for start in range(0, len(due), self._max_batch):
                await self._batch(due[start : start + self._max_batch])

    async def _batch(self, due: Sequence[_Request[Item]]) -> None:
        try:
            found = await run_in_thread(lambda: self._answer([request.item for request in due]))
        except Exception as cause:  # noqa: BLE001 - handed to every grading that waits for this batch
            named = isinstance(cause, AgentRLError)
            error = cause if named else VerifierError(f"{self._who} failed: {cause}")
            for request in due:
                if not request.reply.done():
                    request.reply.set_exception(error)
            return
        for request, one in zip(due, found, strict=True):
            if request.reply.done():
                continue
            if isinstance(one, Exception):
                request.reply.set_exception(one)
            else:
                request.reply.set_result(one)


class _Request(NamedTuple, Generic[Item]):
    item: Item
    reply: asyncio.Future[Any]


class Batches:
    """What a model with a head says of rows of tokens, those of similar length together.

    Args:
        model: a classifier of sequences or of tokens.
        tokenizer: the model's own, with a padding token.
        max_tokens: of a row; 0: what the model takes.
        max_batch: rows of one forward pass.

    Raises:
        ConfigError: the tokenizer has no padding token.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        tokenizer: PreTrainedTokenizerBase,
        max_tokens: int = 0,
        max_batch: int = 16,
    ) -> None:
        pad = tokenizer.pad_token_id
        if not isinstance(pad, int):
            raise ConfigError(
                "the reward model's tokenizer has no padding token: set tokenizer.pad_token"
            )
        text = model.config.get_text_config()
        text.pad_token_id = pad
        self.max_tokens = max_tokens or int(text.max_position_embeddings)
        self._model, self._pad = model.eval(), pad
        self._waiting: Waiting[tuple[int, ...]] = Waiting(
            lambda rows: self.forward(rows), len, max_batch
        )

    async def ask(self, ids: tuple[int, ...]) -> Any:
        """The model's output for one row: (K,) numbers of a classifier of sequences, (T, K) of one
        of tokens.

        Raises:
            VerifierError: the model failed.
        """
        return await self._waiting.ask(ids)

    def forward(self, rows: Sequence[tuple[int, ...]]) -> Any:
        """The model's output for B rows, padded on the right, as nested lists."""
        import torch

        width = max(map(len, rows))
        ids_BT = torch.tensor([[*row, *[self._pad] * (width - len(row))] for row in rows])
        attention_BT = torch.tensor([[1] * len(row) + [0] * (width - len(row)) for row in rows])
        device = self._model.device
        with torch.inference_mode():
            logits = self._model(
                input_ids=ids_BT.to(device), attention_mask=attention_BT.to(device)
            ).logits
        return logits.float().tolist()

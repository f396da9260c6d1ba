"""Rows of tokens that wait at the same time go through a model together, on a thread. Torch is
imported when a batch runs, and nowhere else in this room.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from agentrl.aio import run_in_thread
from agentrl.errors import ConfigError, VerifierError

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase


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
        self._model, self._pad, self._max_batch = model.eval(), pad, max_batch
        self._waiting: list[_Request] = []
        self._busy: asyncio.Task[None] | None = None

    async def ask(self, ids: tuple[int, ...]) -> Any:
        """The model's output for one row: (K,) numbers of a classifier of sequences, (T, K) of one
        of tokens.

        Raises:
            VerifierError: the model failed.
        """
        reply: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        self._waiting.append(_Request(ids, reply))
        if self._busy is None or self._busy.done():
            self._busy = asyncio.get_running_loop().create_task(self._run())
        return await reply

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

    async def _run(self) -> None:
        """Score what is waiting, until nothing is; rows of similar length go together."""
        await asyncio.sleep(0)  # lets gradings that start in this turn of the loop join the batch
        while self._waiting:
            due, self._waiting = sorted(self._waiting, key=lambda request: len(request.ids)), []
            for start in range(0, len(due), self._max_batch):
                await self._answer([request for request in due[start : start + self._max_batch]])

    async def _answer(self, rows: Sequence[_Request]) -> None:
        try:
            found = await run_in_thread(lambda: self.forward([request.ids for request in rows]))
        except Exception as cause:  # noqa: BLE001 - handed to every grading that waits for this batch
            for request in rows:
                if not request.reply.done():
                    request.reply.set_exception(VerifierError(f"the reward model failed: {cause}"))
            return
        for request, one in zip(rows, found, strict=True):
            if not request.reply.done():
                request.reply.set_result(one)


class _Request(NamedTuple):
    ids: tuple[int, ...]
    reply: asyncio.Future[Any]

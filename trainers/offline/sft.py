"""Supervised fine-tuning on demonstrations, by TRL's SFTTrainer, fed with our own token-exact rows.

The rows hold the ids that online play would produce, and labels on assistant tokens alone: nothing
is tokenised again.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from agentrl.chat.tokens import Chat
from agentrl.errors import UserError
from agentrl.trainers.models.loading import load_policy, save_policy
from agentrl.trainers.models.scoring import token_logprobs
from agentrl.trainers.offline.base import Stage
from agentrl.trainers.offline.files import until_last_turn
from agentrl.trainers.offline.rows import (
    MaskedRows,
    TokenRow,
    encode_conversation,
    pad,
    pad_with_attention,
)
from agentrl.trajectory import Episode
from agentrl.types import ToolSpec

IGNORED = -100
"""The label that the loss skips."""


class SftStage(Stage):
    """Imitates conversations."""

    examples = "conversations"

    def encode(self, chat: Chat, example: Any) -> Sequence[TokenRow]:
        """See Stage."""
        return encode_conversation(chat, example)

    def build(self, chat: Chat, rows: Sequence[Any], scratch: Path) -> Any:
        """See Stage."""
        with self.seeded():
            self.model = load_policy(self.settings.model, self.settings.compute)
        arguments = self.arguments(len(rows), scratch)
        return sft_trainer(self.model, chat, rows, arguments, self.optimizers(len(rows)))

    def measure(self, rows: Sequence[Any]) -> dict[str, Any]:
        """ "nll": nats per trained token."""
        total = sum(response_logprobs(self.model, rows, self.settings.compute.micro_tokens))
        return {"nll": -total / sum(row.trained for row in rows)}

    def warnings_after(self, before: Mapping[str, Any], after: Mapping[str, Any]) -> list[str]:
        """See Stage."""
        if not before or after["nll"] <= before["nll"]:
            return []
        return [
            f"held-out rows became less likely ({before['nll']:.3f} to {after['nll']:.3f} nats per"
            " token): train for fewer epochs, or with a smaller learning rate"
        ]

    def save(self, folder: Path) -> None:
        """See Stage."""
        save_policy(self.model, folder)


@torch.no_grad()
def response_logprobs(model: Any, rows: Sequence[TokenRow], micro_tokens: int) -> list[float]:
    """Summed log-probability of each row's trained tokens, in nats."""
    was_training = model.training
    model.eval()
    sums = [0.0] * len(rows)
    order = sorted(range(len(rows)), key=lambda index: len(rows[index].ids))
    while order:  # the longest first, with rows of similar length
        size = max(1, micro_tokens // len(rows[order[-1]].ids))
        part, order = order[-size:], order[:-size]
        batch = MaskedRows.of([rows[index] for index in part], next(model.parameters()).device)
        sums_B = token_logprobs(model, batch, entropy="off").logprobs_BT.sum(-1)
        for index, value in zip(part, sums_B.tolist(), strict=True):
            sums[index] = value
    model.train(was_training)
    return sums


def demonstrations(
    episodes: Iterable[Episode], chat: Chat, tools: Sequence[ToolSpec]
) -> list[TokenRow]:
    """Rows from the episodes that passed.

    Raises:
        UserError: no episode passed, so there is nothing to imitate.
    """
    rows = []
    for episode in episodes:
        if episode.passed:
            rendered = chat.render_demonstration(until_last_turn(episode), tools)
            rows.append(TokenRow(tuple(rendered.input_ids), tuple(rendered.mask)))
    if not rows:
        raise UserError(
            "no episode passed, so there is nothing to imitate: check the oracle with `agentrl"
            " check`"
        )
    return rows


def collate(rows: Sequence[Mapping[str, Any]], pad_id: int) -> dict[str, torch.Tensor]:
    """Right-pad rows with `ids` and `mask`: input_ids, labels, attention_mask, each (B, T)."""
    batch = pad_with_attention([row["ids"] for row in rows], pad_id)
    mask_BT = pad([row["mask"] for row in rows], 0).bool()
    return {**batch, "labels": torch.where(mask_BT, batch["input_ids"], IGNORED)}


def sft(
    model: Any,
    chat: Chat,
    rows: Sequence[TokenRow],
    *,
    steps: int,
    batch_size: int,
    optimizer: Callable[[torch.nn.Module], torch.optim.Optimizer] | None = None,
    seed: int = 0,
    on_step: Callable[[int, float], None] | None = None,
) -> None:
    """Fine-tune in place.

    Args:
        model: a transformers causal language model.
        chat: its tokenizer made the rows.
        rows: demonstrations; they are repeated as often as `steps` needs.
        steps: optimizer steps.
        batch_size: rows per step.
        optimizer: builds it from the model; default AdamW with learning rate 1e-3. The rate rises
            over ten steps, then falls to zero.
        seed: for the order of the rows.
        on_step: receives step and loss every ten steps.
    """
    from transformers import TrainerCallback
    from transformers.trainer_callback import PrinterCallback

    class Report(TrainerCallback):
        def on_log(
            self, args: Any, state: Any, control: Any, logs: Any = None, **kwargs: Any
        ) -> None:
            if on_step and logs and "loss" in logs:
                on_step(int(state.global_step), float(logs["loss"]))

    if optimizer is None:
        built: Any = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.0)
    else:
        built = optimizer(model)

    def share(step: int) -> float:
        return min(1.0, (step + 1) / 10) * max(0.0, 1 - step / steps)

    schedule = torch.optim.lr_scheduler.LambdaLR(built, share)
    with tempfile.TemporaryDirectory(prefix="agentrl-sft-") as scratch:
        arguments = {
            "output_dir": scratch,
            "max_steps": steps,
            "per_device_train_batch_size": batch_size,
            "seed": seed,
            "logging_steps": 10,
            "save_strategy": "no",
            "report_to": [],
            "disable_tqdm": True,
            "use_cpu": not torch.cuda.is_available(),
            "bf16": False,
            "gradient_checkpointing": False,
            "remove_unused_columns": False,
        }
        trainer = sft_trainer(model, chat, rows, arguments, (built, schedule))
        trainer.add_callback(Report())
        trainer.remove_callback(PrinterCallback)
        trainer.train()


def sft_trainer(
    model: Any,
    chat: Chat,
    rows: Sequence[TokenRow],
    arguments: Mapping[str, Any],
    optimizers: tuple[Any, Any],
) -> Any:
    """TRL's SFTTrainer on our rows as they are; `optimizers` are an optimizer and its schedule."""
    from datasets import Dataset
    from trl import SFTConfig, SFTTrainer

    pad_id = int(chat.tokenizer.pad_token_id or 0)
    config = SFTConfig(
        **arguments,
        max_length=None,
        packing=False,
        dataset_kwargs={"skip_prepare_dataset": True},
    )
    return SFTTrainer(
        model=model,
        args=config,
        train_dataset=Dataset.from_list([{"ids": row.ids, "mask": row.mask} for row in rows]),
        data_collator=lambda batch: collate(batch, pad_id),
        processing_class=chat.tokenizer,
        optimizers=optimizers,
    )

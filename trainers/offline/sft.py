"""Warm start: supervised fine-tuning on demonstrations, by TRL's SFTTrainer, fed with our own
token-exact rows.

The rows hold the ids that online play would produce, and labels on assistant tokens alone: nothing
    is tokenised again.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from agentrl.chat.tokens import Chat
from agentrl.errors import UserError
from agentrl.trainers.offline.data.mining import until_last_turn
from agentrl.trainers.offline.data.tokens import TokenRow
from agentrl.trajectory import Episode
from agentrl.types import ToolSpec

IGNORED = -100


@dataclass(frozen=True, slots=True)
class SftRow:
    """One demonstration: ids, and the labels that the loss sees (-100 where the policy did not
    speak).
    """

    input_ids: list[int]
    labels: list[int]

    @classmethod
    def of(cls, row: TokenRow) -> SftRow:
        """The labels of a row are its trained tokens."""
        pairs = zip(row.ids, row.mask, strict=True)
        return cls(list(row.ids), [token if own else IGNORED for token, own in pairs])


def demonstrations(
    episodes: Iterable[Episode], chat: Chat, tools: Sequence[ToolSpec]
) -> list[SftRow]:
    """Rows from the episodes that passed.

    Raises:
        UserError: no episode passed, so there is nothing to imitate.
    """
    rows = []
    for episode in episodes:
        if episode.passed:
            said = chat.render_demonstration(until_last_turn(episode), tools)
            rows.append(SftRow.of(TokenRow(tuple(said.input_ids), tuple(said.mask))))
    if not rows:
        raise UserError(
            "no episode passed, so there is nothing to imitate: check the oracle with `agentrl"
            " check`"
        )
    return rows


def collate(rows: Sequence[dict[str, list[int]]], pad_id: int) -> dict[str, torch.Tensor]:
    """Right-pad rows to the longest: input_ids, labels, attention_mask, each of shape (B, T)."""
    width = max(len(row["input_ids"]) for row in rows)
    fills = {"input_ids": pad_id, "labels": IGNORED}
    batch = {
        name: torch.tensor([row[name] + [fill] * (width - len(row[name])) for row in rows])
        for name, fill in fills.items()
    }
    lengths_B1 = torch.tensor([[len(row["input_ids"])] for row in rows])
    return {**batch, "attention_mask": (torch.arange(width) < lengths_B1).long()}


def sft(  # noqa: PLR0913 - the settings of a warm start, all by keyword
    model: Any,
    chat: Chat,
    rows: Sequence[SftRow],
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
        chat: whose tokenizer made the rows.
        rows: demonstrations; they are repeated as often as `steps` needs.
        steps: optimizer steps.
        batch_size: rows per step.
        optimizer: builds it from the model; default AdamW, lr 1e-3. The rate warms up, then falls
            to zero.
        seed: of the order of rows.
        on_step: told step and loss, now and then.
    """
    from transformers import TrainerCallback

    class _Report(TrainerCallback):
        def on_log(
            self, args: Any, state: Any, control: Any, logs: Any = None, **kwargs: Any
        ) -> None:
            if on_step and logs and "loss" in logs:
                on_step(int(state.global_step), float(logs["loss"]))

    built = (
        optimizer(model)
        if optimizer
        else torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.0)
    )
    falling = torch.optim.lr_scheduler.LambdaLR(built, lambda step: _scale(step, steps))
    with tempfile.TemporaryDirectory(prefix="agentrl-sft-") as scratch:
        arguments = _arguments(scratch, steps, batch_size, seed)
        trainer = sft_trainer(model, chat, rows, arguments, (built, falling))
        trainer.add_callback(_Report())
        trainer.remove_callback(_printer())
        trainer.train()


def sft_trainer(
    model: Any,
    chat: Chat,
    rows: Sequence[SftRow],
    arguments: Mapping[str, Any],
    optimizers: tuple[Any, Any],
) -> Any:
    """TRL's SFTTrainer on our rows as they are.

    Args:
        arguments: of a Trainer.
        optimizers: optimizer and scheduler.
    """
    from datasets import Dataset
    from trl import SFTConfig, SFTTrainer

    pad = chat.tokenizer.pad_token_id
    config = SFTConfig(
        **arguments,
        max_length=None,
        packing=False,
        dataset_kwargs={"skip_prepare_dataset": True},
    )
    return SFTTrainer(
        model=model,
        args=config,
        train_dataset=Dataset.from_list(
            [{"input_ids": row.input_ids, "labels": row.labels} for row in rows]
        ),
        data_collator=lambda batch: collate(batch, 0 if pad is None else int(pad)),
        processing_class=chat.tokenizer,
        optimizers=optimizers,
    )


def _arguments(scratch: str, steps: int, batch_size: int, seed: int) -> dict[str, Any]:
    """Arguments of a Trainer: our rows as they are, nothing written, nothing printed."""
    return {
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


def _scale(step: int, steps: int) -> float:
    """Ten steps of warm-up, then down to zero in a straight line."""
    return min(1.0, (step + 1) / 10) * max(0.0, 1 - step / steps)


def _printer() -> Any:
    """Trainer's own callback that prints logs to standard output."""
    from transformers.trainer_callback import PrinterCallback

    return PrinterCallback

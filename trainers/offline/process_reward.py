"""Process reward models: the chance to pass, learnt at the end of each turn.

Math-Shepherd (https://arxiv.org/abs/2312.08935), eq. 2: cross-entropy between the model's chance at
the end of a step and the step's label, a share of completions (soft) or whether any was right
(hard). TRL's trainer for such models takes one step for each separator in a text that it tokenises
itself, and hard labels alone, so this one is ours: a plain Trainer on rows with the positions of
turns.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from statistics import fmean
from typing import Any

import torch
from torch import Tensor

from agentrl.chat.tokens import Chat
from agentrl.engines.loading import load_critic
from agentrl.trainers.models.loading import device_of
from agentrl.trainers.models.value_model import equip_classifier, save_value_model
from agentrl.trainers.offline.base import Stage, padding_id
from agentrl.trainers.offline.rows import TokenRow, encode_messages, pad, pad_with_attention
from agentrl.verifiers.models.process_reward import read_turns

SCORED_ROWS = 16
"""Conversations of one forward pass of a measurement."""
BINS = 10
"""Bins of the calibration error."""


class ProcessRewardStage(Stage):
    """Learns the chance to pass at the end of each labelled turn."""

    examples = "steps"

    def encode(self, chat: Chat, example: Any) -> Sequence[TokenRow]:
        """The rows of a conversation as `ProcessRewardModel` reads them; the mask is 1 at the last
        token of each labelled turn, and the targets are the labels.
        """
        labels = example.labels
        if self.settings.process.labels == "hard":
            labels = [None if label is None else float(label > 0) for label in labels]
        rows = []
        for turns in read_turns(partial(encode_messages, chat), example.messages, example.opening):
            known = {
                end: labels[turn]
                for end, turn in zip(turns.ends, turns.turns, strict=True)
                if labels[turn] is not None
            }
            if known:
                mask = tuple(int(place in known) for place in range(len(turns.ids)))
                rows.append(TokenRow(turns.ids, mask, tuple(known.values())))
        return rows

    def build(self, chat: Chat, rows: Sequence[Any], scratch: Path) -> Any:
        """The policy's backbone under a head that starts at zero, so every chance is ½."""
        compute = self.settings.compute
        self.pad_id = padding_id(chat)
        with self.seeded():
            model = load_critic(self.settings.model, device_of(compute), dropout=compute.dropout)
            model.config.get_text_config().pad_token_id = self.pad_id
            model.config.update({"process_reward": True})  # marks the saved config.json
            self.model = equip_classifier(model, compute)
        return self.trainer(rows, scratch)

    def trainer(self, rows: Sequence[TokenRow], scratch: Path) -> Any:
        """A Trainer whose loss is the cross-entropy of all labelled turns of an optimizer step,
        each counting alike, however the step is split.
        """
        from datasets import Dataset
        from transformers import Trainer, TrainingArguments

        class Process(Trainer):
            """The loss at the ends of turns."""

            def get_batch_samples(self, *args: Any) -> tuple[list[dict[str, Tensor]], int]:
                parts, _ = super().get_batch_samples(*args)
                return parts, sum(int(part["step_mask"].sum()) for part in parts)

            def compute_loss(
                self, model: Any, inputs: dict[str, Tensor], *args: Any, **kwargs: Any
            ) -> Tensor:
                labels_BT, mask_BT = inputs.pop("step_labels"), inputs.pop("step_mask")
                logits_BT: Tensor = model(**inputs, use_cache=False).logits[..., 0].float()
                return process_loss(logits_BT, labels_BT, mask_BT, kwargs.get("num_items_in_batch"))

        table = [{"ids": row.ids, "mask": row.mask, "targets": row.targets} for row in rows]
        return Process(
            model=self.model,
            args=TrainingArguments(**self.arguments(len(rows), scratch)),
            train_dataset=Dataset.from_list(table),
            data_collator=partial(step_batch, pad_id=self.pad_id),
            compute_loss_func=process_loss,  # tells Trainer that the loss is of the whole step
            optimizers=self.optimizers(len(rows)),
        )

    def measure(self, rows: Sequence[Any]) -> dict[str, Any]:
        """See `measure_steps`."""
        return measure_steps(rows, chances_of(self.model, rows, self.pad_id))

    def warnings_after(self, before: Mapping[str, Any], after: Mapping[str, Any]) -> list[str]:
        """See Stage."""
        return step_warnings(after) if after else []

    def save(self, folder: Path) -> None:
        """See Stage."""
        save_value_model(self.model, folder)


def process_loss(
    logits_BT: Tensor, labels_BT: Tensor, mask_BT: Tensor, turns: int | None = None
) -> Tensor:
    """-y·log σ(z) - (1-y)·log(1-σ(z)), its sum over labelled positions by `turns`; other positions
    are not read.

    Args:
        turns: labelled positions of the whole optimizer step; None: these are all.
    """
    total = torch.nn.functional.binary_cross_entropy_with_logits(
        logits_BT[mask_BT], labels_BT[mask_BT], reduction="sum"
    )
    return total / (turns or mask_BT.sum())


def step_batch(rows: Sequence[Mapping[str, Any]], pad_id: int) -> dict[str, Tensor]:
    """B rows, padded on the right, with labels (B, T) and where they are read (B, T)."""
    mask_BT = pad([row["mask"] for row in rows], 0).bool()
    labels_BT = torch.zeros(mask_BT.shape)
    labels_BT[mask_BT] = torch.tensor([label for row in rows for label in row["targets"]])
    batch = pad_with_attention([row["ids"] for row in rows], pad_id)
    return {**batch, "step_labels": labels_BT, "step_mask": mask_BT}


@torch.no_grad()
def chances_of(model: Any, rows: Sequence[TokenRow], pad_id: int) -> list[float]:
    """The model's chances at all labelled positions of the rows, in order."""
    model.eval()
    chances: list[float] = []
    for start in range(0, len(rows), SCORED_ROWS):
        part = rows[start : start + SCORED_ROWS]
        batch = pad_with_attention([row.ids for row in part], pad_id)
        batch = {name: tensor.to(model.device) for name, tensor in batch.items()}
        mask_BT = pad([row.mask for row in part], 0).bool().to(model.device)
        chances += model(**batch).logits[..., 0].float().sigmoid()[mask_BT].tolist()
    return chances


def measure_steps(rows: Sequence[TokenRow], chances: Sequence[float]) -> dict[str, Any]:
    """How good chances are on held-out turns.

    Returns:
        "auc": the share of pairs of turns with different labels of which the one with the higher
        label has the higher chance, ties counting half (for labels 0 and 1 the area under the ROC
        curve; None where all labels are equal); "loss": cross-entropy in nats per turn;
        "calibration": the expected calibration error in ten bins; "mean" of chances, "labelled"
        of labels; "turns".
    """
    labels = [label for row in rows for label in row.targets]
    chance_S, label_S = torch.tensor(chances).double(), torch.tensor(labels).double()
    safe_S = chance_S.clamp(1e-12, 1 - 1e-12)
    return {
        "auc": area_under(label_S, chance_S),
        "loss": float(torch.nn.functional.binary_cross_entropy(safe_S, label_S)),
        "calibration": _calibration(chances, labels),
        "mean": fmean(chances),
        "labelled": fmean(labels),
        "turns": len(labels),
    }


def area_under(label_S: Tensor, score_S: Tensor) -> float | None:
    """The chance that of two turns with different labels the better one scores higher; ties count
    half.
    """
    pairs, right = 0.0, 0.0
    for label in label_S.unique():
        low, high = score_S[label_S == label], score_S[label_S > label]
        gaps = high[:, None] - low[None, :]
        pairs += gaps.numel()
        right += float((gaps > 0).sum()) + 0.5 * float((gaps == 0).sum())
    return right / pairs if pairs else None


def _calibration(chances: Sequence[float], labels: Sequence[float]) -> float:
    sums = [[0.0, 0.0] for _ in range(BINS)]
    for chance, label in zip(chances, labels, strict=True):
        at = min(BINS - 1, int(chance * BINS))
        sums[at][0] += chance
        sums[at][1] += label
    return sum(abs(chance - label) for chance, label in sums) / len(labels)


def step_warnings(after: Mapping[str, Any]) -> list[str]:
    """What is wrong with a process reward model, as held-out turns show."""
    if after["auc"] is None:
        return [
            "all held-out turns have one label, so nothing shows whether the model tells turns"
            " apart"
        ]
    warnings = []
    if after["auc"] <= 0.6:
        warnings.append(f"held-out AUC {after['auc']:.2f} is hardly better than chance")
    if after["calibration"] > 0.15:
        warnings.append(f"its chances are off: calibration error {after['calibration']:.2f}")
    return warnings

"""Process reward models: the chance to pass, learnt at the end of each turn.

Math-Shepherd (https://arxiv.org/abs/2312.08935), eq. 2: cross-entropy between the model's chance at
the end of a step and the step's label, a share of completions (soft) or whether any was right
(hard). TRL's trainer for such models takes one step for each separator in a text that it tokenises
itself, and hard labels alone, so this one is ours: a plain Trainer on rows with the positions of
turns.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import fmean
from typing import Any

import torch
from torch import Tensor

from agentrl.chat.tokens import Chat
from agentrl.engines.loading import best_device, load_critic
from agentrl.trainers.offline.data.nouns import Steps
from agentrl.trainers.offline.fitting import StagePlan, arguments, optimizers
from agentrl.trainers.offline.reward import padded
from agentrl.trainers.offline.settings import StageSettings
from agentrl.verifiers.models.process_reward import read_turns

_ROWS = 16
_BINS = 10


@dataclass(frozen=True, slots=True)
class StepRow:
    """Tokens of a conversation, and a label at the last token of each turn that has one.

    Attributes:
        ends: positions in `ids`, rising.
        labels: chances to pass, from 0 to 1; one for each end.
    """

    ids: tuple[int, ...]
    ends: tuple[int, ...]
    labels: tuple[float, ...]

    def __post_init__(self) -> None:
        if len(self.ends) != len(self.labels) or not self.ends:
            raise ValueError(f"{len(self.ends)} ends but {len(self.labels)} labels")
        if list(self.ends) != sorted(set(self.ends)) or not 0 <= self.ends[-1] < len(self.ids):
            raise ValueError(f"ends={self.ends} are no rising positions of {len(self.ids)} tokens")


def step_rows(chat: Chat, steps: Steps, *, hard: bool) -> list[StepRow]:
    """The rows of a conversation as `ProcessRewardModel` reads them; turns without a label are left
    out.

    Args:
        hard: labels are 1 where any completion passed, else 0.
    """

    def encode(messages: Sequence[Any]) -> tuple[int, ...]:
        return tuple(chat.template.encode(chat.template.render(messages, generation=False)))

    labels = [None if one is None else float(one > 0) if hard else one for one in steps.labels]
    rows = []
    for row in read_turns(encode, steps.messages, len(steps.prompt)):
        known = [
            (end, label)
            for end, turn in zip(row.ends, row.turns, strict=True)
            if (label := labels[turn]) is not None
        ]
        if known:
            ends, found = zip(*known, strict=True)
            rows.append(StepRow(row.ids, ends, found))
    return rows


def new_process_model(settings: StageSettings, pad_id: int) -> Any:
    """The policy's backbone under a head of one label per token that starts at zero: every chance
    is ½.
    """
    wanted = settings.compute.device
    model = load_critic(settings.model, best_device() if wanted == "auto" else wanted)
    model.config.get_text_config().pad_token_id = pad_id
    model.config.update({"process_reward": True})  # stands in its config.json
    return model


def process_trainer(
    model: Any, pad_id: int, rows: Sequence[StepRow], settings: StageSettings, scratch: Path
) -> tuple[Any, StagePlan]:
    """A Trainer whose loss is the cross-entropy of all labelled turns of an optimizer step, each
    counting alike, however the step is split.
    """
    from datasets import Dataset
    from transformers import Trainer, TrainingArguments

    class _Process(Trainer):
        """The loss at the ends of turns."""

        def get_batch_samples(self, *place: Any) -> tuple[list[dict[str, Tensor]], int]:
            parts, _ = super().get_batch_samples(*place)
            return parts, sum(int(part["step_mask"].sum()) for part in parts)

        def compute_loss(
            self, model: Any, inputs: dict[str, Tensor], *rest: Any, **more: Any
        ) -> Tensor:
            labels_BT, mask_BT = inputs.pop("step_labels"), inputs.pop("step_mask")
            logits_BT: Tensor = model(**inputs, use_cache=False).logits[..., 0].float()
            return process_loss(logits_BT, labels_BT, mask_BT, more.get("num_items_in_batch"))

    plan = StagePlan.of(settings, len(rows))
    table = Dataset.from_list(
        [{"ids": row.ids, "ends": row.ends, "labels": row.labels} for row in rows]
    )
    return (
        _Process(
            model=model,
            args=TrainingArguments(**arguments(settings, plan, scratch)),
            train_dataset=table,
            data_collator=partial(step_batch, pad_id=pad_id),
            compute_loss_func=process_loss,  # says that the loss is of the whole step already
            optimizers=optimizers(settings, model, plan.steps),
        ),
        plan,
    )


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
    """B rows, padded on the right, with labels (B, T) and where they stand (B, T)."""
    batch = padded([row["ids"] for row in rows], pad_id)
    labels_BT = torch.zeros(batch["input_ids"].shape)
    mask_BT = torch.zeros_like(labels_BT, dtype=torch.bool)
    for at, row in enumerate(rows):
        labels_BT[at, row["ends"]] = torch.tensor(row["labels"])
        mask_BT[at, row["ends"]] = True
    return {**batch, "step_labels": labels_BT, "step_mask": mask_BT}


@torch.no_grad()
def chances_of(model: Any, rows: Sequence[StepRow], pad_id: int) -> list[float]:
    """The model's chances at the ends of all rows, one after another."""
    model.eval()
    found: list[float] = []
    for start in range(0, len(rows), _ROWS):
        part = rows[start : start + _ROWS]
        batch = {k: v.to(model.device) for k, v in padded([r.ids for r in part], pad_id).items()}
        chances_BT = model(**batch).logits[..., 0].float().sigmoid().tolist()
        found += [
            chances[end] for chances, row in zip(chances_BT, part, strict=True) for end in row.ends
        ]
    return found


def judged_steps(rows: Sequence[StepRow], chances: Sequence[float]) -> dict[str, Any]:
    """How good chances are on held-out turns.

    Returns:
        "auc": the share of pairs of turns with different labels of which the one with the higher
        label has the higher chance, ties counting half (for labels 0 and 1 the area under the ROC
        curve; None where all labels are equal); "loss": cross-entropy in nats per turn;
        "calibration": the expected calibration error in ten bins; "mean" of chances, "labelled"
        of labels; "turns".
    """
    labels = [label for row in rows for label in row.labels]
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
    bins: list[list[tuple[float, float]]] = [[] for _ in range(_BINS)]
    for chance, label in zip(chances, labels, strict=True):
        bins[min(_BINS - 1, int(chance * _BINS))].append((chance, label))
    return sum(abs(sum(c for c, _ in one) - sum(y for _, y in one)) for one in bins) / len(labels)


def signs_of_steps(found: Mapping[str, Any]) -> list[str]:
    """What is wrong with a process reward model, as held-out turns show."""
    if not found:
        return []
    if found["auc"] is None:
        return [
            "all held-out turns have one label, so nothing says whether the model tells them apart"
        ]
    said = []
    if found["auc"] <= 0.6:
        said.append(f"held-out AUC {found['auc']:.2f} is hardly better than chance")
    if found["calibration"] > 0.15:
        said.append(f"its chances are off: calibration error {found['calibration']:.2f}")
    return said

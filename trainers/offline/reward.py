"""Reward models: Bradley-Terry on one head or on an ensemble of heads, and how good they are.

Letters: B pairs, K heads.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path
from statistics import fmean
from typing import Any

import torch
from torch import Tensor

from agentrl.chat.tokens import Chat
from agentrl.engines.loading import find_model, set_dropout
from agentrl.engines.processor import avoid_broken_amx
from agentrl.trainers.models.loading import device_of
from agentrl.trainers.models.value_model import equip_classifier, save_value_model
from agentrl.trainers.offline.base import Stage, padding_id
from agentrl.trainers.offline.objectives import bradley_terry
from agentrl.trainers.offline.rows import PairRow, TokenRow, encode_messages, pad_with_attention

SCORED_ROWS = 16
"""Conversations of one forward pass of a measurement."""


class RewardStage(Stage):
    """Learns which of two conversations is better."""

    examples = "pairs"

    def encode(self, chat: Chat, example: Any) -> Sequence[PairRow]:
        """Both conversations of a pair, rendered as `RewardModel.encode` renders them; a reward is
        read at the last token.
        """
        sides = []
        for response in (example.chosen, example.rejected):
            ids = encode_messages(chat, example.prompt + response.messages)
            sides.append(TokenRow(ids, (0,) * (len(ids) - 1) + (1,)))
        return [PairRow(sides[0], sides[1], example.margin, example.subset)]

    def build(self, chat: Chat, rows: Sequence[Any], scratch: Path) -> Any:
        """TRL's reward trainer; each head of an ensemble sees its own draw of the pairs."""
        from datasets import Dataset
        from transformers import TrainingArguments
        from trl import RewardConfig, RewardTrainer

        self.pad_id = padding_id(chat)
        self.model = self.new_model(self.pad_id)
        reward = self.settings.reward
        table = [
            {
                "chosen_ids": row.chosen.ids,
                "rejected_ids": row.rejected.ids,
                "margin": (row.margin or 0.0) if reward.margin else 0.0,
                "weights": weights_K,
            }
            for row, weights_K in zip(
                rows, draw_pairs(len(rows), reward.heads, self.settings.seed), strict=True
            )
        ]
        common: dict[str, Any] = {
            "model": self.model,
            "train_dataset": Dataset.from_list(table),
            "data_collator": partial(reward_batch, pad_id=self.pad_id, heads=reward.heads),
            "optimizers": self.optimizers(len(rows)),
        }
        arguments = self.arguments(len(rows), scratch)
        if reward.heads > 1:
            trainer = ensemble_trainer(reward.center)
            return trainer(args=TrainingArguments(**arguments), **common)
        config = RewardConfig(
            **arguments,
            max_length=None,
            center_rewards_coefficient=reward.center or None,
            disable_dropout=False,  # `set_dropout` has decided
        )
        return RewardTrainer(args=config, processing_class=chat.tokenizer, **common)

    def new_model(self, pad_id: int) -> Any:
        """The policy's backbone under new scalar heads, drawn from the seed."""
        from transformers import AutoConfig, AutoModelForSequenceClassification
        from transformers.utils import logging

        avoid_broken_amx()
        settings, folder = self.settings, find_model(self.settings.model)
        # Left open, transformers would ask on stdin whether to run code of the folder.
        local: dict[str, Any] = {"local_files_only": True, "trust_remote_code": False}
        config = AutoConfig.from_pretrained(folder, **local)
        config.num_labels = settings.reward.heads
        config.reward_heads = settings.reward.heads
        config.get_text_config().pad_token_id = pad_id
        set_dropout(config, settings.compute.dropout)
        verbosity = logging.get_verbosity()
        logging.set_verbosity_error()  # new heads would be reported as missing
        logging.disable_progress_bar()
        try:
            with self.seeded():
                model = AutoModelForSequenceClassification.from_pretrained(
                    folder, config=config, dtype=torch.float32, **local
                )
                set_dropout(model, settings.compute.dropout)
                return equip_classifier(model.to(device_of(settings.compute)), settings.compute)
        finally:
            logging.set_verbosity(verbosity)

    def measure(self, rows: Sequence[Any]) -> dict[str, Any]:
        """See `measure_rewards`."""
        chosen, rejected = (
            rewards_of(self.model, [side.ids for side in sides], self.pad_id)
            for sides in ([row.chosen for row in rows], [row.rejected for row in rows])
        )
        return measure_rewards(rows, chosen, rejected)

    def warnings_after(self, before: Mapping[str, Any], after: Mapping[str, Any]) -> list[str]:
        """See Stage."""
        return reward_warnings(after) if after else []

    def save(self, folder: Path) -> None:
        """See Stage."""
        save_value_model(self.model, folder)


def draw_pairs(rows: int, heads: int, seed: int) -> list[list[float]]:
    """How often each head draws each row, with replacement; one head takes each once."""
    if heads == 1:
        return [[1.0]] * rows
    generator = torch.Generator().manual_seed(seed % 2**63)
    counts = [
        torch.bincount(torch.randint(rows, (rows,), generator=generator), minlength=rows)
        for _ in range(heads)
    ]
    return torch.stack(counts, 1).float().tolist()


def ensemble_trainer(center: float) -> Any:
    """A Trainer class for several heads, which TRL's refuses."""
    from transformers import Trainer

    class Ensemble(Trainer):
        """The loss of every head, weighted by how often the head drew the pair."""

        def compute_loss(
            self, model: Any, inputs: dict[str, Tensor], *args: Any, **kwargs: Any
        ) -> Tensor:
            weights_BK, margin_B1 = inputs.pop("weights"), inputs.pop("margin")
            logits_BK: Tensor = model(**inputs, use_cache=False).logits
            chosen_BK, rejected_BK = logits_BK.float().chunk(2)
            losses_BK = bradley_terry(chosen_BK, rejected_BK, margin_B1, center)
            return (weights_BK * losses_BK).mean()

    return Ensemble


def reward_batch(rows: Sequence[Mapping[str, Any]], pad_id: int, heads: int) -> dict[str, Tensor]:
    """B pairs as 2B right-padded rows, the chosen ones first, with margins."""
    ids = [row[f"{side}_ids"] for side in ("chosen", "rejected") for row in rows]
    batch = pad_with_attention(ids, pad_id)
    margin_B = torch.tensor([row["margin"] for row in rows])
    if heads == 1:
        return {**batch, "margin": margin_B}
    weights_BK = torch.tensor([row["weights"] for row in rows])
    return {**batch, "margin": margin_B[:, None], "weights": weights_BK}


@torch.no_grad()
def rewards_of(model: Any, ids: Sequence[Sequence[int]], pad_id: int) -> list[float]:
    """The mean reward over heads of whole conversations."""
    model.eval()
    rewards: list[float] = []
    for start in range(0, len(ids), SCORED_ROWS):
        batch = pad_with_attention(ids[start : start + SCORED_ROWS], pad_id)
        batch = {name: tensor.to(model.device) for name, tensor in batch.items()}
        rewards += model(**batch).logits.float().mean(-1).tolist()
    return rewards


def measure_rewards(
    rows: Sequence[PairRow], chosen: Sequence[float], rejected: Sequence[float]
) -> dict[str, Any]:
    """How good rewards are on held-out pairs.

    Returns:
        "accuracy" with "subsets" (name -> [right, pairs]); "length": accuracies where the chosen
        conversation is the longer and where it is the shorter one, their mean ("balanced"), and
        that of always taking the longer one ("longest"); "calibration": the expected calibration
        error of σ(r_chosen - r_rejected), in ten bins; "margin" and "mean" of rewards.
    """
    right = [a > b for a, b in zip(chosen, rejected, strict=True)]
    subsets: dict[str, list[int]] = defaultdict(lambda: [0, 0])
    for row, is_right in zip(rows, right, strict=True):
        subsets[row.subset][0] += is_right
        subsets[row.subset][1] += 1
    longer: list[bool] = []
    shorter: list[bool] = []
    for row, is_right in zip(rows, right, strict=True):
        difference = row.chosen.longest - row.rejected.longest
        if difference:
            (longer if difference > 0 else shorter).append(is_right)
    by_length = [fmean(part) for part in (longer, shorter) if part]
    margins = [a - b for a, b in zip(chosen, rejected, strict=True)]
    return {
        "accuracy": fmean(right),
        "subsets": {name: counts for name, counts in sorted(subsets.items()) if name},
        "length": {
            "chosen_longer": fmean(longer) if longer else None,
            "chosen_shorter": fmean(shorter) if shorter else None,
            "balanced": fmean(by_length) if by_length else None,
            "longest": len(longer) / len(rows),
        },
        "calibration": calibration_error(
            1 / (1 + math.exp(-min(50, max(-50, m)))) for m in margins
        ),
        "margin": fmean(margins),
        "mean": fmean([*chosen, *rejected]),
        "pairs": len(rows),
    }


def calibration_error(chances: Iterable[float], bins: int = 10) -> float:
    """Expected calibration error of the chances given to responses that were preferred.

    Each pair is seen from its likelier side: confidence max(p, 1 - p), right where p > 0.5.
    """
    groups: dict[int, list[tuple[float, bool]]] = defaultdict(list)
    for chance in chances:
        sure = max(chance, 1 - chance)
        groups[min(bins - 1, int((sure - 0.5) * 2 * bins))].append((sure, chance > 0.5))
    total = sum(map(len, groups.values()))
    return sum(
        abs(sum(sure for sure, _ in group) - sum(right for _, right in group)) / total
        for group in groups.values()
    )


def reward_warnings(after: Mapping[str, Any]) -> list[str]:
    """What is wrong with a reward model, as held-out pairs show."""
    warnings, length = [], after["length"]
    if after["accuracy"] <= 0.5:
        warnings.append(f"held-out accuracy {after['accuracy']:.2f} is no better than chance")
    longer, shorter = length["chosen_longer"], length["chosen_shorter"]
    if longer is not None and shorter is not None and abs(longer - shorter) > 0.2:
        warnings.append(
            f"accuracy follows length: {longer:.2f} where the chosen response is the longer one,"
            f" {shorter:.2f} where it is the shorter one"
        )
    if after["calibration"] > 0.15:
        warnings.append(
            f"its margins are not probabilities: calibration error {after['calibration']:.2f}"
        )
    return warnings

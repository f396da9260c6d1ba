"""Reward models: Bradley-Terry on one head or on an ensemble of heads, and how good they are."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import fmean
from typing import Any

import torch
from torch import Tensor

from agentrl.chat.tokens import Chat
from agentrl.engines.loading import best_device, find_model
from agentrl.trainers.offline.data.nouns import Pair
from agentrl.trainers.offline.fitting import StagePlan, arguments, optimizers
from agentrl.trainers.offline.objectives import bradley_terry
from agentrl.trainers.offline.settings import StageSettings


@dataclass(frozen=True, slots=True)
class RewardRow:
    """Two whole conversations as the reward model will read them when it judges."""

    chosen: tuple[int, ...]
    rejected: tuple[int, ...]
    margin: float
    subset: str

    @property
    def ids(self) -> tuple[int, ...]:
        """The longer of the two."""
        return max(self.chosen, self.rejected, key=len)


def reward_row(chat: Chat, pair: Pair) -> RewardRow:
    """Both conversations of a pair, rendered as `RewardModel.encode` renders them."""

    def encode(messages: Sequence[Any]) -> tuple[int, ...]:
        return tuple(chat.template.encode(chat.template.render(messages, generation=False)))

    chosen, rejected = (encode(pair.prompt + one.messages) for one in (pair.chosen, pair.rejected))
    return RewardRow(chosen, rejected, pair.margin or 0.0, pair.subset)


def new_reward_model(settings: StageSettings, pad_id: int) -> Any:
    """The policy's backbone under new scalar heads, drawn from the seed."""
    from transformers import AutoConfig, AutoModelForSequenceClassification
    from transformers.utils import logging

    folder = find_model(settings.model)
    config = AutoConfig.from_pretrained(folder, local_files_only=True)
    config.num_labels = settings.reward.heads
    config.reward_heads = settings.reward.heads
    config.get_text_config().pad_token_id = pad_id
    before = logging.get_verbosity()
    logging.set_verbosity_error()  # new heads are reported as missing
    logging.disable_progress_bar()
    try:
        with torch.random.fork_rng():
            torch.manual_seed(settings.seed % 2**63)
            model = AutoModelForSequenceClassification.from_pretrained(
                folder, config=config, dtype=torch.float32, local_files_only=True
            )
    finally:
        logging.set_verbosity(before)
    wanted = settings.compute.device
    return model.to(best_device() if wanted == "auto" else wanted)


def reward_trainer(
    model: Any, tokenizer: Any, rows: Sequence[RewardRow], settings: StageSettings, scratch: Path
) -> tuple[Any, StagePlan]:
    """TRL's reward trainer on our rows; each head of an ensemble sees its own draw of the pairs."""
    from datasets import Dataset
    from transformers import TrainingArguments
    from trl import RewardConfig, RewardTrainer

    plan = StagePlan.of(settings, len(rows))
    heads = settings.reward.heads
    drawn = _draws(len(rows), heads, settings.seed)
    table = Dataset.from_list(
        [
            {
                "chosen_ids": row.chosen,
                "rejected_ids": row.rejected,
                "margin": row.margin if settings.reward.margin else 0.0,
                "weights": weights,
            }
            for row, weights in zip(rows, drawn, strict=True)
        ]
    )
    given = {
        "model": model,
        "train_dataset": table,
        "data_collator": partial(reward_batch, pad_id=tokenizer.pad_token_id, heads=heads),
        "optimizers": optimizers(settings, model, plan.steps),
    }
    common, center = arguments(settings, plan, scratch), settings.reward.center
    if heads > 1:
        return _ensemble_trainer(center)(args=TrainingArguments(**common), **given), plan
    config = RewardConfig(**common, max_length=None, center_rewards_coefficient=center or None)
    return RewardTrainer(args=config, processing_class=tokenizer, **given), plan


def _draws(rows: int, heads: int, seed: int) -> list[list[float]]:
    """How often each head draws each row, with replacement; one head takes each once."""
    if heads == 1:
        return [[1.0]] * rows
    generator = torch.Generator().manual_seed(seed % 2**63)
    found = torch.zeros(heads, rows)
    for head in range(heads):
        drawn = torch.randint(rows, (rows,), generator=generator)
        found[head] = torch.bincount(drawn, minlength=rows).float()
    return found.T.tolist()


def _ensemble_trainer(center: float) -> Any:
    """A Trainer of several heads, which TRL's refuses."""
    from transformers import Trainer

    class _Ensemble(Trainer):
        """The loss of every head, weighted by how often the head drew the pair."""

        def compute_loss(
            self, model: Any, inputs: dict[str, Tensor], *rest: Any, **more: Any
        ) -> Tensor:
            weights_BK, margin_B1 = inputs.pop("weights"), inputs.pop("margin")
            logits_BK: Tensor = model(**inputs, use_cache=False).logits
            chosen_BK, rejected_BK = logits_BK.float().chunk(2)
            lost_BK = bradley_terry(chosen_BK, rejected_BK, margin_B1, center)
            return (weights_BK * lost_BK).mean()

    return _Ensemble


def reward_batch(rows: Sequence[Mapping[str, Any]], pad_id: int, heads: int) -> dict[str, Tensor]:
    """B pairs as 2B right-padded rows, the chosen ones first, with margins."""
    all_ids = [row[f"{side}_ids"] for side in ("chosen", "rejected") for row in rows]
    batch = padded(all_ids, pad_id)
    margin_B = torch.tensor([row["margin"] for row in rows])
    if heads == 1:
        return {**batch, "margin": margin_B}
    weights_BK = torch.tensor([row["weights"] for row in rows])
    return {**batch, "margin": margin_B[:, None], "weights": weights_BK}


def padded(rows: Sequence[Sequence[int]], pad_id: int) -> dict[str, Tensor]:
    """Right-padded ids and their attention mask."""
    width = max(map(len, rows))
    return {
        "input_ids": torch.tensor([[*row, *[pad_id] * (width - len(row))] for row in rows]),
        "attention_mask": torch.tensor([[1] * len(r) + [0] * (width - len(r)) for r in rows]),
    }


@torch.no_grad()
def rewards_of(model: Any, rows: Sequence[Sequence[int]], pad_id: int) -> list[float]:
    """The mean reward over heads of whole conversations."""
    model.eval()
    found: list[float] = []
    for start in range(0, len(rows), 16):
        batch = padded(rows[start : start + 16], pad_id)
        batch = {name: tensor.to(model.device) for name, tensor in batch.items()}
        found += model(**batch).logits.float().mean(-1).tolist()
    return found


def judged(rows: Sequence[RewardRow], chosen: Sequence[float], rejected: Sequence[float]) -> Any:
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
        if len(row.chosen) != len(row.rejected):
            (longer if len(row.chosen) > len(row.rejected) else shorter).append(is_right)
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


def signs(found: Mapping[str, Any]) -> list[str]:
    """What is wrong with a reward model, as held-out pairs show."""
    if not found:
        return []
    said, length = [], found["length"]
    if found["accuracy"] <= 0.5:
        said.append(f"held-out accuracy {found['accuracy']:.2f} is no better than chance")
    longer, shorter = length["chosen_longer"], length["chosen_shorter"]
    if longer is not None and shorter is not None and abs(longer - shorter) > 0.2:
        said.append(
            f"accuracy follows length: {longer:.2f} where the chosen response is the longer one,"
            f" {shorter:.2f} where it is the shorter one"
        )
    if found["calibration"] > 0.15:
        said.append(f"its margins are no chances: calibration error {found['calibration']:.2f}")
    return said

"""Direct alignment: our token rows through TRL's trainers, or through our own loss where TRL has
none.

TRL's trainers tokenise text themselves; these hand them ids and masks instead. Observations have
mask 0: no loss reads them.
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from agentrl.trainers.models.scoring import token_logprobs
from agentrl.trainers.offline.data.tokens import LabelRow, PairRow, TokenRow
from agentrl.trainers.offline.fitting import StagePlan, arguments, optimizers
from agentrl.trainers.offline.objectives import Objective, PairScores
from agentrl.trainers.offline.settings import StageSettings

BASELINE_DECAY = 0.9
"""Of β-DPO's running mean of margins."""


class Rows(NamedTuple):
    """Right-padded rows: what `token_logprobs` scores."""

    ids_BT: Tensor
    mask_BT: Tensor

    @classmethod
    def of(cls, rows: Sequence[TokenRow], device: torch.device | str = "cpu") -> Rows:
        """Pad rows to the longest."""
        width = max(len(row.ids) for row in rows)
        ids = [[*row.ids, *[0] * (width - len(row.ids))] for row in rows]
        mask = [[*row.mask, *[0] * (width - len(row.mask))] for row in rows]
        return cls(
            torch.tensor(ids, device=device), torch.tensor(mask, device=device, dtype=torch.bool)
        )


class Alignment(NamedTuple):
    """What one alignment needs.

    Attributes:
        tokenizer: the policy's.
        reference: frozen; None where the objective reads none, and with adapters, whose reference
            is the policy without them.
        options: coefficients of the objective.
    """

    model: Any
    tokenizer: Any
    reference: Any
    objective: Objective
    options: dict[str, float]


def aligner(
    parts: Alignment, rows: Sequence[Any], settings: StageSettings, plan: StagePlan, scratch: Path
) -> Any:
    """A Trainer for the objective: TRL's where it has the loss, else one with ours."""
    from datasets import Dataset

    common = arguments(settings, plan, scratch)
    order = random.Random(settings.seed).sample(range(len(rows)), len(rows))
    table = Dataset.from_list([plain_row(rows[at]) for at in order])
    pad_id = parts.tokenizer.pad_token_id or 0
    given: dict[str, Any] = {
        "model": parts.model,
        "train_dataset": table,
        "optimizers": optimizers(settings, parts.model, plan.steps),
    }
    objective = parts.objective
    if objective.trl is None:
        from transformers import TrainingArguments

        own = own_trainer(parts)
        return own(
            args=TrainingArguments(**common),
            data_collator=partial(pair_batch, pad_id=pad_id),
            **given,
        )
    given |= {"ref_model": parts.reference, "processing_class": parts.tokenizer}
    theirs = objective.trl(parts.options)
    from trl import DPOConfig, KTOConfig

    if objective.loss is None:
        # TRL insists on this order, so that a row keeps its neighbours: the rows come shuffled.
        kto = KTOConfig(**common, **theirs, max_length=None, train_sampling_strategy="sequential")
        collate = partial(label_batch, pad_id=pad_id)
        return _without_copy(token_exact("KTOTrainer")(args=kto, data_collator=collate, **given))
    dpo = DPOConfig(**common, **theirs, max_length=None)
    collate = partial(pair_batch, pad_id=pad_id)
    return _without_copy(token_exact("DPOTrainer")(args=dpo, data_collator=collate, **given))


def _without_copy(trainer: Any) -> Any:
    """Without TRL's frozen copy of the adapters: they are new, so the policy without them is the
    reference, and a Trainer that finds two adapters in a checkpoint leaves the trained one out.
    """
    if "ref" in getattr(trainer.model, "peft_config", {}):
        trainer.model.delete_adapter("ref")
    return trainer


def token_exact(name: str) -> Any:
    """A trainer of TRL that takes its rows as they are."""
    import trl

    def as_it_is(self: Any, dataset: Any, *args: Any) -> Any:
        return dataset

    return type(name, (getattr(trl, name),), {"_prepare_dataset": as_it_is})


def own_trainer(parts: Alignment) -> Any:
    """A Trainer that minimises one of our own losses of pairs."""
    from transformers import Trainer, TrainerCallback
    from transformers.trainer_callback import ExportableState

    class _Baseline(TrainerCallback, ExportableState):
        """β-DPO's running mean of margins; a Trainer writes its state into each checkpoint."""

        value = 0.0

        def state(self) -> dict[str, Any]:
            return {"args": {}, "attributes": {"value": self.value}}

        def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            kept = state.stateful_callbacks.get(type(self).__name__, self.state())
            self.value = kept["attributes"]["value"]

    class _OwnLoss(Trainer):
        def __init__(self, **given: Any) -> None:
            self.baseline = _Baseline()
            super().__init__(**given, callbacks=[self.baseline])

        def compute_loss(
            self, model: Any, inputs: Mapping[str, Tensor], *args: Any, **kwargs: Any
        ) -> Tensor:
            scores = pair_scores(model, inputs, parts)
            options = dict(parts.options)
            if "alpha" in options:
                options["baseline"] = self.baseline.value
                seen = options["beta"] * float(scores.delta_B.detach().mean())
                self.baseline.value += (1 - BASELINE_DECAY) * (seen - self.baseline.value)
            assert parts.objective.loss is not None
            return parts.objective.loss(scores, **options).mean()

    return _OwnLoss


def pair_scores(model: Any, inputs: Mapping[str, Tensor], parts: Alignment) -> PairScores:
    """Scores of a batch of pairs under the policy, with gradient, and under the reference."""
    rows = Rows(inputs["input_ids"], inputs["completion_mask"].bool())
    now_BT = token_logprobs(model, rows, entropy="off").logprobs_BT
    if not parts.objective.reference:
        return PairScores.from_tokens(now_BT, rows.mask_BT)
    with torch.no_grad():
        then_BT = token_logprobs(parts.reference, rows, entropy="off").logprobs_BT
    return PairScores.from_tokens(now_BT, rows.mask_BT, then_BT)


def plain_row(row: PairRow | LabelRow) -> dict[str, Any]:
    """A row as columns of a table."""
    if isinstance(row, LabelRow):
        return {"ids": row.row.ids, "mask": row.row.mask, "label": row.desirable}
    return {
        f"{side}_{part}": getattr(getattr(row, side), part)
        for side in ("chosen", "rejected")
        for part in ("ids", "mask")
    }


def pair_batch(rows: Sequence[Mapping[str, Any]], pad_id: int) -> dict[str, Tensor]:
    """B pairs as 2B right-padded rows, the chosen ones first."""
    sides = ("chosen", "rejected")
    return _padded([(row[f"{s}_ids"], row[f"{s}_mask"]) for s in sides for row in rows], pad_id)


def label_batch(rows: Sequence[Mapping[str, Any]], pad_id: int) -> dict[str, Tensor]:
    """B labelled rows, and B mismatched ones for KTO's z₀: each prompt with its neighbour's
    response. A row alone has no neighbour: its mismatched one says nothing, which leaves z₀ at 0.
    """
    own = [(list(row["ids"]), list(row["mask"])) for row in rows]
    mixed = []
    for (ids, mask), (other_ids, other_mask) in zip(own, [own[-1], *own[:-1]], strict=True):
        here, there = mask.index(1), other_mask.index(1)
        said = other_mask[there:] if len(own) > 1 else [0] * len(other_mask[there:])
        mixed.append((ids[:here] + other_ids[there:], mask[:here] + said))
    kl = {f"KL_{name}": tensor for name, tensor in _padded(mixed, pad_id).items()}
    return {**_padded(own, pad_id), **kl, "label": torch.tensor([row["label"] for row in rows])}


def _padded(rows: Sequence[tuple[Sequence[int], Sequence[int]]], pad_id: int) -> dict[str, Tensor]:
    width = max(len(ids) for ids, _ in rows)

    def table(parts: Sequence[Sequence[int]], fill: int) -> Tensor:
        return torch.tensor([[*part, *[fill] * (width - len(part))] for part in parts])

    ids, masks = zip(*rows, strict=True)
    return {
        "input_ids": table(ids, pad_id),
        "attention_mask": table([[1] * len(part) for part in ids], 0),
        "completion_mask": table(masks, 0),
    }

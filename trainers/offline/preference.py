"""Direct alignment: our token rows through TRL's trainers, or through our own loss where TRL has
none.

TRL's trainers tokenise text themselves; here they receive ids and masks instead. Observations have
mask 0, so no loss reads them. Letters: B pairs (or labelled responses), T token positions.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from difflib import SequenceMatcher
from functools import partial
from pathlib import Path
from statistics import fmean
from typing import Any

import torch
from torch import Tensor

from agentrl.chat.tokens import Chat
from agentrl.errors import ConfigError, UserError
from agentrl.trainers.models.loading import load_policy, reference_of, save_policy
from agentrl.trainers.models.scoring import token_logprobs
from agentrl.trainers.offline.base import Stage
from agentrl.trainers.offline.objectives import PairScores, find_objective
from agentrl.trainers.offline.rows import (
    MaskedRows,
    PairRow,
    Row,
    TokenRow,
    encode_response,
    pad,
    pad_with_attention,
)
from agentrl.trainers.offline.settings import StageSettings
from agentrl.trainers.offline.sft import response_logprobs

BASELINE_DECAY = 0.9
"""Decay of β-DPO's running mean of margins."""
DISPLACED_NATS = 0.02
"""Mean loss of log-probability per chosen token from which displacement is reported: 2 % of each
token's probability, or a fifth of a response of ten tokens. Rounding, a bfloat16 reference and a
stage that hardly moved stay below it."""


class PreferenceStage(Stage):
    """Learns from pairs of responses, or from labelled ones (KTO).

    Attributes:
        reference: the frozen policy of the start.
    """

    def __init__(self, settings: StageSettings) -> None:
        super().__init__(settings)
        name = settings.objective
        self.objective, self.options = find_objective(name, settings.loss)
        self.reference: Any = None
        self.examples = "pairs" if self.objective.loss else "labels"
        if self.objective.of_batch and settings.micro_rows not in (0, settings.batch_size):
            raise ConfigError(
                f"micro_rows={settings.micro_rows}: the loss of objective {name!r} reads its whole"
                " batch, so set micro_rows=0",
                setting="micro_rows",
            )
        if self.examples == "labels" and settings.batch_size < 2:
            raise ConfigError(
                "batch_size=1: KTO compares responses of a batch, so give 2 or more",
                setting="batch_size",
            )

    def encode(self, chat: Chat, example: Any) -> Sequence[Row]:
        """See Stage."""
        if self.examples == "labels":
            row = encode_response(chat, example.prompt, example.response)
            return [TokenRow(row.ids, row.mask, (float(example.desirable),))]
        chosen = encode_response(chat, example.prompt, example.chosen)
        rejected = encode_response(chat, example.prompt, example.rejected)
        return [PairRow(chosen, rejected, example.margin, example.subset)]

    def build(self, chat: Chat, rows: Sequence[Any], scratch: Path) -> Any:
        """See Stage."""
        if self.examples == "labels" and len(rows) < 2:
            raise UserError(
                "KTO compares responses of a batch and got 1 row to train on: give more"
            )
        settings = self.settings
        with self.seeded():
            self.model = load_policy(settings.model, settings.compute)
        self.reference = reference_of(self.model, settings.compute, settings.model)
        trainer = self.trainer(chat.tokenizer, rows, scratch)
        if settings.compute.dropout:
            drop_alike(trainer, [self.model, self.reference])
        return trainer

    def trainer(self, tokenizer: Any, rows: Sequence[Any], scratch: Path) -> Any:
        """A Trainer for the objective: TRL's where it has the loss, else one with ours."""
        from datasets import Dataset
        from transformers import TrainingArguments
        from trl import DPOConfig, KTOConfig

        arguments = self.arguments(len(rows), scratch)
        order = random.Random(self.settings.seed).sample(range(len(rows)), len(rows))
        pad_id = tokenizer.pad_token_id or 0
        common: dict[str, Any] = {
            "model": self.model,
            "train_dataset": Dataset.from_list([as_columns(rows[index]) for index in order]),
            "data_collator": partial(
                pair_batch if self.examples == "pairs" else label_batch, pad_id=pad_id
            ),
            "optimizers": self.optimizers(len(rows)),
        }
        if self.objective.trl is None:
            return self._own_trainer()(args=TrainingArguments(**arguments), **common)
        # TRL switches adapters off by itself, and takes a reference only where there are none.
        common["ref_model"] = None if self.settings.compute.lora_rank else self.reference
        common["processing_class"] = tokenizer
        # Rows are whole already, and `set_dropout` has decided about dropout.
        arguments |= {"max_length": None, "disable_dropout": False}
        arguments |= self.objective.trl(self.options)
        if self.examples == "pairs":
            return _without_copy(token_exact("DPOTrainer")(args=DPOConfig(**arguments), **common))
        # TRL insists on this order, so that a row keeps its neighbours: the rows come shuffled.
        arguments["train_sampling_strategy"] = "sequential"
        return _without_copy(token_exact("KTOTrainer")(args=KTOConfig(**arguments), **common))

    def _own_trainer(self) -> Any:
        """A Trainer class that minimises one of our own losses of pairs."""
        from transformers import Trainer, TrainerCallback
        from transformers.trainer_callback import ExportableState

        stage = self

        class Baseline(TrainerCallback, ExportableState):
            """β-DPO's running mean of margins; a Trainer writes its state into each checkpoint."""

            value = 0.0

            def state(self) -> dict[str, Any]:
                return {"args": {}, "attributes": {"value": self.value}}

            def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
                saved = state.stateful_callbacks.get(type(self).__name__, self.state())
                self.value = saved["attributes"]["value"]

        class OwnLoss(Trainer):
            def __init__(self, **kwargs: Any) -> None:
                self.baseline = Baseline()
                super().__init__(**kwargs, callbacks=[self.baseline])

            def compute_loss(
                self, model: Any, inputs: Mapping[str, Tensor], *args: Any, **kwargs: Any
            ) -> Tensor:
                scores = stage.pair_scores(model, inputs)
                options = dict(stage.options)
                if "alpha" in options:
                    options["baseline"] = self.baseline.value
                    margin = options["beta"] * float(scores.delta_B.detach().mean())
                    self.baseline.value += (1 - BASELINE_DECAY) * (margin - self.baseline.value)
                assert stage.objective.loss is not None
                return stage.objective.loss(scores, **options).mean()

        return OwnLoss

    def pair_scores(self, model: Any, inputs: Mapping[str, Tensor]) -> PairScores:
        """Scores of a batch of pairs under the policy, with gradient, and under the reference."""
        rows = MaskedRows(inputs["input_ids"], inputs["completion_mask"].bool())
        policy_BT = token_logprobs(model, rows, entropy="off").logprobs_BT
        if not self.objective.reference:
            return PairScores.from_tokens(policy_BT, rows.mask_BT)
        with torch.no_grad():
            reference_BT = token_logprobs(self.reference, rows, entropy="off").logprobs_BT
        return PairScores.from_tokens(policy_BT, rows.mask_BT, reference_BT)

    def measure(self, rows: Sequence[Any]) -> dict[str, Any]:
        """See `compare_pairs` and `compare_labels`."""
        tokens = self.settings.compute.micro_tokens
        if self.examples == "labels":
            then = response_logprobs(self.reference, rows, tokens)
            return compare_labels(rows, then, response_logprobs(self.model, rows, tokens))
        both = [row.chosen for row in rows] + [row.rejected for row in rows]
        then = response_logprobs(self.reference, both, tokens)
        return compare_pairs(rows, then, response_logprobs(self.model, both, tokens))

    def warnings_before(self, rows: Sequence[Any]) -> list[str]:
        """See Stage."""
        if self.examples == "labels":
            return []
        # Only losses on summed log-probabilities with a reference share one scale of β.
        is_summed = self.objective.options["beta"] < 1 and self.objective.reference
        return list(pair_warnings(rows, self.options["beta"] if is_summed else None))

    def warnings_after(self, before: Mapping[str, Any], after: Mapping[str, Any]) -> list[str]:
        """See Stage."""
        warnings = []
        if before and abs(before["margin"]) > 1e-3:  # equal models differ by rounding alone
            warnings.append(
                f"policy and reference differ before training (margin {before['margin']:+.4f} nats)"
            )
        return warnings + (list(outcome_warnings(after, self.settings.objective)) if after else [])

    def save(self, folder: Path) -> None:
        """See Stage."""
        save_policy(self.model, folder)


def drop_alike(trainer: Any, models: Sequence[torch.nn.Module]) -> None:
    """Let every forward pass of a training step drop out the same positions, in policy and
    reference: where both are equal, their ratio is then exactly 1.
    """
    step = trainer.training_step

    def training_step(*args: Any, **kwargs: Any) -> Tensor:
        with _same_dropout(models):
            loss: Tensor = step(*args, **kwargs)
        return loss

    trainer.training_step = training_step


@contextmanager
def _same_dropout(models: Sequence[torch.nn.Module]) -> Iterator[None]:
    """Start every forward pass from the same random state, in training mode."""
    device = next(models[0].parameters()).device
    generator = torch.cuda if device.type == "cuda" else torch
    state = generator.get_rng_state()
    hooks = [
        model.register_forward_pre_hook(lambda *_: generator.set_rng_state(state))
        for model in models
    ]
    modes = [model.training for model in models]
    try:
        for model in models:
            model.train()
        yield
    finally:
        for model, hook, mode in zip(models, hooks, modes, strict=True):
            hook.remove()
            model.train(mode)


def token_exact(name: str) -> Any:
    """A trainer of TRL that takes its rows as they are."""
    import trl

    def keep(self: Any, dataset: Any, *args: Any) -> Any:
        return dataset

    return type(name, (getattr(trl, name),), {"_prepare_dataset": keep})


def _without_copy(trainer: Any) -> Any:
    """Delete TRL's frozen copy of the adapters: they are new, so the policy without them is the
    reference, and a Trainer that finds two adapters in a checkpoint leaves the trained one out.
    """
    if "ref" in getattr(trainer.model, "peft_config", {}):
        trainer.model.delete_adapter("ref")
    return trainer


# --- batches


def as_columns(row: Row) -> dict[str, Any]:
    """A row as columns of a table."""
    if isinstance(row, TokenRow):
        return {"ids": row.ids, "mask": row.mask, "label": bool(row.targets[0])}
    return {
        "chosen_ids": row.chosen.ids,
        "chosen_mask": row.chosen.mask,
        "rejected_ids": row.rejected.ids,
        "rejected_mask": row.rejected.mask,
    }


def pair_batch(rows: Sequence[Mapping[str, Any]], pad_id: int) -> dict[str, Tensor]:
    """B pairs as 2B right-padded rows, the chosen ones first."""
    sides = ("chosen", "rejected")
    ids = [row[f"{side}_ids"] for side in sides for row in rows]
    return _padded(ids, [row[f"{side}_mask"] for side in sides for row in rows], pad_id)


def label_batch(rows: Sequence[Mapping[str, Any]], pad_id: int) -> dict[str, Tensor]:
    """B labelled rows, and B mismatched ones for KTO's z₀: each prompt with its neighbour's
    response. A row alone has no neighbour: its mismatched row has no trained token, so z₀ is 0.
    """
    ids, masks = [list(row["ids"]) for row in rows], [list(row["mask"]) for row in rows]
    mixed_ids, mixed_masks = [], []
    for index in range(len(rows)):
        prompt, other_prompt = masks[index].index(1), masks[index - 1].index(1)
        response_mask = masks[index - 1][other_prompt:]
        if len(rows) == 1:
            response_mask = [0] * len(response_mask)
        mixed_ids.append(ids[index][:prompt] + ids[index - 1][other_prompt:])
        mixed_masks.append(masks[index][:prompt] + response_mask)
    mixed = _padded(mixed_ids, mixed_masks, pad_id)
    return {
        **_padded(ids, masks, pad_id),
        **{f"KL_{name}": tensor for name, tensor in mixed.items()},
        "label": torch.tensor([row["label"] for row in rows]),
    }


def _padded(
    ids: Sequence[Sequence[int]], masks: Sequence[Sequence[int]], pad_id: int
) -> dict[str, Tensor]:
    return {**pad_with_attention(ids, pad_id), "completion_mask": pad(masks, 0)}


# --- what held-out rows say


def compare_pairs(
    rows: Sequence[PairRow], then: Sequence[float], now: Sequence[float]
) -> dict[str, Any]:
    """How a policy changed on pairs: margins and likelihoods against its reference.

    Args:
        then, now: log-probabilities under reference and policy, those of all chosen responses
            first, then those of all rejected ones.

    Returns:
        "margin" (mean of Δ = the chosen ratio minus the rejected one, in nats), "accuracy" (share
        of Δ > 0), "ties" (share of Δ = 0: all, where the policy is the reference), "preferred"
        (share of pairs whose chosen response is likelier per token), and how "chosen" and
        "rejected" moved, in nats per token.
    """
    count = len(rows)
    moved = [a - b for a, b in zip(now, then, strict=True)]
    delta = [a - b for a, b in zip(moved[:count], moved[count:], strict=True)]
    chosen_tokens = [row.chosen.trained for row in rows]
    rejected_tokens = [row.rejected.trained for row in rows]
    likelier = [
        a / m > b / n
        for a, b, m, n in zip(now[:count], now[count:], chosen_tokens, rejected_tokens, strict=True)
    ]
    return {
        "margin": fmean(delta),
        "accuracy": fmean(each > 0 for each in delta),
        "ties": fmean(each == 0 for each in delta),
        "preferred": fmean(likelier),
        "chosen": sum(moved[:count]) / sum(chosen_tokens),
        "rejected": sum(moved[count:]) / sum(rejected_tokens),
        "pairs": count,
    }


def compare_labels(
    rows: Sequence[TokenRow], then: Sequence[float], now: Sequence[float]
) -> dict[str, Any]:
    """How a policy changed on labelled responses, with the names of `compare_pairs`.

    Returns:
        "margin": mean ratio of desirable responses minus that of undesirable ones; "accuracy": the
        share of all pairs of one of each in which the desirable one gained more, "ties" that of
        those in which both gained alike; "chosen" and "rejected": how the two kinds moved, in nats
        per token. Empty where one kind is missing.
    """
    ratios: dict[bool, list[float]] = {True: [], False: []}
    tokens = {True: 0, False: 0}
    for row, before, after in zip(rows, then, now, strict=True):
        desirable = bool(row.targets[0])
        ratios[desirable].append(after - before)
        tokens[desirable] += row.trained
    if not all(ratios.values()):
        return {}
    gaps = [a - b for a in ratios[True] for b in ratios[False]]
    return {
        "margin": fmean(ratios[True]) - fmean(ratios[False]),
        "accuracy": fmean(gap > 0 for gap in gaps),
        "ties": fmean(gap == 0 for gap in gaps),
        "chosen": sum(ratios[True]) / tokens[True],
        "rejected": sum(ratios[False]) / tokens[False],
        "labels": len(rows),
    }


def pair_warnings(rows: Sequence[PairRow], beta: float | None) -> Iterator[str]:
    """What makes DPO fail and can be seen before it runs.

    Args:
        beta: of a loss on summed log-probabilities; None for others, whose β has another scale.
    """
    if beta is not None and not 0.01 <= beta <= 1:
        yield (
            f"loss.beta={beta} is outside of 0.01 to 1: below, the policy runs away from the"
            " reference; above, it hardly moves"
        )
    alike = sum(_are_alike(row) for row in rows) / len(rows)
    if alike > 0.5:
        yield f"{alike:.0%} of pairs share over 90% of their tokens: chosen and rejected are alike"
    lengths = [(row.chosen.trained, row.rejected.trained) for row in rows]
    chosen_longer = [m > n for m, n in lengths if m != n]
    means = fmean(m for m, _ in lengths), fmean(n for _, n in lengths)
    share = sum(chosen_longer) / len(chosen_longer) if len(chosen_longer) >= 20 else 0.5
    if not 0.3 <= share <= 0.7 and max(means) > 1.2 * min(means):
        yield (
            f"the chosen response is the longer one in {share:.0%} of pairs (means"
            f" {means[0]:.0f} and {means[1]:.0f} tokens): the policy may learn length; compare"
            " objective='dpo_norm' or 'simpo'"
        )


def outcome_warnings(after: Mapping[str, Any], objective: str) -> Iterator[str]:
    """What went wrong, as held-out pairs show."""
    anchor = "a larger loss.nll_coef" if objective == "dpo_nll" else "objective='dpo_nll'"
    if after["chosen"] < -DISPLACED_NATS and after["rejected"] < 0 < after["margin"]:
        yield (
            f"likelihood displacement: chosen responses became less likely too"
            f" ({after['chosen']:+.3f} nats per token, rejected {after['rejected']:+.3f}); compare"
            f" {anchor}, or a smaller learning rate"
        )
    if after["margin"] <= 0:
        yield f"held-out margins did not grow ({after['margin']:+.3f} nats)"


def _are_alike(row: PairRow) -> bool:
    """Whether two responses share over 90% of their tokens, in order."""
    chosen, rejected = (side.ids[side.prompt :] for side in (row.chosen, row.rejected))
    matcher = SequenceMatcher(None, chosen, rejected, autojunk=False)
    # The first two are upper bounds of the third, which takes the square of the length.
    shares = (matcher.real_quick_ratio, matcher.quick_ratio, matcher.ratio)
    return all(share() > 0.9 for share in shares)

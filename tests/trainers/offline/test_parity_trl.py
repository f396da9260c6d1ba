"""Our losses and TRL's, on the same rows; and that TRL sees the rows as they are."""

from __future__ import annotations

import random
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from preference_cases import random_labels, random_pairs, random_row, tiny_policy

from agentrl.engines.loading import load_model, load_tokenizer
from agentrl.trainers.models.scoring import token_logprobs
from agentrl.trainers.offline import objectives as p
from agentrl.trainers.offline.alignment import (
    Alignment,
    Rows,
    aligner,
    label_batch,
    pair_batch,
    pair_scores,
    plain_row,
)
from agentrl.trainers.offline.data.tokens import LabelRow, PairRow, TokenRow
from agentrl.trainers.offline.fitting import StagePlan
from agentrl.trainers.offline.settings import StageSettings

THEIRS = sorted(name for name, one in p.OBJECTIVES.items() if one.trl and one.loss)
CANARY = (7, 7, 7, 5, 3, 3, 11, 2)


def alignment(name: str) -> Alignment:
    """A policy that has moved away from its reference."""
    policy, reference = load_model(tiny_policy()), load_model(tiny_policy())
    torch.manual_seed(1)
    with torch.no_grad():
        for weight in policy.parameters():
            weight += 0.02 * torch.randn_like(weight)
    found, options = p.objective(name, {})
    return Alignment(policy, load_tokenizer(tiny_policy()), reference.eval(), found, options)


def trainer_of(parts: Alignment, rows: list[Any], scratch: Path) -> Any:
    settings = StageSettings.model_validate(
        {"stage": "preference", "model": "-", "data": {"files": ["-"]}, "batch_size": len(rows)}
    )
    return aligner(parts, rows, settings, StagePlan.of(settings, len(rows)), scratch)


@pytest.mark.parametrize("name", THEIRS)
def test_trl_computes_our_loss(name: str, tmp_path: Path) -> None:
    parts, rows = alignment(name), random_pairs(6)
    trainer = trainer_of(parts, rows, tmp_path)
    batch = pair_batch([plain_row(row) for row in rows], pad_id=0)
    theirs = trainer.compute_loss(parts.model, batch)
    assert parts.objective.loss is not None
    ours = parts.objective.loss(pair_scores(parts.model, batch, parts), **parts.options).mean()
    assert ours.item() == pytest.approx(theirs.item(), abs=1e-5)
    other = p.dpo(pair_scores(parts.model, batch, parts), 9.0).mean()
    assert abs(other.item() - theirs.item()) > 1e-3


def test_trl_computes_our_kto(tmp_path: Path) -> None:
    parts, rows = alignment("kto"), random_labels(6)
    trainer = trainer_of(parts, rows, tmp_path)
    batch = label_batch([plain_row(row) for row in rows], pad_id=0)
    theirs = trainer.compute_loss(parts.model, batch)

    def ratio_B(prefix: str) -> torch.Tensor:
        given = Rows(batch[f"{prefix}input_ids"], batch[f"{prefix}completion_mask"].bool())
        now, then = (
            token_logprobs(model, given, entropy="off").logprobs_BT.sum(-1)
            for model in (parts.model, parts.reference)
        )
        return now - then

    kl = ratio_B("KL_").mean()
    ours = p.kto(ratio_B(""), batch["label"], kl, parts.options["beta"], (1.0, 1.0)).mean()
    assert ours.item() == pytest.approx(theirs.item(), abs=1e-5)


def test_simpo_is_that_of_trl() -> None:
    from trl.experimental.cpo import CPOTrainer

    chosen, rejected = -torch.rand(2, 8) * 4
    tokens = torch.ones(8)
    fake = SimpleNamespace(
        alpha=0.0, accelerator=SimpleNamespace(device="cpu"), loss_type="simpo",
        simpo_gamma=1.0, beta=2.0, label_smoothing=0.0,
    )  # fmt: skip
    theirs, _, _ = CPOTrainer.cpo_loss(fake, chosen, rejected)
    ours = p.simpo(p.PairScores(chosen, rejected, tokens, tokens), 2.0, 1.0)
    assert torch.allclose(ours, theirs, atol=1e-5)


def test_orpo_is_that_of_trl() -> None:
    from trl.experimental.orpo import ORPOTrainer

    chosen, rejected = -torch.rand(2, 8) * 4 - 0.05
    tokens = torch.ones(8)
    fake = SimpleNamespace(beta=0.1, accelerator=SimpleNamespace(device="cpu"))
    theirs = ORPOTrainer.odds_ratio_loss(fake, chosen, rejected)[0]
    pair = p.PairScores(chosen, rejected, tokens, tokens)
    assert torch.allclose(p.orpo(pair, 0.1), p.chosen_nll(pair) - theirs, atol=1e-5)


@pytest.mark.parametrize("name", ["dpo", "kto", "simpo"])
def test_rows_arrive_as_they_are(name: str, tmp_path: Path) -> None:
    """A canary that no tokenizer would write, through the trainer's own loader."""
    row = TokenRow(CANARY, (0, 0, 1, 1, 0, 0, 1, 0))
    other = TokenRow((7, 7, 4), (0, 0, 1))
    rows: list[Any] = (
        [LabelRow(row, True), LabelRow(other, False)]
        if name == "kto"
        else [PairRow(row, other)] * 2
    )
    trainer = trainer_of(alignment(name), rows, tmp_path)
    (batch,) = list(trainer.get_train_dataloader())
    sides = (batch["input_ids"].tolist(), batch["completion_mask"].tolist())
    found = {tuple(ids): tuple(mask) for ids, mask in zip(*sides, strict=True)}
    assert found[CANARY] == row.mask


@pytest.mark.parametrize("name", ["dpo", "ipo"])
def test_labels_at_observations_change_nothing_through_trl(name: str, tmp_path: Path) -> None:
    """The ids that a model reads stay; only what the loss is told of observations differs."""
    parts, rows = alignment(name), random_pairs(4, seed=3)
    trainer = trainer_of(parts, rows, tmp_path)
    batch = pair_batch([plain_row(row) for row in rows], pad_id=0)
    before = trainer.compute_loss(parts.model, dict(batch)).item()
    seen: list[torch.Tensor] = []
    inner = parts.model.forward

    def spoiled(*args: Any, labels: torch.Tensor | None = None, **kwargs: Any) -> Any:
        assert labels is not None
        seen.append(labels)
        return inner(*args, labels=labels, **kwargs)

    parts.model.forward = spoiled
    assert trainer.compute_loss(parts.model, dict(batch)).item() == before
    unlabelled = batch["completion_mask"] == 0
    assert (seen[0][unlabelled] == -100).all() and (seen[0][~unlabelled] >= 0).all()


def test_kto_mixes_neighbours_within_a_batch() -> None:
    rng = random.Random(0)
    rows = [LabelRow(random_row(rng), at % 2 == 0) for at in range(3)]
    batch = label_batch([plain_row(row) for row in rows], pad_id=0)
    for at, row in enumerate(rows):
        neighbour = rows[at - 1].row
        wanted = row.row.ids[: row.row.prompt] + neighbour.ids[neighbour.prompt :]
        assert tuple(batch["KL_input_ids"][at].tolist()[: len(wanted)]) == wanted


def test_a_row_of_kto_that_is_alone_says_nothing_of_z0(tmp_path: Path) -> None:
    """Its own response is no mismatched one: with it, z₀ would cancel the row's ratio."""
    parts, rows = alignment("kto"), random_labels(3)
    trainer = trainer_of(parts, rows, tmp_path)
    batch = label_batch([plain_row(rows[0])], pad_id=0)
    theirs = trainer.compute_loss(parts.model, dict(batch))
    given = Rows(batch["input_ids"], batch["completion_mask"].bool())
    now, then = (
        token_logprobs(model, given, entropy="off").logprobs_BT.sum(-1)
        for model in (parts.model, parts.reference)
    )
    ours = p.kto(now - then, batch["label"], torch.tensor(0.0), parts.options["beta"], (1.0, 1.0))
    assert ours.item() == pytest.approx(theirs.item(), abs=1e-5) != 0.5


def test_the_reference_of_fresh_adapters_is_the_policy_itself(tmp_path: Path) -> None:
    from agentrl.trainers.config import Compute
    from agentrl.trainers.models.loading import load_policy

    found, options = p.objective("dpo", {})
    model = load_policy(tiny_policy(), Compute(lora_rank=2))
    parts = Alignment(model, load_tokenizer(tiny_policy()), None, found, options)
    rows = random_pairs(4)
    trainer = trainer_of(parts, rows, tmp_path)
    batch = pair_batch([plain_row(row) for row in rows], pad_id=0)
    assert trainer.compute_loss(model, batch).item() == pytest.approx(0.693147, abs=1e-5)


collate = partial(pair_batch, pad_id=0)


def test_padding_changes_no_score() -> None:
    parts, rows = alignment("dpo"), random_pairs(5, seed=7)
    whole = pair_scores(parts.model, collate([plain_row(row) for row in rows]), parts)
    for at, row in enumerate(rows):
        alone = pair_scores(parts.model, collate([plain_row(row)]), parts)
        assert alone.chosen_B.item() == pytest.approx(whole.chosen_B[at].item(), abs=1e-4)
        assert alone.ref_rejected_B is not None and whole.ref_rejected_B is not None
        assert alone.ref_rejected_B.item() == pytest.approx(
            whole.ref_rejected_B[at].item(), abs=1e-4
        )

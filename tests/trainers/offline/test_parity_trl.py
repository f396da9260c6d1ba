"""Our losses and TRL's, on the same rows; and that TRL sees the rows as they are."""

from __future__ import annotations

import random
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from preference_cases import labelled, random_labels, random_pairs, random_row, tiny_policy

from agentrl.engines.loading import load_model, load_tokenizer
from agentrl.trainers.models.loading import load_policy
from agentrl.trainers.models.scoring import token_logprobs
from agentrl.trainers.offline import objectives as p
from agentrl.trainers.offline.preference import (
    PreferenceStage,
    as_columns,
    label_batch,
    pair_batch,
)
from agentrl.trainers.offline.rows import MaskedRows, PairRow, TokenRow
from agentrl.trainers.offline.settings import StageSettings

THEIRS = sorted(name for name, one in p.OBJECTIVES.items() if one.trl and one.loss)
CANARY = (7, 7, 7, 5, 3, 3, 11, 2)


def moved_stage(name: str) -> PreferenceStage:
    """A stage whose policy has moved away from its reference."""
    stage = new_stage(name)
    stage.model, stage.reference = load_model(tiny_policy()), load_model(tiny_policy()).eval()
    torch.manual_seed(1)
    with torch.no_grad():
        for weight in stage.model.parameters():
            weight += 0.02 * torch.randn_like(weight)
    return stage


def new_stage(name: str, **more: Any) -> PreferenceStage:
    row = {"stage": "preference", "model": tiny_policy(), "data": {"files": ["-"]}}
    return PreferenceStage(StageSettings.model_validate(row | {"objective": name} | more))


def trainer_of(stage: PreferenceStage, rows: list[Any], scratch: Path) -> Any:
    return stage.trainer(load_tokenizer(tiny_policy()), rows, scratch)


@pytest.mark.parametrize("name", THEIRS)
def test_trl_computes_our_loss(name: str, tmp_path: Path) -> None:
    stage, rows = moved_stage(name), random_pairs(6)
    trainer = trainer_of(stage, rows, tmp_path)
    batch = pair_batch([as_columns(row) for row in rows], pad_id=0)
    theirs = trainer.compute_loss(stage.model, batch)
    assert stage.objective.loss is not None
    ours = stage.objective.loss(stage.pair_scores(stage.model, batch), **stage.options).mean()
    assert ours.item() == pytest.approx(theirs.item(), abs=1e-5)
    other = p.dpo(stage.pair_scores(stage.model, batch), 9.0).mean()
    assert abs(other.item() - theirs.item()) > 1e-3


def test_trl_computes_our_kto(tmp_path: Path) -> None:
    stage, rows = moved_stage("kto"), random_labels(6)
    trainer = trainer_of(stage, rows, tmp_path)
    batch = label_batch([as_columns(row) for row in rows], pad_id=0)
    theirs = trainer.compute_loss(stage.model, batch)

    def ratio_B(prefix: str) -> torch.Tensor:
        given = MaskedRows(batch[f"{prefix}input_ids"], batch[f"{prefix}completion_mask"].bool())
        now, then = (
            token_logprobs(model, given, entropy="off").logprobs_BT.sum(-1)
            for model in (stage.model, stage.reference)
        )
        return now - then

    kl = ratio_B("KL_").mean()
    ours = p.kto(ratio_B(""), batch["label"], kl, stage.options["beta"], (1.0, 1.0)).mean()
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
        [labelled(row, True), labelled(other, False)]
        if name == "kto"
        else [PairRow(row, other)] * 2
    )
    trainer = trainer_of(moved_stage(name), rows, tmp_path)
    (batch,) = list(trainer.get_train_dataloader())
    sides = (batch["input_ids"].tolist(), batch["completion_mask"].tolist())
    found = {tuple(ids): tuple(mask) for ids, mask in zip(*sides, strict=True)}
    assert found[CANARY] == row.mask


@pytest.mark.parametrize("name", ["dpo", "ipo"])
def test_labels_at_observations_change_nothing_through_trl(name: str, tmp_path: Path) -> None:
    """The ids that a model reads stay; only what the loss is told of observations differs."""
    stage, rows = moved_stage(name), random_pairs(4, seed=3)
    trainer = trainer_of(stage, rows, tmp_path)
    batch = pair_batch([as_columns(row) for row in rows], pad_id=0)
    before = trainer.compute_loss(stage.model, dict(batch)).item()
    seen: list[torch.Tensor] = []
    inner = stage.model.forward

    def spoiled(*args: Any, labels: torch.Tensor | None = None, **kwargs: Any) -> Any:
        assert labels is not None
        seen.append(labels)
        return inner(*args, labels=labels, **kwargs)

    stage.model.forward = spoiled
    assert trainer.compute_loss(stage.model, dict(batch)).item() == before
    unlabelled = batch["completion_mask"] == 0
    assert (seen[0][unlabelled] == -100).all() and (seen[0][~unlabelled] >= 0).all()


def test_kto_mixes_neighbours_within_a_batch() -> None:
    rng = random.Random(0)
    rows = [labelled(random_row(rng), at % 2 == 0) for at in range(3)]
    batch = label_batch([as_columns(row) for row in rows], pad_id=0)
    for at, row in enumerate(rows):
        neighbour = rows[at - 1]
        wanted = row.ids[: row.prompt] + neighbour.ids[neighbour.prompt :]
        assert tuple(batch["KL_input_ids"][at].tolist()[: len(wanted)]) == wanted


def test_a_row_of_kto_that_is_alone_says_nothing_of_z0(tmp_path: Path) -> None:
    """Its own response is no mismatched one: with it, z₀ would cancel the row's ratio."""
    stage, rows = moved_stage("kto"), random_labels(3)
    trainer = trainer_of(stage, rows, tmp_path)
    batch = label_batch([as_columns(rows[0])], pad_id=0)
    theirs = trainer.compute_loss(stage.model, dict(batch))
    given = MaskedRows(batch["input_ids"], batch["completion_mask"].bool())
    now, then = (
        token_logprobs(model, given, entropy="off").logprobs_BT.sum(-1)
        for model in (stage.model, stage.reference)
    )
    ours = p.kto(now - then, batch["label"], torch.tensor(0.0), stage.options["beta"], (1.0, 1.0))
    assert ours.item() == pytest.approx(theirs.item(), abs=1e-5) != 0.5


def test_the_reference_of_fresh_adapters_is_the_policy_itself(tmp_path: Path) -> None:
    stage = new_stage("dpo", compute={"lora_rank": 2})
    model = stage.model = load_policy(tiny_policy(), stage.settings.compute)
    rows = random_pairs(4)
    trainer = trainer_of(stage, rows, tmp_path)
    batch = pair_batch([as_columns(row) for row in rows], pad_id=0)
    assert trainer.compute_loss(model, batch).item() == pytest.approx(0.693147, abs=1e-5)


collate = partial(pair_batch, pad_id=0)


def test_padding_changes_no_score() -> None:
    stage, rows = moved_stage("dpo"), random_pairs(5, seed=7)
    whole = stage.pair_scores(stage.model, collate([as_columns(row) for row in rows]))
    for at, row in enumerate(rows):
        alone = stage.pair_scores(stage.model, collate([as_columns(row)]))
        assert alone.chosen_B.item() == pytest.approx(whole.chosen_B[at].item(), abs=1e-4)
        assert alone.ref_rejected_B is not None and whole.ref_rejected_B is not None
        assert alone.ref_rejected_B.item() == pytest.approx(
            whole.ref_rejected_B[at].item(), abs=1e-4
        )

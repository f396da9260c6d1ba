"""On-policy nothing is clipped before the policy has moved: in bfloat16, with dropout, anywhere.

Real tiny models. What ratios are against is compared bit for bit with what the update scores.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from run_cases import TOYS

from agentrl.engines.loading import load_model, load_tokenizer
from agentrl.trainers import learner as learner_module
from agentrl.trainers.algorithms.advantages import with_greedy_rewards
from agentrl.trainers.algorithms.recipes import RECIPES
from agentrl.trainers.batch import OUTCOMES, pack
from agentrl.trainers.config import check_config
from agentrl.trainers.learner import Learner
from agentrl.trainers.models import scoring
from agentrl.trainers.models.tiny import build_model
from agentrl.trainers.run import Run

MOST = 0.002
"""Share of trained tokens that may be clipped in front of a round's first step."""
LORA = {"dtype": "bfloat16", "lora_rank": 4}
FULL = {"dtype": "bfloat16"}


def settings(folder, **changes):
    row = {
        "env": f"{TOYS}:Paid",
        "model": str(folder),
        "tasks_per_step": 4,
        "group_size": 4,
        "deterministic": True,
    }
    return check_config(row | changes, "test")


def taught(folder, target, steps=20):
    """The same model after some steps towards one answer."""
    tokenizer, model = load_tokenizer(folder), load_model(folder)
    ids = tokenizer("<|im_start|>user\nsay 3<|im_end|>\n<|im_start|>assistant\nyes<|im_end|>\n")
    ids_BT = torch.tensor([ids["input_ids"]])
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
    for _ in range(steps):
        model(input_ids=ids_BT, labels=ids_BT).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    model.save_pretrained(target)
    tokenizer.save_pretrained(target)
    return target


def played(config, path):
    """The groups of one round that the config's own policy sampled."""
    with Run(config, path) as run:
        groups = run.play(0).groups
        return groups, run.pad_id


def first_step(config, groups, pad_id):
    """The metrics of a learner's first round on these groups."""
    learner = Learner.load(config)
    batch = pack(groups, pad_id, version=0)
    batch = replace(batch, parts_E={"any": batch.reward_E})
    if "greedy" in learner.recipe.needs:
        batch = with_greedy_rewards(batch, [0.5] * len(groups))
    return learner.step(batch, 0)


def clipped(row):
    """Nothing where a round gives a recipe no signal: it then scores nothing."""
    return row.get("policy/clip_low", 0.0) + row.get("policy/clip_high", 0.0)


def check(folder, path, compute, recipes):
    base = settings(folder, compute=compute)
    groups, pad_id = played(base, path)
    assert any(map(OUTCOMES.has_signal, groups))
    found = {}
    for name in recipes:
        loss = {"critic": {"warmup": 0}} if "critic" in RECIPES[name].needs else {}
        loss |= {"reset_every": 0} if RECIPES[name].reset_every else {}
        loss |= {"teacher": {"model": str(folder)}} if "teacher" in RECIPES[name].needs else {}
        config = settings(folder, compute=compute, recipe=name, loss=loss)
        found[name] = first_step(config, groups, pad_id)
    assert {name: clipped(row) for name, row in found.items() if not clipped(row) <= MOST} == {}
    return found


@pytest.mark.parametrize("compute", [FULL, LORA], ids=["full", "lora"])
def test_on_policy_in_bfloat16_nothing_is_clipped(model, tmp_path, compute):
    found = check(model, tmp_path / "x", compute, ("grpo", "gspo", "luspo", "gmpo", "dppo"))
    gaps = [row["parity/gap_mean"] for row in found.values()]
    assert min(gaps) > 0, "the sampler's own log-probabilities are another's"
    assert {row["policy/ratio_max"] for row in found.values()} == {1.0}


@pytest.mark.long
@pytest.mark.parametrize("state", ["random", "trained"])
@pytest.mark.parametrize("compute", [FULL, LORA], ids=["full", "lora"])
@pytest.mark.parametrize("layers", [2, 12, 24])
def test_on_policy_in_bfloat16_no_recipe_clips(model, tmp_path, layers, compute, state):
    folder = build_model(
        tmp_path / "model", load_tokenizer(model), width=32, layers=layers, context=256
    )
    if state == "trained":
        folder = taught(folder, tmp_path / "taught")
    check(folder, tmp_path / "x", compute, RECIPES)


@pytest.mark.parametrize(
    ("compute", "recipe"),
    [(FULL, "grpo"), (LORA, "gspo"), ({}, "gspo"), ({"dropout": 0.2}, "grpo")],
    ids=["full", "lora", "sequence", "dropout"],
)
def test_every_step_of_a_round_is_anchored_in_its_first(model, tmp_path, compute, recipe):
    """A policy that a step does not move has ratios of exactly 1 in all minibatches and epochs."""
    compute = {**compute, "micro_tokens": 64}
    groups, pad_id = played(settings(model, compute=compute), tmp_path / "x")
    changes = {"minibatches": 3, "learning_rate": 1e-30, "loss": {"epochs": 2, "kl_coef": 0.1}}
    row = first_step(settings(model, compute=compute, recipe=recipe, **changes), groups, pad_id)
    assert row["policy/updates"] > 3
    assert (row["policy/kl"], row["policy/ratio_max"], clipped(row)) == (0, 1, 0)


@pytest.mark.parametrize(("loss", "is_anchored"), [({}, False), ({"tis_high": 2.0}, True)])
def test_tokens_of_an_earlier_policy_keep_their_samplers_word(model, tmp_path, loss, is_anchored):
    """Else what was learnt since they were sampled would be in no ratio and in no weight."""
    config = settings(model, compute=FULL, loss=loss)
    groups, pad_id = played(config, tmp_path / "x")
    batch = pack(groups, pad_id, version=1)
    stale_BT = batch.mask_BT & (torch.arange(len(batch)) % 2 == 0)[:, None]
    batch = replace(batch, version_BT=torch.where(stale_BT, 0, 1).int())
    found = Learner.load(config).with_anchor(batch, batch.old_logprobs_BT - 0.5)
    moved_BT = found.anchor_BT - batch.old_logprobs_BT
    assert (moved_BT[batch.mask_BT & ~stale_BT] == -0.5).all()
    assert (moved_BT[stale_BT] == (-0.5 if is_anchored else 0.0)).all()


def with_an_old_group(batch, moved):
    """The round with its first group that trains one version old: since then the policy learnt."""
    first = batch.group_E[batch.signal_E][0]
    old_BT = batch.mask_BT & (batch.group_E == first)[batch.episode_B][:, None]
    return replace(
        batch,
        version_BT=torch.where(old_BT, 0, batch.version_BT).int(),
        old_logprobs_BT=torch.where(old_BT, batch.old_logprobs_BT - moved, batch.old_logprobs_BT),
    )


@pytest.mark.parametrize(("loss", "updates"), [({}, 2), ({"tis_high": 9.0}, 2)])
@pytest.mark.parametrize("compute", [{}, FULL], ids=["float32", "bfloat16"])
def test_the_budget_of_a_round_pays_for_no_earlier_round(model, tmp_path, compute, loss, updates):
    config = settings(
        model, minibatches=2, learning_rate=1e-9, compute=compute, loss=loss | {"kl_budget": 0.01}
    )
    groups, pad_id = played(config, tmp_path / "x")
    batch = pack(groups, pad_id, version=1)
    present = replace(batch, version_BT=torch.where(batch.mask_BT, 1, -1).int())
    found = Learner.load(config).step(with_an_old_group(present, 0.5), 1)
    assert found["policy/updates"] == updates
    if not loss:
        assert found["policy/kl"] > 0.01, "what the old tokens say is still told"


def test_a_coefficient_follows_what_this_round_moved(model, tmp_path):
    config = settings(model, recipe="ppo_penalty", learning_rate=1e-9)
    groups, pad_id = played(config, tmp_path / "x")
    batch = pack(groups, pad_id, version=1)
    present = replace(batch, version_BT=torch.where(batch.mask_BT, 1, -1).int())
    learner = Learner.load(config)
    found = learner.step(with_an_old_group(present, 0.5), 1)
    assert found["policy/kl_after"] < 1e-6 and learner.recipe.options["anchor_kl_coef"] == 0.5
    learner = Learner.load(config)
    old = replace(present, version_BT=torch.where(batch.mask_BT, 0, -1).int())
    assert "policy/kl_after" not in learner.step(old, 1)
    assert learner.recipe.options["anchor_kl_coef"] == 1, "nothing told how far this round went"


@pytest.mark.parametrize(
    ("loss", "scored"), [({"kl_coef": 0.1}, 0), ({"kl_coef": 0.1, "kl_reward_coef": 0.1}, 1)]
)
@pytest.mark.parametrize("rank", [0, 4])
def test_with_dropout_the_reference_is_scored_as_often_as_it_is_read(
    model, tmp_path, monkeypatch, loss, scored, rank
):
    config = settings(model, compute={"dropout": 0.2, "lora_rank": rank}, loss=loss)
    groups, pad_id = played(config, tmp_path / "x")
    learner, calm, dropping = Learner.load(config), [], []
    score, frozen_logprobs = Learner.score, scoring.frozen_logprobs

    def score_calmly(self, model, *rest):
        calm.append(model is self.reference)
        return score(self, model, *rest)

    def score_with_dropout(model, *rest):
        dropping.append(model is learner.reference)
        assert model.training
        return frozen_logprobs(model, *rest)

    monkeypatch.setattr(Learner, "score", score_calmly)
    monkeypatch.setattr(learner_module, "frozen_logprobs", score_with_dropout)
    metrics = learner.step(pack(groups, pad_id, version=0), 0)
    assert bool(sum(calm)) == bool(scored) and any(dropping)
    assert metrics["policy/ref_kl"] == 0 and (rank or not learner.reference.training)

"""Runs with a teacher, and what it says of the tokens that a policy tells apart."""

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from run_cases import TOLD, run
from trainer_cases import PAD, branch, episode
from transformers import LlamaConfig, LlamaForCausalLM

from agentrl.engines.loading import load_model, load_tokenizer
from agentrl.errors import ConfigError, UserError
from agentrl.records.files import EpisodeWriter, read_episodes
from agentrl.trainers.algorithms.recipes import recipe
from agentrl.trainers.batch import pack
from agentrl.trainers.config import check_config
from agentrl.trainers.learner import Learner
from agentrl.trainers.models.tiny import build_model, build_tokenizer
from agentrl.trainers.run import Run
from agentrl.trajectory import Group

POLICY, TEACHER, TOP = 12, 20, 10


def model_of(vocabulary):
    config = LlamaConfig(
        vocab_size=vocabulary,
        hidden_size=8,
        intermediate_size=8,
        num_hidden_layers=1,
        num_attention_heads=1,
    )
    return LlamaForCausalLM(config).eval()


def test_a_teacher_that_pads_its_vocabulary_further_names_only_tokens_of_the_policy():
    torch.manual_seed(0)
    policy, teacher = model_of(POLICY), model_of(TEACHER)
    teacher.lm_head.weight.data[POLICY:] = 0  # as padding is that nobody trained
    batch = pack([Group((episode(branch(2, (3, 0), first_id=1)),))], PAD)
    chosen = recipe("distill", gkd_coef=1.0, teacher={"model": "x", "top": TOP})
    learner = SimpleNamespace(
        recipe=chosen, teacher=teacher, model=policy, config=SimpleNamespace(temperature=1.0)
    )
    told = Learner.with_teacher(learner, batch)
    logp_BTV = teacher(batch.ids_BT).logits.log_softmax(-1)[:, :-1, :POLICY]
    wanted_BTK, ids_BTK = logp_BTV.topk(TOP)
    at_BT = batch.mask_BT[:, 1:]
    assert torch.equal(told.top_ids_BTK[:, 1:][at_BT], ids_BTK[at_BT])
    torch.testing.assert_close(told.teacher_top_logprobs_BTK[:, 1:][at_BT], wanted_BTK[at_BT])


@pytest.fixture(scope="module")
def teacher(model, tmp_path_factory):
    """The same model, surer of what it says."""
    sure = load_model(model)
    with torch.no_grad():
        sure.get_output_embeddings().weight.mul_(3)
    folder = tmp_path_factory.mktemp("teacher")
    sure.save_pretrained(folder)
    load_tokenizer(model).save_pretrained(folder)
    return str(folder)


def settings(model, folder, **loss):
    told = {"teacher": {"model": folder} | loss.pop("teacher", {})}
    row = {"env": TOLD, "model": str(model), "recipe": "distill", "loss": told | loss, "steps": 10}
    row |= {"tasks_per_step": 4, "group_size": 8, "learning_rate": 1e-2, "deterministic": True}
    return check_config(row | {"save_every": 2, "compute": {"micro_tokens": 1024}}, "test")


@pytest.mark.parametrize(
    "loss",
    [
        {},
        {"teacher_coef": 0.0, "gkd_coef": 1.0},
    ],
    ids=["sampled", "vocabulary"],
)
def test_a_run_nears_its_teacher(model, teacher, tmp_path, loss):
    """Several turns with observations in between; nothing is solved, and no round is quiet."""
    many = settings(model, teacher, **loss).model_copy(update={"group_size": 32})
    distance = [row["policy/teacher_kl"] for row in run(many, tmp_path / "run")]
    assert len(distance) == 10 and sum(distance[-3:]) < 0.85 * sum(distance[:3])


def test_a_resumed_run_equals_an_uninterrupted_one(model, teacher, tmp_path):
    config = settings(model, teacher, gkd_coef=0.5, teacher={"top": 8})
    whole = run(config, tmp_path / "a" / "x")
    run(config.model_copy(update={"steps": 2}), tmp_path / "b" / "x")
    assert run(config, tmp_path / "b" / "x", resume=True) == whole


def test_recorded_episodes_take_their_share(model, teacher, tmp_path):
    """GKD's fixed data: no credit, no parity, no age, but the divergence."""
    run(settings(teacher, teacher), tmp_path / "taught")
    file = tmp_path / "taught" / "episodes.jsonl"
    given = {"episodes": str(file), "share": 0.5}
    config = settings(model, teacher, teacher_coef=0.0, gkd_coef=1.0, teacher=given)
    with Run(config, tmp_path / "run") as opened:
        played = opened.play(0)
        batch = opened.pack(played)
        assert len(batch.reward_E) == 64 and batch.n_refilled == 32
        own_BT = batch.version_BT[batch.mask_BT] >= 0
        assert own_BT.any() and not own_BT.all()
        again = opened.pack(played)
        assert torch.equal(batch.ids_BT, again.ids_BT), "a round draws the same again"
        metrics = opened.learner.step(batch, 0)
    assert metrics["staleness/max"] == 0 and metrics["parity/gap_max"] < 1e-3
    assert metrics["policy/ratio_max"] == pytest.approx(1, abs=1e-3)
    folder = given | {"episodes": str(tmp_path / "taught")}
    with Run(settings(model, teacher, gkd_coef=1.0, teacher=folder), tmp_path / "same") as opened:
        assert torch.equal(opened.pack(played).ids_BT, batch.ids_BT), "a folder is as good"
    empty = tmp_path / "empty.jsonl"
    with EpisodeWriter(empty) as writer:
        for one in list(read_episodes(file).values())[:2]:
            writer.write(replace(one, trajectories=()))
    wrong = settings(model, teacher, gkd_coef=1.0, teacher=given | {"episodes": str(empty)})
    with pytest.raises(UserError, match="none of 2 episodes has a score and sampled tokens"):
        Run(wrong, tmp_path / "wrong")


def test_more_likeliest_tokens_than_the_models_know_are_refused(model, teacher, tmp_path):
    config = settings(model, teacher, gkd_coef=1.0, teacher={"top": 10**6})
    with pytest.raises(ConfigError, match=r"loss.teacher.top=1000000: .* set at most \d+, or 0"):
        Run(config, tmp_path / "run")


def test_a_teacher_with_another_tokenizer_is_refused_with_counts(model, tmp_path):
    other = build_tokenizer(["completely different words, and many of them"] * 9, 300)
    folder = str(build_model(tmp_path / "other", other, width=32, layers=1, context=256))
    with pytest.raises(ConfigError, match=r"loss.teacher.model=.*: \d+ of the policy's \d+ tok"):
        Run(settings(model, folder), tmp_path / "run")
    assert not (tmp_path / "run" / "config.toml").exists()


def test_the_teacher_is_never_moved(model, teacher, tmp_path):
    with Run(settings(model, teacher, gkd_coef=1.0), tmp_path / "run") as opened:
        opened.learner.step(opened.pack(opened.play(0)), 0)
        kept = dict(load_model(teacher).named_parameters())
        held = opened.learner.teacher
        assert held is not None
        assert all(torch.equal(kept[name], one) for name, one in held.named_parameters())

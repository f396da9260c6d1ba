"""Distillation: literals, exact gradients by enumeration, TRL's divergence, and real runs."""

from __future__ import annotations

import itertools
import math
import re
from dataclasses import replace

import pytest
import torch
from trainer_cases import PAD, branch, episode, group

from agentrl.engines.loading import load_tokenizer
from agentrl.errors import ConfigError, UserError
from agentrl.records.files import EpisodeWriter
from agentrl.trainers.algorithms.distillation import (
    TeacherSettings,
    generalised_jsd,
    gkd,
    teacher_credit,
)
from agentrl.trainers.algorithms.recipes import RECIPES, recipe
from agentrl.trainers.batch import PolicyOutput, TokenBatch, pack
from agentrl.trainers.recorded import RecordedEpisodes
from agentrl.trainers.rounds import Round, pack_round
from agentrl.trajectory import EpisodeKey, Group, Segment, Trajectory
from agentrl.types import Message

V, LONGEST = 3, 3
"""A policy of three tokens, of which token 0 ends the answer, and answers of at most three."""


def prefixes():
    """All that can have been said before a token."""
    free = range(1, V)
    return [one for size in range(LONGEST) for one in itertools.product(free, repeat=size)]


def answers():
    """Every answer: it ends on token 0, or at the limit."""
    for prefix in prefixes():
        yield (*prefix, 0)
        if len(prefix) == LONGEST - 1:
            yield from ((*prefix, last) for last in range(1, V))


PLACE = {prefix: place for place, prefix in enumerate(prefixes())}


def table(seed):
    """Log-probabilities (S, V) at every state, with a leaf behind them."""
    chance = torch.Generator().manual_seed(seed)
    leaf_SV = torch.randn((len(PLACE), V), generator=chance, dtype=torch.float64).requires_grad_()
    return leaf_SV, leaf_SV.log_softmax(-1)


def said(logp_SV, answer):
    """Log-probabilities (t,) of an answer's tokens."""
    return torch.stack([logp_SV[PLACE[answer[:t]], token] for t, token in enumerate(answer)])


def batch_of(answer, student_SV, teacher_SV):
    """One episode with an observation in it, as a batch that the teacher has scored."""
    old = said(student_SV, answer).detach()
    segments = [Segment.prompt((7,))]
    for token, logprob in zip(answer, old.tolist(), strict=True):
        segments += [Segment.sampled((token,), (logprob,), 0, "stop"), Segment.observation((8, 9))]
    batch = pack([Group((episode(Trajectory(tuple(segments)), reward=0.0),))], PAD, version=0)
    full_BT = torch.full(batch.mask_BT.shape, math.nan, dtype=torch.float64)
    for name, values in (
        ("old_logprobs_BT", old),
        ("teacher_logprobs_BT", said(teacher_SV, answer)),
    ):
        filled_BT = full_BT.masked_scatter(batch.mask_BT, values.detach())
        batch = replace(batch, **{name: filled_BT})
    return replace(batch, advantages_BT=batch.advantages_BT.double())


def expected_gradient(gamma):
    """E over all answers of the gradient of -A·log π, without sampling."""
    (leaf_SV, student_SV), (_, teacher_SV) = table(0), table(1)
    total = torch.zeros((), dtype=torch.float64)
    for answer in answers():
        batch = batch_of(answer, student_SV, teacher_SV)
        credited = teacher_credit(batch, teacher_gamma=gamma)
        logp = said(student_SV, answer)
        total = (
            total
            - logp.sum().exp().detach()
            * (credited.advantages_BT[batch.mask_BT].double() * logp).sum()
        )
    return torch.autograd.grad(total, leaf_SV)[0]


def test_the_answers_are_all_of_them():
    _, student_SV = table(0)
    assert sum(
        float(said(student_SV.detach(), one).sum().exp()) for one in answers()
    ) == pytest.approx(1)


def test_with_gamma_1_the_gradient_is_that_of_the_kl_over_whole_answers():
    (leaf_SV, student_SV), (_, teacher_SV) = table(0), table(1)
    kl = torch.zeros((), dtype=torch.float64)
    for answer in answers():
        ours, theirs = said(student_SV, answer).sum(), said(teacher_SV, answer).sum()
        kl = kl + ours.exp() * (ours - theirs)
    exact_SV = torch.autograd.grad(kl, leaf_SV)[0]
    assert torch.allclose(expected_gradient(1.0), exact_SV, atol=1e-6)
    assert not torch.allclose(expected_gradient(0.0), exact_SV, atol=1e-3)


@pytest.mark.parametrize("beta", [1.0])
def test_with_gamma_0_it_is_that_of_the_kl_at_visited_states_as_gkd_has_it(beta):
    (leaf_SV, student_SV), (_, teacher_SV) = table(0), table(1)
    visits_S = torch.zeros(len(PLACE), dtype=torch.float64)
    for prefix, place in PLACE.items():
        visits_S[place] = said(student_SV, prefix).sum().exp().detach() if prefix else 1.0
    per_state_S = generalised_jsd(teacher_SV.detach(), student_SV, beta)
    exact_SV = torch.autograd.grad((visits_S * per_state_S).sum(), leaf_SV)[0]
    assert torch.allclose(expected_gradient(0.0), exact_SV, atol=1e-6)


def test_credit_by_hand():
    """Two turns of 2 and 1 tokens; the teacher likes the first token and not the last."""
    _, student_SV = table(0)
    batch = batch_of((1, 2, 0), student_SV, student_SV)
    ratios = torch.tensor([0.5, 0.0, -1.0], dtype=torch.float64)
    old_BT = batch.old_logprobs_BT
    batch = replace(
        batch,
        teacher_logprobs_BT=old_BT.masked_scatter(batch.mask_BT, old_BT[batch.mask_BT] + ratios),
    )
    found = {
        gamma: teacher_credit(batch, teacher_coef=2.0, teacher_gamma=gamma)
        for gamma in (0.0, 0.5, 1.0)
    }
    wanted = {0.0: [1.0, 0.0, -2.0], 0.5: [0.5, -1.0, -2.0], 1.0: [-1.0, -2.0, -2.0]}
    for gamma, batch_ in found.items():
        assert batch_.advantages_BT[batch.mask_BT].tolist() == pytest.approx(
            wanted[gamma], abs=1e-6
        )
        assert not batch_.advantages_BT[~batch.mask_BT].any()
    again = teacher_credit(found[0.0])
    assert again.advantages_BT[batch.mask_BT].tolist() == pytest.approx([1.5, 0.0, -3.0], abs=1e-6)
    given = replace(batch, version_BT=torch.full_like(batch.version_BT, -1))
    assert not teacher_credit(given).advantages_BT.any(), "nobody's sample of this policy"


@pytest.mark.parametrize("beta", [0.0, 0.1, 0.5, 0.9, 1.0])
@pytest.mark.parametrize("top", [0, 4])
def test_the_divergence_is_that_of_trl(beta, top, monkeypatch):
    monkeypatch.setenv("TRL_EXPERIMENTAL_SILENCE", "1")
    from trl.experimental.gkd import GKDTrainer

    chance = torch.Generator().manual_seed(3)
    student_BTV, teacher_BTV = (torch.randn((2, 5, 11), generator=chance) * 2 for _ in range(2))
    mask_BT = torch.rand((2, 5), generator=chance) < 0.6
    labels_BT = torch.where(mask_BT, 1, -100)
    theirs = GKDTrainer.generalized_jsd_loss(
        student_BTV, teacher_BTV, labels=labels_BT, beta=beta, temperature=0.7
    )
    logp, teacher = (logits.div(0.7).log_softmax(-1) for logits in (student_BTV, teacher_BTV))
    ids_BTK = teacher.topk(top).indices if top else torch.arange(11).expand(2, 5, 11)
    batch = make(mask_BT, teacher.gather(-1, ids_BTK))
    output = PolicyOutput(logp[..., 0], top_logprobs_BTK=logp.gather(-1, ids_BTK))
    ours = (gkd(output, batch, gkd_coef=1.0, gkd_beta=beta) * mask_BT).sum() / mask_BT.sum()
    if top:
        assert -1e-6 <= float(ours) < float(theirs), "fewer categories never raise a divergence"
    else:
        assert float(ours) == pytest.approx(float(theirs), abs=1e-5)


def make(mask_BT, teacher_BTK) -> TokenBatch:
    """A batch of which only the mask and what the teacher says matter."""
    sampled = Segment.sampled((2,), (-1.0,), 0, "stop")
    one = episode(Trajectory((Segment.prompt((1,)), sampled)), reward=1.0)
    chosen = pack([Group((one,))], PAD)
    return replace(chosen, mask_BT=mask_BT, teacher_top_logprobs_BTK=teacher_BTK)


GKD = {"gkd_coef": 1.0}


@pytest.mark.parametrize(
    ("name", "loss", "setting"),
    [
        ("distill", {}, "teacher.model"),
        ("grpo", {"teacher": {"model": "x"}}, "teacher"),
        ("distill", {"teacher": "x"}, "teacher"),
        ("distill", {"teacher": {"modle": "x"}}, "teacher.modle"),
        ("distill", {"teacher": {"model": "x", "share": 0.5, "episodes": "e"}}, "teacher.share"),
        ("distill", GKD | {"teacher": {"model": "x", "share": 0.5}}, "teacher.share"),
        ("simko", GKD | {"teacher": {"model": "x"}}, "gkd_coef"),
        ("distill", {"teacher_coef": 0.0, "teacher": {"model": "x"}}, "teacher_coef"),
        ("distill", {"teacher": {"model": "x", "top": 5}}, "teacher.top"),
        ("distill", {"teacher_gamma": 1.5}, "teacher_gamma"),
        ("distill", GKD | {"gkd_beta": 2.0}, "gkd_beta"),
    ],
)
def test_wrong_teachers_are_refused_in_one_sentence(name, loss, setting):
    with pytest.raises(ConfigError) as caught:
        recipe(name, **loss).refuse_no_teacher()
    assert caught.value.setting == f"loss.{setting}" and "\n" not in str(caught.value)


def scored_for_all(batch):
    """The batch with a number for everything that any recipe reads."""
    said_BT = torch.where(batch.mask_BT, batch.old_logprobs_BT.sin(), 0.0)
    top_BTK = said_BT[..., None].expand(*said_BT.shape, 2)
    return replace(
        batch,
        ref_logprobs_BT=said_BT - 0.1,
        proximal_logprobs_BT=said_BT,
        teacher_logprobs_BT=said_BT - 0.3,
        entropy_BT=-said_BT,
        values_BT=said_BT / 2,
        top_ids_BTK=torch.stack((batch.ids_BT, batch.ids_BT + 1), -1),
        top_logprobs_BTK=top_BTK,
        greedy_reward_E=torch.zeros_like(batch.reward_E),
        parts_E={"format": 1 - batch.reward_E},
    )


@pytest.mark.parametrize("name", sorted(RECIPES))
def test_given_episodes_earn_nothing_and_change_nobodys_credit(name):
    """Under every recipe, filters included: they stay, at weight 0, and no mean reads them."""
    groups = (group(1.0, 0.0, 0.0, 1.0, task="a"), group(1.0, 1.0, task="b"))
    played = Round(3, groups, (), (), {})
    given = [
        episode(branch(3, (9, 1), (4, 0), version=77), reward=float(at < 2), task="z", sample=at)
        for at in range(3)
    ]
    chosen = recipe(name, gkd_coef=1.0, filter_groups=True)
    for one in (chosen, replace(chosen, filter_groups=False, refill=False)):
        apart, mixed = (
            one.correct(one.advantage(scored_for_all(pack_round(played, one, PAD, 0, more))))
            for more in ((), given)
        )
        own_B = mixed.episode_B < 6
        assert int((~own_B).sum()) == 3 and len(mixed) == len(apart) + 3
        assert mixed.n_tokens == apart.n_tokens + 39
        width = apart.ids_BT.shape[1]
        for field in ("ids_BT", "advantages_BT", "returns_BT", "rewards_BT", "selected_BT"):
            found = getattr(apart, field)
            assert found is None or torch.equal(getattr(mixed, field)[own_B, :width], found), field
        weights_BT = 1.0 if apart.weights_BT is None else apart.weights_BT
        assert (mixed.weights_BT[own_B, :width] == weights_BT).all()
        assert not mixed.advantages_BT[~own_B].any() and not mixed.weights_BT[~own_B].any()


def test_given_tokens_count_for_whole_distributions_alone():
    played = Round(3, (group(1.0, 0.0),), (), (), {})
    row = recipe("grpo", gkd_coef=1.0, kl_coef=0.5, entropy_coef=0.1)
    more = [episode(branch(3, (9, 0), version=77), task="z")]
    batch = scored_for_all(pack_round(played, row, PAD, 0, more))
    batch = replace(batch, teacher_top_logprobs_BTK=batch.top_logprobs_BTK - 0.5)
    batch = row.correct(row.advantage(batch))
    given_BT = batch.mask_BT & (batch.version_BT < 0)
    said_BT = (batch.old_logprobs_BT - 0.2).requires_grad_()
    top_BTK = (batch.top_logprobs_BTK - 0.7).requires_grad_()
    loss, metrics = row.loss(PolicyOutput(said_BT, -said_BT, top_BTK), batch)
    loss.backward()
    assert not said_BT.grad[given_BT].any() and top_BTK.grad[given_BT].any()
    assert said_BT.grad[batch.mask_BT & ~given_BT].all()
    own = int((batch.mask_BT & ~given_BT).sum())
    assert metrics["scored"] == pytest.approx(own / batch.n_tokens)
    assert metrics["rejected"] == 0


def test_given_episodes_of_others_are_refused_and_of_the_test_split_told(model, tmp_path):
    tokenizer = load_tokenizer(model)

    def read(env="e", question="say 3", run="e/hf:t/train/0", moved=0):
        ids = [id + moved for id in tokenizer.encode(f"<|im_start|>user\n{question}<|im_end|>\n")]
        segments = (Segment.prompt(ids), Segment.sampled((1,), (-1.0,), 0, "stop"))
        one = replace(
            episode(Trajectory(segments), messages=(Message.user(question),)),
            env=env,
            key=EpisodeKey(run, 0, "t", 0, phase="eval"),
        )
        file = tmp_path / "episodes.jsonl"
        file.unlink(missing_ok=True)
        with EpisodeWriter(file) as writer:
            writer.write(one)
        return RecordedEpisodes(TeacherSettings(episodes=str(tmp_path), share=0.5), 0)

    fine = read()
    fine.check({"e", "f"}, {"u"}, tokenizer)
    assert fine.warning() == ""
    hint = "--split train --out DIR"
    for given, held_out, said in (
        (read(env="other-v0"), set(), "its episodes are of other-v0, and the run trains on e"),
        (read(moved=1), set(), "do not say what was asked"),
        (read(), {"t"}, "1 of its tasks are held out ('t')"),
    ):
        with pytest.raises(UserError, match=re.escape(said)) as caught:
            given.check({"e"}, held_out, tokenizer)
        assert "\n" not in str(caught.value)
    assert hint in read(run="e/hf:t/test/0").warning()
    with pytest.raises(UserError, match=r"there is no file .*nowhere.*--split train --out DIR"):
        RecordedEpisodes(TeacherSettings(episodes=str(tmp_path / "nowhere"), share=0.5), 0)
    (tmp_path / "prompts.jsonl").write_text('{"prompt": "Hi?"}\n')
    with pytest.raises(UserError, match=r"must be the episodes.jsonl of an evaluation") as caught:
        RecordedEpisodes(TeacherSettings(episodes=str(tmp_path / "prompts.jsonl"), share=0.5), 0)
    assert "prompts.jsonl:1 is not a record" in str(caught.value)
    assert "delete that line" not in str(caught.value) and "\n" not in str(caught.value)

"""Training with the sampler's experts: the same gradient where both agree, the sampler's where they
do not, and runs from their settings on.
"""

from __future__ import annotations

import threading
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from mixtures import FAMILIES, SHAPE, mixture
from routed import engine_of, packed, two_turns
from run_cases import run, settings

from agentrl.chat.settings import ChatSettings
from agentrl.engines.base import Sampling
from agentrl.engines.factory import open_chat
from agentrl.engines.routing import replayed_routing, routers_of
from agentrl.errors import ConfigError
from agentrl.policies.base import TokenPolicy
from agentrl.records.files import read_episodes
from agentrl.trainers.algorithms.recipes import recipe
from agentrl.trainers.models.loading import Compute, equipped
from agentrl.trainers.models.scoring import frozen_logprobs, token_logprobs
from agentrl.trainers.models.tiny import build_model, build_tokenizer
from agentrl.trainers.observe.parity import judge_gap
from agentrl.trainers.rounds import Rounds
from agentrl.trainers.run import Run
from agentrl.types import Limits, Message, Task


def played(model):
    """A batch of two-turn episodes, padded and with observations, and a fork of the longest."""
    trunk, *others = two_turns(engine_of(model))
    fork = trunk.fork(2).extend(*others[0].segments[2:])
    batch = packed((trunk, fork), *others)
    values_BT = 1.7 * (batch.ids_BT % 2) - 0.7
    return replace(batch, advantages_BT=torch.where(batch.mask_BT, values_BT, 0.0).float())


def learn(model, batch, micro_tokens=10_000, *, replayed=True):
    """Loss and gradient of a recipe over micro-batches, as an update computes them."""
    model.zero_grad()
    row, loss = recipe("grpo"), 0.0
    for micro in batch.split(micro_tokens):
        with replayed_routing(model, micro.experts_BTLK if replayed else None):
            part = row.loss(token_logprobs(model, micro), micro)[0]
            part.backward()
        loss += float(part.detach())
    return loss, {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}


def equal(one, other, tolerance=0.0):
    return one.keys() == other.keys() and all(
        torch.allclose(one[name], other[name], rtol=0, atol=tolerance) for name in one
    )


@pytest.mark.parametrize("family", ["qwen3", "mixtral", "olmoe", "deepseek 3"])
def test_where_choices_agree_the_gradient_is_the_ordinary_one(family):
    model = FAMILIES[family](dtype=torch.float32)
    batch = played(model)
    (loss, found), (expected, ordinary) = (learn(model, batch, replayed=on) for on in (True, False))
    assert loss == expected
    assert equal(found, ordinary, 1e-6)
    assert max(float(grad.abs().max()) for grad in ordinary.values()) > 1e-2


def test_a_changed_choice_changes_loss_and_gradient():
    model = FAMILIES["qwen3"](dtype=torch.float32)
    batch = played(model)
    at = int(batch.lengths_B[0]) - 2, 1  # what the last trained token is predicted from
    experts = batch.experts_BTLK.clone()
    left = [e for e in range(8) if e not in experts[0, at[0], at[1]].tolist()]
    experts[0, at[0], at[1], 0] = left[0]
    loss, found = learn(model, batch)
    changed, moved = learn(model, replace(batch, experts_BTLK=experts))
    assert abs(changed - loss) > 1e-7
    assert not equal(found, moved, 1e-4)


def moved_routers(model, share=0.3):
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for router in routers_of(model):
            noise = torch.randn(router.weight.shape, generator=generator).to(router.weight)
            router.weight += share * router.weight.std() * noise


def test_micro_batches_padding_and_checkpointing_leave_the_gradient_alone():
    model = FAMILIES["qwen3"]()
    batch = played(model)
    moved_routers(model)
    loss, whole = learn(model, batch)
    assert not equal(whole, learn(model, batch, replayed=False)[1], 1e-3), "choices differ"
    parts, summed = learn(model, batch, 20)
    assert parts == pytest.approx(loss)
    assert equal(whole, summed, 1e-9)
    model.gradient_checkpointing_enable({"use_reentrant": False})
    model.train()
    assert equal(whole, learn(model, batch)[1], 1e-12)


@pytest.mark.filterwarnings("ignore:The following (rank|alpha)_pattern:RuntimeWarning")
def test_adapters_keep_their_routers_and_the_reference_its_own_choice():
    model = equipped(FAMILIES["qwen3"](dtype=torch.float32), Compute(lora_rank=2))
    batch = played(model)
    routers, ordinary = routers_of(model), learn(model, batch, replayed=False)
    assert len(routers) == 2
    assert equal(learn(model, batch)[1], ordinary[1], 1e-6)
    other = replace(batch, experts_BTLK=(batch.experts_BTLK + 1) % 8)
    assert not equal(learn(model, other)[1], ordinary[1], 1e-4)


def test_a_thread_that_samples_meanwhile_is_not_made_to_take_them():
    model = FAMILIES["mixtral"]()
    batch = played(model)
    wrong_BTLK = (batch.experts_BTLK + 1) % 8
    expected, found = two_turns(engine_of(model)), []
    with replayed_routing(model, wrong_BTLK):
        thread = threading.Thread(target=lambda: found.extend(two_turns(engine_of(model))))
        thread.start()
        for _ in range(5):
            frozen_logprobs(model, batch)
        thread.join()
    assert [one.ids for one in found] == [one.ids for one in expected]
    assert all((a.experts == b.experts).all() for a, b in zip(found, expected, strict=True))


@pytest.fixture(scope="module")
def tokenizer():
    return build_tokenizer(
        ["<|im_start|>user\nsay 3<|im_end|>\n<|im_start|>assistant\nyes<|im_end|>\n"] * 8, 280
    )


@pytest.fixture(scope="module")
def folder(tokenizer, tmp_path_factory):
    """A mixture of experts with its tokenizer, as a model folder."""
    path = tmp_path_factory.mktemp("mixture")
    ids = {"eos_token_id": tokenizer.eos_token_id, "pad_token_id": tokenizer.pad_token_id}
    shape = {"vocab_size": len(tokenizer), "initializer_range": 0.2, "bos_token_id": None, **ids}
    model = mixture("Qwen3Moe", torch.float32, num_experts=8, mlp_only_layers=[0], **shape)
    model.save_pretrained(path)
    tokenizer.save_pretrained(path)
    return path


async def talk(player):
    history = [Message.user("say 3")]
    for _ in range(3):
        message, _ = await player.act(history, ())
        history += [message, Message.user("say 3")]
    return player.trajectories


def test_a_player_carries_the_experts_of_every_turn(folder):
    import asyncio

    from agentrl.engines.loading import load_model, transformers_engine

    chat = open_chat(folder, ChatSettings())
    engine = transformers_engine(load_model(folder), chat, routing=True)
    policy = TokenPolicy(engine, chat, Sampling(max_tokens=5))
    with policy.player(Task(id="t", instruction=""), Limits(), 3) as player:
        (branch,) = asyncio.run(talk(player))
    assert sum(segment.finish is not None for segment in branch.segments) == 3
    assert branch.experts.shape == (len(branch.ids) - 1, 2, 2)


REPLAY = {"engine": {"routing": "replay"}, "compute": {"dtype": "bfloat16"}}


@pytest.mark.bit_equal
@pytest.mark.bfloat16
def test_a_run_in_bfloat16_replays_and_resumes_as_if_never_interrupted(folder, tmp_path):
    """Groups that wait for a later round keep their experts in the checkpoint."""
    change = REPLAY | {"loss": {"refill": True}, "group_size": 2, "steps": 4, "eval_every": 0}
    whole = run(settings(folder, **change), tmp_path / "a" / "x")
    assert all(0 <= row["parity/experts_differ"] < 0.2 for row in whole)
    run(settings(folder, **change | {"steps": 2}), tmp_path / "b" / "x")
    assert run(settings(folder, **change), tmp_path / "b" / "x", resume=True) == whole
    episodes = read_episodes(tmp_path / "a/x/episodes.jsonl").values()
    assert all(branch.experts is None for one in episodes for branch in one.trajectories)


def test_groups_that_wait_are_saved_with_their_experts(tmp_path):
    from trainer_cases import episode

    from agentrl.trajectory import Group

    branch = two_turns(engine_of(FAMILIES["mixtral"]()))[0]
    rounds = Rounds(None, None, 1, recipe("dapo"))
    rounds._kept = [Group((episode(branch),))]
    rounds._tasks = {"t": Task(id="t", instruction="do it")}
    rounds.save(tmp_path)
    rounds._kept = []
    rounds.load(tmp_path)
    (found,) = rounds._kept[0].episodes[0].trajectories
    assert (found.experts == branch.experts).all()


def test_experts_are_recorded_where_that_is_asked(folder, tmp_path):
    config = settings(folder, steps=1, eval_every=0, engine={"routing": "record"})
    (row,) = run(config, tmp_path / "x")
    assert row["parity/experts_differ"] == 0.0, "one arithmetic, one choice"
    assert row["parity/gap_max"] < 1e-4
    for one in read_episodes(tmp_path / "x" / "episodes.jsonl").values():
        (branch,) = one.trajectories
        assert branch.experts.shape == (len(branch.ids) - 1, 2, 2)


def test_models_and_engines_that_cannot_are_refused(folder, tokenizer, tmp_path):
    from naive_engine import NaiveEngine

    dense = build_model(tmp_path / "dense", tokenizer, width=32, layers=1, context=256)
    for model, options, said in (
        (dense, {}, "Qwen3ForCausalLM has no experts: leave it out"),
        (
            folder,
            {"engine": lambda model, chat, synchronous: NaiveEngine(model, chat.stop_ids)},
            "does not tell which experts it chose",
        ),
    ):
        with pytest.raises(ConfigError, match=said):
            Run(settings(model, **REPLAY), tmp_path / "refused", **options)
        assert not Path(tmp_path / "refused" / "metrics.jsonl").exists()
    with pytest.raises(ConfigError, match="set routing='off', or name='transformers'"):
        settings(folder, engine={"name": "vllm", "routing": "replay"})


def test_a_gap_without_recorded_experts_names_the_setting():
    model = FAMILIES["qwen3"](dtype=torch.float32)
    batch = packed(*two_turns(engine_of(model)))
    moved_routers(model)
    for rows in (batch, replace(batch, experts_BTLK=None)):
        (found,) = judge_gap(model, rows, {"parity/gap_mean": 0.5}, 1.0)
        assert ("try engine.routing='replay'" in found.message) == (rows is not batch)


def test_the_plan_counts_what_is_replayed(folder):
    from agentrl.trainers.memory import plan_run

    plans = [plan_run(settings(folder, **change), Limits()) for change in ({}, REPLAY)]
    tokens = 4 * 4 * SHAPE["max_position_embeddings"]
    assert "experts of a round" not in plans[0].resident
    assert plans[1].resident["experts of a round"] == 2 * tokens * 2 * 2

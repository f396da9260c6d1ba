"""The embedded engine tells which experts each token went to, and a scorer can take the same."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import numpy as np
import pytest
import torch
from helpers import tiny_model_folder
from mixtures import FAMILIES, mixture
from routed import TOKENS, engine_of, packed, two_turns

from agentrl.engines.base import Sampling
from agentrl.engines.loading import load_model
from agentrl.engines.routing import (
    recorded_routing,
    refuse_unroutable,
    replayed_routing,
    routers_of,
)
from agentrl.engines.transformers import TransformersEngine
from agentrl.errors import ConfigError
from agentrl.records.rows import episode_of, episode_row
from agentrl.trainers.models.scoring import frozen_logprobs
from agentrl.trajectory import Segment, Trajectory


def sample(engine, *prompts):
    """One batch of continuations, of as many tokens each, while episodes are seated."""

    async def play():
        with engine.seat():
            asked = (
                engine.generate(prompt, Sampling(max_tokens=TOKENS), seed=seed)
                for seed, prompt in enumerate(prompts)
            )
            return await asyncio.gather(*asked)

    return asyncio.run(play())


def chosen_by(model, ids):
    """What the routers themselves say of a row that is read at once: (T, layers, experts)."""
    found = []
    handles = [
        router.register_forward_hook(
            lambda module, inputs, output: found.append(
                next(part for part in output if not part.is_floating_point())
            )
        )
        for router in routers_of(model)
    ]
    with torch.no_grad():
        model(input_ids=torch.tensor([ids]))
    for handle in handles:
        handle.remove()
    return torch.stack(found, 1).numpy()


def unordered(experts):
    return np.sort(np.asarray(experts, np.int64), -1)


@pytest.mark.parametrize("family", FAMILIES)
def test_every_token_that_was_read_has_the_experts_that_its_routers_chose(family):
    model = FAMILIES[family]()
    prompts = ([3, 4, 5, 6, 7], [8, 9], [8, 9])
    for prompt, out in zip(prompts, sample(engine_of(model), *prompts), strict=True):
        ids, told = [*prompt, *out.ids], out.per_token["routing"]
        assert told.dtype == np.uint8
        assert told.shape == (len(ids) - 1, len(routers_of(model)), 2)
        assert (unordered(told) == unordered(chosen_by(model, ids[:-1]))).all()


@pytest.mark.parametrize("family", FAMILIES)
def test_a_scorer_with_other_routers_is_made_to_take_them(family):
    """Routers that moved choose otherwise; the weights of what is prescribed are theirs."""
    model = FAMILIES[family]()
    batch = packed(*two_turns(engine_of(model)))
    agreed_BT = frozen_logprobs(model, batch)
    assert torch.allclose(agreed_BT, batch.old_logprobs_BT.double(), atol=1e-4)
    generator = torch.Generator().manual_seed(1)
    for router in routers_of(model):
        noise = torch.randn(router.weight.shape, generator=generator, dtype=torch.float64)
        router.weight.data += router.weight.std() * noise
    free_BT = frozen_logprobs(model, batch)
    with replayed_routing(model, batch.experts_BTLK) as replay:
        forced_BT = frozen_logprobs(model, batch)
        with recorded_routing(model) as chosen, torch.no_grad():
            model(input_ids=batch.ids_BT)
    known = batch.experts_BTLK[..., 0, 0] >= 0
    used_BTLK = torch.stack(chosen, 1).view(batch.experts_BTLK.shape)
    assert torch.equal(used_BTLK[known].short(), batch.experts_BTLK[known])
    assert 0 < int(replay.differ) < int(replay.replayed)
    assert not torch.allclose(forced_BT, free_BT, atol=1e-3)
    other_BTLK = torch.where(batch.experts_BTLK < 0, -1, (batch.experts_BTLK + 1) % 8)
    with replayed_routing(model, other_BTLK):
        assert not torch.allclose(frozen_logprobs(model, batch), forced_BT, atol=1e-3)


def test_groups_of_experts_follow_the_experts_that_are_prescribed():
    """An expert outside of the groups that the router prefers has its own weight, not zero."""
    model = FAMILIES["deepseek 2"]()
    router, states = routers_of(model)[0], torch.randn(1, 1, 32, dtype=torch.float64)
    logits, _, own = router(states)
    other_BTLK = ((own + 4) % 8).view(1, 1, 1, 2).expand(1, 1, 2, 2)
    with replayed_routing(model, other_BTLK):
        _, weights, chosen = router(states)
    assert torch.equal(chosen, other_BTLK[0, 0, :1])
    expected = logits.softmax(-1).gather(-1, chosen) * router.routed_scaling_factor
    assert torch.allclose(weights, expected)


def test_kept_histories_keep_their_experts_and_count_their_memory():
    model = FAMILIES["mixtral"]()
    engine, anew = engine_of(model), engine_of(model, history_mb=0)
    for kept, fresh in zip(two_turns(engine), two_turns(anew), strict=True):
        assert kept.ids == fresh.ids
        assert len(kept.experts) == len(kept.ids) - 1
        assert (unordered(kept.experts) == unordered(fresh.experts)).all()
    asyncio.run(count_memory(engine))


async def count_memory(engine):
    with engine.seat():
        out = await engine.generate([5, 6, 7], Sampling(max_tokens=TOKENS), seed=0)
        (history,) = engine.histories._by_hash.values()
        assert (history.experts == out.per_token["routing"]).all()
        keys = sum(keys.nbytes + values.nbytes for keys, values in history.layers)
        assert engine.histories._bytes == keys + history.experts.nbytes


def test_experts_that_were_recorded_stay_and_forks_have_those_of_their_beginning():
    first, later = np.full((4, 2, 2), 1, np.uint8), np.full((8, 2, 2), 2, np.uint8)
    said = Segment.sampled([4, 5], [-1.0, -1.0], 0, "stop")
    branch = Trajectory((Segment.prompt([1, 2, 3]),)).extend(said).routed(first)
    branch = branch.extend(Segment.observation([6, 7]), said).routed(later).routed(None)
    assert branch.experts[:, 0, 0].tolist() == [1, 1, 1, 1, 2, 2, 2, 2]
    assert branch.fork(2).experts[:, 0, 0].tolist() == [1, 1, 1, 1, 2]
    assert branch.fork(2).extend(Segment.observation([9])).experts.shape == (5, 2, 2)
    with pytest.raises(ValueError, match="3 ids but experts of 4 tokens"):
        Trajectory((Segment.prompt([1, 2, 3]),), experts=first)


def test_packed_rows_have_minus_one_where_nobody_said():
    said = Segment.sampled([4, 5], [-1.0, -1.0], 0, "stop")
    plain = Trajectory((Segment.prompt([1, 2, 3]), said))
    told = plain.routed(np.full((4, 2, 2), 200, np.uint8))
    short = Trajectory((Segment.prompt([1]), said)).routed(np.zeros((2, 2, 2), np.uint8))
    assert packed(plain).experts_BTLK is None
    found = packed(plain, told, short).experts_BTLK
    assert found.dtype == torch.int16
    rows = [[-1] * 5, [200] * 4 + [-1], [0, 0, -1, -1, -1]]
    assert found[:, :, 1, 1].tolist() == rows
    cut = packed(plain, told, short).rows(torch.tensor([2]))
    assert cut.experts_BTLK.shape == (1, 3, 2, 2)
    with pytest.raises(Exception, match="train on episodes of one model"):
        packed(told, replace(short, experts=np.zeros((2, 3, 2), np.uint8)))


@pytest.mark.parametrize("kind", [np.uint8, np.uint16])
def test_records_hold_experts_only_if_asked_and_give_them_back(kind):
    from trainer_cases import episode

    said = Segment.sampled([4, 5], [-1.0, -1.0], 0, "stop")
    experts = np.arange(16, dtype=kind).reshape(4, 2, 2)
    one = episode(Trajectory((Segment.prompt([1, 2, 3]), said)).routed(experts))
    assert episode_of(episode_row(one)).trajectories[0].experts is None
    back = episode_of(episode_row(one, experts=True)).trajectories[0].experts
    assert back.dtype == kind
    assert (back == experts).all()


def test_what_has_no_experts_or_hides_its_choice_is_refused_by_name():
    dense = load_model(tiny_model_folder())
    with pytest.raises(ConfigError, match="Qwen3ForCausalLM has no experts: leave it out"):
        TransformersEngine(dense, frozenset()).tell_routing()
    phi = mixture("Phimoe", num_local_experts=8)
    with pytest.raises(ConfigError, match="PhimoeForCausalLM chooses experts in PhimoeTopKRouter"):
        refuse_unroutable(phi)
    jamba = {"num_experts": 4, "mamba_d_state": 4, "mamba_dt_rank": 4}
    jamba |= {"expert_layer_period": 1, "expert_layer_offset": 0}
    hidden = mixture("Jamba", **jamba, attn_layer_period=2, attn_layer_offset=1)
    with pytest.raises(ConfigError, match="experts in JambaSparseMoeBlock, not by one"):
        refuse_unroutable(hidden)
    phi.train()
    assert not TransformersEngine(phi, frozenset()).tells_routing
    assert phi.training

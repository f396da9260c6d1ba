"""A critic that trains: what it learns, under which compute settings, and that a resumed one goes
on as if never interrupted.
"""

from __future__ import annotations

import math
from dataclasses import replace
from functools import partial

import pytest
import torch
from critic_cases import STEADY, learned, opinionated
from trainer_cases import PAD, batch_of, branch, episode, group

from agentrl.engines.loading import load_critic, scalar_head
from agentrl.errors import TrainingError
from agentrl.trainers.algorithms.credit import gae, length_adaptive_gae
from agentrl.trainers.algorithms.losses import by_episode, by_token
from agentrl.trainers.batch import pack
from agentrl.trainers.config import Compute, CriticSettings
from agentrl.trainers.models.critic import Critic, monte_carlo
from agentrl.trainers.models.value_model import load_value_model, values
from agentrl.trajectory import Group


def test_a_critic_learns_returns_that_the_ids_tell(policy):
    """Episodes whose prompt has another first id have another outcome; some have two turns, with a
    tool between.
    """
    shapes = (((3, 0),), ((2, 3), (2, 0)), ((1, 1), (1, 4), (3, 0)))
    told = tuple(
        episode(
            branch(2, *shapes[i % 3], first_id=10 + 10 * (i % 5)),
            reward=float(i % 5 in (1, 2)),
            sample=i,
        )
        for i in range(30)
    )
    critic = Critic(
        load_critic(policy),
        CriticSettings(learning_rate=3e-3, epochs=2),
        minibatches=3,
        micro_tokens=100,
    )
    batch = pack([Group(told)], PAD)
    history = [critic.fit(gae(critic.predict(batch)), step) for step in range(8)]
    assert history[0]["value/explained_variance"] == pytest.approx(0, abs=1e-12)
    assert history[-1]["value/explained_variance"] > 0.9
    assert history[-1]["value/mean"] == pytest.approx(history[-1]["return/mean"], abs=0.1)


def test_micro_batches_give_the_gradient_of_the_whole(policy):
    batch = gae(
        Critic(load_critic(policy), STEADY).predict(batch_of(group(1.0, 0.0, 0.5, 1.0, 0.0)))
    )
    for aggregate in (by_token, by_episode):
        found = []
        for micro_tokens in (1, 30, 1000):
            critic = Critic(
                opinionated(), STEADY, micro_tokens=micro_tokens, aggregate=aggregate, minibatches=2
            )
            found.append(
                (critic.fit(batch, 0), torch.cat([w.flatten() for w in critic.model.parameters()]))
            )
        for metrics, weights in found[1:]:
            assert metrics == pytest.approx(found[0][0], abs=1e-9)
            assert torch.allclose(weights, found[0][1], atol=1e-9)


@pytest.mark.bit_equal
def test_a_loaded_critic_goes_on_as_if_it_had_never_been_away(policy, tmp_path):
    batch = batch_of(group(1.0, 0.0, 0.5, 1.0))

    def rounds(critic, steps):
        return [critic.fit(gae(critic.predict(batch), lam=0.9), step) for step in steps]

    whole = Critic(load_critic(policy), STEADY, minibatches=2)
    first = Critic(load_critic(policy), STEADY, minibatches=2)
    expected, begun = rounds(whole, range(6)), rounds(first, range(3))
    first.save(tmp_path / "critic")
    second = Critic.load(tmp_path / "critic", STEADY, minibatches=2)
    assert begun + rounds(second, range(3, 6)) == expected
    assert all(
        torch.equal(a, b)
        for a, b in zip(whole.model.parameters(), second.model.parameters(), strict=True)
    )
    slower = Critic.load(tmp_path / "critic", STEADY.model_copy(update={"learning_rate": 1e-4}))
    assert {settings["lr"] for settings in slower.optimizer.param_groups} == {1e-4}


def told(policy, compute, saved=None):
    """A critic under compute settings; every optimizer step sees all that it trains."""
    with torch.random.fork_rng():
        torch.manual_seed(7)
        model = load_value_model(policy, compute, saved)
    return Critic(model, STEADY, minibatches=2)


@pytest.mark.bit_equal
@pytest.mark.parametrize(
    "compute",
    [
        Compute(lora_rank=4),
        pytest.param(Compute(dtype="bfloat16"), marks=pytest.mark.bfloat16),
        pytest.param(
            Compute(dtype="bfloat16", lora_rank=4, gradient_checkpointing=True),
            marks=pytest.mark.bfloat16,
        ),
    ],
    ids=["adapters", "bfloat16", "bfloat16-adapters"],
)
def test_a_loaded_critic_goes_on_under_every_compute_setting(policy, tmp_path, compute):
    batch = batch_of(group(1.0, 0.0, 0.5, 1.0))

    def rounds(critic, steps):
        return [critic.fit(gae(critic.predict(batch), lam=0.9), step) for step in steps]

    expected, first = rounds(told(policy, compute), range(4)), told(policy, compute)
    begun = rounds(first, range(2))
    assert begun[0]["value/loss"] > begun[1]["value/loss"] > 0
    first.save(tmp_path / "critic")
    where = {"start": policy, "compute": compute}
    second = Critic.load(tmp_path / "critic", STEADY, **where, minibatches=2)
    assert begun + rounds(second, range(2, 4)) == expected
    plain = values(load_critic(tmp_path / "critic"), batch)  # what anybody loads
    gap = 0.02 if compute.dtype == "bfloat16" else 1e-6
    assert torch.allclose(plain, first.predict(batch).values_BT, atol=gap) and plain.any()


def test_a_critic_with_adapters_trains_them_and_its_head_alone(policy):
    critic = told(policy, Compute(lora_rank=4, dtype="bfloat16"))
    before = {name: weight.clone() for name, weight in critic.model.named_parameters()}
    batch = batch_of(group(1.0, 0.0, 0.5, 1.0))
    for step in range(3):
        critic.fit(gae(critic.predict(batch), lam=0.9), step)
    after = dict(critic.model.named_parameters())
    moved = {name for name, weight in after.items() if not torch.equal(weight, before[name])}
    assert moved == {name for name, weight in after.items() if weight.requires_grad}
    assert all("lora_" in name or "score" in name for name in moved) and len(moved) > 2
    frozen = {weight.dtype for name, weight in after.items() if name not in moved}
    assert frozen == {torch.bfloat16} and scalar_head(critic.model).weight.dtype == torch.float32
    state = critic.optimizer.state_dict()["state"]
    assert len(state) == len(moved), "moments of what trains, and of nothing else"


def test_checkpointing_computes_each_layer_twice_and_changes_no_number(policy):
    batch = learned(batch_of(group(1.0, 0.0, 0.5)))
    found, seen = [], []
    for checkpointing in (False, True):
        critic = told(policy, Compute(gradient_checkpointing=checkpointing))
        calls = []
        layer = critic.model.base_model.layers[0].mlp
        layer.register_forward_pre_hook(lambda *_, calls=calls: calls.append(1))
        found.append((critic.fit(batch, 0), *critic.model.parameters()))
        seen.append(len(calls))
        assert not critic.model.training
    assert seen[1] == 2 * seen[0]
    assert found[0][0] == pytest.approx(found[1][0])
    pairs = zip(found[0][1:], found[1][1:], strict=True)
    assert all(torch.allclose(a, b, atol=1e-6) for a, b in pairs)


def test_a_loss_that_is_no_number_stops_before_the_step(policy):
    critic = Critic(load_critic(policy), STEADY)
    before = [weight.clone() for weight in critic.model.parameters()]
    batch = learned(batch_of(group(1.0, 0.0)))
    spoilt_BT = torch.where(batch.mask_BT, math.inf, 0.0)
    with pytest.raises(
        TrainingError, match=r"critic: loss=inf.*no step was taken.*critic\.learning_rate"
    ):
        critic.fit(replace(batch, returns_BT=spoilt_BT), 0)
    assert all(torch.equal(a, b) for a, b in zip(before, critic.model.parameters(), strict=True))


@pytest.mark.parametrize(
    "wrong", [{"learning_rate": 0}, {"epochs": 0}, {"value_clip": 0}, {"warmup": -1}, {"lr": 1}]
)
def test_wrong_settings_are_refused(wrong):
    with pytest.raises(ValueError, match=next(iter(wrong))):
        CriticSettings(**wrong)


def test_pre_training_is_on_what_came_out_and_not_on_what_an_untrained_critic_says():
    batch = learned(batch_of(group(1.0, 0.0, 0.5)))
    came_out_BT = torch.where(batch.mask_BT, batch.reward_E[batch.episode_B, None], 0.0)
    for step in (gae, length_adaptive_gae, partial(length_adaptive_gae, value_lam=0.9)):
        (pre_training,) = monte_carlo([step])
        found = pre_training(batch)
        assert torch.allclose(found.returns_BT, came_out_BT, atol=1e-12)
    assert not torch.allclose(gae(batch).returns_BT, came_out_BT, atol=0.1)
    assert [
        Critic(opinionated(), CriticSettings(warmup=2)).is_pretraining(step) for step in range(3)
    ] == [1, 1, 0]

"""Mixtures of experts: replayed routing gives the sampler's log-probabilities; no auxiliary loss unless asked for."""

from __future__ import annotations

import pytest
import torch
from test_scoring import multi_turn_batch

from agentrl.errors import ConfigError
from agentrl.trainers.moe import recorded_routing, replayed_routing, routers_of
from agentrl.trainers.scoring import frozen_logprobs, token_logprobs

SHAPE = {
    "vocab_size": 97,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "intermediate_size": 32,
    "num_experts_per_tok": 2,
    "initializer_range": 0.4,
    "output_router_logits": False,
}


def qwen3_moe(**changes):
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    torch.manual_seed(0)
    settings = SHAPE | {"moe_intermediate_size": 16, "num_experts": 8} | changes
    config = Qwen3MoeConfig(**settings)
    return Qwen3MoeForCausalLM._from_config(config, experts_implementation="eager").double().eval()


def mixtral(**changes):
    from transformers import MixtralConfig, MixtralForCausalLM

    torch.manual_seed(0)
    config = MixtralConfig(**(SHAPE | {"num_local_experts": 8} | changes))
    return MixtralForCausalLM._from_config(config, experts_implementation="eager").double().eval()


MODELS = [qwen3_moe, lambda: qwen3_moe(norm_topk_prob=True), mixtral]


def record(model, batch):
    with recorded_routing(model) as chosen:
        logprobs_BT = frozen_logprobs(model, batch)
    layers = len(routers_of(model))
    per_layer = [one.view(*batch.ids_BT.shape, -1) for one in chosen[-layers:]]
    return torch.stack(per_layer, 2), logprobs_BT


def move_the_routers(model):
    """What another precision does to near ties, only more of it: other experts are chosen, little else changes."""
    generator = torch.Generator().manual_seed(1)
    originals = []
    for router in routers_of(model):
        originals.append(router.weight.detach().clone())
        noise = torch.randn(router.weight.shape, generator=generator, dtype=torch.float64)
        router.weight.data += 0.3 * router.weight.std() * noise
    return originals


@pytest.mark.parametrize("make", MODELS)
def test_replayed_routing_reproduces_the_log_probabilities(make):
    model, batch = make(), multi_turn_batch()
    frozen_logprobs(model, batch)
    experts_BTLK, expected_BT = record(model, batch)
    with replayed_routing(model, experts_BTLK):
        assert torch.equal(frozen_logprobs(model, batch), expected_BT)
    again_BTLK, _ = record(model, batch)
    assert torch.equal(again_BTLK, experts_BTLK), "nothing is forced outside"


@pytest.mark.parametrize("make", MODELS)
def test_the_choice_is_forced_and_the_weights_are_the_models_own(make):
    model, batch = make(), multi_turn_batch()
    frozen_logprobs(model, batch)
    experts_BTLK, _ = record(model, batch)
    move_the_routers(model)
    free_BTLK, free_BT = record(model, batch)
    assert not torch.equal(free_BTLK, experts_BTLK)
    with replayed_routing(model, experts_BTLK):
        used_BTLK, forced_BT = record(model, batch)
    assert torch.equal(used_BTLK, experts_BTLK)
    assert not torch.allclose(forced_BT, free_BT)
    with replayed_routing(model, torch.full_like(experts_BTLK, -1)):
        assert torch.equal(frozen_logprobs(model, batch), free_BT)


@pytest.mark.parametrize("checkpointing", [False, True])
def test_routers_keep_their_gradient_under_replay(checkpointing):
    model, batch = qwen3_moe(), multi_turn_batch()
    frozen_logprobs(model, batch)
    experts_BTLK, _ = record(model, batch)
    if checkpointing:
        model.gradient_checkpointing_enable({"use_reentrant": False})
        model.train()
    move_the_routers(model)
    with replayed_routing(model, experts_BTLK):
        token_logprobs(model, batch).logprobs_BT.sum().backward()
    found = [router.weight.grad.clone() for router in routers_of(model)]
    epsilon, router = 1e-5, routers_of(model)[0]
    place = tuple(int(x) for x in (found[0].abs() == found[0].abs().max()).nonzero()[0])
    values = []
    for sign in (1, -1):
        router.weight.data[place] += sign * epsilon
        with replayed_routing(model, experts_BTLK):
            values.append(float(frozen_logprobs(model, batch).sum()))
        router.weight.data[place] -= sign * epsilon
    assert (values[0] - values[1]) / (2 * epsilon) == pytest.approx(float(found[0][place]), rel=2e-2)


def test_the_load_balancing_loss_is_off_even_where_the_configuration_asks_for_it():
    batch, gradients = multi_turn_batch(), []
    for asked in (False, True):
        model = qwen3_moe(output_router_logits=asked, router_aux_loss_coef=10.0)
        token_logprobs(model, batch).logprobs_BT.sum().backward()
        gradients.append([parameter.grad for parameter in model.parameters()])
    assert all(torch.equal(*pair) for pair in zip(*gradients, strict=True))


def test_routing_of_another_model_or_batch_is_refused():
    model, batch = qwen3_moe(), multi_turn_batch()
    frozen_logprobs(model, batch)
    experts_BTLK, _ = record(model, batch)
    with pytest.raises(ConfigError, match="1 layers"), replayed_routing(model, experts_BTLK[:, :, :1]):
        pass
    with pytest.raises(ConfigError, match="of shape"), replayed_routing(model, experts_BTLK[:1]):
        frozen_logprobs(model, batch)
    for router in routers_of(model):
        router.register_forward_hook(lambda module, inputs, output: (output[0], output[1] * 1.7, output[2]))
    with pytest.raises(ConfigError, match="no softmax"), replayed_routing(model, experts_BTLK):
        frozen_logprobs(model, batch)

"""Mixtures of experts: replayed routing gives the sampler's log-probabilities; load balance only if
asked for.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch
from test_scoring import multi_turn_batch
from trainer_cases import tiny_model

from agentrl.engines.routing import recorded_routing, replayed_routing, routers_of
from agentrl.errors import ConfigError
from agentrl.records.files import read_metrics
from agentrl.trainers.algorithms.recipes import recipe
from agentrl.trainers.config import check_config
from agentrl.trainers.loop import train
from agentrl.trainers.models.moe import with_router_loss
from agentrl.trainers.models.scoring import frozen_logprobs, token_logprobs
from agentrl.trainers.run import Run

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
    """What another precision does to near ties, only more of it: other experts are chosen, little
    else changes.
    """
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
    assert (values[0] - values[1]) / (2 * epsilon) == pytest.approx(
        float(found[0][place]), rel=2e-2
    )


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
    with (
        pytest.raises(ConfigError, match="1 layers"),
        replayed_routing(model, experts_BTLK[:, :, :1]),
    ):
        pass
    with pytest.raises(ConfigError, match="of shape"), replayed_routing(model, experts_BTLK[:1]):
        frozen_logprobs(model, batch)
    with (
        pytest.raises(ConfigError, match="names expert 8, and the model numbers them from 0 to 7"),
        replayed_routing(model, torch.full_like(experts_BTLK, 8)),
    ):
        pass


# --- load balance


def granite(**changes):
    """A family whose routers say the same in another order."""
    from transformers import GraniteMoeConfig, GraniteMoeForCausalLM

    torch.manual_seed(0)
    config = GraniteMoeConfig(**(SHAPE | {"num_local_experts": 8, "pad_token_id": 0} | changes))
    return (
        GraniteMoeForCausalLM._from_config(config, experts_implementation="eager").double().eval()
    )


def balanced(model, batch):
    return with_router_loss(model, batch, partial(token_logprobs, model, batch))


def own_loss(model, batch):
    """What the model itself says, with a mask over padding."""
    mask_BT = batch.attention_BT.long()
    return model(
        input_ids=batch.ids_BT, attention_mask=mask_BT, output_router_logits=True, use_cache=False
    ).aux_loss


def check_the_router_loss(measure):
    """It is the model's own over all tokens but padding, with its gradient; the log-probabilities
    stay as they were.
    """
    batch = multi_turn_batch()
    assert not batch.attention_BT.all(), "some rows are padded"
    for make in (*MODELS, granite):
        model = make()
        output = measure(model, batch)
        assert torch.equal(output.logprobs_BT, token_logprobs(model, batch).logprobs_BT)
        found, expected = output.router_loss, own_loss(model, batch)
        assert float(found.detach()) == pytest.approx(float(expected.detach()), rel=1e-6)
        weights = [router.weight for router in routers_of(model)]
        for ours, theirs in zip(
            *(torch.autograd.grad(one, weights) for one in (found, expected)), strict=True
        ):
            assert theirs.abs().max() > 1e-3
            assert torch.allclose(ours, theirs, atol=1e-7)


def of_everything(model, batch):
    """Padding counts."""
    return balanced(model, replace(batch, attention_BT=torch.ones_like(batch.attention_BT)))


def of_trained_tokens(model, batch):
    """Prompts and tool output do not count."""
    return balanced(model, replace(batch, attention_BT=batch.mask_BT))


def without_gradient(model, batch):
    output = balanced(model, batch)
    return replace(output, router_loss=output.router_loss.detach().requires_grad_())


def of_the_first_layer(model, batch):
    """As if the model had one router."""
    output, kept = balanced(model, batch), model.model.layers
    model.model.layers = kept[:1]
    first = balanced(model, batch).router_loss
    model.model.layers = kept
    return replace(output, router_loss=first)


def test_the_router_loss_is_the_models_own_over_real_tokens():
    check_the_router_loss(balanced)


@pytest.mark.parametrize(
    "wrong",
    [of_everything, of_trained_tokens, of_the_first_layer, without_gradient],
    ids=lambda wrong: wrong.__name__,
)
def test_a_wrong_router_loss_is_flagged(wrong):
    with pytest.raises((AssertionError, RuntimeError)):
        check_the_router_loss(wrong)


def gradients(row, batch, make=qwen3_moe, checkpointing=False):
    """Of a recipe's loss, on made-up advantages, by parameter."""
    model = make()
    if checkpointing:
        model.gradient_checkpointing_enable({"use_reentrant": False})
        model.train()
    batch = replace(batch, advantages_BT=torch.where(batch.mask_BT, batch.ids_BT % 3 - 1.0, 0.0))
    output = balanced(model, batch) if "router" in row.needs else token_logprobs(model, batch)
    row.loss(output, batch)[0].backward()
    return {name: parameter.grad for name, parameter in model.named_parameters()}


@pytest.mark.bit_equal
def test_off_is_bit_equal_and_on_moves_the_routers():
    batch = multi_turn_batch()
    off, zero, on = (
        gradients(recipe("dapo", **some), batch)
        for some in ({}, {"load_balance_coef": 0.0}, {"load_balance_coef": 0.1})
    )
    assert all(torch.equal(off[name], zero[name]) for name in off)
    routers = [name for name in off if name.endswith("gate.weight")]
    assert len(routers) == 2
    model = qwen3_moe()
    expected = torch.autograd.grad(
        own_loss(model, batch), [router.weight for router in routers_of(model)]
    )
    for name, own in zip(routers, expected, strict=True):
        assert torch.allclose(on[name] - off[name], 0.1 * own, atol=1e-7), (
            "whole batch: the coefficient times its loss"
        )
    assert torch.equal(on["lm_head.weight"], off["lm_head.weight"]), "behind the last router"


def test_the_router_loss_survives_checkpointing():
    row, batch = recipe("dapo", load_balance_coef=0.1), multi_turn_batch()
    kept, again = (gradients(row, batch, checkpointing=flag) for flag in (False, True))
    assert all(torch.allclose(kept[name], again[name], atol=1e-12) for name in kept)


def test_micro_batches_add_up_to_the_mean_of_their_losses_by_trained_tokens():
    row, batch, model = recipe("dapo", load_balance_coef=0.5), multi_turn_batch(), qwen3_moe()
    batch = replace(batch, advantages_BT=torch.zeros_like(batch.advantages_BT))
    found, expected = 0.0, 0.0
    for micro in batch.split(40):
        output = balanced(model, micro)
        found += row.loss(output, micro)[1]["loss"]
        expected += (
            0.5 * float(own_loss(model, micro).detach()) * int(micro.mask_BT.sum()) / batch.n_tokens
        )
    assert found == pytest.approx(expected, rel=1e-6)
    assert len(list(batch.split(40))) > 1
    whole = row.loss(balanced(model, batch), batch)[1]["loss"]
    assert whole != pytest.approx(found, rel=1e-3), "a product of two means is not linear"


def test_a_model_without_experts_is_refused():
    batch, model = multi_turn_batch(), tiny_model()
    with pytest.raises(ConfigError, match="Qwen2ForCausalLM has no experts: leave it out"):
        balanced(model, batch)


def test_a_family_without_such_a_loss_is_refused(monkeypatch):
    model = qwen3_moe()
    monkeypatch.delattr("transformers.models.qwen3_moe.modeling_qwen3_moe.load_balancing_loss_func")
    with pytest.raises(
        ConfigError,
        match="Qwen3MoeForCausalLM has no load-balance loss in transformers: leave it out",
    ):
        balanced(model, multi_turn_batch())


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """A dense model and a mixture of experts, with their tokenizer."""
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    from agentrl.trainers.models.tiny import build_model, build_tokenizer

    tokenizer = build_tokenizer(
        ["<|im_start|>user\nsay 3<|im_end|>\n<|im_start|>assistant\nyes<|im_end|>\n"] * 8, 280
    )
    dense = build_model(
        tmp_path_factory.mktemp("dense"), tokenizer, width=32, layers=1, context=256
    )
    torch.manual_seed(0)
    shape = SHAPE | {
        "vocab_size": len(tokenizer),
        "initializer_range": 0.06,
        "max_position_embeddings": 256,
    }
    special = {
        "eos_token_id": tokenizer.eos_token_id,
        "pad_token_id": tokenizer.pad_token_id,
        "bos_token_id": None,
    }
    mixture = tmp_path_factory.mktemp("mixture")
    config = Qwen3MoeConfig(**shape, **special, moe_intermediate_size=16, num_experts=8)
    Qwen3MoeForCausalLM(config).save_pretrained(mixture)
    tokenizer.save_pretrained(mixture)
    return dense, mixture


def run_of(model, **loss):
    env = f"{Path(__file__).parents[2] / 'support/toy_envs.py'}:Parity"
    row = {
        "env": env,
        "model": str(model),
        "steps": 2,
        "tasks_per_step": 4,
        "group_size": 4,
        "deterministic": True,
    }
    return check_config(row | {"learning_rate": 1e-3, "loss": loss}, "test")


def test_a_run_balances_experts_and_refuses_a_model_without(folders, tmp_path):
    dense, mixture = folders
    losses = []
    for name, loss in (("off", {}), ("on", {"load_balance_coef": 0.1})):
        with Run(run_of(mixture, **loss), tmp_path / name) as opened:
            train(opened)
        losses.append(read_metrics(tmp_path / name / "metrics.jsonl")[0]["policy/loss"])
    assert losses[1] - losses[0] == pytest.approx(0.1 * 2, rel=0.1), "about K where routers are new"
    with pytest.raises(
        ConfigError,
        match="load_balance_coef is for mixtures of experts, and Qwen3ForCausalLM has no experts",
    ):
        Run(run_of(dense, load_balance_coef=0.1), tmp_path / "refused")
    assert not (tmp_path / "refused" / "metrics.jsonl").exists()

"""Compute settings: adapters and their reference, bfloat16, gradient checkpointing, optimizers."""

from __future__ import annotations

import copy
import sys

import pytest
import torch
from pydantic import ValidationError
from test_scoring import multi_turn_batch
from trainer_cases import tiny_model

from agentrl.errors import ConfigError
from agentrl.trainers.config import OptimizerSettings
from agentrl.trainers.models.loading import (
    AdapterOff,
    Compute,
    load_policy,
    reference_of,
    save_policy,
)
from agentrl.trainers.models.optim import make_optimizer
from agentrl.trainers.models.scoring import frozen_logprobs, token_logprobs

RATE = 1e-2


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("model")
    tiny_model().save_pretrained(path)
    return path


def step(model, optimizer):
    """One step towards the trained tokens."""
    (-token_logprobs(model, multi_turn_batch()).logprobs_BT.sum()).backward()
    optimizer.step()
    optimizer.zero_grad()


def test_an_adapter_trains_alone_and_its_reference_is_the_policy_without_it(folder):
    compute, batch = Compute(lora_rank=4), multi_turn_batch()
    model = load_policy(folder, compute)
    optimizer = make_optimizer(model.parameters(), RATE)
    start = frozen_logprobs(tiny_model(), batch)
    assert torch.allclose(frozen_logprobs(model, batch), start, atol=1e-5), (
        "a new adapter changes nothing"
    )
    names = [name for name, parameter in model.named_parameters() if parameter.requires_grad]
    assert (
        names
        and all("lora_" in name for name in names)
        and not any("lm_head" in name for name in names)
    )
    reference = reference_of(model, compute, folder)
    before = {
        name: parameter.clone()
        for name, parameter in model.named_parameters()
        if not parameter.requires_grad
    }
    step(model, optimizer)
    assert not torch.allclose(frozen_logprobs(model, batch), start, atol=1e-2)
    assert torch.allclose(frozen_logprobs(reference, batch), start, atol=1e-5)
    assert not torch.allclose(frozen_logprobs(model, batch), start, atol=1e-2), (
        "the adapter is on again"
    )
    assert all(
        torch.equal(before[name], parameter)
        for name, parameter in model.named_parameters()
        if name in before
    )


@pytest.mark.bit_equal
def test_a_saved_adapter_is_a_plain_model_and_goes_on_where_it_was(folder, tmp_path):
    from transformers import AutoModelForCausalLM

    compute, batch = Compute(lora_rank=4), multi_turn_batch()
    model = load_policy(folder, compute)
    optimizer = make_optimizer(model.parameters(), RATE)
    step(model, optimizer)
    save_policy(model, tmp_path / "model")
    expected = frozen_logprobs(model, batch)
    plain = AutoModelForCausalLM.from_pretrained(tmp_path / "model")
    assert torch.allclose(frozen_logprobs(plain, batch), expected, atol=1e-4)
    again = load_policy(folder, compute, tmp_path / "adapter")
    assert torch.allclose(frozen_logprobs(again, batch), expected, atol=1e-6)
    assert torch.allclose(
        frozen_logprobs(AdapterOff(again), batch),
        frozen_logprobs(AdapterOff(model), batch),
        atol=1e-6,
    )
    step(again, make_optimizer(again.parameters(), RATE))
    assert not torch.allclose(frozen_logprobs(again, batch), expected, atol=1e-2), "it trains on"


def test_without_adapters_the_reference_is_loaded_from_the_start(folder):
    compute, batch = Compute(), multi_turn_batch()
    model = load_policy(folder, compute)
    optimizer = make_optimizer(model.parameters(), RATE)
    start = frozen_logprobs(model, batch)
    step(model, optimizer)
    reference = reference_of(model, compute, folder)
    assert torch.equal(frozen_logprobs(reference, batch), start)
    assert not any(parameter.requires_grad for parameter in reference.parameters())


@pytest.mark.parametrize("rank", [0, 4])
def test_bfloat16_trains_float32_weights_and_scores_in_float32(folder, rank):
    compute, batch = Compute(dtype="bfloat16", lora_rank=rank), multi_turn_batch()
    model = load_policy(folder, compute)
    optimizer = make_optimizer(model.parameters(), RATE)
    trained = {parameter.dtype for parameter in model.parameters() if parameter.requires_grad}
    frozen = {parameter.dtype for parameter in model.parameters() if not parameter.requires_grad}
    assert trained == {torch.float32} and frozen <= {torch.bfloat16}
    found, exact = frozen_logprobs(model, batch), frozen_logprobs(tiny_model(), batch)
    assert found.dtype == torch.float32
    assert 1e-4 < float((found - exact).abs().max()) < 0.5, "the backbone did compute in bfloat16"
    sampled = model(input_ids=batch.ids_BT).logits
    assert sampled.dtype == torch.float32, "the sampler's output layer is the scorer's"
    own_BT = sampled[:, :-1].log_softmax(-1).gather(-1, batch.ids_BT[:, 1:, None])[..., 0]
    both_N = own_BT[batch.mask_BT[:, 1:]], found[batch.mask_BT]
    assert torch.allclose(*both_N, rtol=0, atol=1e-5)
    step(model, optimizer)
    assert not torch.equal(frozen_logprobs(model, batch), found)
    gap = (
        (frozen_logprobs(reference_of(model, compute, folder), batch) - found)
        .abs()[batch.mask_BT]
        .mean()
    )
    assert float(gap) < 0.05, "a frozen copy in lower precision is near"


def test_a_copy_of_a_bfloat16_policy_computes_with_its_own_weights(folder):
    model = load_policy(folder, Compute(dtype="bfloat16"))
    twin, batch = copy.deepcopy(model), multi_turn_batch()
    before = frozen_logprobs(twin, batch)
    with torch.no_grad():
        model.model.layers[0].mlp.up_proj.weight.mul_(3)
    assert torch.equal(frozen_logprobs(twin, batch), before)
    assert type(model).__name__ == "Qwen2ForCausalLM"


@pytest.mark.parametrize("rank", [0, 4])
def test_gradient_checkpointing_changes_no_gradient(folder, rank):
    gradients, batch = [], multi_turn_batch()
    for checkpointing in (False, True):
        torch.manual_seed(0)
        model = load_policy(folder, Compute(gradient_checkpointing=checkpointing, lora_rank=rank))
        runs = []
        layer = next(
            module
            for name, module in model.named_modules()
            if name.endswith("layers.0.input_layernorm")
        )
        layer.register_forward_hook(lambda *_, runs=runs: runs.append(1))
        token_logprobs(model, batch)
        model.train()
        runs.clear()
        token_logprobs(model, batch).logprobs_BT.sum().backward()
        assert len(runs) == 1 + checkpointing, "a layer runs once, or again in the backward pass"
        gradients.append(
            [parameter.grad for parameter in model.parameters() if parameter.requires_grad]
        )
    assert all(torch.allclose(a, b, atol=1e-5) for a, b in zip(*gradients, strict=True))


def test_a_missing_optimizer_library_is_named_with_its_extra(monkeypatch):
    layer = torch.nn.Linear(2, 2)
    monkeypatch.setitem(sys.modules, "torchao.optim", None)
    with pytest.raises(ConfigError, match=r"agentrl\[lowbit\]"):
        make_optimizer(layer.parameters(), RATE, OptimizerSettings(name="adamw8bit"))


@pytest.mark.filterwarnings("ignore")  # torchao's own, on import
def test_adamw8bit_takes_the_step_of_adamw_with_small_moments():
    pytest.importorskip("torchao.optim")
    torch.manual_seed(0)
    layers = [torch.nn.Linear(96, 96) for _ in range(2)]
    layers[1].load_state_dict(layers[0].state_dict())
    for layer, name in zip(layers, ("adamw", "adamw8bit"), strict=True):
        optimizer = make_optimizer(layer.parameters(), RATE, OptimizerSettings(name=name))
        for seed in range(5):
            inputs = torch.randn(8, 96, generator=torch.Generator().manual_seed(seed))
            layer(inputs).square().sum().backward()
            optimizer.step()
            optimizer.zero_grad()
    assert torch.allclose(layers[0].weight, layers[1].weight, atol=RATE)


@pytest.mark.parametrize(
    "settings", [{"lora_rank": -1}, {"micro_tokens": 0}, {"dtype": "float16"}, {"optimiser": "x"}]
)
def test_senseless_settings_are_refused(settings):
    with pytest.raises(ValidationError):
        Compute(**settings)

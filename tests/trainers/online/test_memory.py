"""The memory plan: exact where it can be counted by hand, and within 15 % of what autograd keeps
and of what a process of its own really holds.
"""

from __future__ import annotations

import io
import json
import os
import subprocess
import sys
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch
import transformers
from memory_run import config_of
from rich.console import Console

from agentrl.errors import ConfigError
from agentrl.trainers.config import Compute, check_config
from agentrl.trainers.memory import Work, plan, plan_run, plan_table
from agentrl.types import Limits


def shape(width=128, layers=2, vocabulary=320):
    heads = {
        "num_attention_heads": max(1, width // 64),
        "num_key_value_heads": max(1, width // 128),
    }
    sizes = {"vocab_size": vocabulary, "hidden_size": width, "intermediate_size": 2 * width}
    return {**sizes, **heads, "num_hidden_layers": layers, "max_position_embeddings": 4096}


WORK = Work(micro_tokens=2048, samples=64, sample_tokens=256)


@pytest.fixture(scope="module")
def whole():
    return plan(config_of(shape()), WORK)


def weights(row):
    with torch.device("meta"):
        from transformers import AutoModelForCausalLM

        return sum(
            one.numel() for one in AutoModelForCausalLM.from_config(config_of(row)).parameters()
        )


def test_weights_gradients_and_optimizer_by_hand(whole):
    found, count = whole, weights(shape())
    assert found.models["policy"] == pytest.approx(4 * count, rel=0.01)  # and rotary frequencies
    assert found.gradients["gradients"] == 4 * count
    assert found.resident["optimizer"] == 8 * count
    rows, heads, width, layers = 64, 1, 64, 2
    assert found.sampling["key-value cache"] == 2 * 4 * rows * 255 * heads * width * layers


def test_other_models_add_and_their_precision_counts(whole):
    config, policy = config_of(shape()), whole.models["policy"]
    more = plan(config, WORK, frozen={"reference": config, "teacher": config}, critic=config)
    assert more.models == dict.fromkeys(("policy", "reference", "teacher", "critic"), policy)
    assert more.resident["critic's optimizer"] == whole.resident["optimizer"]
    assert (more.update, more.gradients) == (whole.update, whole.gradients)  # one after the other
    low = plan(
        config,
        WORK,
        compute=Compute(dtype="bfloat16"),
        optimizer="adamw8bit",
        frozen={"reference": config},
    )
    assert low.models["policy"] == policy
    assert low.models["reference"] == pytest.approx(policy / 2, rel=0.01)
    assert low.resident["optimizer"] == whole.resident["optimizer"] / 4
    assert low.sampling["key-value cache"] == whole.sampling["key-value cache"] / 2


def test_what_makes_an_update_larger(whole):
    config, base = config_of(shape()), whole.update
    assert (
        plan(config, replace(WORK, micro_tokens=4096)).update["activations"]
        == 2 * base["activations"]
    )
    frugal = plan(config, WORK, compute=Compute(gradient_checkpointing=True))
    assert frugal.update["activations"] < 0.3 * base["activations"]
    wide = config_of(shape(vocabulary=20_000))
    all_of_them, few = (
        plan(wide, replace(WORK, trained_tokens=count)).update for count in (None, 100)
    )
    assert sum(few.values()) < sum(all_of_them.values()) / 2
    # Logits exist for a chunk of 838 tokens, four times over at worst; never for all 2048.
    assert all_of_them["output layer"] < 5 * 838 * 20_000 * 4


def kept(model, ids_BT):
    """Bytes that autograd keeps of a forward pass through the decoder, weights left out."""
    weights = {one.untyped_storage().data_ptr() for one in model.parameters()}
    found = {}

    def note(tensor):
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in weights:
            found[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        state = model.get_decoder()(input_ids=ids_BT, use_cache=False).last_hidden_state
    assert state.requires_grad
    return sum(found.values())


MOE = {"num_experts_per_tok": 2, "moe_intermediate_size": 64}


@pytest.mark.parametrize("low", [False, True], ids=["float32", "bfloat16"])
@pytest.mark.parametrize(
    ("family", "more"),
    [
        ("Qwen2", {}),
        ("Qwen3", {"head_dim": 32}),
        ("Llama", {}),
        ("Mistral", {"sliding_window": None}),
        ("Phi3", {}),
        ("Olmo2", {}),
        ("Gemma2", {"head_dim": 16, "attn_implementation": "sdpa"}),
        ("Gemma3Text", {"head_dim": 16}),
        ("Glm4", {"head_dim": 16}),
        ("Qwen3Moe", {"num_experts": 8, "head_dim": 16, **MOE}),
        ("Mixtral", {"num_local_experts": 4, "num_experts_per_tok": 2}),
    ],
)
def test_activations_are_what_autograd_keeps(family, more, low):
    """The formula against real models of other families, on the real CPU kernels."""
    sizes = {"vocab_size": 64, "hidden_size": 64, "intermediate_size": 192}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "num_hidden_layers": 3}
    special = dict.fromkeys(("pad_token_id", "bos_token_id", "eos_token_id"), 0)
    config = getattr(transformers, f"{family}Config")(
        **sizes, **heads, **special, max_position_embeddings=512, **more
    )
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    compute = Compute(dtype="bfloat16" if low else "float32")
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=low):
        really = kept(model, torch.zeros((16, 128), dtype=torch.int64))
    found = plan(config, Work(micro_tokens=2048), compute=compute)
    assert found.update["activations"] == pytest.approx(really, rel=0.15)


def test_the_peak_is_the_worst_moment():
    found = plan(config_of(shape()), Work(micro_tokens=128, samples=256, sample_tokens=1024))
    always = sum(found.models.values()) + sum(found.resident.values())
    assert sum(found.sampling.values()) > sum(found.update.values())
    assert found.peak == always + sum(found.sampling.values())
    wide = plan(config_of(shape(512, 2, 150_000)), Work(micro_tokens=128, trained_tokens=1))
    assert sum(wide.gradients.values()) > sum(wide.update.values())
    always = sum(wide.models.values()) + sum(wide.resident.values())
    assert wide.peak == always + sum(wide.gradients.values())


def test_it_is_shown_as_json_and_as_a_table(whole):
    row = json.loads(json.dumps(whole.row()))
    assert row["peak_bytes"] == whole.peak and row["models"]["policy"] == whole.models["policy"]
    console = Console(width=100, record=True, file=io.StringIO())
    console.print(plan_table(whole))
    text = console.export_text()
    assert "peak" in text and "policy" in text and "key-value cache" in text and "MiB" in text


def test_a_run_is_planned_from_its_config_and_needs_no_weights(tmp_path):
    config_of(shape()).save_pretrained(tmp_path)
    row = {"env": "calc-v0", "model": str(tmp_path), "compute": {"micro_tokens": 2048}}
    found = plan_run(check_config(row, "test"), Limits(episode_tokens=128))
    assert set(found.models) == {"policy"} and found.update["activations"] > 0
    with_kl = plan_run(
        check_config(row | {"loss": {"kl_coef": 0.1}}, "test"), Limits(episode_tokens=128)
    )
    assert set(with_kl.models) == {"policy", "reference"}
    with pytest.raises(ConfigError, match="group_size=1"):
        plan_run(check_config(row | {"group_size": 1}, "test"), Limits())
    config_of(shape(width=64)).save_pretrained(tmp_path / "critic")
    ppo = row | {"recipe": "ppo", "loss": {"critic": {"model": str(tmp_path / "critic")}}}
    small = plan_run(check_config(ppo, "test"), Limits(episode_tokens=128)).models
    assert 0 < small["critic"] < small["policy"] / 2
    with pytest.raises(ConfigError, match="does not exist"):
        plan_run(check_config(row | {"model": str(tmp_path / "none")}, "test"), Limits())


def test_a_plan_knows_the_compute_settings_of_the_run_and_not_the_precision_of_the_folder(tmp_path):
    config = config_of(shape())
    config.dtype = (
        torch.bfloat16
    )  # as published models are; weights that train are loaded in float32
    config.save_pretrained(tmp_path)

    def planned(**compute):
        row = {"env": "calc-v0", "model": str(tmp_path), "loss": {"kl_coef": 0.1}}
        return plan_run(
            check_config(row | {"compute": {"micro_tokens": 512} | compute}, "test"), Limits()
        )

    plain, low, frugal = planned(), planned(dtype="bfloat16"), planned(gradient_checkpointing=True)
    weights, about = plain.models["policy"], partial(pytest.approx, rel=0.01)
    assert (plain.models["reference"], plain.gradients["gradients"]) == (weights, about(weights))
    assert low.models == {"policy": weights, "reference": about(weights / 2)}
    assert (
        low.update["activations"] < plain.update["activations"] > 2 * frugal.update["activations"]
    )
    for one, frozen in (
        (planned(lora_rank=4), weights),
        (planned(dtype="bfloat16", lora_rank=4), weights / 2),
    ):
        adapter = one.gradients["gradients"]
        assert one.models == {"policy": about(frozen + adapter)} and adapter < weights / 5
        assert one.resident["optimizer"] == about(2 * adapter)


# Against what a process really holds


GIVES_BACK = {"MALLOC_MMAP_THRESHOLD_": "65536"}
"""glibc then returns every freed tensor at once, so that a process is as large as what is in use.
"""


def measured(row):
    script = Path(__file__).parents[2] / "support/memory_run.py"
    command = [sys.executable, str(script), json.dumps(row)]
    settings = os.environ | {"OMP_NUM_THREADS": "1"} | GIVES_BACK
    done = subprocess.run(command, capture_output=True, text=True, timeout=280, env=settings)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def holds(model, work, row_tokens, *, checkpointing=False):
    compute = Compute(gradient_checkpointing=checkpointing)
    frozen = {"reference": config_of(model)} if checkpointing else None
    found = plan(config_of(model), work, compute=compute, frozen=frozen)
    row = {"model": model, "work": vars(work), "row_tokens": row_tokens}
    really = measured(row | {"checkpointing": checkpointing, "reference": checkpointing})
    assert found.peak == pytest.approx(next(iter(really.values())), rel=0.15), found.row()


def test_a_tiny_model_holds_what_was_planned():
    holds(shape(), replace(WORK, micro_tokens=8192), 128)


@pytest.mark.long
@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize(
    ("model", "tokens", "trained"),
    [(shape(512, 8, 50_000), 4096, 1024), (shape(512, 8, 150_000), 2048, 512)],
    ids=["46M, a quarter trained", "97M, 150k tokens"],
)
def test_fifty_to_a_hundred_million_parameters_hold_what_was_planned(
    model, tokens, trained, checkpointing
):
    work = Work(tokens, trained, samples=8, sample_tokens=64)
    holds(model, work, 512, checkpointing=checkpointing)

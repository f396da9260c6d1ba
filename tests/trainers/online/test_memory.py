"""The memory plan: exact where it can be counted by hand, and within 15 % of what a process of its
own really holds.
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
from memory_run import config_of
from rich.console import Console

from agentrl.errors import ConfigError
from agentrl.trainers.config import check_config
from agentrl.trainers.online.memory import Work, plan, plan_run, plan_table
from agentrl.types import Limits


def shape(width=128, layers=2, vocabulary=320):
    heads = {
        "num_attention_heads": max(1, width // 64),
        "num_key_value_heads": max(1, width // 128),
    }
    sizes = {"vocab_size": vocabulary, "hidden_size": width, "intermediate_size": 2 * width}
    return {**sizes, **heads, "num_hidden_layers": layers, "max_position_embeddings": 4096}


WORK = Work(micro_tokens=2048, row_tokens=128, samples=64, sample_tokens=256)


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
    assert found.models["policy"] == pytest.approx(
        4 * count, rel=0.01
    )  # and what rotary embeddings hold
    assert found.update["gradients"] == 4 * count
    assert found.resident["optimizer"] == pytest.approx(8 * count, rel=0.01)
    rows, heads, width, layers = 64, 1, 64, 2
    assert found.sampling["key-value cache"] >= 2 * 4 * rows * 255 * heads * width * layers
    assert found.sampling["key-value cache"] < 1.05 * 2 * 4 * rows * 255 * heads * width * layers


def test_half_precision_halves_and_other_models_add(whole):
    config = config_of(shape())
    config.dtype = torch.bfloat16
    half = plan(config, WORK)
    assert half.models["policy"] == pytest.approx(whole.models["policy"] / 2, rel=0.01)
    assert half.update["gradients"] == whole.update["gradients"] / 2
    more = plan(
        config_of(shape()),
        WORK,
        frozen={"reference": config_of(shape())},
        critic=config_of(shape()),
    )
    assert more.models["reference"] == more.models["critic"] == whole.models["policy"]
    assert more.resident["optimizer"] == pytest.approx(2 * whole.resident["optimizer"], rel=0.01)
    assert more.update["gradients"] == 2 * whole.update["gradients"]
    plain = plan(config_of(shape()), WORK, optimizer=lambda weights: torch.optim.SGD(weights))
    assert plain.resident["optimizer"] == 0


def test_a_reward_model_has_a_head_of_one_label():
    config = config_of(shape(vocabulary=50_000))
    config.architectures, config.num_labels, config.tie_word_embeddings = (
        ["Qwen3ForSequenceClassification"],
        1,
        False,
    )
    policy = config_of(shape(vocabulary=50_000))
    found = plan(policy, WORK, frozen={"reward model": config})
    assert found.models["reward model"] == pytest.approx(found.models["policy"], rel=0.01)


def test_what_makes_an_update_larger(whole):
    config, base = config_of(shape()), whole.update
    assert plan(config, replace(WORK, micro_tokens=4096)).update["activations"] == pytest.approx(
        2 * base["activations"], rel=0.05
    )
    assert (
        plan(config, replace(WORK, checkpointing=True)).update["activations"]
        < 0.3 * base["activations"]
    )
    wide = config_of(shape(vocabulary=20_000))
    work = replace(WORK, sample_tokens=0)
    all_of_them, few = (
        plan(wide, replace(work, trained_tokens=count)).update for count in (None, 100)
    )
    assert sum(few.values()) < sum(all_of_them.values()) / 2
    # Logits exist for a chunk of 1024 tokens, four times over at worst; never for the 2048 of the
    # micro-batch.
    assert all_of_them["output layer and temporaries"] < 5 * 1024 * 20_000 * 4


def test_the_peak_is_the_worse_of_update_and_sampling():
    found = plan(
        config_of(shape()), replace(WORK, micro_tokens=128, samples=256, sample_tokens=1024)
    )
    always = sum(found.models.values()) + sum(found.resident.values())
    assert sum(found.sampling.values()) > sum(found.update.values())
    assert found.peak == always + sum(found.sampling.values())


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
    assert (plain.models["reference"], plain.update["gradients"]) == (weights, about(weights))
    assert low.models == {"policy": weights, "reference": about(weights / 2)}
    assert (
        low.update["activations"] < plain.update["activations"] > 2 * frugal.update["activations"]
    )
    for one, frozen in (
        (planned(lora_rank=4), weights),
        (planned(dtype="bfloat16", lora_rank=4), weights / 2),
    ):
        adapter = one.update["gradients"]
        assert one.models == {"policy": about(frozen + adapter)} and adapter < weights / 5
        assert one.resident["optimizer"] == about(2 * adapter)


# Against what a process really holds


GIVES_BACK = {"MALLOC_MMAP_THRESHOLD_": "65536"}
"""glibc then returns every freed tensor at once, so that a process is as large as what is in use.
"""


def measured(row, **environment):
    script = Path(__file__).parents[2] / "support/memory_run.py"
    command = [sys.executable, str(script), json.dumps(row)]
    settings = os.environ | {"OMP_NUM_THREADS": "1"} | environment
    done = subprocess.run(command, capture_output=True, text=True, timeout=280, env=settings)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def holds(model, work, *, reference=False, **environment):
    config = config_of(model)
    found = plan(config, work, frozen={"reference": config} if reference else None)
    really = measured({"model": model, "work": vars(work), "reference": reference}, **environment)
    planned = {"cpu": found.peak if environment else found.peak_cpu, "cuda": found.peak}
    for device, size in really.items():
        assert planned[device] == pytest.approx(size, rel=0.15), (found.row(), really)


def test_a_tiny_model_holds_what_was_planned():
    holds(shape(), replace(WORK, micro_tokens=8192), **GIVES_BACK)


LARGE = Work(micro_tokens=2048, row_tokens=512, samples=8, sample_tokens=64)
CASES = pytest.mark.parametrize(
    ("model", "work"),
    [
        (shape(512, 8, 50_000), replace(LARGE, micro_tokens=4096, trained_tokens=1024)),
        (shape(512, 8, 150_000), replace(LARGE, trained_tokens=512)),
    ],
    ids=["46M, a quarter trained", "97M, 150k tokens"],
)


@pytest.mark.long
@pytest.mark.parametrize("checkpointing", [False, True])
@CASES
def test_fifty_to_a_hundred_million_parameters_hold_what_was_planned(model, work, checkpointing):
    holds(model, replace(work, checkpointing=checkpointing), reference=checkpointing, **GIVES_BACK)


@pytest.mark.long
@CASES
def test_so_they_do_with_what_the_c_library_keeps(model, work):
    holds(model, work)

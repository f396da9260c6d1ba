"""Dropout of every stage, model family and head: what `compute.dropout` says, and nothing else."""

from __future__ import annotations

import itertools
from functools import lru_cache
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

import pytest
import torch
from preference_cases import planted_pairs, tiny_policy, write_rows
from transformers import AutoConfig, AutoModelForCausalLM, GPT2Config, LlamaConfig, Qwen2Config

from agentrl.engines.loading import load_tokenizer
from agentrl.records.files import read_metrics
from agentrl.trainers.offline.objectives import OBJECTIVES
from agentrl.trainers.offline.settings import StageSettings
from agentrl.trainers.offline.stage import run_stage

FAMILIES = ("gpt2", "llama", "qwen2")
STAGES: dict[str, dict[str, Any]] = {
    "sft": {"stage": "sft"},
    **{f"preference/{name}": {"stage": "preference", "objective": name} for name in OBJECTIVES},
    **{f"reward/{heads}": {"stage": "reward", "reward": {"heads": heads}} for heads in (1, 3, 5)},
    "process_reward": {"stage": "process_reward"},
}
TRAINERS = ("sft", "preference/dpo", "preference/cdpo", "preference/kto")
"""One stage for every Trainer of a policy: TRL's three, and our own."""
CASES = [
    (stage, family)
    for stage, family in itertools.product(STAGES, FAMILIES)
    if family == "gpt2" or stage in TRAINERS or not stage.startswith("preference/")
]
FOLDER_P = 0.1
"""Dropout that the configuration of every model folder asks for."""


@lru_cache
def tiny_family(family: str) -> str:
    """A model folder of that family, whose own dropout is `FOLDER_P`."""
    base = tiny_policy()
    shared = {"vocab_size": AutoConfig.from_pretrained(base).vocab_size, "pad_token_id": 0}
    sizes = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 2, "max_position_embeddings": 128}
    if family == "gpt2":
        config: Any = GPT2Config(**shared, n_embd=16, n_layer=1, n_head=2, n_positions=128)
    else:
        kind = LlamaConfig if family == "llama" else Qwen2Config
        config = kind(**shared, **sizes, **heads, attention_dropout=FOLDER_P)
    folder = mkdtemp(prefix=f"agentrl-{family}-")
    with torch.random.fork_rng():
        torch.manual_seed(0)
        AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    load_tokenizer(base).save_pretrained(folder)
    return folder


def settings_of(stage: str, family: str, folder: Path, **compute: Any) -> StageSettings:
    if stage == "process_reward":
        talk = [{"role": "user", "content": "Ada?"}, {"role": "assistant", "content": "Yes"}]
        rows: Any = [
            {"messages": [*talk, {"role": "user", "content": str(n)}, talk[1]], "opening": 1,
             "labels": [1.0, float(n % 2)]}
            for n in range(6)
        ]  # fmt: skip
    else:
        rows = planted_pairs()[:6]
    data = {"files": [write_rows(folder / "rows.jsonl", rows)], "held_out": 0}
    row = {"model": tiny_family(family), "data": data, "steps": 1, "card": {"prompts": 0}}
    row |= {"schedule": {"warmup": 0}, "compute": {"device": "cpu", **compute}}
    return StageSettings.model_validate(row | STAGES[stage])


@pytest.fixture
def applied(monkeypatch: pytest.MonkeyPatch) -> set[float]:
    """The probabilities with which anything is dropped out, wherever torch does it."""
    probabilities = set[float]()
    functional = torch.nn.functional
    dropout, attention = functional.dropout, functional.scaled_dot_product_attention

    def dropped(tensor: Any, p: float = 0.5, training: bool = True, inplace: bool = False) -> Any:
        probabilities.add(float(p) if training else 0.0)
        return dropout(tensor, p, training, inplace)

    def attended(*args: Any, dropout_p: float = 0.0, **kwargs: Any) -> Any:
        probabilities.add(float(dropout_p))
        return attention(*args, dropout_p=dropout_p, **kwargs)

    monkeypatch.setattr(functional, "dropout", dropped)
    monkeypatch.setattr(functional, "scaled_dot_product_attention", attended)
    return probabilities


@pytest.mark.parametrize("p", [0.0, 0.25])
@pytest.mark.parametrize(("stage", "family"), CASES)
def test_each_stage_drops_what_the_settings_say_and_no_more(
    stage: str, family: str, p: float, applied: set[float], tmp_path: Path
) -> None:
    run_stage(settings_of(stage, family, tmp_path, dropout=p), tmp_path / "run")
    assert applied - {0.0} == {p} - {0.0}


@pytest.mark.parametrize(
    ("name", "lora_rank"),
    [
        *((name, 0) for name, objective in OBJECTIVES.items() if objective.reference),
        *((name, 2) for name in ("dpo", "cdpo", "kto")),
    ],
)
def test_policy_and_reference_drop_the_same(name: str, lora_rank: int, tmp_path: Path) -> None:
    """They are equal before the first step, so with equal dropout the first loss has no noise."""

    def first_step(p: float) -> tuple[float, float]:
        compute = {"dropout": p, "lora_rank": lora_rank}
        settings = settings_of(f"preference/{name}", "llama", tmp_path, **compute)
        run_stage(settings, tmp_path / f"{p}")
        (row,) = read_metrics(tmp_path / f"{p}" / "metrics.jsonl")
        return row["train/loss"], row["train/grad_norm"]

    (calm, calm_gradient), (noisy, noisy_gradient) = first_step(0.0), first_step(0.5)
    if name != "dpo_nll":  # its anchor reads the policy alone
        assert noisy == pytest.approx(calm, abs=1e-5)
    assert noisy_gradient != pytest.approx(calm_gradient, rel=1e-3)


@pytest.mark.parametrize("stage", ["reward/1", "reward/3", "process_reward"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_reward_models_train_adapters_and_precision_as_asked(
    stage: str, dtype: str, tmp_path: Path
) -> None:
    compute = {"lora_rank": 2, "dtype": dtype}
    settings = settings_of(stage, "qwen2", tmp_path, **compute)
    settings = settings.model_copy(update={"learning_rate": 1e-2, "steps": 3})
    found = run_stage(settings, tmp_path / "run")
    assert Path(found["model"], "adapter/adapter_config.json").exists()
    weights = [
        AutoModelForCausalLM.from_pretrained(folder).model.embed_tokens.weight
        for folder in (tiny_family("qwen2"), found["model"])
    ]
    assert torch.equal(weights[0], weights[1].float()) == (dtype == "float32")

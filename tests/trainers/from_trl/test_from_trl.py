"""A `trl.GRPOConfig` as our settings: what it becomes, and that nothing is left out in silence."""

from __future__ import annotations

import dataclasses
import json

import pytest
from trl import GRPOConfig

from agentrl.errors import ConfigError
from agentrl.trainers.algorithms.recipes import recipe
from agentrl.trainers.config import TrainConfig, read_config
from agentrl.trainers.from_trl.translate import translate, translate_file
from agentrl.trainers.peers import TRL

DEFAULTS = {one.name: one.default for one in dataclasses.fields(GRPOConfig)}


def made(**changes):
    """What TRL writes of a config, on a machine without a GPU."""
    config = GRPOConfig(output_dir="x", use_cpu=True, bf16=False, **changes)
    return json.loads(config.to_json_string())


def test_the_defaults_of_trl_are_written_out():
    found = translate(made(), "args.json")
    assert found.unmatched == []
    assert found.settings == {
        "recipe": "grpo",
        "loss": {
            "aggregate": "token",
            "surrogate": {"name": "ppo_clip", "clip_low": 0.2, "clip_high": 0.2},
            "credit": {"name": "grpo", "eps": 1e-4},
        },
        "group_size": 8,
        "tasks_per_step": 1,
        "minibatches": 1,
        "temperature": 1.0,
        "learning_rate": 1e-6,
        "optimizer": {"betas": [0.9, 0.999], "weight_decay": 0.0, "max_grad_norm": 1.0},
        "schedule": {"final": 0.0},
        "seed": 42,
        "compute": {"dtype": "float32", "gradient_checkpointing": True, "device": "cpu"},
        "save_every": 500,
    }


def test_a_round_holds_the_prompts_and_steps_of_a_generation():
    row = made(
        per_device_train_batch_size=4,
        gradient_accumulation_steps=2,
        steps_per_generation=8,
        num_generations=4,
        num_iterations=2,
        max_steps=100,
        save_steps=20,
        eval_strategy="steps",
        eval_steps=16,
        lr_scheduler_type="constant_with_warmup",
        warmup_steps=9,
        save_total_limit=3,
    )
    settings = translate(row, "args.json").settings
    # 32 rows of 4 prompts' worth, stepped on 8 at a time, twice.
    assert (settings["tasks_per_step"], settings["minibatches"]) == (8, 4)
    assert settings["loss"]["epochs"] == 2 and settings["steps"] == 13  # 100 steps of 8 a round
    assert (settings["save_every"], settings["eval_every"]) == (3, 2)
    assert settings["schedule"] == {"warmup": 2} and settings["keep_last"] == 3


def test_accumulation_over_several_generations_is_one_larger_round():
    row = made(per_device_train_batch_size=8, gradient_accumulation_steps=4, steps_per_generation=1)
    settings = translate(row, "args.json").settings
    assert (settings["tasks_per_step"], settings["minibatches"]) == (4, 1)


CHANGED = [
    ({"beta": 0.04}, {"kl_coef": 0.04, "kl_ratio": True}),
    ({"beta": 0.04, "use_bias_correction_kl": False}, {"kl_ratio": False}),
    ({"epsilon": 0.1}, {"surrogate": {"name": "ppo_clip", "clip_low": 0.1, "clip_high": 0.1}}),
    ({"scale_rewards": "none"}, {"credit": "dr_grpo"}),
    ({"scale_rewards": False}, {"credit": "dr_grpo"}),
    ({"scale_rewards": "batch"}, {"credit": ["dr_grpo", "whiten"]}),
    ({"multi_objective_aggregation": "normalize_then_sum"}, {"credit": "gdpo"}),
    ({"mask_truncated_completions": True}, {"drop_truncated": True}),
    ({"top_entropy_quantile": 0.2}, {"entropy_share": 0.2}),
    ({"off_policy_mask_threshold": 0.5}, {"off_policy_limit": 0.5}),
    ({"entropy_coef": 0.01}, {"entropy_coef": 0.01}),
    ({"use_adaptive_entropy": True, "entropy_target": 0.3}, {"entropy_target": 0.3}),
    ({"use_vllm": True}, {"mis_level": "sequence", "mis_low": 0.0, "mis_high": 3.0}),
    (
        {"use_vllm": True, "vllm_importance_sampling_mode": "token_truncate"},
        {"tis_level": "token", "tis_high": 3.0},
    ),
    ({"router_aux_loss_coef": 0.001}, {"load_balance_coef": 0.001}),
]


@pytest.mark.parametrize(("changes", "loss"), CHANGED)
def test_what_a_setting_of_the_loss_becomes(changes, loss):
    settings = translate(made() | changes, "args.json").settings
    assert loss.items() <= settings["loss"].items()
    recipe(settings["recipe"], **settings["loss"])


def test_a_cosine_and_no_dropout_are_settings_here():
    found = translate(made(lr_scheduler_type="cosine", disable_dropout=True), "args.json")
    assert found.unmatched == [] and not any("dropout" in one for one in found.differs)
    assert found.settings["schedule"] == {"final": 0.0, "shape": "cosine"}
    assert found.settings["compute"]["dropout"] == 0.0


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"top_p": 0.9}, "top_p=0.9"),
        ({"reward_weights": [1.0, 0.5]}, "loss.part_weights"),
        ({"sync_ref_model": True}, "sync_ref_model=True: the nearest here is loss.reference_decay"),
        ({"lr_scheduler_type": "polynomial"}, "lr_scheduler_type='polynomial'"),
        ({"optim": "sgd"}, "optim='sgd'"),
        ({"delta": 1.1}, "delta=1.1"),
        ({"loss_type": "cispo"}, "TRL then scales every on-policy token by 0.2"),
        ({"loss_type": "cispo", "importance_sampling_level": "sequence"}, "'sequence'"),
        ({"loss_type": "another"}, "loss_type='another'"),
        ({"warmup_steps": 0.1}, "warmup_steps=0.1"),
        ({"max_prompt_length": 512}, "max_prompt_length=512: no setting of this version of TRL"),
    ],
)
def test_what_has_no_match_is_named(changes, said):
    found = translate(made() | changes, "args.json")
    assert any(said in sentence for sentence in found.unmatched)


def another(value):
    """Another value of the same kind, which may well make no sense."""
    if isinstance(value, bool):
        return not value
    if isinstance(value, int | float):
        return value + 1
    return {"another": 1} if isinstance(value, dict) else "another"


CHOICES = {
    "loss_type": "grpo",
    "importance_sampling_level": "sequence",
    "scale_rewards": "none",
    "multi_objective_aggregation": "normalize_then_sum",
    "steps_per_generation": 2,
    "generation_batch_size": 32,
    "epsilon_high": 0.3,
    "delta": 4.0,
    "num_generations_eval": 2,
    "router_aux_loss_coef": 0.1,
    "off_policy_mask_threshold": 0.5,
    "top_entropy_quantile": 0.5,
    "save_total_limit": 2,
    "eval_steps": 7,
    "vllm_importance_sampling_clip_min": 0.5,
    "chat_template_kwargs": {"enable_thinking": False},
    "max_completion_length": 100,
    "max_steps": 100,
    "per_device_train_batch_size": 16,
}


@pytest.mark.parametrize("name", DEFAULTS)
def test_no_setting_is_left_out_in_silence(name):
    plain = made()
    row = plain | {name: CHOICES.get(name, another(plain[name]))}
    before, after = translate(plain, "a"), translate(row, "a")
    said = " ".join((*after.differs, *after.unmatched))
    if name in ("vllm_importance_sampling_mode", "vllm_importance_sampling_clip_max"):
        assert "while use_vllm is False" in said
    is_default = row[name] == DEFAULTS[name]  # as TRL has it on a machine with a GPU
    assert after.settings != before.settings or f"{name}=" in said or is_default


def test_the_file_is_one_of_settings(tmp_path):
    source, target = tmp_path / "args.json", tmp_path / "calc.toml"
    source.write_text(json.dumps(made(max_grad_norm=0.0, top_k=5, steps_per_generation=2)))
    found = translate_file(source, ["env=calc-v0", 'model="m"', "loss.surrogate.clip_high=0.3"])
    target.write_text(found.toml("args.json"))
    config = read_config(target)
    assert isinstance(config, TrainConfig) and (config.env, config.model) == ("calc-v0", "m")
    assert recipe(config.recipe, **config.loss).options["clip_high"] == 0.3
    text = target.read_text()
    assert "# - top_k=5: " in text and "# - max_completion_length=512: " in text
    assert "A GRPOConfig does not say: add a line for env and for model." in found.__class__(
        {}
    ).toml("a")


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("{", "is not JSON"),
        ("[]", "must hold one JSON object"),
        ('{"env": "calc-v0"}', "has no setting of a trl.GRPOConfig"),
    ],
)
def test_a_file_that_is_none_is_refused(tmp_path, text, said):
    (tmp_path / "args.json").write_text(text)
    with pytest.raises(ConfigError, match=said):
        translate_file(tmp_path / "args.json")


def test_every_name_of_the_table_is_trls():
    assert TRL.keys() - DEFAULTS.keys() == {"model_name_or_path", "warmup_ratio"}


@pytest.mark.parametrize(
    ("row", "said"),
    [
        ({"num_generations": 1}, "group_size=1 gives every episode advantage 0 in recipe grpo"),
        ({"num_generations": 0}, "num_generations=0 of the GRPOConfig must be a count >= 1"),
        ({"num_generations": None}, "num_generations=None of the GRPOConfig must be a count"),
        ({"num_generations": "8"}, "num_generations='8' of the GRPOConfig must be int or null"),
        ({"max_grad_norm": None}, "max_grad_norm=None of the GRPOConfig must be float"),
        ({"max_steps": "100"}, "max_steps='100' of the GRPOConfig must be int"),
        ({"max_steps": 10.5}, "max_steps=10.5 of the GRPOConfig must be int"),
        ({"loss_type": ["grpo"]}, r"loss_type=\['grpo'\] of the GRPOConfig must be str"),
        ({"loss_type": {"grpo": 1}}, "loss_type=.* of the GRPOConfig must be str"),
        ({"beta": True}, "beta=True of the GRPOConfig must be float"),
        ({"optim": 3}, "optim=3 of the GRPOConfig must be str"),
    ],
)
def test_values_that_no_run_takes_are_refused_in_one_sentence(row, said):
    with pytest.raises(ConfigError, match=said) as caught:
        translate(row, "args.json")
    assert "\n" not in str(caught.value)


def test_a_whole_number_is_a_float_and_scale_rewards_may_be_a_truth_value():
    found = translate({"max_grad_norm": 2, "scale_rewards": False, "epsilon": 0.1}, "args.json")
    assert found.settings["optimizer"]["max_grad_norm"] == 2
    assert found.settings["loss"]["credit"] == "dr_grpo"

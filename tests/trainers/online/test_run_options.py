"""Every setting of a run changes the run: what it samples, what it learns, or what it costs. Real
tiny models.
"""

from __future__ import annotations

import pytest
import torch
from run_cases import TOYS
from transformers import PreTrainedModel

from agentrl.engines.transformers import TransformersEngine
from agentrl.errors import ConfigError
from agentrl.evaluation.settings import HeldOut
from agentrl.records.files import read_metrics
from agentrl.trainers.algorithms.recipe import SETTINGS as OF_A_RECIPE
from agentrl.trainers.config import (
    Compute,
    CriticSettings,
    OptimizerSettings,
    Schedule,
    TrainConfig,
    check_config,
)
from agentrl.trainers.loop import train
from agentrl.trainers.models.loading import load_policy
from agentrl.trainers.run import Run

BASE = {
    "env": f"{TOYS}:Paid",
    "steps": 2,
    "tasks_per_step": 3,
    "group_size": 4,
    "learning_rate": 1e-2,
    "deterministic": True,
    "save_every": 9,
    "minibatches": 2,
}
KL = {"kl_coef": 0.1}
PPO = {"recipe": "ppo", "loss": {"critic": {"learning_rate": 1e-2}}}


@pytest.fixture(scope="module")
def outcome(model, tmp_path_factory):
    """Settings -> weights and metrics that a run comes to; the same settings are run once."""
    found = {}

    def ends(settings):
        if repr(settings) not in found:
            folder = tmp_path_factory.mktemp("runs") / "x"
            with Run(check_config({"model": str(model)} | settings, "test"), folder) as run:
                train(run)
                learner = run.learner
                models = [learner.model, *([learner.critic.model] if learner.critic else [])]
                weights = torch.cat(
                    [one.detach().flatten() for some in models for one in some.parameters()]
                )
            kept = [
                {k: v for k, v in one.items() if k[:5] != "time/"}
                for one in read_metrics(folder / "metrics.jsonl")
            ]
            found[repr(settings)] = weights, kept, run
        return found[repr(settings)]

    return ends


def with_loss(row, **loss):
    return row | {"loss": row.get("loss", {}) | loss}


def with_critic(**settings):
    return with_loss(PPO, critic=PPO["loss"]["critic"] | settings)


OWN = {
    "turn_weights": ({}, {"turn_weights": {"turn": 0.5}}),
    "negative_weight": ({}, {"negative_weight": 0.5}),
    "filter_groups": ({}, {"filter_groups": True}),
    "refill": ({}, {"refill": True}),
    "spare_rounds": ({"refill": True}, {"refill": True, "spare_rounds": 0}),
    "reward_clip": ({}, {"reward_clip": 0.5}),
    "epochs": ({}, {"epochs": 2}),
    "kl_budget": ({}, {"kl_budget": 1e-7}),
    "ref_kl_budget": (KL, KL | {"ref_kl_budget": 1e-9}),
    "ref_kl_target": (KL, KL | {"ref_kl_target": 1e-9}),
    "entropy_target": ({}, {"entropy_target": 9.0}),
    "reset_every": (KL, KL | {"reset_every": 1}),
    "reference_decay": (KL, KL | {"reference_decay": 0.5}),
}
KL_TARGET = [{"recipe": "ppo_penalty", "loss": {"kl_target": target}} for target in (1e-6, 1e6)]
CRITIC = {"learning_rate": 1e-3, "epochs": 2, "value_clip": 1e-3, "warmup": 1}
COMPUTE = {"dtype": ({}, {"dtype": "bfloat16"}), "lora_rank": ({}, {"lora_rank": 2})}
COMPUTE["dropout"] = ({}, {"dropout": 0.3})
COMPUTE["lora_alpha"] = ({"lora_rank": 2}, {"lora_rank": 2, "lora_alpha": 1})
HELD_OUT = {"tasks": {"tasks": 5}, "samples": {"samples": 2}}
OPTIMIZER = {"betas": [0.5, 0.6], "weight_decay": 0.9, "max_grad_norm": 1e-3}
SCHEDULE = {
    "warmup": {"warmup": 2},
    "final": {"final": 0.1},
    "shape": {"final": 0.1, "shape": "cosine"},
}
FIELDS = {
    "seed": 1,
    "steps": 3,
    "tasks_per_step": 4,
    "group_size": 5,
    "eval_every": 1,
    "recipe": "rloo",
    "learning_rate": 5e-3,
    "minibatches": 1,
    "temperature": 0.7,
    "curriculum": {"sampler": "uniform", "pool": 20},
}
ELSEWHERE = {
    "process_rewards",
    "env",
    "env_settings",
    "limits",
    "model",
    "sandbox",
    "concurrency",
    "safety",
    "deterministic",
    "mode",
    "max_staleness",
    "held_out",
    "chat",
    "engine",
    "quiet_rounds",
    "save_every",
    "keep_last",
    "keep_best",
}
"""What other tests are about; `loss`, `schedule` and `compute` are tables of their own here."""

CASES = {
    **{f"loss.{name}": (with_loss({}, **a), with_loss({}, **b)) for name, (a, b) in OWN.items()},
    "loss.kl_target": KL_TARGET,
    **{f"critic.{name}": (PPO, with_critic(**{name: value})) for name, value in CRITIC.items()},
    **{f"compute.{name}": ({"compute": a}, {"compute": b}) for name, (a, b) in COMPUTE.items()},
    **{f"optimizer.{name}": ({}, {"optimizer": {name: to}}) for name, to in OPTIMIZER.items()},
    **{f"schedule.{name}": ({}, {"schedule": row}) for name, row in SCHEDULE.items()},
    **{
        f"held_out.{name}": ({"eval_every": 1}, {"eval_every": 1, "held_out": row})
        for name, row in HELD_OUT.items()
    },
    **{name: ({}, {name: value}) for name, value in FIELDS.items()},
}


@pytest.mark.parametrize("name", CASES)
def test_every_setting_changes_a_run(name, outcome):
    (weights, rows, _), (other_weights, other_rows, _) = (
        outcome(BASE | row) for row in CASES[name]
    )
    assert (
        rows != other_rows
        or weights.shape != other_weights.shape
        or not torch.equal(weights, other_weights)
    )


def test_every_setting_is_tried():
    assert {*OWN, "kl_target"} == set(OF_A_RECIPE)
    assert {*CRITIC, "model"} == set(CriticSettings.model_fields) and set(SCHEDULE) == set(
        Schedule.model_fields
    )
    assert {*COMPUTE, "device", "micro_tokens", "gradient_checkpointing"} == set(
        Compute.model_fields
    )
    assert set(HELD_OUT) == set(HeldOut.model_fields)
    assert {*OPTIMIZER, "name"} == set(OptimizerSettings.model_fields)
    assert {*FIELDS, *ELSEWHERE, "loss", "schedule", "compute", "optimizer"} == set(
        TrainConfig.model_fields
    )


def test_what_changes_the_cost_alone(outcome, model, tmp_path):
    """Micro-batches, checkpointing and a critic from elsewhere."""
    plain = outcome(BASE)[2]
    small, again = (
        outcome(BASE | {"compute": row})[2]
        for row in ({"micro_tokens": 64}, {"gradient_checkpointing": True})
    )
    assert small.config.compute.micro_tokens < plain.config.compute.micro_tokens
    assert again.learner.model.is_gradient_checkpointing
    assert not plain.learner.model.is_gradient_checkpointing
    outcome(BASE | PPO)[2].learner.critic.save(tmp_path / "critic")
    assert outcome(BASE | with_critic(model=str(tmp_path / "critic")))[1] != outcome(BASE | PPO)[1]


def test_no_more_episodes_play_at_once_than_the_settings_say(model, tmp_path, monkeypatch):
    asked, sample = [], TransformersEngine._sample
    monkeypatch.setattr(
        TransformersEngine,
        "_sample",
        lambda engine, rows: asked.append(len(rows)) or sample(engine, rows),
    )
    for settings, most in (({}, 12), ({"concurrency": 5}, 5)):
        config = check_config({"model": str(model)} | BASE | settings | {"steps": 1}, "test")
        with Run(config, tmp_path / str(most)) as run:
            asked.clear()
            train(run)
        assert max(asked) == most


def test_models_are_where_the_settings_say(model, monkeypatch):
    asked = []
    monkeypatch.setattr(PreTrainedModel, "to", lambda self, device: asked.append(device) or self)
    load_policy(model, Compute())
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    for device in ("auto", "cpu", "cuda"):
        load_policy(model, Compute(device=device))
    assert asked == ["cpu", "cuda", "cpu", "cuda"]
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(
        ConfigError,
        match=r"^compute.device='cuda': PyTorch sees no CUDA device here; use 'auto' or",
    ):
        load_policy(model, Compute(device="cuda"))

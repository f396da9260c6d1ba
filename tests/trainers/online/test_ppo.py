"""PPO as a run: a critic that learns, pre-training, exact resume, refusals. Real tiny models on the
CPU.
"""

from __future__ import annotations

import math
from statistics import fmean

import pytest
import torch
from run_cases import TOLD, Heard, run

from agentrl.engines.loading import load_critic, load_model
from agentrl.errors import ConfigError, TrainingError
from agentrl.records.files import read_episodes
from agentrl.trainers.algorithms.recipes import recipe
from agentrl.trainers.config import CriticSettings, check_config, read_config, write_config
from agentrl.trainers.folder import Checkpoint
from agentrl.trainers.loop import train
from agentrl.trainers.run import Run


def settings(model, critic=None, **changes):
    row = {
        "env": TOLD,
        "model": str(model),
        "recipe": "ppo",
        "steps": 4,
        "tasks_per_step": 8,
        "group_size": 4,
    }
    row |= {"learning_rate": 1e-2, "deterministic": True, "minibatches": 2, "save_every": 1}
    row |= {"loss": {"critic": {"learning_rate": 1e-2, "epochs": 4} | (critic or {})}}
    return check_config(row | changes, "test")


def weights(model):
    return torch.cat([weight.detach().flatten() for weight in model.parameters()])


def test_the_critic_of_a_run_explains_half_of_the_variance_and_more(model, tmp_path):
    rows = run(settings(model, {"warmup": 2}, steps=14, save_every=100), tmp_path / "run")
    assert rows[0]["value/explained_variance"] == pytest.approx(0, abs=1e-9)
    assert fmean(row["value/explained_variance"] for row in rows[-5:]) >= 0.5
    assert all("policy/updates" in row for row in rows[2:])


def test_while_the_critic_is_pre_trained_the_policy_stands_still(model, tmp_path):
    rows = run(settings(model, {"warmup": 2}, keep_last=9), tmp_path / "run")
    found = [Checkpoint(tmp_path / f"run/checkpoints/step_{step}", step) for step in (1, 2, 3)]
    policies = [weights(load_model(model)), *(weights(load_model(one.model)) for one in found)]
    assert torch.equal(policies[0], policies[1]) and torch.equal(policies[0], policies[2])
    assert not torch.equal(policies[0], policies[3])
    assert not torch.equal(*(weights(load_critic(one.critic)) for one in found[:2]))
    assert ["policy/updates" in row for row in rows] == [False, False, True, True]
    # Two rounds of returns are what came out, whatever the critic said: each token has the reward
    # of its episode.
    for step in (0, 1):
        played = [
            one
            for key, one in read_episodes(tmp_path / "run/episodes.jsonl").items()
            if key[1] == step
        ]
        tokens = [one.counts.sampled_tokens for one in played]
        came_out = sum(n * one.reward for n, one in zip(tokens, played, strict=True)) / sum(tokens)
        assert rows[step]["return/mean"] == pytest.approx(came_out, abs=1e-6)


@pytest.mark.bit_equal
@pytest.mark.parametrize("stop", [1, 3])
def test_a_resumed_run_equals_an_uninterrupted_one(model, tmp_path, stop):
    whole = run(settings(model, {"warmup": 2}), tmp_path / "a" / "x")
    run(settings(model, {"warmup": 2}, steps=stop), tmp_path / "b" / "x")
    assert run(settings(model, {"warmup": 2}), tmp_path / "b" / "x", resume=True) == whole


@pytest.mark.bit_equal
@pytest.mark.bfloat16
def test_a_run_whose_critic_has_adapters_resumes_and_takes_vtrace(model, tmp_path):
    compute = {"lora_rank": 4, "dtype": "bfloat16", "gradient_checkpointing": True}
    config = settings(model, steps=2, compute=compute)
    loss = {**config.loss, "credit": ["vtrace", {"name": "whiten"}]}
    config = config.model_copy(update={"loss": loss})
    whole = run(config, tmp_path / "a" / "x")
    run(config.model_copy(update={"steps": 1}), tmp_path / "b" / "x")
    assert run(config, tmp_path / "b" / "x", resume=True) == whole
    assert (tmp_path / "a/x/checkpoints/step_2/critic/adapter").is_dir()
    assert load_critic(tmp_path / "a/x/checkpoints/step_2/critic")


def test_a_critic_whose_loss_is_no_number_stops_the_run_and_the_batch_is_kept(model, tmp_path):
    with Run(settings(model), tmp_path / "run") as opened:
        with torch.no_grad():
            next(opened.learner.critic.model.parameters()).fill_(math.nan)
        with pytest.raises(
            TrainingError, match=r"round 1: critic: loss=nan.*the batch is in .*broken_batch_1\.pt"
        ):
            train(opened)
    assert (tmp_path / "run" / "broken_batch_1.pt").is_file()


def test_settings_of_a_critic_are_the_recipes(tmp_path, model):
    assert recipe("ppo", critic={"warmup": 3}).critic == CriticSettings(warmup=3)
    config = settings(model, {"value_clip": math.inf})
    write_config(config, tmp_path / "config.toml")
    assert read_config(tmp_path / "config.toml") == config
    assert recipe("ppo", **config.loss).critic.value_clip == math.inf


@pytest.mark.parametrize(
    ("name", "critic", "setting"),
    [
        ("grpo", {"warmup": 3}, "loss.critic"),
        ("ppo", {"epochs": 0}, "loss.critic.epochs"),
        ("ppo", {"lr": 1}, "loss.critic.lr"),
        ("ppo", {"warm_up": 1}, "loss.critic.warm_up"),
        ("ppo", 3, "loss.critic"),
    ],
)
def test_wrong_settings_of_a_critic_are_refused(name, critic, setting):
    with pytest.raises(ConfigError) as caught:
        recipe(name, critic=critic)
    assert caught.value.setting == setting


def test_a_run_that_is_all_warmup_says_so(model, tmp_path):
    heard = Heard()
    for folder, steps in (("a", 2), ("b", 3)):
        config = settings(model, {"warmup": 2}, steps=steps)
        Run(
            config,
            tmp_path / folder,
            events=heard,
        ).close()
    assert heard.warnings == [
        "loss.critic.warmup=2 leaves none of steps=2 to the policy: only the critic learns"
    ]


def test_only_a_recipe_that_reads_values_holds_a_critic(model, tmp_path):
    with Run(settings(model, recipe="grpo", loss={}), tmp_path / "run") as opened:
        assert opened.learner.critic is None

"""Training runs: exact resume, honest refusals, checkpoints that are whole or absent. Real tiny
models on the CPU.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch
from helpers import loop_threads, wait_for
from run_cases import PARITY, Heard, run, settings, timeless

from agentrl.errors import ConfigError, UserError
from agentrl.records.files import read_episodes, read_metrics
from agentrl.trainers.algorithms.recipes import RECIPES
from agentrl.trainers.algorithms.surrogates import dppo_topk_kl
from agentrl.trainers.config import read_config
from agentrl.trainers.folder import latest_checkpoint
from agentrl.trainers.loop import TrainingError, train
from agentrl.trainers.run import Run
from agentrl.trainers.session import run_training


def test_a_run_leaves_a_folder_that_tells_everything(model, tmp_path):
    config = settings(model)
    rows = run(config, tmp_path / "a")
    assert [row["step"] for row in rows] == [0, 1, 2, 3, 4, 5]
    assert {"eval/pass_at_1", "eval/ci95_low"} <= rows[0].keys() & rows[2].keys() & rows[4].keys()
    assert all(row["parity/gap_mean"] < 1e-4 for row in rows[1:])
    assert any(row["policy/grad_norm"] > 0 for row in rows[1:])
    keys = list(read_episodes(tmp_path / "a" / "episodes.jsonl"))
    assert len(keys) == 5 * 16 + 4 * 6
    kept = read_config(tmp_path / "a" / "config.toml")
    assert kept.chat.parser == "hermes" and config.chat.parser == "auto"
    assert kept.model_copy(update={"chat": config.chat}) == config
    last = latest_checkpoint(tmp_path / "a")
    assert last is not None and last.step == 5
    from transformers import AutoModelForCausalLM, AutoTokenizer

    AutoModelForCausalLM.from_pretrained(last.model, local_files_only=True)
    assert AutoTokenizer.from_pretrained(last.model, local_files_only=True).chat_template


@pytest.mark.bit_equal
def test_the_same_run_again_gives_the_same_numbers(model, tmp_path):
    assert run(settings(model), tmp_path / "a" / "x") == run(settings(model), tmp_path / "b" / "x")


def test_micro_batches_change_no_metric_but_rounding(model, tmp_path):
    large, small = (
        run(settings(model, compute={"micro_tokens": n}), tmp_path / str(n) / "x")
        for n in (100_000, 64)
    )
    for a, b in zip(large, small, strict=True):
        assert a.get("policy/loss", 0) == pytest.approx(b.get("policy/loss", 0), abs=1e-5)
        assert a.get("policy/grad_norm", 0) == pytest.approx(b.get("policy/grad_norm", 0), rel=1e-3)


@pytest.mark.bit_equal
@pytest.mark.parametrize("compute", [{"lora_rank": 4}, {"gradient_checkpointing": True}])
def test_compute_settings_train_and_resume(model, tmp_path, compute):
    change = {"compute": compute, "steps": 4, "learning_rate": 1e-2, "loss": {"kl_coef": 0.01}}
    whole = run(settings(model, **change), tmp_path / "a" / "x")
    assert whole[-1]["policy/ref_kl"] > 0 and all(
        row["parity/gap_max"] < 1e-3 for row in whole if "parity/gap_max" in row
    )
    run(settings(model, **change | {"steps": 2}), tmp_path / "b" / "x")
    assert run(settings(model, **change), tmp_path / "b" / "x", resume=True) == whole


def test_bfloat16_samples_and_scores_alike(model, tmp_path):
    rows = run(
        settings(model, compute={"dtype": "bfloat16"}, steps=3, eval_every=0), tmp_path / "a"
    )
    assert 0 < rows[0]["parity/gap_mean"] < 0.05


def test_a_run_compares_policies_on_the_likeliest_tokens(model, tmp_path, monkeypatch):
    mine = replace(
        RECIPES["dppo"], name="mine", surrogate=partial(dppo_topk_kl, divergence_max=1e-6)
    )
    monkeypatch.setitem(RECIPES, "mine", mine)
    change = {
        "recipe": "mine",
        "steps": 1,
        "eval_every": 0,
        "minibatches": 4,
        "learning_rate": 1e-2,
    }
    assert run(settings(model, **change), tmp_path / "a")[0]["policy/clip_low"] > 0, (
        "later steps leave the region"
    )


def test_training_moves_towards_reward(model, tmp_path):
    rows = run(
        settings(model, steps=40, eval_every=0, learning_rate=1e-2, tasks_per_step=8),
        tmp_path / "a",
    )
    first, last = (sum(row["reward/mean"] for row in part) / 5 for part in (rows[:5], rows[-5:]))
    assert last > first + 0.2


@pytest.mark.parametrize("kl", [0.05])
def test_a_kl_term_holds_a_reference(model, tmp_path, kl):
    rows = run(settings(model, loss={"kl_coef": kl}, steps=3), tmp_path / "a")
    assert rows[1]["policy/ref_kl"] < rows[3]["policy/ref_kl"]


def test_refilled_groups_take_the_places_of_silent_ones_and_change_no_metric_of_reward(
    model, tmp_path
):
    """DAPO's dynamic sampling: with two samples a group, half the groups are silent, so rounds are
    filled up.
    """
    plain = {"steps": 3, "group_size": 2, "eval_every": 0, "learning_rate": 1e-9, "minibatches": 1}
    alone = run(settings(model, **plain), tmp_path / "a" / "x")
    filled = run(settings(model, **plain, loss={"refill": True}), tmp_path / "b" / "x")
    assert alone[0]["reward/mean"] == filled[0]["reward/mean"], (
        "the first round plays the same tasks"
    )
    assert any(row["refill/groups"] > 0 for row in filled)
    with Run(settings(model, **plain, loss={"refill": True}), tmp_path / "c" / "x") as opened:
        played = opened.play(0)
        batch = opened.learner.recipe.advantage(opened.pack(played))
    has_signal = opened.learner.recipe.rewards.has_signal
    assert len(played.groups) == 4 and all(map(has_signal, played.refilled))
    drawn = [*played.refilled, *played.spare]
    assert played.draws.metrics()["refill/episodes"] == 2 * len(drawn)
    signal = sum(map(has_signal, played.trained))
    assert signal <= 4 and batch.n_episodes == 2 * signal
    keys = read_episodes(tmp_path / "b/x/episodes.jsonl")
    assert {key.run for key in keys} == {"x"} and {key.draw for key in keys} >= {0, 1}


@pytest.mark.bit_equal
def test_the_reference_is_reset_with_the_optimizer_and_survives_a_resume(model, tmp_path):
    """ProRL. After a reset the KL to the reference starts from 0 again."""
    change = {"loss": {"kl_coef": 0.01, "reset_every": 2}, "steps": 5, "eval_every": 0}
    whole = run(settings(model, **change), tmp_path / "a" / "x")
    kept = run(settings(model, **change | {"loss": {"kl_coef": 0.01}}), tmp_path / "c" / "x")
    assert whole[2]["policy/ref_kl"] < whole[1]["policy/ref_kl"] < kept[2]["policy/ref_kl"]
    run(settings(model, **change | {"steps": 3}), tmp_path / "b" / "x")
    assert (tmp_path / "b/x/checkpoints/step_3/reference/config.json").is_file()
    assert run(settings(model, **change), tmp_path / "b" / "x", resume=True) == whole


def test_a_budget_of_kl_ends_a_round_early(model, tmp_path):
    change = {"steps": 2, "learning_rate": 1e-2, "minibatches": 4, "eval_every": 0}
    free = run(settings(model, **change), tmp_path / "a")
    bound = run(settings(model, **change, loss={"kl_budget": 1e-6}), tmp_path / "b")
    assert free[0]["policy/updates"] > 1 == bound[0]["policy/updates"], (
        "the second was over the budget"
    )


def test_epochs_go_through_a_round_again(model, tmp_path):
    change = {"steps": 1, "minibatches": 2, "eval_every": 0}
    once, twice = (
        run(settings(model, **change, loss={"epochs": n}), tmp_path / str(n)) for n in (1, 2)
    )
    assert twice[0]["policy/updates"] == 2 * once[0]["policy/updates"]


def test_nothing_is_held_out_where_there_is_one_split(model, tmp_path, monkeypatch):
    monkeypatch.setattr("agentrl.env.ToolEnv.one_split", True)
    with pytest.raises(ConfigError, match="has one split, so nothing is held out"):
        Run(settings(model), tmp_path / "a")
    assert not (tmp_path / "a" / "metrics.jsonl").exists()
    Run(settings(model, eval_every=0), tmp_path / "a").close()


def test_a_part_that_cannot_be_had_ends_the_parts_before_it(model, tmp_path):
    (tmp_path / "a" / "metrics.jsonl").mkdir(parents=True)
    with pytest.raises(OSError, match="directory"):
        Run(settings(model), tmp_path / "a", resume=True)
    wait_for(lambda: not loop_threads())


def test_a_folder_in_use_is_not_written_over(model, tmp_path):
    run(settings(model, steps=1), tmp_path / "a")
    before = {path: path.read_bytes() for path in (tmp_path / "a").rglob("*") if path.is_file()}
    with pytest.raises(ConfigError, match="--resume"):
        Run(settings(model), tmp_path / "a")
    assert before == {
        path: path.read_bytes() for path in (tmp_path / "a").rglob("*") if path.is_file()
    }


def test_process_rewards_that_no_verifier_gives_are_named(model, tmp_path):
    heard = Heard()
    config = settings(model, steps=2, eval_every=0, loss={"turn_weights": {"format": 0.1}})
    with Run(
        config,
        tmp_path / "a",
        events=heard,
    ) as one:
        train(one)
    assert [line for line in heard.warnings if "turn_weights" in line] == [
        "no episode of round 1 has the process rewards ['format'] that turn_weights names; there"
        " are none"
    ]


def test_a_run_that_ended_before_its_first_episode_leaves_the_folder_free(model, tmp_path):
    with (
        Run(settings(model), tmp_path / "a") as opened,
        pytest.raises(ConfigError, match="no tracker"),
    ):
        opened.folder.track(["tensorbord"])
    Run(settings(model), tmp_path / "a").close()


def test_disagreement_of_sampler_and_trainer_stops_the_run(model, tmp_path):
    with Run(settings(model), tmp_path / "a") as opened:
        sample = opened.engine._sample

        def warmer(rows):
            with torch.no_grad():
                opened.learner.model.lm_head.weight.mul_(3.0)
            try:
                return sample(rows)
            finally:
                with torch.no_grad():
                    opened.learner.model.lm_head.weight.div_(3.0)

        opened.engine._sample = warmer
        with pytest.raises(TrainingError, match="disagree by"):
            train(opened)


def test_a_loss_that_is_no_number_stops_the_run(model, tmp_path):
    with Run(settings(model), tmp_path / "a") as opened:
        opened.learner.recipe = replace(opened.learner.recipe, surrogate=no_number)
        before = {name: value.clone() for name, value in opened.learner.model.state_dict().items()}
        with pytest.raises(TrainingError, match="no step was taken"):
            train(opened)
        assert all(
            torch.equal(before[name], value)
            for name, value in opened.learner.model.state_dict().items()
        )
    kept = torch.load(tmp_path / "a" / "broken_batch_1.pt", weights_only=False)
    assert kept["ids_BT"].shape == kept["mask_BT"].shape and kept["n_tokens"] > 0


def no_number(output, batch):
    return output.logprobs_BT * float("nan")


def test_rounds_without_signal_stop_the_run_and_say_why(model, tmp_path):
    always = f"{Path(__file__).parents[2] / 'support/toy_envs.py'}:Hopeless"
    said = pytest.raises(
        TrainingError, match="quiet_rounds=5 rounds in a row gave no signal: nothing was solved"
    )
    with Run(settings(model, env=always, steps=9, eval_every=0), tmp_path / "a") as opened, said:
        train(opened)
    assert len(timeless(tmp_path / "a")) == 5


def test_quiet_rounds_are_a_setting_and_a_resumed_run_counts_on(model, tmp_path):
    always = f"{Path(__file__).parents[2] / 'support/toy_envs.py'}:Hopeless"
    plain = {"env": always, "eval_every": 0, "quiet_rounds": 3, "minibatches": 1}
    run(settings(model, **plain, steps=2), tmp_path / "a")
    assert json.loads((tmp_path / "a/checkpoints/step_2/state.json").read_text())["quiet"] == 2
    with pytest.raises(TrainingError, match="quiet_rounds=3 rounds in a row gave no signal"):
        run(settings(model, **plain, steps=9), tmp_path / "a", resume=True)
    assert len(timeless(tmp_path / "a")) == 3, "one more, not three"


def test_a_negative_reward_stops_maxrl_at_its_first_episode(model, tmp_path):
    """Where all rewards are equal its formula would never meet them."""
    below = f"{Path(__file__).parents[2] / 'support/toy_envs.py'}:Below"
    with pytest.raises(UserError, match=r"gave a reward of -0.5.*at least 0 \(maxrl\)"):
        run(settings(model, env=below, recipe="maxrl"), tmp_path / "a")
    (first, *_) = read_episodes(tmp_path / "a/episodes.jsonl")
    assert first.phase == "eval", "told before anything is trained"
    assert not read_metrics(tmp_path / "a/metrics.jsonl")


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"lerning_rate": 1}, "setting 'lerning_rate' is unknown: did you mean 'learning_rate'?"),
        ({"steps": 0}, "steps=0"),
        ({"temperature": 0}, "temperature=0"),
        ({"env": None}, "env=None"),
        ({"top_p": 0.9}, "it is a setting of `agentrl eval` alone"),
        ({"kl_coef": 0.1}, "setting 'kl_coef' is unknown"),
        (
            {"lora_rank": 8},
            "did you mean 'compute.lora_rank'?",
        ),
        (
            {"compute": {"lora": 8}},
            "setting 'compute.lora' is unknown: did you mean 'compute.lora_rank'?",
        ),
        ({"schedule": "cosine"}, "schedule='cosine' must be a table, as in schedule = {…}"),
    ],
)
def test_wrong_settings_get_one_sentence(model, change, sentence):
    with pytest.raises(ConfigError) as caught:
        settings(model, **change)
    assert sentence in str(caught.value) and "\n" not in str(caught.value)


def test_a_group_of_one_is_refused_where_groups_are_compared(model, tmp_path):
    with pytest.raises(ConfigError, match="group_size=1: recipe grpo compares episodes of a group"):
        Run(settings(model, group_size=1), tmp_path / "a")
    with pytest.raises(ConfigError, match="with pass_k=4 needs more than 4"):
        Run(settings(model, recipe="pass_at_k", loss={"pass_k": 4}), tmp_path / "a")
    rows = run(settings(model, group_size=1, recipe="reinforce", steps=2), tmp_path / "b")
    assert rows[-1]["policy/updates"] > 0


def test_greedy_episodes_are_the_baseline_of_remax(model, tmp_path):
    rows = run(settings(model, recipe="remax", group_size=1, steps=2, eval_every=0), tmp_path / "x")
    keys = read_episodes(tmp_path / "x/episodes.jsonl")
    greedy = [episode for key, episode in keys.items() if key.phase == "greedy" and key.step == 0]
    assert len(greedy) == 4 and rows[0]["episodes/total"] == 4, "greedy episodes enter no metric"
    again = [key for key in keys if key.phase == "greedy" and key.step == 0 and key.sample == 0]
    assert {key.task for key in again} == {
        key.task for key in keys if key.run == "x" and key.step == 0
    }


def test_a_model_folder_without_tokenizer_is_named(model, tmp_path):
    (tmp_path / "m").mkdir()
    (tmp_path / "m/config.json").write_bytes((model / "config.json").read_bytes())
    with pytest.raises(ConfigError, match="has no tokenizer"):
        Run(settings(tmp_path / "m"), tmp_path / "a")


def test_the_command_resumes_by_itself_and_overrides(model, tmp_path):
    toml = tmp_path / "c.toml"
    toml.write_text(
        f'env = "{PARITY}"\nmodel = "{model}"\nsteps = 1\ntasks_per_step = 2\ngroup_size = 2\n'
        'loss = {surrogate = {name = "ppo_clip", dual_clip = 3.0}, credit = ["rloo", "whiten"]}\n'
    )
    first = run_training(toml, tmp_path / "r", overrides=["save_every=1"])
    again = run_training(toml, tmp_path / "r", overrides=["steps=2", "save_every=1"], resume=True)
    assert (first["steps"], again["steps"]) == (1, 2)
    assert (first["trained"], again["trained"]) == (1, 1)
    assert read_config(tmp_path / "r/config.toml").loss == read_config(toml).loss
    assert Path(again["report"]).is_file() and (Path(again["model"]) / "config.json").is_file()
    state = json.loads((tmp_path / "r/checkpoints/step_2/state.json").read_text())
    assert state.pop("quiet") in (0, 1, 2)
    assert state == {
        "step": 2,
        "source": {"epoch": 0, "drawn": 4},
        "coefficients": {},
        "version": 2,
        "ref_kl": 0.0,
    }
    assert os.environ.get("TOKENIZERS_PARALLELISM") != "true"


def test_the_command_plans_without_writing_and_names_a_wrong_tracker(model, tmp_path):
    toml, out = tmp_path / "c.toml", tmp_path / "r"
    toml.write_text(f'env = "{PARITY}"\nmodel = "{model}"\ngroup_size = 2\n')
    command = [sys.executable, "-m", "agentrl.cli", "train", str(toml), "--json", "--out", str(out)]
    done = subprocess.run([*command, "--plan"], capture_output=True, text=True, timeout=280)
    plan = json.loads(done.stdout.splitlines()[-1])
    assert plan["peak_bytes"] > sum(plan["models"].values()) > 0 and not out.exists()
    done = subprocess.run(
        [*command, "--log-to", "tensorbord"], capture_output=True, text=True, timeout=280
    )
    assert done.returncode == 2 and "did you mean 'tensorboard'" in done.stderr


def test_a_run_is_logged_to_tensorboard_as_well(model, tmp_path):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    config = settings(model, steps=2, eval_every=0)
    with Run(config, tmp_path / "a") as opened:
        opened.folder.track(["tensorboard"])
        train(opened)
    events = EventAccumulator(str(next((tmp_path / "a").rglob("events.*")).parent)).Reload()
    rewards = [event.value for event in events.Scalars("reward/mean")]
    assert rewards == pytest.approx([row["reward/mean"] for row in timeless(tmp_path / "a")])

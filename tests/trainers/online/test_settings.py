"""Settings of a run and of recipes that are wrong or change nothing: one sentence each, before
anything is loaded.
"""

from __future__ import annotations

import itertools
import math
import re
from pathlib import Path

import pytest

from agentrl.errors import ConfigError
from agentrl.report.display import describe_round
from agentrl.settings import check
from agentrl.trainers.algorithms.recipes import RECIPES, recipe
from agentrl.trainers.config import (
    CriticSettings,
    Schedule,
    check_config,
    read_config,
    write_config,
)

INF, NAN = math.inf, math.nan
TRAINING = Path(__file__).parents[3] / "docs/training.md"
BASE = {"env": "calc-v0", "model": "m"}


@pytest.mark.parametrize(
    "change",
    [
        {"learning_rate": INF},
        {"learning_rate": NAN},
        {"learning_rate": "0.1"},
        {"learning_rate": True},
        {"temperature": INF},
        {"steps": "5"},
        {"steps": True},
        {"steps": 2.0},
        {"deterministic": "yes"},
        {"minibatches": -1},
        {"seed": 0.5},
        {"schedule": {"final": NAN}},
        {"schedule": {"warmup": "4"}},
        {"compute": {"micro_tokens": 0}},
        {"compute": {"gradient_checkpointing": 1}},
        {"compute": {"lora_rnk": 3}},
        {"held_out": {"samples": "4"}},
        {"loss": 3},
    ],
)
def test_a_number_is_a_finite_number_and_nothing_is_taken_for_one(change):
    with pytest.raises(ConfigError) as caught:
        check_config(BASE | change, "run.toml")
    said = str(caught.value)
    assert said.startswith("run.toml: ") and "\n" not in said
    assert caught.value.setting.partition(".")[0] == next(iter(change))


def test_what_is_no_bound_may_be_infinite(tmp_path):
    loss = {"kl_budget": INF, "clip_high": INF, "critic": {"value_clip": INF}}
    config = check_config(BASE | {"recipe": "ppo", "loss": loss, "learning_rate": 1}, "run.toml")
    write_config(config, tmp_path / "c.toml")
    assert read_config(tmp_path / "c.toml") == config
    assert recipe("ppo", **config.loss).critic.value_clip == INF
    with pytest.raises(ConfigError, match="learning_rate=inf"):
        check(CriticSettings, {"learning_rate": INF}, "critic")


@pytest.mark.parametrize(
    ("name", "settings", "setting", "fix"),
    [
        ("grpo", {"name": "x"}, "name", "no such setting"),
        ("grpo", {"aggregate": ["token"]}, "aggregate", "must be a name"),
        ("grpo", {"eps": INF}, "eps", "eps=inf must be a finite number"),
        ("grpo", {"eps": 10**400}, "eps", "eps=1000"),
        ("dr_grpo", {"norm_tokens": 10**400}, "norm_tokens", "norm_tokens=1000"),
        ("grpo", {"kl_coef": INF}, "kl_coef", "kl_coef=inf must be a finite number"),
        ("gdpo", {"part_weights": {"a": INF}}, "part_weights.a", "must be a finite number"),
        ("grpo", {"clip_high": 10**400}, "clip_high", "clip_high=1000"),
        ("grpo", {"clip_high": NAN}, "clip_high", "clip_high=nan"),
        ("grpo", {"kl_estimator": "k1"}, "kl_estimator", "while kl_coef is 0: set kl_coef as well"),
        ("grpo", {"kl_ratio": False}, "kl_ratio", "changes nothing while kl_coef is 0"),
        ("grpo", {"reference_decay": 0.9}, "reference_decay", "set kl_coef as well"),
        ("grpo", {"reference_decay": 1.5, "kl_coef": 0.1}, "reference_decay", "at most 1"),
        ("grpo", {"ref_kl_budget": 0.1}, "ref_kl_budget", "changes nothing"),
        ("dapo", {"spare_rounds": -1}, "spare_rounds", "at least 0"),
        ("grpo", {"spare_rounds": 5}, "spare_rounds", "set refill=true"),
        ("dapo", {"spare_rounds": 5, "refill": False}, "spare_rounds", "set refill=true"),
        ("gdpo", {"turn_weights": {"format": 0.5}}, "turn_weights", "changes nothing"),
        ("grpo", {"turn_weights": {"format": NAN}}, "turn_weights.format", "finite number"),
        ("grpo", {"turn_weights": {"format": INF}}, "turn_weights.format", "finite number"),
        ("gdpo", {"kl_reward_coef": 0.1}, "kl_reward_coef", "changes nothing in recipe gdpo"),
        ("grpo", {"tis_high": 0.0}, "tis_high", "greater than 0"),
        ("grpo", {"reject_low": 1.5}, "reject_low", "at most 1"),
        ("grpo", {"entropy_share": 0.0}, "entropy_share", "greater than 0"),
    ],
)
def test_settings_of_a_recipe_that_break_it_or_change_nothing(name, settings, setting, fix):
    with pytest.raises(ConfigError) as caught:
        recipe(name, **settings)
    assert caught.value.setting == f"loss.{setting}"
    assert fix in str(caught.value) and "\n" not in str(caught.value)


def test_bounds_may_be_infinite_and_coefficients_may_be_named_with_what_they_scale():
    for name, settings in (
        (
            "grpo",
            {
                "clip_low": INF,
                "clip_high": INF,
                "tis_high": INF,
                "max_age": INF,
                "off_policy_limit": INF,
            },
        ),
        ("dppo", {"ratio_max": INF, "divergence_max": INF}),
        ("grpo", {"kl_estimator": "k1", "kl_coef": 0.1}),
        ("prorl", {"kl_estimator": "k1"}),
        ("grpo", {"turn_weights": {"format": 0.5}}),
    ):
        recipe(name, **settings)


@pytest.mark.parametrize("settings", [{"filter_groups": True}, {"refill": True}])
@pytest.mark.parametrize("name", RECIPES)
def test_every_recipe_can_leave_out_groups_without_signal(name, settings):
    """The made-up group that a recipe is tried on has no signal for some: `pass_at_k` needs more
    than two episodes.
    """
    recipe(name, **settings)


@pytest.mark.parametrize("name", RECIPES)
def test_refill_needs_groups_in_which_rewards_can_differ(name):
    with pytest.raises(ConfigError, match="group_size=1"):
        recipe(name, refill=True).refuse_group_size(1)
    recipe(name, refill=True).refuse_group_size(8)


def chance_of_stopping(solved, quiet_rounds, rounds):
    """That so many rounds in a row are quiet somewhere within a run, by its Markov chain."""
    quiet, in_a_row, stopped = math.exp(-solved), [1.0] + [0.0] * (quiet_rounds - 1), 0.0
    for _ in range(rounds):
        stopped += quiet * in_a_row[-1]
        in_a_row = [(1 - quiet) * sum(in_a_row), *(quiet * share for share in in_a_row[:-1])]
    return stopped


def test_the_docs_say_how_likely_a_run_stops_by_chance():
    rows = re.findall(r"^\| ([\d.]+) \| (.+ %) \|$", TRAINING.read_text(), re.M)
    assert [solved for solved, _ in rows] == ["0.26", "0.5", "1", "2"]
    for solved, cells in rows:
        said = [float(cell.strip(" %")) / 100 for cell in cells.split("|")]
        found = [
            chance_of_stopping(float(solved), *run)
            for run in ((5, 50), (5, 100), (10, 50), (20, 100))
        ]
        assert said == pytest.approx(found, abs=0.005)


def test_a_cosine_is_flat_at_both_ends_and_ends_where_the_line_does():
    wave = Schedule(warmup=4, final=0.1, shape="cosine")
    shares = [wave.share(step, 14) for step in range(14)]
    assert shares[:4] == [0.25, 0.5, 0.75, 1.0] and shares[-1] == pytest.approx(0.1)
    assert shares[8] == pytest.approx(0.55), "half way it is half way down"
    falls = [before - after for before, after in itertools.pairwise(shares[3:])]
    assert falls == pytest.approx(falls[::-1]) and max(falls) == pytest.approx(falls[5], rel=0.1)
    assert min(falls) == pytest.approx(falls[0]) and falls[0] < 0.03
    with pytest.raises(ConfigError) as caught:
        check_config(BASE | {"schedule": {"shape": "cosine"}}, "run.toml")
    assert caught.value.setting == "schedule.shape"


def test_the_learning_rate_rises_to_its_peak_in_a_straight_line_and_falls_in_one():
    shares = [Schedule(warmup=4, final=0.1).share(step, 10) for step in range(10)]
    assert shares[:4] == [0.25, 0.5, 0.75, 1.0] and shares[-1] == pytest.approx(0.1)
    falls = [before - after for before, after in itertools.pairwise(shares[3:])]
    assert falls == pytest.approx([0.15] * 6)
    assert [Schedule().share(step, 3) for step in range(3)] == [1.0] * 3
    assert [Schedule(final=0.0).share(step, 3) for step in range(3)] == [1.0, 0.5, 0.0]
    assert (
        Schedule(warmup=5).share(1, 2) == 0.4 and Schedule(warmup=1, final=0.5).share(0, 1) == 1.0
    )


# --- names of others


@pytest.mark.parametrize(
    ("row", "said"),
    [
        ({"beta": 0.04}, "TRL's beta is loss.kl_coef here"),
        ({"epsilon": 0.2}, "TRL's epsilon is loss.clip_low and loss.clip_high here"),
        ({"num_generations": 8}, "TRL's num_generations is group_size here"),
        (
            {"max_completion_length": 99},
            "TRL's max_completion_length is limits.turn_tokens",
        ),
        ({"num_iterations": 2}, "TRL's num_iterations is loss.epochs here"),
        ({"scale_rewards": "none"}, "TRL's scale_rewards is the credit"),
        ({"loss_type": "dapo"}, "TRL's loss_type is recipe and loss.aggregate here"),
        ({"actor": {"clip_ratio": 0.2}}, "verl's clip_ratio is loss.clip_low and loss.clip_high"),
        ({"actor_rollout_ref": {"rollout": {"n": 8}}}, "verl's rollout.n is group_size here"),
        ({"actor": {"kl_loss_coef": 0.1}}, "verl's kl_loss_coef is loss.kl_coef here"),
        ({"ppo_mini_batch_size": 64}, "verl's ppo_mini_batch_size is minibatches"),
        ({"data": {"train_batch_size": 64}}, "verl's train_batch_size is tasks_per_step here"),
        ({"weight_decay": 0.1}, "did you mean 'optimizer.weight_decay'?"),
        ({"compute": {"optimizer": "adamw8bit"}}, "did you mean 'optimizer'?"),
        ({"top_p": 0.9}, "a setting of `agentrl eval`"),
        ({"stepz": 3}, "did you mean 'steps'?"),
        ({"chat": {"parser": "hermess"}}, "did you mean 'hermes'?"),
        ({"compute": {"dtype": "bf16"}}, "did you mean 'bfloat16'?"),
    ],
)
def test_a_name_of_another_trainer_is_answered_with_ours(row, said):
    with pytest.raises(ConfigError) as caught:
        check_config(BASE | row, "run.toml")
    assert said in str(caught.value) and "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("name", "ours"),
    [
        ("beta", "loss.kl_coef"),
        ("epsilon", "loss.clip_low and loss.clip_high"),
        ("epsilon_high", "loss.clip_high"),
        ("num_generations", "group_size"),
        ("num_iterations", "loss.epochs"),
        ("clip_ratio", "loss.clip_low and loss.clip_high"),
        ("kl_loss_coef", "loss.kl_coef"),
        ("entropy_coeff", "loss.entropy_coef"),
        ("group_size", "it stands outside of loss"),
        ("lam", "it belongs to turn_ppo, ppo, ppo_penalty"),
        ("clip_hihg", "did you mean 'clip_high'?"),
    ],
)
def test_a_name_of_another_trainer_in_the_loss_is_answered_with_ours(name, ours):
    with pytest.raises(ConfigError) as caught:
        recipe("grpo", **{name: 0.1})
    assert ours in str(caught.value) and "kl_budget'" not in str(caught.value)


def test_a_wrong_override_is_not_blamed_on_the_file(tmp_path):
    file = tmp_path / "run.toml"
    file.write_text('env = "calc-v0"\nmodel = "m"\nsteps = 0\n')
    for override, said in (
        ("stepz=3", "--set stepz=3: setting 'stepz' is unknown"),
        ("compute.micro_tokens=x", "--set compute.micro_tokens=x: compute.micro_tokens='x'"),
        ("optimizer=adamw", "--set optimizer=adamw: optimizer='adamw' must be a table"),
    ):
        file.write_text('env = "calc-v0"\nmodel = "m"\n')
        with pytest.raises(ConfigError) as caught:
            read_config(file, ["seed=1", override])
        assert str(caught.value).startswith(said)
    file.write_text('env = "calc-v0"\nmodel = "m"\nsteps = 0\n')
    with pytest.raises(ConfigError, match=r"run\.toml: steps=0"):
        read_config(file, ["seed=1"])


def test_the_line_of_a_round_says_the_kl_to_the_reference_where_there_is_one():
    row = {"step": 3, "reward/mean": 0.5, "policy/kl": 0.001}
    assert "reference" not in describe_round(row, 20)
    assert "kl 0.0010  to the reference 0.167" in describe_round(
        row | {"policy/ref_kl": 0.1667}, 20
    )


@pytest.mark.parametrize(
    ("row", "said"),
    [
        ({"steps": True}, "steps=true must be a whole number"),
        ({"curriculum": True}, "curriculum=true must be a table, as in curriculum = {…}"),
        ({"curriculum": {"explore": 0.2}}, "'curriculum.sampler' is missing: choose in_order,"),
    ],
)
def test_settings_are_shown_as_toml_writes_them(row, said):
    with pytest.raises(ConfigError, match=re.escape(said)):
        check_config(BASE | row, "test")


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"clip_high": True}, "clip_high=true must be a number"),
        ({"filter_groups": 1}, "filter_groups=1 must be true or false"),
        ({"epochs": False}, "epochs=false must be a whole number"),
        ({"aggregate": {"on": True}}, "aggregate.on: episode has no such option"),
        ({"teacher": {"model": "m", "top": True}}, "loss.teacher: recipe grpo reads no teacher"),
    ],
)
def test_options_of_a_recipe_are_shown_as_toml_writes_them(settings, said):
    with pytest.raises(ConfigError, match=re.escape(said)):
        recipe("grpo", **settings)


def test_a_recipe_that_is_a_file_alone_is_told_which_are_in_it(tmp_path):
    (tmp_path / "mine.py").write_text(
        "from agentrl.trainers.algorithms.recipes import RECIPES\nmine = RECIPES['grpo']\n"
    )
    with pytest.raises(ConfigError, match=r"has no recipe named '': recipes in it are mine"):
        recipe(str(tmp_path / "mine.py"))

"""Coefficients that follow a target in a run: which number they read, how they move, and that a
resumed run goes on with them.
"""

from __future__ import annotations

import math
from dataclasses import replace
from itertools import pairwise
from types import SimpleNamespace

import pytest
import torch
from run_cases import TOLD, run

from agentrl.errors import ConfigError, TrainingError
from agentrl.trainers.algorithms.adaptive import AdaptiveEntropy, AdaptiveKL
from agentrl.trainers.algorithms.recipes import RECIPES, recipe
from agentrl.trainers.algorithms.regularisers import anchor_kl, entropy_bonus
from agentrl.trainers.config import check_config
from agentrl.trainers.folder import latest_checkpoint
from agentrl.trainers.learner import Learner
from agentrl.trainers.loop import train
from agentrl.trainers.models.scoring import token_logprobs
from agentrl.trainers.run import Run


def settings(model, **changes):
    row = {
        "env": TOLD,
        "model": str(model),
        "recipe": "ppo_penalty",
        "steps": 6,
        "tasks_per_step": 4,
        "group_size": 4,
    }
    row |= {"learning_rate": 1e-2, "deterministic": True, "minibatches": 1, "save_every": 1}
    return check_config(row | changes, "test")


# --- recipes


def test_which_recipes_adapt():
    assert {name for name, row in RECIPES.items() if row.rules()} == {"ppo_penalty"}
    assert recipe("ppo_penalty").rules() == {"anchor_kl_coef": AdaptiveKL(1.0, 0.01)}
    assert not recipe("ppo_penalty", kl_target=math.inf, anchor_kl_coef=0.0).rules()
    both = recipe("ppo_penalty", kl_target=0.5, anchor_kl_coef=2.0, entropy_target=0.3).rules()
    assert both == {
        "anchor_kl_coef": AdaptiveKL(2.0, 0.5),
        "entropy_coef": AdaptiveEntropy(0.0, 0.3),
    }


def test_an_entropy_target_adds_the_bonus_once():
    row = recipe("grpo", entropy_target=0.2)
    assert [term.name for term in row.regularisers] == [entropy_bonus.name]
    assert "entropy_gradient" in row.needs and row.options["entropy_coef"] == 0
    assert (
        recipe("grpo", entropy_target=0.2, entropy_coef=0.01).rules()["entropy_coef"].coef == 0.01
    )
    assert not recipe("grpo", entropy_target=math.inf).regularisers
    with pytest.raises(ConfigError) as caught:
        replace(recipe("grpo"), entropy_target=0.2).rules()
    assert caught.value.setting == "loss.entropy_target"


def test_only_what_adapts_moves():
    row = recipe("ppo_penalty", entropy_coef=0.01).moved(
        {"anchor_kl_coef": 8.0, "entropy_coef": 0.5}
    )
    assert (row.options["anchor_kl_coef"], row.options["entropy_coef"]) == (8.0, 0.01)
    assert row.regularisers[0].name == anchor_kl.name
    whole = recipe("ppo_penalty", anchor_kl_coef=1, entropy_target=1, entropy_coef=0)
    moved = whole.moved({"anchor_kl_coef": 0.5, "entropy_coef": 0.005}).options
    assert (moved["anchor_kl_coef"], moved["entropy_coef"]) == (
        0.5,
        0.005,
    ), "whole numbers in settings are no counts"


# --- what a run reads


def one_round(config, folder, follow):
    """The batch of a first round, its metrics, and the recipe before and after; `follow` does the
    adapting.
    """
    with Run(config, folder) as opened, pytest.MonkeyPatch.context() as patch:
        patch.setattr(Learner, "adapt", follow)
        learner = opened.learner
        before, packed = learner.recipe, opened.pack(opened.play(0))
        batch = learner.credit(learner.prepare(packed), 0)
        first = next(
            batch.minibatches(opened.config.minibatches, learner.seed_of("minibatches", 0))
        )
        entered = token_logprobs(learner.model, first).entropy_BT[first.mask_BT].mean().item()
        metrics = learner.learn(packed, batch, 0)
        shift_N = (learner.score(learner.model, batch).logprobs_BT - batch.old_logprobs_BT)[
            batch.mask_BT
        ]
        kl = (shift_N.double().exp() - 1 - shift_N.double()).mean().item()
        return metrics, before, learner.recipe, entered, kl


def check_the_kl_is_that_behind_the_update(model, folder, follow):
    """With one step per round the KL in front of it is 0, and the coefficient would only fall."""
    config = settings(model, loss={"kl_target": 1e-4})
    metrics, before, after, _, kl = one_round(config, folder, follow)
    assert kl > 1e-3 > 1e-6 > metrics["policy/kl"]
    assert metrics["policy/kl_after"] == pytest.approx(kl, rel=1e-3)
    assert metrics["policy/anchor_kl_coef"] == before.options["anchor_kl_coef"] == 1.0
    assert after.options["anchor_kl_coef"] == 2.0


def check_the_entropy_is_that_in_front_of_the_update(model, folder, follow):
    """The target lies between the entropy that the round began with and its mean over the round's
    steps.
    """

    def played(name, target, by):
        loss = {"entropy_target": target, "entropy_coef": 0.5}
        steep = {"recipe": "grpo", "minibatches": 8, "learning_rate": 0.3, "loss": loss}
        return one_round(settings(model, **steep), folder / name, by)

    metrics, _, _, entered, _ = played("a", 1.0, adapt)
    target = (entered + metrics["policy/entropy"]) / 2
    assert abs(entered - target) > 1e-3
    metrics, before, after, again, _ = played("b", target, follow)
    assert again == entered and metrics["policy/entropy_before"] == pytest.approx(entered, abs=1e-5)
    assert metrics["policy/entropy_coef"] == before.options["entropy_coef"] == 0.5
    assert after.options["entropy_coef"] == (0.505 if entered <= target else 0.495)


adapt = Learner.adapt


def adapt_in_front(run, batch, history):
    """By the KL that the minibatches saw on their way."""
    metrics = adapt(run, batch, [])
    kl = sum(step["approx_kl"] for step in history) / len(history)
    run.recipe = run.recipe.moved(
        {name: rule.update(kl).coef for name, rule in run.recipe.rules().items()}
    )
    return metrics | {"policy/kl_after": kl}


def adapt_by_the_mean(run, batch, history):
    """By the mean entropy over the round's steps."""
    entropy = sum(step["entropy"] for step in history) / len(history)
    return adapt(run, batch, [{"updates": 1.0, "entropy": entropy}])


def adapt_nothing(run, batch, history):
    return adapt(run, batch, [])


WIRING = [
    (check_the_kl_is_that_behind_the_update, [adapt_in_front, adapt_nothing]),
    (check_the_entropy_is_that_in_front_of_the_update, [adapt_by_the_mean, adapt_nothing]),
]


@pytest.mark.parametrize("check", [check for check, _ in WIRING], ids=lambda one: one.__name__)
def test_a_run_reads_the_right_number(check, model, tmp_path):
    check(model, tmp_path, adapt)


@pytest.mark.parametrize(
    ("check", "wrong"),
    [(check, one) for check, some in WIRING for one in some],
    ids=lambda one: one.__name__,
)
def test_the_wrong_number_is_flagged(check, wrong, model, tmp_path):
    with pytest.raises((AssertionError, KeyError)):
        check(model, tmp_path, wrong)


def test_a_recipe_that_does_not_adapt_pays_nothing_and_a_round_without_a_step_moves_nothing():
    assert (
        adapt(SimpleNamespace(recipe=recipe("ppo"), _has_targets=False), None, [{"updates": 1.0}])
        == {}
    )
    adapting = recipe("ppo_penalty", entropy_target=0.2)
    still = SimpleNamespace(recipe=adapting, _has_targets=True, _own_tokens=lambda batch: batch)
    before = still.recipe
    for history in ([], [{"updates": 0.0, "entropy": 1.0}]):
        assert adapt(still, None, history) == {
            "policy/anchor_kl_coef": 1.0,
            "policy/entropy_coef": 0.0,
        }
    assert still.recipe is before


def test_the_distance_from_the_reference_is_the_mean_over_the_steps_of_a_round():
    moving = recipe("grpo", kl_coef=1.0, ref_kl_target=0.1)
    learner = SimpleNamespace(recipe=moving, _has_targets=True, _own_tokens=lambda batch: batch)
    steps = [{"updates": 1.0, "ref_kl": kl} for kl in (0.0, 0.102, 0.204)]
    assert adapt(learner, SimpleNamespace(), steps) == {"policy/kl_coef": 1.0}
    assert learner.recipe.options["kl_coef"] == pytest.approx(1 + 0.1 * 0.02)


# --- runs


def coefficients(rows, name):
    return [row[f"policy/{name}"] for row in rows]


def test_the_penalty_of_a_run_doubles_and_halves_as_the_rule_says(model, tmp_path):
    """The learning rate falls to 0: at first rounds cost more than they should, in the end less."""
    config = settings(model, steps=10, schedule={"final": 0.0}, loss={"kl_target": 0.02})
    rows = run(config, tmp_path / "a")
    assert coefficients(rows, "anchor_kl_coef")[0] == 1.0
    factors = []
    for row, following in pairwise(rows):
        kl = row["policy/kl_after"]
        factors.append(following["policy/anchor_kl_coef"] / row["policy/anchor_kl_coef"])
        assert factors[-1] == (2.0 if kl > 0.03 else 0.5 if kl < 0.02 / 1.5 else 1.0)
        assert row["policy/kl"] < 1e-6, "in front of the round's only step"
    assert {2.0, 0.5} <= set(factors)
    fixed = run(settings(model, steps=1, loss={"kl_target": math.inf}), tmp_path / "b")
    assert not {"policy/anchor_kl_coef", "policy/kl_after"} & fixed[0].keys()
    assert fixed[0]["policy/loss"] == rows[0]["policy/loss"], "the first round is the same"


@pytest.mark.parametrize(
    ("target", "start", "expected"),
    [(9.0, 0.0, [0, 0.005, 0.01]), (0.01, 0.008, [0.008, 0.003, 0])],
)
def test_the_entropy_bonus_of_a_run_moves_to_its_target(model, tmp_path, target, start, expected):
    change = {
        "recipe": "grpo",
        "steps": 3,
        "loss": {"entropy_target": target, "entropy_coef": start},
    }
    rows = run(settings(model, **change), tmp_path / "a")
    assert coefficients(rows, "entropy_coef") == pytest.approx(expected)
    for row in rows:
        assert row["policy/entropy_before"] == row["policy/entropy"], "one step per round"


@pytest.mark.bit_equal
@pytest.mark.parametrize("stop", [1, 3])
def test_a_resumed_run_goes_on_with_the_coefficients_where_they_were(model, tmp_path, stop):
    change = {
        "minibatches": 2,
        "schedule": {"warmup": 3},
        "loss": {"kl_target": 1e-3, "entropy_target": 9.0},
    }
    whole = run(settings(model, steps=5, **change), tmp_path / "a" / "x")
    assert len(set(coefficients(whole, "anchor_kl_coef"))) > 2
    run(settings(model, steps=stop, **change), tmp_path / "b" / "x")
    kept = latest_checkpoint(tmp_path / "b" / "x").state["coefficients"]
    assert kept == {
        name: coefficients(whole, name)[stop] for name in ("anchor_kl_coef", "entropy_coef")
    }
    assert run(settings(model, steps=5, **change), tmp_path / "b" / "x", resume=True) == whole


def test_a_run_that_no_longer_adapts_takes_the_coefficient_of_its_settings(model, tmp_path):
    run(settings(model, steps=2), tmp_path / "a")
    assert latest_checkpoint(tmp_path / "a").state["coefficients"]["anchor_kl_coef"] != 1.0
    config = settings(model, loss={"kl_target": math.inf, "anchor_kl_coef": 0.7})
    with Run(config, tmp_path / "a", resume=True) as opened:
        assert opened.learner.recipe.options["anchor_kl_coef"] == 0.7


def test_a_policy_that_a_step_broke_ends_the_run(model, tmp_path):
    with (
        Run(settings(model), tmp_path / "a") as opened,
        pytest.raises(TrainingError, match="lower learning_rate"),
    ):
        step = opened.learner.optimizer.step

        def breaks(*arguments):
            step(*arguments)
            with torch.no_grad():
                next(opened.learner.model.parameters()).fill_(math.nan)

        opened.learner.optimizer.step = breaks
        train(opened)

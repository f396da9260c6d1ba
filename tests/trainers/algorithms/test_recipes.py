"""Every recipe, from groups to gradient: what must not change it, what it reads, and rounds at the
edges.
"""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from recipe_cases import CASES, SIGNAL, credited, groups_of, learnt, made_up, output_of, paid
from recipe_checks import (
    CHECKS,
    check_micro_batches_add_up,
    check_nothing_earned_is_nothing_learnt,
    check_the_kl_gradient,
    louder_twice,
)

from agentrl.engines.loading import load_tokenizer
from agentrl.errors import ConfigError
from agentrl.trainers.algorithms.describe import recipe_table
from agentrl.trainers.algorithms.recipes import RECIPES, recipe
from agentrl.trainers.config import check_config
from agentrl.trainers.loop import train
from agentrl.trainers.models.distributed import idle
from agentrl.trainers.models.tiny import build_model
from agentrl.trainers.run import Run

PAGE = (Path(__file__).parents[3] / "docs" / "trainers.md").read_text()
RECIPE_DOCS = PAGE.split("\n## Recipes\n")[1].split("\n## ")[0]
ALL = pytest.mark.parametrize("name", CASES)
ROWS = pytest.mark.parametrize("name", RECIPES)


@ALL
@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__.removeprefix("check_"))
def test_what_must_not_change_a_recipe(name, check):
    check(CASES[name])


@ROWS
def test_the_kl_term_of_every_recipe_pulls_towards_the_reference(name):
    check_the_kl_gradient(recipe(name, kl_coef=0.3))
    check_the_kl_gradient(recipe(name, kl_coef=0.3, tis_high=1.0, entropy_coef=0.1))


def test_only_statistics_of_the_whole_round_notice_that_it_is_there_twice():
    batch = credited(CASES["grpo"], groups_of([SIGNAL]))
    noticing = {name for name in RECIPES if louder_twice(recipe(name), batch) != 1}
    assert noticing == {
        "reinforce",
        "gdpo",
        "reinforce++",
        "reinforce++_baseline",
        "ppo",
        "ppo_penalty",
        "turn_ppo",
    }


# --- what a recipe reads

FIELDS = {
    "reference": ("ref_logprobs_BT",),
    "proximal": ("proximal_logprobs_BT",),
    "critic": ("values_BT",),
    "greedy": ("greedy_reward_E",),
    "anchor": (),
    "entropy": ("entropy_BT",),
    "entropy_gradient": ("output.entropy_BT",),
    "top": ("output.top_logprobs_BTK",),
    "router": ("output.router_loss",),
    "teacher": ("teacher_logprobs_BT",),
    "teacher_top": ("teacher_top_logprobs_BTK", "output.top_logprobs_BTK"),
    "anchor_top": ("top_ids_BTK", "top_logprobs_BTK", "output.top_logprobs_BTK"),
}


def without(row, absent):
    """The loss on made-up numbers, without these fields."""
    batch, output = made_up(("a", "b"))
    batch = replace(batch, **{field: None for field in absent if not field.startswith("output.")})
    output = replace(
        output,
        **{field.removeprefix("output."): None for field in absent if field.startswith("output.")},
    )
    return float(row.loss(output, row.correct(row.advantage(batch)))[0])


@ALL
def test_a_recipe_reads_what_it_says_it_needs_and_nothing_else(name):
    row = CASES[name]
    read = {field for need in row.needs & FIELDS.keys() for field in FIELDS[need]}
    every = {field for some in FIELDS.values() for field in some}
    assert without(row, every - read) == without(row, ())
    for field in read:
        with pytest.raises(ValueError, match=field):
            without(row, {field})


@ROWS
def test_a_group_of_one_is_refused_or_teaches(name):
    row = paid(name)
    if "group" in row.needs:
        with pytest.raises(ConfigError, match="group_size=1: "):
            row.refuse_group_size(1)
        return
    row.refuse_group_size(1)
    alone = groups_of([[play] for play in SIGNAL[:3]])
    assert learnt(row, credited(row, alone)).gradient_V4.any()


@ROWS
def test_every_row_names_its_paper_and_lists_all_its_parts(name):
    row = RECIPES[name]
    assert row.name == name and row.paper.startswith("https://")
    (listed,) = (line for line in recipe_table() if line["name"] == name)
    assert listed["credit"].split(", ") == [step.label for step in row.credit]
    assert listed["surrogate"].split(" ")[0] == row.surrogate.label
    assert listed["aggregate"] == row.aggregate.label and listed["paper"] == row.paper
    named = set(re.findall(r"[a-z_]+", listed["besides"]))
    assert {part.name for part in (*row.regularisers, *row.corrections)} <= named
    assert ("refill" in named) == row.refill


def test_a_recipe_of_ones_own_is_one_expression(monkeypatch):
    made = {}
    exec(
        re.findall(r"```python\n(.*?)```", RECIPE_DOCS, re.DOTALL)[0], made
    )  # the text of our own page
    mine = made["mine"]
    check_micro_batches_add_up(mine)
    check_the_kl_gradient(mine)
    monkeypatch.setitem(RECIPES, "mine", mine)
    assert recipe("mine", clip_high=2.0).options["clip_high"] == 2.0


def test_parts_of_ones_own_in_a_file_are_a_recipe(tmp_path):
    file = tmp_path / "my_recipes.py"
    file.write_text(
        re.findall(r"```python\n(.*?)```", RECIPE_DOCS, re.DOTALL)[1]
    )  # the text of our own page
    soft = recipe(f"{file}:soft", spread_power=0.5, width=0.1, kl_coef=0.01)
    assert (
        soft.options == soft.options | {"spread_power": 0.5, "width": 0.1}
        and "clip_high" not in soft.options
    )
    check_micro_batches_add_up(soft)
    check_the_kl_gradient(soft)
    for name, said in (
        (f"{file}:sofd", "has no recipe named 'sofd': recipes in it are soft"),
        (f"{file}:over_median", "has no recipe named 'over_median'"),
        ("nowhere.py:soft", "recipe file 'nowhere.py' does not exist"),
    ):
        with pytest.raises(ConfigError, match=said):
            recipe(name)
    file.write_text("import nothing_of_that_name")
    with pytest.raises(ConfigError, match="cannot be loaded: ModuleNotFoundError"):
        recipe(f"{file}:soft")


# --- rounds at the edges


@ALL
def test_a_round_that_infrastructure_failed_is_no_step(name):
    batch = credited(CASES[name], groups_of([[(shape, None, False) for shape, *_ in SIGNAL]]))
    assert (len(batch), batch.n_tokens, batch.n_episodes, batch.n_failed) == (0, 0, 0, 4)
    assert not list(batch.minibatches(2, seed=0))


@ALL
def test_a_process_without_rows_adds_nothing(name):
    row = CASES[name]
    blank = idle(row.correct(credited(row, groups_of([SIGNAL]))))
    said_BT4 = torch.zeros(*blank.mask_BT.shape, 4, dtype=torch.float64, requires_grad=True)
    loss, metrics = row.loss(output_of(row, said_BT4), blank)
    assert float(loss.detach()) == 0 and not torch.autograd.grad(loss, said_BT4)[0].any()
    assert all(value == 0 for key, value in metrics.items() if key.startswith(("loss", "scored")))


@ROWS
def test_a_round_in_which_nobody_earns_anything_teaches_nothing(name):
    fixed = (
        {"part_weights": {"a": 1.0}} if name == "gdpo" else {}
    )  # the other term of the score differs
    check_nothing_earned_is_nothing_learnt(recipe(name, **fixed))


def test_equal_outcomes_are_signal_where_time_is_discounted_or_the_round_is_centred():
    won = [(shape, 1.0, False) for shape, *_ in SIGNAL]
    assert credited(recipe("gigpo"), groups_of([won])).advantages_BT.any()
    batch = credited(recipe("reinforce++_baseline"), groups_of([won, SIGNAL]))
    first_B = batch.group_E[batch.episode_B] == 0
    assert batch.advantages_BT[first_B].abs().amax() > 0
    assert not credited(recipe("grpo"), groups_of([won, SIGNAL])).advantages_BT[first_B].any()


@ALL
def test_a_limit_is_an_ending_like_any_other_unless_it_is_to_be_dropped(name):
    row = CASES[name]
    cut, free = (
        groups_of([[(*play[:2], flag and play[2]) for play in SIGNAL]]) for flag in (True, False)
    )
    batch = credited(row, cut)
    with_limits, without_limits = learnt(row, batch), learnt(row, credited(row, free))
    if "drop_truncated" not in row.options:
        assert torch.equal(with_limits.gradient_V4, without_limits.gradient_V4)
        assert with_limits.metrics == without_limits.metrics
    row = replace(
        row, corrections=(*row.corrections, *recipe("rloo", drop_truncated=True).corrections)
    )
    dropped = learnt(row, batch)
    mask_BT, ended_B = batch.mask_BT, batch.truncated_E[batch.episode_B]
    ended, others = (batch.ids_BT[some_B][mask_BT[some_B]] for some_B in (ended_B, ~ended_B))
    assert not dropped.weights_V[ended].any()
    assert torch.allclose(
        dropped.gradient_V4[others], without_limits.gradient_V4[others], atol=1e-12
    )
    assert bool(dropped.gradient_V4[ended].any()) <= bool(row.regularisers)
    assert torch.equal(dropped.advantages_V, with_limits.advantages_V)


# --- a run


@ROWS
def test_a_run_has_what_a_recipe_needs(name, model, tmp_path):
    fixed = {
        "env": f"{Path(__file__).parents[2] / 'support/toy_envs.py'}:Parity",
        "model": str(model),
        "recipe": name,
        "steps": 1,
        "tasks_per_step": 4,
        "group_size": 8,
        "minibatches": 1 if RECIPES[name].one_step else 2,
        "deterministic": True,
        "eval_every": 0,
    }
    loss = {"critic": {"warmup": 0}} if "critic" in RECIPES[name].needs else {}
    if "teacher" in RECIPES[name].needs:
        other = build_model(tmp_path / "teacher", load_tokenizer(model), width=32, seed=1)
        loss |= {"teacher": {"model": str(other)}}
    with Run(check_config(fixed | {"loss": loss}, "test"), tmp_path / "run") as opened:
        train(opened)
        assert opened.folder.history()[-1]["policy/updates"] > 0

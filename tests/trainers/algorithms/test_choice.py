"""Parts of a recipe chosen in settings, each with its own options."""

from __future__ import annotations

import math

import pytest
import torch
from recipe_cases import SIGNAL, credited, groups_of, learnt
from recipe_checks import check_micro_batches_add_up

from agentrl.errors import ConfigError
from agentrl.trainers.algorithms.recipe import LISTS
from agentrl.trainers.algorithms.recipes import PARTS, RECIPES, recipe
from agentrl.trainers.config import check_config, read_config, write_config

BASE = {"env": "calc-v0", "model": "m"}
BESIDE = {
    "kl_cov": {"corrections": "select_kl_cov"},
    "simko": {"corrections": "select_forks"},
    "whiten": {"credit": ["grpo", "whiten"]},
    "entropy_shaped": {"credit": ["grpo", "entropy_shaped"]},
}
"""What a part cannot be without."""


def gradient(row):
    return learnt(row, credited(row, groups_of([SIGNAL]))).gradient_V4


@pytest.mark.parametrize(
    ("place", "name"), [(place, name) for place, table in PARTS.items() for name in table]
)
def test_every_part_can_be_chosen_by_its_name(place, name):
    part = PARTS[place][name]
    nothing = {key: 0.1 for key, value in dict(part.options).items() if key.endswith("_coef")}
    base = "gdpo" if name == "gdpo" else "grpo"
    row = recipe(base, **{place: {"name": name, **nothing}} | BESIDE.get(name, {}))
    found = getattr(row, place)
    assert part.label in [one.label for one in (found if place in LISTS else (found,))]
    assert nothing.items() <= row.options.items()


def test_a_table_is_the_flat_options_of_the_part_alone():
    typed = recipe("grpo", surrogate={"name": "ppo_clip", "clip_low": 0.1, "clip_high": 0.15})
    flat = recipe("grpo", clip_low=0.1, clip_high=0.15)
    assert typed.options == flat.options and torch.equal(gradient(typed), gradient(flat))
    two = recipe("ppo", credit=["gae", {"name": "whiten", "eps": 1.0}])
    assert two.options["eps"] == 1.0 and two.options["gamma"] == 1.0


def test_dual_clip_is_an_option_of_ppo():
    typed = recipe("dapo", surrogate={"name": "ppo_clip", "dual_clip": 1.05})
    assert typed.options["clip_high"] == 0.28, "what is not named stays the row's"
    assert recipe("dapo", dual_clip=1.05).options == typed.options
    assert recipe("dapo", surrogate={"dual_clip": 1.05}).options == typed.options
    assert recipe("grpo", surrogate="ppo_dual_clip").options["dual_clip"] == 3.0
    assert recipe("dapo").options["dual_clip"] == math.inf
    assert not torch.equal(gradient(typed), gradient(recipe("dapo")))
    check_micro_batches_add_up(typed)


def test_a_list_holds_what_it_says_and_nothing_else():
    assert recipe("vapo", regularisers=[]).regularisers == ()
    assert recipe("vapo", regularisers="imitate").options["imitate_coef"] == 0.1
    row = recipe("grpo", corrections=["drop_overlong", {"name": "truncated_is", "tis_high": 3.0}])
    assert [part.label for part in row.corrections] == ["drop_overlong", "truncated_is"]
    added = recipe("grpo", corrections="drop_overlong", tis_high=3.0)
    assert added.options == row.options


WRONG = [
    ({"surrogate": {"name": "ppo_clipp"}}, "surrogate", "did you mean 'ppo_clip'?"),
    ({"credit": ["rloo", "whitened"]}, "credit", "did you mean 'whiten'?"),
    ({"surrogate": {"clip_hihg": 0.3}}, "surrogate.clip_hihg", "did you mean 'clip_high'?"),
    ({"surrogate": {"epsilon": 0.3}}, "surrogate.epsilon", "loss.clip_low and loss.clip_high here"),
    ({"surrogate": {"clip_high": "0.3"}}, "surrogate.clip_high", "='0.3' must be a number"),
    ({"surrogate": {"clip_high": True}}, "surrogate.clip_high", "=true must be a number"),
    ({"surrogate": {"clip_high": -1}}, "surrogate.clip_high", "=-1 must be at least 0"),
    ({"credit": {"eps": math.inf}}, "credit.eps", "must be a finite number"),
    ({"surrogate": {"clip_high": 2.0**63}}, "surrogate.clip_high", "must be below 2**63"),
    ({"surrogate": {"dual_clip": 1.0}}, "surrogate.dual_clip", "=1.0 must be greater than 1"),
    ({"surrogate": 3}, "surrogate", "=3 must be a name or a table"),
    ({"surrogate": ["ppo_clip"]}, "surrogate", "must be a name or a table"),
    ({"surrogate": "simko"}, "surrogate", "add select_forks to the corrections"),
    ({"aggregate": {"name": "constant", "norm_tokens": 0.5}}, "aggregate.norm_tokens", "whole"),
    (
        {"aggregate": {"name": "token", "norm_tokens": 5}},
        "aggregate.norm_tokens",
        "belongs to constant",
    ),
    ({"aggregate": {"name": "token", "tokens": 5}}, "aggregate.tokens", "it has no options"),
    ({"corrections": {"tis_high": 2.0}}, "corrections.name", "has no name"),
    (
        {"regularisers": [{"name": "kl_penalty", "kl_coef": coef} for coef in (0.1, 0.2)]},
        "regularisers",
        "names kl_penalty twice",
    ),
    ({"regularisers": "kl_penalty"}, "regularisers.kl_coef", "changes nothing while kl_coef is 0"),
    ({"regularisers": "kl_cov"}, "regularisers", "add select_kl_cov to the corrections"),
    ({"corrections": ["select_forks", "select_kl_cov"]}, "corrections", "keep one"),
    ({"credit": []}, "credit", "begin with a part that fills them"),
    ({"credit": "whiten"}, "credit", "begin with a part that fills them"),
    ({"surrogate": {"clip_high": 0.3}, "clip_high": 0.3}, "clip_high", "is set twice"),
    ({"overlong_tokens": 10}, "overlong_cache", "must be at most overlong_tokens=10"),
    ({"kl_estimator": "k9"}, "kl_estimator", "must be k1, k2 or k3"),
    ({"kl_ratio": False}, "kl_ratio", "while kl_coef is 0: set kl_coef as well"),
    ({"mis_low": 1.5}, "mis_low", "must be at most 1"),
    ({"credit": ["grpo", "whiten"], "eps": 0.1}, "eps", "an option of grpo and whiten"),
]


@pytest.mark.parametrize(("settings", "setting", "fix"), WRONG)
def test_a_wrong_part_is_one_sentence(settings, setting, fix):
    with pytest.raises(ConfigError) as caught:
        recipe("grpo", **settings)
    assert caught.value.setting == f"loss.{setting}"
    assert fix in str(caught.value) and "\n" not in str(caught.value)


@pytest.mark.parametrize("name", RECIPES)
def test_every_recipe_can_be_written_out_part_by_part(name):
    """A table that names a row's own parts is that row."""
    row = recipe(name)
    spelled = {}
    for place in PARTS:
        parts = getattr(row, place) if place in LISTS else (getattr(row, place),)
        tables = [{"name": part.label, **dict(part.options)} for part in parts]
        spelled[place] = tables if place in LISTS else tables[0]
    again = recipe(name, **spelled)
    assert again.options == row.options and again.needs == row.needs
    assert torch.equal(gradient(again), gradient(row))


def test_files_and_overrides_say_the_same(tmp_path):
    file = tmp_path / "c.toml"
    file.write_text(
        'env = "calc-v0"\nmodel = "m"\n[loss]\nsurrogate = "ppo_clip"\n'
        'credit = ["rloo", {name = "whiten", eps = 1e-6}]\n'
    )
    sets = ["loss.surrogate.name=cispo", "loss.surrogate.clip_high=3", "loss.aggregate.name=token"]
    config = read_config(file, sets)
    assert config.loss["surrogate"] == {"name": "cispo", "clip_high": 3}
    expected = {"eps": 1e-6, "clip_low": 1.0, "clip_high": 3.0}
    assert recipe(config.recipe, **config.loss).options == expected
    write_config(config, file)
    assert read_config(file) == config == check_config(config.model_dump(), "again")
    with pytest.raises(ConfigError, match="'name' is not a place in a list of 2"):
        read_config(file, ["loss.credit.name=grpo"])

"""Every recipe, from groups to gradient: what must not change it, what it reads, and rounds at the edges."""

from __future__ import annotations

import pytest
from recipe_cases import CASES, CHECKS, check_the_kl_gradient

from agentrl.trainers.recipes import RECIPES, recipe

ALL = pytest.mark.parametrize("name", CASES)


@ALL
@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__.removeprefix("check_"))
def test_what_must_not_change_a_recipe(name, check):
    check(CASES[name])


@pytest.mark.parametrize("name", RECIPES)
def test_the_kl_term_of_every_recipe_pulls_towards_the_reference(name):
    check_the_kl_gradient(recipe(name, kl_coef=0.3))

"""No option is there for nothing: whatever can be set changes what is learnt."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from dataclasses import replace

import pytest
import torch
from recipe_cases import SIGNAL, credited, groups_of, learnt, paid

from agentrl.errors import ConfigError
from agentrl.trainers.algorithms.corrections import LEVELS
from agentrl.trainers.algorithms.recipes import ADDABLE, AGGREGATES, RECIPES, recipe
from agentrl.trainers.algorithms.regularisers import KL_ESTIMATORS

CHOICES = {
    "kl_estimator": KL_ESTIMATORS,
    "tis_level": LEVELS,
    "mis_level": LEVELS,
    "reject_level": LEVELS,
}
ROUND = [
    SIGNAL,
    [([(2, 1), (1, 0)], 1.0, False), ([(1, 0), (1, 0)], 0.0, False), ([(2, 0)], 0.0, False)],
]
"""Where sampler, anchor, reference and policy differ by tenths of nats, and tokens are of three
ages.
"""

BESIDE = {
    "overlong_tokens": {"overlong_cache": 4},
    "overlong_cache": {"overlong_tokens": 4100},
    "gkd_beta": {"gkd_coef": 0.3},
    "kl_estimator": {"kl_coef": 0.3},
    "kl_ratio": {"kl_coef": 0.3},
    "entropy_kappa": {"entropy_alpha": 9.0},
    "tis_level": {"tis_high": 1e9},
    "mis_level": {"mis_low": 0.0, "mis_high": 1e9},
    "reject_level": {"reject_low": 0.9, "reject_high": 1.1},
    "cov_low": {"cov_share": 1.0},
    "cov_high": {"cov_share": 1.0, "cov_low": 0.0},
    "cov_share": {"cov_low": 0.0},
    "cov_seed": {"cov_share": 0.3, "cov_low": 0.0},
}
"""What must be set as well for an option to matter on a batch as small as this one."""


def others(name, value):
    """Values beside the one that an option has now."""
    if isinstance(value, bool):
        return [not value]
    if isinstance(value, str):
        return [choice for choice in CHOICES[name] if choice != value]
    if isinstance(value, Mapping):
        return [{"a": 1.0, "b": 0.5}]
    if isinstance(value, int):
        return [value + 1, value + 2, max(1, value - 1), 7]
    return [
        candidate
        for candidate in (0.0, 0.01, 0.1, 0.3, 0.5, 0.7, 1.0, 1.1, 2.0, 6.0)
        if candidate != value
    ]


def signature(row):
    batch = credited(row, groups_of(ROUND))
    found = learnt(row, batch)
    returns_N = torch.zeros(0) if batch.returns_BT is None else batch.returns_BT.flatten()
    loss = torch.tensor([found.loss])  # which is all that a term of the routers shows in
    return torch.cat(
        (found.gradient_V4.flatten(), found.advantages_V, found.weights_V, returns_N, loss)
    )


def matters(name, option, value):
    """Whether a value of the option gives another gradient, advantage or weight than the one that
    is there now.
    """
    beside = {
        key: one for key, one in BESIDE.get(option, {}).items() if key not in recipe(name).options
    }
    turned = paid(name, **beside, **{option: value})
    plain = replace(recipe(name, **beside), turn_weights=turned.turn_weights)
    return not torch.equal(signature(turned), signature(plain))


def changes_something(name, option, candidates):
    for other in candidates:
        try:
            if matters(name, option, other):
                return True
        except ConfigError:
            continue  # a value that is refused is no silent one
    return False


ROWS = [(name, option) for name in RECIPES for option in recipe(name).options]
ADDED = [
    (option, value)
    for parts in ADDABLE.values()
    for part in parts
    for option, value in dict(part.options).items()
]
ADDED.remove(
    ("load_balance_coef", 0.0)
)  # reads the routers of a mixture of experts: tests/trainers/models/test_moe.py


@pytest.mark.parametrize(("name", "option"), ROWS)
def test_every_option_of_every_recipe_changes_what_is_learnt(name, option):
    assert changes_something(name, option, others(option, recipe(name).options[option]))


@pytest.mark.parametrize(("option", "value"), ADDED)
def test_every_option_of_every_part_that_can_be_added_changes_what_is_learnt(option, value):
    assert changes_something("dr_grpo", option, [value, *others(option, value)])


@pytest.mark.parametrize("name", RECIPES)
def test_every_aggregate_is_another_loss(name):
    made = [signature(paid(name, aggregate=one)) for one in AGGREGATES]
    assert not any(torch.equal(a, b) for a, b in itertools.combinations(made, 2))


def test_an_option_that_nothing_reads_is_seen(monkeypatch):
    def deaf(output, batch, *, volume=1.0):
        return -output.logprobs_BT * batch.advantages_BT

    monkeypatch.setitem(RECIPES, "deaf", replace(RECIPES["dr_grpo"], surrogate=deaf))
    assert not changes_something("deaf", "volume", others("volume", 1.0))
    assert changes_something("deaf", "norm_tokens", others("norm_tokens", 4096))

"""The rules by which coefficients follow a target: by hand, wrong copies, what is refused."""

from __future__ import annotations

import math

import pytest

from agentrl.errors import ConfigError, TrainingError
from agentrl.trainers.algorithms.adaptive import COEF_RANGE, AdaptiveEntropy, AdaptiveKL
from agentrl.trainers.algorithms.recipes import recipe


def check_the_kl_rule(after):
    """PPO, section 4, at both edges: (coefficient, target, KL) -> coefficient."""
    assert after(1.0, 0.01, 0.0151) == 2.0
    assert after(1.0, 0.01, 0.0149) == after(1.0, 0.01, 0.01) == after(1.0, 0.01, 0.0067) == 1.0
    assert after(1.0, 0.01, 0.0066) == after(1.0, 0.01, 0.0) == 0.5
    assert after(4.0, 0.2, 0.31) == 8.0 and after(4.0, 0.2, 0.13) == 2.0, (
        "the target scales both edges"
    )
    low, high = COEF_RANGE
    assert after(low, 0.01, 0.0) == low and after(high, 0.01, math.inf) == high


def check_the_entropy_rule(after):
    """A step up at the target or below, else one down, from 0 to 1: (coefficient, target, entropy)
    -> coefficient.
    """
    assert after(0.01, 0.2, 0.1) == after(0.01, 0.2, 0.2) == pytest.approx(0.015)
    assert after(0.01, 0.2, 0.3) == after(0.01, 0.2, 9.0) == pytest.approx(0.005)
    assert after(0.002, 0.2, 0.3) == 0 and after(0.999, 0.2, 0.1) == 1


def kl_rule(coef, target, kl):
    return AdaptiveKL(coef, target).update(kl).coef


def entropy_rule(coef, target, entropy):
    return AdaptiveEntropy(coef, target).update(entropy).coef


def kl_rule_upside_down(coef, target, kl):
    return kl_rule(coef, target, target**2 / max(kl, 1e-9))


def kl_rule_without_a_band(coef, target, kl):
    return coef * (2 if kl > target else 0.5)


def kl_rule_of_a_fixed_target(coef, target, kl):
    return kl_rule(coef, 0.01, kl)


def kl_rule_without_ends(coef, target, kl):
    return coef * (2 if kl > 1.5 * target else 0.5 if kl < target / 1.5 else 1)


def kl_rule_in_proportion(coef, target, kl):
    return coef * (1 + 0.2 * min(max(kl / target - 1, -1), 1))


def entropy_rule_upside_down(coef, target, entropy):
    return entropy_rule(coef, target, 2 * target - entropy)


def entropy_rule_without_ends(coef, target, entropy):
    return coef + 0.005 * (1 if entropy <= target else -1)


def entropy_rule_in_proportion(coef, target, entropy):
    return min(max(coef + 0.005 * (target - entropy) / target, 0.0), 1.0)


RULES = [
    (
        check_the_kl_rule,
        kl_rule,
        [
            kl_rule_upside_down,
            kl_rule_without_a_band,
            kl_rule_of_a_fixed_target,
            kl_rule_without_ends,
            kl_rule_in_proportion,
        ],
    ),
    (
        check_the_entropy_rule,
        entropy_rule,
        [entropy_rule_upside_down, entropy_rule_without_ends, entropy_rule_in_proportion],
    ),
]


@pytest.mark.parametrize(
    ("check", "rule"), [(check, rule) for check, rule, _ in RULES], ids=lambda one: one.__name__
)
def test_the_rule(check, rule):
    check(rule)


@pytest.mark.parametrize(
    ("check", "wrong"),
    [(check, wrong) for check, _, some in RULES for wrong in some],
    ids=lambda one: one.__name__,
)
def test_a_wrong_rule_is_flagged(check, wrong):
    with pytest.raises(AssertionError):
        check(wrong)


@pytest.mark.parametrize("rule", [AdaptiveKL(1.0, 0.01), AdaptiveEntropy(0.0, 0.2)])
def test_what_is_no_number_ends_training(rule):
    with pytest.raises(TrainingError, match="lower learning_rate"):
        rule.update(math.nan)


@pytest.mark.parametrize(
    ("name", "changes", "setting"),
    [
        ("grpo", {"kl_target": 0.01}, "kl_target"),
        ("ppo_penalty", {"kl_target": 0.0}, "kl_target"),
        ("ppo_penalty", {"kl_target": True}, "kl_target"),
        ("ppo_penalty", {"anchor_kl_coef": 0.0}, "anchor_kl_coef"),
        ("grpo", {"entropy_target": -0.2}, "entropy_target"),
        ("grpo", {"entropy_target": "low"}, "entropy_target"),
        ("grpo", {"entropy_target": 0.2, "entropy_coef": 2.0}, "entropy_coef"),
        ("grpo", {"ref_kl_target": 0.1}, "ref_kl_target"),
        ("grpo", {"ref_kl_target": 0.1, "kl_coef": 0.0}, "kl_coef"),
    ],
)
def test_senseless_targets_are_refused(name, changes, setting):
    with pytest.raises(ConfigError) as caught:
        recipe(name, **changes)
    assert caught.value.setting == f"loss.{setting}"

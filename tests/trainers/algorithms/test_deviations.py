"""Every stated deviation from a paper is proven: by the paper's formula where one step's numbers
show it (`test_papers`), else by a check here. And the page states them all.
"""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from deviations import DEVIATIONS
from paper_differs import DIFFERS
from recipe_cases import SIGNAL, credited, groups_of
from trainer_cases import PAD

from agentrl.errors import ConfigError
from agentrl.trainers.algorithms.adaptive import COEF_RANGE, AdaptiveKL
from agentrl.trainers.algorithms.recipes import RECIPES, recipe
from agentrl.trainers.batch import PolicyOutput, pack
from agentrl.trainers.rounds import MAX_DRAWS

PAGE = (Path(__file__).parents[3] / "docs" / "trainers.md").read_text()
RECIPE_DOCS = PAGE.split("\n## Recipes\n")[1].split("\n## ")[0]
ROUND = [
    SIGNAL,
    [([(2, 1), (1, 0)], 1.0, False), ([(1, 0), (1, 0)], 0.0, False), ([(2, 0)], 0.0, False)],
]


def played(row, drawn=ROUND):
    """A round with the advantages of a recipe, and the corrections of its step."""
    return row.correct(credited(row, groups_of(drawn)))


def said(batch, moved):
    """What a policy says that has moved so far (nats) from the anchor."""
    leaf_BT = (batch.anchor_BT + moved * (1.3 * batch.ids_BT.double()).sin()).requires_grad_()
    top_BTK = torch.stack((leaf_BT - 0.1, leaf_BT - 0.5), -1)
    return leaf_BT, PolicyOutput(leaf_BT, -leaf_BT.detach(), top_BTK)


def outcomes(name, drawn=ROUND, **settings):
    """The advantage of each episode of a recipe that gives one to all its tokens."""
    batch = played(recipe(name, **settings), drawn)
    first_E = [
        float(batch.advantages_BT[batch.episode_B == e][batch.mask_BT[batch.episode_B == e]][0])
        for e in range(len(batch.reward_E))
    ]
    return batch, torch.tensor(first_E, dtype=torch.float64)


# --- one check per deviation that one step's numbers do not show


def failed_greedy(name):
    row = recipe(name)
    batch = credited(row, groups_of(ROUND))
    none_E = torch.full_like(batch.greedy_reward_E, math.nan)
    assert not row.advantage(replace(batch, greedy_reward_E=none_E)).advantages_BT.any()
    assert batch.advantages_BT.any()


def group_std(name):
    batch, found_E = outcomes(name, [SIGNAL])
    centred = batch.reward_E - batch.reward_E.mean()
    assert torch.allclose(found_E, centred / (batch.reward_E.std(correction=1) + 1e-6))
    assert not torch.allclose(found_E, centred / batch.reward_E.std(correction=0))


def bounded_refill(name):
    assert RECIPES[name].refill and math.inf > MAX_DRAWS


def mean_reward(name):
    batch, found_E = outcomes(name, [SIGNAL])
    grpo_E = outcomes("grpo", [SIGNAL])[1]

    def weight(p):
        return math.exp(-(p * math.log(2 * p) + (1 - p) * math.log(2 * (1 - p))))

    mean, correct = float(batch.reward_E.mean()), float((batch.reward_E >= 1).double().mean())
    assert mean != correct
    assert torch.allclose(found_E, weight(mean) * grpo_E)
    assert not torch.allclose(found_E, weight(correct) * grpo_E)


def absent_terms(name):
    row = recipe(name)
    batch = pack(groups_of([SIGNAL]), PAD)
    lacking = replace(batch, parts_E={**batch.parts_E, "b": torch.tensor([1.0, math.nan, 0, 0])})
    zero = replace(batch, parts_E={**batch.parts_E, "b": torch.tensor([1.0, 0.0, 0, 0])})
    assert row.advantage(lacking).advantages_BT.isfinite().all()
    assert not torch.allclose(
        row.advantage(lacking).advantages_BT, row.advantage(zero).advantages_BT
    )


def bounds(name):
    batch = played(recipe(name), [SIGNAL])
    leaf_BT, output = said(replace(batch, old_logprobs_BT=batch.old_logprobs_BT - 3), 0.0)
    weight_BT = -torch.autograd.grad(recipe(name).surrogate(output, batch).sum(), leaf_BT)[0]
    # said() moved up by 3 nats: ρ = exp(-3) below, 5 above.
    assert torch.allclose(
        weight_BT[batch.mask_BT], (math.exp(-3) * batch.advantages_BT)[batch.mask_BT]
    )
    leaf_BT = (batch.anchor_BT + 3).requires_grad_()
    total = recipe(name).surrogate(PolicyOutput(leaf_BT), batch).sum()
    weight_BT = -torch.autograd.grad(total, leaf_BT)[0]
    assert torch.allclose(weight_BT[batch.mask_BT], (5 * batch.advantages_BT)[batch.mask_BT])


def surrogate_alone(name):
    row, paper = recipe(name), recipe(name, **stated(name, "surrogate_alone").settings)
    assert not row.refill and paper.refill
    lacking = paper.options.keys() - row.options.keys()
    assert lacking == {"overlong_tokens", "overlong_cache"}


def bounded_log_w(name):
    batch = played(recipe(name, lambda_pos=0.0, k_pos=0.1, lambda_neg=0.0, k_neg=0.1), [SIGNAL])
    row = recipe(name, lambda_pos=0.0, k_pos=0.1, lambda_neg=0.0, k_neg=0.1)

    def weights(log_w):
        per_token = log_w / batch.episode_tokens_B[:, None]
        leaf_BT = (batch.anchor_BT + per_token).requires_grad_()
        return torch.autograd.grad(
            row.surrogate(PolicyOutput(leaf_BT), batch.silent()).sum(), leaf_BT
        )[0][batch.mask_BT]

    assert torch.allclose(weights(20.0), weights(30.0))
    assert not torch.allclose(weights(20.0), weights(15.0))


def sign_of_advantage(name):
    partial = [[([(2, 0)], 0.5, False), ([(2, 0)], 0.0, False)]]  # nobody is correct
    row, plain = recipe(name, fork_share=1.0), recipe(name, fork_share=1.0, smoothing=0.0)
    batch = played(row, partial)
    spread = []
    for one in (row, plain):
        top_BTK = torch.zeros(*batch.mask_BT.shape, 2, dtype=torch.float64, requires_grad=True)
        _, output = said(batch, 0.0)
        total = one.loss(replace(output, top_logprobs_BTK=top_BTK), batch)[0]
        spread.append(torch.autograd.grad(total, top_BTK, allow_unused=True)[0])
    assert spread[0].abs().max() > 0 and not spread[1].any()


def entropy_before(name):
    """The forks follow the entropy of the batch, and not that of the policy as it is now."""
    row, batch = recipe(name, fork_share=0.5), credited(recipe(name), groups_of([SIGNAL]))
    turned = replace(batch, entropy_BT=-batch.entropy_BT)
    assert not torch.equal(row.correct(batch).selected_BT, row.correct(turned).selected_BT)
    before = row.correct(batch)
    _, output = said(before, 0.5)
    now = replace(output, entropy_BT=-before.entropy_BT)
    assert torch.equal(row.loss(output, before)[0], row.loss(now, before)[0])


def fixed_reset(name):
    assert RECIPES[name].reset_every == 200 and recipe(name, reset_every=50).reset_every == 50


def no_entropy_bonus(name):
    assert "entropy_coef" not in recipe(name).options and "critic" in recipe(name).needs
    assert "entropy_gradient" in recipe(name, entropy_coef=0.01).needs


def value_clip(name):
    assert recipe(name).critic.value_clip == 0.5
    paper = recipe(name, **stated(name, "value_clip").settings)
    assert paper.critic.value_clip == math.inf


def bounded_coef(name):
    assert recipe(name).rules()["anchor_kl_coef"] == AdaptiveKL(1.0, 0.01)
    low, high = COEF_RANGE
    assert AdaptiveKL(low, 0.01).update(0.0).coef == low
    assert AdaptiveKL(high, 0.01).update(9.0).coef == high


CHECKS = {
    "remax": [failed_greedy],
    "grpo": [group_std],
    "dapo": [bounded_refill],
    "mgpo": [mean_reward],
    "gdpo": [absent_terms],
    "cispo": [bounds, surrogate_alone],
    "vespo": [bounded_log_w],
    "simko": [sign_of_advantage, entropy_before],
    "prorl": [fixed_reset],
    "ppo": [no_entropy_bonus, value_clip],
    "ppo_penalty": [bounded_coef, no_entropy_bonus, value_clip],
}
"""Recipe -> a check for each deviation that one step's numbers do not show, of its name."""


def stated(name, deviation):
    """The deviation of that name."""
    return next(one for one in DEVIATIONS[name] if one.name == deviation)


@pytest.mark.parametrize(("name", "check"), [(k, one) for k, row in CHECKS.items() for one in row])
def test_a_deviation_beside_one_steps_numbers_is_there(name, check):
    check(name)


@pytest.mark.parametrize("name", RECIPES)
def test_every_deviation_is_proven_and_every_proof_is_of_a_stated_one(name):
    """By the paper's formula (`test_papers`) or by a check above, and by one of them."""
    in_numbers = list(DIFFERS[name].undone) if name in DIFFERS else []
    proven = in_numbers + [check.__name__ for check in CHECKS.get(name, [])]
    assert sorted(proven) == sorted(one.name for one in DEVIATIONS.get(name, ()))


def test_deviations_are_of_recipes_that_exist():
    assert DEVIATIONS.keys() <= RECIPES.keys()


# --- what is the paper's


def test_opo_is_one_step_a_round():
    opo = recipe("opo")
    opo.refuse_minibatches(1)
    with pytest.raises(ConfigError, match="minibatches=2: recipe opo is strictly on-policy"):
        opo.refuse_minibatches(2)
    with pytest.raises(ConfigError, match=r"loss\.epochs=3: recipe opo is strictly on-policy"):
        recipe("opo", epochs=3).refuse_minibatches(1)
    recipe("grpo", epochs=3).refuse_minibatches(4)


@pytest.mark.parametrize("count", [1, 3])
def test_vapo_imitates_by_the_mean_over_the_tokens_of_correct_episodes(count):
    """-μ·Σ log π / tokens of the correct ones, of the step and in every split of it."""
    row = recipe("vapo")
    batch = credited(row, groups_of(ROUND))
    for step in batch.minibatches(count, seed=3):
        logprobs_BT = step.old_logprobs_BT - 0.3
        won_BT = step.mask_BT & (step.reward_E[step.episode_B, None] >= 1)
        expected = -0.1 * logprobs_BT[won_BT].sum() / won_BT.sum().clamp(min=1)
        for parts in ([step], list(step.split(1))):
            found = sum(
                row.loss(PolicyOutput(part.old_logprobs_BT - 0.3), part)[1]["loss_imitate"]
                for part in parts
            )
            assert found == pytest.approx(float(expected), rel=1e-6)


def test_the_tokens_of_a_step_are_those_of_its_episodes():
    batch = credited(recipe("grpo"), groups_of(ROUND))
    for step in batch.minibatches(3, seed=1):
        assert int(step.tokens_E.sum()) == step.n_tokens == int(step.mask_BT.sum())

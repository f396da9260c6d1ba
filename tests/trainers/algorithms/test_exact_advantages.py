"""Each estimator's expected gradient over every group of a policy small enough to enumerate,
against the exact one.

The policy draws one or two of five tokens (a tool speaks between them). What is unbiased is so to
1e-8; what is biased is biased as its docstring says, and the table in docs/experiments.md has the
figures that are asserted here.
"""

from __future__ import annotations

import math
from dataclasses import replace
from functools import cache, partial
from pathlib import Path

import pytest
import torch
from credit_cases import Stopper, chain, taken

from agentrl.trainers.algorithms.advantages import (
    dr_grpo,
    gdpo,
    group_advantages,
    grpo,
    maxrl,
    mgpo,
    opo,
    pass_at_k,
    reinforce,
    remax,
    rloo,
    with_greedy_rewards,
)
from agentrl.trainers.algorithms.credit import (
    entropy_shaped,
    gae,
    gigpo,
    kl_in_reward,
    length_adaptive_gae,
    optimal_baseline,
    reward_to_go,
    turn_gae,
    turn_level,
    whiten,
)


def over_groups(form):
    """Remembers what a form gave: thousands of groups have few different rewards."""
    known = cache(lambda rewards_G: form(rewards_G))
    return lambda batch: group_advantages(batch, lambda rewards_G: known(tuple(rewards_G)))


DOCS = Path(__file__).parents[3] / "docs" / "experiments.md"


def prepared(policy: Stopper, size: int):
    """Every group with what a critic, a reference and an entropy would say: functions of the state
    and the token.
    """
    batch, logprobs_BT, probability_B = policy.groups(size)
    first_B = batch.state_BT[:, 3]
    blank_B = torch.full((len(batch),), torch.nan, dtype=torch.float64)
    values_BT = torch.stack(
        [blank_B, torch.full_like(blank_B, 0.37), blank_B, 0.2 * first_B - 0.5], 1
    )
    probability_V = policy.theta.detach()[5:].view(5, 5).log_softmax(1)
    entropy_V = -(probability_V.exp() * probability_V).sum(1)
    start_V = policy.theta.detach()[:5].log_softmax(0)
    entropy_BT = torch.stack(
        [blank_B, -(start_V.exp() * start_V).sum().expand(len(batch)), blank_B, entropy_V[first_B]],
        1,
    )
    batch = replace(
        batch,
        values_BT=values_BT,
        entropy_BT=entropy_BT,
        ref_logprobs_BT=torch.zeros_like(logprobs_BT) - math.log(5),
        parts_E={"a": batch.reward_E, "b": (batch.tokens_E == 1).double()},
    )
    best = int(policy.logprobs_K2().sum(1).argmax())
    greedy = float(policy.rewards_K[best])
    return (
        with_greedy_rewards(batch, [greedy] * int(batch.group_E.max() + 1)),
        logprobs_BT,
        probability_B,
    )


def expected_gradient(policy: Stopper, step, size: int, per_group: bool = False) -> torch.Tensor:
    """E[1/G Σ_i Σ_t A_it ∇log π_it]; `per_group` lets each group be a round of its own."""
    batch, logprobs_BT, probability_B = prepared(policy, size)
    advantages_BT = _rounds(batch, step, size) if per_group else step(batch).advantages_BT
    weighed_BT = torch.where(batch.mask_BT, advantages_BT * logprobs_BT, 0.0)
    return torch.autograd.grad((weighed_BT.sum(1) / size * probability_B).sum(), policy.theta)[0]


def _rounds(batch, step, size: int) -> torch.Tensor:
    return torch.cat(
        [
            step(taken(batch, rows_B)).advantages_BT
            for rows_B in torch.arange(len(batch)).split(size)
        ]
    )


UNBIASED = {
    "reinforce": (reinforce, 2, True),
    "rloo": (over_groups(rloo), 3, False),
    "remax": (remax, 1, False),
    "pass@1": (over_groups(partial(pass_at_k, pass_k=1)), 3, False),
    "optimal_baseline": (optimal_baseline, 3, False),
    "reward_to_go": (reward_to_go, 1, False),
    "gae, λ = 1, any V": (partial(gae, lam=1.0), 1, False),
    "turn_gae, λ = 1, any V": (partial(turn_gae, lam=1.0), 1, False),
}


@pytest.mark.parametrize("name", UNBIASED)
def test_unbiased(name):
    step, size, per_group = UNBIASED[name]
    policy = Stopper(seed=3, narrow=size > 2)
    exact = policy.exact_gradient()
    assert exact.norm() > 0.05
    assert (expected_gradient(policy, step, size, per_group) - exact).abs().max() < 1e-8


@pytest.mark.parametrize("size", [2, 3])
def test_centring_shrinks_by_a_known_factor(size):
    policy = Stopper(seed=size)
    exact = policy.exact_gradient() * (size - 1) / size
    assert (expected_gradient(policy, over_groups(dr_grpo), size) - exact).abs().max() < 1e-8


@pytest.mark.parametrize(("size", "k"), [(2, 1), (3, 1), (3, 2)])
@pytest.mark.parametrize("binary", [True, False])
def test_pass_at_k_follows_its_objective(size, k, binary):
    """The gradient of E[max of k rewards]; with rewards of 0 and 1 that is 1 - (1-p)^k."""
    policy = Stopper(seed=4, binary=binary, narrow=size > 2)
    probability_K = policy.logprobs_K2().sum(1).exp()
    levels = policy.rewards_K.unique()
    below = [(probability_K * (policy.rewards_K <= level)).sum() for level in levels]
    objective = sum(
        level * (now**k - before**k)
        for level, now, before in zip(levels, below, [0.0, *below[:-1]], strict=True)
    )
    exact = torch.autograd.grad(objective, policy.theta)[0]
    found = expected_gradient(policy, over_groups(partial(pass_at_k, pass_k=k)), size)
    assert (found - exact).abs().max() < 1e-8


def chance(policy: Stopper) -> float:
    return float((policy.logprobs_K2().detach().sum(1).exp() * policy.rewards_K).sum())


@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize("form", [grpo, maxrl, mgpo, partial(pass_at_k, pass_k=2), dr_grpo])
def test_what_reads_a_groups_rewards_alone_is_a_factor_where_they_are_0_or_1(form, size):
    """c(p)·∇p with c(p) = E[A | this one won] - E[A | it lost]."""
    policy = Stopper(seed=5, binary=True)
    p, scale = chance(policy), 0.0
    for others in range(size):
        weight = math.comb(size - 1, others) * p**others * (1 - p) ** (size - 1 - others)
        rest = [1.0] * others + [0.0] * (size - 1 - others)
        scale += weight * (form([1.0, *rest])[0] - form([0.0, *rest])[0])
    found = expected_gradient(policy, over_groups(form), size)
    assert (found - scale * policy.exact_gradient()).abs().max() < 1e-8


@pytest.mark.parametrize("size", [2, 3])
def test_maxrl_follows_the_likelihood_cut_after_the_size_of_the_group_less_one(size):
    policy = Stopper(seed=5, binary=True)
    p = chance(policy)
    exact = policy.exact_gradient() * (1 - (1 - p) ** (size - 1)) / p
    assert (expected_gradient(policy, over_groups(maxrl), size) - exact).abs().max() < 1e-8


def test_the_bias_of_opo_is_that_its_own_episode_is_in_the_baseline():
    """Equal lengths: the factor (G-1)/G. Other lengths: E[b·∇log π] is lost, and less of it in
    larger groups.
    """
    policy = Stopper(seed=3)
    exact = policy.exact_gradient()
    lost = {}
    for size in (2, 3):
        lost[size] = (expected_gradient(policy, opo, size) - exact).norm()
        equal = chain(
            lambda batch: replace(batch, tokens_E=torch.full_like(batch.tokens_E, 2)), opo
        )
        assert (
            expected_gradient(policy, equal, size) - exact * (size - 1) / size
        ).abs().max() < 1e-8
    assert 0.01 < lost[3] < lost[2]


def test_the_bias_of_whitening_is_a_factor_where_lengths_are_equal():
    """With one turn for all, whitening (R over tokens) is GRPO with the deviation of each episode's
    tokens.
    """
    policy = Stopper(seed=5, binary=True)
    policy.stop = 9
    p = chance(policy)
    won = 0.5 / math.sqrt(4 * 0.25 / 3)
    found = expected_gradient(policy, chain(reward_to_go, whiten), 2, per_group=True)
    scale = (1 - p) * won - p * -won
    assert (found - scale * policy.exact_gradient()).abs().max() < 1e-7


def test_gae_below_lambda_1_is_biased_as_far_as_the_values_are_wrong():
    """With the true values it is unbiased for every λ; with others it is not."""
    policy = Stopper(seed=3)
    exact = policy.exact_gradient()
    with torch.no_grad():
        chances_VV = policy.theta[5:].view(5, 5).softmax(1)
        after_V = (chances_VV * policy.rewards_K.view(5, 5)).sum(1)
        before = float((policy.theta[:5].softmax(0) * after_V).sum())

    def true_values(batch):
        first_B = batch.state_BT[:, 3]
        values_BT = torch.zeros_like(batch.old_logprobs_BT)
        values_BT[:, 1], values_BT[:, 3] = before, after_V[first_B]
        return replace(batch, values_BT=values_BT)

    for step in (
        partial(gae, lam=0.5),
        partial(turn_gae, lam=0.0),
        partial(length_adaptive_gae, length_alpha=0.7),
    ):
        assert (expected_gradient(policy, chain(true_values, step), 1) - exact).abs().max() < 1e-8
        assert (expected_gradient(policy, step, 1) - exact).abs().max() > 1e-3


@pytest.mark.parametrize("credit", [reward_to_go, over_groups(rloo)])
def test_kl_in_the_reward_has_the_gradient_of_the_kl_of_whole_episodes(credit):
    policy, coefficient = Stopper(seed=3), 0.2
    size = 1 if credit is reward_to_go else 2
    logprobs_K2 = policy.logprobs_K2()
    two_K = policy.actions_K2[:, 0] != policy.stop
    kl_K = (
        logprobs_K2[:, 0] + math.log(5) + torch.where(two_K, logprobs_K2[:, 1] + math.log(5), 0.0)
    )
    objective = (logprobs_K2.sum(1).exp() * (policy.rewards_K - coefficient * kl_K)).sum()
    exact = torch.autograd.grad(objective, policy.theta)[0]
    found = expected_gradient(
        policy, chain(partial(kl_in_reward, kl_reward_coef=coefficient), credit), size
    )
    assert (found - exact).abs().max() < 1e-8
    assert (exact - policy.exact_gradient()).norm() > 0.01


TABLE = {
    "`reinforce`": (reinforce, 2, True),
    "`rloo`": (over_groups(rloo), 2, False),
    "`remax`": (remax, 2, False),
    "`optimal_baseline`": (optimal_baseline, 2, False),
    "`gae`, λ = 1": (partial(gae, lam=1.0), 2, False),
    "`dr_grpo`": (over_groups(dr_grpo), 2, False),
    "`grpo`": (over_groups(grpo), 2, False),
    "`mgpo`": (over_groups(mgpo), 2, False),
    "`maxrl`": (over_groups(maxrl), 2, False),
    "`pass_at_k`, k = 2": (over_groups(partial(pass_at_k, pass_k=2)), 3, False),
    "`opo`": (opo, 2, False),
    "`gdpo`": (gdpo, 2, True),
    "`reward_to_go`, `whiten`": (chain(reward_to_go, whiten), 2, True),
    "`dr_grpo`, `whiten`": (chain(over_groups(dr_grpo), whiten), 2, True),
    "`gae`, λ = 0.5": (partial(gae, lam=0.5), 2, False),
    "`length_adaptive_gae`, α = 0.7": (partial(length_adaptive_gae, length_alpha=0.7), 2, False),
    "`turn_level`": (turn_level, 2, False),
    "`gigpo`": (gigpo, 2, False),
    "`grpo`, `entropy_shaped`": (chain(over_groups(grpo), entropy_shaped), 2, False),
}


def against_exact(name: str) -> tuple[float, float]:
    """Cosine with the exact gradient, and ratio of the norms."""
    step, size, per_group = TABLE[name]
    policy = Stopper(seed=3)
    found, exact = expected_gradient(policy, step, size, per_group), policy.exact_gradient()
    return float(torch.cosine_similarity(found, exact, 0)), float(found.norm() / exact.norm())


@pytest.mark.parametrize("name", TABLE)
def test_the_table_of_the_docs_has_these_figures(name):
    rows = [
        [cell.strip() for cell in line.strip("| \n").split(" | ")]
        for line in DOCS.read_text().splitlines()
    ]
    row = next(row for row in rows if row[0] == name and len(row) == 5)
    cosine, norm = against_exact(name)
    assert [float(cell) for cell in row[3:]] == pytest.approx([cosine, norm], abs=0.0006)

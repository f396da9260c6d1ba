"""Every stated difference from a paper is there: both are computed on a small round."""

from __future__ import annotations

import itertools
import math
from dataclasses import replace
from pathlib import Path
from statistics import fmean

import pytest
import torch
from recipe_cases import SIGNAL, credited, groups_of, paid
from trainer_cases import PAD

from agentrl.errors import ConfigError
from agentrl.trainers.algorithms.catalogue.describe import recipe_table
from agentrl.trainers.algorithms.catalogue.deviations import DEVIATIONS
from agentrl.trainers.algorithms.catalogue.places import label
from agentrl.trainers.algorithms.credit import generalised_advantages, optimal_baseline
from agentrl.trainers.algorithms.recipes import RECIPES, recipe
from agentrl.trainers.algorithms.regularisers import kl_k2, kl_k3
from agentrl.trainers.algorithms.surrogates import importance_weighted, policy_gradient
from agentrl.trainers.algorithms.targets import COEF_RANGE, AdaptiveKL
from agentrl.trainers.algorithms.timeline import Timeline
from agentrl.trainers.batch import PolicyOutput, pack
from agentrl.trainers.online.rounds import MAX_DRAWS

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


def gradient(row, moved=0.0, drawn=ROUND):
    """The gradient of a recipe's loss at every trained token."""
    batch = played(row, drawn)
    leaf_BT, output = said(batch, moved)
    return torch.autograd.grad(row.loss(output, batch)[0], leaf_BT)[0]


def same(one, other, moved=0.0):
    return torch.allclose(gradient(one, moved), gradient(other, moved), atol=1e-9)


def outcomes(name, drawn=ROUND, **settings):
    """The advantage of each episode of a recipe that gives one to all its tokens."""
    batch = played(recipe(name, **settings), drawn)
    first_E = [
        float(batch.advantages_BT[batch.episode_B == e][batch.mask_BT[batch.episode_B == e]][0])
        for e in range(len(batch.reward_E))
    ]
    return batch, torch.tensor(first_E, dtype=torch.float64)


# --- one check per difference


def ratio(name):
    row = recipe(name)
    paper = replace(row, surrogate=policy_gradient)
    assert same(row, paper) and not same(row, paper, moved=0.5)


def token_clip(name):
    row = recipe(name)
    paper = replace(row, surrogate=importance_weighted)
    assert same(row, paper) and not same(row, paper, moved=0.5)
    assert same(recipe(name, surrogate="importance_weighted"), paper, moved=0.5)


def no_kl_in_reward(name):
    assert "reference" not in recipe(name).needs
    paper = recipe(name, kl_reward_coef=0.1)
    assert not same(recipe(name), paper)
    batch = played(paper)
    price_BT = 0.1 * (batch.anchor_BT - batch.ref_logprobs_BT)
    assert torch.allclose(batch.rewards_BT[batch.mask_BT], -price_BT[batch.mask_BT])


def no_kl_loss(name, estimator=kl_k3, **settings):
    assert "reference" not in recipe(name).needs
    paper, row = recipe(name, kl_coef=0.1, kl_ratio=False, **settings), recipe(name)
    batch = played(paper)
    leaf_BT, _ = said(batch, 0.5)
    term_BT = 0.1 * estimator(leaf_BT, batch.ref_logprobs_BT)
    pull_BT = torch.autograd.grad(row.aggregate(term_BT, batch), leaf_BT)[0]
    assert pull_BT.abs().max() > 1e-3
    assert torch.allclose(gradient(paper, 0.5), gradient(row, 0.5) + pull_BT, atol=1e-9)


def no_kl2_loss(name):
    no_kl_loss(name, kl_k2, kl_estimator="k2")


def whitened(name):
    row = recipe(name)
    plain = replace(row, credit=row.credit[:1])
    assert not same(row, plain)
    named = recipe(name, credit=label(row.credit[0]))
    assert torch.equal(played(named).advantages_BT, played(plain).advantages_BT)


def round_baseline(name):
    batch, found_E = outcomes(name)
    rewards = batch.reward_E
    others_E = (rewards.sum() - rewards) / (len(rewards) - 1)
    assert torch.allclose(found_E, rewards - others_E)
    seen = torch.cat((torch.zeros(7, dtype=torch.float64), rewards))  # a lost round before it
    assert not torch.allclose(found_E, rewards - seen.mean())


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


def norm_tokens(name):
    assert torch.allclose(gradient(recipe(name, norm_tokens=512)), 8 * gradient(recipe(name)))


def no_overlong_punishment(name):
    _, plain_E = outcomes(name, [SIGNAL])
    row = recipe(name, overlong_tokens=6, overlong_cache=4)
    batch = played(row, [SIGNAL])
    paid_E = torch.zeros(4, dtype=torch.float64).index_add(
        0, batch.episode_B, batch.rewards_BT.sum(1)
    )
    lengths = batch.tokens_E.double()  # the paper's equation 13
    expected_E = torch.where(lengths <= 2, 0.0, torch.where(lengths > 6, -1.0, (2 - lengths) / 4))
    assert torch.allclose(paid_E, expected_E) and lengths.tolist() == [5, 5, 2, 4]
    assert not torch.allclose(
        outcomes(name, [SIGNAL], overlong_tokens=6, overlong_cache=4)[1], plain_E
    )


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


SHORT = [[([(1, 0)], 1.0, False), ([(1, 0)], 0.0, False), ([(1, 0)], 0.25, False)]]
"""Three episodes of one token."""


def baselines(weigh, own):
    """What the optimal baseline of each episode of `SHORT` leaves of its reward."""
    batch = pack(groups_of(SHORT), PAD)
    weight_E = weigh(batch.old_logprobs_BT[batch.mask_BT].double().exp())
    rewards = batch.reward_E
    kept = torch.ones(3, 3, dtype=torch.float64) - (0 if own else torch.eye(3))
    baseline_E = (kept * weight_E * rewards).sum(1) / (kept * weight_E).sum(1)
    return batch, rewards - baseline_E


def others_only(name):
    batch, alone = baselines(lambda p: (1 - p) ** 2, own=False)
    found = optimal_baseline(batch).advantages_BT[batch.mask_BT].double()
    assert torch.allclose(found, alone, atol=1e-6)
    assert not torch.allclose(found, baselines(lambda p: (1 - p) ** 2, own=True)[1], atol=1e-3)


def chosen_logit(name):
    batch, _ = baselines(lambda p: p, own=False)
    found = optimal_baseline(batch).advantages_BT[batch.mask_BT].double()
    # Two outcomes: 1 - 2p + p² + (1-p)² is twice (1-p)², and the factor cancels. Four equal others:
    whole = baselines(
        lambda p: 1 - 2 * p + p**2 + (1 - p) ** 2 * torch.tensor([1, 0.25, 1.0]), own=False
    )[1]
    assert not torch.allclose(found, whole, atol=1e-3)


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


def no_refill(name):
    assert not recipe(name).refill and recipe(name, refill=True).refill


def group_mean(name):
    batch, found_E = outcomes(name, [SIGNAL])
    assert torch.allclose(found_E, batch.reward_E - batch.reward_E.mean())
    assert not torch.allclose(found_E, torch.where(batch.reward_E >= 1, 1.0, -1.0).double())


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


def whole_step(name):
    few = {"cov_share": 0.2, "cov_low": 0.0} if name == "clip_cov" else {"kl_cov_share": 0.2}
    row = recipe(name, **few)
    batch = credited(row, groups_of(ROUND))

    def chosen(part):
        done = row.correct(part)
        return int((done.weights_BT == 0 if name == "clip_cov" else done.selected_BT).sum())

    masked = sum(int((~part.mask_BT).sum()) for part in batch.split(1))
    apart = sum(chosen(part) for part in batch.split(1)) - (name == "clip_cov") * masked
    assert chosen(batch) - (name == "clip_cov") * int((~batch.mask_BT).sum()) != apart


def positive_only(name):
    row = recipe(name, kl_cov_share=1.0)
    flat = [[(shape, 0.0, False) for shape, *_ in SIGNAL]]
    assert not played(row, flat).selected_BT.any()
    chosen = played(row).selected_BT
    assert 0 < int(chosen.sum()) < int(played(row).mask_BT.sum())


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


def step_quantile(name):
    batch = credited(recipe(name), groups_of(ROUND))
    entropy_BT = batch.episode_B[:, None].expand_as(batch.mask_BT).double()
    chosen_BT = recipe(name).correct(replace(batch, entropy_BT=entropy_BT)).selected_BT
    assert chosen_BT.any() and not chosen_BT.any(1).all()


def fixed_reset(name):
    assert RECIPES[name].reset_every == 200 and recipe(name, reset_every=50).reset_every == 50


def kl_ratio(name):
    assert same(recipe(name), recipe(name)) and not same(
        recipe(name), recipe(name, kl_ratio=False), moved=0.5
    )


def turn_returns(name):
    row = paid(name)
    drawn = [[([(1, 0), (1, 0)], float(won), False) for won in (1, 0, 0)]]
    batch = played(row, drawn)
    own_ET = torch.zeros(3, 2, dtype=torch.float64)
    own_ET[:] = batch.rewards_BT[batch.mask_BT].reshape(3, 2)

    def score(values_E):
        return (values_E - values_E.mean()) / (values_E.std(correction=1) + 1e-6)

    here_ET = torch.stack(
        (score(own_ET.sum(1) + batch.reward_E), score(own_ET[:, 1] + batch.reward_E)), 1
    )
    paper_ET = torch.stack([score(own_ET[:, turn]) + score(batch.reward_E) for turn in (0, 1)], 1)
    found_ET = batch.advantages_BT[batch.mask_BT].reshape(3, 2).double()
    assert torch.allclose(found_ET, here_ET, atol=1e-6)
    assert not torch.allclose(found_ET, paper_ET, atol=1e-2)


def no_entropy_bonus(name):
    assert "entropy_coef" not in recipe(name).options
    assert "entropy_gradient" in recipe(name, entropy_coef=0.01).needs


def value_clip(name):
    assert recipe(name).critic.value_clip == 0.5
    assert recipe(name, critic={"value_clip": math.inf}).critic.value_clip == math.inf


def sampled_kl(name):
    """On one state of three actions: the term's mean is the sum over actions; one draw is not."""
    old, new = torch.tensor([0.5, 0.3, 0.2]).log(), torch.tensor([0.4, 0.4, 0.2]).log()
    per_action = torch.expm1(new - old) - (new - old)
    exact = (old.exp() * (old - new)).sum()
    assert torch.allclose((old.exp() * per_action).sum(), exact)
    assert not torch.allclose(per_action[0], exact, rtol=0.05)
    batch = played(recipe(name, anchor_kl_coef=2.0))
    leaf_BT, output = said(batch, 0.5)
    (term,) = recipe(name, anchor_kl_coef=2.0).regularisers
    log_ratio = leaf_BT - batch.anchor_BT
    assert torch.allclose(term(output, batch), 2 * (log_ratio.expm1() - log_ratio))


def bounded_coef(name):
    assert recipe(name).rules()["anchor_kl_coef"] == AdaptiveKL(1.0, 0.01)
    low, high = COEF_RANGE
    assert AdaptiveKL(low, 0.01).update(0.0).coef == low
    assert AdaptiveKL(high, 0.01).update(9.0).coef == high


def constant_norm(name):
    whole = gradient(recipe(name, aggregate="episode_sum"))
    assert torch.allclose(4096 * gradient(recipe(name)), whole) and whole.any()


def one_mean(name):
    batch = played(recipe(name))
    found_BT = -gradient(recipe(name))[batch.mask_BT]
    per_group = torch.bincount(batch.group_E, batch.tokens_E.double())
    divisor_E = len(per_group) * per_group[batch.group_E]
    advantages_BT = batch.advantages_BT[batch.mask_BT]
    paper_BT = (batch.advantages_BT / divisor_E[batch.episode_B, None])[batch.mask_BT]
    assert torch.allclose(found_BT, advantages_BT / batch.n_tokens)
    assert not torch.allclose(found_BT, paper_BT)


def baseline_of_k(name):
    batch, found_E = outcomes(name, [SIGNAL])
    here, paper = [], []
    for i, own in enumerate(batch.reward_E.tolist()):
        others = [r for j, r in enumerate(batch.reward_E.tolist()) if j != i]
        best = fmean(max(own, other) for other in others)
        here.append(2 * (best - fmean(map(max, itertools.combinations(others, 2)))))
        paper.append(2 * (best - fmean(others)))
    assert found_E.tolist() == pytest.approx(here) and found_E.tolist() != pytest.approx(paper)


def ended(name):
    batch = played(recipe(name), [[([(1, 0)], 0.25, False), ([(2, 0)], 1.0, False)]])
    longer = batch.advantages_BT[batch.episode_B == 1][batch.mask_BT[batch.episode_B == 1]]
    assert longer.tolist() == pytest.approx([0.75, 0.75])  # the paper's last has nobody beside it


def as_log(name):
    row, paper = recipe(name), recipe(name, surrogate="importance_weighted")
    near = 1e-3  # inside of the trust region
    assert same(row, paper, moved=near)
    batch = played(row)
    losses = [float(one.loss(said(batch, near)[1], batch)[0].detach()) for one in (row, paper)]
    assert losses[0] != pytest.approx(losses[1], rel=0.01)


def token_mean(name):
    assert not torch.allclose(
        gradient(recipe(name)), gradient(recipe(name, aggregate="episode_sum"))
    )


def clip_kept(name):
    row = recipe(name)
    assert not same(row, recipe(name, surrogate="importance_weighted"), moved=0.5)


def rounded_up(name):
    batch = played(recipe(name))
    assert 0.002 * batch.n_tokens < 1 and int(batch.selected_BT.sum()) == 1


def token_ratio(name):
    """One token far beyond its clip takes the gradient of no other token of its turn."""
    row = recipe(name)
    batch = played(row, [[([(3, 0)], 1.0, False), ([(3, 0)], 0.0, False)]])
    leaf_BT = batch.anchor_BT.clone()
    first = int(batch.mask_BT[0].nonzero()[0])
    leaf_BT[:, first] += batch.advantages_BT[:, first].sign()
    leaf_BT.requires_grad_()
    total = row.loss(PolicyOutput(leaf_BT, -leaf_BT.detach()), batch)[0]
    found_BT = torch.autograd.grad(total, leaf_BT)[0]
    assert not found_BT[:, first].any() and found_BT[:, first + 1 : first + 3].all()


def no_discount(name):
    assert recipe(name).options["gamma"] == 1.0
    assert not same(recipe(name), recipe(name, gamma=0.99))


def longer_trace(name):
    assert recipe(name).options["lam"] == 0.95 and not same(recipe(name), recipe(name, lam=0.9))


def floor(name):
    batch = played(recipe(name), [SIGNAL])
    line = Timeline.of(batch)
    steps = line.rewards_N, line.read(batch.values_BT), line.last_N, 1.0
    lam_E = 1 - 1 / (0.05 * batch.tokens_E.double())
    assert (lam_E < 0).all()
    found_N = line.read(batch.advantages_BT)
    assert torch.allclose(found_N, generalised_advantages(*steps, 0.0))
    assert not torch.allclose(found_N, generalised_advantages(*steps, lam_E[line.episode_N]))


SHARED = {
    ("reinforce++_baseline", "no_kl_loss"): no_kl2_loss,
}
STATED = [(name, one.name) for name, rows in DEVIATIONS.items() for one in rows]


@pytest.mark.parametrize(("name", "difference"), STATED)
def test_a_stated_difference_is_there(name, difference):
    check = SHARED.get((name, difference)) or globals()[difference]
    check(name)


def test_differences_are_of_rows_that_exist_and_each_is_said_once():
    assert DEVIATIONS.keys() <= RECIPES.keys() and len(set(STATED)) == len(STATED)


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


# --- the page


def cells(head):
    """The rows of the table of the page that begins with this head, without marks."""
    table = RECIPE_DOCS.split(f"| {head} |")[1].split("\n\n")[0]
    rows = [line[1:-1].split("|") for line in table.splitlines()[2:]]
    return [[cell.replace("`", "").strip() for cell in row] for row in rows]


def test_the_page_has_the_table_of_recipes():
    expected = [
        [*list(row.values())[:-1], f"[{row['paper'].rpartition('/')[2]}]({row['paper']})"]
        for row in recipe_table()
    ]
    assert cells("recipe | credit | surrogate | aggregate | besides | paper") == expected


def test_the_page_has_every_difference():
    expected = [[name, one.differs, one.why] for name, rows in DEVIATIONS.items() for one in rows]
    assert cells("recipe | what differs | why, and how to have the paper's") == expected

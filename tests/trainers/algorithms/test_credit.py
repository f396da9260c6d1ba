"""Credit over tokens and turns: published numbers, definitions written out, and what must not
change anything.
"""

from __future__ import annotations

import json
import math
from dataclasses import replace
from functools import partial

import pytest
import torch
from credit_cases import CHECKS, STEPS, furnished, one_row, packed, per_episode
from trainer_cases import branch, episode, group

from agentrl.errors import ConfigError
from agentrl.trainers.algorithms.advantages import grpo
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
    vtrace,
    whiten,
)
from agentrl.trainers.algorithms.timeline import Timeline
from agentrl.trainers.batch import pack
from agentrl.trajectory import Group, Trajectory

MASK = [1, 1, 0, 0, 0, 1]
VALUES = [0.3, 0.4, 0.9, 0.9, 0.9, 0.5]


@pytest.fixture(scope="module")
def vectors(data_dir):
    rows = json.loads((data_dir / "numeric" / "vectors_shared.json").read_text())
    return {row["name"]: row for row in rows}


def advantages(batch) -> list[float]:
    return batch.advantages_BT[0].tolist()


# --- published numbers


@pytest.mark.parametrize(("rewards", "outcome"), [([0.0] * 6, 1.0), ([0.0] * 5 + [1.0], 0.0)])
def test_golden_gae(rewards, outcome):
    found = gae(one_row(rewards, VALUES, MASK, outcome))
    assert advantages(found) == pytest.approx([0.64625, 0.575, 0, 0, 0, 0.5], abs=1e-6)
    assert found.returns_BT[0].tolist() == pytest.approx([0.94625, 0.975, 0, 0, 0, 1.0], abs=1e-6)


def test_golden_gae_of_a_reward_on_a_masked_last_position():
    late = gae(one_row([0.0] * 6 + [1.0], [*VALUES, 0.9], [*MASK, 0]))
    assert advantages(late) == pytest.approx([0.64625, 0.575, 0, 0, 0, 0.5, 0], abs=1e-6)


def test_published_gae_vectors(vectors):
    inputs, expected = vectors["gae_returns"]["inputs"], vectors["gae_returns"]["expected"]
    found = gae(
        one_row(inputs["rewards"][0], inputs["values"][0]), gamma=inputs["gamma"], lam=inputs["lam"]
    )
    assert found.returns_BT[0].tolist() == pytest.approx(expected["returns"][0], abs=1e-4)
    inputs = vectors["multi_turn_gae_mask_invariance"]["inputs"]
    mask, results = torch.tensor(inputs["response_mask"]).bool(), []
    for garbage in (0.0, -1e6, math.nan):
        values_BT = torch.full(mask.shape, garbage, dtype=torch.float64)
        values_BT[mask] = torch.tensor(inputs["values_at_mask"], dtype=torch.float64)
        batch = one_row(inputs["rewards"][0], mask=inputs["response_mask"][0], values_BT=values_BT)
        results.append(gae(batch, gamma=0.97, lam=0.9))
    for other in results[1:]:
        assert torch.equal(other.advantages_BT, results[0].advantages_BT)
        assert torch.equal(other.returns_BT, results[0].returns_BT)


def test_whitening_is_over_trained_tokens_with_one_degree_of_freedom_less(vectors):
    row = vectors["masked_mean_1d"]
    batch = one_row([0.0] * 5, mask=row["inputs"]["mask"])
    batch = replace(batch, advantages_BT=torch.tensor([row["inputs"]["x"]], dtype=torch.float64))
    mean, deviation = row["expected"]["mean"], math.sqrt(row["expected"]["var_unbiased"])
    expected = [
        (x - mean) / deviation if m else 0.0
        for x, m in zip(*(row["inputs"][k] for k in ("x", "mask")), strict=True)
    ]
    assert advantages(whiten(batch)) == pytest.approx(expected, abs=1e-4)


# --- definitions, written out


def test_gae_is_the_discounted_sum_of_temporal_differences():
    rewards, values, gamma, lam = [0.1, -0.4, 0.0, 1.0], [0.3, 0.2, -0.1, 0.6], 0.9, 0.7
    deltas = [
        r + gamma * v_next - v
        for r, v, v_next in zip(rewards, values, [*values[1:], 0.0], strict=True)
    ]
    expected = [sum((gamma * lam) ** (k - t) * deltas[k] for k in range(t, 4)) for t in range(4)]
    found = gae(one_row(rewards, values), gamma=gamma, lam=lam)
    assert advantages(found) == pytest.approx(expected)
    assert found.returns_BT[0].tolist() == pytest.approx(
        [a + v for a, v in zip(expected, values, strict=True)]
    )


def test_length_adaptive_lambda_and_the_critics_own():
    rewards, values = [0.1, -0.4, 0.0, 1.0], [0.3, 0.2, -0.1, 0.6]
    batch = one_row(rewards, values)
    found = length_adaptive_gae(batch, length_alpha=0.5)
    assert advantages(found) == pytest.approx(advantages(gae(batch, lam=1 - 1 / (0.5 * 4))))
    assert found.returns_BT[0].tolist() == pytest.approx([0.7, 0.6, 1.0, 1.0]), (
        "λ = 1: the rewards to go"
    )
    assert advantages(length_adaptive_gae(batch)) == pytest.approx(
        advantages(gae(batch, lam=0.0))
    ), "4 tokens: λ = 0"


def test_the_length_of_length_adaptive_is_the_episodes():
    long = [((3, 1), (4, 1)), 1.0], [((1, 1),), 0.0]
    batch = packed([long])
    found = per_episode(batch, length_adaptive_gae(batch, length_alpha=0.5).advantages_BT)
    for index, lam in enumerate((1 - 1 / 3.5, 0.0)):
        assert found[index] == pytest.approx(
            per_episode(batch, gae(batch, lam=lam).advantages_BT)[index]
        )


def off_policy(log_ratios, **options):
    """One row of tokens whose policy has moved by these log-ratios since they were sampled."""
    batch = one_row([0.1, -0.4, 0.0, 1.0], [0.3, 0.2, -0.1, 0.6])
    moved_BT = batch.old_logprobs_BT + torch.tensor([log_ratios], dtype=torch.float64)
    return vtrace(replace(batch, proximal_logprobs_BT=moved_BT), **options)


def test_vtrace_is_the_papers_sum():
    """Remark 1 and equation 1 of the paper, term by term."""
    rewards, values, gamma, lam = [0.1, -0.4, 0.0, 1.0], [0.3, 0.2, -0.1, 0.6], 0.9, 0.7
    w = [2.0, 0.5, 1.5, 0.25]
    rho, c = [min(x, 1.2) for x in w], [lam * min(x, 1.0) for x in w]
    after = [*values[1:], 0.0]
    delta = [rho[t] * (rewards[t] + gamma * after[t] - values[t]) for t in range(4)]
    v = [
        values[s] + sum(gamma ** (t - s) * math.prod(c[s:t]) * delta[t] for t in range(s, 4))
        for s in range(4)
    ]
    gained = [
        rho[t] * (rewards[t] + gamma * ahead - values[t]) for t, ahead in enumerate([*v[1:], 0.0])
    ]
    found = off_policy([math.log(x) for x in w], gamma=gamma, lam=lam, rho_high=1.2)
    assert found.returns_BT[0].tolist() == pytest.approx(v)
    assert advantages(found) == pytest.approx(gained)


def test_vtrace_on_policy_is_gae_with_lambda_one():
    found, batch = off_policy([0.0] * 4), one_row([0.1, -0.4, 0.0, 1.0], [0.3, 0.2, -0.1, 0.6])
    expected = gae(batch, lam=1.0)
    assert advantages(found) == pytest.approx(advantages(expected))
    assert torch.allclose(found.returns_BT, expected.returns_BT)
    shorter = off_policy([0.0] * 4, lam=0.8)
    assert torch.allclose(shorter.returns_BT, gae(batch, lam=0.8).returns_BT)


def test_vtrace_learns_nothing_from_what_the_policy_would_no_longer_do():
    found = off_policy([0.0, -60.0, 0.0, 0.0])
    assert advantages(found)[1] == pytest.approx(0, abs=1e-8)
    assert found.returns_BT[0, 1].item() == pytest.approx(0.2, abs=1e-8), "V itself"
    assert found.returns_BT[0, 0].item() == pytest.approx(0.1 + 0.2), "no further than that token"


def test_vtrace_refuses_a_trace_above_its_weight():
    with pytest.raises(ConfigError, match=r"trace_high.* at most rho_high=1\.0"):
        off_policy([0.0] * 4, trace_high=2.0)


def test_turn_gae_steps_over_turns():
    rewards, values = [0.0, 0.2, 0.0, 0.1, 0.0, 1.0], [0.3, 9.0, 9.0, 0.4, 9.0, 9.0]
    batch = one_row(rewards, values, [1, 1, 0, 1, 1, 0])
    found = turn_gae(batch, gamma=0.9, lam=0.8)
    second = 1.1 - 0.4
    first = 0.2 + 0.9 * 0.4 - 0.3 + 0.72 * second
    assert advantages(found) == pytest.approx([first, first, 0, second, second, 0])
    assert found.returns_BT[0].tolist() == pytest.approx([first + 0.3] * 2 + [0] + [1.1] * 2 + [0])


def test_reward_to_go_discounts_by_trained_token():
    found = reward_to_go(one_row([0.5, 0, 0, 2.0, 0, 0], mask=MASK, outcome=1.0), gamma=0.5)
    assert advantages(found) == pytest.approx([0.5 + 0.5 * 2.5, 2.5, 0, 0, 0, 1.0])


def test_turn_level_compares_turns_of_one_index():
    batch = packed([[(((1, 1), (2, 1)), 1.0), (((2, 1), (1, 1)), 0.0), (((1, 1),), 0.5)]])
    batch = replace(batch, rewards_BT=torch.zeros_like(batch.rewards_BT))
    first, second = grpo([0.5 * 1.0, 0.0, 0.5]), grpo([1.0, 0.0])
    found = per_episode(batch, turn_level(batch, gamma=0.5).advantages_BT)
    assert found[0] == pytest.approx([first[0], second[0], second[0]])
    assert found[1] == pytest.approx([first[1], first[1], second[1]])
    assert found[2] == pytest.approx([first[2]])


def test_a_turn_that_no_sibling_reached_has_no_advantage():
    batch = packed([[(((1, 1), (2, 1)), 1.0), (((2, 1),), 0.0)]])
    assert per_episode(batch, turn_level(batch).advantages_BT)[0][1:] == [0.0, 0.0]


def test_gigpo_compares_turns_that_met_one_state():
    """Two episodes come back to state 5, the first one twice: three returns are compared."""
    batch = packed([[(((1, 1), (1, 1), (1, 1)), 1.0), (((1, 1), (1, 1)), 0.0)]])
    state_BT = batch.state_BT.clone()
    state_BT[batch.mask_BT] = torch.tensor([3, 5, 5, 3, 5])
    batch = replace(batch, state_BT=state_BT, rewards_BT=None)
    whole, start, again = grpo([1.0, 0.0]), grpo([0.25, 0.0]), grpo([0.5, 1.0, 0.0])
    found = per_episode(batch, gigpo(batch, gamma=0.5, step_weight=2.0).advantages_BT)
    assert found[0] == pytest.approx([whole[0] + 2 * one for one in (start[0], again[0], again[1])])
    assert found[1] == pytest.approx([whole[1] + 2 * one for one in (start[1], again[2])])


def test_states_are_what_was_told_right_before_the_turn():
    """Episodes of one task meet the same state where the tool's answer is the same, whatever came
    before it.
    """
    first = branch(2, (1, 2), (2, 2), (1, 0))
    second = Trajectory((*first.segments[:2], first.segments[4], first.segments[3]))
    batch = pack([Group((episode(first), episode(second, sample=1)))], 0)
    states = [[int(x) for x in dict.fromkeys(one)] for one in per_episode(batch, batch.state_BT)]
    assert states[0][0] == states[1][0] and states[0][2] == states[1][1]
    assert len(set(states[0])) == 3


def test_the_square_of_the_chosen_logit_is_within_a_factor_of_two_of_the_whole_gradient():
    generator = torch.Generator().manual_seed(0)
    logits = 3 * torch.randn(200, 7, generator=generator, dtype=torch.float64)
    chances = logits.softmax(-1)
    chosen = chances[:, 0]
    whole = 1 - 2 * chosen + chances.square().sum(1)
    assert ((1 - chosen).square() <= whole + 1e-12).all() and (
        whole <= 2 * (1 - chosen).square() + 1e-12
    ).all()


def test_the_optimal_baseline_survives_certainty():
    batch = packed([[(((2, 1),), 1.0), (((2, 1),), 0.0), (((3, 1),), 0.5)]])
    sure = replace(batch, old_logprobs_BT=torch.zeros_like(batch.old_logprobs_BT), rewards_BT=None)
    assert per_episode(sure, optimal_baseline(sure).advantages_BT)[0] == pytest.approx([0.75] * 2)


def test_kl_is_paid_where_it_arises():
    batch = one_row([0.0, 0.3, 0.0], mask=[1, 0, 1])
    batch = replace(
        batch,
        old_logprobs_BT=torch.tensor([[-1.0, math.nan, -2.0]]).double(),
        ref_logprobs_BT=torch.tensor([[-1.5, math.nan, -1.0]]).double(),
    )
    for rewards_BT, between in ((batch.rewards_BT, 0.3), (None, 0.0)):
        found = kl_in_reward(replace(batch, rewards_BT=rewards_BT), kl_reward_coef=0.1)
        assert found.rewards_BT[0].tolist() == pytest.approx([-0.05, between, 0.1])
    proximal = replace(batch, proximal_logprobs_BT=batch.ref_logprobs_BT)
    assert torch.equal(kl_in_reward(proximal, kl_reward_coef=0.1).rewards_BT, batch.rewards_BT)


def test_entropy_shapes_and_never_turns_a_sign():
    batch = replace(
        one_row([0.0] * 4),
        advantages_BT=torch.tensor([[1.0, -1.0, 0.0, 0.1]]).double(),
        entropy_BT=torch.tensor([[0.5, 5.0, 5.0, 5.0]]).double().requires_grad_(),
    )
    found = entropy_shaped(batch)
    assert advantages(found) == pytest.approx([1.2, -0.5, 0.0, 0.15])
    assert not found.advantages_BT.requires_grad
    with pytest.raises(ConfigError, match=r"entropy_kappa=0\.5 must be at least 1"):
        entropy_shaped(batch, entropy_kappa=0.5)


# --- no signal, nothing missing, nothing made up


ALONE = {
    *("reward_to_go", "gae", "length_adaptive_gae", "turn_gae", "vtrace"),
    *("kl_in_reward", "remax"),
}


@pytest.mark.parametrize("name", STEPS)
def test_one_episode_alone(name):
    """What compares with siblings says exactly 0; what has a critic, a greedy episode or no
    baseline needs none.
    """
    batch = STEPS[name](packed([[(((2, 1), (3, 1)), 0.7)]]))
    values = batch.advantages_BT[batch.mask_BT]
    if name in ALONE:
        assert (values != 0).any()
    elif name == "reinforce_plus_plus":
        assert abs(float(values.mean())) < 1e-12
    else:
        assert (values == 0).all()


@pytest.mark.parametrize("name", STEPS)
def test_equal_episodes(name):
    batch = packed([[(((2, 1), (3, 1)), 0.7)] * 3])
    batch = STEPS[name](
        replace(
            batch,
            rewards_BT=None,
            ref_logprobs_BT=batch.anchor_BT,
            parts_E={"a": batch.reward_E},
        )
    )
    values = batch.advantages_BT[batch.mask_BT]
    if name in ALONE:
        assert (values != 0).any()
    else:
        assert (values == 0).all()


@pytest.mark.parametrize("name", STEPS)
def test_a_failed_episode_leaves_no_trace(name):
    with_failure = group(1.0, None, 0.0, 0.5)
    kept = Group(tuple(with_failure.episodes[index] for index in (0, 2, 3)))
    found, expected = (
        STEPS[name](furnished(pack([one], 0))).advantages_BT for one in (with_failure, kept)
    )
    assert torch.equal(found, expected)


@pytest.mark.parametrize("name", STEPS)
def test_a_round_without_a_trained_token_is_no_error(name):
    assert STEPS[name](furnished(pack([group(None)], 0))).advantages_BT.numel() == 0


@pytest.mark.parametrize(
    ("step", "missing"),
    [
        (gae, "values_BT"),
        (turn_gae, "values_BT"),
        (length_adaptive_gae, "values_BT"),
        (vtrace, "values_BT"),
        (gigpo, "state_BT"),
        (kl_in_reward, "ref_logprobs_BT"),
        (entropy_shaped, "entropy_BT"),
    ],
)
def test_what_is_missing_is_named(step, missing):
    with pytest.raises(ValueError, match=f"{step.name}: batch.{missing} is None"):
        step(replace(packed([[(((1, 1),), 1.0)]]), **{missing: None}))
    assert step.reads or step is gigpo


@pytest.mark.parametrize(
    "step",
    [
        partial(gae, gamma=1.1),
        partial(gae, lam=2.0),
        partial(turn_level, gamma=1.5),
        partial(reward_to_go, gamma=3.0),
    ],
)
def test_discounts_above_one_are_refused(step):
    with pytest.raises(ConfigError, match="must be at most 1"):
        step(packed([[(((1, 1),), 1.0)]]))


def test_a_reward_that_no_action_earned_is_refused():
    early = one_row([1.0, 0.0], mask=[0, 1])
    with pytest.raises(ValueError, match="before the first trained token"):
        reward_to_go(early)
    two = packed([[(((1, 1),), 1.0), (((1, 1),), 0.0)]])
    rewards_BT = torch.zeros_like(two.rewards_BT)
    rewards_BT[1, 0] = 1.0
    with pytest.raises(ValueError, match="before the first trained token"):
        reward_to_go(replace(two, rewards_BT=rewards_BT))


# --- what must not change anything


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
@pytest.mark.parametrize("name", STEPS)
def test_what_must_not_matter(name, check):
    check(STEPS[name])


def test_the_line_of_time_follows_rows_whatever_lies_between_them():
    """Rows of two episodes may be interleaved; each keeps its own order."""
    batch = packed([[(((1, 1), (2, 1)), 1.0), (((2, 1), (1, 1)), 0.0)]], cuts={(0, 0), (0, 1)})
    mixed = batch.rows(torch.tensor([2, 0, 3, 1]))
    for one in (batch, mixed):
        line = Timeline.of(one)
        assert line.episode_N.tolist() == [0, 0, 0, 1, 1, 1]
        assert line.read(one.ids_BT).tolist() == line.read(one.ids_BT).sort().values.tolist()
        assert line.position_K.tolist() == [0, 1, 0, 1]

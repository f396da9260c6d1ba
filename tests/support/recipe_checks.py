"""What must hold for every recipe whole: each check raises AssertionError where a part of the
recipe breaks it.
"""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from recipe_cases import (
    SIGNAL,
    assert_same,
    credited,
    cut_episodes,
    filled,
    groups_of,
    learnt,
    output_of,
    paid_late,
    policy,
    rounds,
    spoilt,
    with_columns,
)
from torch import Tensor
from trainer_cases import TwoSteps, quick

from agentrl.trainers.algorithms.recipe import Recipe
from agentrl.trainers.batch import TokenBatch

few = settings(quick, max_examples=6)


def check_masked_tokens_change_nothing(row: Recipe) -> None:
    """Bug 2. Nothing decays through what a tool said, however long and wherever it stands."""

    @few
    @given(
        rounds,
        st.lists(st.tuples(st.floats(0, 1), st.integers(1, 3)), max_size=3),
        st.tuples(*[st.integers(0, 3)] * 3),
    )
    def unchanged(drawn, inserts, told):
        def longer(batch):
            for share, count in inserts:
                batch = with_columns(batch, round(share * batch.mask_BT.shape[1]), count)
            return batch

        expected = learnt(row, credited(row, groups_of(drawn)))
        assert_same(learnt(row, credited(row, groups_of(drawn, told=told), longer)), expected)

    unchanged()


def check_a_late_reward_arrives(row: Recipe) -> None:
    """Bug 3. No outcome and no process reward is lost where a row ends on an observation."""

    @few
    @given(rounds)
    def unchanged(drawn):
        ended = [
            [([*shape[:-1], (shape[-1][0], 0)], *rest) for shape, *rest in group] for group in drawn
        ]
        silent = groups_of(
            [
                [([*shape[:-1], (shape[-1][0], 2)], *rest) for shape, *rest in group]
                for group in drawn
            ]
        )
        expected = learnt(row, credited(row, groups_of(ended)))
        assert expected.advantages_V.any()
        assert_same(learnt(row, credited(row, silent)), expected)
        assert_same(learnt(row, credited(row, silent, paid_late)), expected)

    unchanged()


def check_an_episode_in_two_rows_is_one(row: Recipe) -> None:
    """Bug 4. A fork changes neither statistics nor time nor weight of an episode."""

    @few
    @given(rounds, cut_episodes)
    def unchanged(drawn, cuts):
        one, two = (credited(row, groups_of(drawn, cut)) for cut in (frozenset(), cuts))
        assert len(two) > len(one)
        assert_same(learnt(row, two), learnt(row, one))

    unchanged()


def check_garbage_outside_the_mask_is_not_read(row: Recipe) -> None:
    """Bug 5. NaN, infinity or 1e6 at mask 0 reach neither a value nor a gradient."""

    @few
    @given(rounds, cut_episodes, st.sampled_from([torch.nan, torch.inf, 1e6, -1e6]))
    def unchanged(drawn, cuts, garbage):
        groups = groups_of(drawn, cuts)
        found = learnt(
            row, credited(row, groups, lambda batch: spoilt(batch, garbage)), garbage=garbage
        )
        assert torch.isfinite(found.gradient_V4).all()
        assert_same(found, learnt(row, credited(row, groups)))

    unchanged()


def check_micro_batches_add_up(row: Recipe) -> None:
    """Bug 6. Any partition of a step's episodes gives its loss, metrics and gradient."""

    @few
    @given(rounds, cut_episodes, st.randoms(use_true_random=False), st.integers(1, 60))
    def adds_up(drawn, cuts, random, micro_tokens):
        whole = credited(row, groups_of(drawn, cuts))
        for batch in (whole, *whole.minibatches(2, random.randrange(99))):
            owners = batch.episode_B.unique().tolist()
            random.shuffle(owners)
            ends = sorted({random.randrange(1, len(owners) + 1) for _ in range(3)} | {len(owners)})
            members = [owners[begin:end] for begin, end in itertools.pairwise([0, *ends])]
            parts = [
                torch.nonzero(torch.isin(batch.episode_B, torch.tensor(some))).flatten()
                for some in members
            ]
            expected = learnt(row, batch)
            assert_same(learnt(row, batch, parts), expected)
            corrected = row.correct(batch)
            again = [
                row.loss(output_of(row, policy()[micro.ids_BT]), micro)[0]
                for micro in corrected.split(micro_tokens)
            ]
            assert float(sum(again).detach()) == pytest.approx(expected.loss, abs=1e-9)
            if not row.regularisers:
                left = learnt(replace(row, corrections=()), corrected.informative())
                assert left.loss == pytest.approx(expected.loss, abs=1e-9)
                assert torch.allclose(left.gradient_V4, expected.gradient_V4, atol=1e-9)

    adds_up()


def _fewer_degrees(count: int) -> float:
    """Standard deviation of N numbers over that of the same numbers twice, ddof = 1 both times."""
    return ((2 * count - 1) / (2 * (count - 1))) ** 0.5


def louder_twice(row: Recipe, batch: TokenBatch) -> float:
    """How much louder advantages are where the round is there twice: 1, unless a statistic is over
    the whole round.

    `whiten` and `gdpo` divide by a standard deviation of ddof = 1 over the round's tokens or
    episodes, which is smaller for the same numbers twice. `reinforce` leaves the own episode out of
    its baseline, but not the copy of it.
    """
    names, episodes = {step.name for step in row.credit}, len(batch.reward_E)
    if "whiten" in names:
        return _fewer_degrees(batch.n_tokens)
    if "gdpo" in names:
        return _fewer_degrees(episodes)
    return (2 * episodes - 2) / (2 * episodes - 1) if "reinforce" in names else 1.0


def check_the_same_groups_twice_are_the_same_loss(row: Recipe) -> None:
    """Bug 9. Every term has the unit of the advantage, so neither loss nor clipped tokens depend on
    the batch size.
    """

    @few
    @given(rounds, cut_episodes)
    def unchanged(drawn, cuts):
        groups = groups_of(drawn, cuts)
        once, twice = credited(row, groups), credited(row, groups * 2)
        assert len(twice) == 2 * len(once)
        expected = once.advantages_BT * louder_twice(row, once)
        assert torch.allclose(twice.advantages_BT, expected.repeat(2, 1), atol=1e-6)
        twice = replace(twice, advantages_BT=once.advantages_BT.repeat(2, 1))
        assert_same(learnt(row, twice), learnt(row, once))

    unchanged()


def check_the_kl_gradient(row: Recipe) -> None:
    """Bug 10. Over 25 trajectories of another policy, the KL term's expected gradient is that of
    KL(π‖π_ref).
    """
    two, generator = TwoSteps(seed=2), torch.Generator().manual_seed(4)
    tables = [two.theta.detach()] + [
        two.theta.detach() + torch.randn(30, generator=generator, dtype=torch.float64)
        for _ in range(2)
    ]
    batch, logprobs_BT, _ = two.groups(1)
    sampled_BT, ref_BT = (_scored(two, table, batch.mask_BT) for table in tables[1:])
    batch = replace(
        batch,
        old_logprobs_BT=sampled_BT,
        group_E=torch.zeros_like(batch.group_E),
        version=0,
        parts_E={"a": batch.reward_E},
        state_BT=batch.ids_BT,
        signal_E=torch.ones_like(batch.truncated_E),
        passed_E=batch.reward_E >= 1,
    )
    needs = frozenset(row.needs) - {"greedy", "reference"}
    batch = replace(
        filled(batch, (), needs), ref_logprobs_BT=ref_BT, greedy_reward_E=torch.zeros(25)
    )
    if batch.proximal_logprobs_BT is not None:
        batch = replace(batch, proximal_logprobs_BT=sampled_BT, old_logprobs_BT=sampled_BT - 0.05)
    batch = row.correct(row.advantage(batch))
    bare = replace(
        row,
        regularisers=tuple(term for term in row.regularisers if "kl_penalty" not in term.name),
    )
    output = output_of(row, torch.stack((logprobs_BT, *[logprobs_BT.detach()] * 3), -1))
    extra = row.loss(output, batch)[0] - bare.loss(output, batch)[0]
    pull_BT = torch.autograd.grad(extra, logprobs_BT, retain_graph=True)[0]
    drawn_B1 = torch.where(batch.mask_BT, sampled_BT, 0.0).sum(1, keepdim=True).exp() * len(batch)
    found = torch.autograd.grad((pull_BT * drawn_B1 * logprobs_BT).sum(), two.theta)[0]
    per_token = float(row.aggregate(batch.mask_BT.double(), batch)) / 2
    expected = row.options["kl_coef"] * per_token * _kl_gradient(two, tables[1], tables[2])
    assert expected.norm() > 0
    assert torch.allclose(found / expected.norm(), expected / expected.norm(), atol=1e-8)


def _scored(two: TwoSteps, theta: Tensor, mask_BT: Tensor) -> Tensor:
    """Log-probabilities of the 25 trajectories under another table."""
    other = TwoSteps()
    other.theta = theta
    return torch.zeros(mask_BT.shape, dtype=torch.float64).masked_scatter(
        mask_BT, other.logprobs_K2()
    )


def _kl_gradient(two: TwoSteps, sampler: Tensor, ref: Tensor) -> Tensor:
    """d/dθ of the KL to the reference at both steps, summed, in states that the sampler visits."""
    here, there = (table.view(6, 5).log_softmax(1) for table in (two.theta, ref))
    visits_S = torch.cat((torch.ones(1, dtype=torch.float64), sampler[:5].softmax(0)))
    return torch.autograd.grad((visits_S * (here.exp() * (here - there)).sum(1)).sum(), two.theta)[
        0
    ]


def check_nothing_earned_is_nothing_learnt(row: Recipe) -> None:
    """Where all rewards are 0, an action is judged only by a teacher, or by a critic or a greedy
    episode, which expected more.
    """
    batch = credited(row, groups_of([[(shape, 0.0, False) for shape, *_ in SIGNAL]] * 2))
    if row.refill:
        assert (len(batch), batch.n_tokens) == (0, 0)
        return
    found = learnt(row, batch)
    assert torch.isfinite(found.gradient_V4).all()
    assert bool(found.gradient_V4.any()) == bool(row.needs & {"greedy", "critic", "teacher"})


CHECKS = (
    check_masked_tokens_change_nothing,
    check_a_late_reward_arrives,
    check_an_episode_in_two_rows_is_one,
    check_garbage_outside_the_mask_is_not_read,
    check_micro_batches_add_up,
    check_the_same_groups_twice_are_the_same_loss,
)

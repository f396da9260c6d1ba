"""The silent bugs of regularisers, each kept as a mutant that its check must flag (see
test_mutants.py).
"""

from __future__ import annotations

import math
from dataclasses import replace
from functools import partial

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from trainer_cases import batch_of, branch, episode, group, quick

from agentrl.trainers.algorithms.losses import (
    PolicyLoss,
    by_constant,
    by_episode,
    by_token,
    keep,
    ppo_clip,
)
from agentrl.trainers.algorithms.parts import name_of
from agentrl.trainers.algorithms.regularisers import (
    KL_ESTIMATORS,
    entropy_bonus,
    kl_cov,
    kl_penalty,
    simko,
)
from agentrl.trainers.batch import PolicyOutput
from agentrl.trajectory import Group, Trajectory


def seen(batch, seed=0):
    """Batch and output with all that a term reads, each trained token's share of it decided by its
    place among them.
    """
    count = int(batch.mask_BT.sum())
    draws = torch.randn(
        (6, count), generator=torch.Generator().manual_seed(seed), dtype=torch.float64
    )

    def by_token(values_N):
        return torch.zeros(batch.mask_BT.shape, dtype=values_N.dtype).masked_scatter(
            batch.mask_BT, values_N
        )

    old = -draws[0].abs() - 0.2
    full = replace(
        batch,
        old_logprobs_BT=by_token(old),
        ref_logprobs_BT=by_token(old + 0.3 * draws[1]),
        advantages_BT=by_token(draws[2]),
        selected_BT=by_token(draws[3] > -0.5),
        version_BT=torch.where(
            batch.mask_BT, by_token((2 * draws[1]).round().clamp(-2, 2).int() + 5), -1
        ),
        version=7,
    )
    logprobs_BT = by_token(old + 0.3 * draws[4]).requires_grad_()
    top_BTK = torch.stack(
        (logprobs_BT.detach() + by_token(draws[5].clamp(min=0)), by_token(old - 1)), -1
    )
    return PolicyOutput(logprobs_BT, by_token(draws[5].abs()), top_BTK), full


def judged(loss, output, batch):
    value, _ = loss(output, batch)
    gradient_BT = torch.autograd.grad(value, output.logprobs_BT, retain_graph=True)[0]
    return value.detach(), gradient_BT


def check_observations_and_rows_do_not_matter(loss):
    """Bugs 2 and 4. Tokens of tools, and an episode in two rows, change neither loss nor gradient."""
    results = []
    for observed, cut in ((0, False), (3, False), (3, True)):
        whole = branch(2, (3, observed), (4, observed), (2, 0))
        first = Trajectory(whole.segments[: 3 if observed else 2])
        rows = (
            [first, first.fork().extend(*whole.segments[3 if observed else 2 :])]
            if cut
            else [whole]
        )
        output, batch = seen(
            batch_of(Group((episode(*rows), episode(branch(2, (5, 0)), sample=1))))
        )
        value, gradient_BT = judged(loss, output, batch)
        results.append((value, gradient_BT[batch.mask_BT]))
    for value, gradient_N in results[1:]:
        assert float(value) == pytest.approx(float(results[0][0]), abs=1e-12)
        assert torch.allclose(gradient_N, results[0][1], atol=1e-12)


def check_masked_values_do_not_matter(loss):
    """Bug 5. Whatever stands at mask 0 changes neither loss nor gradient, and has no gradient
    itself.
    """
    output, batch = seen(batch_of(group(1.0, 0.0)))
    value, gradient_BT = judged(loss, output, batch)
    for garbage in (1e6, -math.inf, math.nan):
        fields = ("old_logprobs_BT", "ref_logprobs_BT", "advantages_BT")
        dirty = {name: torch.where(batch.mask_BT, getattr(batch, name), garbage) for name in fields}
        spoilt = PolicyOutput(
            torch.where(batch.mask_BT, output.logprobs_BT.detach(), garbage).requires_grad_(),
            torch.where(batch.mask_BT, output.entropy_BT, garbage),
            torch.where(batch.mask_BT[..., None], output.top_logprobs_BTK, garbage),
        )
        selected_BT = batch.selected_BT | ~batch.mask_BT
        found, found_BT = judged(loss, spoilt, replace(batch, selected_BT=selected_BT, **dirty))
        assert torch.equal(found, value)
        assert torch.equal(found_BT, gradient_BT)


def check_micro_batches_add_up(loss):
    """Bug 6. Over any partition into micro-batches, losses and gradients add up to those of the
    batch.
    """

    @quick
    @given(st.lists(st.integers(1, 6), min_size=2, max_size=6), st.randoms(use_true_random=False))
    def partition(lengths, random):
        shapes = [
            episode(branch(2, (length, 1), (1, 0)), sample=i) for i, length in enumerate(lengths)
        ]
        output, batch = seen(batch_of(Group(tuple(shapes))))

        def part(rows):
            cut = batch.rows(torch.tensor(rows))
            fields = (output.logprobs_BT, output.entropy_BT, output.top_logprobs_BTK)
            value, _ = loss(PolicyOutput(*(x[rows][:, : cut.ids_BT.shape[1]] for x in fields)), cut)
            return (
                value.detach(),
                torch.autograd.grad(value, output.logprobs_BT, retain_graph=True)[0],
            )

        order = random.sample(range(len(batch)), len(batch))
        middle = random.randrange(1, len(batch))
        pieces = [part(order[:middle]), part(order[middle:])]
        value, gradient_BT = part(list(range(len(batch))))
        assert float(pieces[0][0] + pieces[1][0]) == pytest.approx(float(value), abs=1e-12)
        assert torch.allclose(pieces[0][1] + pieces[1][1], gradient_BT, atol=1e-12)

    partition()


def check_unit_is_that_of_the_advantage(loss):
    """Bug 9. The same batch twice over has the same loss in every term."""
    output, batch = seen(batch_of(group(1.0, 0.0, 0.5)))
    rows = torch.arange(len(batch)).repeat(2)
    twice = replace(
        batch.rows(rows),
        n_tokens=2 * batch.n_tokens,
        n_episodes=2 * batch.n_episodes,
        tokens_E=batch.tokens_E.repeat(2),
        episode_B=torch.arange(2 * len(batch)),
    )
    fields = (output.logprobs_BT, output.entropy_BT, output.top_logprobs_BTK)
    found = loss(PolicyOutput(*(x[rows] for x in fields)), twice)[1]
    expected = loss(output, batch)[1]
    assert {k: v for k, v in found.items() if k.startswith("loss")} == pytest.approx(
        {k: v for k, v in expected.items() if k.startswith("loss")}, abs=1e-12
    )


terms = (
    partial(kl_penalty, kl_coef=0.1, kl_estimator="k1"),
    partial(kl_cov, kl_cov_coef=0.2),
    partial(entropy_bonus, entropy_coef=0.01),
)
wide = partial(simko, smoothing=0.3, top1_penalty=1.4)
LOSSES = [PolicyLoss(wide, aggregate, terms) for aggregate in (by_token, by_episode, by_constant)]
LOSSES += [
    PolicyLoss(
        wide, by_token, (partial(kl_penalty, kl_coef=1.0, kl_estimator=kind, kl_ratio=ratio),)
    )
    for kind in KL_ESTIMATORS
    for ratio in (True, False)
]


def kl_cov_by_selection(output, batch):
    """The term at the selected tokens by index, wherever they stand."""
    gap_BT = (output.logprobs_BT - batch.old_logprobs_BT).abs()
    loss, metrics = PolicyLoss(ppo_clip, by_token)(output, batch)
    return loss + gap_BT[batch.selected_BT].sum() / batch.n_tokens, metrics


def kl_cov_of_the_mean_token(output, batch):
    """A mean over the selected tokens of the micro-batch."""
    gap_BT = keep((output.logprobs_BT - batch.old_logprobs_BT).abs(), batch.mask_BT)
    loss, metrics = PolicyLoss(ppo_clip, by_token)(output, batch)
    return loss + gap_BT[batch.selected_BT].mean(), metrics


def kl_cov_summed(output, batch):
    """SkyRL's sum instead of the mean."""
    loss, metrics = PolicyLoss(ppo_clip, by_token)(output, batch)
    total = keep(kl_cov(output, batch), batch.mask_BT).sum()
    return loss + total, metrics | {"loss_kl_cov": float(total.detach())}


def kl_of_rows(output, batch):
    """A KL per row, averaged over rows."""
    kl_BT = keep(output.logprobs_BT - batch.ref_logprobs_BT, batch.mask_BT)
    return (kl_BT.sum(1) / batch.mask_BT.sum(1)).sum() / batch.n_episodes, {}


def entropy_bonus_of_the_width(output, batch):
    return (output.logprobs_BT.square() * batch.mask_BT).sum() / batch.ids_BT.numel(), {}


def simko_by_row_advantage(output, batch):
    """The sign of the row's mean advantage decides for all its tokens."""
    mean_B1 = keep(batch.advantages_BT, batch.mask_BT).sum(1, keepdim=True) / batch.mask_BT.sum(
        1, keepdim=True
    )
    row = replace(batch, advantages_BT=keep(mean_B1.expand_as(batch.advantages_BT), batch.mask_BT))
    return PolicyLoss(wide, by_token)(output, row)


CASES = [
    (
        check_observations_and_rows_do_not_matter,
        LOSSES,
        [kl_of_rows, entropy_bonus_of_the_width, simko_by_row_advantage],
    ),
    (check_masked_values_do_not_matter, LOSSES, [kl_cov_by_selection, entropy_bonus_of_the_width]),
    (
        check_micro_batches_add_up,
        LOSSES[:3],
        [kl_cov_of_the_mean_token],
    ),
    (check_unit_is_that_of_the_advantage, LOSSES, [kl_cov_summed]),
]


def _id(value):
    if not isinstance(value, PolicyLoss):
        return name_of(value)
    kinds = [str(x) for term in value.regularisers for x in getattr(term, "keywords", {}).values()]
    return "-".join((name_of(value.aggregate), *kinds))


@pytest.mark.parametrize(
    ("check", "real"), [(c, real) for c, reals, _ in CASES for real in reals], ids=_id
)
def test_the_real_function_passes(check, real):
    check(real)


@pytest.mark.parametrize(
    ("check", "mutant"), [(c, mutant) for c, _, mutants in CASES for mutant in mutants], ids=_id
)
def test_the_mutant_is_flagged(check, mutant):
    with pytest.raises(AssertionError):
        check(mutant)

"""The silent bugs of losses and scoring, each kept as a mutant that its check must flag (see
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
from trainer_cases import (
    PAD,
    Golden,
    batch_of,
    branch,
    episode,
    group,
    logprobs_for,
    quick,
    tiny_model,
)

from agentrl.trainers.algorithms.losses import (
    PolicyLoss,
    by_constant,
    by_episode,
    by_token,
    importance_ratio,
    keep,
    ppo_clip,
)
from agentrl.trainers.algorithms.parts import name_of
from agentrl.trainers.algorithms.regularisers import entropy_bonus, kl_k1, kl_k2, kl_k3, kl_penalty
from agentrl.trainers.batch import PolicyOutput, TokenBatch, pack
from agentrl.trainers.models.scoring import token_logprobs
from agentrl.trajectory import Group, Segment, Trajectory

# --- 5: what stands at mask 0 is nobody's business


def check_masked_values_do_not_matter(loss):
    """Bug 5. 1e6, infinity or NaN at mask 0 changes neither loss nor gradient; a fully masked row
    contributes 0.
    """
    batch = batch_of(group(1.0, 0.0, 0.5))
    results = []
    for garbage in (0.0, 1e6, -1e6, math.inf, math.nan):
        clean = logprobs_for(batch).detach()
        dirty = torch.where(batch.mask_BT, clean, garbage).requires_grad_()
        spoilt = replace(
            batch,
            old_logprobs_BT=torch.where(batch.mask_BT, batch.old_logprobs_BT, garbage / 2),
            advantages_BT=torch.where(batch.mask_BT, batch.advantages_BT, garbage),
            ref_logprobs_BT=dirty.detach() - 0.1,
            weights_BT=torch.where(batch.mask_BT, 0.9, garbage),
        )
        noise = torch.where(batch.mask_BT, 0.3, garbage)
        value, metrics = loss(PolicyOutput(dirty, noise), spoilt)
        results.append((value.detach(), torch.autograd.grad(value, dirty)[0], metrics))
    for value, gradient, metrics in results:
        assert torch.equal(value, results[0][0])
        assert torch.equal(gradient, results[0][1])
        assert metrics == results[0][2]
        assert (gradient[~batch.mask_BT] == 0).all()
    value, _ = loss(
        PolicyOutput(dirty, noise), replace(spoilt, mask_BT=torch.zeros_like(batch.mask_BT))
    )
    assert value.item() == 0


def check_denominator_counts_what_the_numerator_sums(aggregate):
    """Bug 5. A constant of 1 at every trained token has mean 1, however many observation tokens
    there are.
    """
    for observed in (0, 5):
        batch = batch_of(Group((episode(branch(2, (3, observed), (2, 0))),)))
        assert float(aggregate(torch.ones(batch.mask_BT.shape), batch)) == pytest.approx(1.0)


terms = (partial(kl_penalty, kl_coef=0.1), partial(entropy_bonus, entropy_coef=0.01))
real_loss = PolicyLoss(ppo_clip, by_episode, terms)
by_five = partial(by_constant, norm_tokens=5)


def loss_multiplies_by_mask(output, batch):
    ratio_BT = importance_ratio(output, batch)
    return -(ratio_BT * batch.advantages_BT * batch.mask_BT).sum() / batch.n_tokens, {}


def loss_selects_after_arithmetic(output, batch):
    per_token_BT = -(output.logprobs_BT - batch.old_logprobs_BT).exp() * batch.advantages_BT
    return torch.where(batch.mask_BT, per_token_BT, 0.0).sum() / batch.n_tokens, {}


def loss_ignores_the_mask(output, batch):
    per_token_BT = ppo_clip(output, batch)
    return torch.where(batch.attention_BT, per_token_BT, 0.0).sum() / batch.n_tokens, {}


def mean_over_all_tokens(per_token_BT, batch):
    return keep(per_token_BT, batch.mask_BT).sum() / batch.attention_BT.sum()


# --- 6 and 9: the batch is one batch


def check_micro_batches_add_up(loss):
    """Bug 6. Over any partition into micro-batches, losses, gradients and metrics add up to those
    of the batch.
    """
    turns = st.lists(st.tuples(st.integers(1, 4), st.integers(0, 3)), min_size=1, max_size=3)

    @quick
    @given(st.lists(turns, min_size=2, max_size=7), st.randoms(use_true_random=False))
    def partition(shapes, random):
        batch = batch_of(
            Group(tuple(episode(branch(2, *t), sample=i) for i, t in enumerate(shapes)))
        )
        logprobs_BT = logprobs_for(batch)
        batch = replace(batch, ref_logprobs_BT=logprobs_BT.detach() - 0.2)
        entropy_BT = logprobs_BT.detach().abs()

        def gradient(rows):
            part = batch.rows(torch.tensor(rows))
            cut = [x[rows, : part.ids_BT.shape[1]] for x in (logprobs_BT, entropy_BT)]
            value, metrics = loss(PolicyOutput(*cut), part)
            return value.detach(), torch.autograd.grad(value, logprobs_BT)[0], metrics

        order = random.sample(range(len(batch)), len(batch))
        cuts = sorted(random.sample(range(1, len(batch)), random.randrange(len(batch) - 1) + 1))
        parts = [gradient(order[a:b]) for a, b in zip([0, *cuts], [*cuts, len(batch)], strict=True)]
        value, whole, metrics = gradient(list(range(len(batch))))
        assert float(sum(p[0] for p in parts)) == pytest.approx(float(value), abs=1e-10)
        assert torch.allclose(sum(p[1] for p in parts), whole, atol=1e-12)
        for name in metrics.keys() - {"ratio_max", "gap_max"}:
            assert sum(p[2][name] for p in parts) == pytest.approx(metrics[name], abs=1e-10)

    partition()


def check_split_keeps_denominators(split):
    """Bug 6. The micro-batches that a batch is cut into know the denominators of the whole."""
    batch = batch_of(group(1.0, 0.0, 0.5, 1.0))
    parts = list(split(batch, 24))
    assert len(parts) > 1
    assert sum(float(by_token(torch.ones(p.mask_BT.shape), p)) for p in parts) == pytest.approx(1.0)
    assert sum(float(by_episode(torch.ones(p.mask_BT.shape), p)) for p in parts) == pytest.approx(
        1.0
    )


def check_regularisers_have_the_unit_of_the_advantage(loss):
    """Bug 9. The same batch twice over has the same loss, each term by itself, and the same clipped
    fraction.
    """
    once = batch_of(group(1.0, 0.0, 0.5))
    both = torch.arange(len(once)).repeat(2)
    twice = replace(
        once.rows(both),
        n_tokens=2 * once.n_tokens,
        n_episodes=2 * once.n_episodes,
        tokens_E=once.tokens_E.repeat(2),
        episode_B=torch.arange(2 * len(once)),
    )
    logprobs_BT = logprobs_for(once)
    metrics = []
    for batch, rows in ((once, both[: len(once)]), (twice, both)):
        drawn_BT = logprobs_BT[rows]
        seen = replace(batch, ref_logprobs_BT=drawn_BT.detach() - 0.3)
        metrics.append(loss(PolicyOutput(drawn_BT, drawn_BT.detach().abs()), seen)[1])
    assert metrics[0]["clip_high"] > 0, "the check needs clipped tokens"
    assert metrics[1] == pytest.approx(metrics[0], abs=1e-12)


def loss_divides_by_its_own_tokens(output, batch):
    own = replace(batch, n_tokens=int(batch.mask_BT.sum()))
    return PolicyLoss(ppo_clip, by_token, terms)(output, own)


def loss_divides_by_its_own_width(output, batch):
    return PolicyLoss(ppo_clip, partial(by_constant, norm_tokens=batch.ids_BT.shape[1]), terms)(
        output, batch
    )


def split_counts_for_itself(batch, micro_tokens):
    for part in batch.split(micro_tokens):
        yield replace(part, n_tokens=int(part.mask_BT.sum()), n_episodes=len(part))


def loss_sums_its_kl(output, batch):
    loss, metrics = PolicyLoss(ppo_clip, by_token, terms)(output, batch)
    total = keep(kl_penalty(output, batch, kl_coef=0.1), batch.mask_BT).sum()
    return loss + total, metrics | {"loss_kl_penalty": float(total.detach())}


def loss_clips_in_units_of_the_batch(output, batch):
    """Advantages were divided by N before the bound on advantage x log-probability was applied."""
    loss, metrics = PolicyLoss(ppo_clip, by_token, terms)(output, batch)
    with torch.no_grad():
        moved_BT = keep(
            batch.advantages_BT / batch.n_tokens * output.logprobs_BT, batch.mask_BT
        ).abs()
        return loss, metrics | {"clip_high": float((moved_BT > 0.01).sum() / batch.n_tokens)}


# --- 7: the scorer scores the distribution that was sampled


def check_scorer_agrees_with_the_sampler(score):
    """Bug 7. Tokens drawn step by step from softmax(logits / T) get the log-probability they were
    drawn with.
    """
    model = tiny_model(torch.float64)
    for temperature in (0.6, 1.0, 1.3):
        generator = torch.Generator().manual_seed(1)
        ids, logprobs = [3, 4, 5], []
        with torch.no_grad():
            for _ in range(6):
                logp_V = (
                    model(input_ids=torch.tensor([ids])).logits[0, -1] / temperature
                ).log_softmax(-1)
                ids.append(int(torch.multinomial(logp_V.exp(), 1, generator=generator)))
                logprobs.append(float(logp_V[ids[-1]]))
        drawn = Trajectory(
            (Segment.prompt(ids[:3]), Segment.sampled(ids[3:], logprobs, 0, "length"))
        )
        batch = pack([Group((episode(drawn), episode(branch(2, (8, 0)), sample=1)))], PAD)
        found = score(model, batch, temperature).logprobs_BT.detach()[0, 3:9]
        assert found.tolist() == pytest.approx(logprobs, abs=1e-6)


def score_without_temperature(model, batch, temperature):
    return token_logprobs(model, batch)


def score_from_own_position(model, batch, temperature):
    logp_BTV = (model(input_ids=batch.ids_BT).logits / temperature).log_softmax(-1)
    return PolicyOutput(keep(logp_BTV.gather(-1, batch.ids_BT[..., None])[..., 0], batch.mask_BT))


def score_left_padded_without_positions(model, batch, temperature):
    ids_BT = torch.stack(
        [row.roll(int(len(row) - n)) for row, n in zip(batch.ids_BT, batch.lengths_B, strict=True)]
    )
    logp_BTV = (model(input_ids=ids_BT).logits / temperature).log_softmax(-1)[:, :-1]
    found_BT = torch.zeros(ids_BT.shape, dtype=torch.float64)
    found_BT[:, 1:] = logp_BTV.gather(-1, ids_BT[:, 1:, None])[..., 0]
    back = [row.roll(-int(len(row) - n)) for row, n in zip(found_BT, batch.lengths_B, strict=True)]
    return PolicyOutput(torch.stack(back))


# --- 10: the KL that is pulled on is the KL that was meant


def check_kl_gradient(kl_loss):
    """Bug 10. Over five tokens drawn from the old policy, the expected gradient is that of
    KL(π‖π_ref).
    """
    generator = torch.Generator().manual_seed(0)
    theta, shift, ref = (torch.randn(5, generator=generator, dtype=torch.float64) for _ in range(3))
    theta.requires_grad_()
    ref_V = ref.log_softmax(0)
    for old_V in (theta.detach().log_softmax(0), (theta.detach() + shift).log_softmax(0)):
        logprobs_V = theta.log_softmax(0)
        exact = torch.autograd.grad((logprobs_V.exp() * (logprobs_V - ref_V)).sum(), theta)[0]
        logprobs_V = theta.log_softmax(0)
        found = torch.autograd.grad((old_V.exp() * kl_loss(logprobs_V, old_V, ref_V)).sum(), theta)[
            0
        ]
        assert exact.norm() > 0.1
        assert (found - exact).abs().max() < 1e-8


def real_kl(logprobs_V, old_V, ref_V):
    """`kl_penalty` on one row."""
    batch = replace(Golden.batch(), old_logprobs_BT=old_V[None], ref_logprobs_BT=ref_V[None])
    return kl_penalty(PolicyOutput(logprobs_V[None]), batch, kl_coef=1.0)[0]


def naive_k1(logprobs, _, ref):
    return kl_k1(logprobs, ref)


def naive_k2(logprobs, _, ref):
    return kl_k2(logprobs, ref)


def naive_k3(logprobs, _, ref):
    return kl_k3(logprobs, ref)


def k3_with_detached_ratio(logprobs, old, ref):
    return (logprobs - old).exp().detach() * kl_k3(logprobs, ref)


# --- the table

CASES = [
    (
        check_masked_values_do_not_matter,
        [real_loss, replace(real_loss, aggregate=by_token), replace(real_loss, aggregate=by_five)],
        [loss_multiplies_by_mask, loss_selects_after_arithmetic, loss_ignores_the_mask],
    ),
    (
        check_denominator_counts_what_the_numerator_sums,
        [by_token, by_episode, by_five],
        [mean_over_all_tokens],
    ),
    (
        check_micro_batches_add_up,
        [real_loss, replace(real_loss, aggregate=by_token), replace(real_loss, aggregate=by_five)],
        [loss_divides_by_its_own_tokens, loss_divides_by_its_own_width],
    ),
    (check_split_keeps_denominators, [TokenBatch.split], [split_counts_for_itself]),
    (
        check_regularisers_have_the_unit_of_the_advantage,
        [real_loss, replace(real_loss, aggregate=by_token)],
        [loss_sums_its_kl, loss_clips_in_units_of_the_batch],
    ),
    (
        check_scorer_agrees_with_the_sampler,
        [token_logprobs],
        [score_without_temperature, score_from_own_position, score_left_padded_without_positions],
    ),
    (check_kl_gradient, [real_kl], [naive_k1, naive_k2, naive_k3, k3_with_detached_ratio]),
]


def _id(value):
    aggregate = getattr(value, "aggregate", None)
    return f"PolicyLoss-{name_of(aggregate)}" if aggregate else name_of(value)


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

"""Wrong critics: values, their loss, what they learn from, and how well they explain it."""

from __future__ import annotations

import math
from dataclasses import replace
from functools import wraps

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from loss_mutants import check_masked_values_do_not_matter, check_micro_batches_add_up
from trainer_cases import batch_of, branch, episode, quick, tiny_model

from agentrl.trainers.algorithms.credit import gae
from agentrl.trainers.algorithms.losses import by_episode, keep
from agentrl.trainers.models.critic import (
    Moments,
    explained_variance,
    squared_error,
    value_loss,
    values,
)
from agentrl.trajectory import Group


def opinionated():
    """A critic whose weights are random, so that every token matters to it."""
    from transformers import AutoModelForTokenClassification

    config = tiny_model().config
    config.num_labels = 1
    torch.manual_seed(0)
    return AutoModelForTokenClassification.from_config(config).double().eval()


# --- a value belongs to the state in which the action is chosen


def check_a_value_knows_what_came_before_and_not_its_own_token(read):
    """V_t is the same whatever token t is, and another when the token before it is another."""
    critic, batch = opinionated(), batch_of(Group((episode(branch(2, (2, 2), (2, 0))),)))
    trained = batch.mask_BT[0].nonzero().flatten().tolist()
    known = read(critic, batch).detach()
    assert trained == [2, 3, 6, 7]
    for position in range(8):
        ids_BT = batch.ids_BT.clone()
        ids_BT[0, position] = 90
        moved = read(critic, replace(batch, ids_BT=ids_BT)).detach() != known
        assert [t for t in trained if moved[0, t]] == [t for t in trained if t > position]


def values_from_their_own_position(critic, batch):
    return keep(critic(input_ids=batch.ids_BT).logits[..., 0], batch.mask_BT)


def values_from_two_before(critic, batch):
    return keep(critic(input_ids=batch.ids_BT).logits[..., 0].roll(2, 1), batch.mask_BT)


def one_value_for_a_turn(critic, batch):
    """The value at the end of each turn, for all its tokens."""
    own_BT = values(critic, batch)
    turn_of = batch.turn_BT[0].tolist()
    lasts = [max(t for t, turn in enumerate(turn_of) if turn == wanted) for wanted in turn_of]
    return keep(own_BT[:, lasts], batch.mask_BT)


# --- the loss

GOLDEN = (  # V, V_old, R, clip, loss, dloss/dV: by hand
    (1.0, 0.0, 2.0, 0.5, 1.125, 0.0),  # beyond the clip towards R: (0.5 - 2)²/2, no further push
    (1.0, 0.0, -1.0, 0.5, 2.0, 2.0),  # moved away from R: pulled back, however far it is
    (0.3, 0.0, 2.0, 0.5, 1.445, -1.7),  # within the clip: (0.3 - 2)²/2
    (-1.0, 0.0, -2.0, 0.5, 1.125, 0.0),  # the same, downwards
    (1.0, 0.0, 0.6, 0.5, 0.08, 0.4),  # moved past R: (1 - 0.6)²/2, pulled back
    (1.0, 0.0, 2.0, math.inf, 0.5, -1.0),  # no clip: (1 - 2)²/2
)


def check_loss_by_hand(error):
    for *numbers, clip, loss, slope in GOLDEN:
        value, old, wanted = torch.tensor(numbers, dtype=torch.float64)[:, None]
        value.requires_grad_()
        found = error(value, old, wanted, clip)
        assert found.item() == pytest.approx(loss, abs=1e-12)
        assert torch.autograd.grad(found.sum(), value)[0].item() == pytest.approx(slope, abs=1e-12)


def clipped_on_the_wrong_side(values_BT, old_BT, returns_BT, value_clip):
    """The smaller error counts: what has moved the wrong way is not pulled back."""
    near_BT = values_BT.clamp(old_BT - value_clip, old_BT + value_clip)
    return torch.minimum((values_BT - returns_BT).square(), (near_BT - returns_BT).square()) / 2


def only_the_clipped_value(values_BT, old_BT, returns_BT, value_clip):
    return (values_BT.clamp(old_BT - value_clip, old_BT + value_clip) - returns_BT).square() / 2


def clipped_around_the_return(values_BT, old_BT, returns_BT, value_clip):
    near_BT = values_BT.clamp(returns_BT - value_clip, returns_BT + value_clip)
    return torch.maximum((values_BT - returns_BT).square(), (near_BT - returns_BT).square()) / 2


def without_the_half(values_BT, old_BT, returns_BT, value_clip):
    return 2 * squared_error(values_BT, old_BT, returns_BT, value_clip)


def of_values(loss):
    """A loss of values, called as a loss of the policy: its log-probabilities are the values."""

    @wraps(loss)
    def judged(output, batch):
        return loss(output.logprobs_BT, batch)

    return judged


def loss_multiplies_by_mask(values_BT, batch):
    error_BT = squared_error(values_BT, batch.values_BT, batch.returns_BT, 0.5)
    return (error_BT * batch.mask_BT).sum() / batch.n_tokens, {}


def loss_over_all_tokens(values_BT, batch):
    everywhere = replace(batch, mask_BT=batch.attention_BT, n_tokens=int(batch.attention_BT.sum()))
    return value_loss(values_BT, everywhere)


def value_loss_by_episode(values_BT, batch):
    return value_loss(values_BT, batch, value_clip=0.2, aggregate=by_episode)


def loss_divides_by_its_own_tokens(values_BT, batch):
    return value_loss(values_BT, replace(batch, n_tokens=int(batch.mask_BT.sum())))


def loss_divides_by_its_own_rows(values_BT, batch):
    return value_loss(values_BT, replace(batch, n_episodes=len(batch)), aggregate=by_episode)


# --- what is learnt: returns over trained tokens


def check_returns_are_over_trained_tokens(credit):
    """What tools say takes no time: with them or without, with whatever values there, the returns
    are the same.

    The outcome arrives although the row is padded, and so does a process reward on a tool's answer
    or on padding.
    """
    spoken = Group(
        (
            episode(branch(2, (2, 3), (3, 2)), reward=1.0),
            episode(branch(2, (9, 0)), sample=1, reward=0.0),
        )
    )
    silent = Group(
        (
            episode(branch(2, (2, 0), (3, 0)), reward=1.0),
            episode(branch(2, (9, 0)), sample=1, reward=0.0),
        )
    )
    found = []
    for batch, places in ((batch_of(silent), (3, 6)), (batch_of(spoken), (5, 10))):
        values_BT = torch.full(batch.mask_BT.shape, math.nan, dtype=torch.float64)
        values_BT[batch.mask_BT] = torch.linspace(-0.3, 0.9, batch.n_tokens, dtype=torch.float64)
        rewards_BT = torch.zeros_like(values_BT)
        for place, reward in zip(
            places, (0.5, 0.25), strict=True
        ):  # on a tool's answer, and behind the last token
            rewards_BT[0, place] = reward
        found.append(
            credit(replace(batch, values_BT=values_BT, rewards_BT=rewards_BT)).returns_BT[
                batch.mask_BT
            ]
        )
    assert found[0].isfinite().all()
    assert torch.allclose(found[0], found[1], atol=1e-12)
    assert found[0][4].item() == pytest.approx(1.25)


def with_steps(batch, mask_BT):
    """GAE with these positions as its steps."""
    known = replace(batch, values_BT=keep(batch.values_BT, batch.mask_BT), mask_BT=mask_BT)
    return replace(gae(known, gamma=0.9, lam=0.8), mask_BT=batch.mask_BT)


def real_credit(batch):
    return gae(batch, gamma=0.9, lam=0.8)


def observations_are_steps(batch):
    return with_steps(batch, batch.attention_BT & (batch.mask_BT.cumsum(1) > 0))


def rewards_at_mask_0_are_lost(batch):
    return real_credit(replace(batch, rewards_BT=keep(batch.rewards_BT, batch.mask_BT)))


def returns_without_values(batch):
    found = real_credit(batch)
    return replace(found, returns_BT=found.advantages_BT)


def values_are_read_everywhere(batch):
    return replace(
        real_credit(batch), returns_BT=real_credit(batch).advantages_BT + batch.values_BT.cumsum(1)
    )


# --- explained variance


def check_moments_join_to_those_of_all(join):
    """Explained variance is over all tokens of the step, in however many parts, far from 0 too."""

    @quick
    @given(
        st.lists(st.integers(1, 6), min_size=2, max_size=5),
        st.integers(0, 99),
        st.sampled_from([0.0, 1e3]),
    )
    def cut(sizes, seed, far):
        returns_N, errors_N = torch.randn(
            2, sum(sizes), generator=torch.Generator().manual_seed(seed)
        ).double()
        parts = [
            [Moments.of(part) for part in torch.split(x, sizes)]
            for x in (returns_N + far, errors_N)
        ]
        expected = 1 - errors_N.var() / returns_N.var()
        assert explained_variance(*map(join, parts)) == pytest.approx(
            float(expected), rel=1e-6, abs=1e-6
        )

    cut()


def joined(parts):
    total = Moments()
    for part in parts:
        total = total.join(part)
    return total


def spreads_of_parts_are_summed(parts):
    whole = joined(parts)
    return replace(whole, spread=sum(part.spread for part in parts))


def squares_are_summed_in_float32(parts):
    whole = joined(parts)
    squares = torch.tensor(sum(part.spread + part.count * part.mean**2 for part in parts)).float()
    return replace(
        whole, spread=float(squares - whole.count * torch.tensor(whole.mean).float() ** 2)
    )


# --- the table

CASES = [
    (
        check_a_value_knows_what_came_before_and_not_its_own_token,
        [values],
        [values_from_their_own_position, values_from_two_before, one_value_for_a_turn],
    ),
    (
        check_loss_by_hand,
        [squared_error],
        [
            clipped_on_the_wrong_side,
            only_the_clipped_value,
            clipped_around_the_return,
            without_the_half,
        ],
    ),
    (
        check_masked_values_do_not_matter,
        [of_values(value_loss)],
        [of_values(loss_multiplies_by_mask), of_values(loss_over_all_tokens)],
    ),
    (
        check_micro_batches_add_up,
        [of_values(value_loss), of_values(value_loss_by_episode)],
        [of_values(loss_divides_by_its_own_tokens), of_values(loss_divides_by_its_own_rows)],
    ),
    (
        check_returns_are_over_trained_tokens,
        [real_credit],
        [
            observations_are_steps,
            rewards_at_mask_0_are_lost,
            returns_without_values,
            values_are_read_everywhere,
        ],
    ),
    (
        check_moments_join_to_those_of_all,
        [joined],
        [spreads_of_parts_are_summed, squares_are_summed_in_float32],
    ),
]

"""Random batches, and whether two losses have one value and one gradient."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import pytest
import torch
from trainer_cases import Golden

from agentrl.trainers.algorithms.losses import PolicyLoss, by_constant, keep
from agentrl.trainers.batch import PolicyOutput

ROWS, WIDTH = 6, 9


SEEDS = pytest.mark.parametrize("seed", range(5))


def random_batch(seed, advantage="token", spread=0.3):
    """One row per episode, tool output inside, padding behind; old logprobs in [-3, -0.1]."""
    generator = torch.Generator().manual_seed(seed)
    lengths_B = torch.randint(1, WIDTH + 1, (ROWS,), generator=generator)
    inside_BT = torch.arange(WIDTH) < lengths_B[:, None]
    mask_BT = inside_BT & (torch.rand(ROWS, WIDTH, generator=generator) < 0.7)
    mask_BT[:, 0] = True
    old_BT = -0.1 - 2.9 * torch.rand(ROWS, WIDTH, generator=generator, dtype=torch.float64)
    moved_BT = spread * torch.randn(ROWS, WIDTH, generator=generator, dtype=torch.float64)
    advantages_BT = torch.randn(ROWS, WIDTH, generator=generator, dtype=torch.float64)
    batch = replace(
        Golden.batch(),
        ids_BT=torch.ones(ROWS, WIDTH, dtype=torch.int64),
        mask_BT=mask_BT,
        attention_BT=inside_BT,
        old_logprobs_BT=old_BT,
        advantages_BT=(
            advantages_BT if advantage == "token" else advantages_BT[:, :1].expand(ROWS, WIDTH)
        ),
        turn_BT=torch.zeros(ROWS, WIDTH, dtype=torch.int32),
        version_BT=torch.zeros(ROWS, WIDTH, dtype=torch.int32),
        episode_B=torch.arange(ROWS),
        tokens_E=mask_BT.sum(1),
        n_tokens=int(mask_BT.sum()),
        n_episodes=ROWS,
        ref_logprobs_BT=None,
    )
    return batch, (old_BT + moved_BT).clamp(max=-0.01).requires_grad_()


def ours(surrogate, aggregate):
    loss = PolicyLoss(surrogate, aggregate)
    return lambda batch, logprobs_BT: loss(PolicyOutput(logprobs_BT), batch)[0]


def value_and_gradient(loss, batch, logprobs_BT):
    value = loss(batch, logprobs_BT)
    return value.detach(), keep(torch.autograd.grad(value, logprobs_BT)[0], batch.mask_BT)


def agree(first, second, batch, logprobs_BT):
    found, expected = (value_and_gradient(one, batch, logprobs_BT) for one in (first, second))
    return all(
        torch.allclose(a, b, rtol=0, atol=1e-6) for a, b in zip(found, expected, strict=True)
    )


CONSTANT = partial(by_constant, norm_tokens=WIDTH)


def in_two(batch, logprobs_BT):
    """The first half of the episodes and the second, with the denominators of the whole."""
    for rows in (torch.arange(3), torch.arange(3, ROWS)):
        part = batch.rows(rows)
        yield part, logprobs_BT[rows, : part.ids_BT.shape[1]]

"""Whole recipes under test: rounds of made-up episodes, and the path from `pack` to the gradient of
the loss.

What a critic, a reference or the policy says of a token depends on its id alone, and every trained
token has an id of its own. So the gradient in the table of what the policy says of each id can be
compared between any two batches.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, fields, replace

import pytest
import torch
from hypothesis import strategies as st
from torch import Tensor
from trainer_cases import PAD, episode

from agentrl.trainers.algorithms.advantages import with_greedy_rewards
from agentrl.trainers.algorithms.losses import add_metrics
from agentrl.trainers.algorithms.recipe import Recipe
from agentrl.trainers.algorithms.recipes import RECIPES, recipe
from agentrl.trainers.batch import PolicyOutput, TokenBatch, pack
from agentrl.trajectory import Group, Segment, Trajectory
from agentrl.types import EndReason, Score

VOCABULARY, VERSION = 700, 5
Change = Callable[[TokenBatch], TokenBatch]


def paid(name: str, **settings) -> Recipe:
    """The recipe with process rewards, without which a test of credit would be about one number per
    episode.
    """
    return replace(recipe(name, **settings), turn_weights={"step": 0.5})


ROWS: dict[str, Recipe] = {name: paid(name) for name in RECIPES}
ADDED: dict[str, Recipe] = {
    f"{name}-{'-'.join(options)}": paid(name, **options)
    for name, options in (
        ("grpo", {"kl_coef": 0.1}),
        ("dr_grpo", {"entropy_coef": 0.05}),
        ("reinforce++", {"kl_reward_coef": 0.2, "gamma": 0.9}),
        ("gspo", {"clip_low": 0.1, "clip_high": 0.1, "tis_high": 1.1, "tis_level": "sequence"}),
        ("cispo", {"entropy_share": 0.3}),
        ("dapo", {"drop_truncated": True}),
        ("luspo", {"reject_high": 1.02, "off_policy_limit": 0.01, "aggregate": "constant"}),
        ("rloo", {"stale_decay": 0.5, "max_age": 1.0}),
        ("ppo", {"mis_high": 1.1, "gamma": 0.9, "lam": 0.7}),
        ("mgpo", {"negative_weight": 0.5, "entropy_alpha": 0.3}),
        ("clip_cov", {"cov_share": 0.3, "cov_low": 0.01}),
        ("kl_cov", {"kl_cov_share": 0.3, "kl_coef": 0.1}),
        ("vapo", {"length_alpha": 0.5, "value_lam": 0.7, "imitate_coef": 0.3}),
        ("gdpo", {"part_weights": {"a": 1.0, "b": 0.5}}),
        ("opo", {"load_balance_coef": 0.1}),
        ("dppo", {"surrogate": "dppo_topk_kl"}),
        ("grpo", {"surrogate": "ppo_dual_clip", "dual_clip": 2.0}),
        ("distill", {"teacher_gamma": 0.5, "gkd_coef": 0.3, "gkd_beta": 0.5}),
        ("grpo", {"teacher_coef": 0.2}),
        ("gigpo", {"surrogate": "gspo_token", "aggregate": "episode_sum"}),
    )
}
CASES = ROWS | ADDED

# --- rounds

Turns = Sequence[tuple[int, int]]
Round = Sequence[Sequence[tuple[Turns, float | None, bool]]]
"""For each group the episodes: turns of (sampled, observed) tokens, outcome, and whether a limit
ended it.
"""

SIGNAL = (
    ([(3, 1), (2, 2)], 1.0, False),
    ([(2, 1), (1, 0), (2, 1)], 0.0, False),
    ([(1, 2), (1, 1)], 0.25, True),
    ([(4, 0)], 0.0, True),
)
"""A group that every recipe learns from; every round begins with it."""

turns = st.lists(st.tuples(st.integers(1, 3), st.integers(0, 2)), min_size=1, max_size=3)
played = st.tuples(turns, st.sampled_from([0.0, 0.25, 1.0, None]), st.booleans())
rounds = st.lists(st.lists(played, min_size=1, max_size=3), max_size=2).map(
    lambda more: [SIGNAL, *more]
)
cut_episodes = st.sets(st.tuples(st.integers(0, 2), st.integers(0, 3)), max_size=6).map(
    lambda more: {(0, 0), *more}
)


def groups_of(drawn: Round, cuts=frozenset(), told=(0, 0, 0)) -> list[Group]:
    """The groups of a round.

    Args:
        cuts: (group, sample) of episodes that come as a branch and a fork of it, where they have
            two turns.
        told: how many more tokens the opening and every observation of a group have.
    """
    fresh = itertools.count(10)
    return [
        Group(
            tuple(
                _episode((g, s), play, fresh, told[g], (g, s) in cuts)
                for s, play in enumerate(group)
            )
        )
        for g, group in enumerate(drawn)
    ]


def _episode(place, play, fresh, told, cut):
    (g, s), (shape, reward, truncated) = place, play
    segments = [Segment.prompt((600 + g, 610, *[620] * told))]
    for turn, (sampled, observed) in enumerate(shape):
        ids = list(itertools.islice(fresh, sampled))
        segments.append(
            Segment.sampled(ids, _said(torch.tensor(ids)).tolist(), 3 + turn % 3, "stop")
        )
        if observed:
            segments.append(Segment.observation((630 + turn % 2,) * observed + (620,) * told))
    branches = [Trajectory(tuple(segments))]
    if cut and len(shape) > 1:
        begin = 3 if shape[0][1] else 2
        first = Trajectory(tuple(segments[:begin]))
        branches = [first, first.fork().extend(*segments[begin:])]
    end = EndReason.MAX_TURNS if truncated else EndReason.SUBMITTED
    made = episode(*branches, reward=reward, task=f"t{g}", sample=s, end=end)
    if reward is None:
        return made
    steps = tuple(0.25 * ((g + 2 * s + 3 * turn) % 4) for turn in range(len(shape)))
    return replace(
        made, score=Score(reward, {"a": reward, "b": float(s % 2)}, turns={"step": steps})
    )


def _said(ids: Tensor) -> Tensor:
    """What the sampler's policy said of a token."""
    return -1.2 - (1.7 * ids.double()).sin()


# --- the path


def filled(batch: TokenBatch, groups: Sequence[Group], needs) -> TokenBatch:
    """The batch with what a run computes for these needs, and nothing else, in float64."""
    ids_BT, old_BT = batch.ids_BT.double(), batch.old_logprobs_BT.double()
    filled = replace(batch, old_logprobs_BT=old_BT, advantages_BT=batch.advantages_BT.double())
    if "reference" in needs:
        filled = replace(filled, ref_logprobs_BT=old_BT - 0.3 * (2.1 * ids_BT).sin())
    if "proximal" in needs:
        filled = replace(filled, proximal_logprobs_BT=old_BT + 0.2 * (1.3 * ids_BT).sin())
    if needs & {"proximal", "entropy"}:
        filled = replace(filled, entropy_BT=1 + ids_BT.cos())
    if "teacher" in needs:
        filled = replace(filled, teacher_logprobs_BT=old_BT + 0.4 * (1.1 * ids_BT).sin())
    if "critic" in needs:
        filled = replace(filled, values_BT=(1.9 * ids_BT).sin())
    if "greedy" in needs:
        filled = with_greedy_rewards(
            filled, [0.5 - 0.25 * (group.task.id == "t0") for group in groups]
        )
    if "anchor_top" in needs:
        top_ids_BTK = torch.stack((batch.ids_BT, batch.ids_BT + 1), -1)
        filled = replace(filled, top_ids_BTK=top_ids_BTK, top_logprobs_BTK=_said(top_ids_BTK) - 1)
    if "teacher_top" in needs:
        top_BTK = _said(torch.stack((batch.ids_BT, batch.ids_BT + 1), -1)) - 1
        filled = replace(filled, teacher_top_logprobs_BTK=top_BTK)
    return filled


def made_up(parts: Iterable[str]) -> tuple[TokenBatch, PolicyOutput]:
    """A batch and an output with every field filled: two episodes of one group, one won and one
    lost, two trained tokens each.

    Args:
        parts: names of score terms that both episodes have.
    """
    numbers_BT, ids_BT = torch.full((2, 3), -0.7), torch.ones(2, 3, dtype=torch.int64)
    top_BTK, reward_E = (
        numbers_BT[..., None].expand(2, 3, 2),
        torch.tensor([0.0, 1.0], dtype=torch.float64),
    )
    turn_BT = torch.tensor([[-1, 0, 0]] * 2, dtype=torch.int32)
    batch = TokenBatch(
        ids_BT=ids_BT,
        mask_BT=turn_BT >= 0,
        attention_BT=ids_BT > 0,
        old_logprobs_BT=numbers_BT,
        advantages_BT=torch.full_like(numbers_BT, torch.nan),
        turn_BT=turn_BT,
        version_BT=turn_BT,
        episode_B=torch.arange(2),
        group_E=torch.zeros(2, dtype=torch.int64),
        reward_E=reward_E,
        truncated_E=torch.zeros(2, dtype=torch.bool),
        tokens_E=torch.tensor([2, 2]),
        n_tokens=4,
        n_episodes=2,
        version=0,
        parts_E=dict.fromkeys(parts, reward_E),
        rewards_BT=torch.zeros(2, 3, dtype=torch.float64),
        state_BT=ids_BT,
        proximal_logprobs_BT=numbers_BT,
        ref_logprobs_BT=numbers_BT,
        entropy_BT=-numbers_BT,
        values_BT=numbers_BT,
        top_ids_BTK=torch.stack((ids_BT, ids_BT + 1), -1),
        top_logprobs_BTK=top_BTK,
        teacher_logprobs_BT=numbers_BT,
        teacher_top_logprobs_BTK=top_BTK,
        greedy_reward_E=torch.zeros_like(reward_E),
        passed_E=reward_E > 0,
        signal_E=torch.ones(2, dtype=torch.bool),
    )
    return batch, PolicyOutput(numbers_BT, -numbers_BT, top_BTK, router_loss=torch.tensor(1.0))


def policy() -> Tensor:
    """What the policy says of each id (V, 4), as a leaf: log-probability, entropy, two likeliest
    tokens.
    """
    noise_V4 = torch.randn(
        (VOCABULARY, 4), generator=torch.Generator().manual_seed(1), dtype=torch.float64
    )
    base_V4 = torch.stack(
        (_said(torch.arange(VOCABULARY)), *torch.tensor([[1.5], [-1.0], [-1.7]]).expand(3, 700)), 1
    )
    return (base_V4 + 0.35 * noise_V4).requires_grad_()


@dataclass(frozen=True, eq=False)
class Learnt:
    """What an optimizer step learns: loss, metrics, gradient in the policy's table; advantage and
    weight of each id.
    """

    loss: float
    metrics: dict[str, float]
    gradient_V4: Tensor
    advantages_V: Tensor
    weights_V: Tensor
    outside_BT: Tensor
    """The gradient at what stands where nothing was sampled."""


def credited(
    row: Recipe, groups: Sequence[Group], change: Change = lambda batch: batch
) -> TokenBatch:
    """A round up to its advantages."""
    batch = pack(groups, PAD, rewards=row.rewards, version=VERSION)
    return row.advantage(change(filled(batch, groups, row.needs)))


def learnt(
    row: Recipe, batch: TokenBatch, parts: Sequence[Tensor] | None = None, garbage: float = 0.0
) -> Learnt:
    """One optimizer step from advantages to gradient, its rows in these micro-batches (default: all
    in one).
    """
    batch, table_V4, history = row.correct(batch), policy(), []
    outside_BT4 = torch.full(
        (*batch.mask_BT.shape, 4), garbage, dtype=torch.float64, requires_grad=True
    )
    total = torch.zeros((), dtype=torch.float64)
    for index in [torch.arange(len(batch))] if parts is None else parts:
        micro = spoilt(batch.rows(index), garbage)
        width = micro.mask_BT.shape[1]
        found_BT4 = torch.where(
            micro.mask_BT[..., None], table_V4[micro.ids_BT], outside_BT4[index, :width]
        )
        loss, metrics = row.loss(output_of(row, found_BT4), micro)
        total = total + loss
        history.append(metrics)
    gradient_V4, outside_BT4 = torch.autograd.grad(total, (table_V4, outside_BT4))
    weights_BT = (
        torch.ones_like(batch.advantages_BT) if batch.weights_BT is None else batch.weights_BT
    )
    by_id = (_by_id(batch, values_BT) for values_BT in (batch.advantages_BT, weights_BT))
    return Learnt(
        float(total.detach()),
        add_metrics(history),
        gradient_V4,
        *by_id,
        outside_BT4[~batch.mask_BT],
    )


def output_of(row: Recipe, found_BT4: Tensor) -> PolicyOutput:
    """What `score` gives: entropy always, with gradient where it is asked for; the likeliest tokens
    where asked for.
    """
    entropy_BT = (
        found_BT4[..., 1] if "entropy_gradient" in row.needs else found_BT4[..., 1].detach()
    )
    top_BTK = found_BT4[..., 2:] if row.needs & {"top", "anchor_top", "teacher_top"} else None
    router_loss = torch.tensor(1.7) if "router" in row.needs else None
    return PolicyOutput(found_BT4[..., 0], entropy_BT, top_BTK, router_loss=router_loss)


def _by_id(batch: TokenBatch, values_BT: Tensor) -> Tensor:
    """Values at the trained tokens, by token id; what is not trained has 0."""
    found_V = torch.zeros(VOCABULARY, dtype=torch.float64)
    found_V[batch.ids_BT[batch.mask_BT]] = values_BT[batch.mask_BT].double()
    return found_V


def assert_same(found: Learnt, expected: Learnt) -> None:
    """Advantages, weights, loss, metrics and gradient are the same, and nothing outside the mask
    has a gradient.
    """
    assert torch.allclose(found.advantages_V, expected.advantages_V, atol=1e-9)
    assert torch.allclose(found.weights_V, expected.weights_V, atol=1e-9)
    assert found.loss == pytest.approx(expected.loss, abs=1e-9)
    assert found.metrics == pytest.approx(expected.metrics, abs=1e-9)
    assert torch.allclose(found.gradient_V4, expected.gradient_V4, atol=1e-9)
    assert (found.outside_BT == 0).all()


def row_fields(batch: TokenBatch) -> dict[str, Tensor]:
    """What has a value for every token."""
    there = {one.name: getattr(batch, one.name) for one in fields(batch) if "_BT" in one.name}
    return {name: tensor for name, tensor in there.items() if tensor is not None}


def spoilt(batch: TokenBatch, garbage: float) -> TokenBatch:
    """The batch with garbage at mask 0 of every real field, but not among process rewards: one of a
    tool's counts.
    """
    real = {
        name: full
        for name, full in row_fields(batch).items()
        if full.is_floating_point() and name != "rewards_BT"
    }
    masks = {
        name: batch.mask_BT if full.dim() == 2 else batch.mask_BT[..., None]
        for name, full in real.items()
    }
    return replace(
        batch, **{name: torch.where(masks[name], full, garbage) for name, full in real.items()}
    )


def with_columns(batch: TokenBatch, at: int, count: int) -> TokenBatch:
    """The batch with `count` masked columns in front of column `at`."""
    fills = {"mask_BT": False, "attention_BT": True, "rewards_BT": 0.0}
    changed = {}
    for name, full in row_fields(batch).items():
        block = torch.full(
            (len(batch), count, *full.shape[2:]), fills.get(name, -1), dtype=full.dtype
        )
        changed[name] = torch.cat((full[:, :at], block, full[:, at:]), 1)
    return replace(batch, **changed)


def paid_late(batch: TokenBatch) -> TokenBatch:
    """The batch whose rows end on an observation, which has the process rewards of the last trained
    token.
    """
    longer = with_columns(batch, batch.mask_BT.shape[1], 1)
    longer = replace(longer, attention_BT=torch.ones_like(longer.attention_BT))  # up to that token
    rows, columns = torch.arange(len(longer)), torch.arange(longer.mask_BT.shape[1])
    last_B = torch.where(longer.mask_BT, columns, -1).amax(1)
    rewards_BT = longer.rewards_BT.clone()
    rewards_BT[:, -1] = rewards_BT[rows, last_B]
    rewards_BT[rows, last_B] = 0
    return replace(longer, rewards_BT=rewards_BT)

"""Batches with everything that credit reads, ways to change them that must not matter, and a policy
that may stop.
"""

from __future__ import annotations

from dataclasses import fields, replace
from functools import partial

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from trainer_cases import PAD, TwoSteps, branch, episode, quick

from agentrl.trainers.algorithms.advantages import (
    dr_grpo,
    gdpo,
    grpo,
    maxrl,
    mgpo,
    opo,
    over_groups,
    pass_at_k,
    reinforce,
    remax,
    rloo,
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
    vtrace,
    whiten,
)
from agentrl.trainers.algorithms.losses import by_token
from agentrl.trainers.batch import TokenBatch, pack
from agentrl.trajectory import Group, Trajectory

few = settings(quick, max_examples=12)


def chain(*steps):
    def chained(batch):
        for step in steps:
            batch = step(batch)
        return batch

    return chained


STEPS = {
    "grpo": over_groups(grpo),
    "dr_grpo": over_groups(dr_grpo),
    "rloo": over_groups(rloo),
    "maxrl": over_groups(maxrl),
    "mgpo": over_groups(mgpo),
    "pass_at_k": over_groups(pass_at_k),
    "opo": opo,
    "reinforce": reinforce,
    "remax": remax,
    "gdpo": gdpo,
    "reward_to_go": partial(reward_to_go, gamma=0.9),
    "reinforce_plus_plus": chain(reward_to_go, whiten),
    "reinforce_plus_plus_baseline": chain(over_groups(dr_grpo), whiten),
    "gae": partial(gae, gamma=0.9, lam=0.8),
    "length_adaptive_gae": partial(length_adaptive_gae, gamma=0.9, length_alpha=0.3, value_lam=0.7),
    "optimal_baseline": optimal_baseline,
    "turn_gae": partial(turn_gae, gamma=0.9, lam=0.8),
    "vtrace": partial(vtrace, gamma=0.9, lam=0.8),
    "turn_level": partial(turn_level, gamma=0.9),
    "gigpo": gigpo,
    "kl_in_reward": chain(
        partial(kl_in_reward, kl_reward_coef=0.1), partial(reward_to_go, gamma=0.9)
    ),
    "kl_in_group_reward": chain(partial(kl_in_reward, kl_reward_coef=0.1), over_groups(rloo)),
    "entropy_shaped": chain(over_groups(grpo), entropy_shaped),
}

turns = st.lists(st.tuples(st.integers(1, 4), st.integers(1, 3)), min_size=1, max_size=4)
played = st.tuples(turns, st.sampled_from([0.0, 0.25, 1.0]))
rounds = st.lists(st.lists(played, min_size=1, max_size=4), min_size=1, max_size=3)


def packed(drawn, cuts=()) -> TokenBatch:
    """A batch of drawn groups; an episode whose (group, sample) is in `cuts` comes in two rows if
    it has two turns.
    """
    groups = []
    for g, group in enumerate(drawn):
        episodes = []
        for s, (shape, reward) in enumerate(group):
            whole = branch(2, *shape, first_id=10 + 100 * (7 * g + s))
            branches = [whole]
            if (g, s) in cuts and len(shape) > 1:
                first = Trajectory(whole.segments[:3])
                branches = [first, first.fork().extend(*whole.segments[3:])]
            episodes.append(episode(*branches, reward=reward, task=f"t{g}", sample=s))
        groups.append(Group(tuple(episodes)))
    return furnished(pack(groups, PAD))


def furnished(batch: TokenBatch) -> TokenBatch:
    """In float64, with process rewards, values and all else that depends on a token's id alone, not
    on its place.
    """
    ids_BT, mask_BT = batch.ids_BT.double(), batch.mask_BT
    episodes = torch.arange(len(batch.reward_E)).double()
    parts = {"a": batch.reward_E, "b": (3 * episodes).sin().round()}
    return replace(
        batch,
        old_logprobs_BT=batch.old_logprobs_BT.double(),
        advantages_BT=batch.advantages_BT.double(),
        rewards_BT=torch.where(mask_BT & (batch.ids_BT % 3 == 0), ids_BT.sin().square(), 0.0),
        values_BT=(1.7 * ids_BT).sin(),
        entropy_BT=1 + ids_BT.cos(),
        ref_logprobs_BT=batch.old_logprobs_BT.double() - 0.3 * (2.1 * ids_BT).sin(),
        proximal_logprobs_BT=batch.old_logprobs_BT.double() + 0.4 * (1.3 * ids_BT).sin(),
        greedy_reward_E=torch.where(batch.group_E % 2 == 0, 0.5, 0.25).double(),
        state_BT=torch.where(mask_BT, batch.turn_BT.long() % 2, -1),
        parts_E=parts,
    )


def row_fields(batch: TokenBatch) -> dict[str, torch.Tensor]:
    there = {
        one.name: getattr(batch, one.name) for one in fields(batch) if one.name.endswith("_BT")
    }
    return {name: tensor for name, tensor in there.items() if tensor is not None}


def with_columns(batch: TokenBatch, at: int, count: int) -> TokenBatch:
    """The batch with `count` masked columns in front of column `at`, full of garbage but without
    rewards.
    """
    changed = {}
    for name, tensor in row_fields(batch).items():
        fill = {"mask_BT": False, "attention_BT": True, "rewards_BT": 0.0, "turn_BT": -1}.get(
            name, 7
        )
        fill = torch.nan if tensor.is_floating_point() and name != "rewards_BT" else fill
        block = torch.full((len(batch), count), fill, dtype=tensor.dtype)
        changed[name] = torch.cat((tensor[:, :at], block, tensor[:, at:]), 1)
    return replace(batch, **changed)


def paid_late(batch: TokenBatch) -> TokenBatch:
    """The batch with a masked column at the end, where all rewards of each row's last trained token
    have gone.
    """
    longer = with_columns(batch, batch.mask_BT.shape[1], 1)
    rows = torch.arange(len(longer))
    columns = torch.arange(longer.mask_BT.shape[1])
    last_B = torch.where(longer.mask_BT, columns, -1).amax(1)
    rewards_BT = longer.rewards_BT.clone()
    rewards_BT[:, -1] = rewards_BT[rows, last_B]
    rewards_BT[rows, last_B] = 0
    return replace(longer, rewards_BT=rewards_BT)


def per_episode(batch: TokenBatch, values_BT: torch.Tensor) -> list[list[float]]:
    """Values at the trained tokens of each episode, its rows one after another."""
    found: list[list[float]] = [[] for _ in batch.reward_E]
    for row, owner in enumerate(batch.episode_B.tolist()):
        found[owner] += values_BT[row][batch.mask_BT[row]].tolist()
    return found


def assert_same(step, batch: TokenBatch, other: TokenBatch) -> None:
    """Every trained token has the same advantage and return in both; other tokens have 0."""
    for field in ("advantages_BT", "returns_BT"):
        here, there = (getattr(step(one), field) for one in (batch, other))
        if here is None:
            assert there is None
            continue
        found, expected = per_episode(other, there), per_episode(batch, here)
        assert [len(one) for one in found] == [len(one) for one in expected]
        for one, two in zip(found, expected, strict=True):
            assert one == pytest.approx(two, abs=1e-9)
        assert (there[~other.mask_BT] == 0).all()


def check_masked_tokens_change_nothing(step):
    """Bugs 2 and 5. Tokens at mask 0, wherever they stand and whatever values they have."""

    @few
    @given(rounds, st.lists(st.tuples(st.floats(0, 1), st.integers(1, 3)), min_size=1, max_size=3))
    def unchanged(drawn, inserts):
        batch = longer = packed(drawn)
        for share, count in inserts:
            longer = with_columns(longer, round(share * longer.mask_BT.shape[1]), count)
        assert_same(step, batch, longer)

    unchanged()


def check_a_late_reward_is_not_lost(step):
    """Bug 3. A reward behind the last trained token of a row belongs to that token."""

    @few
    @given(rounds)
    def unchanged(drawn):
        batch = packed(drawn)
        assert_same(step, batch, paid_late(batch))

    unchanged()


def check_an_episode_in_two_rows_is_one_episode(step):
    """Bug 4. Neither statistics nor time begin anew where an episode goes on in another row."""

    @few
    @given(rounds, st.sets(st.tuples(st.integers(0, 2), st.integers(0, 3)), min_size=1))
    def unchanged(drawn, cuts):
        assert_same(step, packed(drawn), packed(drawn, cuts))

    unchanged()


def check_the_order_of_groups_does_not_matter(step):
    """Groups may finish in any order."""

    @few
    @given(st.lists(played, min_size=1, max_size=3), st.lists(played, min_size=1, max_size=3))
    def unchanged(first, second):
        batch = packed([first, second])
        order = torch.argsort(batch.group_E, descending=True, stable=True)
        moved = taken(batch, order)
        moved = replace(moved, group_E=batch.group_E[order])
        here, there = (per_episode(one, step(one).advantages_BT) for one in (batch, moved))
        for index, owner in enumerate(order.tolist()):
            assert there[index] == pytest.approx(here[owner], abs=1e-9)

    unchanged()


def check_micro_batches_add_up(step):
    """Bug 6. Credit is given before a round is cut: over any micro-batches, Σ A·x is that of the
    whole.
    """

    @few
    @given(rounds, st.integers(1, 60))
    def adds_up(drawn, micro_tokens):
        batch = step(packed(drawn))
        whole, *parts = (
            float(by_token(part.advantages_BT * part.ids_BT.double().sin(), part))
            for part in (batch, *batch.split(micro_tokens))
        )
        assert sum(parts) == pytest.approx(whole, abs=1e-12)

    adds_up()


CHECKS = (
    check_masked_tokens_change_nothing,
    check_a_late_reward_is_not_lost,
    check_an_episode_in_two_rows_is_one_episode,
    check_the_order_of_groups_does_not_matter,
    check_micro_batches_add_up,
)


def one_row(rewards, values=None, mask=None, outcome: float = 0.0, **changes) -> TokenBatch:
    """One episode in one row, a turn for each run of trained tokens."""
    rewards_BT = torch.tensor([rewards], dtype=torch.float64)
    mask_BT = torch.ones_like(rewards_BT).bool() if mask is None else torch.tensor([mask]).bool()
    begins = mask_BT & ~torch.cat((torch.zeros(1, 1).bool(), mask_BT[:, :-1]), 1)
    count = int(mask_BT.sum())
    batch = TokenBatch(
        ids_BT=torch.arange(len(rewards))[None],
        mask_BT=mask_BT,
        attention_BT=torch.ones_like(mask_BT),
        old_logprobs_BT=torch.zeros_like(rewards_BT),
        advantages_BT=torch.full_like(rewards_BT, torch.nan),
        turn_BT=torch.where(mask_BT, begins.cumsum(1) - 1, -1).int(),
        version_BT=torch.zeros_like(mask_BT).int(),
        episode_B=torch.zeros(1, dtype=torch.int64),
        group_E=torch.zeros(1, dtype=torch.int64),
        reward_E=torch.tensor([outcome], dtype=torch.float64),
        truncated_E=torch.zeros(1).bool(),
        tokens_E=torch.tensor([count]),
        n_tokens=count,
        n_episodes=1,
        rewards_BT=rewards_BT,
        values_BT=None if values is None else torch.tensor([values], dtype=torch.float64),
    )
    return replace(batch, **changes)


class Stopper(TwoSteps):
    """TwoSteps whose first token ends the episode when it is the last of the five: lengths differ,
    21 trajectories.

    With `narrow`, two of the five tokens are never drawn as the first or the second (7
    trajectories).
    """

    stop = 4

    def __init__(self, seed: int = 0, binary: bool = False, narrow: bool = False) -> None:
        super().__init__(seed)
        if narrow:
            with torch.no_grad():
                self.theta.view(6, 5)[:, 2:4] = -1e4
        self.rewards_K = (self.rewards_K > 0.5).double() if binary else self.rewards_K
        stops_K = self.actions_K2[:, 0] == self.stop
        self.rewards_K = torch.where(stops_K, self.rewards_K[stops_K][0], self.rewards_K)

    def groups(self, size: int):
        batch, logprobs_BT, probability_B = super().groups(size)
        actions_B2 = self.actions_K2[torch.cartesian_prod(*[torch.arange(25)] * size).flatten()]
        mask_BT = batch.mask_BT.clone()
        mask_BT[actions_B2[:, 0] == self.stop, 3] = False
        tokens_E = mask_BT.sum(1)
        state_B = actions_B2[:, 0]
        batch = replace(
            batch,
            mask_BT=mask_BT,
            tokens_E=tokens_E,
            n_tokens=int(tokens_E.sum()),
            turn_BT=torch.where(mask_BT, torch.tensor([-1, 0, -1, 1]), -1).int(),
            state_BT=torch.stack(
                [state_B.new_full((len(batch),), one) for one in (-1, 9, -1)] + [state_B], 1
            ),
        )
        drawn_B = probability_B > 0
        return taken(batch, drawn_B), logprobs_BT[drawn_B], probability_B[drawn_B]


def taken(batch: TokenBatch, rows_B: torch.Tensor) -> TokenBatch:
    """These rows, each an episode of its own, as a batch by itself."""
    changed = {
        name: value[rows_B]
        for name, value in vars(batch).items()
        if isinstance(value, torch.Tensor) and len(value)
    }
    parts = {name: part[rows_B] for name, part in batch.parts_E.items()}
    group_E = changed["group_E"].unique(return_inverse=True)[1]
    changed |= {"episode_B": torch.arange(len(group_E)), "group_E": group_E}
    return replace(batch, **changed, parts_E=parts)

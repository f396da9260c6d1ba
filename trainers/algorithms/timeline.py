"""One line of time per episode: its trained tokens in the order of its rows. Everything else is no
step.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from agentrl.trainers.batch import TokenBatch


@dataclass(frozen=True, eq=False)
class Timeline:
    """The N trained tokens of a batch, episode after episode, and the K turns they make up.

    Values at mask 0 are never read (except rewards), so observations take no time, and an
    episode has the same timeline in however many rows it came.

    Attributes:
        row_N, column_N: position of each token in the batch.
        episode_N: the episode it belongs to.
        turn_N: index of its turn, counted over the whole batch.
    """

    batch: TokenBatch
    row_N: Tensor
    column_N: Tensor
    episode_N: Tensor
    turn_N: Tensor

    @classmethod
    def of(cls, batch: TokenBatch) -> Timeline:
        """The timeline of a batch whose rows are in the order in which their episode opened them,
        as in `pack`.
        """
        row_N, column_N = torch.nonzero(batch.mask_BT, as_tuple=True)
        order_N = torch.argsort(batch.episode_B[row_N], stable=True)
        row_N, column_N = row_N[order_N], column_N[order_N]
        begins_N = torch.ones_like(row_N, dtype=torch.bool)
        turn_N = batch.turn_BT[row_N, column_N]
        begins_N[1:] = (row_N[1:] != row_N[:-1]) | (turn_N[1:] != turn_N[:-1])
        return cls(batch, row_N, column_N, batch.episode_B[row_N], begins_N.cumsum(0) - 1)

    def read(self, values_BT: Tensor) -> Tensor:
        """Values of shape (B, T) at the tokens of the line (N,), float64."""
        return values_BT[self.row_N, self.column_N].double()

    def write(self, values_N: Tensor) -> Tensor:
        """Values (N,) at their places (B, T), in the precision of the log-probabilities; 0 at mask
        0.
        """
        full_BT = torch.zeros_like(self.batch.old_logprobs_BT)
        full_BT[self.row_N, self.column_N] = values_N.to(full_BT)
        return full_BT

    @cached_property
    def last_N(self) -> Tensor:
        """True on the last token of each episode."""
        return _ends(self.episode_N)

    @cached_property
    def first_K(self) -> Tensor:
        """Index into the line of the first token of each turn."""
        return torch.nonzero(_ends(self.turn_N).roll(1)).flatten()

    @cached_property
    def episode_K(self) -> Tensor:
        """The episode of each turn."""
        return self.episode_N[self.first_K]

    @cached_property
    def last_K(self) -> Tensor:
        """True on the last turn of each episode."""
        return _ends(self.episode_K)

    @cached_property
    def position_K(self) -> Tensor:
        """How many turns of the episode came before."""
        return _positions(self.episode_K)

    @cached_property
    def rewards_N(self) -> Tensor:
        """Process rewards, and on the last token of each episode its outcome, float64.

        A process reward that stands on no trained token (a tool's answer, padding) belongs to the
        last trained token of its episode before it.

        Raises:
            ValueError: a reward stands before the episode's first trained token, where no action
                can have earned it.
        """
        batch = self.batch
        rewards_N = torch.where(self.last_N, batch.reward_E.double()[self.episode_N], 0.0)
        if batch.rewards_BT is None:
            return rewards_N
        row_R, column_R = torch.nonzero(batch.rewards_BT, as_tuple=True)
        owner_R = self._before_B[row_R] + batch.mask_BT.cumsum(1)[row_R, column_R] - 1
        earned_R = owner_R >= 0
        earned_R[earned_R.clone()] = (
            self.episode_N[owner_R[earned_R]] == batch.episode_B[row_R[earned_R]]
        )
        if not earned_R.all():
            raise ValueError(
                "rewards_BT has a reward before the first trained token; no action can have"
                " earned it"
            )
        return rewards_N.index_add(0, owner_R, batch.rewards_BT[row_R, column_R].double())

    @cached_property
    def rewards_K(self) -> Tensor:
        """The rewards of each turn: those of its tokens, and of what was observed after it."""
        return self.over_turns(self.rewards_N)

    def over_turns(self, values_N: Tensor) -> Tensor:
        """Sums over the tokens of each turn (K,)."""
        return torch.zeros(
            len(self.first_K), dtype=values_N.dtype, device=values_N.device
        ).index_add(0, self.turn_N, values_N)

    @cached_property
    def _before_B(self) -> Tensor:
        """How many tokens of the line come before each row's first one."""
        tokens_B = self.batch.mask_BT.sum(1)
        order_B = torch.argsort(self.batch.episode_B, stable=True)
        before_B = torch.empty_like(tokens_B)
        before_B[order_B] = tokens_B[order_B].cumsum(0) - tokens_B[order_B]
        return before_B


def _ends(label_S: Tensor) -> Tensor:
    """True where the next step has another label, and on the last step."""
    ends_S = torch.ones_like(label_S, dtype=torch.bool)
    ends_S[:-1] = label_S[1:] != label_S[:-1]
    return ends_S


def _positions(label_S: Tensor) -> Tensor:
    """How many steps in a row, up to here, have had the same label; from 0 up."""
    index_S = torch.arange(len(label_S), device=label_S.device)
    start_S = torch.where(_ends(label_S).roll(1), index_S, 0)
    return index_S - start_S.cummax(0).values if len(label_S) else index_S


def discounted(values_S: Tensor, decay_S: Tensor) -> Tensor:
    """D_s = values_s + decay_s · D_{s+1}, from the end, float64; a decay of 0 ends an episode.
    Linear in S.
    """
    carry, found = 0.0, list[float]()
    for value, decay in zip(reversed(values_S.tolist()), reversed(decay_S.tolist()), strict=True):
        carry = value + decay * carry
        found.append(carry)
    return torch.tensor(found[::-1], dtype=torch.float64, device=values_S.device)

"""Which rewards train, and whether those of a group say anything: signal, which is decided here
and nowhere else.

A group has signal where two of its scored episodes earned different rewards, of those that train:
outcomes with shaping, clipped as the recipe says, and process rewards with their weights. It is
read off the rewards before any credit, so that what centres over the round, or prices tokens by
their KL, can neither make signal nor hide it. Play (refill), `filter_groups`, the metrics and the
count of quiet rounds all ask `Rewards`.

Why equal rewards: a form that compares siblings then gives every advantage 0 (DAPO,
https://arxiv.org/abs/2503.14476, section 3.2). What the other forms make of such a group stands in
docs/trainers.md, section Signal.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from agentrl.errors import UserError
from agentrl.trajectory import Episode, Group, turn_rewards
from agentrl.types import Ending, EndReason


@dataclass(frozen=True)
class Rewards:
    """The rewards that train under one recipe (`Recipe.rewards`).

    Attributes:
        turn_weights: of named process rewards (`Score.turns`), which only count where they are
            named here.
        by_turn: credit is given turn by turn, so that it matters when a process reward came;
            otherwise their sum counts.
        by_part: the named terms of the score train, in place of outcome and process rewards.
        part_weights: of these terms; empty weighs each 1.
        clip: outcomes are held to [-clip, clip].
        least: lowest reward that the credit can read.
        fewest: scored episodes without which a group says nothing.
        siblings: credit compares episodes of one task with each other, and with nothing else.
        taught: a teacher says something of every token, whatever was earned.
    """

    turn_weights: Mapping[str, float] = field(default_factory=dict)
    by_turn: bool = False
    by_part: bool = False
    part_weights: Mapping[str, float] = field(default_factory=dict)
    clip: float = math.inf
    least: float = -math.inf
    fewest: int = 2
    siblings: bool = True
    taught: bool = False

    def outcome(self, episode: Episode) -> float:
        """What the episode earned as a whole; only of one that was scored.

        No verifier said what an agent's fault is worth, so it is held to what the credit can read.
        """
        value = float(episode.score.value or 0.0)
        if episode.end is EndReason.AGENT_FAULT:
            value = max(value, self.least)
        return max(-self.clip, min(self.clip, value))

    def total(self, episode: Episode) -> float:
        """Outcome and process rewards."""
        return math.fsum((self.outcome(episode), *turn_rewards(episode, self.turn_weights)))

    def has_signal(self, group: Group) -> bool:
        """Whether two scored episodes of the group differ in rewards that train."""
        return self._differ(group.episodes)

    def any_signal(self, groups: Sequence[Group]) -> bool:
        """Whether a round can teach anything: a group has signal, or, where credit compares with
        more than siblings, the round as a whole; a teacher always does.
        """
        if self.taught or any(self.has_signal(group) for group in groups):
            return True
        return not self.siblings and self._differ(
            episode for group in groups for episode in group.episodes
        )

    def refuse(self, episode: Episode) -> None:
        """Raise UserError where the credit cannot read what an episode earned."""
        if episode.end.ending is not Ending.FAILED and (paid := self.total(episode)) < self.least:
            raise UserError(
                f"task {episode.task.id!r} gave a reward of {paid}, and the recipe divides by mean"
                f" rewards: give rewards of at least {self.least:g} (maxrl), or take another recipe"
            )

    def _differ(self, episodes: Iterable[Episode]) -> bool:
        scored = [one for one in episodes if one.end.ending is not Ending.FAILED]
        if len(scored) < self.fewest:
            return False
        if self.by_part:
            return any(len(set(self._part(name, scored))) > 1 for name in self._parts(scored))
        return len({self._compared(episode) for episode in scored}) > 1

    def _compared(self, episode: Episode) -> tuple[float, ...]:
        """What is compared of an episode: one number, or one for each turn and the outcome."""
        if not self.by_turn:
            return (self.total(episode),)
        paid = list(turn_rewards(episode, self.turn_weights))
        while paid and paid[-1] == 0:  # turns without a reward are no difference
            paid.pop()
        return (self.outcome(episode), *paid)

    def _parts(self, scored: Sequence[Episode]) -> list[str]:
        """The terms that train."""
        names = sorted({name for episode in scored for name in episode.score.parts})
        return [name for name in names if not self.part_weights or self.part_weights.get(name)]

    def _part(self, name: str, scored: Sequence[Episode]) -> list[float]:
        """A term of the episodes that have it."""
        there = [episode.score.parts[name] for episode in scored if name in episode.score.parts]
        return [value for value in there if not math.isnan(value)]


OUTCOMES = Rewards()
"""Outcomes alone, as the score says them."""

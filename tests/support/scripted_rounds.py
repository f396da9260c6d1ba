"""Rounds without a model: numbered tasks, and a sampler that plays what a table says."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import replace
from types import SimpleNamespace

from trainer_cases import branch, episode

from agentrl.trainers.algorithms.recipe import Recipe
from agentrl.trainers.rounds import Rounds
from agentrl.trajectory import Group
from agentrl.types import Score, Task

WON, LOST, MIXED = (1.0, 1.0, 1.0), (0.0, 0.0, 0.0), (1.0, 0.0, 0.0)


def played(
    number: int, rewards: Sequence[float | None], step: int = 0, draw: int = 0, **score
) -> Group:
    """The group of a task, sampled by the policy of that round; `score`: what else scores have."""

    def one(sample: int, reward: float | None):
        said = branch(2, (2, 1), (1 + sample, 0), first_id=20 * number + 10, version=step)
        made = episode(said, reward=reward, task=f"t{number}", sample=sample)
        made = replace(made, key=made.key._replace(round=step, draw=draw))
        if reward is None:
            return made
        parts = {"correct": reward}
        return replace(made, score=Score(reward, parts, **score))

    return Group(tuple(one(sample, reward) for sample, reward in enumerate(rewards)))


class Scripted:
    """Both source and sampler: task i earns what stands at place i of the table, later ones `rest`.

    Attributes:
        draws: (round, number of the draw, tasks) of every dispatch.
        seen: how many groups the source saw.
    """

    def __init__(self, *table: Sequence[float | None], rest: Sequence[float | None] = MIXED):
        self.table, self.rest = table, rest
        self.draws, self.seen, self.numbers = [], 0, itertools.count()

    def next(self, n):
        return [Task(id=f"t{next(self.numbers)}", instruction="do it") for _ in range(n)]

    def observe(self, groups):
        self.seen += len(groups)

    def dispatch(self, tasks, work):
        step, draw = work.round, work.draw
        self.draws.append((step, draw, len(tasks)))
        groups = [played(int(task.id[1:]), self._earned(task), step, draw) for task in tasks]
        return SimpleNamespace(gather=lambda: groups)

    def rounds(self, recipe: Recipe, size: int = 4) -> Rounds:
        """Rounds of this script."""
        return Rounds(self, self, size, recipe)

    def _earned(self, task):
        number = int(task.id[1:])
        return self.table[number] if number < len(self.table) else self.rest

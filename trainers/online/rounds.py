"""One round of play: tasks from a source, groups from a sampler."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from agentrl.curriculum.source import TaskSource
from agentrl.policies.base import Policy
from agentrl.rollout.rollouts import Sampler
from agentrl.trainers.algorithms.advantages import with_greedy_rewards
from agentrl.trainers.algorithms.recipe import Recipe
from agentrl.trainers.batch import TokenBatch, pack
from agentrl.trajectory import Group
from agentrl.types import Task

MAX_DRAWS = 4
"""How many draws of tasks dynamic sampling may play to fill one round."""


@dataclass(frozen=True)
class Round:
    """What was played in one round.

    Attributes:
        step: number of the round, from 0.
        groups: of the tasks that were drawn first.
        refilled: groups of later draws that take the places of groups without signal.
        spare: groups of later draws that no place was left for.
        tasks: id -> task, with its hidden part.
    """

    step: int
    groups: Sequence[Group]
    refilled: Sequence[Group]
    spare: Sequence[Group]
    tasks: dict[str, Task]

    @property
    def played(self) -> tuple[Group, ...]:
        """All groups, those that do not train included."""
        return (*self.groups, *self.refilled, *self.spare)


def play_round(
    source: TaskSource,
    sampler: Sampler,
    size: int,
    step: int,
    draws: int = 1,
    tell: Callable[[int], None] = lambda draw: None,
) -> Round:
    """Play one round and let the source see it.

    Args:
        size: tasks per draw.
        step: number of the round.
        draws: with more than 1, groups without signal are replaced by groups of further tasks,
            from at most so many draws (https://arxiv.org/abs/2503.14476, "dynamic sampling");
            places that then are empty stay so.
        tell: called before each draw with its number.

    Raises:
        ConfigError: the source has fewer tasks than a round.
    """
    tasks: dict[str, Task] = {}

    def draw(number: int) -> list[Group]:
        tell(number)
        drawn = source.next(size)
        tasks.update({task.id: task for task in drawn})
        groups = sampler.dispatch(drawn, step, draw=number).gather()
        source.observe(groups)
        return groups

    groups = draw(0)
    refilled, spare = list[Group](), list[Group]()
    for number in range(1, draws):
        missing = len(groups) - sum(group.has_signal for group in (*groups, *refilled))
        if missing > 0:
            more = draw(number)
            chosen = [group for group in more if group.has_signal][:missing]
            refilled += chosen
            spare += [group for group in more if group not in chosen]
    return Round(step, groups, refilled, spare, tasks)


def pack_round(played: Round, recipe: Recipe, pad_id: int) -> TokenBatch:
    """The groups of a round that train, as one batch."""
    groups = (*played.groups, *played.refilled)
    batch = pack(groups, pad_id, turn_weights=recipe.turn_weights, version=played.step)
    return replace(batch, n_refilled=int((batch.group_E >= len(played.groups)).sum()))


def with_greedy(batch: TokenBatch, played: Round, sampler: Sampler, greedy: Policy) -> TokenBatch:
    """The batch with the reward of one greedy episode of each task, as ReMax's baseline."""
    groups = (*played.groups, *played.refilled)
    due = list({group.task.id: played.tasks[group.task.id] for group in groups}.values())
    handle = sampler.dispatch(due, played.step, phase="greedy", group_size=1, policy=greedy)
    rewards = {group.task.id: group.rewards_G[0] for group in handle.gather()}
    return with_greedy_rewards(batch, [rewards[group.task.id] for group in groups])

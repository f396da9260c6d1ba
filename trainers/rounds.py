"""Rounds of play: tasks from a source, groups from a sampler, groups kept for later rounds, and
the batch that a round becomes.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from agentrl.curriculum.source import TaskSource
from agentrl.engines.base import Sampling
from agentrl.records.files import EpisodeWriter, iter_episodes
from agentrl.records.taskfile import read_tasks, write_tasks
from agentrl.rollout.rollouts import Dispatch, GroupStream
from agentrl.trainers.algorithms.advantages import with_greedy_rewards
from agentrl.trainers.algorithms.recipe import Recipe
from agentrl.trainers.batch import TokenBatch, pack
from agentrl.trainers.observe.metrics import RoundDraws
from agentrl.trajectory import Episode, Group
from agentrl.types import Ending, Task

MAX_DRAWS = 4
"""How many draws of tasks dynamic sampling may play to fill one round, the first one included."""


@dataclass(frozen=True)
class Round:
    """What was played in one round.

    Attributes:
        number: of the round, from 0.
        groups: of the tasks that were drawn first.
        refilled: groups of later draws that replace groups without signal.
        spare: groups of later draws for which no place was left; those with signal are kept.
        tasks: id -> task of every group that trains, with its hidden part.
        carried: kept groups of earlier rounds that take places in this one.
        expired: kept groups of earlier rounds that are too old by now.
    """

    number: int
    groups: Sequence[Group]
    refilled: Sequence[Group]
    spare: Sequence[Group]
    tasks: dict[str, Task]
    carried: Sequence[Group] = ()
    expired: Sequence[Group] = ()

    @property
    def played(self) -> tuple[Group, ...]:
        """All groups that were played in this round, those that do not train included."""
        return (*self.groups, *self.refilled, *self.spare)

    @property
    def trained(self) -> tuple[Group, ...]:
        """The round's own groups, with signal or without, and those that take places."""
        return (*self.groups, *self.carried, *self.refilled)

    @property
    def draws(self) -> RoundDraws:
        """What dynamic sampling made of the round."""
        return RoundDraws(self.groups, self.carried, self.refilled, self.spare, self.expired)


class Rounds:
    """Plays the rounds of a run.

    With `recipe.refill`, groups without signal are replaced
    (https://arxiv.org/abs/2503.14476, "dynamic sampling"): first by groups kept from earlier
    rounds, then by those of further draws; a place that is empty after `MAX_DRAWS` draws stays
    empty. A further draw has as many tasks as are needed if tasks keep giving signal at the rate of
    this round, and never more than a round. Groups with signal that find no place are kept for
    `recipe.spare_rounds` rounds.

    Args:
        source: hands out tasks, and sees every group once.
        sampler: plays them.
        size: tasks of a round.
        recipe: says which rewards train and what becomes of groups without signal.
        on_draw: called before each draw with the round, the number of the draw and its tasks.
        sizes: tasks of a draw -> episodes of each; None: the sampler's group size.
    """

    def __init__(
        self,
        source: TaskSource,
        sampler: GroupStream,
        size: int,
        recipe: Recipe,
        on_draw: Callable[[int, int, int], None] = lambda number, draw, tasks: None,
        sizes: Callable[[Sequence[Task]], Sequence[int]] | None = None,
    ) -> None:
        self._source, self._sampler, self._size = source, sampler, size
        self._recipe, self._on_draw, self._sizes = recipe, on_draw, sizes
        self._kept: list[Group] = []
        self._tasks: dict[str, Task] = {}

    def play(self, number: int) -> Round:
        """Play one round and let the source see it.

        Raises:
            ConfigError: the source has fewer tasks than a round.
        """
        tasks: dict[str, Task] = {}
        groups = self._draw(self._size, number, 0, tasks)
        if not self._recipe.refill:
            return Round(number, groups, (), (), tasks)
        has_signal = self._recipe.rewards.has_signal
        with_signal, played = sum(map(has_signal, groups)), len(groups)
        missing = played - with_signal
        expired = self._expire(number)
        carried, self._kept = self._kept[:missing], self._kept[missing:]
        missing -= len(carried)
        refilled, spare = list[Group](), list[Group]()
        for draw in range(1, MAX_DRAWS):
            if not missing:
                break
            count = min(self._size, tasks_for(missing, with_signal, played))
            drawn = self._draw(count, number, draw, tasks)
            useful = [group for group in drawn if has_signal(group)]
            with_signal, played = with_signal + len(useful), played + len(drawn)
            chosen = useful[:missing]
            refilled += chosen
            spare += [group for group in drawn if group not in chosen]
            missing -= len(chosen)
        self._kept += [group for group in spare if has_signal(group)]
        tasks = self._tasks | tasks
        self._tasks = {group.task.id: tasks[group.task.id] for group in self._kept}
        return Round(number, groups, refilled, spare, tasks, carried, expired)

    def save(self, folder: Path) -> None:
        """Write the kept groups and their tasks, if there are any."""
        if self._kept:
            write_tasks(folder / "spare_tasks.jsonl", self._tasks.values())
            with EpisodeWriter(folder / "spare.jsonl", experts=True) as writer:
                for group in self._kept:
                    for episode in group.episodes:
                        writer.write(episode)

    def load(self, folder: Path) -> None:
        """Keep the groups that `save` wrote."""
        if not (folder / "spare.jsonl").exists():
            return
        self._tasks = {task.id: task for task in read_tasks(folder / "spare_tasks.jsonl")}
        groups: dict[tuple[int, int, str], list[Episode]] = {}
        for episode in iter_episodes(folder / "spare.jsonl"):
            place = (episode.key.step, episode.key.draw, episode.key.task)
            groups.setdefault(place, []).append(episode)
        self._kept = [Group(tuple(episodes)) for episodes in groups.values()]

    def _draw(self, count: int, number: int, draw: int, tasks: dict[str, Task]) -> list[Group]:
        self._on_draw(number, draw, count)
        drawn = self._source.next(count)
        tasks.update({task.id: task for task in drawn})
        groups = self._gather(drawn, number, draw)
        self._source.observe(groups)
        return groups

    def _gather(self, drawn: Sequence[Task], number: int, draw: int) -> list[Group]:
        """Play one group per task, in their order; groups of one size play together."""
        if self._sizes is None:
            return self._sampler.dispatch(drawn, Dispatch(number, draw=draw)).gather()
        size_of = dict(zip((task.id for task in drawn), self._sizes(drawn), strict=True))
        groups: dict[str, Group] = {}
        for size in sorted(set(size_of.values())):
            due = [task for task in drawn if size_of[task.id] == size]
            handle = self._sampler.dispatch(due, Dispatch(number, draw=draw, group_size=size))
            groups |= {group.task.id: group for group in handle.gather()}
        return [groups[task.id] for task in drawn]

    def _expire(self, number: int) -> list[Group]:
        """Give up what is too old to train in this round."""
        oldest = number - self._recipe.spare_rounds
        expired = [group for group in self._kept if _round_of(group) < oldest]
        self._kept = [group for group in self._kept if _round_of(group) >= oldest]
        return expired


def tasks_for(missing: int, with_signal: int, played: int) -> int:
    """Return how many tasks to draw for the missing groups.

    The chance that a group has signal is estimated from the round by Laplace's rule of succession,
    (with_signal + 1) / (played + 2): never 0 or 1, and ½ if nothing was played.
    """
    return math.ceil(missing * (played + 2) / (with_signal + 1))


def pack_round(
    played: Round, recipe: Recipe, pad_id: int, version: int, recorded: Sequence[Episode] = ()
) -> TokenBatch:
    """Pack the groups of a round that train as one batch.

    Args:
        played: the round.
        recipe: says which rewards train.
        pad_id: fills rows on the right.
        version: of the weights that the update starts from.
        recorded: episodes that train beside them; no version of the policy sampled these.
    """
    groups = (*played.trained, *(Group((episode,)) for episode in recorded))
    batch = pack(groups, pad_id, rewards=recipe.rewards, version=version)
    n_refilled = int((batch.group_E >= len(played.groups)).sum())
    own_B1 = (batch.group_E < len(played.trained))[batch.episode_B, None]
    version_BT = torch.where(own_B1, batch.version_BT, -1)
    return replace(batch, n_refilled=n_refilled, version_BT=version_BT)


def with_greedy(
    batch: TokenBatch, played: Round, sampler: GroupStream, sampling: Sampling, recipe: Recipe
) -> TokenBatch:
    """Add the reward of one greedy episode of each task: ReMax's baseline."""
    tasks = {group.task.id: played.tasks[group.task.id] for group in played.trained}
    greedy = replace(sampling, temperature=0.0)
    work = Dispatch(played.number, "greedy", group_size=1, sampling=greedy)
    handle = sampler.dispatch(list(tasks.values()), work)
    rewards = dict[str, float | None]()
    for group in handle.gather():
        (episode,) = group.episodes
        is_failed = episode.end.ending is Ending.FAILED
        rewards[group.task.id] = None if is_failed else recipe.rewards.total(episode)
    of_groups = [rewards[group.task.id] for group in played.trained]
    n_recorded = int(batch.group_E.max()) + 1 - len(of_groups) if len(batch.group_E) else 0
    return with_greedy_rewards(batch, of_groups + [None] * n_recorded)


def _round_of(group: Group) -> int:
    return group.episodes[0].key.round

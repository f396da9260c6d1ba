"""Rounds of play: tasks from a source, groups from a sampler, groups kept for later rounds, and
the batch that a round becomes.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from agentrl.curriculum.source import TaskSource
from agentrl.engines.base import Sampling
from agentrl.records.files import EpisodeWriter, iter_episodes, write_json_atomic
from agentrl.records.taskfile import read_tasks, write_tasks
from agentrl.rollout.rollouts import Dispatch, GroupStream, Handle
from agentrl.trainers.algorithms.advantages import with_greedy_rewards
from agentrl.trainers.algorithms.recipe import Recipe
from agentrl.trainers.batch import TokenBatch, pack
from agentrl.trainers.observe.metrics import RoundDraws
from agentrl.trajectory import Episode, Group
from agentrl.types import Ending, Task

AHEAD = "ahead.json"
"""Name of the file in a checkpoint that lists the rounds which were dispatched early."""
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


@dataclass(frozen=True)
class _Draw:
    """Tasks that a source handed out for a round, and how many episodes each gets.

    Attributes:
        sizes: episodes of each task; None: the sampler's group size.
    """

    tasks: list[Task]
    sizes: list[int] | None


@dataclass(frozen=True)
class _Playing:
    """A draw that was dispatched."""

    draw: _Draw
    handles: list[Handle]

    def gather(self) -> list[Group]:
        """Wait for the groups; they come in the order of the tasks."""
        groups = {group.task.id: group for handle in self.handles for group in handle.gather()}
        return [groups[task.id] for task in self.draw.tasks]


class Rounds:
    """Plays the rounds of a run.

    With `ahead = S`, the tasks of round r are drawn and dispatched before round r − S is learned
    from, so they play while the policy is updated. Rounds are still learned from in their order and
    whole: no group is dropped, short episodes are not favoured, and no group is used more than S
    updates after it was dispatched. Further draws of a round (`recipe.refill`) are dispatched when
    the round is due. Rounds that play ahead are part of a checkpoint: after a resume they are
    dispatched again under the same keys.

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
        ahead: S, how many rounds are dispatched before they are due.
        steps: rounds of the run; none beyond is dispatched. None: no end.
        price: taken off the reward of an episode with a side effect, asked at each dispatch; None
            for no price.
    """

    def __init__(
        self,
        source: TaskSource,
        sampler: GroupStream,
        size: int,
        recipe: Recipe,
        on_draw: Callable[[int, int, int], None] = lambda number, draw, tasks: None,
        sizes: Callable[[Sequence[Task]], Sequence[int]] | None = None,
        ahead: int = 0,
        steps: int | None = None,
        price: Callable[[], float | None] = lambda: None,
    ) -> None:
        self._source, self._sampler, self._size = source, sampler, size
        self._recipe, self._on_draw, self._sizes = recipe, on_draw, sizes
        self._ahead, self._steps, self._price = ahead, steps, price
        self._drawn: dict[int, _Draw] = {}  # by round; those of a checkpoint that go out again
        self._playing: dict[int, _Playing] = {}
        self._kept: list[Group] = []
        self._tasks: dict[str, Task] = {}

    def play(self, number: int) -> Round:
        """Dispatch the rounds that are due by now, wait for one, and let the source see it.

        Raises:
            ConfigError: the source has fewer tasks than a round.
        """
        self._on_draw(number, 0, self._size)
        last = number + self._ahead
        if self._steps is not None:
            last = max(number, min(last, self._steps - 1))
        for coming in range(number, last + 1):
            if coming not in self._playing:
                first = self._drawn.pop(coming, None) or self._draw(self._size)
                self._playing[coming] = self._dispatch(first, coming, 0)
        playing = self._playing[number]
        groups = playing.gather()
        del self._playing[number]
        self._source.observe(groups)
        tasks = {task.id: task for task in playing.draw.tasks}
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
            self._on_draw(number, draw, count)
            playing = self._dispatch(self._draw(count), number, draw)
            tasks |= {task.id: task for task in playing.draw.tasks}
            drawn = playing.gather()
            self._source.observe(drawn)
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
        """Write the rounds that play ahead, and the kept groups and their tasks."""
        drawn = self._drawn | {number: playing.draw for number, playing in self._playing.items()}
        for number, draw in drawn.items():
            write_tasks(folder / f"ahead_{number}.jsonl", draw.tasks)
        if drawn:
            rows = [{"round": number, "sizes": draw.sizes} for number, draw in drawn.items()]
            write_json_atomic(folder / AHEAD, {"rounds": rows})
        if self._kept:
            write_tasks(folder / "spare_tasks.jsonl", self._tasks.values())
            with EpisodeWriter(folder / "spare.jsonl", experts=True) as writer:
                for group in self._kept:
                    for episode in group.episodes:
                        writer.write(episode)

    def load(self, folder: Path) -> None:
        """Take over what `save` wrote."""
        if (folder / AHEAD).exists():
            for row in json.loads((folder / AHEAD).read_text())["rounds"]:
                tasks = list(read_tasks(folder / f"ahead_{row['round']}.jsonl"))
                self._drawn[row["round"]] = _Draw(tasks, row["sizes"])
        if not (folder / "spare.jsonl").exists():
            return
        self._tasks = {task.id: task for task in read_tasks(folder / "spare_tasks.jsonl")}
        groups: dict[tuple[int, int, str], list[Episode]] = {}
        for episode in iter_episodes(folder / "spare.jsonl"):
            place = (episode.key.step, episode.key.draw, episode.key.task)
            groups.setdefault(place, []).append(episode)
        self._kept = [Group(tuple(episodes)) for episodes in groups.values()]

    def _draw(self, count: int) -> _Draw:
        tasks = self._source.next(count)
        return _Draw(tasks, list(self._sizes(tasks)) if self._sizes else None)

    def _dispatch(self, draw: _Draw, number: int, index: int) -> _Playing:
        """Start one group per task; groups of one size go out together, the small ones first."""
        work = Dispatch(number, draw=index, side_effect_price=self._price())
        if draw.sizes is None:
            return _Playing(draw, [self._sampler.dispatch(draw.tasks, work)])
        handles = []
        for size in sorted(set(draw.sizes)):
            pairs = zip(draw.tasks, draw.sizes, strict=True)
            tasks = [task for task, group_size in pairs if group_size == size]
            handles.append(self._sampler.dispatch(tasks, replace(work, group_size=size)))
        return _Playing(draw, handles)

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
        recorded: further episodes that train, which no version of the policy sampled.
    """
    groups = (*played.trained, *(Group((episode,)) for episode in recorded))
    batch = pack(groups, pad_id, rewards=recipe.rewards, version=version)
    n_refilled = int((batch.group_E >= len(played.groups)).sum())
    own_B1 = (batch.group_E < len(played.trained))[batch.episode_B, None]
    version_BT = torch.where(own_B1, batch.version_BT, -1)
    return replace(batch, n_refilled=n_refilled, version_BT=version_BT)


def with_greedy(
    batch: TokenBatch,
    played: Round,
    sampler: GroupStream,
    sampling: Sampling,
    recipe: Recipe,
    price: float | None = None,
) -> TokenBatch:
    """Add the reward of one greedy episode of each task: ReMax's baseline."""
    tasks = {group.task.id: played.tasks[group.task.id] for group in played.trained}
    greedy = replace(sampling, temperature=0.0)
    work = Dispatch(played.number, "greedy", group_size=1, sampling=greedy, side_effect_price=price)
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

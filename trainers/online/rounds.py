"""Rounds of play: tasks from a source, groups from a sampler, and groups kept for later rounds."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from agentrl.curriculum.source import TaskSource
from agentrl.errors import UserError
from agentrl.policies.base import Policy
from agentrl.records.files import EpisodeWriter, iter_episodes
from agentrl.records.taskfile import read_tasks, write_tasks
from agentrl.rollout.play import derive_seed
from agentrl.rollout.rollouts import Sampler
from agentrl.trainers.algorithms.advantages import with_greedy_rewards
from agentrl.trainers.algorithms.distillation import TeacherSettings
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
        step: number of the round, from 0.
        groups: of the tasks that were drawn first.
        refilled: groups of later draws that take the places of groups without signal.
        spare: groups of later draws that no place was left for; those with signal are kept.
        tasks: id -> task of every group that trains, with its hidden part.
        carried: groups of earlier rounds that were kept, and take places in this one.
        expired: groups of earlier rounds that were kept, and are too old by now.
    """

    step: int
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
    (https://arxiv.org/abs/2503.14476, "dynamic sampling"): first by groups that were kept from
    earlier rounds, then by those of further draws, and a place that is empty after `MAX_DRAWS`
    draws stays so. A further draw has as many tasks as are needed for the missing groups if tasks
    go on to give signal as they did in this round, and never more than a round. Groups with signal
    that find no place are kept for `recipe.spare_rounds` rounds.

    Args:
        source: hands out tasks, and sees every group once.
        sampler: plays them.
        size: tasks of a round.
        recipe: says which rewards train and what becomes of groups without signal.
        tell: called before each draw with the round, the number of the draw and of its tasks.
        sizes: tasks of a draw -> episodes of each; None: as many as the sampler plays.
    """

    def __init__(
        self,
        source: TaskSource,
        sampler: Sampler,
        size: int,
        recipe: Recipe,
        tell: Callable[[int, int, int], None] = lambda step, draw, tasks: None,
        sizes: Callable[[Sequence[Task]], Sequence[int]] | None = None,
    ) -> None:
        self._source, self._sampler, self._size = source, sampler, size
        self._recipe, self._tell, self._sizes = recipe, tell, sizes
        self._kept: list[Group] = []
        self._tasks: dict[str, Task] = {}

    def play(self, step: int) -> Round:
        """Play one round and let the source see it.

        Raises:
            ConfigError: the source has fewer tasks than a round.
        """
        tasks: dict[str, Task] = {}
        groups = self._draw(self._size, step, 0, tasks)
        if not self._recipe.refill:
            return Round(step, groups, (), (), tasks)
        has_signal = self._recipe.rewards.has_signal
        missing = sum(not has_signal(group) for group in groups)
        refilled, spare = list[Group](), list[Group]()
        found, played = len(groups) - missing, len(groups)
        expired = self._expire(step)
        carried, self._kept = self._kept[:missing], self._kept[missing:]
        missing -= len(carried)
        for number in range(1, MAX_DRAWS):
            if missing:
                count = min(self._size, tasks_for(missing, found, played))
                more = self._draw(count, step, number, tasks)
                chosen = [group for group in more if has_signal(group)]
                found, played = found + len(chosen), played + len(more)
                refilled += chosen[:missing]
                spare += [group for group in more if group not in chosen[:missing]]
                missing -= len(chosen[:missing])
        self._kept += [group for group in spare if has_signal(group)]
        known = self._tasks | tasks
        self._tasks = {group.task.id: known[group.task.id] for group in self._kept}
        return Round(step, groups, refilled, spare, known, carried, expired)

    def save(self, folder: Path) -> None:
        """Write the groups that are kept, if there are any, and their tasks."""
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

    def _draw(self, count: int, step: int, number: int, tasks: dict[str, Task]) -> list[Group]:
        self._tell(step, number, count)
        drawn = self._source.next(count)
        tasks.update({task.id: task for task in drawn})
        groups = self._gather(drawn, step, number)
        self._source.observe(groups)
        return groups

    def _gather(self, drawn: Sequence[Task], step: int, number: int) -> list[Group]:
        """One group per task, in their order; groups of one size play together."""
        if self._sizes is None:
            return self._sampler.dispatch(drawn, step, draw=number).gather()
        size_of = dict(zip((task.id for task in drawn), self._sizes(drawn), strict=True))
        found: dict[str, Group] = {}
        for size in sorted(set(size_of.values())):
            due = [task for task in drawn if size_of[task.id] == size]
            handle = self._sampler.dispatch(due, step, draw=number, group_size=size)
            found |= {group.task.id: group for group in handle.gather()}
        return [found[task.id] for task in drawn]

    def _expire(self, step: int) -> list[Group]:
        """Give up what is too old to train in this round."""
        oldest = step - self._recipe.spare_rounds
        expired = [group for group in self._kept if _step_of(group) < oldest]
        self._kept = [group for group in self._kept if _step_of(group) >= oldest]
        return expired


def tasks_for(missing: int, found: int, played: int) -> int:
    """How many tasks to draw for so many missing groups.

    The chance that a group has signal is estimated from those of the round, as (found + 1) /
    (played + 2), Laplace's rule of succession: never 0 or 1, and ½ where nothing was played.

    Args:
        found: groups of the round that had signal.
        played: all groups of the round.
    """
    return math.ceil(missing * (played + 2) / (found + 1))


def pack_round(
    played: Round, recipe: Recipe, pad_id: int, given: Sequence[Episode] = ()
) -> TokenBatch:
    """The groups of a round that train, as one batch.

    Args:
        given: recorded episodes that train beside them; no version of the policy sampled these.
    """
    groups = (*played.trained, *(Group((episode,)) for episode in given))
    batch = pack(groups, pad_id, rewards=recipe.rewards, version=played.step)
    own_B1 = (batch.group_E < len(played.trained))[batch.episode_B, None]
    return replace(
        batch,
        n_refilled=int((batch.group_E >= len(played.groups)).sum()),
        version_BT=torch.where(own_B1, batch.version_BT, -1),
    )


_PLAY = "play them with `agentrl eval ENV --policy hf:TEACHER --split train --out DIR`"


def _reads(tokenizer: Any, one: Episode) -> bool:
    """Whether the tokens that an episode began with say what its first question does."""
    asked = next((told.content for told in one.messages if told.role == "user"), "")
    ids = next((list(branch.segments[0].ids) for branch in one.trajectories), [])
    if max(ids, default=0) >= len(tokenizer):
        return False
    wanted = tokenizer.decode(tokenizer.encode(asked, add_special_tokens=False))
    return "".join(wanted.split()) in "".join(tokenizer.decode(ids).split())


class Given:
    """Recorded episodes for the rounds of a run: the fixed data of GKD
    (https://arxiv.org/abs/2306.13649).

    Args:
        settings: file and share; without a share there are none.
        seed: of the draws.

    Raises:
        UserError: there is no such file, or no episode of it has sampled tokens.
    """

    def __init__(self, settings: TeacherSettings, seed: int) -> None:
        self._share, self._seed = settings.share, seed
        self._said = f"teacher.episodes={settings.episodes!r}"
        file = Path(settings.episodes)
        file = file / "episodes.jsonl" if file.is_dir() else file
        if settings.share and not file.is_file():
            raise UserError(f"{self._said}: there is no file {file}: {_PLAY}")
        read = self._read(file) if settings.share else []
        self._episodes = [
            one
            for one in read
            if one.passed is not None and any(t.trained for t in one.trajectories)
        ]
        if read and not self._episodes:
            raise UserError(
                f"{self._said}: none of {len(read)} episodes has a score and sampled tokens:"
                f" {_PLAY}"
            )

    def _read(self, file: Path) -> list[Episode]:
        try:
            return list(iter_episodes(file))
        except UserError as error:
            raise UserError(
                f"{self._said} must be the episodes.jsonl of an evaluation or a run, or its folder"
                f" ({error}): {_PLAY}"
            ) from error

    def refuse_others(
        self, envs: Collection[str], held_out: Collection[str], tokenizer: Any
    ) -> None:
        """See that the episodes are of the run's environments, in its tokens, and of no task that
        it is measured by.

        Args:
            envs: names of the run's environments.
            held_out: ids of the tasks of its evaluations.
            tokenizer: the policy's.

        Raises:
            UserError: one is not.
        """
        if other := sorted({one.env for one in self._episodes} - set(envs)):
            raise UserError(
                f"{self._said}: its episodes are of {other[0]}, and the run trains on"
                f" {', '.join(sorted(envs))}: {_PLAY}"
            )
        if wrong := next((one for one in self._episodes if not _reads(tokenizer, one)), None):
            raise UserError(
                f"{self._said}: in the policy's tokenizer, the tokens of task {wrong.task.id!r} do"
                " not say what was asked: take a teacher with the policy's tokenizer"
            )
        if known := sorted({one.task.id for one in self._episodes} & set(held_out)):
            raise UserError(
                f"{self._said}: {len(known)} of its tasks are held out ({known[0]!r}), and what a"
                f" run is measured by must not train it: {_PLAY}"
            )

    def of_test_split(self) -> str:
        """A sentence of warning where episodes are of an evaluation on held-out tasks; else ""."""
        tested = sum(
            one.key.phase == "eval" and one.key.run.split("/")[-2:-1] == ["test"]
            for one in self._episodes
        )
        if not tested:
            return ""
        return (
            f"{self._said}: {tested} of {len(self._episodes)} episodes are of held-out tasks (split"
            f" test), so evaluations on that split will flatter the model: {_PLAY}"
        )

    def draw(self, played: Round) -> list[Episode]:
        """As many as make their share of a round, each once as long as they last."""
        own = sum(len(group.episodes) for group in played.trained)
        count = round(own * self._share / (1 - self._share)) if self._episodes else 0
        chance = random.Random(derive_seed(self._seed, "given", played.step))
        rounds, rest = divmod(count, max(1, len(self._episodes)))
        return [*self._episodes * rounds, *chance.sample(self._episodes, rest)]


def with_greedy(
    batch: TokenBatch, played: Round, sampler: Sampler, greedy: Policy, recipe: Recipe
) -> TokenBatch:
    """The batch with the reward of one greedy episode of each task, as ReMax's baseline."""
    due = list({group.task.id: played.tasks[group.task.id] for group in played.trained}.values())
    handle = sampler.dispatch(due, played.step, phase="greedy", group_size=1, policy=greedy)
    rewards = {group.task.id: _paid(group.episodes[0], recipe) for group in handle.gather()}
    told = [rewards[group.task.id] for group in played.trained]
    given = int(batch.group_E.max()) + 1 - len(told) if len(batch.group_E) else 0
    return with_greedy_rewards(batch, told + [None] * given)


def _paid(episode: Episode, recipe: Recipe) -> float | None:
    failed = episode.end.ending is Ending.FAILED
    return None if failed else recipe.rewards.total(episode)


def _step_of(group: Group) -> int:
    return group.episodes[0].key.step

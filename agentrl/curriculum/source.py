"""Where a run's tasks come from: its environments, and a source that hands their tasks out."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any, Protocol, runtime_checkable

from agentrl.curriculum.settings import EnvTable, name_in_run
from agentrl.errors import ConfigError
from agentrl.rollout.play import derive_seed
from agentrl.specs import EnvSpec, VerifierSpec
from agentrl.trajectory import Group
from agentrl.types import Task


class TaskSource(Protocol):
    """Hands out tasks. Draws, epochs and seeds are its own affair."""

    def next(self, n: int) -> list[Task]:
        """The next `n` tasks, no two with one id.

        Raises:
            ConfigError: there are not so many.
        """
        ...

    def observe(self, groups: Sequence[Group]) -> None:
        """Take notice of the groups that were played, those that will not train included."""
        ...

    def state(self) -> dict[str, Any]:
        """All that a source needs to go on from here, as JSON values."""
        ...


@runtime_checkable
class Observed(Protocol):
    """What a source that chooses may say of its choices, for the records of a run."""

    def metrics(self) -> dict[str, float]:
        """Of the last round that was observed."""
        ...

    def news(self) -> dict[str, Any]:
        """Which tasks it chose in that round, and what it changed, as JSON values."""
        ...

    def sizes(self, tasks: Sequence[Task], group_size: int) -> list[int]:
        """Episodes for each of these tasks, `group_size` on average."""
        ...


class Uniform:
    """Every task once per epoch, in the order of the environment. What was played changes nothing.

    A draw never spans two epochs: the tasks that are left when fewer than `n` remain are not
    played in that epoch.

    Args:
        epoch: number of an epoch -> its tasks; epochs may differ in their order.
        name: of the environment, for error messages.
        state: of an earlier source, to go on where it stopped.
    """

    def __init__(
        self,
        epoch: Callable[[int], Iterator[Task]],
        name: str = "the environment",
        state: Mapping[str, Any] | None = None,
    ) -> None:
        self._tasks_of, self._name = epoch, name
        self._epoch: int = state["epoch"] if state else 0
        self._drawn: int = state["drawn"] if state else 0
        self._stream: Iterator[Task] = islice(epoch(self._epoch), self._drawn, None)
        self._sought = self._found = 0

    def most(self, n: int) -> int:
        """How many of n tasks one draw may have: no more than an epoch."""
        if n > self._sought:
            self._sought = n
            self._found = sum(1 for _ in islice(self._tasks_of(self._epoch), n))
        return min(n, self._found)

    def next(self, n: int) -> list[Task]:
        """The next `n` tasks.

        Raises:
            ConfigError: a whole epoch has fewer.
        """
        tasks = list(islice(self._stream, n))
        if len(tasks) < n:
            if self._drawn or self._epoch:
                self._epoch, self._drawn = self._epoch + 1, 0
                self._stream = iter(self._tasks_of(self._epoch))
                tasks = list(islice(self._stream, n))
            if len(tasks) < n:
                raise ConfigError(
                    f"{self._name} has {len(tasks)} tasks in split 'train', fewer than the {n} of"
                    " one round: lower tasks_per_step"
                )
        self._drawn += n
        return tasks

    def observe(self, groups: Sequence[Group]) -> None:
        """Nothing: every task is as good as another."""

    def state(self) -> dict[str, Any]:
        """Epoch, and how many of its tasks were handed out."""
        return {"epoch": self._epoch, "drawn": self._drawn}


@dataclass(frozen=True)
class EnvPart:
    """One environment at one level of difficulty.

    Attributes:
        env: name of the environment in this run; empty where it is the only one.
        id: the environment id that was asked for.
        level: difficulty, from 0, the easiest.
        prefix: what the ids of its tasks begin with, before a slash; empty where it is the run's
            only part, whose ids stay as they are.
        floor: least share of the environment's tasks.
        make: spec of the environment; calling it builds an instance.
    """

    env: str
    id: str
    level: int
    prefix: str
    floor: float
    make: EnvSpec

    def tasks(self, split: str, seed: int) -> Iterator[Task]:
        """The tasks of a split, under the ids that they have in the run."""
        for task in self.make().tasks(split, seed):
            if self.prefix:
                yield task.model_copy(update={"id": f"{self.prefix}/{task.id}"})
            else:
                yield task

    def epoch(self, seed: int) -> Callable[[int], Iterator[Task]]:
        """A function from the number of an epoch to its training tasks."""
        return lambda number: self.tasks("train", derive_seed(seed, "train", number))


def parts_of(
    envs: Sequence[EnvTable],
    levels: Sequence[Mapping[str, Any]] = (),
    verifier: VerifierSpec | None = None,
) -> list[list[EnvPart]]:
    """The levels of each environment.

    Args:
        envs: tables of the settings.
        levels: settings that each level changes; none: one level.
        verifier: what is added to the verdict of every environment.

    Raises:
        ConfigError: an environment is unknown, or does not take a setting.
    """
    several = len(envs) > 1
    parts: list[list[EnvPart]] = []
    for table in envs:
        name = name_in_run(table) if several else ""
        parts.append([])
        for level, knobs in enumerate(levels or ({},)):
            prefix = f"{name}#{level}" if levels else name
            settings = table.settings | dict(knobs)
            spec = EnvSpec.of(
                table.id, settings, limits=table.limits, verifier=verifier, prefix=prefix
            )
            parts[-1].append(EnvPart(name, table.id, level, prefix, table.floor, spec))
    return parts

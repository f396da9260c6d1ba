"""The environments of a run, level by level, and whose task is whose."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from agentrl.curriculum.settings import EnvTable, name_in_run
from agentrl.env import ToolEnv
from agentrl.registry import factory
from agentrl.rollout.play import derive_seed
from agentrl.types import Task


@dataclass(frozen=True)
class Part:
    """One environment at one level of difficulty.

    Attributes:
        env: name of the environment in this run; empty where it is the only one.
        id: what it was asked for by.
        level: from 0, the easiest.
        prefix: what the ids of its tasks begin with, before a slash; empty where it is the run's
            only part, whose ids stay as they are.
        floor: least share of the environment's tasks.
        make: builds an instance.
    """

    env: str
    id: str
    level: int
    prefix: str
    floor: float
    make: Callable[[], ToolEnv]

    def tasks(self, split: str, seed: int) -> Iterator[Task]:
        """The tasks of a split, each under the id that it has in the run."""
        for task in self.make().tasks(split, seed):
            if self.prefix:
                yield task.model_copy(update={"id": f"{self.prefix}/{task.id}"})
            else:
                yield task

    def epoch(self, seed: int) -> Callable[[int], Iterator[Task]]:
        """Number of an epoch -> its training tasks, in a run with this seed."""
        return lambda number: self.tasks("train", derive_seed(seed, "train", number))


def parts_of(
    envs: Sequence[EnvTable], levels: Sequence[Mapping[str, Any]] = ()
) -> list[list[Part]]:
    """For each environment its levels.

    Raises:
        ConfigError: an environment is unknown, or does not take a setting.
    """
    several = len(envs) > 1
    return [
        [
            Part(
                env=name_in_run(table) if several else "",
                id=table.id,
                level=level,
                prefix=(name_in_run(table) if several else "") + (f"#{level}" if levels else ""),
                floor=table.floor,
                make=factory(table.id, **(table.settings | dict(knobs))),
            )
            for level, knobs in enumerate(levels or ({},))
        ]
        for table in envs
    ]

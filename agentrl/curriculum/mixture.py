"""The source of a run's tasks; with several environments, how many tasks of each."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from agentrl.curriculum.pool import PoolSource
from agentrl.curriculum.settings import InOrder, PoolSettings
from agentrl.curriculum.source import EnvPart, Uniform
from agentrl.errors import ConfigError
from agentrl.trajectory import Group
from agentrl.types import Task


def allocate(
    n: int,
    floors: Sequence[float],
    weights: Sequence[float],
    owed: Sequence[float],
    most: Sequence[int],
) -> tuple[list[int], list[float]]:
    """Tasks for each environment, n in all, and what is owed to each after them.

    What a floor promises adds up in `owed` until it is a whole task; it stays below 2, so that over
    any number of draws in a row an environment has less than two tasks fewer than its floor. What
    a floor promises beyond the tasks that there are lapses. The other tasks go by the weights.

    Args:
        floors: least share of each; at most 1 in sum.
        weights: by which what is left is shared; not negative.
        owed: tasks that earlier draws left open.
        most: tasks that each can give; at least n in sum.
    """
    due = [left + share * n for left, share in zip(owed, floors, strict=True)]
    due = [
        one - max(0, math.floor(one + 1e-9) - cap) if cap < n else one
        for one, cap in zip(due, most, strict=True)
    ]
    counts = [math.floor(one + 1e-9) for one in due]
    while sum(counts) > n:  # whole tasks came due at once: who is owed least waits
        waits = min(
            (i for i, count in enumerate(counts) if count), key=lambda i: (due[i] - counts[i], i)
        )
        counts[waits] -= 1
    owed = [one - count for one, count in zip(due, counts, strict=True)]
    left = [cap - count for cap, count in zip(most, counts, strict=True)]
    for i, more in enumerate(_apportion(n - sum(counts), weights, left)):
        counts[i] += more
    return counts, owed


def _apportion(n: int, weights: Sequence[float], most: Sequence[int]) -> list[int]:
    """n as whole numbers in proportion to the weights, by largest remainder; where one would be
    above its `most` it is that, and the others share the rest.
    """
    counts, exact = [0] * len(most), dict.fromkeys(range(len(most)), 0.0)
    while exact:
        total = math.fsum(weights[i] for i in exact)
        exact = {i: n * (weights[i] / total if total > 0 else 1 / len(exact)) for i in exact}
        full = [i for i in exact if exact[i] >= most[i]]
        if not full:
            break
        for i in full:
            counts[i] = most[i]
            n -= most[i]
            del exact[i]
    for i in exact:
        counts[i] = math.floor(exact[i])
    by_rest = sorted(exact, key=lambda i: (counts[i] - exact[i], i))
    for i in by_rest[: n - sum(counts[i] for i in exact)]:
        counts[i] += 1
    return counts


class Mixture:
    """A source over the sources of several environments.

    Tasks beyond the floors go where a group is likeliest to have signal; environments whose tasks
    come in order share them evenly. What an environment has too few tasks for, the others play.

    Args:
        sources: environment's name -> source, whose task ids begin with that name.
        floors: environment's name -> least share of the tasks.
        state: of an earlier mixture.
    """

    def __init__(
        self,
        sources: Mapping[str, PoolSource | Uniform],
        floors: Mapping[str, float],
        state: Mapping[str, Any] | None = None,
    ) -> None:
        self._sources, self._floors = dict(sources), dict(floors)
        owed = state["owed"] if state else {}
        self._owed = [float(owed.get(name, 0.0)) for name in self._sources]

    def refuse_rounds(self, tasks: int, draws: int) -> None:
        """Raise ConfigError where the environments together may have too few tasks for rounds of so
        many tasks, drawn at most so often.
        """
        pools = [one for one in self._sources.values() if isinstance(one, PoolSource)]
        if pools:
            pools[0].refuse_rounds(tasks, draws, sum(map(len, pools)))
        elif (held := sum(one.most(tasks) for one in self._sources.values())) < tasks:
            raise ConfigError(
                f"the environments have {held} tasks in split 'train', fewer than the {tasks} of"
                " one round: lower tasks_per_step"
            )

    def next(self, n: int) -> list[Task]:
        """The next n tasks, those of one environment beside each other.

        Raises:
            ConfigError: the environments together have fewer that may be played.
        """
        most = [source.most(n) for source in self._sources.values()]
        if sum(most) < n:
            raise ConfigError(
                f"a draw of {n} tasks finds {sum(most)} that may be played in all environments:"
                " lower tasks_per_step or curriculum.rest, or raise curriculum.pool"
            )
        sources = list(self._sources.values())
        weights = [one.expected_signal() if isinstance(one, PoolSource) else 1.0 for one in sources]
        counts, self._owed = allocate(n, list(self._floors.values()), weights, self._owed, most)
        tasks: list[Task] = []
        for (name, source), count in zip(self._sources.items(), counts, strict=True):
            try:
                tasks += source.next(count) if count else []
            except ConfigError as error:
                raise ConfigError(f"env {name!r}: {error}") from error
        return tasks

    def sizes(self, tasks: Sequence[Task], group_size: int) -> list[int]:
        """Episodes for each of these tasks; each environment keeps its own number in all."""
        found: dict[str, int] = {}
        for name, source in self._sources.items():
            own = [task for task in tasks if env_of(task.id) == name]
            if isinstance(source, PoolSource):
                sizes = source.sizes(own, group_size)
            else:
                sizes = [group_size] * len(own)
            found |= {task.id: size for task, size in zip(own, sizes, strict=True)}
        return [found[task.id] for task in tasks]

    def observe(self, groups: Sequence[Group]) -> None:
        """Show every source all groups: those of others tell it which round it is."""
        for source in self._sources.values():
            source.observe(groups)

    def metrics(self) -> dict[str, float]:
        """Those of every source, as `curriculum/ENV/…`."""
        return {
            f"curriculum/{name}/{key.removeprefix('curriculum/')}": value
            for name, source in self._sources.items()
            if isinstance(source, PoolSource)
            for key, value in source.metrics().items()
        }

    def news(self) -> dict[str, Any]:
        """Environment -> what its last round changed."""
        return {
            name: source.news()
            for name, source in self._sources.items()
            if isinstance(source, PoolSource)
        }

    def state(self) -> dict[str, Any]:
        """What is owed, and the states of the sources."""
        return {
            "owed": dict(zip(self._sources, self._owed, strict=True)),
            "sources": {name: source.state() for name, source in self._sources.items()},
        }


def env_of(task_id: str) -> str:
    """The environment's name in the id of a task of a mixture."""
    return task_id.partition("/")[0].partition("#")[0]


def open_source(
    envs: Sequence[Sequence[EnvPart]],
    settings: InOrder | PoolSettings,
    seed: int,
    state: Mapping[str, Any] | None = None,
    apart: bool = False,
) -> PoolSource | Mixture | Uniform:
    """The source of a run's tasks.

    Args:
        envs: for each environment its levels.
        settings: of the curriculum.
        seed: of the run.
        state: of the source of an earlier part of the run.
        apart: see `PoolSource`.

    Raises:
        ConfigError: the state is of another sampler or of other environments, or a pool cannot be
            filled.
    """
    if len(envs) == 1:
        return _open_one(envs[0], settings, seed, state, apart)
    names = [parts[0].env for parts in envs]
    saved = state["sources"] if state and "sources" in state else None
    if state and (saved is None or list(saved) != names):
        raise ConfigError(f"the checkpoint is not one of the environments {names}: choose --out")
    sources = {
        parts[0].env: _open_one(parts, settings, seed, saved and saved[parts[0].env], apart)
        for parts in envs
    }
    return Mixture(sources, {parts[0].env: parts[0].floor for parts in envs}, state)


def _open_one(
    parts: Sequence[EnvPart],
    settings: InOrder | PoolSettings,
    seed: int,
    state: Mapping[str, Any] | None,
    apart: bool,
) -> PoolSource | Uniform:
    before = state.get("sampler", "in_order") if state else settings.sampler  # type: ignore[union-attr]
    if isinstance(settings, InOrder):
        if before != "in_order":
            raise ConfigError(_changed_sampler(before, "in_order"))
        return Uniform(parts[0].epoch(seed), parts[0].id, state)
    if before == "in_order":
        raise ConfigError(_changed_sampler("in_order", settings.sampler))  # type: ignore[attr-defined]
    return PoolSource(parts, settings, seed, state, apart)


def _changed_sampler(old: str, new: str) -> str:
    return (
        f"curriculum.sampler={new!r}, and the run was started with {old!r}, whose state it cannot"
        " go on from: resume with that, or choose another --out"
    )

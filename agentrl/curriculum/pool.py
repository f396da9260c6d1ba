"""A curriculum over a pool of tasks: a source that chooses by what it believes of their pass rates.

The pool is the first `settings.pool` tasks of the environment, shared evenly by its levels: an
endless environment is bounded by it, and so is memory. Choices are a function of the beliefs and of
a seed that is derived from the run's seed and the number of the draw, so that a run that goes on
from `state()` chooses the same tasks.
"""

from __future__ import annotations

import heapq
import json
import math
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import islice
from pathlib import Path
from statistics import NormalDist
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from agentrl.curriculum import samplers
from agentrl.curriculum.posterior import Beliefs, Floats, group_signal
from agentrl.curriculum.settings import PoolSettings, Staged, weigh_of
from agentrl.curriculum.source import EnvPart
from agentrl.errors import ConfigError
from agentrl.rollout.play import derive_seed
from agentrl.trajectory import Group
from agentrl.types import Task

_PROFILED = -2  # the round of what a profile counted: before all rounds, and not never


@dataclass(frozen=True)
class Estimate:
    """A mean over all tasks of a pool.

    Attributes:
        value: the estimate; without bias, so now and then outside of [0, 1].
        variance: of `value`.
        n_tasks: tasks that were seen for it.
    """

    value: float
    variance: float
    n_tasks: int

    def interval(self, level: float = 0.95) -> tuple[float, float]:
        """The normal interval of that level. It holds too seldom where few tasks are drawn and
        almost none of their episodes pass.
        """
        half = NormalDist().inv_cdf((1 + level) / 2) * math.sqrt(self.variance)
        return self.value - half, self.value + half


def over_all_tasks(seen: Floats, expected: Floats, pi: Floats, expected_N: Floats) -> Estimate:
    """The mean pass rate of all N tasks, from those that were drawn.

    The mean over the drawn tasks shows what the sampler prefers. The chance π_i of each task to be
    drawn is known, so the mean over all tasks has an estimate without bias:
    Σ_i m_i / N + Σ_{i drawn} (y_i − m_i) / (N·π_i), where m_i was expected of task i before it was
    played and y_i was observed. (Horvitz and Thompson 1952; with expectations it is the difference
    estimator of Cassel, Särndal and Wretman 1976: wrong expectations cost width, but no bias.)

    Args:
        seen: y of each drawn task, such as passed / scored.
        expected: m of each drawn task.
        pi: its chance to be drawn; positive.
        expected_N: m of all tasks.

    The variance is Σ ((y − m) / (N·π))², that of independent draws: a draw of fixed size has at
    most about this.
    """
    parts = (seen - expected) / (len(expected_N) * pi)
    value = float(expected_N.mean() + parts.sum())
    return Estimate(value, float(np.square(parts).sum()), len(seen))


@dataclass
class _Draw:
    """One draw: places, chances and expectations, and what was seen of it so far.

    Attributes:
        number: of the draw, over the whole run.
        expected_N: expected pass rate of every task; of a task that rests, and so cannot be drawn,
            the rate at which it was last solved.
        variance: of the mean of these rates of resting tasks.
    """

    number: int
    at: NDArray[np.int64]
    pi: Floats
    expected_N: Floats
    variance: float
    seen: dict[int, float | None] = field(default_factory=dict)

    def to_json(self) -> dict[str, Any]:
        """The draw as JSON values, before anything was seen of it."""
        return {
            "number": self.number,
            "at": self.at.tolist(),
            "pi": self.pi.tolist(),
            "expected": self.expected_N.tolist(),
            "variance": self.variance,
        }

    @classmethod
    def from_json(cls, row: Mapping[str, Any]) -> Self:
        """The draw of `to_json`."""
        return cls(
            row["number"],
            np.array(row["at"], dtype=np.int64),
            np.array(row["pi"]),
            np.array(row["expected"]),
            row["variance"],
        )

    def estimate(self) -> Estimate | None:
        """The mean pass rate over the pool; None where no task has a scored episode.

        Infrastructure is taken to fail any task alike: the chance to be drawn and scored is π times
        the share of the drawn tasks that were scored.
        """
        known = [(i, self.seen[int(p)]) for i, p in enumerate(self.at)]
        at = [i for i, rate in known if rate is not None]
        if not at:
            return None
        rates = np.array([rate for _, rate in known if rate is not None], dtype=np.float64)
        pi = self.pi[at] * (len(at) / len(self.at))
        estimate = over_all_tasks(rates, self.expected_N[self.at[at]], pi, self.expected_N)
        return replace(estimate, variance=estimate.variance + self.variance)


class PoolSource:
    """Chooses tasks from a pool; see the settings for how.

    Args:
        parts: levels of one environment, the easiest first.
        settings: of the sampler.
        seed: of the run.
        state: of an earlier source, to go on where it stopped.
        apart: whether a round may draw more than once (`Rounds`). A task then rests for one round
            more, because the first draw of a round cannot be told from a later one of the round
            before, and no draw has a task of an earlier draw of its round.

    Attributes:
        beliefs: what is believed of each task, in the order of the pool.

    Raises:
        ConfigError: two tasks have one id, or the file that the settings start from is not one of
            this pool.
    """

    def __init__(
        self,
        parts: Sequence[EnvPart],
        settings: PoolSettings,
        seed: int,
        state: Mapping[str, Any] | None = None,
        apart: bool = False,
    ) -> None:
        self._parts, self._settings, self._seed = parts, settings, seed
        self._weigh = weigh_of(settings)
        self._rest = settings.rest + apart
        saved = state or {}
        self._draws: int = saved.get("draws", 0)
        self._round: int = saved.get("round", -1)
        self._stage: int = saved.get("stage", 0)
        self._positions: dict[int, int] = {int(k): v for k, v in saved.get("moved", [])}
        # Draws that wait for their groups, by the ids of their tasks. A task that is drawn again
        # before it was observed waits twice; groups are observed in the order of their draws.
        self._pending: dict[str, deque[_Draw]] = {}
        for row in saved.get("pending", []):
            self._await_groups(_Draw.from_json(row), row["ids"])
        self._news: dict[str, Any] = {"chosen": []}
        self._metrics: dict[str, float] = {}
        self._played: dict[str, int] = {}  # of the round: id -> level; some are retired by its end
        self._fill(saved.get("taken", []))
        self._drawn_N = np.full(len(self), -1, dtype=np.int64)
        # Passed and scored episodes of each task when it was last drawn.
        self._last_passed_N, self._last_scored_N = np.zeros(len(self)), np.zeros(len(self))
        for place, last, passed, scored in saved.get("drawn", []):
            self._drawn_N[place] = last
            self._last_passed_N[place], self._last_scored_N[place] = passed, scored
        profile = _read_profile(settings.start) if settings.start else {}
        prior = tuple(profile.get("prior", settings.prior))
        self.beliefs = Beliefs.of(self._levels, (prior[0], prior[1]))
        if state:
            self._restore(saved["beliefs"])
        elif profile:
            self._begin_with(profile["pass_rates"])

    def __len__(self) -> int:
        return len(self._tasks)

    def most(self, n: int) -> int:
        """How many of n tasks a draw may have: no more than do not rest."""
        return min(n, int((~self._resting_N).sum()))

    def refuse_rounds(self, tasks: int, draws: int, held: int | None = None) -> None:
        """Raise ConfigError where rounds of so many tasks, drawn at most so often, could run out of
        tasks that do not rest.

        Args:
            held: tasks in the pools of all environments that share the rounds; None: of this one.
        """
        held = len(self) if held is None else held
        if held < (need := tasks * (draws * self._rest + 1)):
            raise ConfigError(
                f"the pool holds {held} tasks, and rounds of {tasks} tasks, {draws} draws and"
                f" rest={self._settings.rest} may need {need}: raise curriculum.pool, or lower"
                " tasks_per_step or curriculum.rest"
            )

    def next(self, n: int) -> list[Task]:
        """Choose n tasks.

        Raises:
            ConfigError: fewer may be played.
        """
        believed = self.beliefs.informed()
        rng = np.random.default_rng(derive_seed(self._seed, self._name, "draw", self._draws))
        weights_N = self._weigh(believed, rng)
        pi_N = samplers.inclusion(weights_N, n, self._settings.explore, ~self._resting_N)
        at = samplers.systematic_sample(pi_N, rng)
        draw = _Draw(self._draws, at, pi_N[at], *self._expect(believed))
        self._draws += 1
        tasks = [self._tasks[place] for place in at]
        self._await_groups(draw, [task.id for task in tasks])
        return tasks

    def _await_groups(self, draw: _Draw, ids: Iterable[str]) -> None:
        for name in ids:
            self._pending.setdefault(name, deque()).append(draw)

    def _expect(self, believed: Beliefs) -> tuple[Floats, float]:
        """`expected_N` and `variance` of a draw.

        A task rests because it was drawn, whatever came of it, so the rate at which it was solved
        then is an estimate without bias; what is believed of it is not, being drawn to the prior.
        """
        resting_N = self._resting_N & (self._last_scored_N > 0)
        scored_N = np.maximum(self._last_scored_N, 1.0)
        rate_N = self._last_passed_N / scored_N
        variance_N = np.where(resting_N, rate_N * (1 - rate_N) / np.maximum(scored_N - 1, 1), 0.0)
        expected_N = np.where(resting_N, rate_N, believed.mean_N)
        return expected_N, float(variance_N.sum()) / len(self) ** 2

    def sizes(self, tasks: Sequence[Task], group_size: int) -> list[int]:
        """Episodes for each of these tasks, `group_size` on average."""
        if not self._settings.group_most:
            return [group_size] * len(tasks)
        believed, at = self.beliefs.informed(), [self._place[task.id] for task in tasks]
        total, most = group_size * len(tasks), self._settings.group_most
        return group_sizes(believed.alpha_N[at], believed.beta_N[at], total, 2, most)

    def expected_signal(self, group_size: int = 8) -> float:
        """How likely a group of the next draw is one with signal, on average."""
        believed = self.beliefs.informed()
        rng = np.random.default_rng(derive_seed(self._seed, self._name, "signal", self._draws))
        pi_N = samplers.inclusion(self._weigh(believed, rng), 1, self._settings.explore)
        return float(pi_N @ group_signal(believed.alpha_N, believed.beta_N, group_size))

    def observe(self, groups: Sequence[Group]) -> None:
        """Learn from groups of tasks that were handed out; others say which round it is."""
        own = [group for group in groups if group.task.id in self._place]
        if not groups:
            return
        step = max(group.episodes[0].key.step for group in groups)
        if step > self._round:
            if self._round >= 0:
                rounds = step - self._round
                self.beliefs = self.beliefs.moved(rounds, self._settings.drift)
            self._round, self._news, self._metrics = step, {"chosen": []}, {}
            self._played = {}
        passes = [[one.passed for one in group.episodes] for group in own]
        passed = [sum(one is True for one in group) for group in passes]
        scored = [sum(one is not None for one in group) for group in passes]
        at = [self._place[group.task.id] for group in own]
        self._drawn_N[at] = step
        self._last_passed_N[at], self._last_scored_N[at] = passed, scored
        counted = [i for i, count in enumerate(scored) if count]
        self._played |= {own[i].task.id: int(self._levels[at[i]]) for i in counted}
        self.beliefs = self.beliefs.observed(
            [at[i] for i in counted],
            [passed[i] for i in counted],
            [scored[i] for i in counted],
            step,
        )
        self._note(own, at, [c / n if n else None for c, n in zip(passed, scored, strict=True)])
        self._move_on(at)

    def metrics(self) -> dict[str, float]:
        """Of the last round that was observed; see docs/curriculum.md."""
        found = {
            **self._metrics,
            "unseen": float(1 - self.beliefs.seen_N.mean()),
            "tasks": float(len(self._played)),
            "retired": float(len(self._news.get("retired", ()))),
        }
        if len(self._parts) > 1:
            found["stage"] = float(self._stage)
            for level, mean in enumerate(samplers.level_means(self.beliefs)):
                found[f"level_{level}/pass"] = float(mean)
                found[f"level_{level}/tasks"] = float(
                    sum(one == level for one in self._played.values())
                )
        return {f"curriculum/{name}": value for name, value in found.items()}

    def news(self) -> dict[str, Any]:
        """What the last round changed, by ids: "chosen", and where it happened "retired" and
        "promoted".
        """
        return self._news

    def state(self) -> dict[str, Any]:
        """Draws, rounds, beliefs of the tasks that were played, which of them rest, and which tasks
        the pool holds.
        """
        beliefs = self.beliefs
        rows = [
            [int(place), float(a), float(b), int(last)]
            for place in np.flatnonzero(beliefs.seen_N)
            for a, b, last in [
                (beliefs.alpha_N[place], beliefs.beta_N[place], beliefs.last_N[place])
            ]
        ]
        last = self._last_passed_N, self._last_scored_N
        return {
            "sampler": self._settings.sampler,  # type: ignore[attr-defined]
            "draws": self._draws,
            "round": self._round,
            "stage": self._stage,
            "moved": sorted(self._positions.items()),
            "taken": list(self._taken),
            "drawn": [
                [int(p), *(int(row[p]) for row in (self._drawn_N, *last))]
                for p in np.flatnonzero(self._resting_N)
            ],
            "beliefs": {"tasks": len(self), "rows": rows},
            "pending": self._pending_rows(),
        }

    def _pending_rows(self) -> list[dict[str, Any]]:
        """Draws of which no group was observed yet, with the ids of their tasks, oldest first."""
        ids: dict[int, list[str]] = {}
        draws: dict[int, _Draw] = {}
        for name, waiting in self._pending.items():
            for draw in waiting:
                if not draw.seen:
                    draws[draw.number] = draw
                    ids.setdefault(draw.number, []).append(name)
        return [{**draws[number].to_json(), "ids": ids[number]} for number in sorted(draws)]

    @property
    def _name(self) -> str:
        return self._parts[0].env

    @property
    def _resting_N(self) -> NDArray[np.bool_]:
        """Which tasks may not be drawn. A task whose group failed was drawn all the same."""
        return (self._drawn_N >= 0) & (self._drawn_N > self._round - self._rest)

    def _fill(self, taken: Sequence[int]) -> None:
        """Draw the pool: of every level as many tasks as it has places, then those that came after.

        Args:
            taken: of each level, how many tasks its stream had given; a task with the id of one in
                the pool was given and found no place.
        """
        share, more = divmod(self._settings.pool, len(self._parts))
        self._streams, self._taken = [], [0] * len(self._parts)
        tasks: list[Task] = []
        levels: list[int] = []
        for part in self._parts:
            size = share + (part.level < more)
            stream = part.epoch(self._seed)(0)
            self._streams.append(stream)
            drawn = self._take(part.level, size)
            tasks += drawn
            levels += [part.level] * len(drawn)
        self._tasks, self._levels = tasks, np.array(levels, dtype=np.int64)
        for place, position in sorted(self._positions.items(), key=lambda pair: pair[1]):
            level = levels[place]
            self._tasks[place] = self._take(level, position - self._taken[level] + 1)[-1]
        for level, count in enumerate(taken):
            self._take(level, max(0, count - self._taken[level]))
        self._place = {task.id: place for place, task in enumerate(self._tasks)}
        if len(self._place) < len(self._tasks):
            twice = _first_twice(task.id for task in self._tasks)
            raise ConfigError(f"task id {twice!r} stands twice in the pool: give each its own")

    def _take(self, level: int, count: int) -> list[Task]:
        tasks = list(islice(self._streams[level], count))
        self._taken[level] += len(tasks)
        return tasks

    def _restore(self, saved: Mapping[str, Any]) -> None:
        if saved["tasks"] != len(self):
            raise ConfigError(
                f"the run was started with a pool of {saved['tasks']} tasks and finds {len(self)}"
                " now: resume it with the same environment and curriculum.pool"
            )
        b = self.beliefs
        for place, alpha, beta, last in saved["rows"]:
            b.alpha_N[place], b.beta_N[place], b.last_N[place] = alpha, beta, last

    def _begin_with(self, counts: Mapping[str, Sequence[int]]) -> None:
        known = {
            task.id.removeprefix(f"{self._prefix_of(p)}/"): p for p, task in enumerate(self._tasks)
        }
        found = {known[name]: pair for name, pair in counts.items() if name in known and pair[1]}
        if not found:
            raise ConfigError(
                f"curriculum.start={self._settings.start!r} counts none of the pool's tasks:"
                " profile the split 'train' of this environment with the run's seed, and with --set"
                " NAME=VALUE for each of its settings in env_settings"
            )
        passed, scored = zip(*found.values(), strict=True)
        self.beliefs = self.beliefs.observed(list(found), passed, scored, _PROFILED)

    def _prefix_of(self, place: int) -> str:
        return self._parts[int(self._levels[place])].prefix

    def _note(self, own: Sequence[Group], at: Sequence[int], rates: Sequence[float | None]) -> None:
        """Keep what the round was, for metrics; further draws of a round are in none of them."""
        for group, place, rate in zip(own, at, rates, strict=True):
            waiting = self._pending.get(group.task.id)
            if not waiting:
                continue
            draw = waiting.popleft()
            if not waiting:
                del self._pending[group.task.id]
            draw.seen[place] = rate
            self._news["chosen"].append(group.task.id)
            if len(draw.seen) == len(draw.at) and not group.episodes[0].key.draw:
                if (estimate := draw.estimate()) is None:
                    continue
                low, high = estimate.interval()
                known = [one for one in draw.seen.values() if one is not None]
                self._metrics |= {"pass_all": estimate.value, "pass_all_low": low}
                self._metrics |= {"pass_all_high": high, "pass_played": sum(known) / len(known)}

    def _move_on(self, at: Iterable[int]) -> None:
        """Retire what is solved, and say so where the stage of difficulty has moved."""
        for place in at if self._settings.retire < 1 else ():
            if self.beliefs.mean_N[place] >= self._settings.retire:
                self._replace(place)
        if isinstance(self._settings, Staged):
            stage = samplers.stage_of(self.beliefs, self._settings.target)
            if stage != self._stage:
                self._news["promoted"] = {"from": self._stage, "to": stage}
            self._stage = stage

    def _replace(self, place: int) -> None:
        """Give a task's place to the next of its stream, where there is one."""
        level = int(self._levels[place])
        if not (found := self._take(level, 1)) or found[0].id in self._place:
            return
        old = self._tasks[place]
        self._news.setdefault("retired", []).append(old.id)
        del self._place[old.id]
        self._tasks[place], self._place[found[0].id] = found[0], place
        self._positions[place], self._drawn_N[place] = self._taken[level] - 1, -1
        b, prior = self.beliefs, self.beliefs.prior
        alpha_N, beta_N, last_N = b.alpha_N.copy(), b.beta_N.copy(), b.last_N.copy()
        alpha_N[place], beta_N[place], last_N[place] = *prior, -1
        self.beliefs = replace(b, alpha_N=alpha_N, beta_N=beta_N, last_N=last_N)


def _first_twice(names: Iterable[str]) -> str:
    seen: set[str] = set()
    for name in names:
        if name in seen:
            break
        seen.add(name)
    return name


def _read_profile(path: str) -> dict[str, Any]:
    try:
        found = json.loads(Path(path).read_text())
        counts = {str(name): (int(c), int(n)) for name, (c, n) in found["pass_rates"].items()}
        a, b = map(float, found["prior"])
    except FileNotFoundError:
        raise ConfigError(
            f"curriculum.start={path!r} does not exist: write it with agentrl profile --save"
        ) from None
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ConfigError(
            f"curriculum.start={path!r} is no file of agentrl profile --save ({error})"
        ) from error
    if not all(0 <= c <= n for c, n in counts.values()):
        raise ConfigError(f"curriculum.start={path!r} has counts that cannot be: profile again")
    return {"pass_rates": counts, "prior": (a, b)}


def group_sizes(alpha_n: Floats, beta_n: Floats, total: int, least: int, most: int) -> list[int]:
    """Episodes for each of n tasks, `total` in all, that make the expected number of groups with
    signal as large as it can be.

    One more episode of a task makes its group one with signal with the chance
    E[p^G·(1 − p)] + E[(1 − p)^G·p], which only falls as G grows: giving each next episode to the
    task where it is largest is therefore optimal.

    Args:
        alpha_n, beta_n: what is believed of the tasks' pass rates.
        total: from n·least to n·most; what lies outside is held to these.
        least, most: bounds of one group.
    """
    sizes = [least] * len(alpha_n)
    pass_n, fail_n = np.ones(len(alpha_n)), np.ones(len(alpha_n))
    for place in range(least):
        pass_n *= (alpha_n + place) / (alpha_n + beta_n + place)
        fail_n *= (beta_n + place) / (alpha_n + beta_n + place)
    chances = [[float(p), float(f)] for p, f in zip(pass_n, fail_n, strict=True)]

    def gain(task: int) -> float:
        a, b, size = float(alpha_n[task]), float(beta_n[task]), sizes[task]
        passes, fails = chances[task]
        return (passes * b + fails * a) / (a + b + size)

    queue = [(-gain(task), task) for task in range(len(sizes)) if least < most]
    heapq.heapify(queue)
    for _ in range(total - sum(sizes)):
        if not queue:
            break
        _, task = heapq.heappop(queue)
        a, b, size = float(alpha_n[task]), float(beta_n[task]), sizes[task]
        chances[task][0] *= (a + size) / (a + b + size)
        chances[task][1] *= (b + size) / (a + b + size)
        sizes[task] += 1
        if sizes[task] < most:
            heapq.heappush(queue, (-gain(task), task))
    return sizes

"""Would asynchronous training help this run, at which staleness, and with how many slots?

A replay of a run's own times under other settings. Each episode takes as long as it took; it needs
a slot, and slots are given in the order of dispatch. Round r is dispatched when the update of round
r − S − 1 is over; the trainer learns from rounds in order, and an update takes as long as it took.
The engine works through the rounds in order as well: episodes that play beside each other wait for
tools at the same time, but its seconds add up. On a CPU, updates and the engine share the cores, so
their seconds add up, too.
"""

from __future__ import annotations

import heapq
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from agentrl.errors import ConfigError
from agentrl.records.files import iter_episodes, read_metrics


@dataclass(frozen=True)
class RunTimes:
    """What the rounds of a run took, in seconds.

    Attributes:
        episodes: of each round, the seconds of each of its episodes, in the order of dispatch.
        updates: of each round.
        engine: in which the engine sampled for each round; zeros where it does not say.
        slots: episodes that may play at the same time.
        shares_cores: whether engine and updates use the same processors.
    """

    episodes: Sequence[Sequence[float]]
    updates: Sequence[float]
    engine: Sequence[float]
    slots: int
    shares_cores: bool


@dataclass(frozen=True)
class Forecast:
    """One setting.

    Attributes:
        staleness: S.
        slots: episodes that play at the same time.
        seconds: of the whole run.
        speedup: over S = 0 with the slots of the run.
        trainer_idle: share of the time in which the trainer waits.
    """

    staleness: int
    slots: int
    seconds: float
    speedup: float
    trainer_idle: float


def read_times(run: Path, *, shares_cores: bool = True) -> RunTimes:
    """The times of a training run.

    Raises:
        ConfigError: the folder holds no rounds.
    """
    file = run / "metrics.jsonl"
    history = read_metrics(file) if file.exists() else []
    rows = {int(row["step"]) - 1: row for row in history if "time/update_s" in row}
    seconds: dict[int, dict[tuple[str, int, int], float]] = defaultdict(dict)
    path = run / "episodes.jsonl"
    for episode in iter_episodes(path) if path.exists() else ():
        key = episode.key
        if key.phase == "train" and key.round in rows:
            seconds[key.round][key.task, key.draw, key.sample] = episode.counts.wall_s
    rounds = sorted(seconds)
    if not rounds:
        raise ConfigError(
            f"{run} holds no rounds of training: give the --out folder of `agentrl train`",
            setting="run",
        )
    largest = max(len(seconds[number]) for number in rounds)
    return RunTimes(
        [list(seconds[number].values()) for number in rounds],
        [float(rows[number]["time/update_s"]) for number in rounds],
        [float(rows[number].get("time/engine_s", 0.0)) for number in rounds],
        largest,
        shares_cores,
    )


def forecast(
    times: RunTimes, stalenesses: Sequence[int], slots: int | None = None
) -> list[Forecast]:
    """What the run would take with each bound of staleness, in their order."""
    today, _ = _replay(times, 0)
    chosen = times if slots is None else replace(times, slots=slots)
    rows = []
    for staleness in stalenesses:
        seconds, idle_s = _replay(chosen, staleness)
        rows.append(Forecast(staleness, chosen.slots, seconds, today / seconds, idle_s / seconds))
    return rows


def _replay(times: RunTimes, staleness: int) -> tuple[float, float]:
    """Seconds of the run, and seconds in which the trainer waits."""
    free = [0.0] * times.slots  # when each slot is free again
    n_rounds = len(times.episodes)
    finished = [0.0] * n_rounds
    now = idle_s = engine_free = 0.0
    dispatched = 0
    for number in range(n_rounds):
        for coming in range(dispatched, min(n_rounds, number + staleness + 1)):
            for seconds in times.episodes[coming]:
                start = max(now, heapq.heappop(free))
                heapq.heappush(free, start + seconds)
                finished[coming] = max(finished[coming], start + seconds)
            engine_free = max(engine_free, now) + times.engine[coming]
            if times.shares_cores and staleness:
                engine_free += times.updates[coming]
            finished[coming] = max(finished[coming], engine_free)
            dispatched = coming + 1
        waited_s = max(0.0, finished[number] - now)
        idle_s += waited_s
        now += waited_s + times.updates[number]
    return now, idle_s

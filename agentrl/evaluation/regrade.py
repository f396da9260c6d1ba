"""Score the artifacts of recorded episodes anew; the records themselves stay as they are. `agentrl
regrade` runs it.

An episode's record keeps its artifacts and its conversation, but no hidden part: the task is taken
from the environment again, and an episode whose task is not there, or has changed, is left out and
counted.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import os
import re
import tomllib
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple

from agentrl.env import ToolEnv
from agentrl.errors import ConfigError
from agentrl.evaluation.plan import PLAN
from agentrl.policies.base import noop
from agentrl.records.files import read_episodes, write_bytes_atomic
from agentrl.registry import factory
from agentrl.rollout.play import Setting, derive_seed, judge_by_witness
from agentrl.rollout.rollouts import Rollouts
from agentrl.runner import pool_for
from agentrl.specs import RunSpec
from agentrl.trajectory import Episode
from agentrl.types import Ending, Score, Task
from agentrl.verifiers.base import Submission

_SEARCHED = 1000
"""Tasks of an endless split that are looked at, beside four for each one that is wanted."""

_EPOCHS = 8


@dataclass(frozen=True)
class RegradePlan:
    """What is graded anew.

    Attributes:
        run: folder of an evaluation or a training run.
        env: environment; by default the one that the run names.
        settings: of the environment; they change those that the run names.
    """

    run: Path
    env: str = ""
    settings: Mapping[str, Any] = field(default_factory=dict)
    sandbox: str = "auto"


class _Stream(NamedTuple):
    """Where tasks of a run came from, and the run's seed."""

    split: str
    seed: int
    run_seed: int


class _Work(NamedTuple):
    """What is graded: an episode, its task with the hidden part, and the seed of its run."""

    episode: Episode
    task: Task
    seed: int


def regrade(
    plan: RegradePlan, progress: Callable[[int, int], None] = lambda done, total: None
) -> dict[str, Any]:
    """Grade every finished episode of a run once more and write old and new scores to
    `regrade.jsonl` in its folder.

    A file of an earlier time is kept: the next is `regrade-2.jsonl`. `progress` is told how many
        episodes are graded,
    and of how many, at the start and after each.

    Returns:
        Counts (`n_episodes`, `n_regraded`, `n_changed`, `n_no_verdict`, `skipped` by reason),
        `mean_reward` before and after over those graded both times, the first changes, and the path
        of the file.

    Raises:
        ConfigError: the run or its environment cannot be found.
        UserError: a record cannot be read.
    """
    path = plan.run / "episodes.jsonl"
    if not path.is_file():
        raise ConfigError(
            f"{plan.run} holds no episodes.jsonl: give the folder of an evaluation or a"
            " training run"
        )
    episodes = list(read_episodes(path).values())
    env_id, make, found = recorded_tasks(plan, episodes)
    skipped = {episode.key: why for episode in episodes if (why := why_skipped(episode, found))}
    due = [episode for episode in episodes if episode.key not in skipped]
    pool = pool_for(make(), plan.sandbox)
    setting = Setting(make, noop(), pool)
    rollouts = Rollouts(setting)
    try:
        works = [_Work(episode, *found[episode.task.id]) for episode in due]
        scores = rollouts.run(_grade_all(setting, works, progress))
    finally:
        rollouts.close()
    rows = [_row(episode, score) for episode, score in zip(due, scores, strict=True)]
    out = _free_name(plan.run)
    write_bytes_atomic(out, "".join(json.dumps(row) + "\n" for row in rows).encode())
    changed = [row for row in rows if row["changed"]]
    return {
        "run": str(plan.run),
        "env": env_id,
        "n_episodes": len(episodes),
        "n_regraded": len(rows),
        "n_changed": len(changed),
        "n_no_verdict": sum(row["new"]["value"] is None for row in rows),
        "skipped": dict(Counter(skipped.values())),
        "mean_reward": _means(rows),
        "changed": changed[:20],
        "out": str(out),
    }


def recorded_tasks(
    plan: RegradePlan, episodes: Sequence[Episode]
) -> tuple[str, Callable[[], ToolEnv], dict[str, tuple[Task, int]]]:
    """What the episodes of a run played.

    Returns:
        the environment's id, what makes it, and task id -> the task with its hidden part and the
        seed of its run, as far as it can be found.

    Raises:
        ConfigError: the environment cannot be found.
    """
    config = _config(plan.run)
    env_id, make = _environment(plan, config, episodes)
    return env_id, make, _find_tasks(make(), episodes, _streams(config, episodes))


def _environment(
    plan: RegradePlan, config: Mapping[str, Any], episodes: Sequence[Episode]
) -> tuple[str, Callable[[], ToolEnv]]:
    """The id of the environment that was played, and what makes it."""
    specs = RunSpec.read(plan.run)
    if specs is not None and plan.env in ("", "recorded") and len(specs.envs) == 1:
        spec = specs.env
        if plan.env != "recorded":
            spec.refuse_copies()
        settings = {**spec.settings, **plan.settings}
        return spec.id, spec.model_copy(update={"settings": settings})
    env_id = plan.env or config.get("env") or (episodes[0].env if episodes else "")
    if not plan.env and ".py" in env_id and not config.get("env"):
        raise ConfigError(
            f"{plan.run} names the file {env_id}, which a record may not have run: give it as --env"
        )
    try:
        return env_id, factory(env_id, **{**config.get("settings", {}), **plan.settings})
    except ConfigError as error:
        if plan.env:
            raise
        raise ConfigError(
            f"{error}; where it stands in a file: --env path/to/file.py:Class"
        ) from error


def _config(run: Path) -> dict[str, Any]:
    """What the run says of its environment: `env`, `settings` and `seed`, as far as it does."""
    if (run / "config.toml").is_file():
        try:
            config = tomllib.loads((run / "config.toml").read_text())
        except ValueError as error:
            raise ConfigError(
                f"{run / 'config.toml'} is damaged ({error}): restore it, or give --env"
            ) from error
        if isinstance(config.get("env"), list):
            raise ConfigError(
                f"{run} is a run of several environments, and regrade reads those of one: a run of"
                " each alone can be graded anew"
            )
        return {
            "env": config.get("env"),
            "settings": config.get("env_settings", {}),
            "seed": config.get("seed", 0),
        }
    try:
        settings = json.loads((run / PLAN).read_bytes()).get("settings", {})
    except (FileNotFoundError, ValueError):
        settings = {}
    return {"settings": settings}


def _streams(config: Mapping[str, Any], episodes: Iterable[Episode]) -> list[_Stream]:
    """Where tasks can come from: an evaluation's keys say so, a training run's seed does."""
    streams: dict[_Stream, None] = {}
    for run in {episode.key.run: None for episode in episodes}:
        if named := re.fullmatch(r".*/(\w+)/(\d+)", run):
            streams[_Stream(named[1], int(named[2]), int(named[2]))] = None
    seed = config.get("seed", 0)
    for epoch in range(_EPOCHS if "seed" in config else 0):
        streams[_Stream("train", derive_seed(seed, "train", epoch), seed)] = None
    streams |= {
        _Stream("test", derive_seed(seed, "test"), seed): None,
        _Stream("train", seed, seed): None,
    }
    return list(streams)


def _find_tasks(
    env: ToolEnv, episodes: Iterable[Episode], streams: Iterable[_Stream]
) -> dict[str, tuple[Task, int]]:
    """Task id -> the task with its hidden part, and the seed of its run, as far as they can be
    found.
    """
    wanted = {episode.task.id for episode in episodes}
    found: dict[str, tuple[Task, int]] = {}
    for stream in streams:
        missing = wanted - found.keys()
        if not missing:
            break
        try:
            tasks: Iterator[Task] = itertools.islice(
                env.tasks(stream.split, stream.seed), 4 * len(wanted) + _SEARCHED
            )
            found |= {task.id: (task, stream.run_seed) for task in tasks if task.id in missing}
        except ConfigError:  # a split that this environment does not have
            continue
    return found


def why_skipped(episode: Episode, found: Mapping[str, tuple[Task, int]]) -> str:
    """Why an episode cannot be graded or played again; empty if it can."""
    if episode.end.ending is Ending.FAILED:
        return f"failed ({episode.end.value})"
    if episode.task.id not in found:
        return "its task is not there any more"
    return "" if found[episode.task.id][0].view() == episode.task else "its task has changed"


async def _grade_all(
    setting: Setting, works: Sequence[_Work], progress: Callable[[int, int], None]
) -> list[Score]:
    room = asyncio.Semaphore(len(os.sched_getaffinity(0)) + 1)
    done = itertools.count(1)
    progress(0, len(works))

    async def one(work: _Work) -> Score:
        async with room:
            score = await _grade(setting, work)
        progress(next(done), len(works))
        return score

    return await asyncio.gather(*map(one, works))


async def _grade(setting: Setting, work: _Work) -> Score:
    episode, key = work.episode, work.episode.key
    submission = Submission(
        work.task,
        episode.messages,
        episode.end,
        episode.artifacts,
        setting.pool,
        derive_seed(work.seed, key.task, key.step, key.sample, "grade"),
        untrusted=setting.env().untrusted,
    )
    return (await judge_by_witness(replace(setting, seed=work.seed), submission, key))[1]


def _row(episode: Episode, score: Score) -> dict[str, Any]:
    old, new = (
        {"value": s.value, "parts": dict(s.parts), "why": s.why} for s in (episode.score, score)
    )
    return {
        "v": 1,
        "key": list(episode.key),
        "old": old,
        "new": new,
        "changed": old["value"] != new["value"],
    }


def _means(rows: Iterable[Mapping[str, Any]]) -> dict[str, float | None]:
    both = [row for row in rows if row["new"]["value"] is not None]
    return {
        name: sum(row[name]["value"] for row in both) / len(both) if both else None
        for name in ("old", "new")
    }


def _free_name(run: Path) -> Path:
    names = itertools.chain(
        ["regrade.jsonl"], (f"regrade-{number}.jsonl" for number in itertools.count(2))
    )
    return next(run / name for name in names if not (run / name).exists())

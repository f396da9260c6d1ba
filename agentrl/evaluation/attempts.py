"""What an evaluation has played of its plan already: attempts, and which of them counts."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from agentrl.errors import ConfigError, ContractError
from agentrl.records.files import read_episodes
from agentrl.records.redact import redactor
from agentrl.trajectory import Episode, Group
from agentrl.types import Ending, Task, TaskView


def attempts_in(out: Path | None, run: str) -> list[Episode]:
    """Episodes of an earlier, interrupted run of the same plan in this folder.

    Raises:
        ConfigError: the folder holds another evaluation.
    """
    path = out / "episodes.jsonl" if out else None
    done = list(read_episodes(path).values()) if path and path.exists() else []
    other = next((episode.key.run for episode in done if episode.key.run != run), None)
    if other is not None:
        raise ConfigError(
            f"{path} holds the evaluation {other!r}, not {run!r}: choose another --out"
        )
    return done


def samples_of(task: Task, samples: int, done: Sequence[Episode]) -> list[Episode]:
    """Recorded attempts at the first so many samples of a task."""
    view = task.view()
    view = TaskView(**redactor().row({"task": view.model_dump()})["task"])  # as recorded
    return [each for each in done if each.task == view and each.key.sample < samples]


def sample_of(episode: Episode) -> tuple[str, int]:
    """What one sample of a plan is known by, whichever attempt it was."""
    return episode.task.id, episode.key.sample


def check_starts(episodes: Iterable[Episode]) -> None:
    """Refuse samples of one task that did not begin alike.

    Raises:
        ContractError: two of them have different starts.
    """
    by_task: dict[str, dict[Any, Episode]] = defaultdict(dict)
    for episode in episodes:
        by_task[episode.task.id][episode.key] = episode
    try:
        for found in by_task.values():
            Group(tuple(found.values()))
    except ValueError as error:
        raise ContractError(str(error)) from error


def last_attempts(episodes: Sequence[Episode]) -> list[Episode]:
    """One episode per task and sample: the scored one if there is one, as an interrupted run may
    leave others.
    """
    last: dict[tuple[str, int], Episode] = {}
    for episode in sorted(
        episodes, key=lambda e: (e.end.ending is not Ending.FAILED, e.key.attempt)
    ):
        last[sample_of(episode)] = episode
    return list(last.values())

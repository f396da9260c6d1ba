"""Tasks that are evaluated and were trained on: a score on them says nothing about other tasks."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from agentrl.env import ToolEnv
from agentrl.errors import ConfigError
from agentrl.evaluation.likeness import near_pairs, numberless, renamed, shown_text
from agentrl.records.taskfile import read_tasks
from agentrl.types import Task

LOOKED_AT = 20_000
"""Tasks of a training split that are compared, where it ends."""

LOOKED_AT_ENDLESS = 200
"""The same of a split that never ends; two draws of one generator are alike early or never."""

_SHOWN = 20


def find_overlap(
    env: ToolEnv, tasks: Sequence[Task], split: str, seed: int, trained: Path | None = None
) -> dict[str, Any] | None:
    """Which tasks stand in the training split as well, ready for JSON.

    Args:
        env: whose split "train" is looked at.
        tasks: what is evaluated.
        split: where they come from.
        seed: of the split.
        trained: task file that was trained on, instead of the split.

    Returns:
        `n_tasks`, `n_trained`, and of the tasks evaluated: `exact` (shown the same text),
        `normalised` (the same but for case, spaces, serial numbers) and `near` (similarity of at
        least `likeness.NEAR`), each counted once; the first `pairs` (task, trained task, kind), and
        all `tasks`.
        None where there is nothing to compare with: tasks of the training split itself, and
        environments whose splits are the same on purpose.

    Raises:
        TaskError: the file cannot be read.
    """
    if trained is not None:
        known = read_tasks(trained)
    elif split == "train" or env.one_split:
        return None
    else:
        known = _train_split(env, seed)
    found = _first_match(tasks, known)
    counts = {kind: sum(one == kind for _, one in found.values()) for kind in _KINDS}
    pairs = [[task, other, kind] for task, (other, kind) in found.items()]
    return {
        "n_tasks": len(tasks),
        "n_trained": len(known),
        **counts,
        "pairs": pairs[:_SHOWN],
        "tasks": sorted(found),
    }


_KINDS = ("exact", "normalised", "near")


def overlap_words(overlap: Mapping[str, Any] | None) -> str:
    """A sentence of warning; empty where no task was trained on."""
    found = len(overlap["tasks"]) if overlap else 0
    if not overlap or not found:
        return ""
    task, other, kind = overlap["pairs"][0]
    kinds = ", ".join(f"{name} {overlap[name]}" for name in _KINDS if overlap[name])
    return (
        f"warning: {found} of {overlap['n_tasks']} tasks are, or nearly are, tasks that were"
        f" trained on ({kinds}; {task} is {other}, {kind}): the score is not held-out"
    )


def _train_split(env: ToolEnv, seed: int) -> list[Task]:
    most = LOOKED_AT_ENDLESS if env.endless else LOOKED_AT
    try:
        return list(itertools.islice(env.tasks("train", seed), most))
    except ConfigError:  # an environment without that split
        return []


def _first_match(tasks: Sequence[Task], known: Sequence[Task]) -> dict[str, tuple[str, str]]:
    """Task id -> the trained task that it is, and how alike, the strictest kind first."""
    exact = {_exact(other): other.id for other in known}
    normal = {text: other.id for other in known for text in _normal(other)}
    found: dict[str, tuple[str, str]] = {}
    for task in tasks:
        if (text := _exact(task)) in exact:
            found[task.id] = (exact[text], "exact")
        elif like := next((normal[text] for text in _normal(task) if text in normal), ""):
            found[task.id] = (like, "normalised")
    rest = [task for task in tasks if task.id not in found]
    if not rest:
        return found
    for (one, two), _ in near_pairs([renamed(task) for task in (*known, *rest)]):
        if one < len(known) <= two:
            found.setdefault(rest[two - len(known)].id, (known[one].id, "near"))
    return found


def _exact(task: Task) -> tuple[object, ...]:
    return task.instruction, *sorted(task.files.items())


def _normal(task: Task) -> tuple[str, str]:
    return shown_text(task), numberless(task)

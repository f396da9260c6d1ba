"""Is a policy ready for reinforcement learning? What its episodes say, question by question."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from statistics import fmean
from typing import Any

from agentrl.trajectory import Episode
from agentrl.types import EndReason

PARSED = 0.8
SCORED = 0.9
MIXED = 0.2
DISTINCT = 0.3
REGRESSION = 0.05
"""Least shares of each answer, and the loss of pass@1 that is no regression yet."""


def readiness(episodes: Iterable[Episode], before: float | None = None) -> dict[str, Any]:
    """Answer the questions from a policy's episodes, several of each task.

    Args:
        before: pass@1 of the model that the policy was made from, on the same tasks.

    Returns:
        "parsed": share of episodes without a call that could not be read; "scored": share that
        infrastructure did not fail; "mixed": share of tasks with successes and failures, from which
        alone GRPO learns (None with one episode of each); "distinct": share of different episodes
        of a task; "pass_at_1"; and "problems", in sentences: none where it is ready.
    """
    played = list(episodes)
    groups: dict[str, list[Episode]] = defaultdict(list)
    for one in played:
        groups[one.task.id].append(one)
    several = [group for group in groups.values() if len(group) > 1]
    passed = [bool(one.passed) for one in played if one.passed is not None]
    found: dict[str, Any] = {
        "episodes": len(played),
        "parsed": _mean(_is_parsed(one) for one in played),
        "scored": len(passed) / len(played) if played else 0.0,
        "mixed": _mean(len({one.passed for one in group} - {None}) > 1 for group in several),
        "distinct": _mean(len(set(map(_said, group))) / len(group) for group in several),
        "pass_at_1": _mean(passed),
    }
    return {**found, "problems": list(_problems(found, before))}


def _problems(found: dict[str, Any], before: float | None) -> Iterable[str]:
    least = {"parsed": PARSED, "scored": SCORED, "mixed": MIXED, "distinct": DISTINCT}
    fixes = {
        "parsed": "its calls cannot be read: more demonstrations, or another chat.parser",
        "scored": "infrastructure fails its episodes: see `failure` in episodes.jsonl",
        "mixed": "its groups have no signal: easier or harder tasks, or more supervised training",
        "distinct": "its episodes are alike: train less long, or raise the temperature",
    }
    for name, share in least.items():
        if found[name] is not None and found[name] < share:
            yield f"{name} is {found[name]:.2f}, under {share}: {fixes[name]}"
    now = found["pass_at_1"]
    if before is not None and now is not None and now < before - REGRESSION:
        yield f"pass@1 fell from {before:.3f} to {now:.3f}"


def _is_parsed(episode: Episode) -> bool:
    return episode.counts.bad_calls == 0 and episode.end is not EndReason.FORMAT_ERROR


def _said(episode: Episode) -> str:
    return repr([(m.content, m.tool_calls) for m in episode.messages if m.role == "assistant"])


def _mean(values: Iterable[float]) -> float | None:
    found = list(values)
    return fmean(found) if found else None

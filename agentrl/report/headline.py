"""Held-out pass@1 before and after a run, and whether the two differ by more than chance."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from markupsafe import Markup

from agentrl.evaluation.stats import TaskCounts, paired
from agentrl.report.charts import interval_svg


def headline(
    metrics: Sequence[Mapping[str, Any]],
    evaluation: Mapping[str, Any],
    evaluations: Mapping[int, TaskCounts],
) -> dict[str, Any] | None:
    """Held-out pass@1 before and after, each (value, low, high); and all other pass@k of
    `eval.json`. The interval of the change is that of `agentrl compare`.

    Args:
        evaluations: round -> counts of the held-out tasks, of every evaluation whose episodes are
            recorded.
    """
    points = [
        (
            row["eval/pass_at_1"],
            row.get("eval/ci95_low"),
            row.get("eval/ci95_high"),
            f"step {row['step']}",
        )
        for row in metrics
        if is_number(row.get("eval/pass_at_1"))
    ]
    summaries = [
        evaluation[name] for name in ("before", "after") if isinstance(evaluation.get(name), dict)
    ]
    if not points:
        points = [
            point for summary in summaries or [evaluation] if (point := _summary_point(summary))
        ]
    if not points:
        return None
    before, after = (_interval(points[0]) if len(points) > 1 else None), _interval(points[-1])
    final = summaries[-1] if summaries else evaluation
    return {
        "before": before,
        "after": after,
        "before_at": points[0][3],
        "after_at": points[-1][3],
        "change": after[0] - before[0] if before else None,
        "change_ci95": _interval_of_change(evaluations) if before else None,
        "svg": Markup(interval_svg(before, after)),
        "others": {
            k: value
            for k, value in (final.get("pass_at") or {}).items()
            if k != "1" and is_number(value)
        },
        "n_tasks": final.get("n_tasks"),
    }


def _summary_point(summary: Mapping[str, Any]) -> tuple[Any, ...] | None:
    value = (summary.get("pass_at") or {}).get("1")
    low, high = (summary.get("ci95") or {}).get("1") or (None, None)
    return (value, low, high, "evaluation") if is_number(value) else None


def _interval(point: Sequence[Any]) -> tuple[float, float, float]:
    value, low, high = point[:3]
    return value, (low if is_number(low) else value), (high if is_number(high) else value)


def _interval_of_change(
    evaluations: Mapping[int, TaskCounts],
) -> tuple[float, float] | None:
    """95 % interval of the change from the first evaluation to the last, by their common tasks."""
    if len(evaluations) < 2:
        return None
    first, last = evaluations[min(evaluations)], evaluations[max(evaluations)]
    shared = sorted(first.keys() & last.keys())
    if not shared:
        return None
    before_T, after_T = (
        [each[task][1] / each[task][0] for task in shared] for each in (first, last)
    )
    return paired(before_T, after_T).ci95


def is_number(value: Any) -> bool:
    """Whether a value of a row is a finite number."""
    return (
        isinstance(value, int | float) and not isinstance(value, bool) and abs(value) < float("inf")
    )

"""Tasks that are the same task: twice in a split, or in two of them.

Within a split they waste work, across splits they make held-out scores worthless. Across splits,
tasks are twins as well that differ in no more than a serial number: what is shown with numbers
taken out, hidden part, reference and metadata are equal.
"""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Iterator, Mapping

from agentrl.evaluation.audit.stage import AuditResult, AuditStage, broken, holds
from agentrl.evaluation.likeness import near_pairs, numberless, renamed, shown_text


async def tasks_differ(stage: AuditStage) -> AuditResult:
    """No task stands twice in a split, and none in two of them, not even renamed or renumbered."""
    rows = [(split, task) for split, tasks in stage.splits.items() for task in tasks]
    exact = {index: shown_text(task) for index, (_, task) in enumerate(rows)}
    pairs = {pair: 1.0 for pair in _equal_pairs(exact)}
    near = dict(near_pairs([renamed(task) for _, task in rows]))
    numbered = set(_equal_pairs({index: numberless(task) for index, (_, task) in enumerate(rows)}))
    alike = pairs.keys() | near.keys() | numbered
    across = [pair for pair in alike if rows[pair[0]][0] != rows[pair[1]][0]]
    within = [pair for pair in pairs if rows[pair[0]][0] == rows[pair[1]][0]]
    counts = {
        "tasks": {split: len(tasks) for split, tasks in stage.splits.items()},
        "near_within_split": sum(rows[a][0] == rows[b][0] for a, b in near.keys() - pairs.keys()),
        "exact_within_split": len(within),
        "across_splits": "one split on purpose" if stage.env.one_split else len(across),
        "most_alike_across_splits": round(
            max((near[pair] for pair in across if pair in near), default=0.0), 3
        ),
    }
    wrong = sorted(within if stage.env.one_split else [*across, *within])
    if wrong:
        (_, one), (_, other) = (rows[index] for index in wrong[0])
        words = "is the same as"
        if wrong[0] not in pairs:
            words = f"is {near[wrong[0]]:.0%} like" if wrong[0] in near else "is, renumbered,"
        return broken(other.id, f"it {words} {one.id} ({rows[wrong[0][0]][0]})", **counts)
    return holds(**counts)


def _equal_pairs(texts: Mapping[int, str]) -> Iterator[tuple[int, int]]:
    same: dict[str, list[int]] = defaultdict(list)
    for index, text in texts.items():
        same[text].append(index)
    return itertools.chain.from_iterable(
        itertools.combinations(group, 2) for group in same.values()
    )

"""Rows about what an episode costs, and whether there is something to learn."""

from __future__ import annotations

import statistics

from agentrl.evaluation.audit.stage import AuditResult, AuditStage, broken, holds, not_applicable
from agentrl.evaluation.summary import task_counts

SAMPLES = 8
"""Episodes per task from which the pass rate is estimated."""

BAND = 0.1
"""Expected p(1 - p) from which a task counts as one to learn from: with 8 samples, one that is
sometimes solved.
"""


async def oracle_fits_limits(stage: AuditStage) -> AuditResult:
    """No episode of the oracle is cut short by a limit; what it takes is the evidence."""
    episodes = await stage.oracle()
    seconds = [episode.counts.wall_s for episode in episodes]
    counts = {
        "episode_s": {
            "median": round(statistics.median(seconds), 4),
            "max": round(max(seconds), 4),
        },
        "grading_s": round(statistics.median(stage.gradings_s), 4) if stage.gradings_s else None,
        "turns": statistics.fmean(episode.counts.turns for episode in episodes),
        "tool_calls": statistics.fmean(episode.counts.tool_calls for episode in episodes),
    }
    cut = next((episode for episode in episodes if episode.truncated), None)
    if cut is not None:
        return broken(cut.task.id, f"the oracle is cut short by {cut.end.value}", **counts)
    return holds(**counts)


async def something_to_learn(stage: AuditStage) -> AuditResult:
    """The given policy solves some task sometimes: only there does a group of episodes carry a
    signal.
    """
    if stage.policy is None:
        return not_applicable("no policy was given (--policy)")
    episodes = await stage.play(stage.policy, stage.tasks, SAMPLES)
    counts = {task: (n, c) for task, (n, c) in task_counts(episodes).items() if n}
    variances = {task: in_band(c, n) for task, (n, c) in counts.items()}
    share = sum(value >= BAND for value in variances.values()) / max(1, len(variances))
    evidence = {
        "policy": stage.policy.name,
        "episodes": len(episodes),
        "share_in_band": round(share, 3),
        "pass_rate": sum(c for _, c in counts.values())
        / max(1, sum(n for n, _ in counts.values())),
        "never_solved": sum(c == 0 for _, c in counts.values()),
        "always_solved": sum(c == n for n, c in counts.values()),
    }
    if not share:
        return broken(
            stage.tasks[0].id, f"no task is solved sometimes by {stage.policy.name}", **evidence
        )
    return holds(**evidence)


def in_band(passed: int, scored: int) -> float:
    """Posterior mean of p(1 - p), p the pass rate with a uniform prior.

    p | data ~ Beta(a, b) with a = 1 + passed and b = 1 + scored - passed; E[p(1 - p)] = ab / ((a +
    b)(a + b + 1)).
    """
    a, b = 1 + passed, 1 + scored - passed
    return a * b / ((a + b) * (a + b + 1))

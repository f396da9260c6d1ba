"""Rows about the score: who gets it, who must not, and whether it stays the same."""

from __future__ import annotations

import asyncio
from collections import Counter
from dataclasses import replace
from typing import Any

from agentrl.evaluation.audit.probes import Attack, Probe
from agentrl.evaluation.audit.stage import (
    AuditResult,
    AuditStage,
    broken,
    earns,
    holds,
    not_applicable,
    not_judged,
    passes,
    went_wrong,
)
from agentrl.evaluation.audit.variants import impossible, special_cased
from agentrl.policies.base import noop
from agentrl.types import Score, Task
from agentrl.verifiers.base import Submission

SLOW_S = 3.0

GRADINGS = 5
"""How often one submission is graded."""


async def oracle_passes(stage: AuditStage) -> AuditResult:
    """Every episode of the oracle reaches the threshold; says how many were judged in isolation."""
    episodes = await stage.oracle()
    wrong = [episode for episode in episodes if not episode.passed]
    counts: dict[str, Any] = {"episodes": len(episodes), "passed": len(episodes) - len(wrong)}
    told = [
        number
        for episode in episodes
        for name, number in episode.score.parts.items()
        if name.rpartition("/")[2] == "isolated"
    ]
    if told:
        counts["isolated"] = round(sum(told) / len(told), 3)
    if wrong:
        return broken(wrong[0].task.id, f"the oracle gets {went_wrong(wrong[0])}", **counts)
    return holds(**counts)


async def noop_fails(stage: AuditStage) -> AuditResult:
    """No episode earns anything in which nothing is done."""
    episodes = await stage.play(noop(), stage.tasks)
    scored = [episode for episode in episodes if episode.reward is not None]
    best = max((episode.reward for episode in scored if episode.reward is not None), default=None)
    counts = {
        "episodes": len(episodes),
        "passed": sum(episode.passed is True for episode in episodes),
        "best": best,
    }
    wrong = next((one for one in episodes if one.passed is not False or earns(one.score)), None)
    if wrong is not None:
        return broken(wrong.task.id, f"doing nothing gets {went_wrong(wrong)}", **counts)
    return holds(**counts)


async def attacks_fail(stage: AuditStage) -> AuditResult:
    """No attack earns anything, and none silences the verifier.

    An attack that costs `SLOW_S` seconds (it hangs until a limit ends it) is tried on one task
    only.
    """
    slow: set[str] = set()

    async def one(task: Task, attack: Attack) -> tuple[Task, Attack, Score]:
        submission = await stage.hand_in(task, attack)
        score, seconds = await stage.timed_score(submission)
        if seconds > SLOW_S:
            slow.add(attack.name)
        return task, attack, score

    tries = [(task, attack) for task in stage.tasks for attack in stage.attacks(task)]
    first = [each for each in tries if each[0] is stage.tasks[0]]
    judged = await asyncio.gather(*(one(*each) for each in first))
    rest = [(task, attack) for task, attack in tries[len(first) :] if attack.name not in slow]
    once = sorted(slow)
    judged += await asyncio.gather(*(one(*each) for each in rest))
    if not judged:
        return not_applicable("no attack is known for these tasks")
    wrong = [
        (task, attack, score)
        for task, attack, score in judged
        if score.value is None or earns(score)
    ]
    accepted = Counter(attack.name for _, attack, _ in wrong)
    names = {attack.name for _, attack, _ in judged}
    counts = {
        "attacks": len(names),
        "tries": len(judged),
        "accepted": dict(accepted),
        "slow_tried_once": once,
    }
    if wrong:
        task, attack, score = wrong[0]
        got = "no verdict" if score.value is None else f"score {score.value:g}"
        return broken(task.id, f"{attack.name!r} gets {got}: {score.why}", **counts)
    return holds(**counts)


async def visible_is_not_enough(stage: AuditStage) -> AuditResult:
    """A file that looks up what the task shows, and is otherwise as it was found, does not pass."""
    cheats = [(task, cheat) for task in stage.tasks if (cheat := special_cased(task))]
    if not cheats:
        return not_applicable("no task shows an example of a function that its artifacts define")

    async def one(task: Task, cheat: dict[str, str]) -> Score:
        files = {path: text.encode() for path, text in cheat.items()}
        return await stage.score(await stage.hand_in(task, Probe("the examples", files)))

    scores = await asyncio.gather(*(one(task, cheat) for task, cheat in cheats))
    judged = zip((task for task, _ in cheats), scores, strict=True)
    wrong = [(task, score) for task, score in judged if score.value is None or passes(score, task)]
    counts = {"tasks": len(cheats), "passed": len(wrong)}
    if wrong:
        task, score = wrong[0]
        return broken(task.id, f"looking up the visible examples is enough: {score.why}", **counts)
    return holds(**counts)


async def impossible_fails(stage: AuditStage) -> AuditResult:
    """With one expected value made wrong, what passed before does not pass any more."""
    rows = [
        (variant, episode) for task, episode in await stage.solved() for variant in impossible(task)
    ]
    if not rows:
        return not_applicable("no hidden part has an expected value that could be made wrong")
    scores = await asyncio.gather(
        *(stage.score(stage.submission(variant, episode)) for variant, episode in rows)
    )
    judged = list(zip(rows, scores, strict=True))
    wrong = [(variant, score) for (variant, _), score in judged if passes(score, variant)]
    counts = {
        "variants": len(rows),
        "tasks": len({variant.id for variant, _ in rows}),
        "passed": len(wrong),
        "no_verdict": sum(score.value is None for score in scores),
    }
    if wrong:
        variant, score = wrong[0]
        return broken(variant.id, f"a wrong expected value is not noticed: {score.why}", **counts)
    if all(score.value is None for score in scores):
        return not_judged(f"no variant got a verdict: {scores[0].why}", **counts)
    return holds(**counts)


async def gradings_agree(stage: AuditStage) -> AuditResult:
    """One submission, the oracle's or the untouched start, gets one score, however often graded."""
    rows: list[tuple[str, Submission]] = []
    for task in stage.tasks:
        rows.append((task.id, await stage.hand_in(task, Probe("nothing"))))
    rows += [(task.id, stage.submission(task, episode)) for task, episode in await stage.solved()]
    scores = [
        await asyncio.gather(*(stage.score(_anew(row, n)) for n in range(GRADINGS)))
        for _, row in rows
    ]
    values = [{score.value for score in group} for group in scores]
    wrong = [
        (task_id, seen) for (task_id, _), seen in zip(rows, values, strict=True) if len(seen) > 1
    ]
    counts = {"submissions": len(rows), "gradings": len(rows) * GRADINGS, "differ": len(wrong)}
    if wrong:
        task_id, seen = wrong[0]
        shown = ", ".join(sorted(map(str, seen))[:5])
        return broken(task_id, f"{GRADINGS} gradings of one submission gave {shown}", **counts)
    if all(seen == {None} for seen in values):
        return not_judged(f"no grading gave a verdict: {scores[0][0].why}", **counts)
    return holds(**counts)


def _anew(submission: Submission, number: int) -> Submission:
    """The same work under another seed, of a task that no verdict is remembered for."""
    task = submission.task
    other = task.model_copy(update={"metadata": {**task.metadata, "grading": number}})
    return replace(submission, task=other, seed=submission.seed + number)

"""Where an audit plays: tasks, sandboxes, the oracle's episodes, what an agent hands in."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from agentrl.env import ToolEnv
from agentrl.evaluation.audit.probes import Attack
from agentrl.policies.base import Policy, Scripted, noop
from agentrl.rollout.play import Setting, derive_seed, judge_by_witness, play
from agentrl.runner import Runner, borrow
from agentrl.sandboxes.base import Sandbox, SandboxPool
from agentrl.trajectory import Episode, EpisodeKey
from agentrl.types import Ending, EndReason, Message, Score, Task
from agentrl.verifiers.base import Submission
from agentrl.verifiers.code.hidden_tests import PYTHON

REPLAYS = 3
"""Episodes of the oracle per task: most rows start from them, and they must be equal."""

SCRIPT_S = 20.0
"""Seconds that an attack's script may run."""

Verdict = Literal["holds", "broken", "not applicable", "not judged"]


@dataclass(frozen=True)
class AuditResult:
    """What a row found.

    Attributes:
        why: what breaks the promise, or why it does not apply.
        evidence: numbers and names, ready for JSON; nothing hidden is among them.
        task: id of the first task that breaks the promise.
    """

    verdict: Verdict
    why: str = ""
    evidence: Mapping[str, Any] = field(default_factory=dict)
    task: str = ""


def holds(**evidence: Any) -> AuditResult:
    """The promise is kept."""
    return AuditResult("holds", evidence=evidence)


def broken(task: str, why: str, **evidence: Any) -> AuditResult:
    """The promise is broken, first by this task."""
    return AuditResult("broken", why, evidence, task)


def not_judged(why: str, **evidence: Any) -> AuditResult:
    """Nothing that was tried gave a verdict, so nothing is known."""
    return AuditResult("not judged", why, evidence)


def not_applicable(why: str, **evidence: Any) -> AuditResult:
    """There is nothing that the promise could be about."""
    return AuditResult("not applicable", why, evidence)


@dataclass
class AuditStage:
    """What every row of an audit may use; it lives on one event loop.

    Attributes:
        splits: tasks by split, more of them than are played: duplicates are looked for among all.
        tasks: those that are played, with different ids.
        attacks: what is tried on a task, beside what the rows themselves try.
        policy: whose pass rate says how much there is to learn; None leaves that row out.
        gradings_s: how long every grading so far took, in seconds.
    """

    make: Callable[[], ToolEnv]
    pool: SandboxPool
    splits: Mapping[str, Sequence[Task]]
    tasks: Sequence[Task]
    attacks: Callable[[Task], Iterable[Attack]]
    policy: Policy | None = None
    seed: int = 0
    gradings_s: list[float] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.env = self.make()
        self._room = asyncio.Semaphore(len(os.sched_getaffinity(0)) + 1)
        self._oracle: list[Episode] | None = None

    async def play(self, policy: Policy, tasks: Sequence[Task], samples: int = 1) -> list[Episode]:
        """So many episodes of every task, in the order of the tasks."""
        setting = Setting(self.make, policy, self.pool, "audit", self.seed)

        async def one(task: Task, sample: int) -> Episode:
            async with self._room:
                return await play(setting, task, EpisodeKey("audit", 0, task.id, sample))

        return await asyncio.gather(
            *(one(task, sample) for task in tasks for sample in range(samples))
        )

    async def oracle(self) -> list[Episode]:
        """`REPLAYS` episodes of the oracle on every task; played once."""
        if self._oracle is None:
            policy = Scripted("oracle", self.env.oracle_actions)
            self._oracle = await self.play(policy, self.tasks, REPLAYS)
        return self._oracle

    async def solved(self) -> list[tuple[Task, Episode]]:
        """Every task whose oracle passes, with its first episode that does."""
        found: dict[str, Episode] = {}
        for episode in await self.oracle():
            if episode.passed:
                found.setdefault(episode.task.id, episode)
        return [(task, found[task.id]) for task in self.tasks if task.id in found]

    def submission(self, task: Task, episode: Episode) -> Submission:
        """What an episode handed in, for a task that may be another one."""
        return Submission(
            task,
            episode.messages,
            episode.end,
            episode.artifacts,
            self.pool,
            self.seed_of(task),
            untrusted=self.make().untrusted,
        )

    async def hand_in(self, task: Task, attack: Attack) -> Submission:
        """What an agent hands in that writes an attack's files over its start state, runs its
        script and answers.

        Scripts are left out where the sandbox is no boundary.
        """
        env = self.make()
        runner = Runner(env)
        async with self._room, borrow(env, self.pool) as sandbox:
            opening = await self.reset(runner, task, sandbox)
            try:
                if sandbox is not None:
                    await sandbox.put(attack.files)
                    if attack.script and self.pool.backend.is_boundary:
                        await sandbox.exec([PYTHON, "-c", attack.script], timeout_s=SCRIPT_S)
                artifacts = await runner.collect()
            finally:
                await runner.close()
        return Submission(
            task,
            (*opening, Message.assistant(attack.answer)),
            EndReason.SUBMITTED,
            artifacts,
            self.pool,
            self.seed_of(task),
            opening=len(opening),
            untrusted=env.untrusted,
        )

    async def reset(
        self, runner: Runner, task: Task, sandbox: Sandbox | None
    ) -> tuple[Message, ...]:
        """Begin the episode that `play` would begin."""
        seed = derive_seed(self.seed, task.id, 0)
        return await runner.reset(task.view(), seed=seed, sandbox=sandbox)

    async def score(self, submission: Submission) -> Score:
        """The verdict by the rule of `agentrl.rollout.blame`; no score where a witness has none."""
        return (await self.timed_score(submission))[0]

    async def timed_score(self, submission: Submission) -> tuple[Score, float]:
        """The verdict, and the seconds that it took without waiting for its turn."""
        setting = Setting(self.make, noop(), self.pool, "audit", self.seed)
        async with self._room:
            start = time.perf_counter()
            key = EpisodeKey("audit", 0, submission.task.id, 0)
            _, score = await judge_by_witness(setting, submission, key)
            seconds = time.perf_counter() - start
        self.gradings_s.append(seconds)
        return score, seconds

    def seed_of(self, task: Task) -> int:
        """The seed of a grading."""
        return derive_seed(self.seed, task.id, 0, 0, "grade")


def passes(score: Score, task: Task) -> bool:
    """Whether a score reaches the task's threshold, shaping left out."""
    return score.verdict is not None and score.verdict >= task.threshold


def earns(score: Score) -> bool:
    """Whether a score is worth anything, shaping left out: what nobody worked for must be worth
    nothing.
    """
    return score.verdict is not None and score.verdict > 0


def went_wrong(episode: Episode) -> str:
    """How an episode ended, for people."""
    if episode.end.ending is Ending.FAILED:
        return f"{episode.end.value}: {episode.failure.strip().splitlines()[-1][:200]}"
    return f"score {episode.reward:g} ({episode.end.value}): {episode.score.why}"

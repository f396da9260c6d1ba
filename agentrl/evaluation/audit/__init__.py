"""Can this environment be trusted? One row per promise, each with its evidence."""

from __future__ import annotations

import itertools
import time
from collections.abc import Awaitable, Callable, Iterable
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NamedTuple

from agentrl.env import ToolEnv
from agentrl.errors import ConfigError, SandboxLost
from agentrl.evaluation.audit.price import oracle_fits_limits, something_to_learn
from agentrl.evaluation.audit.probes import Attack, every_attack
from agentrl.evaluation.audit.scores import (
    attacks_fail,
    gradings_agree,
    impossible_fails,
    noop_fails,
    oracle_passes,
    visible_is_not_enough,
)
from agentrl.evaluation.audit.stage import AuditResult, AuditStage, Verdict
from agentrl.evaluation.audit.twins import tasks_differ
from agentrl.evaluation.audit.world import (
    hidden_is_absent,
    hidden_is_not_told,
    reading_changes_nothing,
    replays_are_equal,
    reset_is_complete,
)
from agentrl.evaluation.contract import SPLITS
from agentrl.evaluation.run import EvalPlan, close_policy, open_policy
from agentrl.policies.base import noop
from agentrl.records.files import write_json_atomic
from agentrl.rollout.play import Setting
from agentrl.rollout.rollouts import Rollouts
from agentrl.runner import pool_for
from agentrl.types import Task

COMPARED = 200
"""Tasks per split among which duplicates are looked for, if there are so many."""


class Promise(NamedTuple):
    """One row: its name, the promise in words, what to do when it is broken, and the function that
    finds out.
    """

    name: str
    words: str
    hint: str
    check: Callable[[AuditStage], Awaitable[AuditResult]]


PROMISES = (
    Promise(
        "oracle",
        "the reference solution passes every task",
        "mend field oracle, field hidden or oracle_actions of the task named; `agentrl check` shows"
        " what its tools say",
        oracle_passes,
    ),
    Promise(
        "noop",
        "doing nothing earns nothing",
        "let the hidden part assert what the task asks for: the start state must fail it",
        noop_fails,
    ),
    Promise(
        "attacks",
        "no known attack is rewarded",
        "judge by value in a process of its own (hidden.cases or hidden.check), never by exit code,"
        " output or a report",
        attacks_fail,
    ),
    Promise(
        "visible_only",
        "looking up the visible examples is not enough",
        "add hidden cases that differ from every example that the task shows",
        visible_is_not_enough,
    ),
    Promise(
        "impossible",
        "nothing passes once an expected value is wrong",
        "compare every expected value; do not compare with the text of the reference or skip what"
        " is hard to compare",
        impossible_fails,
    ),
    Promise(
        "hidden_absent",
        "nothing hidden is in the agent's world",
        "keep tests and references in fields hidden and oracle, and write nothing of them to files,"
        " prompts or tools",
        hidden_is_absent,
    ),
    Promise(
        "hidden_untold",
        "no verdict or record tells a hidden value",
        "word `why` and `parts` of the Score by counts and kinds, never by expected values or"
        " exception texts",
        hidden_is_not_told,
    ),
    Promise(
        "reset",
        "a hostile episode changes no later one",
        "keep all state in the sandbox or the instance, none in class attributes, modules or files"
        " of the host",
        reset_is_complete,
    ),
    Promise(
        "replay",
        "equal task and seed give an equal episode",
        "draw chance from self.rng, and show no times, process numbers, addresses or unsorted"
        " listings",
        replays_are_equal,
    ),
    Promise(
        "duplicates",
        "no task stands twice, nor, renamed or nearly, in two splits",
        "split by a hash of what stays under renaming; let instruction or files say what only"
        " metadata tells apart",
        tasks_differ,
    ),
    Promise(
        "flakiness",
        "one submission gets one score",
        "take clocks, unseeded chance and order of sets out of the hidden part; widen time limits",
        gradings_agree,
    ),
    Promise(
        "cost",
        "the reference fits into the limits",
        "raise `limits`, or make the task smaller",
        oracle_fits_limits,
    ),
    Promise(
        "learnability",
        "the given policy solves some task sometimes",
        "choose easier or harder tasks: what is always or never solved trains nothing",
        something_to_learn,
    ),
    Promise(
        "effects",
        "tools that declare to read change no file",
        'mark the tool @tool(effect="write"), or let it write outside of the work area',
        reading_changes_nothing,
    ),
)


@dataclass(frozen=True)
class AuditPlan:
    """What is audited.

    Attributes:
        make: builds the environment.
        tasks: how many tasks of `split` are played.
        policy: name of a policy (see `agentrl.evaluation.run.POLICIES`) for the row about
            learnability; empty: none.
        out: folder for `audit.json`; None keeps nothing.
        attacks: what is tried on a task.
    """

    make: Callable[[], ToolEnv]
    tasks: int = 8
    split: str = "test"
    sandbox: str = "auto"
    policy: str = ""
    seed: int = 0
    out: Path | None = None
    attacks: Callable[[Task], Iterable[Attack]] = every_attack

    def __post_init__(self) -> None:
        if self.tasks < 1:
            raise ConfigError(f"--limit {self.tasks} must be at least 1")


def audit(plan: AuditPlan, progress: Callable[[str], None] = lambda name: None) -> dict[str, Any]:
    """Try every promise; `progress` is told the name of each row before it begins.

    Returns:
        `ok`, `rows` (promise, words, verdict, why, evidence, task, hint), and what was audited;
        ready for JSON.

    Raises:
        ConfigError: a part cannot be had, or the split has no tasks.
        SandboxLost: no sandbox could be started: that says nothing about the environment.
    """
    env = plan.make()
    policy = open_policy(EvalPlan(plan.make, plan.policy), env) if plan.policy else None
    splits = {split: _take(env, split, plan) for split in dict.fromkeys((*SPLITS, plan.split))}
    pool = pool_for(env, plan.sandbox)
    tasks = splits[plan.split][: plan.tasks]
    stage = AuditStage(plan.make, pool, splits, tasks, plan.attacks, policy, plan.seed)
    started = time.monotonic()
    with ExitStack() as parts:
        player = policy or noop()
        rollouts = Rollouts(Setting(plan.make, player, pool))  # its loop is where the pool lives
        parts.callback(rollouts.close)
        parts.callback(lambda: rollouts.run(close_policy(player)))
        parts.callback(rollouts.cancel)  # first: nothing may ask what is closed
        rows = rollouts.run(_rows(stage, progress))
    result = {
        "env": env.id,
        "split": plan.split,
        "tasks": len(tasks),
        "sandbox": pool.backend.name if env.needs_sandbox else "none",
        "ok": all(row["verdict"] in ("holds", "not applicable") for row in rows),
        "rows": rows,
        "seconds": round(time.monotonic() - started, 2),
    }
    if plan.out is not None:
        write_json_atomic(plan.out / "audit.json", result)
    return result


def _take(env: ToolEnv, split: str, plan: AuditPlan) -> list[Task]:
    tasks = list(itertools.islice(env.tasks(split, plan.seed), max(COMPARED, plan.tasks)))
    if not tasks and split == plan.split:
        raise ConfigError(f"{env.id} has no tasks in split {split!r}: name another with --split")
    return tasks


async def _rows(stage: AuditStage, progress: Callable[[str], None]) -> list[dict[str, Any]]:
    rows = []
    for promise in PROMISES:
        progress(promise.name)
        found = await _guarded(promise, stage)
        rows.append(
            {"promise": promise.name, "words": promise.words, **asdict(found), "hint": promise.hint}
        )
    return rows


async def _guarded(promise: Promise, stage: AuditStage) -> AuditResult:
    """Whatever an environment raises breaks the promise that was being tried."""
    try:
        return await promise.check(stage)
    except SandboxLost:
        raise
    except Exception as error:  # noqa: BLE001 - the environment under audit may raise anything
        return AuditResult("broken", f"it cannot be tried: {type(error).__name__}: {error}")


__all__ = ["PROMISES", "Attack", "AuditPlan", "AuditResult", "Promise", "Verdict", "audit"]

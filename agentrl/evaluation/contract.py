"""The environment contract: rules in words, checked on any environment by `agentrl check`."""

from __future__ import annotations

import itertools
import re
import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from agentrl.env import ToolEnv
from agentrl.errors import AgentRLError, ConfigError, ContractError
from agentrl.evaluation.leaks import shown_secret
from agentrl.evaluation.summary import Outcome, outcomes
from agentrl.gym import GymEnv
from agentrl.policies.base import Policy, Scripted, noop
from agentrl.registry import factory
from agentrl.rollout.play import Setting
from agentrl.rollout.rollouts import Rollouts
from agentrl.runner import pool_for
from agentrl.tools import tools_of
from agentrl.trajectory import Episode
from agentrl.types import BadCall, Ending, EndReason, LimitSettings, Message, Task, ToolCall

SPLITS = ("train", "test")
_TOOLS = "its tools are typed and documented"


@dataclass(frozen=True, slots=True)
class RuleResult:
    """One rule, and the problem that breaks it; empty where the rule holds."""

    rule: str
    problem: str = ""


def check_named(
    env_id: str,
    settings: Mapping[str, Any],
    *,
    limits: LimitSettings | None = None,
    n_tasks: int = 8,
    sandbox: str = "auto",
) -> list[RuleResult]:
    """`check_environment` for an id or `file.py:Class`; a tool that `@tool` refuses breaks a rule.

    Raises:
        ConfigError: the environment is unknown, cannot be loaded or does not take its settings, or
            the sandbox cannot be used.
    """
    try:
        make = factory(env_id, limits, **settings)
    except ContractError as error:  # Python could not build the class, so nothing else can be tried
        return [RuleResult(_TOOLS, f"{error} (no other rule was tried)")]
    return check_environment(make, n_tasks=n_tasks, sandbox=sandbox)


def check_environment(
    make: Callable[[], ToolEnv], *, n_tasks: int = 8, sandbox: str = "auto"
) -> list[RuleResult]:
    """Try every rule on the first `n_tasks` tasks of each split.

    Args:
        make: builds the environment.
        n_tasks: tasks per split.
        sandbox: backend, for environments that need one.

    Raises:
        ConfigError: the backend cannot be used, or is no boundary for an untrusted environment; or
            the environment says that a setting of its own is wrong or missing.
    """
    return list(_findings(make, n_tasks, sandbox))


def _findings(make: Callable[[], ToolEnv], n_tasks: int, sandbox: str) -> Iterator[RuleResult]:
    env = make()
    sandbox = _usable(sandbox, env)
    yield RuleResult(
        "its id ends in a version, as in name-v0",
        "" if re.search(r".-v\d+$", env.id) else f"id is {env.id!r}",
    )
    yield _guarded(_TOOLS, lambda: _check_tools(env))
    tasks: dict[str, list[Task]] = {}
    for split in SPLITS:
        rule = f"split {split!r} has tasks, with different ids, in an order that the seed fixes"
        yield _guarded(rule, lambda split=split: _check_split(make, split, n_tasks, tasks))  # type: ignore[misc]
    if not all(tasks.get(split) for split in SPLITS):
        return
    if not env.one_split:
        yield _guarded("splits share no task", lambda: _check_disjoint(tasks))
    yield _guarded(
        "no long text of a hidden part or oracle is in what the agent gets",
        lambda: _check_leaks(tasks),
    )
    every = [task for split in SPLITS for task in tasks[split]]
    every = list({task.id: task for task in every}.values())
    oracle = _play(make, Scripted("oracle", env.oracle_actions), every, sandbox, group_size=2)
    yield _judged("the oracle passes every task", oracle, lambda episode: episode.passed is True)
    yield RuleResult("no tool fails on every call of the oracle", _useless_tools(oracle))
    yield RuleResult("equal task and seed give an equal start", _unequal_starts(oracle))
    idle = _play(make, noop(), every, sandbox)
    yield _judged("doing nothing passes no task", idle, lambda episode: episode.passed is False)
    rude = _play(make, Scripted("rude", lambda task: _rude_turns(env)), every[:2], sandbox)
    yield _judged(
        "bad calls are answered, never a crash",
        rude,
        lambda episode: (
            episode.end.ending is not Ending.FAILED and episode.end is not EndReason.AGENT_FAULT
        ),
    )
    yield _guarded("gymnasium's check_env passes", lambda: _check_gym(make, sandbox))


def _usable(sandbox: str, env: ToolEnv) -> str:
    """The backend to use; one that is missing raises here, as it is no fault of the environment."""
    pool = pool_for(env, sandbox)
    if env.needs_sandbox:
        pool.tell()
    return pool.backend.name if sandbox == "auto" else sandbox


def _guarded(rule: str, check: Callable[[], str]) -> RuleResult:
    """The finding of a check; what it raises is the problem, unless a setting is wrong."""
    try:
        return RuleResult(rule, check())
    except ConfigError:
        raise
    except Exception as error:  # noqa: BLE001 - the environment under test may raise anything
        return RuleResult(rule, f"{type(error).__name__}: {error}")


def _check_tools(env: ToolEnv) -> str:
    """`@tool` has checked types and docstrings; this checks that the agent can act at all."""
    asked_once = env.limits.turns == 1  # the answer is all there is to do
    acts = tools_of(type(env)) or type(env).on_text is not ToolEnv.on_text or asked_once
    return "" if acts else "it has no tools and no on_text: set limits.turns to 1 if that is meant"


def _check_split(
    make: Callable[[], ToolEnv], split: str, n_tasks: int, found: dict[str, list[Task]]
) -> str:
    first, again = (list(itertools.islice(make().tasks(split, 0), n_tasks)) for _ in range(2))
    found[split] = first
    if not first:
        return "it is empty"
    if first != again:
        return "the same seed gave other tasks"
    if len({task.id for task in first}) < len(first):
        return "two tasks share an id"
    return ""


def _check_disjoint(tasks: dict[str, list[Task]]) -> str:
    content = {
        split: {(task.instruction, *task.files.items()): task.id for task in tasks[split]}
        for split in SPLITS
    }
    shared = [content["train"][key] for key in content["train"].keys() & content["test"].keys()]
    return f"task {sorted(shared)[0]} is in both" if shared else ""


def _check_leaks(tasks: dict[str, list[Task]]) -> str:
    for task in itertools.chain.from_iterable(tasks.values()):
        if shown := shown_secret(task):
            return f"task {task.id} shows {shown[:40]!r}…"
    return ""


def _play(
    make: Callable[[], ToolEnv],
    policy: Policy,
    tasks: list[Task],
    sandbox: str,
    group_size: int = 1,
) -> list[Episode] | str:
    """All episodes, or what went wrong before there were any."""
    try:
        rollouts = Rollouts(
            Setting(make, policy, pool_for(make(), sandbox)), group_size=group_size, concurrency=4
        )
    except AgentRLError as error:
        return str(error)
    try:
        groups = rollouts.gather(tasks, 0)
    except Exception as error:  # noqa: BLE001 - the environment under test may raise anything
        return f"{type(error).__name__}: {error}"
    finally:
        rollouts.close()
    return [episode for group in groups for episode in group.episodes]


def _judged(
    rule: str, episodes: list[Episode] | str, holds: Callable[[Episode], bool]
) -> RuleResult:
    if isinstance(episodes, str):
        return RuleResult(rule, episodes)
    wrong = [episode for episode in episodes if not holds(episode)]
    if not wrong:
        return RuleResult(rule)
    first = wrong[0]
    why = first.failure or first.score.why
    return RuleResult(
        rule,
        f"{len(wrong)} of {len(episodes)} do not, first task {first.task.id} ({first.end.value}):"
        f" {why}",
    )


def _useless_tools(episodes: list[Episode] | str) -> str:
    if isinstance(episodes, str):
        return episodes
    by_name: dict[str, list[Outcome]] = {}
    for outcome in (outcome for episode in episodes for outcome in outcomes(episode)):
        by_name.setdefault(outcome.name or "(unreadable call)", []).append(outcome)
    return "; ".join(
        f"tool {name!r} failed on {len(found)} of {len(found)} calls, the first: {found[0].error}"
        for name, found in by_name.items()
        if all(outcome.error for outcome in found)
    )


def _unequal_starts(episodes: list[Episode] | str) -> str:
    if isinstance(episodes, str):
        return episodes
    starts: dict[str, set[str]] = {}
    for episode in episodes:
        starts.setdefault(episode.task.id, set()).add(episode.start)
    wrong = [task for task, seen in starts.items() if len(seen) > 1]
    return f"task {wrong[0]} began in {len(starts[wrong[0]])} different states" if wrong else ""


def _rude_turns(env: ToolEnv) -> Iterator[Message]:
    yield Message.assistant("", ToolCall("no_such_tool", {}))
    for spec in env.tools:
        yield Message.assistant("", ToolCall(spec.name, {"no_such_argument": [None]}))
    yield Message.assistant("\x00\ud83d", BadCall("{", "this is no JSON"))


def _check_gym(make: Callable[[], ToolEnv], sandbox: str) -> str:
    from gymnasium.utils.env_checker import check_env

    face = GymEnv(make, lambda: pool_for(make(), sandbox, 2))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        check_env(face, skip_render_check=True)
    return ""


__all__ = ["RuleResult", "check_environment", "check_named"]

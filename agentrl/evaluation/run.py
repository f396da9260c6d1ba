"""Run an evaluation: admit tasks, play them, summarise; or go on where it was interrupted."""

from __future__ import annotations

import itertools
import json
import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from agentrl.calls import Guard
from agentrl.chat.settings import ChatSettings, in_words
from agentrl.chat.tokens import Chat
from agentrl.dialogue import Dialogue, PolicyUser
from agentrl.engines.base import Sampling
from agentrl.env import ToolEnv
from agentrl.errors import ConfigError, ContractError, TaskError
from agentrl.evaluation.overlap import find_overlap, overlap_words
from agentrl.evaluation.plan import (
    LOADED,
    POLICIES,
    EvalPlan,
    EvalSpending,
    Stopped,
    budget_of,
    claim,
    fingerprint_of,
    priced,
)
from agentrl.evaluation.summary import injection_report, summarize
from agentrl.policies.base import Policy, Scripted, TokenPolicy, noop
from agentrl.policies.served import OPENAI_URL, Prices, ServedPolicy
from agentrl.records.files import EpisodeWriter, read_episodes, write_json_atomic
from agentrl.records.owner import owned
from agentrl.records.redact import redactor
from agentrl.rollout.play import Setting
from agentrl.rollout.rollouts import Dispatch, Rollouts, close_policy
from agentrl.runner import pool_for
from agentrl.safety.loading import idle_patterns, read_policy, refuse_unfit
from agentrl.sandboxes.base import SandboxPool
from agentrl.specs import EnvSpec, GuardSpec, PolicySpec, PoolSpec, RunSpec
from agentrl.trajectory import Episode, Group
from agentrl.types import Ending, Task, TaskView
from agentrl.verifiers.code.admission import admit
from agentrl.verifiers.code.hidden import FORMS

MANY, FEW = 64, 4
"""Episodes that play at the same time: usually, and where tokens or dollars are bounded."""

_SPEAKING = "hf:MODEL, vllm:MODEL or openai:MODEL@URL"
_BARE_ADDRESS = re.compile(r"^localhost\b|:\d{2,5}(/|$)|/v1/?$")


@dataclass
class EvalProgress:
    """Told of what happens; the default says nothing."""

    started: Callable[[int], None] = lambda episodes: None
    episode: Callable[[Episode], None] = lambda episode: None
    note: Callable[[str], None] = lambda sentence: None


def evaluate(plan: EvalPlan, progress: EvalProgress | None = None) -> dict[str, Any]:
    """Play every admitted task and return the summary (see `summary.summarize`), with what was
    refused and why.

    An interrupt, or a bound that is met, ends the playing: the summary is then of what was played,
    `stopped` says why and `n_missing` how many samples are left; with `plan.out` the same call goes
    on with them.

    Raises:
        ConfigError: a part cannot be had, or the split is endless and has no limit.
        TaskError: no task was admitted.
        ContractError: episodes of one task start from different states.
    """
    progress = progress or EvalProgress()
    env = plan.make()
    tasks = _take(env, plan)
    overlap = find_overlap(env, tasks, plan.split, plan.seed, plan.trained)
    if said := overlap_words(overlap):
        progress.note(said)
    policy = open_policy(plan, env)
    if isinstance(policy, TokenPolicy):
        progress.note(in_words(policy.chat))
    with ExitStack() as parts:
        if plan.out is not None:
            parts.enter_context(owned(plan.out))
        match = _Match(plan, env, policy, progress)
        if plan.out is not None:
            claim(plan.out, plan_identity(plan, env, tasks))
            _write_specs(plan, plan.out, env, match.run)
            match.writer = parts.enter_context(EpisodeWriter(plan.out / "episodes.jsonl"))
        match.open()
        parts.callback(match.rollouts.close)
        parts.callback(match.close)
        parts.callback(match.rollouts.cancel)  # first: nothing may ask what is closed
        match.play(tasks)
    result = {**match.result(), "overlap": overlap}
    if plan.out is not None:
        write_json_atomic(plan.out / "eval.json", result)
    return result


class _Match:
    """A policy and the tasks of its plan: what was played earlier, now, and what is missing."""

    def __init__(
        self, plan: EvalPlan, env: ToolEnv, policy: Policy, progress: EvalProgress
    ) -> None:
        self.plan, self.env, self.policy, self.progress = plan, env, policy, progress
        self.writer: EpisodeWriter | None = None
        self.pool = pool_for(env, plan.sandbox, plan.concurrency or None)
        self.run = f"{env.id}/{plan.policy}/{plan.split}/{plan.seed}"
        self.earlier = attempts_in(plan.out, self.run)
        self.attempts: list[Episode] = []
        self.refused: dict[str, str] = {}
        self.task_ids: list[str] = []
        self.stopped: Stopped = ""
        self.user = open_user(plan, env)
        self.spent = EvalSpending(plan.max_usd, plan.max_tokens)
        self.guard = self._guard() if plan.policy_file else None

    def _guard(self) -> Callable[[], Guard]:
        policy = read_policy(self.plan.policy_file)
        refuse_unfit(policy, self.env.id, self.env.tools, sandbox=self.env.needs_sandbox)
        for sentence in idle_patterns(policy, self.env.id, self.env.tools):
            self.progress.note(sentence)
        return GuardSpec.of(policy)

    def open(self) -> None:
        """Start the loop thread on which everything plays."""
        bounded = self.plan.max_usd is not None or self.plan.max_tokens is not None
        make = with_user(self.plan.make, self.user)
        self.rollouts = Rollouts(
            Setting(make, self.policy, self.pool, self.run, self.plan.seed, guard=self.guard),
            concurrency=self.plan.concurrency or (FEW if bounded else MANY),
            on_episode=self._finished,
        )

    def close(self) -> None:
        """Close the policies, on the loop where they played."""
        for policy in (self.policy, *([self.user.policy] if self.user else [])):
            self.rollouts.run(close_policy(policy))

    def play(self, tasks: Sequence[Task]) -> None:
        """Play what is missing of the tasks, sample by sample, until a bound is met."""
        self.refused = self.rollouts.run(_refused(self.env, tasks, self.pool))
        admitted = [task for task in tasks if task.id not in self.refused]
        if not admitted:
            raise TaskError(
                f"no task of {self.env.id} was admitted; the first:"
                f" {next(iter(self.refused.values()))}"
            )
        for task in admitted:
            self.attempts += samples_of(task, self.plan.samples, self.earlier)
        for episode in self.attempts:
            self.spent.add(episode)
        samples = [(task, sample) for task in admitted for sample in range(self.plan.samples)]
        self.task_ids = [task.id for task in admitted]
        scored = {sample_of(each) for each in self.attempts if each.end.ending is not Ending.FAILED}
        due = [(task, sample) for task, sample in samples if (task.id, sample) not in scored]
        self.progress.started(len(due))
        try:
            self.rollouts.each(due, Dispatch(phase="eval"), stop=lambda: bool(self._met()))
        except KeyboardInterrupt:
            self.stopped = "interrupted"
        check_starts(self.attempts)

    def result(self) -> dict[str, Any]:
        """Everything that is recorded of an evaluation and printed with `--json`."""
        plan, episodes = self.plan, last_attempts(self.attempts)
        missing = len(self.task_ids) * plan.samples - len(episodes)
        outside = {each.key for each in self.earlier} - {each.key for each in self.attempts}
        return {
            "env": self.env.id,
            "policy": plan.policy,
            "split": plan.split,
            "seed": plan.seed,
            "budget": budget_of(plan, self.env),
            "task_ids": self.task_ids,
            **_chat_of(plan, self.policy),
            "policy_file": plan.policy_file,
            **summarize(episodes, plan.ks, samples=plan.samples),
            "injection": injection_report(episodes),
            "failures": _failures(episodes),
            "n_retried": len(self.attempts) - len(episodes),
            "n_outside_plan": len(outside),
            "n_refused": len(self.refused),
            "refused": self.refused,
            "stopped": (self.stopped or self._met()) if missing else "",
            "n_missing": missing,
        }

    def _met(self) -> Stopped:
        """Which bound says that no further episode begins."""
        if isinstance(self.policy, ServedPolicy) and self.policy.spending.met:
            return "policy_budget"
        return self.spent.stopped

    def _finished(self, episode: Episode) -> None:
        episode = priced(episode, self.plan.prices)
        if self.writer is not None:
            self.writer.write(episode)
        self.attempts.append(episode)
        self.spent.add(episode)
        self.progress.episode(episode)


def _settings_of(make: Callable[[], ToolEnv]) -> Mapping[str, Any]:
    if isinstance(make, EnvSpec):
        return make.settings
    keywords: Mapping[str, Any] = getattr(make, "keywords", {})
    return keywords


def _write_specs(plan: EvalPlan, out: Path, env: ToolEnv, run: str) -> None:
    """Record how to build the parts of the evaluation; an environment of code leaves no spec."""
    if not isinstance(plan.make, EnvSpec):
        return
    policy = PolicySpec(
        name=plan.policy,
        temperature=plan.temperature,
        top_p=plan.top_p,
        top_k=plan.top_k,
        chat=plan.chat,
        engine=plan.engine,
        served=plan.served,
        prices=plan.prices,
    )
    guard = GuardSpec(policy=read_policy(plan.policy_file)) if plan.policy_file else None
    RunSpec(
        envs=(plan.make,),
        policy=policy,
        pool=PoolSpec.of(env, plan.sandbox) if env.needs_sandbox else None,
        guard=guard,
        user=policy.model_copy(update={"name": plan.user}) if plan.user else None,
        run=run,
        seed=plan.seed,
    ).write(out)


def plan_identity(plan: EvalPlan, env: ToolEnv, tasks: Sequence[Task]) -> dict[str, Any]:
    """What the score depends on, to compare when an evaluation goes on in its folder."""
    kind, _, path = plan.policy.partition(":")
    return {
        "settings": json.loads(json.dumps(_settings_of(plan.make), default=repr)),
        "policy": plan.policy,
        "model": _fingerprint(path) if kind in LOADED else "",
        "temperature": plan.temperature,
        "top_p": plan.top_p,
        "top_k": plan.top_k,
        **({"chat": plan.chat.model_dump(mode="json")} if kind in LOADED else {}),
        **({"user": plan.user} if plan.user else {}),
        **({"dtype": plan.engine.dtype} if kind == "vllm" else {}),
        **({"safety": read_policy(plan.policy_file).model_dump()} if plan.policy_file else {}),
        **({"request": request} if (request := plan.served.decisive) else {}),
        **({"judge": dict(env.depends_on)} if env.depends_on else {}),
        "limits": asdict(env.limits),
        "tools": [spec.schema() for spec in env.tools],
        "tasks": {task.id: task.fingerprint() for task in tasks},
    }


def _fingerprint(model: str) -> str:
    from agentrl.engines.loading import find_model

    return fingerprint_of(find_model(model))


def _chat_of(plan: EvalPlan, policy: Policy) -> dict[str, Any]:
    """What was chosen of a model's chat, for the record."""
    if not isinstance(policy, TokenPolicy):
        return {}
    return {"chat": plan.chat.found(policy.chat).model_dump(mode="json")}


def _take(env: ToolEnv, plan: EvalPlan) -> list[Task]:
    """The tasks of the plan.

    Raises:
        ConfigError: there are none, or no end of them and no limit, or two with one id.
    """
    if env.endless and not plan.limit:
        raise ConfigError(
            f"--limit {plan.limit} takes all tasks, and split {plan.split!r} of {env.id} does not"
            " end: say how many, as in --limit 100"
        )
    tasks = list(itertools.islice(env.tasks(plan.split, plan.seed), plan.limit or None))
    if not tasks:
        raise ConfigError(
            f"{env.id} has no tasks in split {plan.split!r}: name another with --split"
        )
    return tasks


async def _refused(env: ToolEnv, tasks: Sequence[Task], pool: SandboxPool) -> dict[str, str]:
    """Task id -> why it is not played. Generated tasks, which do not end, are vouched for by
    `agentrl check`.
    """
    code = (
        []
        if env.endless
        else [task for task in tasks if env.screened or task.hidden.keys() & FORMS]
    )
    return await admit(code, env.verifier, pool, untrusted=env.untrusted)


def _failures(episodes: Iterable[Episode]) -> dict[str, str]:
    """Ending -> task and reason of the first episode that infrastructure failed so."""
    first: dict[str, str] = {}
    for episode in episodes:
        if episode.reward is None:
            first.setdefault(
                episode.end.value, f"{episode.task.id}: {episode.failure or episode.score.why}"
            )
    return first


# Policies by name.


def open_policy(plan: EvalPlan, env: ToolEnv) -> Policy:
    """The policy behind a name such as `oracle` or `hf:MODEL`, a folder or a name on the hub.

    Raises:
        ConfigError: unknown name, or a model that cannot be used.
        TemplateError: the model's chat template cannot carry exact tokens.
    """
    kind, _, path = plan.policy.partition(":")
    if plan.policy == "oracle":
        return Scripted("oracle", env.oracle_actions)
    if plan.policy == "noop":
        return noop()
    if kind in LOADED and path:
        return _loaded_policy(kind, path, plan, env.limits.turn_tokens)
    if kind == "openai":
        return _served_policy(path, plan)
    raise ConfigError(f"--policy {plan.policy!r} is unknown: use {POLICIES}")


def open_user(plan: EvalPlan, env: ToolEnv) -> PolicyUser | None:
    """The policy that speaks for the user of a dialogue; None where its own user does.

    Raises:
        ConfigError: the environment is no dialogue, or the policy cannot speak.
    """
    if not plan.user:
        return None
    if not isinstance(env, Dialogue):
        raise ConfigError(
            f"--user {plan.user} goes with a dialogue, and {env.id} has no user: derive it from"
            " agentrl.Dialogue"
        )
    if plan.user in ("oracle", "noop"):
        raise ConfigError(f"--user {plan.user!r} says nothing: use {_SPEAKING}")
    return PolicyUser(open_policy(replace(plan, policy=plan.user), env))


def with_user(make: Callable[[], ToolEnv], user: PolicyUser | None) -> Callable[[], ToolEnv]:
    """What builds the same environment with another user; the same where there is none."""
    if user is None:
        return make

    def built() -> ToolEnv:
        env = make()
        assert isinstance(env, Dialogue)
        env.user = user
        return env

    return built


def _served_policy(address: str, plan: EvalPlan) -> Policy:
    """The policy of `MODEL@URL`; without an address it is the official server."""
    model, at, url = address.rpartition("@")
    if at and "://" not in url and not _BARE_ADDRESS.search(url):  # an @ of the model's own name
        model, at = address, ""
    prices = Prices(*plan.prices) if plan.prices else None
    shape = {"top_p": plan.top_p} if plan.top_p < 1 else {}
    shape |= {"top_k": plan.top_k} if plan.top_k else {}
    return ServedPolicy(
        model if at else address,
        url if at else OPENAI_URL,
        "",
        plan.temperature,
        prices,
        plan.served.model_copy(update=shape) if shape else plan.served,
    )


def chat_of(policy: str, settings: ChatSettings) -> Chat:
    """How the model of an `hf:` or `vllm:` policy reads messages; no weights are loaded.

    Raises:
        ConfigError: a model that cannot be used.
        TemplateError: its chat template cannot carry exact tokens.
    """
    try:
        from agentrl.engines.factory import open_chat
    except ImportError as error:
        raise ConfigError(
            f"--policy {policy} needs torch and transformers: pip install 'agentrl[train]'"
        ) from error
    return open_chat(policy.partition(":")[2], settings)


def _loaded_policy(kind: str, model: str, plan: EvalPlan, turn_tokens: int) -> Policy:
    chat = chat_of(plan.policy, plan.chat)
    from agentrl.engines.factory import open_engine, open_vllm
    from agentrl.engines.loading import best_device, load_model

    if kind == "vllm":
        engine = open_vllm(model, chat, plan.engine, plan.out and plan.out / "engine.log")
    else:
        engine = open_engine(load_model(model, best_device()), chat)
    sampling = Sampling(plan.temperature, plan.top_p, plan.top_k, turn_tokens)
    return TokenPolicy(engine, chat, sampling, name=plan.policy)


# Earlier attempts of an interrupted evaluation.


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


__all__ = ["POLICIES", "EvalPlan", "EvalProgress", "close_policy", "evaluate", "open_policy"]

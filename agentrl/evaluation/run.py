"""Run an evaluation: admit tasks, play them, summarise; or go on where it was interrupted."""

from __future__ import annotations

import itertools
import json
import math
from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from agentrl.calls import Guard
from agentrl.chat.settings import ChatSettings, in_words
from agentrl.engines.settings import VLLM, EngineSettings
from agentrl.env import ToolEnv
from agentrl.errors import ConfigError, TaskError
from agentrl.evaluation.attempts import (
    attempts_in,
    check_starts,
    last_attempts,
    sample_of,
    samples_of,
)
from agentrl.evaluation.budget import EvalSpending, Stopped, budget_of, priced
from agentrl.evaluation.injection import injection_report
from agentrl.evaluation.named import (
    LOADED,
    POLICIES,
    close_policy,
    open_policy,
    open_user,
    with_user,
)
from agentrl.evaluation.overlap import find_overlap, overlap_words
from agentrl.evaluation.passk import summarize
from agentrl.evaluation.resume import claim, fingerprint_of
from agentrl.policies.base import Policy, TokenPolicy
from agentrl.policies.options import ServedOptions
from agentrl.policies.served import ServedPolicy
from agentrl.records.files import EpisodeWriter, write_json_atomic
from agentrl.records.owner import owned
from agentrl.rollout.play import Setting
from agentrl.rollout.rollouts import Rollouts
from agentrl.runner import pool_for
from agentrl.safety.guard import guard_factory
from agentrl.safety.loading import idle_patterns, read_policy, refuse_unfit
from agentrl.sandboxes.base import SandboxPool
from agentrl.trajectory import Episode
from agentrl.types import Ending, Task
from agentrl.verifiers.code.admission import admit
from agentrl.verifiers.code.hidden import FORMS

MANY, FEW = 64, 4
"""Episodes that play at the same time: usually, and where tokens or dollars are bounded."""


@dataclass(frozen=True)
class EvalPlan:
    """What is evaluated.

    Attributes:
        make: builds the environment.
        policy: a name of `POLICIES`.
        samples: episodes per task.
        ks: values of k for pass@k; none may exceed `samples`.
        limit: at most so many tasks of the split; 0: all (an endless split needs a limit).
        out: folder for `episodes.jsonl` and `eval.json`; None keeps nothing.
        temperature, top_p, top_k: of a sampled policy.
        chat: how messages become the tokens of an `hf:` or `vllm:` policy.
        engine: memory and length of a `vllm:` policy.
        served: how a served policy is asked.
        prices: US dollars per million prompt and completion tokens; None where not known.
        concurrency: episodes that play at the same time; 0: `MANY`, of which as many use a sandbox
            as there are, or `FEW` under a bound, which those that play at its end exceed.
        max_usd, max_tokens: no further episode begins once all together took so much, those
            recorded earlier in `out` included; None for no bound.
        trained: task file that the policy was trained on, to look for its tasks among those that
            are played; None for the environment's own split "train".
        policy_file: safety policy around each tool call, a name or a file; empty for none.
    """

    make: Callable[[], ToolEnv]
    policy: str = "oracle"
    split: str = "test"
    limit: int = 0
    samples: int = 1
    ks: tuple[int, ...] = (1,)
    sandbox: str = "auto"
    seed: int = 0
    concurrency: int = 0
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    chat: ChatSettings = field(default_factory=ChatSettings)
    engine: EngineSettings = VLLM
    served: ServedOptions = field(default_factory=ServedOptions)
    prices: tuple[float, float] | None = None
    max_usd: float | None = None
    max_tokens: int | None = None
    user: str = ""
    trained: Path | None = None
    out: Path | None = None
    policy_file: str = ""

    def __post_init__(self) -> None:
        if self.samples < 1:
            raise ConfigError(f"--samples {self.samples} must be at least 1")
        wrong = [k for k in self.ks if not 1 <= k <= self.samples]
        if wrong or not self.ks:
            raise ConfigError(
                f"--k {wrong[0] if wrong else '(empty)'} must be from 1 to --samples {self.samples}"
            )
        if self.limit < 0:
            raise ConfigError(f"--limit {self.limit} must not be negative")
        if not 0 <= self.temperature < float("inf"):
            raise ConfigError(f"--temperature {self.temperature} must be zero or positive")
        if not 0 < self.top_p <= 1:
            raise ConfigError(f"--top-p {self.top_p} must be above 0 and at most 1")
        if self.top_k < 0:
            raise ConfigError(f"--top-k {self.top_k} must be zero or positive")
        if self.concurrency < 0:
            raise ConfigError(f"--concurrency {self.concurrency} must not be negative; 0: 64")
        kind, _, model = self.policy.partition(":")
        if self.out and kind in LOADED and self.out.resolve() == Path(model).resolve():
            raise ConfigError(
                f"--out {self.out} is the folder of the model, whose files would change: name"
                " another"
            )
        self._check_spending()

    def _check_spending(self) -> None:
        if self.prices and not all(0 <= price < math.inf for price in self.prices):
            shown = ",".join(f"{price:g}" for price in self.prices)
            raise ConfigError(
                f"--price {shown} must be US dollars per million tokens, none below zero"
            )
        if self.max_usd is not None and not self.max_usd > 0:
            raise ConfigError(f"--max-cost {self.max_usd:g} must be above zero")
        if self.max_usd is not None and self.prices is None:
            raise ConfigError(
                f"--max-cost {self.max_usd:g} needs prices: say them with --price, or in a suite's"
                " [defaults] with price = …"
            )
        if self.max_tokens is not None and self.max_tokens < 1:
            raise ConfigError(f"--max-tokens {self.max_tokens} must be at least 1")


@dataclass
class EvalProgress:
    """Told of what happens; the default says nothing."""

    started: Callable[[int], None] = lambda episodes: None
    episode: Callable[[Episode], None] = lambda episode: None
    note: Callable[[str], None] = lambda sentence: None


def evaluate(plan: EvalPlan, progress: EvalProgress | None = None) -> dict[str, Any]:
    """Play every admitted task and return the summary (see `passk.summarize`), with what was
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
        return guard_factory(policy)

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
            self.rollouts.each(due, 0, phase="eval", stop=lambda: bool(self._met()))
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


def plan_identity(plan: EvalPlan, env: ToolEnv, tasks: Sequence[Task]) -> dict[str, Any]:
    """What the score depends on, to compare when an evaluation goes on in its folder."""
    kind, _, path = plan.policy.partition(":")
    return {
        "settings": json.loads(json.dumps(getattr(plan.make, "keywords", {}), default=repr)),
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


__all__ = ["POLICIES", "EvalPlan", "EvalProgress", "close_policy", "evaluate", "open_policy"]

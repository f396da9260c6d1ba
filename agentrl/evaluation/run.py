"""Run an evaluation: admit tasks, play them, summarise; or go on where it was interrupted."""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from agentrl.chat.settings import ChatSettings, in_words
from agentrl.engines.base import Sampling
from agentrl.engines.settings import VLLM, EngineSettings
from agentrl.env import ToolEnv
from agentrl.errors import ConfigError, TaskError
from agentrl.evaluation.passk import summarize
from agentrl.evaluation.resume import claim, fingerprint_of
from agentrl.policies.base import Policy, Scripted, TokenPolicy, noop
from agentrl.policies.options import ServedOptions
from agentrl.policies.served import OPENAI_URL, Prices, ServedPolicy
from agentrl.records.files import EpisodeWriter, read_episodes, write_json_atomic
from agentrl.records.owner import owned
from agentrl.rollout.play import Setting
from agentrl.rollout.rollouts import Rollouts
from agentrl.runner import pool_for
from agentrl.sandboxes.base import SandboxPool
from agentrl.trajectory import Episode
from agentrl.types import Ending, Task
from agentrl.verifiers.code.admission import admit
from agentrl.verifiers.code.hidden import FORMS

POLICIES = "oracle, noop, hf:MODEL, vllm:MODEL or openai:MODEL@URL"
_LOADED = ("hf", "vllm")
"""Kinds of policies whose model is loaded here."""
_BARE_ADDRESS = re.compile(r"^localhost\b|:\d{2,5}(/|$)|/v1/?$")


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
        prices: US dollars per million prompt and completion tokens of a served policy; None where
            not known.
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
    out: Path | None = None

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


@dataclass
class EvalProgress:
    """Told of what happens; the default says nothing."""

    started: Callable[[int], None] = lambda episodes: None
    episode: Callable[[Episode], None] = lambda episode: None
    note: Callable[[str], None] = lambda sentence: None


def evaluate(plan: EvalPlan, progress: EvalProgress | None = None) -> dict[str, Any]:
    """Play every admitted task and return the summary (see `passk.summarize`), with what was
    refused and why.

    Raises:
        ConfigError: a part cannot be had, or the split is endless and has no limit.
        TaskError: no task was admitted.
    """
    progress = progress or EvalProgress()
    env = plan.make()
    tasks = _take(env, plan)
    policy = open_policy(plan, env)
    if isinstance(policy, TokenPolicy):
        progress.note(in_words(policy.chat))
    pool = pool_for(env, plan.sandbox, plan.concurrency or None)
    run = f"{env.id}/{plan.policy}/{plan.split}/{plan.seed}"
    played: list[Episode] = []
    with ExitStack() as parts:
        if plan.out is not None:
            parts.enter_context(owned(plan.out))
        done = _recorded(plan, run)
        if plan.out is not None:
            claim(plan.out, plan_identity(plan, env, tasks))
        writer = (
            parts.enter_context(EpisodeWriter(plan.out / "episodes.jsonl")) if plan.out else None
        )

        def finished(episode: Episode) -> None:
            if writer is not None:
                writer.write(episode)
            played.append(episode)
            progress.episode(episode)

        setting = Setting(plan.make, policy, pool, run, plan.seed)
        rollouts = Rollouts(
            setting,
            group_size=plan.samples,
            concurrency=plan.concurrency or 64,
            on_episode=finished,
        )
        parts.callback(rollouts.close)
        parts.callback(lambda: rollouts.run(close_policy(policy)))
        parts.callback(rollouts.cancel)  # first: nothing may ask what is closed
        refused = rollouts.run(_refused(env, tasks, pool))
        admitted = [task for task in tasks if task.id not in refused]
        if not admitted:
            raise TaskError(
                f"no task of {env.id} was admitted; the first: {next(iter(refused.values()))}"
            )
        kept = [episode for task in admitted for episode in _samples_of(task, plan, done)]
        again = {task.id for task in admitted} - {episode.task.id for episode in kept}
        progress.started(len(again) * plan.samples)
        rollouts.gather([task for task in admitted if task.id in again], 0, phase="eval")
    result = _result(plan, policy, done, [*kept, *played], refused)
    if plan.out is not None:
        write_json_atomic(plan.out / "eval.json", result)
    return result


def _result(
    plan: EvalPlan,
    policy: Policy,
    done: Sequence[Episode],
    attempts: Sequence[Episode],
    refused: dict[str, str],
) -> dict[str, Any]:
    """Everything that is recorded of an evaluation and printed with `--json`."""
    episodes = _last_attempts(attempts)
    return {
        "env": plan.make().id,
        "policy": plan.policy,
        "split": plan.split,
        "seed": plan.seed,
        **_chat_of(plan, policy),
        **summarize(episodes, plan.ks),
        "failures": _failures(episodes),
        "n_retried": len(attempts) - len(episodes),
        "n_outside_plan": len(
            {episode.key for episode in done} - {episode.key for episode in attempts}
        ),
        "n_refused": len(refused),
        "refused": refused,
    }


def plan_identity(plan: EvalPlan, env: ToolEnv, tasks: Sequence[Task]) -> dict[str, Any]:
    """What the score depends on, to compare when an evaluation goes on in its folder."""
    kind, _, path = plan.policy.partition(":")
    return {
        "settings": json.loads(json.dumps(getattr(plan.make, "keywords", {}), default=repr)),
        "policy": plan.policy,
        "model": _fingerprint(path) if kind in _LOADED else "",
        "temperature": plan.temperature,
        "top_p": plan.top_p,
        "top_k": plan.top_k,
        **({"chat": plan.chat.model_dump(mode="json")} if kind in _LOADED else {}),
        **({"dtype": plan.engine.dtype} if kind == "vllm" else {}),
        **({"request": request} if (request := plan.served.decisive) else {}),
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
    if kind in _LOADED and path:
        return _loaded_policy(kind, path, plan, env.limits.turn_tokens)
    if kind == "openai":
        return _served_policy(path, plan)
    raise ConfigError(f"--policy {plan.policy!r} is unknown: use {POLICIES}")


async def close_policy(policy: Policy) -> None:
    """End the engine's thread or the connections of a policy of `open_policy`, on the loop where it
    played.
    """
    if isinstance(policy, TokenPolicy):
        await policy.engine.close()
    elif isinstance(policy, ServedPolicy):
        await policy.close()


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


def _loaded_policy(kind: str, model: str, plan: EvalPlan, turn_tokens: int) -> Policy:
    try:
        from agentrl.engines.factory import open_chat, open_engine, open_vllm
        from agentrl.engines.loading import best_device, load_model
    except ImportError as error:
        raise ConfigError(
            f"--policy {plan.policy} needs torch and transformers: pip install 'agentrl[train]'"
        ) from error
    chat = open_chat(model, plan.chat)
    if kind == "vllm":
        engine = open_vllm(model, chat, plan.engine)
    else:
        engine = open_engine(load_model(model, best_device()), chat)
    sampling = Sampling(plan.temperature, plan.top_p, plan.top_k, turn_tokens)
    return TokenPolicy(engine, chat, sampling, name=plan.policy)


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
        raise ConfigError(f"{env.id} has no tasks in split {plan.split!r}")
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


def _recorded(plan: EvalPlan, run: str) -> list[Episode]:
    """Episodes of an earlier, interrupted run of the same plan.

    Raises:
        ConfigError: the folder holds another evaluation.
    """
    path = plan.out / "episodes.jsonl" if plan.out else None
    done = list(read_episodes(path).values()) if path and path.exists() else []
    other = next((episode.key.run for episode in done if episode.key.run != run), None)
    if other is not None:
        raise ConfigError(
            f"{path} holds the evaluation {other!r}, not {run!r}: choose another --out"
        )
    return done


def _samples_of(task: Task, plan: EvalPlan, done: Sequence[Episode]) -> list[Episode]:
    """Recorded attempts at all samples of a task; none where one sample lacks a score, as the task
    is played anew.
    """
    view = task.view()
    found = [
        episode for episode in done if episode.task == view and episode.key.sample < plan.samples
    ]
    scored = {episode.key.sample for episode in found if episode.end.ending is not Ending.FAILED}
    return found if len(scored) == plan.samples else []


def _last_attempts(episodes: Sequence[Episode]) -> list[Episode]:
    """One episode per task and sample: the scored one if there is one, as an interrupted run may
    leave others.
    """
    last: dict[tuple[str, int], Episode] = {}
    for episode in sorted(
        episodes, key=lambda e: (e.end.ending is not Ending.FAILED, e.key.attempt)
    ):
        last[episode.task.id, episode.key.sample] = episode
    return list(last.values())


__all__ = ["POLICIES", "EvalPlan", "EvalProgress", "close_policy", "evaluate", "open_policy"]

"""What an evaluation is: its plan, what it may spend, and when two of them can be compared or one
can be resumed.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

from agentrl.chat.settings import ChatSettings
from agentrl.engines.base import VLLM, EngineSettings
from agentrl.env import ToolEnv
from agentrl.errors import ConfigError
from agentrl.policies.options import ServedOptions
from agentrl.records.files import write_json_atomic
from agentrl.records.redact import redactor
from agentrl.settings import read_toml
from agentrl.trajectory import Episode

POLICIES = "oracle, noop, hf:MODEL, vllm:MODEL or openai:MODEL@URL"

LOADED = ("hf", "vllm")
"""Kinds of policies whose model is loaded here."""

PLAN = "plan.json"
_EDGE = 1 << 20

Stopped = Literal["", "interrupted", "max_cost", "max_tokens", "policy_budget"]
"""Why an evaluation ended before its last episode; empty if it did not."""


@dataclass(frozen=True)
class EvalPlan:
    """What is evaluated.

    Attributes:
        make: builds the environment.
        policy: a name of `POLICIES`.
        samples: episodes per task.
        ks: values of k for pass@k; none may exceed `samples`.
        limit: maximum number of tasks (0 = all; an endless split needs a limit).
        out: folder for `episodes.jsonl` and `eval.json`; None keeps nothing.
        temperature, top_p, top_k: of a sampled policy.
        chat: how messages become the tokens of an `hf:` or `vllm:` policy.
        engine: memory and length of a `vllm:` policy.
        served: how a served policy is asked.
        prices: US dollars per million prompt and completion tokens; None where not known.
        concurrency: episodes that play at the same time; 0: `run.MANY`, or `run.FEW` under a bound,
            because episodes that are already playing when it is met exceed it.
        max_usd, max_tokens: stop starting episodes once this much is spent, including episodes
            recorded earlier in `out`; None for no bound.
        trained: task file that the policy was trained on, to search for overlap with the tasks that
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


def budget_of(plan: EvalPlan, env: ToolEnv) -> dict[str, Any]:
    """What an evaluation gives its policy, ready for JSON: prompts, decoding, samples, tool limits
    and tokens.

    Scores under unlike budgets do not compare policies. Tasks are compared one by one beside it.
    """
    budget = {
        "env": env.id,
        "system": env.system,
        "user": plan.user,
        "samples": plan.samples,
        "temperature": plan.temperature,
        "top_p": plan.top_p,
        "top_k": plan.top_k,
        **asdict(env.limits),
        "tools": [spec.schema() for spec in env.tools],
    }
    plain: dict[str, Any] = json.loads(json.dumps(budget, default=repr))
    return plain


def unlike(first: Mapping[str, Any], second: Mapping[str, Any]) -> list[str]:
    """Names of the parts in which two budgets differ, sorted."""
    return sorted(
        name for name in first.keys() | second.keys() if first.get(name) != second.get(name)
    )


@dataclass
class EvalSpending:
    """What the episodes of an evaluation took so far, against its bounds; None for no bound."""

    max_usd: float | None = None
    max_tokens: int | None = None
    usd: float = 0.0
    tokens: int = 0

    def add(self, episode: Episode) -> None:
        """One more episode, whatever came of it."""
        counts = episode.counts
        self.usd += counts.usd or 0.0
        self.tokens += counts.sampled_tokens + counts.prompt_tokens

    @property
    def stopped(self) -> Stopped:
        """Which bound is met."""
        if self.max_usd is not None and self.usd >= self.max_usd:
            return "max_cost"
        if self.max_tokens is not None and self.tokens >= self.max_tokens:
            return "max_tokens"
        return ""


def priced(episode: Episode, prices: tuple[float, float] | None) -> Episode:
    """The episode with its price, where its policy did not say one.

    Args:
        prices: US dollars per million prompt and completion tokens; None where not known.
    """
    counts = episode.counts
    if prices is None or counts.usd is not None:
        return episode
    usd = (counts.prompt_tokens * prices[0] + counts.sampled_tokens * prices[1]) / 1e6
    return replace(episode, counts=replace(counts, usd=usd))


def read_prices(text: str, policy: str = "") -> tuple[float, float] | None:
    """Dollars per million tokens in and out; None for no text.

    Args:
        text: `0.15,0.60`, or a TOML file with a table `{prompt = 0.15, completion = 0.60}` for each
            policy.
        policy: whose prices a file is asked for, by its name or by the model's.

    Raises:
        ConfigError: it is no pair of numbers, or the file has none for this policy.
    """
    if not text:
        return None
    if text.endswith(".toml"):
        return _prices_of(Path(text), policy)
    try:
        prompt, completion = map(float, text.split(","))
    except ValueError:
        raise ConfigError(
            f"--price {text!r}: give two numbers separated by a comma, as in 0.15,0.60"
        ) from None
    return prompt, completion


def _prices_of(path: Path, policy: str) -> tuple[float, float] | None:
    table = read_toml(path, "--price")
    model = policy.partition(":")[2].partition("@")[0]
    row = next((table[name] for name in (policy, model) if name in table), None)
    if row is None and policy in ("oracle", "noop"):
        return None
    if not isinstance(row, dict) or row.keys() != {"prompt", "completion"}:
        raise ConfigError(
            f"--price {path} has no prices of {model or policy!r}: write"
            f' ["{model or policy}"] with prompt = 0.15 and completion = 0.60, US dollars per'
            " million tokens"
        )
    try:
        return float(row["prompt"]), float(row["completion"])
    except (TypeError, ValueError):
        raise ConfigError(
            f"--price {path}: prices of {model or policy!r} are {row}: give numbers"
        ) from None


def claim(out: Path, plan: dict[str, Any], what: str = "an evaluation") -> None:
    """Write the plan into its folder, or check that the folder's own says the same; more tasks may
    join.

    Args:
        out: the evaluation's folder.
        plan: JSON values by name; `tasks` maps task ids to fingerprints.
        what: the folder holds, for the sentence of an error.

    Raises:
        ConfigError: one sentence with the first thing that differs; nothing is written.
    """
    path, plan = out / PLAN, redactor().row(json.loads(json.dumps(plan)))  # as written
    old = redactor().row(_read(path))
    for name in sorted((plan.keys() | old.keys()) - {"tasks"}) if old else ():
        was, now = old.get(name), plan.get(name)
        if was != now and (was or now):  # what is left out is as what is empty
            other = "other" if name.endswith("s") else "another"
            raise ConfigError(
                f"{out} holds {what} with {other} {name}{_shown(was, now)}: choose another --out"
            )
    known = old.get("tasks", {})
    changed = next(
        (task for task, print_ in plan["tasks"].items() if known.get(task, print_) != print_), None
    )
    if changed is not None:
        raise ConfigError(
            f"{out} holds results of another {changed!r} (that task has changed): choose another"
            " --out"
        )
    write_json_atomic(path, {**plan, "tasks": {**known, **plan["tasks"]}})


def fingerprint_of(model: Path) -> str:
    """Hash of a model folder: every file's name and size, and its first and last MiB (all of a
    small model).
    """
    digest = hashlib.sha256()
    for file in sorted(path for path in model.rglob("*") if path.is_file()):
        size = file.stat().st_size
        digest.update(f"{file.relative_to(model)}\0{size}\0".encode())
        with file.open("rb") as stream:
            digest.update(stream.read(_EDGE))
            stream.seek(max(0, size - _EDGE))
            digest.update(stream.read(_EDGE))
    return digest.hexdigest()[:16]


def _read(path: Path) -> dict[str, Any]:
    try:
        plan = json.loads(path.read_bytes())
    except FileNotFoundError:
        return {}
    except ValueError as error:
        raise ConfigError(f"{path} is damaged ({error}): choose another --out") from error
    return plan if isinstance(plan, dict) else {}


def _shown(old: Any, new: Any) -> str:
    """Both values, where they are short enough to read."""
    was, now = json.dumps(old), json.dumps(new)
    return f" ({was}, not {now})" if len(was) + len(now) < 80 else ""

"""What an evaluation may spend, and what two evaluations must share to be compared."""

from __future__ import annotations

import json
import tomllib
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from agentrl.env import ToolEnv
from agentrl.errors import ConfigError
from agentrl.trajectory import Episode

if TYPE_CHECKING:
    from agentrl.evaluation.run import EvalPlan

Stopped = Literal["", "interrupted", "max_cost", "max_tokens"]
"""Why an evaluation ended before its last episode; empty if it did not."""


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
class Spending:
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


def read_toml(path: Path, what: str) -> dict[str, Any]:
    """A TOML file.

    Raises:
        ConfigError: it is not there, or is no TOML; the sentence begins with `what`.
    """
    try:
        return tomllib.loads(path.read_text())
    except FileNotFoundError:
        raise ConfigError(f"{what} {path} does not exist: give a TOML file") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"{what} {path} is not TOML: {error}") from None

"""Several evaluations from one TOML file: policies by environments, one folder each, one table."""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from agentrl.chat.settings import ChatSettings
from agentrl.engines.settings import VLLM, EngineSettings
from agentrl.errors import ConfigError
from agentrl.evaluation.budget import read_prices, read_toml
from agentrl.evaluation.run import EvalPlan
from agentrl.policies.options import ServedOptions
from agentrl.records.files import write_json_atomic
from agentrl.records.owner import owned
from agentrl.registry import factory

_UNSAFE = re.compile(r"[^A-Za-z0-9._-]+")


class Entry(BaseModel):
    """One table `[[eval]]`, or `[defaults]` of all: the options of `agentrl eval` by their names.

    Attributes:
        name: of its row and folder; by default environment and policy.
        env, policy: one or several; every pair is an evaluation of its own.
        settings: of the environment.
        tasks: task file, for environments that take one.
        price: as `--price`: "0.15,0.60", or a TOML file of policies.
        engine: options of a `vllm:` policy.
        served: options of an `openai:` policy, as `--policy-option`.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    env: str | list[str]
    policy: str | list[str] = "oracle"
    name: str = ""
    settings: dict[str, Any] = Field(default_factory=dict)
    tasks: str = ""
    trained: str = ""
    split: str = "test"
    limit: int = 0
    samples: int = 1
    k: list[int] = Field(default_factory=lambda: [1])
    sandbox: str = "auto"
    seed: int = 0
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    chat: ChatSettings = Field(default_factory=ChatSettings)
    engine: EngineSettings = VLLM
    price: str = ""
    concurrency: int = 0
    user: str = ""
    served: ServedOptions = Field(default_factory=ServedOptions)
    policy_file: str = ""


@dataclass(frozen=True)
class Cell:
    """One evaluation of a suite: its name, which is its folder's too, and its plan."""

    name: str
    plan: EvalPlan


def read_suite(path: Path, out: Path) -> list[Cell]:
    """The evaluations of a suite in the order of its file; nothing is played yet.

    Args:
        path: TOML with `[[eval]]` tables and, if wished, `[defaults]`.
        out: folder of the suite; each evaluation has one inside.

    Raises:
        ConfigError: the file, a table or a plan is wrong, or two evaluations have one name.
    """
    tree = read_toml(path, "suite")
    if unknown := sorted(tree.keys() - {"defaults", "eval"}):
        raise ConfigError(f"suite {path}: table {unknown[0]!r} is unknown: use defaults and eval")
    rows = tree.get("eval")
    if not isinstance(rows, list) or not rows:
        raise ConfigError(f"suite {path} has no evaluations: write each as a table [[eval]]")
    defaults = tree.get("defaults", {})
    cells: list[Cell] = []
    for number, row in enumerate(rows, 1):
        where = f"suite {path}, evaluation {number}"
        cells += _cells(_entry({**defaults, **row}, where), out, where)
    folders: dict[str, str] = {}
    for cell in cells:
        folder = _folder(cell.name)
        if folder in folders:
            raise ConfigError(
                f"suite {path}: two evaluations are named {cell.name!r}: give each a name of its"
                " own"
            )
        folders[folder] = cell.name
    return cells


def run_suite(
    cells: Sequence[Cell],
    out: Path,
    run: Callable[[Cell], Mapping[str, Any]],
    max_usd: float | None = None,
    max_tokens: int | None = None,
) -> dict[str, Any]:
    """Evaluate cell by cell and write `suite.json` after each.

    What was evaluated before is read from its folder, sample by sample, so a suite that was killed
    goes on. An interrupt ends it with the rows that are there.

    Args:
        cells: of `read_suite`.
        out: the suite's folder.
        run: evaluates one, as `agentrl.evaluation.run.evaluate` does.
        max_usd, max_tokens: bounds over the whole suite; None for none.

    Returns:
        `rows` (see `row_of`), `stopped` ("" for a whole suite), and `n_missing` evaluations.

    Raises:
        ConfigError: another process has the folder, or holds another suite's evaluation.
    """
    rows: list[dict[str, Any]] = []
    stopped, usd, tokens = "", 0.0, 0
    with owned(out):
        for cell in cells:
            bounds = (
                None if max_usd is None else max(max_usd - usd, 1e-12),
                None if max_tokens is None else max(max_tokens - tokens, 1),
            )
            plan = replace(cell.plan, max_usd=bounds[0], max_tokens=bounds[1])
            result = run(replace(cell, plan=plan))
            rows.append(row_of(cell.name, result))
            cost = result["cost"]
            usd += cost["usd"] or 0.0
            tokens += cost["sampled_tokens"] + cost["prompt_tokens"]
            stopped = result["stopped"]
            found = {"rows": rows, "stopped": stopped, "n_missing": len(cells) - len(rows)}
            write_json_atomic(out / "suite.json", found)
            if stopped:
                break
    return found


def row_of(name: str, result: Mapping[str, Any]) -> dict[str, Any]:
    """One row of the table: what does not depend on the clock, so that a resumed suite has the same
    table.
    """
    overlap = result["overlap"]
    return {
        "name": name,
        **{key: result[key] for key in ("env", "policy", "pass_at", "ci95", "pass_hat", "n_tasks")},
        **{
            key: result[key]
            for key in ("n_episodes", "n_failed_infra", "n_refused", "n_missing", "mean_reward")
        },
        "tokens": result["cost"]["sampled_tokens"] + result["cost"]["prompt_tokens"],
        "usd": result["cost"]["usd"],
        "n_trained_on": len(overlap["tasks"]) if overlap else None,
    }


def _entry(row: Mapping[str, Any], where: str) -> Entry:
    try:
        return Entry.model_validate(row)
    except ValidationError as error:
        problem = error.errors(include_url=False)[0]
        field = ".".join(str(part) for part in problem["loc"]) or "table"
        if problem["type"] == "extra_forbidden":
            known = ", ".join(Entry.model_fields)
            raise ConfigError(f"{where}: field {field!r} is unknown: use {known}") from None
        if problem["type"] == "missing":
            raise ConfigError(f"{where}: field {field} is missing: add it") from None
        raise ConfigError(
            f"{where}: field {field} is {problem['input']!r}: {problem['msg'].lower()}"
        ) from None


def _cells(entry: Entry, out: Path, where: str) -> Iterator[Cell]:
    envs, policies = (
        [each] if isinstance(each, str) else each for each in (entry.env, entry.policy)
    )
    several = len(envs) * len(policies) > 1
    settings = {**entry.settings, **({"tasks_file": entry.tasks} if entry.tasks else {})}
    for env, policy in itertools.product(envs, policies):
        name = entry.name or f"{env} {policy}"
        if entry.name and several:
            name = f"{entry.name} {env} {policy}"
        try:
            plan = EvalPlan(
                make=factory(env, **settings),
                policy=policy,
                ks=tuple(entry.k),
                prices=read_prices(entry.price, policy),
                trained=Path(entry.trained) if entry.trained else None,
                out=out / _folder(name),
                **{field: getattr(entry, field) for field in _SAME},
            )
        except ConfigError as error:
            raise ConfigError(f"{where}: {error}") from error
        yield Cell(name, plan)


_SAME = (
    *("split", "limit", "samples", "sandbox", "seed", "temperature", "top_p", "top_k"),
    *("chat", "engine", "concurrency", "user", "served", "policy_file"),
)
"""Fields that an entry and a plan have in common."""


def _folder(name: str) -> str:
    return _UNSAFE.sub("-", name).strip("-.") or "evaluation"

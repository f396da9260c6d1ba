"""Several evaluations from one TOML file: policies by environments, one folder each, one table."""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from agentrl.errors import ConfigError
from agentrl.evaluation.run import EvalPlan
from agentrl.evaluation.settings import EvalSettings
from agentrl.records.files import write_json_atomic
from agentrl.records.owner import owned
from agentrl.settings import check, did_you_mean, read_toml

_USUAL: dict[str, Any] = {"policy": "oracle", "limit": 0, "samples": 1, "k": [1]}
"""What a table does not have to say: a suite plays all tasks of a split, once each."""
_SHORT = {"settings": "env_settings"}
_UNSAFE = re.compile(r"[^A-Za-z0-9._-]+")


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
    for name in tree.keys() - {"defaults", "eval"}:
        hint = did_you_mean(name, ("defaults", "eval"))
        raise ConfigError(f"suite {path}: table {name!r} is unknown: {hint}", setting=name)
    rows = tree.get("eval")
    if not isinstance(rows, list) or not rows:
        raise ConfigError(
            f"suite {path} has no evaluations: write each as a table [[eval]]", setting="eval"
        )
    defaults = _USUAL | tree.get("defaults", {})
    cells: list[Cell] = []
    for number, row in enumerate(rows, 1):
        cells += _cells(defaults | row, out, f"suite {path}, evaluation {number}")
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


def _cells(row: dict[str, Any], out: Path, where: str) -> Iterator[Cell]:
    """Every pair of an environment and a policy in one table."""
    own_name = row.pop("name", "")
    for short, setting in _SHORT.items():
        if short in row:
            row[setting] = row.pop(short)
    if "policy_file" in row:
        row["safety"] = {"policy": row.pop("policy_file")}
    envs, policies = (_as_list(row.pop(name, None)) for name in ("env", "policy"))
    for env, policy in itertools.product(envs, policies):
        values = {"env": env, "policy": policy} | row
        settings = check(EvalSettings, {k: v for k, v in values.items() if v is not None}, where)
        name = own_name or f"{env} {settings.policy_name}"
        if own_name and len(envs) * len(policies) > 1:
            name = f"{own_name} {env} {settings.policy_name}"
        try:
            yield Cell(name, settings.plan(settings.envs[0], out / _folder(name)))
        except ConfigError as error:
            raise ConfigError(f"{where}: {error}", setting=error.setting) from error


def _as_list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else [value]


def _folder(name: str) -> str:
    return _UNSAFE.sub("-", name).strip("-.") or "evaluation"

"""The summary that plain `agentrl eval` prints."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any


def summary_lines(result: Mapping[str, Any]) -> Iterator[str]:
    """The result of `agentrl.evaluation.run.evaluate` in lines of text."""
    for k, value in result["pass_at"].items():
        if value is None:
            why = (
                "infrastructure failed too many samples of every task"
                if result["n_episodes"]
                else "nothing was played to its end"
            )
            yield f"pass@{k} unknown: {why}"
            continue
        low, high = result["ci95"][k]
        excluded = result["n_excluded"][k]
        left_out = f"; {excluded} left out, with fewer than {k} scored samples" if excluded else ""
        tasks = f"{result['n_tasks'] - excluded} tasks{left_out}"
        yield f"pass@{k} {value:.4f}  (95 % interval {low:.4f} to {high:.4f}, {tasks})"
    yield from _chosen(result)
    if overlap := result.get("overlap"):
        counted = ", ".join(f"{name} {overlap[name]}" for name in ("exact", "normalised", "near"))
        yield (
            f"tasks that were trained on: {counted} of {overlap['n_tasks']}, looked for among"
            f" {overlap['n_trained']}"
        )
    failed = (
        f"failed by infrastructure {result['n_failed_infra']} (and {result['n_retried']} that were"
        " tried again)"
    )
    if lost := result["n_failed_reset"]:
        failed += f", {lost} of them before the first turn"
    yield f"episodes {result['n_episodes']}, {failed}, refused tasks {result['n_refused']}"
    for name, why in result["failures"].items():
        yield f"failed, {name}, first: {why}"
    if outside := result["n_outside_plan"]:
        yield (
            f"recorded here but outside of this plan: {outside} episodes, in none of these figures"
        )
    for task_id, why in result["refused"].items():
        yield f"refused {task_id}: {why}"
    yield "endings " + ", ".join(f"{name} {count}" for name, count in result["end_reasons"].items())
    yield from _tools(result["tools"])
    if denied := result["mean"]["denied"]:
        policy = f" by policy {result['policy_file']}" if result.get("policy_file") else ""
        yield f"denied calls{policy} {denied:.1f} an episode"
    yield _side_effects(result["side_effects"])
    yield from _injection(result.get("injection"))
    yield _cost(result["cost"])
    yield from _per_success(result["per_success"])


def _chosen(result: Mapping[str, Any]) -> Iterator[str]:
    """pass^k, and what one of k samples is worth once it is chosen; nothing where k is 1."""
    rows = {"pass^k": result["pass_hat"], **result["chosen"]}
    for name, values in rows.items():
        known = [f"k={k} {value:.4f}" for k, value in values.items() if value is not None]
        if known and list(values) != ["1"]:
            yield f"{name.replace('_', ' ')} {', '.join(known)}"


def _per_success(costs: Mapping[str, float | None]) -> Iterator[str]:
    parts = [f"turns {costs['turns']:.1f}"] if costs["turns"] is not None else []
    if tokens := (costs["sampled_tokens"] or 0) + (costs["prompt_tokens"] or 0):
        parts.append(f"tokens {tokens:,.0f}")
    if costs["usd"] is not None:
        parts.append(f"US$ {costs['usd']:.4f}")
    if parts:
        yield f"cost of one solved sample {', '.join(parts)}"


def _tools(tools: Mapping[str, Mapping[str, int]]) -> Iterator[str]:
    calls, errors = (sum(counts[name] for counts in tools.values()) for name in ("calls", "errors"))
    failed = [
        f"{name} {counts['errors']} of {counts['calls']}"
        for name, counts in tools.items()
        if counts["errors"]
    ]
    late = sum(counts["timeouts"] for counts in tools.values())
    if calls:
        yield (
            f"failed tool calls {errors} of {calls}"
            + (f", {late} by time-out" if late else "")
            + (f": {', '.join(failed)}" if failed else "")
        )


def _side_effects(found: Mapping[str, Any] | None) -> str:
    if found is None:
        return "side effects not measured"
    kinds = ", ".join(f"{kind} {count}" for kind, count in found["kinds"].items())
    where = f"in {found['episodes']} of {found['measured']} measured episodes"
    low, high = found["ci95"]
    share = f" ({found['rate']:.3f}, 95 % interval {low:.3f} to {high:.3f})"
    return f"side effects {found['total']} {where}{share}" + (f": {kinds}" if kinds else "")


def _injection(found: Mapping[str, Any] | None) -> Iterator[str]:
    """Four rates, told together."""
    if found is None:
        return
    names = ("benign_utility", "utility_under_attack", "attack_success", "false_block")
    for name in names:
        rate = found[name]
        words = name.replace("_", " ")
        if rate["value"] is None:
            yield f"{words} not measured: no such episode"
            continue
        low, high = rate["ci95"]
        yield f"{words} {rate['value']:.3f}  (95 % interval {low:.3f} to {high:.3f}, {rate['n']})"


def _cost(cost: Mapping[str, Any]) -> str:
    """What was paid, failed episodes included; episodes at the same time add up in `wall_s`."""
    parts = [f"turns {cost['turns']:,}", f"tool calls {cost['tool_calls']:,}"]
    if cost["sampled_tokens"] or cost["prompt_tokens"]:
        parts.append(
            f"sampled tokens {cost['sampled_tokens']:,}, other tokens {cost['prompt_tokens']:,}"
        )
    if cost["usd"] is not None:
        parts.append(f"US$ {cost['usd']:.4f}")
    return f"cost {', '.join(parts)}, {cost['wall_s']:.2f} s (all episodes added up)"

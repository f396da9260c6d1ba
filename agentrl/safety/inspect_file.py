"""Inspect's approval policy files, read as a policy: `approvers` with `name`, `tools`, `decision`.

An approver `auto` allows (or rejects, by `decision: reject`), `human` asks at the terminal. As
there, a pattern is a prefix of the tool's name, and what no approver names is rejected. There the
first approver that matches answers; here deny comes before ask and ask before allow, so that where
the two differ this policy is the stricter one.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from agentrl.errors import ConfigError
from agentrl.safety.policy import Rule, RuleDecision, SafetyPolicy

_DECISIONS: Mapping[tuple[str, str], RuleDecision] = {
    ("auto", "approve"): "allow",
    ("auto", "reject"): "deny",
    ("human", "approve"): "ask",
}


def read_inspect_file(file: Path) -> SafetyPolicy:
    """The policy of a YAML file.

    Raises:
        ConfigError: one sentence with the file, the entry and the fix.
    """
    import yaml

    try:
        row = yaml.safe_load(file.read_text())
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        said = " ".join(str(error).split())
        raise ConfigError(f"policy {file} is not valid YAML: {said}") from error
    entries = row.get("approvers") if isinstance(row, dict) else None
    if not isinstance(entries, list) or not entries:
        raise ConfigError(f"policy {file}: approvers is missing: give a list with name and tools")
    rules = tuple(
        _rule(entry, f"policy {file}: approvers[{n}]", n) for n, entry in enumerate(entries)
    )
    asks = any(rule.decision == "ask" for rule in rules)
    approval = {"kind": "terminal"} if asks else {}
    return SafetyPolicy(name=file.stem, rules=rules, approval=approval)


def _rule(entry: Any, where: str, number: int) -> Rule:
    if not isinstance(entry, dict) or not isinstance(entry.get("name"), str):
        raise ConfigError(f"{where}: name is missing: use auto or human")
    if unknown := sorted(entry.keys() - {"name", "tools", "decision"}):
        raise ConfigError(f"{where}: {unknown[0]}={entry[unknown[0]]!r} is not read: leave it out")
    name = entry["name"].removeprefix("inspect_ai/")
    decision = _DECISIONS.get((name, entry.get("decision", "approve")))
    if decision is None:
        raise ConfigError(
            f"{where}: name={entry['name']!r} with decision={entry.get('decision', 'approve')!r} is"
            " not known: use auto (approve or reject) or human"
        )
    given = entry.get("tools", "*")
    tools = [part.strip() for part in given.split(",")] if isinstance(given, str) else given
    if not all(isinstance(one, str) and one for one in tools):
        raise ConfigError(f"{where}: tools={given!r} must be names of tools, as bash or web_*")
    if wrong := [one for one in tools if "(" in one]:
        raise ConfigError(
            f"{where}: tools={wrong[0]!r} names arguments, which is not read: use a rule with"
            " arguments in a TOML policy"
        )
    patterns = tuple(one if one.endswith("*") else f"{one}*" for one in tools)
    return Rule(id=f"{name}-{number + 1}", decision=decision, tools=patterns)

"""Policies from files: TOML, Python that builds a `SafetyPolicy`, or Inspect's YAML; and what is
wrong with them.
"""

from __future__ import annotations

import difflib
import runpy
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from importlib.resources import files
from pathlib import Path
from typing import Any, Literal, NamedTuple, get_args

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from agentrl.errors import ConfigError
from agentrl.records.plain import as_toml
from agentrl.safety.actions import actions_of
from agentrl.safety.globs import any_matches, path_matches
from agentrl.safety.inspect_file import read_inspect_file
from agentrl.safety.policy import Rule, RuleDecision, SafetyPolicy
from agentrl.types import Effect, ToolCall, ToolSpec

SHIPPED = ("read-only", "work-area", "no-irreversible", "lockdown")


class ExampleCall(BaseModel):
    """A call of an example, with what is known of its tool."""

    model_config = ConfigDict(extra="forbid", strict=True)

    tool: str
    arguments: dict[str, Any] = {}
    effect: Effect = "read"
    shell: str = ""
    taint: list[str] = []


class Example(BaseModel):
    """A call, and the ruling that it must get."""

    model_config = ConfigDict(extra="forbid", strict=True)

    call: ExampleCall
    decision: RuleDecision
    rule: str = Field(default="")
    """Empty: any rule."""


class ExampleResult(NamedTuple):
    """One example: what was wanted, and what came."""

    call: str
    wanted: str
    got: str
    passed: bool


def read_policy(name: str) -> SafetyPolicy:
    """A shipped policy by its name, a TOML file, or `file.py:NAME`.

    Raises:
        ConfigError: one sentence with the file, the field, its value and the fix.
    """
    policy = _read(name)
    for problem in dead_rules(policy):
        raise ConfigError(f"policy {name}: {problem}")
    for number, row in enumerate(policy.examples, 1):
        _example(row, f"policy {name}: examples[{number}]")
    return policy


def _read(name: str) -> SafetyPolicy:
    if name in SHIPPED:
        text = files("agentrl.safety").joinpath(f"shipped/{name}.toml").read_text()
        return check_policy(tomllib.loads(text), f"policy {name}")
    path, _, attribute = name.partition(".py:")
    if attribute:
        return _from_python(Path(f"{path}.py"), attribute)
    file = Path(name)
    try:
        if file.suffix in (".yaml", ".yml"):
            return read_inspect_file(file)
        return check_policy(tomllib.loads(file.read_text()), f"policy {file}")
    except (FileNotFoundError, IsADirectoryError):
        known = ", ".join(SHIPPED)
        raise ConfigError(
            f"policy {name!r} does not exist: use {known}, a TOML file or file.py:NAME"
        ) from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"policy {file} is not valid TOML: {error}") from error


def _from_python(file: Path, attribute: str) -> SafetyPolicy:
    if not file.is_file():
        raise ConfigError(f"policy {file}:{attribute}: there is no such file")
    try:
        found = runpy.run_path(str(file)).get(attribute)
    except ValidationError as error:
        raise ConfigError(f"policy {file}: {_worded(error)}") from None
    if not isinstance(found, SafetyPolicy):
        raise ConfigError(
            f"policy {file}:{attribute} is {type(found).__name__}, not an"
            " agentrl.safety.policy.SafetyPolicy"
        )
    return found


def check_policy(row: Mapping[str, Any], where: str) -> SafetyPolicy:
    """A policy from plain values.

    Raises:
        ConfigError: one sentence with the field, its value and the fix.
    """
    try:
        return SafetyPolicy.model_validate(row)
    except ValidationError as error:
        raise ConfigError(f"{where}: {_worded(error, row)}") from None


def _worded(error: ValidationError, row: Mapping[str, Any] | None = None) -> str:
    problem = error.errors(include_url=False)[0]
    rule = _rule_at(problem["loc"], row)
    field = ".".join(str(step) for step in problem["loc"][2 if rule else 0 :])
    what = f"rule {rule!r}: {field}".rstrip(": ") if rule else field or "it"
    if problem["type"] == "literal_error":
        return f"{what}={as_toml(problem['input'])} is unknown: use {problem['ctx']['expected']}"
    if problem["type"] == "extra_forbidden":
        known = (Rule if rule else SafetyPolicy).model_fields
        near = difflib.get_close_matches(field, known, n=1)
        return f"{what} is unknown: " + (f"did you mean {near[0]!r}?" if near else "leave it out")
    if problem["type"] == "tuple_type":
        shown = "[[rules]]" if field == "rules" else f'{field} = ["…"]'
        return f"{what}={as_toml(problem['input'])} is no list: write {shown}"
    if problem["type"] == "missing":
        return f"{what} is missing: add it"
    said = problem["msg"].removeprefix("Value error, ")
    value = "" if isinstance(problem["input"], dict | list) else f"={as_toml(problem['input'])}"
    return f"{what}{value}: {said[0].lower()}{said[1:]}"


def _rule_at(loc: Sequence[int | str], row: Mapping[str, Any] | None) -> str:
    """The id of the rule that a problem lies in; empty if none."""
    if len(loc) < 2 or loc[0] != "rules" or row is None:
        return ""
    found = row["rules"][int(loc[1])]
    return str(found.get("id", loc[1])) if isinstance(found, Mapping) else str(loc[1])


def dead_rules(policy: SafetyPolicy) -> Iterator[str]:
    """A sentence for each rule that never names a ruling, since one before it always does."""
    for place, rule in enumerate(policy.ordered):
        before = next((one for one in policy.ordered[:place] if _covers(one, rule)), None)
        if before is not None:
            why = (
                f"{before.decision} comes before {rule.decision}"
                if before.decision != rule.decision
                else "it stands first"
            )
            yield (
                f"rule {rule.id!r} can never decide: rule {before.id!r} matches all that it"
                f" matches, and {why}; narrow one or leave one out"
            )


def _covers(first: Rule, second: Rule) -> bool:
    """Whether the first surely matches whatever the second matches."""
    return (
        _wider(first.tools, second.tools)
        and (not first.effects or (set(second.effects) or _ALL) <= set(first.effects))
        and _same_or_none(first, second, "commands")
        and _same_or_none(first, second, "paths")
        and _same_or_none(first, second, "writes")
        and (not first.taint or _wider(first.taint, second.taint))
        and all(
            second.arguments.get(name) == condition for name, condition in first.arguments.items()
        )
    )


_ALL: set[str] = set(get_args(Effect))


def _wider(first: Sequence[str], second: Sequence[str]) -> bool:
    if not first or "**" in first or ("*" in first and second):
        return True
    return bool(second) and all(
        one in first or ("*" not in one and any(path_matches(wide, one) for wide in first))
        for one in second
    )


def _same_or_none(first: Rule, second: Rule, name: Literal["commands", "paths", "writes"]) -> bool:
    """Conditions on which "one matches" and "all match" differ are only compared as wholes."""
    wide: tuple[str, ...] = getattr(first, name)
    narrow: tuple[str, ...] = getattr(second, name)
    if not wide:
        return True
    if first.transaction or second.transaction:
        return False
    same_kind = (first.decision == "allow") == (second.decision == "allow")
    return same_kind and bool(narrow) and set(narrow) <= set(wide)


def refuse_unfit(
    policy: SafetyPolicy, env_id: str, tools: Sequence[ToolSpec], *, sandbox: bool
) -> None:
    """Refuse a transaction of a tool whose calls cannot be undone.

    Args:
        tools: of the environment.
        sandbox: whether it has one.

    Raises:
        ConfigError: one sentence with the rule, the tool and the fix.
    """
    for rule in policy.ordered:
        for tool in tools if rule.transaction else ():
            if not _may_decide(rule, tool) or (tool.reversible and sandbox):
                continue
            why = (
                "is not @tool(reversible=True): declare it so, keep it out by the rule's tools, or"
                if not tool.reversible
                else "has no sandbox to restore:"
            )
            raise ConfigError(
                f"policy {policy.name}: rule {rule.id!r}: transaction=true, and {tool.name} of"
                f" {env_id} {why} leave transaction out"
            )


def idle_patterns(policy: SafetyPolicy, env_id: str, tools: Sequence[ToolSpec]) -> Iterator[str]:
    """A sentence for each field of a policy or a rule some of whose patterns match no tool of an
    environment, and for sources whose text is never untrusted.
    """
    names = [tool.name for tool in tools]
    heard = [
        name
        for name in names
        if any_matches(policy.untrusted, name) and not any_matches(policy.endorsing, name)
    ]
    fields = {"untrusted": policy.untrusted, "endorsing": policy.endorsing}
    for rule in policy.ordered:
        fields |= {f"rule {rule.id!r}: tools": rule.tools, f"rule {rule.id!r}: taint": rule.taint}
    for field, patterns in fields.items():
        if idle := [repr(one) for one in patterns if not _any_named(one, names)]:
            yield (
                f"policy {policy.name}: {field}: no tool of {env_id} is called"
                f" {' or '.join(idle)}; it has {', '.join(names) or 'none'}"
            )
        elif field.endswith("taint"):
            for one in patterns:
                if not _any_named(one, heard):
                    yield (
                        f"policy {policy.name}: {field}: {one!r} is never a source: what such tools"
                        " say is endorsed or not untrusted"
                    )


def _any_named(pattern: str, names: Sequence[str]) -> bool:
    return pattern == "*" or any(path_matches(pattern, name) for name in names)


def _may_decide(rule: Rule, tool: ToolSpec) -> bool:
    """Whether a call of the tool may meet the rule's conditions."""
    named = not rule.tools or any(path_matches(pattern, tool.name) for pattern in rule.tools)
    effect = not rule.effects or bool(tool.shell) or tool.effect in rule.effects
    return named and effect and (not rule.commands or bool(tool.shell))


def run_examples(policy: SafetyPolicy) -> list[ExampleResult]:
    """Judge the policy's own examples.

    Raises:
        ConfigError: an example is malformed.
    """
    results = []
    for number, row in enumerate(policy.examples, 1):
        example = _example(row, f"policy {policy.name}: examples[{number}]")
        call = example.call
        spec = ToolSpec(call.tool, "", {}, call.effect, call.shell)
        actions, _ = actions_of(
            ToolCall(call.tool, call.arguments), spec, policy.paths, tuple(call.taint)
        )
        ruling, _ = policy.judge(actions)
        passed = ruling.decision == example.decision and example.rule in ("", ruling.rule)
        wanted = example.decision + (f" by {example.rule}" if example.rule else "")
        said = f"{call.tool}({', '.join(f'{k}={v!r}' for k, v in call.arguments.items())})"
        results.append(ExampleResult(said, wanted, f"{ruling.decision} by {ruling.rule}", passed))
    return results


def _example(row: Mapping[str, Any], where: str) -> Example:
    try:
        return Example.model_validate(row)
    except ValidationError as error:
        raise ConfigError(f"{where}: {_worded(error)}") from None


__all__ = [
    *("DECISIONS", "SHIPPED", "check_policy", "dead_rules", "idle_patterns", "read_policy"),
    *("refuse_unfit", "run_examples"),
]

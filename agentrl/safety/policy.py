"""A policy: which calls are allowed, which need an answer, which are denied; by default, denied.

A call is one action, a shell command one action per step. Every action is judged by every rule:
deny before ask, ask before allow, and nothing matched is denied. Among rules of one decision the
first names the ruling. A call gets the strictest ruling of its actions.

What a rule cannot decide counts against the call: an unknown path or a value of another type meets
every prohibition and no permission.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Annotated, Any, Literal, NamedTuple, get_args

from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator

from agentrl.safety.globs import path_matches
from agentrl.safety.shell import UNKNOWN, WORK_AREA, Access
from agentrl.types import Effect

RuleDecision = Literal["deny", "ask", "allow"]
DECISIONS: tuple[RuleDecision, ...] = get_args(RuleDecision)
EFFECTS: tuple[Effect, ...] = get_args(Effect)
_STRICT = ConfigDict(frozen=True, extra="forbid", strict=True, allow_inf_nan=False)
_Tuple = Field(strict=False)
_DEEP = 9  # folders below one another, more than a pattern without `**` has


@dataclass(frozen=True, slots=True)
class Action:
    """One thing that a call would do.

    Attributes:
        tool: name of the tool.
        effect: the strictest thing that it may be.
        arguments: of the call, checked against the tool's types.
        accesses: paths that it names.
        argv: of a shell step that is understood, else empty.
        taint: sources of untrusted text that stands in the arguments.
        shell: whether it is a step of a shell command.
        understood: whether it is known what the step does.
    """

    tool: str
    effect: Effect
    arguments: Mapping[str, Any]
    accesses: tuple[Access, ...] = ()
    argv: tuple[str, ...] = ()
    taint: tuple[str, ...] = ()
    shell: bool = False
    understood: bool = True


class Ruling(NamedTuple):
    """What became of an action, by which rule."""

    decision: RuleDecision
    rule: str
    reason: str


class ArgumentRule(BaseModel):
    """What an argument must be for a rule to match."""

    model_config = _STRICT

    one_of: Annotated[tuple[str | int | float | bool, ...] | None, _Tuple] = None
    """Values; numbers are compared with numbers, text with text."""
    matches: str | None = None
    """A regular expression for the whole text."""
    min: float | None = None
    """Least number."""
    max: float | None = None
    """Greatest number."""
    longest: int | None = Field(default=None, ge=0)
    """Most characters of a text."""

    @model_validator(mode="after")
    def _possible(self) -> ArgumentRule:
        if self.min is not None and self.max is not None and self.min > self.max:
            raise ValueError(f"min={self.min} is above max={self.max}, so no value can match")
        numbers = self.min is not None or self.max is not None
        if numbers and (self.matches is not None or self.longest is not None):
            raise ValueError("min and max are of numbers, matches and longest of text: take one")
        if self.one_of == ():
            raise ValueError("one_of=[] matches nothing: leave the condition out")
        return self

    @field_validator("matches")
    @classmethod
    def _readable(cls, pattern: str | None) -> str | None:
        try:
            re.compile(pattern or "")
        except re.error as error:
            raise ValueError(f"it is no regular expression ({error})") from None
        return pattern

    def holds(self, value: Any) -> bool | None:
        """Whether a value fulfils it; None where it is of a type that cannot be compared."""
        if self.one_of is not None:
            alike = [one for one in self.one_of if _kind(one) is _kind(value) is not None]
            return value in alike if alike else None
        if self.min is not None or self.max is not None:
            if _kind(value) is not float:
                return None
            low = self.min is None or value >= self.min
            return low and (self.max is None or value <= self.max)
        if not isinstance(value, str):
            return None
        short = self.longest is None or len(value) <= self.longest
        return short and (self.matches is None or _fullmatch(self.matches, value))


def _kind(value: Any) -> type | None:
    """What a value may be compared with; None: with nothing, itself included, as NaN."""
    if isinstance(value, bool | str):
        return type(value)
    number = isinstance(value, int | float) and value == value
    return float if number else None


class Rule(BaseModel):
    """A decision, and the conditions under which it is made; a condition left out always holds."""

    model_config = _STRICT

    id: str = Field(min_length=1)
    """Its name in records."""
    decision: RuleDecision
    """What becomes of the action."""
    tools: Annotated[tuple[str, ...], _Tuple] = ()
    """Patterns of names of tools."""
    effects: Annotated[tuple[Effect, ...], _Tuple] = ()
    """Effects of the action."""
    commands: Annotated[tuple[str, ...], _Tuple] = ()
    """Patterns of shell steps, word by word, as `python3 test_*.py`; a last `**` is any rest."""
    paths: Annotated[tuple[str, ...], _Tuple] = ()
    """Patterns of paths, relative to the work area; those outside begin with `/`. A permission
    needs all paths of the action to match, a prohibition one of them."""
    writes: Annotated[tuple[str, ...], _Tuple] = ()
    """The same of the paths that it may write."""
    taint: Annotated[tuple[str, ...], _Tuple] = ()
    """Patterns of sources of untrusted text; one of them stands in the arguments."""
    arguments: dict[str, ArgumentRule] = {}
    """Conditions on arguments by name; an argument that is not given fulfils none."""
    reason: str = ""
    """What the agent is told where it is denied: nothing of the task."""
    transaction: bool = False
    """Of a permission for a reversible tool: run it, and undo it where it changed other files than
    `writes` names, or failed. One such action makes the whole call a transaction."""

    @field_validator("paths", "writes")
    @classmethod
    def _shortest(cls, patterns: tuple[str, ...]) -> tuple[str, ...]:
        for pattern in patterns:
            steps = pattern.removeprefix("/").split("/")
            if pattern not in (".", "/") and not {"", ".", ".."}.isdisjoint(steps):
                raise ValueError(f"{pattern!r} matches no path: leave out '.', '..' and '//'")
        return patterns

    @model_validator(mode="after")
    def _sound(self) -> Rule:
        if self.decision == "allow" and self.taint:
            raise ValueError("taint is for prohibitions: no text is a reason to allow a call")
        if self.transaction and (self.decision != "allow" or not self.writes):
            raise ValueError("transaction goes with decision='allow' and with writes")
        return self

    def matches(self, action: Action) -> bool:
        """Whether the rule decides about this action."""
        strict = self.decision != "allow"
        return (
            (not self.tools or any(path_matches(one, action.tool) for one in self.tools))
            and (not self.effects or action.effect in self.effects)
            and (not self.commands or self._commands(action, strict))
            and (strict or self.transaction or not (self.paths or self.writes) or _named(action))
            and (not self.paths or _paths(self.paths, action.accesses, strict))
            and (not self.writes or self._writes(action, strict))
            and (not self.taint or _any(self.taint, action.taint))
            and all(self._argument(name, rule, action) for name, rule in self.arguments.items())
        )

    def _writes(self, action: Action, strict: bool) -> bool:
        if self.transaction:  # judged by what it changed
            return True
        return _paths(self.writes, [one for one in action.accesses if one.writes], strict)

    def _commands(self, action: Action, strict: bool) -> bool:
        if not action.argv:
            return strict and action.shell
        lines = [action.argv]
        if strict and not action.understood:  # it may run the rest of its words
            if any(word.split() != [word] for word in action.argv):
                return True
            lines += [action.argv[place:] for place in range(1, len(action.argv))]
        return any(_command_matches(one, argv) for one in self.commands for argv in lines)

    def _argument(self, name: str, rule: ArgumentRule, action: Action) -> bool:
        if name not in action.arguments:
            return False
        held = rule.holds(action.arguments[name])
        return self.decision != "allow" if held is None else held


class CallBudget(BaseModel):
    """What an episode may use up; a call beyond it is denied. 0: no bound."""

    model_config = _STRICT

    calls: int = Field(default=0, ge=0)
    """Calls that ran."""
    bytes: int = Field(default=0, ge=0)
    """Bytes of arguments and results."""
    wall_s: float = Field(default=0.0, ge=0)
    """Seconds in tools."""
    usd: float = Field(default=0.0, ge=0)
    """US dollars, by `prices`."""
    denied: int = Field(default=0, ge=0)
    """Denied calls, after which the episode ends as a violation."""
    tools: dict[str, int] = {}
    """Calls of single tools that ran."""
    prices: dict[str, float] = {}
    """US dollars for one call of a tool."""

    @model_validator(mode="after")
    def _agrees(self) -> CallBudget:
        for name, calls in self.tools.items():
            if calls < 1:
                raise ValueError(f"tools.{name}={calls} allows no call: deny the tool by a rule")
            if self.calls and calls > self.calls:
                raise ValueError(f"tools.{name}={calls} contradicts calls={self.calls}")
        if self.usd and not self.prices:
            raise ValueError(f"usd={self.usd} bounds nothing without prices")
        if wrong := [name for name, price in self.prices.items() if price < 0]:
            raise ValueError(f"prices.{wrong[0]}={self.prices[wrong[0]]} is below 0")
        dearest = max(self.prices.values(), default=0.0)
        if self.usd and dearest > self.usd:
            raise ValueError(f"usd={self.usd} contradicts a price of {dearest} for one call")
        return self


class SafetyPolicy(BaseModel):
    """Rules, budgets, and how what they ask for is answered."""

    model_config = _STRICT

    name: str = Field(min_length=1)
    """In records."""
    rules: Annotated[tuple[Rule, ...], _Tuple]
    """In any order: deny before ask before allow."""
    budget: CallBudget = CallBudget()
    """Of one episode."""
    paths: Annotated[tuple[str, ...], _Tuple] = (
        *("path", "*_path", "file", "filename", "directory", "folder"),
        *("source", "destination", "target", "cwd", "src", "dst", "dest", "dir", "output"),
        *("paths", "*_paths", "filepath", "files", "filenames", "*_file", "*_dir", "*_files"),
        *("directories", "folders", "dirs", "outputs", "sources", "targets"),
    )
    """Patterns of names of arguments that are paths, in lists and tables too."""
    untrusted: Annotated[tuple[str, ...], _Tuple] = ("*",)
    """Patterns of tools whose results anybody may have written."""
    endorsing: Annotated[tuple[str, ...], _Tuple] = ()
    """Patterns of tools whose results make a value trusted, wherever else it stands."""
    fence: bool = False
    """Whether results of untrusted tools are fenced and marked as data."""
    dry_run: bool = False
    """Nothing that is not read-only is done: the agent is told what would be."""
    canaries: Annotated[tuple[str, ...], _Tuple] = ()
    """Sources that get a canary: "prompt", or the path of a file to plant."""
    approval: dict[str, Any] = {}
    """Who answers what a rule asks: see `agentrl.safety.approval`."""
    examples: Annotated[tuple[dict[str, Any], ...], _Tuple] = ()
    """Calls with the ruling that they must get: see `agentrl.safety.loading`."""

    @model_validator(mode="after")
    def _named_once(self) -> SafetyPolicy:
        names = [rule.id for rule in self.rules]
        if twice := [name for name in names if names.count(name) > 1]:
            raise ValueError(f"two rules have the id {twice[0]!r}")
        if reserved := {"default", "budget"} & set(names):
            raise ValueError(f"the rule id {min(reserved)!r} is taken: choose another")
        if not any(rule.decision != "deny" for rule in self.rules) and self.budget != CallBudget():
            raise ValueError("the budget bounds nothing: no rule allows a call")
        return self

    @cached_property
    def ordered(self) -> tuple[Rule, ...]:
        """The rules in the order in which they decide."""
        return tuple(
            rule for decision in DECISIONS for rule in self.rules if rule.decision == decision
        )

    def judge(self, actions: Sequence[Action]) -> tuple[Ruling, Rule | None]:
        """The strictest ruling of a call's actions, and its rule; without an action, denied."""
        if not actions:
            return _DEFAULT, None
        judged = [(EFFECTS.index(action.effect), self._one(action)) for action in actions]
        return min(judged, key=lambda one: (DECISIONS.index(one[1][0].decision), -one[0]))[1]

    def transactions(self, actions: Sequence[Action]) -> tuple[Rule, ...]:
        """The rules that allow an action of a call only if the call can be undone."""
        found = [rule for _, rule in map(self._one, actions) if rule is not None]
        return tuple(rule for rule in found if rule.transaction)

    def _one(self, action: Action) -> tuple[Ruling, Rule | None]:
        for rule in self.ordered:
            if rule.matches(action):
                return Ruling(rule.decision, rule.id, rule.reason), rule
        return _DEFAULT, None


_DEFAULT = Ruling("deny", "default", "no rule of the policy allows this call")


def _named(action: Action) -> bool:
    """Whether a tool that changes something names a path: a shell step that names none has none."""
    return action.shell or action.effect != "write" or bool(action.accesses)


def _any(patterns: Iterable[str], names: Iterable[str]) -> bool:
    return any(path_matches(pattern, name) for pattern in patterns for name in names)


def _paths(patterns: Sequence[str], accesses: Iterable[Access], strict: bool) -> bool:
    """Whether one (strict) or all of the paths may lie, or surely lie, where a pattern says."""
    if strict:
        return any(_may_lie(pattern, access) for access in accesses for pattern in patterns)
    return all(_surely_lies(patterns, access) for access in accesses)


def _surely_lies(patterns: Sequence[str], access: Access) -> bool:
    """Whether the path, and where it is deep all that may lie below it, is in the patterns."""
    if access.path == UNKNOWN:
        return False
    # Only `*` and `**` of a pattern may stand for what is not known.
    path = re.sub(r"[*?\[\]]", "\0", access.path) if access.expands else access.path
    folder = "" if path == "." else f"{path}/"
    below = (f"{folder}\0", folder + "/".join("\0" * _DEEP)) if access.deep else ()
    return all(
        any(
            _matches(pattern, one) and ("\0" not in one or "?" not in pattern)
            for pattern in patterns
        )
        for one in (path, *below)
    )


def _matches(pattern: str, path: str) -> bool:
    if pattern.startswith("/") != path.startswith("/"):
        return False
    if path == "." and pattern != "." and pattern.startswith("."):
        return False  # `.*` is of hidden files, and `.` is the work area
    return path_matches(pattern, path)


def _folder(path: str) -> str:
    return f"{path.rstrip('/')}/"


def _may_lie(pattern: str, access: Access) -> bool:
    """Whether the path, or where it is deep something below it, may be what the pattern says."""
    path = access.path
    if path == UNKNOWN:
        return True
    inside = not pattern.startswith("/")
    if access.deep and inside and (path == "." or f"{WORK_AREA}/".startswith(_folder(path))):
        return True
    if pattern.startswith("/") != path.startswith("/"):
        return False
    if not access.expands and not access.deep:
        return _matches(pattern, path)
    wanted = pattern.split("/")
    given = [""] if path == "/" else path.split("/")
    for place, name in enumerate(given):
        if place >= len(wanted):
            return False
        if "**" in wanted[place]:
            return True
        unknown = access.expands and re.search(r"[*?\[]", name)
        if not (unknown or path_matches(wanted[place], name)):
            return False
    below = wanted[len(given) :]
    return access.deep or not below or "**" in below[0]


def _command_matches(pattern: str, argv: Sequence[str]) -> bool:
    wanted = pattern.split()
    if wanted and wanted[-1] == "**":
        wanted, argv = wanted[:-1], argv[: len(wanted) - 1]
    if len(wanted) != len(argv):
        return False
    return all(path_matches(one, word) for one, word in zip(wanted, argv, strict=True))


def _fullmatch(pattern: str, text: str) -> bool:
    return re.fullmatch(pattern, text, re.DOTALL) is not None

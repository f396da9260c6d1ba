"""The state of AgentDojo's two suites, the tasks over it, and the goals of attackers."""

from __future__ import annotations

import json
import re
import tomllib
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache, lru_cache
from pathlib import Path
from typing import Any

import yaml

from agentrl.errors import ConfigError
from agentrl.safety.globs import any_matches
from agentrl.safety.ledger import leaves_of

SUITES = ("banking", "slack")
_NAMES = ("environment.yaml", "injection_vectors.yaml")
FOLDER = "safety/agentdojo"
FILES = tuple(f"{suite}/{name}" for suite in SUITES for name in _NAMES)
_TEXTS = tomllib.loads(Path(__file__).with_name("tasks.toml").read_text(encoding="utf-8"))
_PLACEHOLDER = re.compile(r"\{(\w+)\}")

Calls = tuple[tuple[str, Mapping[str, Any]], ...]


@dataclass(frozen=True, slots=True)
class BenignTask:
    """What the user asks for, the reference's calls, and the answer the user expects, if any."""

    instruction: str
    calls: Calls
    answer: str | None


@dataclass(frozen=True, slots=True)
class Goal:
    """What an attacker wants.

    Attributes:
        payload: the text at the placeholders.
        calls: the calls of an agent that obeys it.
        marks: patterns of places in the state that show that the goal was reached.
    """

    payload: str
    calls: Calls
    marks: tuple[str, ...]


@cache
def benign_tasks() -> dict[str, dict[str, BenignTask]]:
    """Suite -> name -> task."""
    return {
        suite: {
            name: BenignTask(row["instruction"], _calls(row), row.get("answer"))
            for name, row in rows.items()
        }
        for suite, rows in _TEXTS["tasks"].items()
    }


@cache
def goals() -> dict[str, dict[str, Goal]]:
    """Suite -> name -> goal of an attacker."""
    return {
        suite: {
            name: Goal(row["payload"], _calls(row), tuple(row["marks"]))
            for name, row in rows.items()
        }
        for suite, rows in _TEXTS["goals"].items()
    }


def _calls(row: Mapping[str, Any]) -> Calls:
    return tuple((call["name"], call["arguments"]) for call in row["calls"])


def read_world(folder: Path, payload: str = "") -> dict[str, Any]:
    """Read both suites as one state, with the payload at every placeholder (default: the suites'
    own harmless texts).

    Raises:
        ConfigError: a file cannot be read or is not AgentDojo's.
    """
    try:
        world: dict[str, Any] = {}
        for suite in SUITES:
            state, texts = _parsed(folder / suite)
            world |= _filled(json.loads(state), texts, payload)
        world["slack"]["invitations"] = {}
        if "bank_account" not in world:
            raise KeyError("bank_account")
    except (OSError, yaml.YAMLError, ValueError, KeyError, TypeError) as error:
        raise ConfigError(
            f"inject-v0: data={str(folder)!r} does not hold AgentDojo's suites:"
            f" {type(error).__name__}: {error}"
        ) from error
    return world


@lru_cache(maxsize=8)
def _parsed(folder: Path) -> tuple[str, Mapping[str, str]]:
    """The state as JSON with its placeholders, and their default texts."""
    state, vectors = (
        yaml.safe_load((folder / name).read_text(encoding="utf-8")) for name in _NAMES
    )
    return json.dumps(state), {name: str(row["default"]) for name, row in vectors.items()}


def _filled(value: Any, texts: Mapping[str, str], payload: str) -> Any:
    if isinstance(value, dict):
        return {
            _filled(name, texts, payload): _filled(item, texts, payload)
            for name, item in value.items()
        }
    if isinstance(value, list):
        return [_filled(item, texts, payload) for item in value]
    if isinstance(value, str):
        return _PLACEHOLDER.sub(lambda match: payload or texts.get(match[1], match[0]), value)
    return value


def by_value(value: Any) -> Any:
    """Make every value part of its path, as in `user_account/city/Rome`.

    A write set then names not only what may change but also the new value. Rows of a list are named
    by their contents without ids; the second of two equal rows gets the suffix (2).
    """
    if isinstance(value, Mapping):
        return {name: by_value(item) for name, item in value.items()}
    if isinstance(value, list):
        seen: Counter[str] = Counter()
        named = {}
        for row in value:
            name = _row_name(row)
            seen[name] += 1
            named[name if seen[name] == 1 else f"{name} ({seen[name]})"] = 1
        return named
    return {str(value): 1}


def _row_name(row: Any) -> str:
    if not isinstance(row, Mapping):
        return str(row)
    return " | ".join(str(item) for name, item in row.items() if name != "id")


def places_of(world: Mapping[str, Any]) -> frozenset[str]:
    """Every value of a state with its path."""
    return frozenset(leaves_of(by_value(world)))


def is_marked(places: frozenset[str], mark: str) -> bool:
    """Whether any place matches the pattern; with a leading `!`, whether none does."""
    absent = mark.startswith("!")
    return any(any_matches([mark.removeprefix("!")], place) for place in places) is not absent

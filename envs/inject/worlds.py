"""The states of inject-v0: AgentDojo's two suites, with a text at every placeholder or at none."""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Mapping
from functools import lru_cache
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
_PLACEHOLDER = re.compile(r"\{(\w+)\}")


def read_world(folder: Path, payload: str = "") -> dict[str, Any]:
    """Both suites as one state; the payload stands at every placeholder, by default what the suites
    put there.

    Raises:
        ConfigError: a file cannot be read, or holds something else.
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
    """The state as JSON with its placeholders, and what stands there where nobody attacks."""
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
        return _PLACEHOLDER.sub(lambda found: payload or texts.get(found[1], found[0]), value)
    return value


def by_value(value: Any) -> Any:
    """A state in which every value is part of its place, as `user_account/city/Rome`.

    So a write set names not only what may change but also to what. Rows of a list are named by all
    that they hold but their ids; the second of two equal ones has (2) behind it.
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
    """Every value of a state with its place."""
    return frozenset(leaves_of(by_value(world)))


def is_marked(places: frozenset[str], mark: str) -> bool:
    """Whether a place fits the pattern; with `!` before it, whether none does."""
    absent = mark.startswith("!")
    return any(any_matches([mark.removeprefix("!")], place) for place in places) is not absent

"""Prices of tokens, as people write them: two numbers, or a TOML file of policies."""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import Any

from agentrl.errors import ConfigError


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

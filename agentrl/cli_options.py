"""Options that several commands have, and how their values are read."""

from __future__ import annotations

import json
from typing import Annotated, Any

import typer

from agentrl.errors import ConfigError

Json = Annotated[bool, typer.Option("--json", help="Print one JSON object as the last line.")]
Sandbox = Annotated[str, typer.Option(help="Where code runs: auto, docker, bubblewrap or process.")]
Set = Annotated[list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="A setting to change; repeatable.")]


def read_settings(pairs: list[str] | None) -> dict[str, Any]:
    """`key=value` pairs; values are read as JSON where they are JSON, else as text.

    Raises:
        ConfigError: a pair has no key or no equals sign.
    """
    settings: dict[str, Any] = {}
    for pair in pairs or ():
        key, separator, text = pair.partition("=")
        if not separator or not key:
            raise ConfigError(f"--set {pair!r}: write it as key=value")
        try:
            settings[key] = json.loads(text)
        except ValueError:
            settings[key] = text
    return settings


def print_json(result: Any) -> None:
    """One JSON object on a line of its own."""
    print(json.dumps(result, ensure_ascii=False, default=str))

"""Offline stages from a TOML file: one, or a recipe that hands each stage's model to the next."""

from __future__ import annotations

import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from agentrl.errors import ConfigError
from agentrl.records.plain import plain
from agentrl.report.display import console
from agentrl.trainers.config import apply_override, validated
from agentrl.trainers.offline.settings import StageSettings
from agentrl.trainers.offline.stage import run_stage


def is_offline(config: Path, overrides: Sequence[str] = ()) -> bool:
    """Whether a TOML file names a stage or a recipe of stages; anything else is for online
    training.
    """
    try:
        row = _read(config, overrides)
    except ConfigError:
        return False  # the reader of online settings says what is wrong with the file
    return "stage" in row or "stages" in row


def run_offline(
    config: Path, folder: Path, *, overrides: Sequence[str] = (), resume: bool = False
) -> dict[str, Any]:
    """Run the stage or the recipe of a file, and say on the terminal how it goes.

    Returns:
        the result of the stage (`run_stage`), with "said": a line for people.

    Raises:
        ConfigError: a setting is wrong; nothing was written.
    """
    row = _read(config, overrides)
    settings = validated(StageSettings, row, str(config), overrides)
    result = run_stage(settings, folder, resume=resume, listen=_show, note=_say)
    for sign in result["signs"]:
        console.print(plain(sign), style="yellow", markup=False, highlight=False, soft_wrap=True)
    return {**result, "said": _headline(result)}


def _read(config: Path, overrides: Sequence[str]) -> dict[str, Any]:
    try:
        row = tomllib.loads(config.read_text())
    except (OSError, tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"config {config} cannot be read: {error}") from error
    for override in overrides:
        apply_override(row, override)
    return row


def _say(sentence: str) -> None:
    console.print(plain(sentence), markup=False, highlight=False, soft_wrap=True)


def _show(row: Mapping[str, Any]) -> None:
    names = ("loss", "rewards/margins", "rewards/accuracies", "accuracy", "mean_token_accuracy")
    parts = [
        f"{name.rpartition('/')[2]} {row[f'train/{name}']:.3f}"
        for name in names
        if f"train/{name}" in row
    ]
    _say(f"step {row['step']:>5}  " + "  ".join(parts))


def _headline(result: Mapping[str, Any]) -> str:
    """What a stage changed on held-out rows, in one line."""
    shown = [
        f"{name} {result['before'].get(name, float('nan')):.3f} -> {value:.3f}"
        for name, value in result["after"].items()
        if isinstance(value, float)
    ]
    held_out = "held out: " + ", ".join(shown) if shown else "nothing held out"
    return f"{result['stage']}: {result['steps']} steps; {held_out}; model {result['model']}"

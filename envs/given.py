"""What an environment reads that is not shipped with it: folders of public data, and rows."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from agentrl.errors import ConfigError


def given_folder(env_id: str, data: str, default: str, files: Sequence[str]) -> Path:
    """The folder with the data: the one that is named, or the default one.

    Args:
        env_id: for the message.
        data: setting of the environment; empty for the default.
        default: path below the folder that AGENTRL_DATA names.
        files: what has to be there.

    Raises:
        ConfigError: it lacks one of the files.
    """
    folder = Path(data) if data else Path(os.environ.get("AGENTRL_DATA", "")) / default
    lacking = [name for name in files if not (folder / name).is_file()]
    if lacking:
        raise ConfigError(
            f"{env_id}: data={str(folder)!r} has no {lacking[0]}: name a folder with"
            f" {', '.join(files)} by --set data=FOLDER, or one that holds {default} by AGENTRL_DATA"
        )
    return folder


def refuse_lacking(row: Mapping[str, Any], keys: Sequence[str], where: str) -> None:
    """Refuse a row of a file that lacks a key.

    Args:
        where: environment, file and line, for the message.

    Raises:
        ConfigError: it does.
    """
    for key in keys:
        if key not in row:
            there = ", ".join(map(repr, row)) or "none"
            raise ConfigError(f"{where}: there is no key {key!r}: add it (its keys are {there})")

"""Folders of public data that an environment reads and that are not shipped with it."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

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

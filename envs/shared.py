"""Helpers that several environments share: public data folders, row checks, call replay."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from agentrl.errors import ConfigError
from agentrl.types import BadCall, Message, ToolCall


def data_folder(env_id: str, data: str, default: str, files: Sequence[str]) -> Path:
    """Locate an environment's data folder and check that its files exist.

    Args:
        env_id: environment id, for the message.
        data: the environment's setting; empty for the default.
        default: path below the folder named by AGENTRL_DATA.
        files: names that must exist in the folder.

    Raises:
        ConfigError: a file is missing.
    """
    folder = Path(data) if data else Path(os.environ.get("AGENTRL_DATA", "")) / default
    missing = [name for name in files if not (folder / name).is_file()]
    if missing:
        raise ConfigError(
            f"{env_id}: data={str(folder)!r} has no {missing[0]}: set data to a folder with"
            f" {', '.join(files)}, or AGENTRL_DATA to one that contains {default}",
            setting="data",
        )
    return folder


def check_keys(row: Mapping[str, Any], keys: Sequence[str], where: str) -> None:
    """Check that a row of a file has these keys.

    Args:
        where: environment, file and line, for the message.

    Raises:
        ConfigError: a key is missing.
    """
    for key in keys:
        if key not in row:
            present = ", ".join(map(repr, row)) or "none"
            raise ConfigError(f"{where}: key {key!r} is missing (present: {present})", setting=key)


def answered_calls(messages: Sequence[Message]) -> Iterator[tuple[ToolCall, str]]:
    """Calls that were answered without an error, in order, with the answers the agent saw.

    Verifiers replay them to recompute the final state.
    """
    pending: list[ToolCall | BadCall] = []
    for message in messages:
        if message.role == "assistant":
            pending = list(message.tool_calls)
        elif message.role == "tool" and pending:
            call = pending.pop(0)
            if isinstance(call, ToolCall) and not message.content.startswith("error: "):
                yield call, message.content

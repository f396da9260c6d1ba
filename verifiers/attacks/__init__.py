"""The catalogue of known exploits as data: each is aimed at a task, and must earn nothing.

An attack is a set of files and, for some, a script that the agent runs in its sandbox. It needs no
knowledge of the verifier; some are aimed at the runner of this library, whose source is public.
The payloads are in the `*.toml` files of this folder.
"""

from __future__ import annotations

import re
import tomllib
from importlib.resources import files
from typing import Any

from agentrl.types import Task, TaskView
from agentrl.verifiers.attacks.base import Attack, Payload, Target, target_of

__all__ = ["CATALOGUE", "Attack", "Payload", "Target", "attacks_for", "target_of"]

_FILES = ("runner", "reading", "verdict", "behaviour", "controls", "bridge")


def _load_table(name: str) -> dict[str, Any]:
    return tomllib.loads((files(__name__) / f"{name}.toml").read_text(encoding="utf-8"))


def _load_catalogue() -> tuple[Attack, ...]:
    parts: dict[str, str] = _load_table("parts")["parts"]

    def insert_parts(text: str) -> str:
        return re.sub(r"^\$\((\w+)\)\n", lambda match: parts[match[1]], text, flags=re.MULTILINE)

    attacks = []
    for name in _FILES:
        for row in _load_table(name)["attack"]:
            payloads = {path: insert_parts(text) for path, text in row.get("files", {}).items()}
            script = insert_parts(row.get("script", ""))
            attacks.append(Attack(**row | {"files": payloads, "script": script}))
    return tuple(sorted(attacks, key=lambda attack: (attack.number, attack.name)))


CATALOGUE = _load_catalogue()
"""All attacks by number, including those that cannot be run (`reason`)."""


def attacks_for(task: TaskView) -> tuple[tuple[Attack, Payload], ...]:
    """Every attack that can be run, aimed at a task by its visible part alone.

    Raises:
        ValueError: the task declares no artifact, so no file can carry an attack.
    """
    target = target_of(task.view() if isinstance(task, Task) else task)
    return tuple((attack, attack.build(target)) for attack in CATALOGUE if not attack.reason)

"""Whether an interrupted evaluation is the same one: everything its score depends on is compared
before it goes on.
"""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

from agentrl.errors import ConfigError
from agentrl.records.files import write_json_atomic
from agentrl.records.redact import redactor

PLAN = "plan.json"
_EDGE = 1 << 20


def claim(out: Path, plan: dict[str, Any], what: str = "an evaluation") -> None:
    """Write the plan into its folder, or check that the folder's own says the same; more tasks may
    join.

    Args:
        out: the evaluation's folder.
        plan: JSON values by name; `tasks` maps task ids to fingerprints.
        what: the folder holds, for the sentence of an error.

    Raises:
        ConfigError: one sentence with the first thing that differs; nothing is written.
    """
    path, plan = out / PLAN, redactor().row(json.loads(json.dumps(plan)))  # as written
    old = redactor().row(_read(path))
    for name in sorted((plan.keys() | old.keys()) - {"tasks"}) if old else ():
        was, now = old.get(name), plan.get(name)
        if was != now and (was or now):  # what is left out is as what is empty
            other = "other" if name.endswith("s") else "another"
            raise ConfigError(
                f"{out} holds {what} with {other} {name}{_shown(was, now)}: choose another --out"
            )
    known = old.get("tasks", {})
    changed = next(
        (task for task, print_ in plan["tasks"].items() if known.get(task, print_) != print_), None
    )
    if changed is not None:
        raise ConfigError(
            f"{out} holds results of another {changed!r} (that task has changed): choose another"
            " --out"
        )
    write_json_atomic(path, {**plan, "tasks": {**known, **plan["tasks"]}})


def fingerprint_of(model: Path) -> str:
    """Hash of a model folder: every file's name and size, and its first and last MiB (all of a
    small model).
    """
    digest = hashlib.sha256()
    for file in sorted(path for path in model.rglob("*") if path.is_file()):
        size = file.stat().st_size
        digest.update(f"{file.relative_to(model)}\0{size}\0".encode())
        with file.open("rb") as stream:
            digest.update(stream.read(_EDGE))
            stream.seek(max(0, size - _EDGE))
            digest.update(stream.read(_EDGE))
    return digest.hexdigest()[:16]


def _read(path: Path) -> dict[str, Any]:
    try:
        plan = json.loads(path.read_bytes())
    except FileNotFoundError:
        return {}
    except ValueError as error:
        raise ConfigError(f"{path} is damaged ({error}): choose another --out") from error
    return plan if isinstance(plan, dict) else {}


def _shown(old: Any, new: Any) -> str:
    """Both values, where they are short enough to read."""
    was, now = json.dumps(old), json.dumps(new)
    return f" ({was}, not {now})" if len(was) + len(now) < 80 else ""

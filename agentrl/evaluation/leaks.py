"""What of a task must stay hidden, as texts; and where they stand although they should not."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping

from agentrl.types import Task, leaves

SHORTEST = 24
"""Letters from which a text is no chance; shorter values are looked for by planting canaries."""

SHOWN = 40
"""Letters from which a text of the task that the agent sees is no quotation by chance."""


def texts_in(value: object) -> Iterator[str]:
    """Every text in nested lists and dicts, keys left out."""
    return (one for one in leaves(value) if isinstance(one, str))


def shown_secret(task: Task) -> str:
    """A long text of hidden part or oracle that the agent is shown; empty if there is none.

    A file of the oracle that is the same at the start is no secret: a repair leaves most as it was.
    """
    seen = list(texts_in(task.view().model_dump(mode="json")))
    files = task.oracle.get("files")
    changed = dict(task.oracle)
    if isinstance(files, dict):
        changed["files"] = {
            path: text for path, text in files.items() if task.files.get(path) != text
        }
    for secret in texts_in([task.hidden, changed]):
        secret = secret.strip()  # a quotation seldom keeps the last line end
        if len(secret) >= SHOWN and any(secret in text for text in seen):
            return secret
    return ""


def secrets_of(task: Task) -> dict[str, str]:
    """Text -> what it is: long texts of hidden part and oracle and their long lines, but for what
    the view shows.
    """
    seen = "\n".join(texts_in(task.view().model_dump(mode="json")))
    found: dict[str, str] = {}
    for what, part in (("hidden part", task.hidden), ("reference solution", task.oracle)):
        for text in texts_in(part):
            for piece in (text, *text.splitlines()):
                if len(piece.strip()) >= SHORTEST and piece.strip() not in seen:
                    found.setdefault(piece.strip(), what)
    return found


def hashes_of(task: Task) -> dict[str, str]:
    """Hex sha256 -> what it is, for every long text of hidden part and oracle, with and without a
    line end.
    """
    found: dict[str, str] = {}
    for what, part in (("hidden part", task.hidden), ("reference solution", task.oracle)):
        for text in texts_in(part):
            for form in (text, text.strip(), text.strip() + "\n"):
                if len(text.strip()) >= SHORTEST and form not in task.files.values():
                    found[hashlib.sha256(form.encode(errors="replace")).hexdigest()] = what
    return found


def find_in(places: Mapping[str, str], secrets: Mapping[str, str]) -> str:
    """The first place that holds a secret, in words: what stands where. Empty if none does."""
    for place, text in places.items():
        for secret, what in secrets.items():
            if secret in text:
                return f"{place} holds a text of the {what} ({len(secret)} letters)"
    return ""

"""Looks through an image for what an agent must never find: hidden tests, reference solutions, git history.

A file that a later layer deletes is still in the earlier one, so layers are read one by one. Texts are found as they
are; a task file is found by its own field names, since its texts are escaped. Compressed files are not opened.
"""

from __future__ import annotations

import json
import tarfile
import tempfile
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import PurePosixPath
from typing import IO, Any

from agentrl.sandboxes.docker.daemon import Daemon
from agentrl.sandboxes.docker.images import require_image
from agentrl.types import Task

_SHORTEST = 24
_LARGEST = 64 << 20
_TASK_FIELDS = (b'"hidden"', b'"instruction"')


@dataclass(frozen=True)
class Finding:
    """Something that should not be there: in which layer (1 is the lowest), under which path, and what it is."""

    layer: int
    path: str
    why: str


class Needles:
    """The texts to look for, by their longest line: one look-up per line finds the files that are worth a search."""

    def __init__(self, tasks: Iterable[Task]) -> None:
        self._by_line: dict[bytes, list[tuple[bytes, str]]] = {}
        for task in tasks:
            for kind, part in (("hidden part", task.hidden), ("reference solution", task.oracle)):
                for text in _texts(part):
                    self._add(text.strip().encode(), f"{kind} of task {task.id!r}")

    def _add(self, text: bytes, what: str) -> None:
        if len(text) >= _SHORTEST:
            line = max(text.splitlines(), key=len).strip()
            self._by_line.setdefault(line, []).append((text, what))

    def found(self, data: bytes) -> list[str]:
        """What of it a file holds."""
        lines = {line.strip() for line in data.splitlines()}
        return [what for line in lines & self._by_line.keys() for text, what in self._by_line[line] if text in data]


def scan_image(daemon: Daemon, image: str, tasks: Iterable[Task]) -> list[Finding]:
    """Every finding in an image that a daemon holds; an empty list is the proof that was asked for.

    Raises:
        SandboxLost: the daemon or the image is missing.
    """
    require_image(daemon, image)
    api, needles = daemon.api(), Needles(tasks)
    with tempfile.TemporaryFile() as file, daemon.explained(f"saving the image {image}"):
        for chunk in api.get_image(image):
            file.write(chunk)
        file.seek(0)
        return list(_look(file, needles))


def _look(file: IO[bytes], needles: Needles) -> Iterator[Finding]:
    with tarfile.open(fileobj=file) as saved:
        (manifest,) = json.loads(_member(saved, "manifest.json").read())
        settings = _member(saved, manifest["Config"]).read()
        yield from (Finding(0, "image settings", why) for why in _whys(settings, needles))
        for number, name in enumerate(manifest["Layers"], 1):
            with tarfile.open(fileobj=_member(saved, name)) as layer:
                for member in layer:
                    yield from (Finding(number, member.name, why) for why in _judge(layer, member, needles))


def _member(archive: tarfile.TarFile, name: str) -> IO[bytes]:
    file = archive.extractfile(name)
    if file is None:
        raise OSError(f"a saved image without {name}")
    return file


def _judge(layer: tarfile.TarFile, member: tarfile.TarInfo, needles: Needles) -> Iterator[str]:
    parts = PurePosixPath(member.name).parts
    if parts[-2:] == (".git", "HEAD") or (parts[-3:-1] == ("objects", "pack") and parts[-1].endswith(".pack")):
        yield "git history"
    file = layer.extractfile(member) if member.isfile() and member.size <= _LARGEST else None
    if file is not None:
        yield from _whys(file.read(), needles)


def _whys(data: bytes, needles: Needles) -> Iterator[str]:
    if all(field in data for field in _TASK_FIELDS):
        yield "a task file with its hidden part"
    yield from needles.found(data)


def _texts(part: Any) -> Iterator[str]:
    if isinstance(part, str):
        yield part
    elif isinstance(part, dict | list):
        for item in part.values() if isinstance(part, dict) else part:
            yield from _texts(item)

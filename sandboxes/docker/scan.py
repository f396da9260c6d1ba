"""Searches an image for what an agent must not find: hidden tests, solutions, git history.

A file that a later layer deletes is still in the earlier one, so layers are read one by one. Texts
are found as they are, but for indentation and the ends of lines; a task file is found by its own
field names, since its texts are escaped. Compressed files are not opened.
"""

from __future__ import annotations

import json
import re
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
_PIECE, _OVERLAP = 64 << 20, 1 << 20
_TASK_FIELDS = ((b'"hidden"', b'"instruction"'), (b'"hidden"', b'"oracle"'))
_GIT_OBJECT = re.compile(
    r"(^|/)objects/([0-9a-f]{2}/[0-9a-f]{38}([0-9a-f]{24})?|pack/[^/]+\.pack)$"
)
_BUNDLE = b"# v2 git bundle", b"# v3 git bundle"


@dataclass(frozen=True)
class Leak:
    """Something that should not be there: its layer (1 is the lowest), its path, and what it is."""

    layer: int
    path: str
    why: str


class Needles:
    """The texts to look for, by their longest line.

    One look-up per line finds the files that need a full search.
    """

    def __init__(self, tasks: Iterable[Task]) -> None:
        self._by_line: dict[bytes, list[tuple[bytes, str]]] = {}
        for task in tasks:
            for kind, part in (("hidden part", task.hidden), ("reference solution", task.oracle)):
                for text in _texts(part):
                    self._add(_plain(text.encode()), f"{kind} of task {task.id!r}")

    def _add(self, text: bytes, what: str) -> None:
        if len(text) >= _SHORTEST:
            line = max(text.split(b"\n"), key=len)
            self._by_line.setdefault(line, []).append((text, what))

    def found(self, data: bytes) -> list[str]:
        """What of it a file holds."""
        lines = {line.strip() for line in data.splitlines()} & self._by_line.keys()
        data = _plain(data) if lines else b""
        return [what for line in lines for text, what in self._by_line[line] if text in data]


def scan_image(daemon: Daemon, image: str, tasks: Iterable[Task]) -> list[Leak]:
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


def _look(file: IO[bytes], needles: Needles) -> Iterator[Leak]:
    with tarfile.open(fileobj=file) as saved:
        (manifest,) = json.loads(_member(saved, "manifest.json").read())
        settings = _member(saved, manifest["Config"]).read()
        inner = [
            part for text in _texts(json.loads(settings)) for part in (text, text.partition("=")[2])
        ]
        found = dict.fromkeys(
            why for text in (settings, *map(str.encode, inner)) for why in _whys(text, needles)
        )
        yield from (Leak(0, "image settings", why) for why in found)
        for number, name in enumerate(manifest["Layers"], 1):
            with tarfile.open(fileobj=_member(saved, name)) as layer:
                for member in layer:
                    yield from (
                        Leak(number, member.name, why) for why in _judge(layer, member, needles)
                    )


def _member(archive: tarfile.TarFile, name: str) -> IO[bytes]:
    file = archive.extractfile(name)
    if file is None:
        raise OSError(f"a saved image without {name}")
    return file


def _judge(layer: tarfile.TarFile, member: tarfile.TarInfo, needles: Needles) -> Iterator[str]:
    parts = PurePosixPath(member.name).parts
    if parts[-2:] == (".git", "HEAD") or _GIT_OBJECT.search(member.name):
        yield "git history"
    if file := layer.extractfile(member) if member.isfile() else None:
        yield from dict.fromkeys(why for piece in _pieces(file) for why in _whys(piece, needles))


def _pieces(file: IO[bytes]) -> Iterator[bytes]:
    """A file in parts that fit into memory, each with the end of the one before it."""
    end = b""
    while data := file.read(_PIECE):
        yield end + data
        end = data[-_OVERLAP:]


def _whys(data: bytes, needles: Needles) -> Iterator[str]:
    if any(all(field in data for field in fields) for fields in _TASK_FIELDS):
        yield "a task file with its hidden part"
    if data.startswith(_BUNDLE):
        yield "git history"
    yield from needles.found(data)


def _texts(part: Any) -> Iterator[str]:
    if isinstance(part, str):
        yield part
    elif isinstance(part, dict | list):
        for item in part.values() if isinstance(part, dict) else part:
            yield from _texts(item)


def _plain(text: bytes) -> bytes:
    """A text without white space at the ends of its lines, which editors and checkouts change."""
    return b"\n".join(line.strip() for line in text.strip().splitlines())

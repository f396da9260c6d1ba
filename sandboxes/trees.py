"""Manifests and snapshots on the wire: five and four fields for each entry, checked when they come
from a sandbox.
"""

from __future__ import annotations

import os

from agentrl.sandboxes.base import FileInfo, FileInfos, Snapshot, SnapshotEntry
from agentrl.sandboxes.client import Wire
from agentrl.sandboxes.shell import Fields, malformed

_KINDS = {b"dir", b"file", b"link"}
_LISTED = {*_KINDS, b"other"}
_ODD = {b"", b".", b".."}


def infos_of(wire: Wire, answer: Fields) -> FileInfos:
    """The entries of a manifest, sorted by path.

    Raises:
        SandboxLost: the answer holds other things.
    """
    rows = [answer[at : at + 5] for at in range(0, len(answer), 5)]
    if len(answer) % 5 or any(row[1] not in _LISTED for row in rows):
        raise malformed(wire, "manifest")
    return sorted((_info(wire, *row) for row in rows), key=lambda info: info.path)


def _info(
    wire: Wire, path: bytes, kind: bytes, mode: bytes, size: bytes, sha256: bytes
) -> FileInfo:
    return FileInfo(
        os.fsdecode(path),
        kind.decode(),  # type: ignore[arg-type]
        wire.number(mode),
        wire.number(size),
        sha256.decode("ascii", "replace"),
    )


def entries_of(wire: Wire, answer: Fields, cap: int) -> tuple[SnapshotEntry, ...]:
    """The entries of a snapshot.

    Raises:
        SandboxLost: the answer holds other things, or more than was asked for.
    """
    rows = [answer[at : at + 4] for at in range(0, len(answer), 4)]
    whole = len(answer) % 4 == 0 and bool(rows) and rows[0][:2] == [b".", b"dir"]
    if (
        not whole
        or sum(len(row[0]) + len(row[3]) for row in rows[1:]) > cap
        or not all(map(_sound, rows[1:]))
    ):
        raise malformed(wire, "snapshot")
    return tuple(_entry(wire, *row) for row in rows)


def _entry(wire: Wire, path: bytes, kind: bytes, mode: bytes, data: bytes) -> SnapshotEntry:
    return SnapshotEntry(os.fsdecode(path), kind.decode(), wire.number(mode), data)  # type: ignore[arg-type]


def _sound(row: list[bytes]) -> bool:
    return row[1] in _KINDS and b"\0" not in row[0] and _ODD.isdisjoint(row[0].split(b"/"))


def fields_of(snapshot: Snapshot) -> Fields:
    """A snapshot's fields, parents before what is in them.

    Raises:
        ValueError: a path leaves the work area, or a target holds a NUL.
    """
    fields = []
    for entry in sorted(snapshot.entries, key=lambda entry: os.fsencode(entry.path)):
        row = [os.fsencode(entry.path), entry.kind.encode(), b"%d" % entry.mode, entry.data]
        if (entry.path != "." or entry.kind != "dir") and not _sound(row):
            raise ValueError(
                f"snapshot entry {entry.path!r} of kind {entry.kind!r} must be a path inside a work"
                " area"
            )
        if entry.kind == "link" and b"\0" in entry.data:
            raise ValueError(f"snapshot entry {entry.path!r} is a link to a target with a NUL")
        fields += row
    return fields

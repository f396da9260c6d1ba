"""A tree of files as plain data: out of one work area and into the same or another.

An entry is four fields: path, kind (`dir`, `file` or `link`), permission bits, and the bytes of a
file or the target of a link. The first entry is the tree itself, as `.`; parents come before what
is in them. Owner, inode and times are left out, so that equal trees give equal entries; sockets,
devices and FIFOs are no part of a tree.
"""

from __future__ import annotations

import errno
import os
import stat

from agentrl.sandboxes.supervisor import files
from agentrl.sandboxes.supervisor.frames import Fatal

ROOT = b"."
KINDS = {stat.S_IFDIR: b"dir", stat.S_IFREG: b"file", stat.S_IFLNK: b"link"}


def take(root: int, cap: int) -> list[bytes]:
    """The entries of everything below a directory.

    What its owner locked is opened for the look and locked again.

    Raises:
        OSError: EFBIG, over `cap` bytes of names and content, MANIFEST_ENTRIES entries or
            MANIFEST_DEPTH levels.
    """
    rows: list[tuple[bytes, bytes, int, bytes]] = [
        (ROOT, b"dir", stat.S_IMODE(os.fstat(root).st_mode), b"")
    ]
    locked = [(b"", rows[0][2])] if rows[0][2] & 0o700 != 0o700 else []
    pending = [b""]
    try:
        if locked:
            os.fchmod(root, 0o700)
        while pending:
            found = _look(root, pending.pop(), cap)
            cap -= sum(len(row[0]) + len(row[3]) for row in found)
            inner = [(row[0], row[2]) for row in found if row[1] == b"dir"]
            pending += [path for path, _ in inner]
            locked += [(path, mode) for path, mode in inner if mode & 0o700 != 0o700]
            rows += found
            if len(rows) > files.MANIFEST_ENTRIES or any(
                p.count(b"/") >= files.MANIFEST_DEPTH for p in pending
            ):
                limits = f"{files.MANIFEST_ENTRIES} entries or {files.MANIFEST_DEPTH} levels"
                raise OSError(errno.EFBIG, f"over {limits} in the work area")
    finally:
        for path, mode in reversed(locked):
            _set_mode(root, path, mode)
    return [
        field
        for path, kind, mode, data in sorted(rows)
        for field in (path, kind, b"%d" % mode, data)
    ]


def _look(root: int, at: bytes, cap: int) -> list[tuple[bytes, bytes, int, bytes]]:
    """The entries directly in one directory."""
    rows = []
    directory = files.descend(root, at)
    try:
        for text, _ in files.entries(directory, files.MANIFEST_ENTRIES):
            name = os.fsencode(text)
            try:
                row = _entry(directory, name, cap)
            except FileNotFoundError:  # a process of the agent is at work meanwhile
                continue
            if row:
                path = at + b"/" + name if at else name
                cap -= len(path) + len(row[2])
                if cap < 0:
                    raise OSError(errno.EFBIG, "the work area holds more than a snapshot may")
                rows.append((path, *row))
    finally:
        os.close(directory)
    return rows


def _entry(directory: int, name: bytes, cap: int) -> tuple[bytes, int, bytes] | None:
    info = os.stat(name, dir_fd=directory, follow_symlinks=False)
    kind, data = KINDS.get(stat.S_IFMT(info.st_mode)), b""
    if kind is None:
        return None
    mode = stat.S_IMODE(info.st_mode)
    if kind == b"link":
        data = os.readlink(name, dir_fd=directory)
        mode = 0o777  # links have no mode of their own
    elif kind == b"file":
        data = _content(directory, name, mode, cap)
    return kind, mode, data


def _content(directory: int, name: bytes, mode: int, cap: int) -> bytes:
    """Up to `cap` + 1 bytes of a file, also of one that its owner made unreadable."""
    flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK
    try:
        fd = os.open(name, flags, dir_fd=directory)
    except PermissionError:
        handle = os.open(name, os.O_PATH | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=directory)
        try:
            if not stat.S_ISREG(os.fstat(handle).st_mode):
                raise
            os.chmod(f"/proc/self/fd/{handle}", 0o600)
            fd = os.open(f"/proc/self/fd/{handle}", os.O_RDONLY | os.O_CLOEXEC)
        finally:
            os.close(handle)
        os.fchmod(fd, mode)
    try:
        chunks = []
        while cap >= 0 and (chunk := os.read(fd, min(cap + 1, 1 << 20))):
            chunks.append(chunk)
            cap -= len(chunk)
        return b"".join(chunks)
    finally:
        os.close(fd)


def _set_mode(root: int, path: bytes, mode: int) -> None:
    try:
        directory = files.descend(root, path)
    except (FileNotFoundError, NotADirectoryError):  # a process of the agent is at work meanwhile
        return
    try:
        os.fchmod(directory, mode)
    finally:
        os.close(directory)


def restore(root: int, fields: list[bytes]) -> None:
    """Make the entries in an empty directory; each is reached through real directories only.

    Raises:
        OSError: no room; or an entry that would lie behind a link or in the place of another one.
        Fatal: the fields are no entries.
    """
    if len(fields) % 4 or any(kind not in KINDS.values() for kind in fields[1::4]):
        raise Fatal("a snapshot with malformed entries")
    modes: list[tuple[bytes, int]] = []
    for at in range(0, len(fields), 4):
        path, kind, digits, data = fields[at : at + 4]
        mode = int(digits) & 0o7777
        if kind == b"dir":
            modes.append((b"" if path == ROOT else path, mode))
        if path != ROOT:
            _make(root, path, kind, mode, data)
    for path, mode in reversed(modes):
        _set_mode(root, path, mode)


def _make(root: int, path: bytes, kind: bytes, mode: int, data: bytes) -> None:
    *parents, name = files.components(path)
    directory = os.dup(root)
    try:
        for part in parents:
            inner = os.open(part, files.DIRECTORY, dir_fd=directory)
            os.close(directory)
            directory = inner
        if kind == b"dir":
            os.mkdir(name, 0o700, dir_fd=directory)
        elif kind == b"link":
            os.symlink(data, name, dir_fd=directory)
        else:
            fd = os.open(name, files.NEW_FILE, 0o600, dir_fd=directory)
            try:
                files.write_all(fd, data)
                os.fchmod(fd, mode)
            finally:
                os.close(fd)
    finally:
        os.close(directory)

"""Files of the work area, reached by directory descriptors and never through a link."""

from __future__ import annotations

import errno
import itertools
import os
import stat

from agentrl.sandboxes.supervisor.frames import Fatal

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterable

WIPE_ENTRIES = 500_000
MANIFEST_ENTRIES = 10_000
MANIFEST_DEPTH = 64
MANIFEST_BYTES = 2 << 30  # of content to hash: a sparse file takes no room, but its time
DIRECTORY = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
NEW_FILE = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
ODD = (b"", b".", b"..")
# What says nothing about a file: this program or its machine lacks something.
SCARCE = (errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.EIO)


def unlock(parent: int, name: str | bytes) -> None:
    """Give the owner all rights on a directory, without following a link."""
    fd = os.open(name, os.O_PATH | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=parent)
    try:
        os.chmod(f"/proc/self/fd/{fd}", 0o700)
    finally:
        os.close(fd)


def open_directory(parent: int, name: str | bytes) -> int:
    """Open a directory for reading and writing its entries, whatever its mode."""
    try:
        fd = os.open(name, DIRECTORY, dir_fd=parent)
    except PermissionError:
        unlock(parent, name)
        fd = os.open(name, DIRECTORY, dir_fd=parent)
    if stat.S_IMODE(os.fstat(fd).st_mode) & 0o700 != 0o700:
        os.fchmod(fd, 0o700)
    return fd


def entries(directory: int, limit: int = WIPE_ENTRIES) -> list[tuple[str, bool]]:
    """(name as system functions take it, is a directory) of each entry; links are not followed.

    Raises:
        OSError: EFBIG, there are more than `limit`.
    """
    with os.scandir(directory) as found:
        names = [
            (entry.name, entry.is_dir(follow_symlinks=False))
            for entry in itertools.islice(found, limit)
        ]
        if len(names) == limit and next(found, None) is not None:
            raise OSError(errno.EFBIG, f"more than {limit} entries in one directory")
    return names


def wipe(root: int) -> None:
    """Remove everything below a directory, however deep, with a fixed number of open files.

    Each nested directory is moved up to the root before its own turn, so there is no recursion and
    no long path.

    Raises:
        Fatal: more than WIPE_ENTRIES entries; opening a new sandbox is cheaper.
    """
    prefix = ".wipe-" + os.urandom(8).hex()
    moved = seen = 0
    while found := entries(root):
        for name, is_directory in found:
            if not is_directory:
                os.unlink(name, dir_fd=root)
                continue
            directory = open_directory(root, name)
            try:
                inner = entries(directory)
                seen += len(inner)
                if seen > WIPE_ENTRIES:
                    raise Fatal(f"more than {WIPE_ENTRIES} files to wipe")
                for child, child_is_directory in inner:
                    if child_is_directory:
                        moved += 1
                        lift(directory, child, root, f"{prefix}-{moved}")
                    else:
                        os.unlink(child, dir_fd=directory)
            finally:
                os.close(directory)
            os.rmdir(name, dir_fd=root)


def lift(source: int, name: str | bytes, target: int, new_name: str | bytes) -> None:
    """Move a directory from `source` into `target`.

    The kernel wants write access to it, as its `..` changes.
    """
    try:
        os.rename(name, new_name, src_dir_fd=source, dst_dir_fd=target)
    except PermissionError:
        unlock(source, name)
        os.rename(name, new_name, src_dir_fd=source, dst_dir_fd=target)


def clear(parent: int, name: bytes) -> None:
    """Remove one entry of any kind."""
    try:
        os.unlink(name, dir_fd=parent)
    except IsADirectoryError:
        directory = open_directory(parent, name)
        try:
            wipe(directory)
        finally:
            os.close(directory)
        os.rmdir(name, dir_fd=parent)


def components(path: bytes) -> list[bytes]:
    """The parts of a relative path.

    The host has checked it: an odd one here means that the host is broken.
    """
    parts = path.split(b"/")
    if any(part in ODD for part in parts):
        raise Fatal("a path is not relative")
    return parts


def enter(parent: int, name: bytes) -> int:
    """Open a subdirectory; a missing one is made, and anything else in its place is replaced."""
    for _ in range(3):  # a process of the agent may be racing us
        try:
            return open_directory(parent, name)
        except FileNotFoundError:
            pass
        except OSError as error:
            if error.errno not in (errno.ENOTDIR, errno.ELOOP):
                raise
            os.unlink(name, dir_fd=parent)
        try:
            os.mkdir(name, 0o755, dir_fd=parent)
        except FileExistsError:
            continue
    raise OSError(errno.EBUSY, "something keeps replacing a directory")


def put_files(root: int, pairs: Iterable[tuple[bytes, bytes]]) -> None:
    """Write files, each as a new inode, so that neither a link nor a hard link leads elsewhere.

    Files of the same directory that follow one another find it open.
    """
    at, last = os.dup(root), b""
    try:
        for path, data in pairs:
            folder, _, name = path.rpartition(b"/")
            if folder != last or name in ODD:
                *parents, name = components(path)
                os.close(at)
                at, last = os.dup(root), b""
                for part in parents:
                    inner = enter(at, part)
                    os.close(at)
                    at = inner
                last = folder
            put_file(at, name, data)
    finally:
        os.close(at)


def put_file(directory: int, name: bytes, data: bytes) -> None:
    """Write one file of an open directory."""
    try:
        fd = os.open(name, NEW_FILE, 0o644, dir_fd=directory)
    except FileExistsError:
        clear(directory, name)
        fd = os.open(name, NEW_FILE, 0o644, dir_fd=directory)
    try:
        written = os.write(fd, data)
        if written < len(data):
            write_all(fd, data[written:])
    finally:
        os.close(fd)


def write_all(fd: int, data: bytes) -> None:
    """Write all of it."""
    view = memoryview(data)
    while view:
        view = view[os.write(fd, view) :]


def walk(root: int, path: bytes) -> int:
    """A handle of a directory below, to enter it; empty for the root. No link is followed.

    Raises:
        OSError: it is not there, no directory, or behind a link.
    """
    at = os.dup(root)
    for part in components(path) if path else ():
        try:
            inner = os.open(
                part, os.O_PATH | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=at
            )
        finally:
            os.close(at)
        at = inner
    return at


def get_file(root: int, path: bytes, cap: int) -> bytes | None:
    """Read a regular file of at most `cap` bytes with one name, behind no link; else None."""
    parts = components(path)
    at = os.dup(root)
    try:
        for depth, part in enumerate(parts, 1):
            # O_NONBLOCK: opening a FIFO must not wait for its writer.
            flags = (
                DIRECTORY
                if depth < len(parts)
                else os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK
            )
            inner = os.open(part, flags, dir_fd=at)
            os.close(at)
            at = inner
        info = os.fstat(at)
        if not stat.S_ISREG(info.st_mode) or info.st_nlink != 1 or info.st_size > cap:
            return None
        chunks = []
        while cap >= 0 and (chunk := os.read(at, min(cap + 1, 1 << 20))):
            chunks.append(chunk)
            cap -= len(chunk)
        return b"".join(chunks) if cap >= 0 else None
    except OSError as error:
        if error.errno in SCARCE:
            raise
        return None  # whatever its owner did to it: a lease on it gives EAGAIN, for example
    finally:
        os.close(at)


def descend(root: int, path: bytes) -> int:
    """Open the directory at a path that a walk has just seen; a link in its place is refused."""
    at = os.dup(root)
    for part in path.split(b"/") if path else ():
        try:
            inner = open_directory(at, part)
        finally:
            os.close(at)
        at = inner
    return at


def scrub(directory: int, mode: int) -> None:
    """Take off what an owner can hang on a directory that stays: mode and extended attributes."""
    os.fchmod(directory, mode)
    for name in os.listxattr(directory):
        os.removexattr(directory, name)

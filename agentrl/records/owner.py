"""A run folder belongs to one process at a time."""

from __future__ import annotations

import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from agentrl.errors import ConfigError

LOCK = ".owner"


@contextmanager
def owned(folder: Path) -> Iterator[None]:
    """Hold a folder, made if it is missing, for as long as the block lasts.

    A folder that was made here and in which nothing was written is removed again.

    The kernel lets go of it when the process ends, however it ends.

    Raises:
        ConfigError: another process (or this one, elsewhere) holds it.
    """
    is_new = not folder.exists()
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / LOCK
    descriptor = _locked(path)
    try:
        os.ftruncate(descriptor, 0)
        os.write(descriptor, b"%d\n" % os.getpid())
        yield
    finally:
        path.unlink(missing_ok=True)
        os.close(descriptor)
        if is_new and not any(folder.iterdir()):
            folder.rmdir()


def _locked(path: Path) -> int:
    """A descriptor of the lock file, locked."""
    while True:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            owner = os.read(descriptor, 20).decode().strip()
            os.close(descriptor)
            raise ConfigError(
                f"{path.parent} is in use by process {owner or 'unknown'}: wait until it has"
                " ended, or choose another folder"
            ) from None
        if _is_at(descriptor, path):
            return descriptor
        os.close(descriptor)  # its last owner removed it between our two calls


def _is_at(descriptor: int, path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(descriptor), path.stat())
    except FileNotFoundError:
        return False

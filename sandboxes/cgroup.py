"""A memory control group for one sandbox, where this process may make one: version 1 or 2.

It is made beside or below our own group, so every limit that holds for us holds for it too. It goes
with the sandbox; what a killed host left is empty, and the next one on this machine removes it.
"""

from __future__ import annotations

import asyncio
import functools
import itertools
import os
from dataclasses import dataclass
from pathlib import Path

from agentrl.errors import SandboxLost

_PREFIX = "agentrl"
_REMOVE_S = 2.0
_POLL_S = 0.005
_numbers = itertools.count()
_left: set[Path] = set()  # our groups that were not empty yet when we last looked


@dataclass(frozen=True)
class Home:
    """Where groups are made: a directory of the kernel, and the names of the files in it.

    Attributes:
        limits: the file of the limit on memory, and that on swap or on both together.
        events: the file that counts processes ended for lack of memory.
        swap_apart: whether swap has a limit of its own (version 2).
    """

    path: Path
    limits: tuple[str, str]
    events: str
    swap_apart: bool


class MemoryGroup:
    """A group that bounds all memory of the processes in it, files in memory included.

    Attributes:
        files: descriptors of its events and its statistics, for
            `agentrl.sandboxes.supervisor.memory`.
    """

    def __init__(self, home: Home, limit_bytes: int) -> None:
        """Make it.

        Raises:
            OSError: it is not permitted.
        """
        for path in list(_left):
            if _removed(path):
                _left.discard(path)
        self._path = home.path / f"{_PREFIX}-{os.getpid()}-{next(_numbers)}"
        self._path.mkdir()
        self.files: tuple[int, ...] = ()
        try:
            memory, swap = home.limits
            (self._path / memory).write_text(str(limit_bytes))
            if (self._path / swap).exists():  # not where swap is not accounted
                (self._path / swap).write_text("0" if home.swap_apart else str(limit_bytes))
            for name in (home.events, "memory.stat"):
                self.files += (os.open(self._path / name, os.O_RDONLY | os.O_CLOEXEC),)
        except OSError:
            self.close_files()
            self._path.rmdir()
            raise

    def add(self, pid: int) -> None:
        """Move a process into it; what it holds already stays where it is.

        Raises:
            SandboxLost: the kernel refuses.
        """
        try:
            (self._path / "cgroup.procs").write_text(str(pid))
        except OSError as error:
            raise SandboxLost(
                f"cannot move a sandbox into its memory group {self._path}: {error}"
            ) from error

    def close_files(self) -> None:
        """Close our descriptors of its files; safe to call twice."""
        for fd in self.files:
            os.close(fd)
        self.files = ()

    def abandon(self) -> None:
        """Remove it, as nothing was ever in it."""
        self.close_files()
        self._path.rmdir()

    async def remove(self) -> None:
        """Remove it once its processes are gone.

        If they stay too long, it is left to the next group that is made.
        """
        self.close_files()
        deadline = asyncio.get_running_loop().time() + _REMOVE_S
        while asyncio.get_running_loop().time() < deadline:
            try:
                self._path.rmdir()
            except FileNotFoundError:
                return
            except OSError:  # a process in it is not reaped yet
                await asyncio.sleep(_POLL_S)
            else:
                return
        _left.add(self._path)


@functools.cache
def home() -> Home | None:
    """Where this process may make groups; None if nowhere. What dead hosts left is removed."""
    for found in _homes(
        Path("/proc/self/cgroup").read_text(), Path("/proc/self/mountinfo").read_text()
    ):
        try:
            sweep(found.path)
            group = MemoryGroup(found, 1 << 30)
        except OSError:  # not permitted
            continue
        group.abandon()
        return found
    return None


def _homes(groups: str, mounts: str) -> list[Home]:
    """Candidates, best first, from the kernel's texts about our groups and mounts."""
    ours = {
        controllers: path
        for _, controllers, path in (line.split(":", 2) for line in groups.splitlines())
    }
    found = []
    for line in mounts.splitlines():
        fields, _, (kind, _, *options) = (part.split() for part in line.partition(" - "))
        root, point = fields[3], Path(fields[4])
        if kind == "cgroup" and "memory" in options[-1].split(",") and "memory" in ours:
            place = point / os.path.relpath(ours["memory"], root)
            names = ("memory.limit_in_bytes", "memory.memsw.limit_in_bytes")
            found.append(Home(place, names, "memory.oom_control", swap_apart=False))
        elif kind == "cgroup2" and "" in ours:
            place = point / os.path.relpath(ours[""], root)
            # A group with processes, as ours, cannot hand on controllers to groups below: only the
            # root can.
            for parent in (place.parent, place) if place != point else (place,):
                if _hands_on_memory(parent):
                    found.append(
                        Home(
                            parent,
                            ("memory.max", "memory.swap.max"),
                            "memory.events",
                            swap_apart=True,
                        )
                    )
    return found


def _hands_on_memory(group: Path) -> bool:
    try:
        return "memory" in (group / "cgroup.subtree_control").read_text().split()
    except OSError:  # no group of this kind, or out of reach
        return False


def sweep(place: Path) -> None:
    """Remove the empty groups of hosts that are gone."""
    for group in place.glob(f"{_PREFIX}-*-*"):
        pid = group.name.split("-")[1]
        if not Path("/proc", pid).exists():
            _removed(group)


def _removed(group: Path) -> bool:
    """Remove a group unless a process is in it; whether it is gone."""
    try:
        group.rmdir()
    except FileNotFoundError:
        return True
    except OSError:
        return False
    return True

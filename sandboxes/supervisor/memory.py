"""What the sandbox's own memory cgroup tells, where there is one and it is in sight."""

from __future__ import annotations

import os

# (events, statistics), inside a container: version 2, then version 1
PLACES = (
    ("/sys/fs/cgroup/memory.events", "/sys/fs/cgroup/memory.stat"),
    ("/sys/fs/cgroup/memory/memory.oom_control", "/sys/fs/cgroup/memory/memory.stat"),
)
# Memory with content, without the cache of files on disk: version 2, version 1, both.
CHARGED = (b"anon", b"rss", b"shmem")


class Memory:
    """Counters of one cgroup, read from open files; without them, nothing is known."""

    def __init__(self, descriptors: list[int], private: bool) -> None:
        """`descriptors` are of the two files, from the cgroup's maker; else they are searched."""
        self._events = self._stat = -1
        if descriptors:
            self._events, self._stat = descriptors
            for fd in descriptors:
                os.set_inheritable(fd, False)
        elif private:
            self._search()

    def _search(self) -> None:
        for events, stat in PLACES:
            try:
                self._events = os.open(events, os.O_RDONLY | os.O_CLOEXEC)
            except OSError:  # none is in sight, which `known` tells
                continue
            self._stat = os.open(stat, os.O_RDONLY | os.O_CLOEXEC)
            return

    @property
    def known(self) -> bool:
        """Whether there is such a cgroup."""
        return self._events >= 0

    def kills(self) -> int:
        """How many processes the kernel has ended for lack of memory; 0 where that is not known."""
        return _values(self._events).get(b"oom_kill", 0) if self.known else 0

    def charge(self) -> int | None:
        """Bytes that other processes and files in memory hold now; None where that is not known.

        Less than nothing is possible: what this process had when it joined is charged elsewhere.
        """
        if not self.known:
            return None
        values = _values(self._stat)
        return sum(values.get(name, 0) for name in CHARGED) - _own()


def _own() -> int:
    """Bytes of this process that are no part of a file."""
    with open("/proc/self/statm", "rb", buffering=0) as file:
        _, resident, shared, *_ = map(int, file.read().split())
    return (resident - shared) * os.sysconf("SC_PAGE_SIZE")


def _values(fd: int) -> dict[bytes, int]:
    """The lines `name number` of a file of the kernel."""
    rows = (line.split() for line in os.pread(fd, 1 << 14, 0).splitlines())
    return {row[0]: int(row[1]) for row in rows if len(row) == 2}

"""The fingerprint of a sandbox: what tells a used one from a new one, compared after every reset.

Left out because nothing can be read from them later: inode numbers, times, counters of the kernel,
warmth of caches.
"""

from __future__ import annotations

import os
import time

from agentrl.sandboxes.supervisor.frames import Fatal
from agentrl.sandboxes.supervisor.processes import CHUNK

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable

    from agentrl.sandboxes.supervisor.memory import Memory
    from agentrl.sandboxes.supervisor.processes import Processes

VERIFY_S = 0.5
PAUSE_S = 0.005
# Slack for the pages that each processor charges ahead.
CHARGE_BYTES = 16 << 20
IPC = ("sysvipc/shm", "sysvipc/sem", "sysvipc/msg")
# What a namespace could be given beyond objects; all of it is written through /proc/sys or a call
# of root.
SYSCTLS = (
    "kernel/sem",
    "kernel/shmmax",
    "kernel/msgmax",
    "fs/mqueue/msg_max",
    "net/ipv4/ip_unprivileged_port_start",
    "net/ipv4/ping_group_range",
    "net/ipv4/tcp_max_tw_buckets",
)
# The other counts, `orphan` among them, are of the whole machine.
COUNTED = (b"used", b"inuse", b"tw", b"memory")
MEMORY_FILES = (b"tmpfs", b"ramfs")


class Proof:
    """Looks at what is left in a sandbox: taken when it is new, repeated to compare.

    Attributes:
        private: the namespaces serve this sandbox alone; where they do not, only its own
            directories, processes and descriptors are compared.
    """

    def __init__(
        self, wiped: list[int], processes: Processes, memory: Memory, private: bool
    ) -> None:
        """Take the fingerprint of a new sandbox; `wiped` are directories that a reset empties."""
        self._wiped = wiped
        self._memory = memory
        self._looks: dict[str, Callable[[], object]] = {
            "roots": self._roots,
            "descriptors": _descriptors,
        }
        self._looks["processes"] = processes.has_none
        if private:
            self._spaces = [os.open(path, os.O_PATH | os.O_CLOEXEC) for path in _writable()]
            self._looks |= {
                "mounts": lambda: _proc("self/mountinfo"),
                "space": self._space,
                "processes": _pids,
            }
            self._looks |= {
                "ipc": lambda: [_proc(name) for name in IPC],
                "sockets": _sockets,
                "sysctls": _sysctls,
            }
        self._start = {name: look() for name, look in self._looks.items()}
        self._charge = memory.charge() if private else None

    def differences(self) -> list[str]:
        """The names of what is not as it was at the start."""
        found = [name for name, look in self._looks.items() if self._differs(name, look())]
        if self._charge is not None and (self._memory.charge() or 0) > self._charge + CHARGE_BYTES:
            found.append("memory")
        return found

    def _differs(self, name: str, now: object) -> bool:
        if now == []:
            # The socket with which the network was set up may still be going away when the first
            # look is taken.
            self._start[name] = now
        return now != self._start[name]

    def check(self) -> None:
        """Compare with the start.

        Raises:
            Fatal: something differs, and still does after VERIFY_S.
        """
        deadline = time.monotonic() + VERIFY_S
        while found := self.differences():
            # The kernel frees sockets in flight and the like a moment after their processes.
            if time.monotonic() > deadline:
                raise Fatal(f"the sandbox differs from its start in {', '.join(found)}")
            if "sockets" in found:
                _collect()
            time.sleep(PAUSE_S)

    def _roots(self) -> list[object]:
        """Entries, owner, mode and attributes of the directories that stay."""
        rows: list[object] = []
        for directory in self._wiped:
            info = os.fstat(directory)
            names = sorted(os.listdir(directory))
            rows.append((names, info.st_mode, info.st_uid, info.st_gid, os.listxattr(directory)))
        return rows

    def _space(self) -> list[object]:
        """Free blocks and inodes; files that are unlinked but held open count as used."""
        spaces = [os.fstatvfs(mount) for mount in self._spaces]
        return [(space.f_blocks, space.f_bfree, space.f_files, space.f_ffree) for space in spaces]


def _writable() -> list[bytes]:
    """Mount points of writable file systems in memory; others are not this sandbox's alone."""
    points: dict[bytes, bytes] = {}
    for line in _proc("self/mountinfo").splitlines():
        fields, _, (kind, *_) = (part.split() for part in line.partition(b" - "))
        if kind in MEMORY_FILES and b"rw" in fields[5].split(b","):
            points.setdefault(fields[2], fields[4].decode("unicode_escape").encode("latin-1"))
    return list(points.values())


def _pids() -> list[str]:
    return [name for name in os.listdir("/proc") if name.isdigit()]


def _descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


def _sysctls() -> list[object]:
    return [os.uname().nodename, *(_proc(f"sys/{name}") for name in SYSCTLS)]


def _sockets() -> list[bytes]:
    """Counts of sockets and lingering TCP connections that are not zero, and local sockets.

    Nothing is listed but those: listing TCP would walk the kernel's whole hash table, 1.4 ms each
    time.
    """
    found = []
    for line in (_proc("net/sockstat") + _proc("net/sockstat6")).splitlines():
        protocol, *rest = line.split()
        counts = {
            name: count
            for name, count in zip(rest[::2], rest[1::2], strict=False)
            if name in COUNTED
        }
        found += [protocol + name + count for name, count in counts.items() if count != b"0"]
    return found + _proc("net/unix").splitlines()[1:]


def _collect() -> None:
    """Have the kernel free sockets that only hold each other: closing a local socket does it."""
    import socket  # rarely needed, and not small

    for end in socket.socketpair():
        end.close()


def _proc(name: str) -> bytes:
    """A file of /proc; empty where the kernel was built without it."""
    try:
        with open(f"/proc/{name}", "rb", buffering=0) as file:
            return file.read(CHUNK) or b""
    except FileNotFoundError:
        return b""

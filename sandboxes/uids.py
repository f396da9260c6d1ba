"""A uid of its own for each sandbox, so that what the kernel counts per user is not shared.

Descriptors in flight between local sockets, pages in pipes and epoll watches are counted for the
real uid of this machine, and no namespace divides them. Root has uids; an ordinary user has those
that /etc/subuid lists for him, and `newuidmap` hands them out (newuidmap(1), subuid(5)).

That no two sandboxes have the same is known within one network namespace alone, since the names of
the locks are per network namespace.
"""

from __future__ import annotations

import errno
import functools
import os
import pwd
import shutil
import socket
import subprocess
from pathlib import Path

from agentrl.errors import SandboxLost
from agentrl.sandboxes.cgroup import home

ROOTS = range(2_000_000_000, 2_000_100_000)
"""Uids that own nothing, for sandboxes that root starts."""
_STEP = 97
_PROBE_S = 10.0


class Uid:
    """A uid that no other sandbox started in this network namespace has while this object is open.

    The lock is the name of an abstract socket (unix(7)), which the kernel keeps per network
    namespace and frees when its process ends in any way.
    """

    def __init__(self, numbers: range) -> None:
        """Take one of these.

        Raises:
            SandboxLost: all are taken.
        """
        self._lock = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        for step in range(len(numbers)):
            self.number = numbers[(os.getpid() * _STEP + step) % len(numbers)]
            try:
                self._lock.bind(f"\0agentrl-uid-{self.number}")
            except OSError as error:
                if error.errno != errno.EADDRINUSE:
                    self._lock.close()
                    raise
            else:
                return
        self._lock.close()
        raise SandboxLost(f"all {len(numbers)} uids for sandboxes are taken: close some sandboxes")

    def release(self) -> None:
        """Give it back; safe to call twice."""
        self._lock.close()


def entering(uid: int, inside: int) -> list[str]:
    """The words before a command that an ordinary user runs as one of his subordinate uids.

    The command starts in a user namespace with that uid and gid alone, seen as `inside`.
    """
    mapping = f"{uid},{inside},1"
    return [
        *("unshare", "--user", f"--map-users={mapping}", f"--map-groups={mapping}"),
        *(f"--setuid={inside}", f"--setgid={inside}", "--"),
    ]


@functools.cache
def usable() -> range | str:
    """The uids that sandboxes of this process may have, or why there are none, with the fix."""
    if os.geteuid() == 0:
        return ROOTS
    try:
        name = pwd.getpwuid(os.geteuid()).pw_name
    except KeyError:
        return f"uid {os.geteuid()} has no name in /etc/passwd, which newuidmap needs"
    if any(shutil.which(program) is None for program in ("newuidmap", "newgidmap")):
        return "install the Debian package uidmap"
    found = [_first(Path(path), name) for path in ("/etc/subuid", "/etc/subgid")]
    both = range(max(each.start for each in found), min(each.stop for each in found))
    if not both:
        return (
            f"{name} has no range in /etc/subuid that is also one in /etc/subgid: usermod"
            f" --add-subuids 200000-265535 --add-subgids 200000-265535 {name}"
        )
    place = home()
    if place is not None and not place.swap_apart:
        return "a control group of version 1 takes in processes of its owner's uid only"
    try:
        words = [*entering(both.start, 1000), "true"]
        tried = subprocess.run(words, capture_output=True, text=True, timeout=_PROBE_S)
    except (OSError, subprocess.TimeoutExpired) as error:
        return f"unshare(1) cannot be used: {error}"
    said = " ".join(tried.stderr.split())[-200:]
    return both if tried.returncode == 0 else f"unshare(1) of util-linux 2.38 cannot use it: {said}"


def user_bound() -> str:
    """Whether what the kernel counts per user is shared by sandboxes here, in words."""
    found = usable()
    return f"one uid for all sandboxes: {found}" if isinstance(found, str) else "a uid per sandbox"


def _first(path: Path, name: str) -> range:
    """The first range of a user in subuid(5) or subgid(5); empty if there is none."""
    if path.exists():
        for line in path.read_text().splitlines():
            fields = line.strip().split(":")
            if len(fields) == 3 and fields[0] in (name, str(os.geteuid())):
                return range(int(fields[1]), int(fields[1]) + int(fields[2]))
    return range(0)

"""Who a container belongs to, and which containers were left behind by an owner that is gone.

A container ends with its owner by itself, when its stdin ends. What is left are containers whose
owner died while he was making them, or whose daemon was away at that moment: the next owner on the
same machine removes those, and any that is past its deadline. Nothing without our labels is ever
touched.
"""

from __future__ import annotations

import os
import time
import uuid
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from agentrl.sandboxes.docker.undertaker import RUN_LABEL

LABEL = "agentrl.sandbox"
_HOST, _PID, DEADLINE_LABEL = "agentrl.host", "agentrl.pid", "agentrl.deadline"
# Inside the 65,536 ids that a remapped user namespace has by default, above those that images give
# to their users.
UIDS = range(20_000, 60_000)


@dataclass(frozen=True)
class Owner:
    """A process of this machine, told from a later one with the same number by its start time.

    Attributes:
        host: this boot of this machine and the pid namespace in which `pid` counts.
        pid: number and start time.
        run: a name of its own.
    """

    host: str
    pid: str
    run: str

    @classmethod
    def me(cls) -> Owner:
        """This process."""
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        pid = os.getpid()
        return cls(
            f"{boot}/{os.stat('/proc/self/ns/pid').st_ino}",
            f"{pid}/{_start(pid)}",
            uuid.uuid4().hex[:12],
        )

    def labels(self, lifetime_s: float) -> dict[str, str]:
        """Labels of a container that is ours and may live this long."""
        deadline = str(int(time.time() + lifetime_s))
        return {
            LABEL: "1",
            RUN_LABEL: self.run,
            _HOST: self.host,
            _PID: self.pid,
            DEADLINE_LABEL: deadline,
        }

    def abandoned(self, labels: Mapping[str, str], now: float) -> bool:
        """Whether the owner of a container with these labels is dead, or its time is over.

        Owners on another machine, or in another pid namespace, cannot be looked at: only the
        deadline tells.
        """
        if LABEL not in labels:
            return False
        deadline = labels.get(DEADLINE_LABEL, "")
        if deadline.isdigit() and int(deadline) < now:
            return True
        pid, _, start = labels.get(_PID, "").partition("/")
        if labels.get(_HOST) != self.host or not pid.isdigit():
            return False
        return _start(int(pid)) != start


def _start(pid: int) -> str | None:
    """Start time of a process in clock ticks since boot; None if it is not running."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19]
    except (FileNotFoundError, ProcessLookupError):
        return None

"""Starts the supervisor as a program: its descriptors, its deadline, and how it ends."""

from __future__ import annotations

import os
import sys

from agentrl.sandboxes.supervisor.frames import Fatal, FrameError
from agentrl.sandboxes.supervisor.processes import end_at
from agentrl.sandboxes.supervisor.serve import Supervisor

PIPE_BYTES = 1 << 18


def _widen(pipe: int) -> None:
    """Let more bytes wait in a pipe, where the kernel allows it, so large requests wake us less."""
    try:
        import fcntl

        fcntl.fcntl(pipe, fcntl.F_SETPIPE_SZ, PIPE_BYTES)
    except (ImportError, AttributeError, OSError):  # a socket, or more than this user may have
        return


def main() -> None:
    """Serve the host on stdin and stdout, which nothing else that runs here can reach.

    An argument is the latest time at which it ends, in seconds since 1970. It matters where the end
    of stdin is never told.
    """
    if sys.argv[1:]:
        end_at(int(sys.argv[1]))
    read, write = os.dup(0), os.dup(1)
    _widen(read)
    null = os.open("/dev/null", os.O_RDWR)
    os.dup2(null, 0)
    os.dup2(null, 1)
    supervisor = Supervisor(read, write)
    try:
        supervisor.serve()
    except (BrokenPipeError, ConnectionError, FrameError, Fatal, MemoryError) as error:
        sys.stderr.write(f"supervisor: {type(error).__name__}: {error}\n")
    if os.getpid() == 1:  # the end of process 1 is the end of all
        return
    try:
        supervisor.end()
    except (OSError, Fatal) as error:
        sys.stderr.write(f"supervisor: {error} is left behind\n")

"""One command: served until its leader exits, its time is over, or the host cancels it."""

from __future__ import annotations

import os
import time

from agentrl.sandboxes.supervisor.pipes import Clipped, Pipes
from agentrl.sandboxes.supervisor.processes import Processes


class Command:
    """A running command.

    Constructing it starts it; then `run` it and read `outputs`, `timed_out` and the exit status.
    """

    def __init__(
        self,
        processes: Processes,
        argv: list[bytes],
        env: dict[bytes, bytes],
        stdin: bytes,
        cap: int,
    ) -> None:
        self._processes = processes
        self._background = processes.background()
        self._pipes = Pipes()
        self.outputs = (Clipped(cap), Clipped(cap))
        self.timed_out = False
        theirs: list[int] = []
        try:
            theirs.append(self._stdin(stdin))
            theirs += [self._pipes.output(output.add) for output in self.outputs]
            self._leader = processes.spawn(
                argv, env, {fd: target for target, fd in enumerate(theirs)}
            )
        except OSError:
            self._pipes.close()
            raise
        finally:
            for fd in theirs:
                os.close(fd)

    def _stdin(self, data: bytes) -> int:
        if not data:
            return os.open("/dev/null", os.O_RDONLY | os.O_CLOEXEC)
        ours, theirs = self._pipes.input()
        self._pipes.feed(ours, data, last=True)
        return theirs

    def run(self, timeout_s: float, host: int) -> int:
        """Serve until the leader ends; returns its exit code, negative for a signal.

        When the time is over, or anything comes from the host, all that this command started is
        ended.
        """
        deadline = time.monotonic() + timeout_s
        watched = (self._processes.wakeup, host)
        self._pipes.watch(*watched)
        try:
            while (status := self._processes.ended(self._leader)) is None:
                left = deadline - time.monotonic()
                if left <= 0 or host in self._pipes.serve(left):
                    self.timed_out = True
                    self._processes.kill(self._background)
                self._processes.reap()
            self._pipes.unwatch(*watched)
            self._pipes.drain()
        finally:
            self._pipes.close()
        return status

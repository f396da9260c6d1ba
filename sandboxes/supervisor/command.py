"""One command: its pipes are served until its leader exits, its time is over, or the host has lost interest."""

from __future__ import annotations

import os
import select
import time

from agentrl.sandboxes.supervisor.processes import CHUNK, Processes

DRAIN_S = 0.05


class Clipped:
    """Keeps the first and the last bytes of a stream and counts what it drops between them."""

    def __init__(self, cap: int) -> None:
        self._head_cap = cap // 2
        self._tail_cap = cap - self._head_cap
        self._head = bytearray()
        self._tail = bytearray()
        self._total = 0

    def add(self, data: bytes) -> None:
        """Take the next bytes."""
        self._total += len(data)
        room = self._head_cap - len(self._head)
        self._head += data[:room]
        self._tail += data[room:]
        if len(self._tail) > self._tail_cap + CHUNK:
            del self._tail[: len(self._tail) - self._tail_cap]

    def value(self) -> bytes:
        """What was kept."""
        return bytes(self._head + self._tail[max(0, len(self._tail) - self._tail_cap) :])

    @property
    def dropped(self) -> int:
        """Bytes that are not in `value`."""
        return self._total - len(self._head) - min(len(self._tail), self._tail_cap)


class Command:
    """A running command: construct it (that starts it), `run` it, read `outputs`, `timed_out` and the exit status."""

    def __init__(
        self, processes: Processes, argv: list[bytes], env: dict[bytes, bytes], stdin: bytes, cap: int
    ) -> None:
        self._processes = processes
        self._background = processes.background()
        self._stdin = memoryview(stdin)
        self._pipes: dict[int, Clipped | None] = {}
        self._poll = select.poll()
        self.outputs = (Clipped(cap), Clipped(cap))
        self.timed_out = False
        theirs: list[int] = []
        try:
            self._open_pipes(theirs)
            processes.spawn(argv, env, (theirs[0], theirs[1], theirs[2]))
        except OSError:
            self._close()
            raise
        finally:
            for fd in theirs:
                os.close(fd)

    def _open_pipes(self, theirs: list[int]) -> None:
        if self._stdin:
            read, write = os.pipe()
            theirs.append(read)
            os.set_blocking(write, False)
            self._watch(write, None, select.POLLOUT)
        else:
            theirs.append(os.open("/dev/null", os.O_RDONLY | os.O_CLOEXEC))
        for output in self.outputs:
            read, write = os.pipe()
            theirs.append(write)
            self._watch(read, output, select.POLLIN)

    def _watch(self, fd: int, output: Clipped | None, events: int) -> None:
        self._pipes[fd] = output
        self._poll.register(fd, events)

    def run(self, timeout_s: float, host: int) -> int:
        """Serve until the leader ends; returns its exit code, negative for a signal.

        When the time is over, or anything comes from the host, all that this command started is ended.
        """
        deadline = time.monotonic() + timeout_s
        self._poll.register(self._processes.wakeup, select.POLLIN)
        self._poll.register(host, select.POLLIN)
        try:
            while self._processes.status is None:
                if self._serve(deadline - time.monotonic(), host):
                    self.timed_out = True
                    self._processes.kill(self._background)
                self._processes.reap()
            self._poll.unregister(self._processes.wakeup)
            self._poll.unregister(host)
            self._drain()
        finally:
            self._close()
        return self._processes.status

    def _serve(self, wait_s: float, host: int) -> bool:
        """Wait for one round of events and move bytes; True if the command has to end now."""
        if wait_s <= 0:
            return True
        for fd, _ in self._poll.poll(wait_s * 1000 + 1):
            if fd == host:
                return True
            if fd in self._pipes:
                self._move(fd)
        return False

    def _move(self, fd: int) -> None:
        output = self._pipes[fd]
        if output is None:
            self._feed(fd)
        elif data := os.read(fd, CHUNK):
            output.add(data)
        else:
            self._drop(fd)

    def _feed(self, fd: int) -> None:
        try:
            self._stdin = self._stdin[os.write(fd, self._stdin) :]
        except BrokenPipeError:
            self._stdin = memoryview(b"")
        if not self._stdin:
            self._drop(fd)

    def _drop(self, fd: int) -> None:
        self._poll.unregister(fd)
        del self._pipes[fd]
        os.close(fd)

    def _drain(self) -> None:
        """Read what is still in the pipes, but do not wait for those who merely hold them open."""
        deadline = time.monotonic() + DRAIN_S
        for fd in [fd for fd, output in self._pipes.items() if output is None]:
            self._drop(fd)
        while self._pipes and (left := deadline - time.monotonic()) > 0:
            for fd, _ in self._poll.poll(left * 1000):
                self._move(fd)

    def _close(self) -> None:
        for fd in self._pipes:
            os.close(fd)
        self._pipes.clear()

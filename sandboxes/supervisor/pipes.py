"""The pipes of running programs: bytes move while we wait.

A program that only holds a pipe open delays nothing.
"""

from __future__ import annotations

import os
import select
import time

from agentrl.sandboxes.supervisor.processes import CHUNK

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable

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


class Pipes:
    """Our ends of pipes to one program, and a poll over them and whatever else is watched."""

    def __init__(self) -> None:
        self._poll = select.poll()
        self._sinks: dict[int, Callable[[bytes], None]] = {}
        self._sources: dict[int, memoryview] = {}
        self._kept: set[int] = set()

    def output(self, sink: Callable[[bytes], None]) -> int:
        """Make a pipe whose bytes go to `sink`; returns the end to write to.

        The caller closes that end.
        """
        read, write = os.pipe()
        self._sinks[read] = sink
        self._poll.register(read, select.POLLIN)
        return write

    def input(self) -> tuple[int, int]:
        """Make a pipe for `feed`; returns our end, and the end to read, for the caller to close."""
        read, write = os.pipe()
        os.set_blocking(write, False)
        self._kept.add(write)
        return write, read

    def feed(self, fd: int, data: bytes, last: bool) -> None:
        """Write data to our end of an input while we wait; the `last` piece closes it."""
        self._sources[fd] = memoryview(bytes(self._sources.get(fd, b"")) + data)
        if last:
            self._kept.discard(fd)
        self._poll.register(fd, select.POLLOUT)

    def watch(self, *fds: int) -> None:
        """Let `serve` tell when one of these can be read."""
        for fd in fds:
            self._poll.register(fd, select.POLLIN)

    def unwatch(self, *fds: int) -> None:
        """Forget what was watched."""
        for fd in fds:
            self._poll.unregister(fd)

    def serve(self, wait_s: float) -> set[int]:
        """Wait for one round of events and move bytes; returns the watched descriptors to read."""
        ready = set()
        for fd, _ in self._poll.poll(wait_s * 1000 + 1):
            if not self._move(fd):
                ready.add(fd)
        return ready

    def drain(self) -> None:
        """Read what is in the pipes; go on for a short time where nobody else holds them open."""
        for fd in list(self._sources):
            self._drop(fd)
        deadline = time.monotonic() + DRAIN_S
        while self._sinks and (left := deadline - time.monotonic()) > 0:
            for fd, _ in self._poll.poll(left * 1000):
                self._move(fd)

    def sip(self) -> None:
        """Read what is in the pipes, for a short time at most, while others hold them open."""
        deadline = time.monotonic() + DRAIN_S
        while (found := self._poll.poll(0)) and time.monotonic() < deadline:
            for fd, _ in found:
                self._move(fd)

    def close(self) -> None:
        """Close our ends."""
        for fd in {*self._sinks, *self._sources, *self._kept}:
            os.close(fd)
        self._sinks.clear()
        self._sources.clear()
        self._kept.clear()

    def _move(self, fd: int) -> bool:
        """Move bytes of one pipe; False if the descriptor is not ours."""
        if fd in self._sources:
            self._write(fd)
        elif fd in self._sinks:
            if data := os.read(fd, CHUNK):
                self._sinks[fd](data)
            else:
                self._drop(fd)
        else:
            return False
        return True

    def _write(self, fd: int) -> None:
        source = self._sources[fd]
        try:
            source = source[os.write(fd, source) :]
        except BrokenPipeError:
            source = source[:0]
        self._sources[fd] = source
        if not source:
            self._drop(fd)

    def _drop(self, fd: int) -> None:
        self._poll.unregister(fd)
        self._sinks.pop(fd, None)
        self._sources.pop(fd, None)
        if fd not in self._kept:
            os.close(fd)

"""Bytes between two sockets, in both directions at once, until the server is done or a bound is
met.
"""

from __future__ import annotations

import select
import socket
import time

CHUNK = 65_536
AFTER_CLIENT_S = 10.0
_TROUBLE = select.POLLHUP | select.POLLERR


class Flow:
    """One direction; both sockets are non-blocking.

    Attributes:
        moved: bytes handed to the target.
        ended: whether the source has no more.
    """

    def __init__(
        self, source: socket.socket, target: socket.socket, first: bytes, left: int, exact: bool
    ) -> None:
        """`first` goes before all else, then at most `left` bytes of the source; `exact`: no matter
        what is more.
        """
        self._source = source
        self._target = target
        self._waiting = memoryview(first)
        self._left = left
        self._exact = exact
        self.moved = 0
        self.ended = False

    @property
    def flushed(self) -> bool:
        """Whether nothing waits to be written."""
        return not self._waiting

    @property
    def reads(self) -> bool:
        """Whether it takes more from its source."""
        return self.flushed and not self.ended and self._left > 0

    @property
    def over(self) -> bool:
        """Whether all that may be taken has been, and the source could have more."""
        return not self._exact and self.flushed and not self.ended and self._left <= 0

    def wanted(self) -> tuple[int, int] | None:
        """Descriptor and event to wait for; None where there is nothing to do."""
        if not self.flushed:
            return self._target.fileno(), select.POLLOUT
        return (self._source.fileno(), select.POLLIN) if self.reads else None

    def step(self, events: dict[int, int]) -> None:
        """Write what waits, or read something, where that is possible now."""
        wanted = self.wanted()
        if wanted is None or not events.get(wanted[0], 0) & (wanted[1] | _TROUBLE):
            return
        try:
            if not self.flushed:
                sent = self._target.send(self._waiting)
                self.moved += sent
                self._waiting = self._waiting[sent:]
            else:
                data = self._source.recv(min(CHUNK, self._left))
                self.ended = not data
                self._left -= len(data)
                self._waiting = memoryview(data)
        except BlockingIOError:
            return

    def pass_on_end(self) -> None:
        """Tell the target that no more comes."""
        self._target.shutdown(socket.SHUT_WR)


def pump(up: Flow, down: Flow, deadline: float, idle_s: float) -> None:
    """Move bytes until the server ends its side and all of that is written.

    Raises:
        TimeoutError: past the deadline (monotonic seconds), or nothing moved for `idle_s`.
        ValueError: more bytes than the flows may take.
        OSError: a side broke.
    """
    told = False
    while not (down.ended and down.flushed):
        if down.over or up.over:
            raise ValueError("more bytes than one request may move")
        if up.ended and up.flushed and not told:
            told, idle_s = True, min(idle_s, AFTER_CLIENT_S)
            up.pass_on_end()
        poll, masks = select.poll(), dict[int, int]()
        for fd, event in filter(None, (up.wanted(), down.wanted())):
            masks[fd] = masks.get(fd, 0) | event
        for fd, mask in masks.items():
            poll.register(fd, mask)
        left = min(idle_s, deadline - time.monotonic())
        events = dict(poll.poll(left * 1000)) if left > 0 else {}
        if not events:
            raise TimeoutError("no more time")
        up.step(events)
        down.step(events)

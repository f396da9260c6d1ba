"""Bytes between two connections, both ways at once, until the server ends or a bound is met."""

from __future__ import annotations

import asyncio

CHUNK = 65_536
AFTER_CLIENT_S = 10.0


class Flow:
    """One direction.

    Attributes:
        moved: bytes handed to the target.
        ended: whether the source has no more.
        active: when bytes last moved, on the clock of the event loop.
    """

    def __init__(
        self,
        source: asyncio.StreamReader,
        target: asyncio.StreamWriter,
        first: bytes,
        left: int,
        exact: bool,
    ) -> None:
        """`first` is sent before all else, then at most `left` bytes of the source.

        With `exact` the flow is done after these bytes; without it, more of them are an error.
        """
        self._source = source
        self._target = target
        self._first = first
        self._left = left
        self._exact = exact
        self.moved = 0
        self.ended = False
        self.active = asyncio.get_running_loop().time()
        target.transport.set_write_buffer_limits(0)  # so drain() waits until all is handed over

    async def run(self) -> None:
        """Move bytes until the source ends, and tell the target of that end.

        Raises:
            ValueError: the source has more than it may send.
            OSError: a side broke.
        """
        await self._send(self._first)
        while self._left > 0:
            data = await self._source.read(min(CHUNK, self._left))
            if not data:
                self.ended = True
                self._target.write_eof()
                return
            self._left -= len(data)
            await self._send(data)
        if not self._exact:
            raise ValueError("more bytes than one request may move")

    async def _send(self, data: bytes) -> None:
        self._target.write(data)
        await self._target.drain()
        self.moved += len(data)
        self.active = asyncio.get_running_loop().time()


async def pump(up: Flow, down: Flow, deadline: float, idle_s: float) -> None:
    """Move bytes until the server ends its side and all of that is written.

    Raises:
        TimeoutError: past the deadline (on the loop's clock), or nothing moved for `idle_s`.
        ValueError: more bytes than the flows may take.
        OSError: a side broke.
    """
    now = asyncio.get_running_loop().time
    sending, receiving = (asyncio.ensure_future(flow.run()) for flow in (up, down))
    try:
        while not receiving.done():
            if sending.done():
                sending.result()
            patience_s = min(idle_s, AFTER_CLIENT_S) if up.ended else idle_s
            left = min(deadline, max(up.active, down.active) + patience_s) - now()
            if left <= 0:
                raise TimeoutError("no more time")
            open_ends = [one for one in (sending, receiving) if not one.done()]
            await asyncio.wait(open_ends, timeout=left, return_when=asyncio.FIRST_COMPLETED)
        receiving.result()
    finally:
        for one in (sending, receiving):
            one.cancel()
        await asyncio.gather(sending, receiving, return_exceptions=True)

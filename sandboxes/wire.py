"""The host's end of the connection to a supervisor: requests and answers, each with a deadline.

Nothing a sandbox answers is trusted. Anything but a well-formed answer to the oldest open request,
in time, ends the sandbox with `SandboxLost`.
"""

from __future__ import annotations

import asyncio
import itertools
import socket
from collections import deque
from typing import Protocol

from agentrl.errors import BackendAway, SandboxLost
from agentrl.sandboxes.supervisor.frames import FrameDecoder, FrameError, encode

_CHUNK = 1 << 18
# Send buffer requested from the kernel: a larger one means fewer wake-ups during a large put.
_SEND_BYTES = 1 << 20
_TEXT = 300
_ENDED = "the supervisor ended"


class Peer(Protocol):
    """The process or container that runs the supervisor: a socket to it, and a way to end it."""

    sock: socket.socket

    def words(self) -> str:
        """Its last output on stderr, for error messages."""
        ...

    async def cause(self) -> str:
        """Why it ended, if somebody else knows; otherwise empty. Takes at most a second.

        Raises:
            BackendAway: it was ended from outside, which nothing inside it could have done.
        """
        ...

    def unwrap(self, data: bytes) -> bytes:
        """Extract the supervisor's bytes from what arrived on the socket.

        Raises:
            FrameError: the bytes are malformed.
        """
        ...

    def hang_up(self) -> None:
        """Close the socket and start the shutdown without waiting; safe to call twice."""
        ...

    async def gone(self) -> None:
        """Wait until the peer is completely gone; safe to call twice."""
        ...


class Wire:
    """Requests and answers over the socket of a peer; bound to the event loop it was made on."""

    def __init__(self, peer: Peer) -> None:
        self.peer = peer
        self.loop = asyncio.get_running_loop()
        self.lost: str | None = None
        self._error: SandboxLost | None = None
        self._ids = itertools.count(1)
        self._decoder = FrameDecoder()
        self._open: deque[tuple[int, asyncio.Future[list[bytes]]]] = deque()
        self._unsent = bytearray()
        self._fd = peer.sock.fileno()
        peer.sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _SEND_BYTES)
        self.loop.add_reader(self._fd, self._readable)

    async def call(self, fields: list[bytes], timeout_s: float) -> list[bytes]:
        """Send one request and wait for its answer; cancelling stops the command it started.

        Raises:
            SandboxLost: no well-formed answer in time.
            OSError: the supervisor could not do it (for example, the work area is full).
        """
        if self.lost is not None:
            raise await self._failure(self.lost)
        if asyncio.get_running_loop() is not self.loop:
            raise RuntimeError(
                "this sandbox belongs to another event loop; open one sandbox per loop"
            )
        future = self._request(fields)
        why = f"no answer to {fields[0].decode()} within {timeout_s:g} s"
        timer = self.loop.call_later(timeout_s, self._overdue, future, why)
        try:
            status, *values = await future
        except asyncio.CancelledError:
            if self.lost is None:  # the next request makes the supervisor end the running command
                self._request([b"ping"])
            raise
        except SandboxLost as error:
            raise await self._failure(str(error)) from error
        finally:
            timer.cancel()
        return self._check_status(status, values)

    async def _failure(self, why: str) -> SandboxLost:
        """The error for a lost sandbox; the peer is asked for the cause once."""
        if self._error is None:
            try:
                cause = await self.peer.cause()
                self._error = SandboxLost(f"{why}: {cause}" if cause else why)
            except BackendAway as outside:
                self._error = BackendAway(f"{why}: {outside}")
        return type(self._error)(str(self._error))

    def _check_status(self, status: bytes, values: list[bytes]) -> list[bytes]:
        if status == b"ok":
            return values
        text = values[-1][:_TEXT].decode("utf-8", "replace") if values else ""
        if status == b"error" and len(values) == 2:
            raise OSError(self.number(values[0]), text)
        raise self.broken(f"the supervisor gave up: {text}")

    def number(self, field: bytes) -> int:
        """Parse a decimal field of an answer; anything else ends the sandbox."""
        if len(field) > 20 or not field.removeprefix(b"-").isdigit():
            raise self.broken("the supervisor broke the protocol: a malformed number")
        return int(field)

    def broken(self, why: str) -> SandboxLost:
        """End the sandbox for this reason and return the error to raise."""
        self.lose(why)
        return SandboxLost(self.lost or why)

    def _request(self, fields: list[bytes]) -> asyncio.Future[list[bytes]]:
        request_id = next(self._ids) & 0xFFFFFFFF
        data = encode(request_id, fields)
        future: asyncio.Future[list[bytes]] = self.loop.create_future()
        self._open.append((request_id, future))
        self._send(data)
        return future

    def _send(self, data: bytes) -> None:
        if not self._unsent:
            try:
                sent = self.peer.sock.send(data)
            except BlockingIOError:
                sent = 0
            except OSError as error:
                self._lose_by(error)
                return
            if sent == len(data):
                return
            data = data[sent:]
            self.loop.add_writer(self._fd, self._writable)
        self._unsent += data

    def _writable(self) -> None:
        try:
            del self._unsent[: self.peer.sock.send(memoryview(self._unsent)[:_SEND_BYTES])]
        except BlockingIOError:
            return
        except OSError as error:
            self._lose_by(error)
            return
        if not self._unsent:
            self.loop.remove_writer(self._fd)

    def _lose_by(self, error: OSError) -> None:
        """Report an ended supervisor the same way whether a read or a write notices it first."""
        ended = isinstance(error, ConnectionError)
        self.lose(_ENDED if ended else f"cannot write to the supervisor: {error}")

    def _overdue(self, future: asyncio.Future[list[bytes]], why: str) -> None:
        """The deadline has passed; if our own loop was blocked, the answer may have arrived."""
        if not future.done() and self.lost is None:
            self._readable()
        if not future.done():
            self.lose(why)

    def _readable(self) -> None:
        try:
            data = self.peer.sock.recv(_CHUNK)
        except BlockingIOError:
            return
        except ConnectionError:
            data = b""
        if not data:
            self.lose(_ENDED)
            return
        try:
            self._decoder.feed(self.peer.unwrap(data))
            while self.lost is None and (frame := self._decoder.next()) is not None:
                self._answer(*frame)
        except FrameError as error:
            self.lose(f"the supervisor broke the protocol: {error}")

    def _answer(self, request_id: int, fields: list[bytes]) -> None:
        if not self._open or self._open[0][0] != request_id or not fields:
            self.lose("the supervisor broke the protocol: an answer to no open request")
            return
        _, future = self._open.popleft()
        if not future.done():
            future.set_result(fields)

    def lose(self, why: str) -> None:
        """End the sandbox; open and later calls raise SandboxLost with the first reason given."""
        if self.lost is not None:
            return
        words = self.peer.words()
        self.lost = f"{why} ({words})" if words else why
        if not self.loop.is_closed():
            self.loop.remove_reader(self._fd)
            self.loop.remove_writer(self._fd)
        self.peer.hang_up()
        for _, future in self._open:
            if not future.done() and not self.loop.is_closed():
                future.set_exception(SandboxLost(self.lost))
                future.exception()  # mark as retrieved: an abandoned call has no reader
        self._open.clear()

    def malformed(self, verb: str) -> SandboxLost:
        """End the sandbox for a malformed answer and return the error to raise."""
        return self.broken(f"the supervisor broke the protocol: a malformed answer to {verb}")

"""One request of an agent: read it, judge it, log the verdict, and only then reach out."""

from __future__ import annotations

import socket
import time
from collections.abc import Callable
from typing import NamedTuple

from agentrl.sandboxes.proxy.flow import CHUNK, Flow, pump
from agentrl.sandboxes.proxy.request import HEAD_BYTES, Refusal, Request, parse
from agentrl.sandboxes.proxy.rules import Rule, objection, permit

_ADDRESSES = 3
_PARTING_S = 0.5
_END = b"\r\n\r\n"

Log = Callable[[dict[str, object]], None]


class Bounds(NamedTuple):
    """What one request, and all together, may take. Times in seconds, sizes in bytes each way."""

    connections: int
    head_s: float
    connect_s: float
    idle_s: float
    total_s: float
    size: int


class _RefusedError(Exception):
    """A request that is not let through; its argument is a `Refusal`."""


class Exchange:
    """A connection from the agent, served by a thread of its own.

    Every one is logged: its verdict before anything of it leaves, then how many bytes it moved.
    """

    def __init__(
        self, client: socket.socket, rules: tuple[Rule, ...], bounds: Bounds, log: Log
    ) -> None:
        self._client = client
        self._server: socket.socket | None = None
        self._rules = rules
        self._bounds = bounds
        self._log = log
        self._deadline = time.monotonic() + bounds.total_s
        self._addresses: list[str] = []
        self._flows: tuple[Flow, ...] = ()
        self._stopped = False

    def stop(self) -> None:
        """Break both connections, from another thread; the serving one then ends."""
        self._stopped = True
        for side in (self._client, self._server):
            if side is not None:
                _break(side)

    def serve(self) -> None:
        """Serve the one request of this connection; raises nothing that an agent or a server could
        cause.
        """
        try:
            request, rest = self._judge()
            self._log(
                {
                    "verdict": "allowed",
                    "method": request.method,
                    "host": request.host,
                    "port": request.port,
                }
            )
            end = self._carry(request, rest)
        except _RefusedError as error:
            self._refuse(error.args[0])
        except OSError as error:  # before a verdict
            self._refuse(Refusal(400, f"no request: {error}"))
        else:
            moved = [flow.moved for flow in self._flows] or [0, 0]
            self._log({"end": end, "sent": moved[0], "received": moved[1]})
        finally:
            for side in (self._client, self._server):
                if side is not None:
                    side.close()

    def refuse(self, why: str) -> None:
        """Turn it away unread, without waiting for anything."""
        self._log(
            {"verdict": "refused", "why": why, "status": 503, "method": "", "host": "", "port": 0}
        )
        self._client.close()

    def _judge(self) -> tuple[Request, bytes]:
        head, rest = self._read_head()
        request = parse(head)
        if isinstance(request, Refusal):
            raise _RefusedError(request)
        named = (request.method, request.host, request.port)
        rule = permit(self._rules, request.host, request.port)
        if rule is None:
            raise _RefusedError(
                Refusal(403, "this host and port are not among the allowed ones", *named)
            )
        if request.body > self._bounds.size:
            raise _RefusedError(
                Refusal(413, f"a body of more than {self._bounds.size} bytes", *named)
            )
        addresses = self._resolve(named)
        for address in addresses:
            if why := objection(address, rule.private):
                raise _RefusedError(
                    Refusal(
                        403, f"this name leads to an address that is not allowed: {why}", *named
                    )
                )
        self._addresses = addresses[:_ADDRESSES]
        return request, rest

    def _read_head(self) -> tuple[bytes, bytes]:
        """The head, and what came after it. Time and size are bounded as a whole, not per piece."""
        data, deadline = b"", time.monotonic() + self._bounds.head_s
        while _END not in data and len(data) <= HEAD_BYTES:
            left = deadline - time.monotonic()
            if left <= 0:
                raise _RefusedError(Refusal(408, f"no whole head within {self._bounds.head_s:g} s"))
            self._client.settimeout(left)
            try:
                piece = self._client.recv(CHUNK)
            except TimeoutError:
                continue
            if not piece:
                raise OSError("the connection ended before its head did")
            data += piece
        head, mark, rest = data.partition(_END)
        return head + mark, rest

    def _resolve(self, named: tuple[str, str, int]) -> list[str]:
        """Addresses of a name, looked up once: what is judged is what is connected to."""
        try:
            # The last dot keeps the resolver from trying the name below other domains.
            rows = socket.getaddrinfo(
                f"{named[1]}.".encode(), named[2], socket.AF_INET, socket.SOCK_STREAM
            )
        except OSError as error:
            raise _RefusedError(
                Refusal(502, f"this name has no address: {error.strerror}", *named)
            ) from error
        return list(dict.fromkeys(str(row[4][0]) for row in rows))

    def _carry(self, request: Request, rest: bytes) -> str:
        """Connect and move bytes; how it ended, in words."""
        try:
            server = self._connect(request.port)
        except OSError as error:
            self._answer(502, f"cannot connect: {error.strerror or error}")
            return "not connected"
        tunnel, size = request.method == "CONNECT", self._bounds.size
        first = rest if tunnel else request.head + rest[: request.body]
        more = size - len(rest) if tunnel else request.body - len(rest[: request.body])
        greeting = b"HTTP/1.1 200 Connection established\r\n\r\n" if tunnel else b""
        self._client.setblocking(False)
        server.setblocking(False)
        up = Flow(self._client, server, first, more, exact=not tunnel)
        down = Flow(server, self._client, greeting, size, exact=False)
        self._flows = (up, down)
        try:
            pump(up, down, self._deadline, self._bounds.idle_s)
        except (OSError, ValueError) as error:
            return "dropped" if self._stopped else str(getattr(error, "strerror", None) or error)
        return "done"

    def _connect(self, port: int) -> socket.socket:
        last = OSError("no address")
        for address in self._addresses:
            self._server = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
            self._server.settimeout(self._bounds.connect_s)
            try:
                self._server.connect((address, port))
            except OSError as error:
                self._server.close()
                last = error
                continue
            if self._stopped:
                break
            return self._server
        raise last

    def _refuse(self, refusal: Refusal) -> None:
        row = {"verdict": "refused", "why": refusal.why, "status": refusal.status}
        self._log(row | {"method": refusal.method, "host": refusal.host, "port": refusal.port})
        self._answer(refusal.status, refusal.why)

    def _answer(self, status: int, why: str) -> None:
        """Say it to the client, and let it read that before the connection goes."""
        text = f"agentrl: {why}\n".encode("utf-8", "replace")
        head = (
            f"HTTP/1.1 {status} Refused\r\nContent-Type: text/plain\r\nContent-Length:"
            f" {len(text)}\r\n"
        )
        try:
            self._client.settimeout(_PARTING_S)
            self._client.sendall(head.encode() + b"Connection: close\r\n\r\n" + text)
            self._client.shutdown(socket.SHUT_WR)
            deadline = time.monotonic() + _PARTING_S
            while self._client.recv(CHUNK) and time.monotonic() < deadline:
                pass
        except OSError:  # it does not listen: the verdict is logged, there is no more to do
            return


def _break(side: socket.socket) -> None:
    try:
        side.shutdown(socket.SHUT_RDWR)
    except OSError:  # not connected, or closed meanwhile
        return

"""One request of an agent: read it, judge it, log the verdict, and only then connect."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import Callable
from typing import NamedTuple

from agentrl.sandboxes.proxy.flow import CHUNK, Flow, pump
from agentrl.sandboxes.proxy.request import HEAD_BYTES, ProxyRefusal, ProxyRequest, parse
from agentrl.sandboxes.proxy.rules import HostRule, objection, permit

_ADDRESSES = 3
_PARTING_S = 0.5
_END = b"\r\n\r\n"
_TUNNEL = b"HTTP/1.1 200 Connection established\r\n\r\n"

Log = Callable[[dict[str, object]], None]
_Side = tuple[asyncio.StreamReader, asyncio.StreamWriter]


class Bounds(NamedTuple):
    """Limits of one request, and of all together. Times in seconds, `size` in bytes each way."""

    connections: int
    head_s: float
    connect_s: float
    idle_s: float
    total_s: float
    size: int


class _RefusedError(Exception):
    """A request that is not let through; its argument is a `ProxyRefusal`."""


class Exchange:
    """A connection from the agent and its one request.

    Each one is logged: its verdict before anything is sent on, later how many bytes it moved.
    """

    def __init__(self, rules: tuple[HostRule, ...], bounds: Bounds, log: Log) -> None:
        self._rules = rules
        self._bounds = bounds
        self._log = log
        self._flows: tuple[Flow, ...] = ()

    async def serve(self, connection: socket.socket) -> None:
        """Serve the request and close the connection; no input makes it raise.

        Cancelling it ends both connections at once, and is logged.
        """
        deadline = asyncio.get_running_loop().time() + self._bounds.total_s
        client = await asyncio.open_connection(sock=connection, limit=HEAD_BYTES)
        try:
            request, addresses = await self._judge(client[0])
        except _RefusedError as error:
            self._log_refusal(error.args[0])
            await _answer(client, error.args[0])
        except asyncio.CancelledError:
            self._log_refusal(ProxyRefusal(400, "dropped before it was read"))
            raise
        else:
            named = {"method": request.method, "host": request.host, "port": request.port}
            self._log({"verdict": "allowed", **named})
            await self._carry(request, addresses, client, deadline)
        finally:
            client[1].transport.abort()

    def turn_away(self, connection: socket.socket, why: str) -> None:
        """Close a connection unread."""
        self._log_refusal(ProxyRefusal(503, why))
        connection.close()

    async def _judge(self, client: asyncio.StreamReader) -> tuple[ProxyRequest, list[str]]:
        """The request and the addresses that it may go to."""
        request = parse(await self._read_head(client))
        if isinstance(request, ProxyRefusal):
            raise _RefusedError(request)
        named = (request.method, request.host, request.port)
        rule = permit(self._rules, request.host, request.port)
        if rule is None:
            why = "this host and port are not among the allowed ones"
            raise _RefusedError(ProxyRefusal(403, why, *named))
        if request.body > self._bounds.size:
            why = f"a body of more than {self._bounds.size} bytes"
            raise _RefusedError(ProxyRefusal(413, why, *named))
        addresses = await _resolve(named)
        for address in addresses:
            if kind := objection(address, rule.private):
                why = f"this name leads to an address that is not allowed: {kind}"
                raise _RefusedError(ProxyRefusal(403, why, *named))
        return request, addresses[:_ADDRESSES]

    async def _read_head(self, client: asyncio.StreamReader) -> bytes:
        """All bytes of the head. Its time and size are bounded as a whole, not per piece."""
        head_s = self._bounds.head_s
        try:
            return await asyncio.wait_for(client.readuntil(_END), head_s)
        except asyncio.TimeoutError:  # noqa: UP041 (another class before Python 3.11)
            refusal = ProxyRefusal(408, f"no whole head within {head_s:g} s")
        except asyncio.LimitOverrunError:
            refusal = ProxyRefusal(431, f"a head of more than {HEAD_BYTES} bytes")
        except (OSError, asyncio.IncompleteReadError):
            refusal = ProxyRefusal(400, "no request: the connection ended before its head did")
        raise _RefusedError(refusal)

    async def _carry(
        self, request: ProxyRequest, addresses: list[str], client: _Side, deadline: float
    ) -> None:
        """Connect and move bytes; log how it ended."""
        end = "dropped"
        try:
            server = await self._connect(addresses, request.port)
        except OSError as error:
            end = "not connected"
            refusal = ProxyRefusal(502, f"cannot connect: {error.strerror or error}")
            await _answer(client, refusal)
        else:
            try:
                await self._move(request, client, server, deadline)
                end = "done"
            except (OSError, ValueError) as error:
                end = str(getattr(error, "strerror", None) or error)
            finally:
                server[1].transport.abort()
        finally:
            sent, received = (flow.moved for flow in self._flows) if self._flows else (0, 0)
            self._log({"end": end, "sent": sent, "received": received})

    async def _connect(self, addresses: list[str], port: int) -> _Side:
        last = OSError("no address")
        for address in addresses:
            opening = asyncio.open_connection(address, port, limit=CHUNK)
            try:
                return await asyncio.wait_for(opening, self._bounds.connect_s)
            except asyncio.TimeoutError:  # noqa: UP041 (another class before Python 3.11)
                last = OSError(f"no answer within {self._bounds.connect_s:g} s")
            except OSError as error:
                last = error
        raise last

    async def _move(
        self, request: ProxyRequest, client: _Side, server: _Side, deadline: float
    ) -> None:
        tunnel, size = request.method == "CONNECT", self._bounds.size
        may_send = size if tunnel else request.body
        up = Flow(client[0], server[1], request.head, may_send, exact=not tunnel)
        down = Flow(server[0], client[1], _TUNNEL if tunnel else b"", size, exact=False)
        self._flows = (up, down)
        await pump(up, down, deadline, self._bounds.idle_s)

    def _log_refusal(self, refusal: ProxyRefusal) -> None:
        self._log({"verdict": "refused", **refusal._asdict()})


async def _resolve(named: tuple[str, str, int]) -> list[str]:
    """Addresses of a name, looked up once: what is judged is what is connected to."""
    _, host, port = named
    try:
        # The last dot keeps the resolver from trying the name below other domains.
        rows = await asyncio.get_running_loop().getaddrinfo(
            f"{host}.".encode(), port, family=socket.AF_INET, type=socket.SOCK_STREAM
        )
    except OSError as error:
        why = f"this name has no address: {error.strerror}"
        raise _RefusedError(ProxyRefusal(502, why, *named)) from error
    return list(dict.fromkeys(str(row[4][0]) for row in rows))


async def _answer(client: _Side, refusal: ProxyRefusal) -> None:
    """Send a refusal, and let the client read it before the connection is closed."""
    text = f"agentrl: {refusal.why}\n".encode("utf-8", "replace")
    head = (
        f"HTTP/1.1 {refusal.status} Refused\r\nContent-Type: text/plain\r\n"
        f"Content-Length: {len(text)}\r\nConnection: close\r\n\r\n"
    )

    async def say() -> None:
        reader, writer = client
        writer.write(head.encode() + text)
        await writer.drain()
        writer.write_eof()
        while await reader.read(CHUNK):
            pass

    # A client that does not listen changes nothing: the verdict is logged.
    with contextlib.suppress(OSError, asyncio.TimeoutError):
        await asyncio.wait_for(say(), _PARTING_S)

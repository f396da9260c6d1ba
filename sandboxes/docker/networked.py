"""A sandbox with a network: what its proxy tells, and how both stand and fall together."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from agentrl.errors import SandboxLost
from agentrl.sandboxes.base import Sandbox, SandboxLimits
from agentrl.sandboxes.docker.network import CONNECTIONS, Link
from agentrl.sandboxes.lease import Lease
from agentrl.sandboxes.network import NetworkRequest
from agentrl.sandboxes.supervised import GRACE_S, OPEN_S, SupervisedSandbox
from agentrl.sandboxes.supervisor.frames import FrameError
from agentrl.sandboxes.wire import Peer

KEPT = 10_000
_CHUNK = 1 << 16
_LINE = 1 << 16
_GONE = "the proxy of this sandbox is gone, and its network with it"
_BOUNDS = {"connections": CONNECTIONS, "head_s": 10.0, "connect_s": 10.0, "idle_s": 60.0}


class NetworkedSandbox(SupervisedSandbox):
    """A sandbox that reaches allowed hosts through its proxy, and is lost without it."""

    def __init__(self, peer: Peer, limits: SandboxLimits) -> None:
        super().__init__(peer, limits)
        self._line: _Line | None = None

    async def join(self, link: Link) -> None:
        """Give the proxy its rules, and wait until it listens.

        Raises:
            SandboxLost: it does not.
        """
        self._line = _Line(link, self._wire.lose)
        allow = link.allow
        bounds = _BOUNDS | {"total_s": allow.total_s, "size": allow.size_mb << 20}
        settings = {"listen": link.network.proxy, "rules": allow.rules, "bounds": bounds}
        await self._line.ask(settings, 0, OPEN_S)

    async def requests(self) -> tuple[NetworkRequest, ...]:
        """What was asked of the proxy since the last reset, the last 10,000 of it.

        Raises:
            SandboxLost: the proxy is gone.
        """
        line = self._joined()
        await line.mark(drop=False)
        return tuple(line.rows.values())

    async def _settle(self) -> None:
        """No connection of before goes on, nor is anything of it counted for what comes."""
        await self.kill_all()
        await self._joined().mark(drop=True)

    async def close(self) -> None:
        """End the sandbox, its proxy and its network; safe to call twice."""
        if self._line is not None:
            self._line.lose("the sandbox is closed")
        await super().close()

    def _joined(self) -> _Line:
        if self._line is None:
            raise SandboxLost("this sandbox has not joined its network")
        return self._line


class _Line:
    """Commands to a proxy, and what it tells; bound to the event loop that it was made on.

    Attributes:
        rows: the requests since the last drop, by number.
    """

    def __init__(self, link: Link, on_lost: Callable[[str], None]) -> None:
        self.rows: dict[int, NetworkRequest] = {}
        self._link = link
        self._on_lost = on_lost
        self._lost: str | None = None
        self._unread = b""
        self._marks: dict[int, tuple[bool, asyncio.Future[None]]] = {}
        self._open: dict[int, NetworkRequest] = {}
        self._count = self._epoch = 0
        self._loop = asyncio.get_running_loop()
        self._fd = link.proxy.sock.fileno()
        self._loop.add_reader(self._fd, self._readable)

    async def mark(self, drop: bool) -> None:
        """Wait until all that was told before has come; `drop` ends all connections first.

        After a drop, rows are counted anew.

        Raises:
            SandboxLost: the proxy is gone.
        """
        self._count += 1
        await self.ask({"mark": self._count, "drop": drop}, self._count, GRACE_S)

    async def ask(self, command: dict[str, Any], mark: int, timeout_s: float) -> None:
        """Send a command and wait for its mark.

        Raises:
            SandboxLost: it does not come in time, or the proxy is gone.
        """
        if self._lost is not None:
            raise SandboxLost(self._lost)
        future: asyncio.Future[None] = self._loop.create_future()
        self._marks[mark] = (bool(command.get("drop")), future)
        timer = self._loop.call_later(
            timeout_s, self.lose, f"the proxy does not answer within {timeout_s:g} s"
        )
        try:
            self._link.proxy.sock.sendall(json.dumps(command).encode() + b"\n")
            await future
        except OSError as error:
            self.lose(
                f"{_GONE if isinstance(error, ConnectionError) else 'cannot write to the proxy'}:"
                f" {error}"
            )
            raise SandboxLost(self._lost) from error
        finally:
            timer.cancel()
            future.cancel()

    def lose(self, why: str) -> None:
        """End proxy and sandbox; open and later calls raise SandboxLost with the first reason."""
        if self._lost is not None:
            return
        words = self._link.proxy.words()
        self._lost = f"{why} ({words})" if words else why
        if not self._loop.is_closed():
            self._loop.remove_reader(self._fd)
            for _, future in self._marks.values():
                if not future.done():
                    future.set_exception(SandboxLost(self._lost))
        self._link.proxy.hang_up()
        self._on_lost(self._lost)

    def _readable(self) -> None:
        proxy = self._link.proxy
        try:
            data = proxy.sock.recv(_CHUNK)
            if not data:
                raise ConnectionError("it ended")
            self._unread += proxy.unwrap(data)
            *lines, self._unread = self._unread.split(b"\n")
            for line in lines:
                self._take(json.loads(line))
            if len(self._unread) > _LINE:
                raise FrameError("a line without end")
        except BlockingIOError:
            return
        except OSError as error:
            self.lose(f"{_GONE}: {error}")
        except (FrameError, ValueError, LookupError, TypeError, RecursionError) as error:
            self.lose(f"the proxy of this sandbox broke the protocol: {error!r}")

    def _take(self, row: dict[str, Any]) -> None:
        if "mark" in row:
            drop, future = self._marks.pop(row["mark"])
            if drop:
                self._epoch = row["mark"]
                self.rows.clear()
            if not future.done():
                future.set_result(None)
        elif "end" in row:
            found = self._open.pop(row["id"])
            self._keep(
                replace(
                    found, why=row["end"], sent=row["sent"], received=row["received"], over=True
                ),
                row,
            )
        else:
            refused = row["verdict"] != "allowed"
            found = NetworkRequest(
                sandbox=self._link.name,
                number=row["id"],
                time=row["time"],
                method=row["method"],
                host=row["host"],
                port=row["port"],
                allowed=not refused,
                why=row.get("why", ""),
                over=refused,
            )
            if not refused:
                self._open[found.number] = found
            self._keep(found, row)

    def _keep(self, found: NetworkRequest, row: dict[str, Any]) -> None:
        if row["epoch"] == self._epoch:
            self.rows[found.number] = found
            if len(self.rows) > KEPT:
                del self.rows[next(iter(self.rows))]
        if found.over and self._link.allow.on_request is not None:
            self._loop.call_soon(self._link.allow.on_request, found)


async def requests_of(sandbox: Sandbox) -> tuple[NetworkRequest, ...]:
    """What an agent asked of the network since its sandbox was reset, refusals included.

    Empty where the sandbox has no network.

    Raises:
        SandboxLost: the loan is over, or the proxy is gone.
    """
    inner = sandbox.held_sandbox() if isinstance(sandbox, Lease) else sandbox
    if not isinstance(inner, NetworkedSandbox):
        return ()
    return await (
        sandbox.call(inner.requests()) if isinstance(sandbox, Lease) else inner.requests()
    )

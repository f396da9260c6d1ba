"""The program: takes its rules from the host, serves one sandbox, tells the host of each request.

Both ways go lines of JSON. From the host: its settings, later `{"mark": n, "drop": bool}`. To the
host: `{"mark": 0}` when it listens, one object per verdict and one per end of a request, and
`{"mark": n}` after all that was told before `mark` came. A drop ends all connections; what is told
after it has the new epoch `n`. The end of its stdin ends the program.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
import sys
import time
from concurrent.futures import ThreadPoolExecutor

from agentrl.sandboxes.proxy.exchange import Bounds, Exchange
from agentrl.sandboxes.proxy.rules import HostRule

PORT = 3128
_PAUSE_S = 0.05
_COMMAND_BYTES = 1 << 24


class Proxy:
    """Listens at the inner address alone, so nobody outside can use it."""

    def __init__(self, settings: dict, write: int) -> None:  # type: ignore[type-arg]
        self._rules = tuple(
            HostRule(name, below, tuple(ports), private)
            for name, below, ports, private in settings["rules"]
        )
        self._bounds = Bounds(**settings["bounds"])
        self._address: str = settings["listen"]
        self._write = write
        self._open: set[asyncio.Task[None]] = set()
        self._number = self._epoch = 0

    async def serve(self, commands: asyncio.StreamReader) -> None:
        """Serve until the host hangs up."""
        accepting = self._listen()
        self._tell({"mark": 0})
        while (line := await commands.readline()).endswith(b"\n"):
            command = json.loads(line)
            if command["drop"]:
                self._epoch = command["mark"]
                await _end(accepting, *self._open)
                accepting = self._listen()
            self._tell({"mark": command["mark"]})

    def _listen(self) -> asyncio.Task[None]:
        listener = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((self._address, PORT))
        listener.listen(self._bounds.connections)
        listener.setblocking(False)
        return asyncio.ensure_future(self._accept(listener))

    async def _accept(self, listener: socket.socket) -> None:
        """Accept connections until cancelled; those that still wait then are turned away."""
        loop, most = asyncio.get_running_loop(), self._bounds.connections
        with listener:
            while True:
                try:
                    client, _ = await loop.sock_accept(listener)
                except OSError:  # the client gave up meanwhile
                    await asyncio.sleep(_PAUSE_S)
                    continue
                exchange = self._exchange()
                if len(self._open) >= most:
                    exchange.turn_away(client, f"more than {most} connections at the same time")
                    continue
                task = asyncio.ensure_future(exchange.serve(client))
                self._open.add(task)
                task.add_done_callback(self._open.discard)

    def _exchange(self) -> Exchange:
        self._number += 1
        mark = {"id": self._number, "epoch": self._epoch}
        return Exchange(
            self._rules, self._bounds, lambda row: self._tell({**mark, "time": time.time(), **row})
        )

    def _tell(self, row: dict[str, object]) -> None:
        data = memoryview(json.dumps(row).encode() + b"\n")
        while data:
            data = data[os.write(self._write, data) :]


async def _end(*tasks: asyncio.Task[None]) -> None:
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


async def _run() -> None:
    loop, commands = asyncio.get_running_loop(), asyncio.StreamReader(limit=_COMMAND_BYTES)
    await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(commands), sys.stdin)
    line = await commands.readline()
    if not line.endswith(b"\n"):
        return
    settings = json.loads(line)
    # Looking up a name blocks a thread: one for each connection.
    loop.set_default_executor(ThreadPoolExecutor(settings["bounds"]["connections"]))
    await Proxy(settings, 1).serve(commands)


def main() -> None:
    """Serve the host on stdin and stdout.

    The only argument is the latest time to end, in seconds since 1970.
    """
    signal.signal(signal.SIGALRM, lambda *_: os._exit(1))
    signal.alarm(max(1, int(sys.argv[1]) - int(time.time()) + 1))
    try:
        asyncio.new_event_loop().run_until_complete(_run())
    except (BrokenPipeError, ConnectionError) as error:
        sys.stderr.write(f"proxy: {error}\n")
    os._exit(0)  # whatever is still open: the host is gone

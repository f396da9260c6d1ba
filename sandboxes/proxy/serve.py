"""The program: takes its rules from the host, listens to one sandbox, tells the host of every
request.

Lines of JSON both ways. From the host: its settings, later `{"mark": n, "drop": bool}`. To the
    host: `{"mark": 0}` when
it listens, one object per verdict and per end of a request, and `{"mark": n}` after all that was
told before `mark` came. After a drop no connection from before it goes on, and what is told has the
new epoch `n`. The end of its stdin is its own end.
"""

from __future__ import annotations

import json
import os
import select
import signal
import socket
import sys
import threading
import time

from agentrl.sandboxes.proxy.exchange import Bounds, Exchange
from agentrl.sandboxes.proxy.rules import Rule

PORT = 3128
_CHUNK = 65_536
_STACK = 512 << 10


class Proxy:
    """Listens at the inner address alone, so nobody outside can use it."""

    def __init__(self, read: int, write: int) -> None:
        self._read = read
        self._write = write
        self._unread = b""
        self._lock = threading.Lock()
        self._open: set[Exchange] = set()
        self._number = self._epoch = 0

    def serve(self) -> None:
        """Serve until the host hangs up."""
        settings = self._command(wait=True)
        if settings is None:
            return
        rules = tuple(
            Rule(name, below, tuple(ports), private)
            for name, below, ports, private in settings["rules"]
        )
        bounds = Bounds(**settings["bounds"])
        listener = _listen(settings["listen"], bounds.connections)
        self._tell({"mark": 0})
        while True:
            poll = select.poll()
            poll.register(self._read, select.POLLIN)
            poll.register(listener, select.POLLIN)
            ready = {fd for fd, _ in poll.poll()}
            if self._read in ready:
                command = self._command(wait=False)
                if command is None:
                    return
                if command.get("drop"):  # what waits to be accepted goes, too
                    listener.close()
                    self._drop(command["mark"])
                    listener = _listen(settings["listen"], bounds.connections)
                if command:
                    self._tell({"mark": command["mark"]})
            elif listener.fileno() in ready:
                self._accept(listener, rules, bounds)

    def _command(self, wait: bool) -> dict | None:  # type: ignore[type-arg]
        """The next command; empty where only a part of it is there; None at the end."""
        while b"\n" not in self._unread:
            data = os.read(self._read, _CHUNK)
            if not data:
                return None
            self._unread += data
            if not wait and b"\n" not in self._unread:
                return {}
        line, _, self._unread = self._unread.partition(b"\n")
        return dict(json.loads(line))

    def _accept(self, listener: socket.socket, rules: tuple[Rule, ...], bounds: Bounds) -> None:
        try:
            client, _ = listener.accept()
        except OSError:  # it gave up meanwhile
            return
        self._number += 1
        mark = {"id": self._number, "epoch": self._epoch}
        exchange = Exchange(
            client, rules, bounds, lambda row: self._tell(mark | {"time": time.time()} | row)
        )
        if len(self._open) >= bounds.connections:
            exchange.refuse(f"more than {bounds.connections} connections at the same time")
            return
        with self._lock:
            self._open.add(exchange)
        threading.Thread(target=self._run, args=(exchange,), daemon=True).start()

    def _run(self, exchange: Exchange) -> None:
        try:
            exchange.serve()
        finally:
            with self._lock:
                self._open.discard(exchange)

    def _drop(self, epoch: int) -> None:
        """End every connection; what is still told of them has the number of their epoch."""
        with self._lock:
            self._epoch = epoch
            going = list(self._open)
        for exchange in going:
            exchange.stop()

    def _tell(self, row: dict[str, object]) -> None:
        data = memoryview(json.dumps(row).encode() + b"\n")
        with self._lock:
            while data:
                data = data[os.write(self._write, data) :]


def _listen(address: str, backlog: int) -> socket.socket:
    listener = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    listener.bind((address, PORT))
    listener.listen(backlog)
    listener.setblocking(False)
    return listener


def main() -> None:
    """Serve the host on stdin and stdout, until the deadline in the only argument (seconds since
    1970) at most.
    """
    deadline = int(sys.argv[1])
    signal.signal(signal.SIGALRM, lambda *_: os._exit(1) if time.time() >= deadline else None)
    signal.alarm(max(1, deadline - int(time.time()) + 1))
    threading.stack_size(_STACK)
    try:
        Proxy(0, 1).serve()
    except (BrokenPipeError, ConnectionError) as error:
        sys.stderr.write(f"proxy: {error}\n")
    os._exit(0)  # whatever threads are at: the host is gone

"""A small process that removes the containers that its host was making when it died.

A container that runs ends with its host by itself. One that was created and not yet started has no
stdin that could end: nobody but this process would know of it before the next start. It is a script
of its own, with nothing but the standard library: it reads lines `URL RUN` until its stdin ends,
and then removes what carries these runs' labels.
"""

from __future__ import annotations

import http.client
import json
import os
import socket
import sys
import time
import urllib.parse

RUN_LABEL = "agentrl.run"
_LINGER_S, _PAUSE_S, _CALL_S = 1.2, 0.15, 5.0


class _Connection(http.client.HTTPConnection):
    """HTTP to a daemon, by a socket file or by TCP."""

    def __init__(self, url: str) -> None:
        parts = urllib.parse.urlsplit(url)
        self._path = parts.path if parts.scheme == "unix" else ""
        super().__init__(parts.hostname or "localhost", parts.port or 2375, timeout=_CALL_S)

    def connect(self) -> None:
        if not self._path:
            super().connect()
            return
        self.sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self.sock.settimeout(_CALL_S)
        self.sock.connect(self._path)


def _ask(url: str, method: str, path: str) -> bytes:
    connection = _Connection(url)
    try:
        connection.request(method, path)
        return connection.getresponse().read()
    finally:
        connection.close()


def bury(url: str, run: str) -> None:
    """Remove every container of a run, and then its networks.

    The daemon refuses to remove a network that something is in.
    """
    query = urllib.parse.urlencode(
        {"all": "1", "filters": json.dumps({"label": [f"{RUN_LABEL}={run}"]})}
    )
    for row in json.loads(_ask(url, "GET", f"/containers/json?{query}")):
        _ask(url, "DELETE", f"/containers/{row['Id']}?force=1&v=1")
    for row in json.loads(_ask(url, "GET", f"/networks?{query}")):
        _ask(url, "DELETE", f"/networks/{row['Id']}")


def main() -> None:
    """Wait for the host's end, then look a few times for containers that come late."""
    runs = {tuple(line.split()) for line in sys.stdin}
    deadline = time.monotonic() + _LINGER_S
    while runs and time.monotonic() < deadline:
        for url, run in list(runs):
            try:
                bury(url, run)
            # A daemon that does not answer is left to the next start.
            except (OSError, ValueError, http.client.HTTPException):
                runs.discard((url, run))
        time.sleep(_PAUSE_S)


class Undertaker:
    """The host's end of it: one process per host process, started when first needed."""

    def __init__(self) -> None:
        read, self._write = os.pipe()
        null = os.open(os.devnull, os.O_RDWR)
        actions = [
            (os.POSIX_SPAWN_DUP2, read, 0),
            (os.POSIX_SPAWN_DUP2, null, 1),
            (os.POSIX_SPAWN_DUP2, null, 2),
        ]
        argv = [sys.executable, "-I", "-S", "-B", __file__]
        # A session of its own: what is sent to the host's terminal or group is not meant for it.
        os.posix_spawn(sys.executable, argv, {}, file_actions=actions, setsid=True)
        os.close(read)
        os.close(null)

    def watch(self, url: str, run: str) -> None:
        """Remember a run at a daemon."""
        os.write(self._write, f"{url} {run}\n".encode())


if __name__ == "__main__":
    main()

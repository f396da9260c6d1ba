"""One running container: how it starts, the stream to the supervisor in it, and how it ended."""

from __future__ import annotations

import asyncio
import json
import socket
import ssl
import struct
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Executor
from typing import Any

from agentrl.errors import BackendAway, ConfigError, SandboxLost
from agentrl.sandboxes.docker.daemon import Daemon, remove
from agentrl.sandboxes.docker.spec import ContainerSpec
from agentrl.sandboxes.launch import STDERR_BYTES
from agentrl.sandboxes.supervisor.frames import FrameError

_GONE_S = 5.0
_CAUSE_S = 1.0
_STREAM = {"stdin": 1, "stdout": 1, "stderr": 1, "stream": 1}
_HEADER = struct.Struct(">BxxxI")
_STDOUT, _STDERR = 1, 2


class Demultiplexer:
    """Takes Docker's stream apart: a header of 8 bytes names the stream of each piece."""

    def __init__(self) -> None:
        self.stderr = bytearray()
        self._header = bytearray()
        self._stream = self._left = 0

    def feed(self, data: bytes) -> bytes:
        """The bytes of stdout among the next bytes; the last ones of stderr are kept.

        Raises:
            FrameError: a header is malformed.
        """
        found, view = [], memoryview(data)
        while view:
            if not self._left:
                view = self._take_header(view)
                continue
            piece, view = view[: self._left], view[self._left :]
            self._left -= len(piece)
            if self._stream == _STDOUT:
                found.append(piece)
            else:
                self.stderr += piece
                del self.stderr[:-STDERR_BYTES]
        return b"".join(found)

    def _take_header(self, view: memoryview) -> memoryview:
        missing = _HEADER.size - len(self._header)
        self._header += view[:missing]
        if len(self._header) == _HEADER.size:
            self._stream, self._left = _HEADER.unpack(self._header)
            if self._stream not in (_STDOUT, _STDERR) or any(self._header[1:4]):
                raise FrameError(f"Docker's stream has a header {self._header.hex()}")
            self._header.clear()
        return view[missing:]


class Container:
    """A running container and the connection to its supervisor; a `Peer`.

    Attributes:
        sock: the connection, non-blocking.
        id: as the daemon knows it.
    """

    def __init__(
        self, daemon: Daemon, spec: ContainerSpec, executor: Executor, on_gone: Callable[[], None]
    ) -> None:
        """Create, attach and start it. Blocks.

        In this order no byte is missed, and its stdin ends with this process.

        `on_gone` is called once, when it is known to be gone, and not if it could not be started.

        Raises:
            SandboxLost: it could not be started; the message names the fix.
        """
        self._daemon = daemon
        self._executor = executor
        self._on_gone = on_gone
        self._pieces = Demultiplexer()
        self._began = time.time()
        self._closed_by_us = self._gone = False
        self._ending = threading.Lock()
        api = daemon.api()
        daemon.guard()
        with daemon.explained("creating a container"):
            self.id: str = api.create_container_from_config(spec.config(daemon.cores), None)["Id"]
        try:
            with daemon.explained("starting a container"):
                self.sock = _attach(api, self.id)
                try:
                    api.start(self.id)
                except BaseException:
                    self.sock.close()
                    raise
        except BaseException:
            with daemon.explained("removing a container"):
                remove(api, self.id)
            raise

    def unwrap(self, data: bytes) -> bytes:
        """What the supervisor wrote, out of what came over the socket."""
        return self._pieces.feed(data)

    def words(self) -> str:
        """The end of what it said on stderr."""
        return self._pieces.stderr.decode("utf-8", "replace").strip()

    async def cause(self) -> str:
        """Why it ended, as the daemon saw it; empty where we ended it or the daemon does not say.

        Raises:
            BackendAway: the daemon does not answer, or was told by somebody to kill it.
        """
        if self._closed_by_us:
            return ""
        return await asyncio.get_running_loop().run_in_executor(self._executor, self._ask_cause)

    def _ask_cause(self) -> str:
        try:
            seen = list(self._events())
        except SandboxLost:
            raise BackendAway(f"the Docker daemon at {self._daemon.url} does not answer") from None
        ended = next(
            (event["Actor"]["Attributes"] for event in seen if event["Action"] == "die"), None
        )
        actions = {event["Action"] for event in seen}
        if ended is None:
            return ""
        if "kill" in actions:
            raise BackendAway("its container was killed from outside")
        if ended.get("exitCode") == "137" and "oom" in actions:
            return "the kernel killed it when the memory of its container ran out: raise memory_mb"
        if ended.get("exitCode") == "137":
            return "its container was killed, which the daemon did not do"
        return f"its container ended with exit code {ended.get('exitCode')}"

    def _events(self) -> Iterator[dict[str, Any]]:
        """What happened to it so far, until its end; the daemon remembers a few hundred events."""
        import requests

        api = self._daemon.api()
        query = {"since": "1", "filters": json.dumps({"container": [self.id]})}
        with self._daemon.explained("telling of a container"):
            url = f"{api.base_url}/v{api.api_version}/events"
            with api.get(url, params=query, stream=True, timeout=_CAUSE_S) as answer:
                answer.raise_for_status()
                try:
                    for line in answer.iter_lines(chunk_size=1):
                        event = json.loads(line)
                        yield event
                        # The last event; "die" says how it ended, and may come after its end.
                        if event["Action"] == "destroy":
                            return
                except requests.ConnectionError:  # nothing more within the time
                    return

    def abandon(self) -> None:
        """End it without anybody waiting."""
        self._closed_by_us = True
        self.hang_up()
        self._executor.submit(self._wait_gone)

    def end(self) -> None:
        """End it and wait until it is removed. Blocks; safe to call twice."""
        self._closed_by_us = True
        self.hang_up()
        if not self._gone:
            self._wait_gone()

    def hang_up(self) -> None:
        """End its stdin, and with it the container; safe to call twice."""
        self.sock.close()

    async def gone(self) -> None:
        """Wait until it is removed; safe to call twice."""
        self._closed_by_us = True
        self.hang_up()
        if not self._gone:
            # Shielded: a caller that is cancelled does not stop the removal.
            await asyncio.shield(
                asyncio.get_running_loop().run_in_executor(self._executor, self._wait_gone)
            )

    def _wait_gone(self) -> None:
        try:
            self._wait_removed()
        except SandboxLost as error:
            print(
                f"warning: container {self.id[:12]} is left to the daemon's next start: {error}",
                file=sys.stderr,
            )
        finally:
            with self._ending:
                told, self._gone = self._gone, True
            if not told:
                self._on_gone()

    def _wait_removed(self) -> None:
        import docker.errors
        import requests

        api = self._daemon.api()
        with self._daemon.explained("removing a container"):
            try:
                api.wait(self.id, timeout=_GONE_S, condition="removed")
            except docker.errors.NotFound:
                return
            except requests.RequestException:  # it does not end by itself, or its end was not told
                remove(api, self.id)


def _attach(api: Any, container: str) -> socket.socket:
    """The raw connection to a container's standard streams, in our hands alone."""
    stream = api.attach_socket(container, _STREAM)
    inner = getattr(stream, "_sock", None)
    try:
        if not isinstance(inner, socket.socket) or isinstance(inner, ssl.SSLSocket):
            raise ConfigError(
                "docker: this connection has no plain socket; reach another machine by `ssh -nNT -L"
                " /tmp/docker.sock:/var/run/docker.sock HOST` and url='unix:///tmp/docker.sock'"
            )
        ours = inner.dup()
    finally:
        stream._response.close()  # the SDK's side of it; the connection lives on as ours
    ours.setblocking(False)
    if ours.family != socket.AF_UNIX:
        ours.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return ours

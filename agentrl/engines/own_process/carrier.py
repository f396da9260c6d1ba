"""A process that carries an engine, seen from ours: its pipe, its log, and how it ended."""

from __future__ import annotations

import os
import pickle
import queue
import signal
import socket
import subprocess
import sys
import tempfile
import threading
from contextlib import suppress
from datetime import UTC, datetime
from io import BytesIO
from multiprocessing import Pipe
from pathlib import Path
from typing import IO, Any

from agentrl.errors import EngineError
from agentrl.records.plain import plain

Packet = list[tuple[Any, ...]]
"""What is said at once: rows of (number of a call or None, name, arguments …)."""

BEAT_S = 1.0
"""Seconds between two signs of life."""
SILENT_S = 30.0
"""A process that gives no sign of life for so long hangs, and is killed."""
START_SILENT_S = 300.0
"""The same while it starts: imports and files may hold up all of its threads."""
CLOSE_S = 10.0
"""Seconds in which it may end by itself."""
_TAIL_BYTES, _TAIL_LINES = 4000, 3


class ProcessEnded(Exception):
    """The process is no more; the message says how it ended."""


class Log:
    """What processes write, one after the other: a file, or one without a name.

    Args:
        path: appended to; None: what is written goes with this object.
    """

    def __init__(self, path: Path | None) -> None:
        self.path = path
        self._is_new = path is not None and not path.exists()
        if path is not None:
            path.parent.mkdir(parents=True, exist_ok=True)
        self.file: IO[bytes] = path.open("ab+") if path else tempfile.TemporaryFile()  # noqa: SIM115
        self._begin = os.fstat(self.file.fileno()).st_size

    def note(self, text: str) -> None:
        """Write a line of ours, with the time."""
        now = datetime.now(UTC).isoformat(timespec="seconds")
        os.write(self.file.fileno(), f"{now} {text}\n".encode())
        self._begin = os.fstat(self.file.fileno()).st_size

    def tail(self) -> str:
        """Where to look, and the last lines that were written since the last note."""
        size = os.fstat(self.file.fileno()).st_size
        start = max(self._begin, size - _TAIL_BYTES)
        text = os.pread(self.file.fileno(), size - start, start).decode(errors="replace")
        lines = [line.strip() for line in text.splitlines() if line.strip()][-_TAIL_LINES:]
        name = str(self.path) if self.path else "its output"
        return plain(f"{name} ends with {' | '.join(lines)!r}" if lines else f"{name} says nothing")

    def forget(self) -> None:
        """Leave no file where there was none."""
        if self.path is not None and self._is_new:
            self.path.unlink(missing_ok=True)

    def close(self) -> None:
        """Close the file; safe to call twice."""
        self.file.close()


class Carrier:
    """A process that was started and is to be killed by `close`.

    Only the thread that made it may call `receive`, and that thread must outlive the process: the
    kernel ends the process with its maker. It is in a session of its own, so an interrupt from the
    terminal does not reach it.

    Args:
        label: what a list of processes is to show.
        weights_fd: a descriptor that it inherits.
        log: of its standard output and error.
        program: module that the process runs.
    """

    def __init__(
        self,
        label: str,
        weights_fd: int,
        log: Log,
        program: str = "agentrl.engines.own_process.child",
    ) -> None:
        self._connection, theirs = Pipe()
        self._socket = socket.socket(fileno=os.dup(self._connection.fileno()))
        handles = (theirs.fileno(), weights_fd)
        words = [
            sys.executable,
            "-P",
            "-m",
            program,
            label,
            *map(str, handles),
        ]
        self.process = subprocess.Popen(
            words,
            env=_environment(),
            pass_fds=handles,
            stdin=subprocess.DEVNULL,
            stdout=log.file,
            stderr=log.file,
            start_new_session=True,
        )
        theirs.close()
        log.note(f"process {self.process.pid} carries {label!r}")
        self.expect_life(START_SILENT_S)
        self._hung = ""
        self._over = threading.Event()
        self._deadline = threading.Timer(CLOSE_S, self.process.kill)
        self._deadline.daemon = True
        self._packets: queue.SimpleQueue[bytes] = queue.SimpleQueue()
        for work in (self._write, self._watch):
            threading.Thread(target=work, name="agentrl-carrier", daemon=True).start()

    def send(self, packet: Packet) -> None:
        """Say something; a process that does not listen holds up nobody."""
        self._packets.put(pickle.dumps(packet))

    def receive(self) -> tuple[int, Any]:
        """The next answer: the number of a call, and its outcome, which is an `EngineError` where
        what was sent cannot be read here.

        Raises:
            ProcessEnded: there is none and there will be none.
        """
        while True:
            try:
                found = BytesIO(self._connection.recv_bytes())
            except (EOFError, OSError):
                raise ProcessEnded(self._hung or self._ending()) from None
            self._silent_s = 0.0
            number: int | None = pickle.load(found)
            if number is None:  # a sign of life
                continue
            try:
                return number, pickle.load(found)
            except Exception as error:  # noqa: BLE001 - raised again where somebody waits
                why = f"the answer cannot be read: {type(error).__name__}: {error}"
                return number, EngineError(why)

    def expect_life(self, patience_s: float) -> None:
        """From now on, take a process that is silent for so long for one that hangs."""
        self._silent_s, self._patience_s = 0.0, patience_s

    def kill(self) -> None:
        """End it now."""
        self.process.kill()

    def close(self) -> None:
        """End the process and free what it held; safe to call twice."""
        self._over.set()
        self._deadline.cancel()
        self._packets.put(b"")
        self.process.kill()
        self.process.wait()
        self._hang_up()
        self._connection.close()
        self._socket.close()

    def expire(self) -> None:
        """Kill it unless it has ended by itself soon."""
        self._deadline.start()

    def _ending(self) -> str:
        """How it ended; the pipe may close a moment before that is known."""
        try:
            code = self.process.wait(timeout=CLOSE_S)
        except subprocess.TimeoutExpired:
            return "closed its pipe"
        if code < 0:
            return f"was killed by {signal.Signals(-code).name}"
        return f"ended with exit code {code}"

    def _write(self) -> None:
        """Write what was said; a pipe that is full or broken is met here alone."""
        while packet := self._packets.get():
            try:
                self._connection.send_bytes(packet)
            except OSError:  # it has ended, as `receive` finds
                return

    def _watch(self) -> None:
        """Kill a process that hangs. Looks are counted, since ours may have been stopped too."""
        while not self._over.wait(BEAT_S):
            if self.process.poll() is not None:  # its end of the pipe may live on in a descendant
                self._hang_up()
                return
            self._silent_s += BEAT_S
            if self._silent_s > self._patience_s and not self._hung:
                self._hung = f"gave no sign of life for {self._silent_s:g} s and was killed"
                self.process.kill()

    def _hang_up(self) -> None:
        """Read what is left and then the pipe's end; write no more."""
        with suppress(OSError):  # it is closed already
            self._socket.shutdown(socket.SHUT_RDWR)


def _environment() -> dict[str, str]:
    """Ours, with the same modules within reach and as many threads for arithmetic."""
    found = os.environ | {"PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    if torch := sys.modules.get("torch"):
        found["OMP_NUM_THREADS"] = str(torch.get_num_threads())
    return found

"""The host's side of a persistent shell, and how the end of any command is read from an answer."""

from __future__ import annotations

from typing import Protocol

from agentrl.errors import SandboxLost
from agentrl.sandboxes.base import ExecResult
from agentrl.sandboxes.client import Wire

GRACE_S = 10.0
_TEXT_BYTES = 8192
_NUMBERS = 5
Fields = list[bytes]


class _Call(Protocol):
    """Sends a request in its turn and waits for the answer's fields."""

    async def __call__(self, verb: str, *arguments: bytes, timeout_s: float = GRACE_S) -> Fields:
        """See `agentrl.sandboxes.client.Wire.call`."""
        ...


class Shell:
    """A session of a supervised sandbox; see `agentrl.sandboxes.base.Session`."""

    def __init__(self, wire: Wire, call: _Call, number: int, output_bytes: int) -> None:
        self._wire = wire
        self._call = call
        self._number = b"%d" % number
        self._cap = output_bytes
        self._alive = False

    @property
    def alive(self) -> bool:
        """Whether the shell outlived its last command.

        If not, the next command gets a new shell in the work area.
        """
        return self._alive and self._wire.lost is None

    async def run(self, command: str, *, timeout_s: float = 30.0) -> ExecResult:
        """Run a command line and wait until the shell is done with it, not for its background jobs.

        Raises:
            OSError: ESTALE, the session is over; or no shell can be started.
            SandboxLost: the sandbox itself died or stopped answering.
            ValueError: a NUL, or a time that is not positive.
        """
        if "\0" in command:
            raise ValueError("a session's command must not hold a NUL")
        text = command.encode("utf-8", "surrogateescape")
        self._alive = False  # until the answer says otherwise: a cancelled command ends its shell
        head = (self._number, microseconds(timeout_s), b"%d" % self._cap)
        answer = await self._call("run", *head, text, timeout_s=timeout_s + GRACE_S)
        result = exec_result(self._wire, answer[:-1], self._cap)
        self._alive = answer[-1] == b"1"
        return result

    def forget(self) -> None:
        """The sandbox ended the shell."""
        self._alive = False

    async def close(self) -> None:
        """End the shell and all that descends from it; safe to call twice.

        Raises:
            SandboxLost: they cannot be ended, or the sandbox itself died or stopped answering.
        """
        self._alive = False
        try:
            await self._call("end", self._number)
        except OSError:  # it is over already
            return


def microseconds(timeout_s: float) -> bytes:
    """A time limit as the supervisor wants it.

    Raises:
        ValueError: it is not positive, or over eleven days.
    """
    if not 0 < timeout_s < 1e6:
        raise ValueError(f"timeout_s={timeout_s} must be positive and below 1e6 seconds")
    return b"%d" % int(timeout_s * 1e6)


def exec_result(wire: Wire, answer: Fields, cap: int) -> ExecResult:
    """How a command ended, from the fields of an answer.

    Raises:
        SandboxLost: they are malformed, or longer than was asked for.
    """
    if len(answer) != _NUMBERS + 2 or max(map(len, answer[_NUMBERS:])) > max(cap, _TEXT_BYTES):
        raise malformed(wire, "exec")
    status, timed_out, dropped, wall, oom = (wire.number(value) for value in answer[:_NUMBERS])
    return ExecResult(
        exit_code=None if status < 0 else status,
        signal=-status if status < 0 else None,
        stdout=answer[_NUMBERS],
        stderr=answer[_NUMBERS + 1],
        timed_out=bool(timed_out),
        dropped=dropped,
        wall_s=wall / 1e6,
        oom=bool(oom),
    )


def malformed(wire: Wire, verb: str) -> SandboxLost:
    """End the sandbox for a malformed answer, and the error to raise for it."""
    return wire.broken(f"the supervisor broke the protocol: a malformed answer to {verb}")

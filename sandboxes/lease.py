"""A sandbox on loan: it works until the loan ends, so stale code cannot reach the next episode."""

from __future__ import annotations

import asyncio
import functools
import inspect
from collections.abc import Callable, Coroutine, Mapping
from typing import Any, TypeVar

from agentrl.aio import is_cancelled
from agentrl.errors import SandboxLost
from agentrl.sandboxes.base import ExecResult, Sandbox, Session

_T = TypeVar("_T")


class Lease:
    """One episode's hold on a sandbox. It has every verb of `agentrl.sandboxes.base.Sandbox`.

    Nothing of an earlier loan can be mistaken for something of this one: a sandbox has one
    connection, on which answers arrive numbered and in the order of their requests. When a loan
    ends, its open calls are cancelled and the sandbox is reset, and the answer to the reset comes
    after all others. From then on this handle refuses.

    Attributes:
        sandbox: the sandbox on loan.
        epoch: number of this loan, counted over the pool's lifetime.
    """

    def __init__(self, sandbox: Sandbox, epoch: int) -> None:
        self.sandbox = sandbox
        self.epoch = epoch
        self._ended = False
        self._calls: set[asyncio.Task[Any]] = set()

    def end(self) -> None:
        """Refuse every later call and cancel the open ones; safe to call twice."""
        self._ended = True
        for call in self._calls:
            call.cancel()

    def held_sandbox(self) -> Sandbox:
        """The sandbox, while the loan lasts.

        Raises:
            SandboxLost: the loan has ended.
        """
        if self._ended:
            raise SandboxLost(
                f"loan {self.epoch} of this sandbox has ended: another episode may be using it"
            )
        return self.sandbox

    async def call(self, work: Coroutine[Any, Any, _T]) -> _T:
        """Wait for a call, or for the end of the loan.

        Raises:
            SandboxLost: the loan ended meanwhile.
        """
        task = asyncio.ensure_future(work)
        self._calls.add(task)
        task.add_done_callback(self._calls.discard)
        try:
            return await task
        except asyncio.CancelledError:
            # Only the end of the loan becomes an error; a cancelled caller stays cancelled.
            if self._ended and task.cancelled() and not is_cancelled():
                raise SandboxLost(f"loan {self.epoch} of this sandbox ended mid-call") from None
            raise

    async def open_session(self, env: Mapping[str, str] | None = None) -> Session:
        """Open a session that ends with the loan."""
        session = await self.call(self.held_sandbox().open_session(env))
        return LeasedSession(self, session)

    async def close(self) -> None:
        """End the sandbox, open calls included."""
        await self.held_sandbox().close()


def _guard_verb(name: str) -> Callable[..., Coroutine[Any, Any, Any]]:
    """The verb of this name, refused once the loan has ended."""

    @functools.wraps(getattr(Sandbox, name))
    async def verb(self: Lease, *args: Any, **kwargs: Any) -> Any:
        return await self.call(getattr(self.held_sandbox(), name)(*args, **kwargs))

    return verb


# Verbs are declared once, in the protocol; a lease adds the same guard to each.
for _name, _verb in vars(Sandbox).items():
    if inspect.iscoroutinefunction(_verb) and _name not in vars(Lease):
        setattr(Lease, _name, _guard_verb(_name))


class LeasedSession:
    """A session that ends with its loan; see `agentrl.sandboxes.base.Session`."""

    def __init__(self, lease: Lease, session: Session) -> None:
        self._lease = lease
        self._session = session

    @property
    def alive(self) -> bool:
        """Whether the shell outlived its last command."""
        return self._session.alive

    async def run(self, command: str, *, timeout_s: float = 30.0) -> ExecResult:
        """Run a command line in the session's shell."""
        self._lease.held_sandbox()  # refuses when the loan has ended
        return await self._lease.call(self._session.run(command, timeout_s=timeout_s))

    async def close(self) -> None:
        """End the shell."""
        self._lease.held_sandbox()
        await self._lease.call(self._session.close())

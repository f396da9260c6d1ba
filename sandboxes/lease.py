"""A sandbox on loan: it works until the loan is over.

So code that keeps it cannot reach into the next episode.
"""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Mapping, Sequence
from typing import Any, TypeVar

from agentrl.aio import is_cancelled
from agentrl.errors import SandboxLost
from agentrl.sandboxes.base import (
    NO_FILES,
    Differences,
    ExecResult,
    FileInfos,
    Sandbox,
    Session,
    Snapshot,
)

_T = TypeVar("_T")


class Lease:
    """One episode's hold on a sandbox; see `agentrl.sandboxes.base.Sandbox`.

    Why nothing of an earlier loan can be taken for something of this one: a sandbox has one
    connection, on which answers come in the order of their requests and with their numbers; when a
    loan ends, its open calls are cancelled and its sandbox is reset, and the answer to that comes
    after all others. From then on this handle refuses.

    Attributes:
        sandbox: what is lent.
        epoch: number of this loan, counted over the pool's whole life.
    """

    def __init__(self, sandbox: Sandbox, epoch: int) -> None:
        self.sandbox = sandbox
        self.epoch = epoch
        self._over = False
        self._calls: set[asyncio.Task[Any]] = set()

    def end(self) -> None:
        """Refuse every later call, and cancel the open ones; safe to call twice."""
        self._over = True
        for call in self._calls:
            call.cancel()

    @property
    def held(self) -> Sandbox:
        """The sandbox, while the loan lasts.

        Raises:
            SandboxLost: it is over.
        """
        if self._over:
            raise SandboxLost(
                f"loan {self.epoch} of this sandbox is over: it belongs to another episode by now"
            )
        return self.sandbox

    async def call(self, work: Coroutine[Any, Any, _T]) -> _T:
        """Wait for a call, or for the end of the loan.

        Raises:
            SandboxLost: the loan ended meanwhile, or what the call raises.
        """
        task = asyncio.ensure_future(work)
        self._calls.add(task)
        task.add_done_callback(self._calls.discard)
        try:
            return await task
        except asyncio.CancelledError:
            if self._over and task.cancelled() and not is_cancelled():
                raise SandboxLost(
                    f"loan {self.epoch} of this sandbox ended during a call"
                ) from None
            raise

    async def exec(
        self,
        argv: Sequence[str],
        *,
        stdin: bytes = b"",
        env: Mapping[str, str] | None = None,
        cwd: str = ".",
        timeout_s: float = 30.0,
    ) -> ExecResult:
        """Run a command; see `Sandbox.exec`."""
        return await self.call(
            self.held.exec(argv, stdin=stdin, env=env, cwd=cwd, timeout_s=timeout_s)
        )

    async def put(self, files: Mapping[str, bytes]) -> None:
        """Write files; see `Sandbox.put`."""
        await self.call(self.held.put(files))

    async def get(self, paths: Sequence[str]) -> dict[str, bytes]:
        """Read files; see `Sandbox.get`."""
        return await self.call(self.held.get(paths))

    async def manifest(self, *, everywhere: bool = False) -> FileInfos:
        """Everything in the work area; see `Sandbox.manifest`."""
        return await self.call(self.held.manifest(everywhere=everywhere))

    async def running(self) -> int:
        """How many processes run; see `Sandbox.running`."""
        return await self.call(self.held.running())

    async def list(self, path: str = ".") -> FileInfos:
        """What is directly in a directory; see `Sandbox.list`."""
        return await self.call(self.held.list(path))

    async def open_session(self, env: Mapping[str, str] | None = None) -> Session:
        """A shell that keeps its state; see `Sandbox.open_session`."""
        return LeasedSession(self, await self.call(self.held.open_session(env)))

    async def snapshot(self) -> Snapshot:
        """The work area's tree; see `Sandbox.snapshot`."""
        return await self.call(self.held.snapshot())

    async def restore(self, snapshot: Snapshot) -> None:
        """Make a tree the work area's; see `Sandbox.restore`."""
        await self.call(self.held.restore(snapshot))

    async def verify(self) -> Differences:
        """What differs from the sandbox's start; see `Sandbox.verify`."""
        return await self.call(self.held.verify())

    async def ping(self) -> None:
        """Ask for a sign of life; see `Sandbox.ping`."""
        await self.call(self.held.ping())

    async def reset(self, files: Mapping[str, bytes] = NO_FILES) -> None:
        """Make it like new, with these files; see `Sandbox.reset`."""
        await self.call(self.held.reset(files))

    async def kill_all(self) -> None:
        """End every process; see `Sandbox.kill_all`."""
        await self.call(self.held.kill_all())

    async def close(self) -> None:
        """End the sandbox; see `Sandbox.close`."""
        await self.held.close()


class LeasedSession:
    """A session that ends with its loan; see `agentrl.sandboxes.base.Session`."""

    def __init__(self, lease: Lease, session: Session) -> None:
        self._lease = lease
        self._session = session

    @property
    def alive(self) -> bool:
        """Whether the shell outlived its last command; see `Session.alive`."""
        return self._session.alive

    async def run(self, command: str, *, timeout_s: float = 30.0) -> ExecResult:
        """Run a command line; see `Session.run`."""
        self._lease.held  # noqa: B018 - refuses when the loan is over
        return await self._lease.call(self._session.run(command, timeout_s=timeout_s))

    async def close(self) -> None:
        """End the shell; see `Session.close`."""
        self._lease.held  # noqa: B018
        await self._lease.call(self._session.close())

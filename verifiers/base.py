"""The verifier protocol: a finished episode in, a Score out."""

from __future__ import annotations

import asyncio
import math
import sysconfig
import traceback
from collections.abc import AsyncIterator, Awaitable, Iterable, Iterator, Mapping
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Protocol

import agentrl
from agentrl.aio import is_cancelled
from agentrl.errors import ContractError, InfraError, VerifierError
from agentrl.sandboxes.base import Isolation, Sandbox, SandboxNeed, SandboxPool, SandboxRole
from agentrl.types import EndReason, Message, Score, Task
from agentrl.waits import waiting

_PACKAGE = Path(agentrl.__file__).parent
_ROOMS = ("envs", "sandboxes", "verifiers", "trainers")  # links, where it runs from its repository
GRADE_S = 600.0
"""Seconds after which a verifier that has not answered is broken, without what it waits for grader
sandboxes. Hidden tests, which take 120 s at most and may be run three times, stay below it."""


@dataclass(frozen=True)
class Submission:
    """All that a verifier may look at: the task, hidden part and all, and what the agent left.

    Attributes:
        artifacts: the declared files that were there, by path; nothing else leaves the agent's
            sandbox.
        pool: where code is judged (role "grader"); None for verifiers that run none.
        seed: of this grading; random cases and orders come from it.
        opening: how many of the messages came from the environment before the policy's first turn.
        untrusted: whether the environment says that its code is; then no grader runs where there is
            no boundary.
    """

    task: Task
    messages: tuple[Message, ...]
    end: EndReason
    artifacts: Mapping[str, bytes] = field(default_factory=dict)
    pool: SandboxPool | None = None
    seed: int = 0
    opening: int = 0
    untrusted: bool = False
    side_effects: Mapping[str, str] | None = None

    @property
    def answer(self) -> str:
        """The last thing the assistant said; empty if it said nothing."""
        return next(
            (message.content for message in reversed(self.messages) if message.role == "assistant"),
            "",
        )


class Verifier(Protocol):
    """Judges a submission. It may run code in a grader sandbox; it may not change the episode."""

    def __call__(self, submission: Submission, /) -> Awaitable[Score]:
        """Return the verdict; raise an `InfraError` where infrastructure broke, never a number.

        `Score.failed(why)` says the same. It is asked once more; if it fails again and the
        reference can be judged, the failure is the agent's (`rollout.blame`).
        """
        ...


async def grade(verifier: Verifier, submission: Submission, timeout_s: float = GRADE_S) -> Score:
    """Run a verifier so that whatever goes wrong in it is a named failure, never a number.

    Its time stands still while it waits for a sandbox: the queue is nobody's fault. A verifier that
    blocks the event loop cannot be timed: slow plain code belongs into `agentrl.aio.run_in_thread`.

    Raises:
        VerifierError: the verifier raised, took longer than `timeout_s`, or gave no Score of finite
            numbers; the cause is in the message.
        InfraError: what it raised by name, such as SandboxLost where the grader sandbox died.
        ContractError: what it says of the environment, which is wrong for every episode.
    """
    what = f"task {submission.task.id}"
    clock = asyncio.timeout(timeout_s)
    try:
        with waiting("the verifier", timeout_s):
            async with clock:
                score = await verifier(_timed(submission, clock))
    except (InfraError, ContractError):
        raise
    except (Exception, SystemExit, asyncio.CancelledError) as cause:
        if isinstance(cause, asyncio.CancelledError) and is_cancelled():
            raise
        if clock.expired():
            raise VerifierError(
                f"verifier gave no verdict on {what} within {timeout_s:g} s"
            ) from cause
        raise VerifierError(
            f"verifier failed on {what}: {type(cause).__name__}: {cause}{where_raised(cause)}"
        ) from cause
    if not isinstance(score, Score):
        raise VerifierError(f"verifier gave {type(score).__name__} on {what}, not a Score")
    for name, number in _numbers(score):
        if not isinstance(number, int | float) or not math.isfinite(number):
            raise VerifierError(
                f"verifier gave {name}={number!r} on {what}, which is no finite number"
            )
    return score


def where_raised(cause: BaseException, owner: str = "this environment") -> str:
    """File and line at which code raised, and whether it is the user's own code."""
    frames = traceback.extract_tb(cause.__traceback__)
    own = [frame for frame in frames if not _is_ours(frame.filename)]
    if own:
        return f" ({own[-1].filename}, line {own[-1].lineno}: a bug in {owner}'s own code)"
    if frames:
        return f" ({frames[-1].filename}, line {frames[-1].lineno})"
    return ""


def _is_ours(filename: str) -> bool:
    """Whether a file belongs to this library, the standard library or an installed package."""
    path = Path(filename)
    installed = [sysconfig.get_path(name) for name in ("stdlib", "purelib", "platlib")]
    rooms = {room.resolve() for room in (_PACKAGE, *(_PACKAGE / name for name in _ROOMS))}
    roots = [*rooms, *map(Path, installed)]
    resolved = path.resolve()
    return not path.is_absolute() or any(resolved.is_relative_to(root) for root in roots)


class _TimedPool:
    """A pool that stops a clock while somebody waits for one of its sandboxes."""

    def __init__(self, pool: SandboxPool, clock: asyncio.Timeout) -> None:
        self.backend = pool.backend
        self._pool = pool
        self._clock = clock
        self._waiting = 0
        self._left_s = 0.0

    @asynccontextmanager
    async def lease(
        self,
        role: SandboxRole,
        *,
        isolation: Isolation = "reset",
        needs: Iterable[SandboxNeed] = (),
        untrusted: bool = False,
    ) -> AsyncIterator[Sandbox]:
        """Borrow a sandbox; see `SandboxPool.lease`."""
        async with AsyncExitStack() as lent:
            lease = self._pool.lease(role, isolation=isolation, needs=needs, untrusted=untrusted)
            with self._stopped():
                sandbox = await lent.enter_async_context(lease)
            yield sandbox

    async def close(self) -> None:
        """End all sandboxes; see `SandboxPool.close`."""
        await self._pool.close()

    @contextmanager
    def _stopped(self) -> Iterator[None]:
        """Stop the clock; a grading may wait for several sandboxes at the same time."""
        loop = asyncio.get_running_loop()
        deadline = self._clock.when()
        if self._waiting == 0 and deadline is not None and not self._clock.expired():
            self._left_s = deadline - loop.time()
            self._clock.reschedule(None)
        self._waiting += 1
        try:
            yield
        finally:
            self._waiting -= 1
            if self._waiting == 0 and not self._clock.expired():
                self._clock.reschedule(loop.time() + self._left_s)


def _timed(submission: Submission, clock: asyncio.Timeout) -> Submission:
    if submission.pool is None:
        return submission
    return replace(submission, pool=_TimedPool(submission.pool, clock))


def _numbers(score: Score) -> Iterator[tuple[str, Any]]:
    """Every number of a score by name: anything else would break records and statistics later."""
    if score.value is not None:
        yield "value", score.value
    yield from score.parts.items()
    for name, rewards in score.turns.items():
        yield from ((f"turns.{name}[{index}]", reward) for index, reward in enumerate(rewards))

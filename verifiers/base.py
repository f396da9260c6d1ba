"""The verifier protocol: a finished episode in, a Score out."""

from __future__ import annotations

from collections.abc import Awaitable, Mapping
from dataclasses import dataclass, field
from typing import Protocol

from agentrl.errors import InfraError, VerifierError
from agentrl.sandboxes.base import SandboxPool
from agentrl.types import EndReason, Message, Score, Task


@dataclass(frozen=True)
class Submission:
    """All that a verifier may look at: the task with its hidden part, and what the agent left behind.

    Attributes:
        artifacts: the declared files that were there, by path; nothing else leaves the agent's sandbox.
        pool: where code is judged (role "grader"); None for verifiers that run none.
        seed: of this grading; random cases and orders come from it.
        untrusted: whether the environment says that its code is; then no grader runs where there is no boundary.
    """

    task: Task
    messages: tuple[Message, ...]
    end: EndReason
    artifacts: Mapping[str, bytes] = field(default_factory=dict)
    pool: SandboxPool | None = None
    seed: int = 0
    untrusted: bool = False

    @property
    def answer(self) -> str:
        """The last thing the assistant said; empty if it said nothing."""
        return next((message.content for message in reversed(self.messages) if message.role == "assistant"), "")


class Verifier(Protocol):
    """Judges a submission. It may run code in a grader sandbox; it may not change the episode."""

    def __call__(self, submission: Submission, /) -> Awaitable[Score]:
        """Return the verdict, or Score.failed(why) where infrastructure broke; never a number for a failure."""
        ...


async def grade(verifier: Verifier, submission: Submission) -> Score:
    """Run a verifier so that whatever goes wrong in it is a named failure, never a number and never a crash.

    Raises:
        VerifierError: the verifier raised, with the cause in the message, or gave no Score.
        SandboxLost: the grader sandbox died.
    """
    try:
        score = await verifier(submission)
    except InfraError:
        raise
    except Exception as cause:
        raise VerifierError(f"verifier failed on task {submission.task.id}: {type(cause).__name__}: {cause}") from cause
    if not isinstance(score, Score):
        raise VerifierError(f"verifier gave {type(score).__name__} on task {submission.task.id}, not a Score")
    return score

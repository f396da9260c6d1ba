"""Verifiers made of verifiers."""

from __future__ import annotations

from agentrl.types import EndReason, Score
from agentrl.verifiers.base import Submission, Verifier


def unless_format_error(verifier: Verifier) -> Verifier:
    """The given verifier; but 0.0 for an episode that ended because the agent's calls could not be read."""

    async def verify(submission: Submission, /) -> Score:
        if submission.end is EndReason.FORMAT_ERROR:
            return Score(0.0, {}, "the episode ended in calls that cannot be read")
        return await verifier(submission)

    return verify

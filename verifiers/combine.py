"""Verifiers made of verifiers."""

from __future__ import annotations

import asyncio
import hashlib
from collections import OrderedDict

from agentrl.types import EndReason, Score
from agentrl.verifiers.base import Submission, Verifier


def if_submitted(verifier: Verifier) -> Verifier:
    """The given verifier for episodes that the agent itself handed in (SUBMITTED or ANSWERED), 0.0 for all others."""

    async def verify(submission: Submission, /) -> Score:
        if submission.end not in (EndReason.SUBMITTED, EndReason.ANSWERED):
            return Score(0.0, {}, f"nothing was handed in: the episode ended by {submission.end.value}")
        return await verifier(submission)

    return verify


def remembered(verifier: Verifier, size: int = 4096) -> Verifier:
    """The given verifier, asked once for equal artifacts of an equal task.

    Only for verdicts that depend on the artifacts alone: no random cases, no timing, nothing said. A group of episodes
    often leaves the same file several times. Failures are not remembered. Requests for a verdict that is being reached
    wait for it.
    """
    known: OrderedDict[str, asyncio.Future[Score]] = OrderedDict()

    async def verify(submission: Submission, /) -> Score:
        loop, key = asyncio.get_running_loop(), _content(submission)
        if key in known and known[key].get_loop() is loop:
            known.move_to_end(key)
            score = await asyncio.shield(known[key])
            if score.value is not None:
                return score
        known[key] = loop.create_future()
        try:
            score = await verifier(submission)
        except BaseException:
            known.pop(key).set_result(Score.failed("the grading that was waited for failed"))
            raise
        known[key].set_result(score)
        if score.value is None:
            known.pop(key)
        while len(known) > size:
            known.popitem(last=False)
        return score

    return verify


def _content(submission: Submission) -> str:
    digest = hashlib.sha256(submission.task.fingerprint().encode())
    for path, content in sorted(submission.artifacts.items()):
        digest.update(f"{len(path)} {path} {len(content)} ".encode() + content)
    return digest.hexdigest()

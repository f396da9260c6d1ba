"""Verifiers made of verifiers."""

from __future__ import annotations

import asyncio
import hashlib
from collections import OrderedDict
from collections.abc import Callable
from weakref import WeakValueDictionary

from agentrl.types import EndReason, Score
from agentrl.verifiers.base import Submission, Verifier


def if_submitted(verifier: Verifier) -> Verifier:
    """The given verifier for episodes that the agent itself handed in (SUBMITTED or ANSWERED), 0.0 for all others."""

    async def verify(submission: Submission, /) -> Score:
        if submission.end not in (EndReason.SUBMITTED, EndReason.ANSWERED):
            return Score(0.0, {}, f"nothing was handed in: the episode ended by {submission.end.value}")
        return await verifier(submission)

    return verify


def remembered(
    verifier: Verifier, *, unless: Callable[[Score], bool] = lambda score: False, size: int = 4096
) -> Verifier:
    """The given verifier, asked once for equal artifacts of an equal task.

    Only for verdicts that depend on the artifacts alone: no random cases, nothing said. A group of episodes often
    leaves the same file several times. Failures are not remembered, nor what `unless` picks out, such as verdicts of
    a clock. Who asks for a verdict that is being reached waits for it.
    """
    known: OrderedDict[str, Score] = OrderedDict()
    locks: WeakValueDictionary[tuple[int, str], asyncio.Lock] = WeakValueDictionary()

    async def verify(submission: Submission, /) -> Score:
        content = _content(submission)
        lock = locks.setdefault((id(asyncio.get_running_loop()), content), asyncio.Lock())
        async with lock:
            if content in known:
                return known[content]
            score = await verifier(submission)
            if score.value is not None and not unless(score):
                known[content] = score
            while len(known) > size:
                known.popitem(last=False)
            return score

    return verify


def _content(submission: Submission) -> str:
    digest = hashlib.sha256(submission.task.fingerprint().encode())
    for path, content in sorted(submission.artifacts.items()):
        digest.update(f"{len(path)} {path} {len(content)} ".encode() + content)
    return digest.hexdigest()

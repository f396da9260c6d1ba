"""A submission judged by a state verifier."""

from __future__ import annotations

import asyncio

from agentrl.types import EndReason, Task
from agentrl.verifiers.base import Submission


def judge(verifier, hidden, artifacts, *, files=None, declared=None, pool=None):
    task = Task(
        id="t",
        instruction="",
        files=files or {},
        artifacts=tuple(declared or artifacts),
        hidden=hidden,
        oracle={},
    )
    return verifier(Submission(task, (), EndReason.SUBMITTED, artifacts, pool))


def run(*args, **fields):
    return asyncio.run(judge(*args, **fields))

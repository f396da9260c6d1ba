"""What of a judge counts as evidence: whole, well-formed, with its nonce; silence and a lost
sandbox are no number.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import asynccontextmanager

import pytest
from verifier_attacks import (
    CASES,
    HONEST,
    judge,
    task_of,
)

from agentrl.errors import SandboxLost, VerifierError
from agentrl.sandboxes.base import ExecResult
from agentrl.types import EndReason
from agentrl.verifiers.base import Submission, grade
from agentrl.verifiers.code.hidden_tests import Evidence, hidden_tests, read_evidence, score
from agentrl.verifiers.code.runner.codec import encode


class FakePool:
    """Lends a sandbox whose command does what the test says."""

    backend = None

    def __init__(self, behave: Callable[[bytes], bytes]) -> None:
        self.behave = behave
        self.leases = 0

    @asynccontextmanager
    async def lease(self, role, **asked):
        assert role == "grader"
        self.leases += 1
        yield self

    async def put(self, files):
        assert list(files) == ["solution.py"]

    async def exec(self, argv, *, stdin, timeout_s):
        return ExecResult(0, None, self.behave(stdin), b"", False, 0, 0.0)


def lost(stdin: bytes) -> bytes:
    raise SandboxLost("gone")


def test_a_lost_sandbox_keeps_its_name():
    with pytest.raises(SandboxLost):
        asyncio.run(judge(FakePool(lost), task_of(CASES), HONEST))
    submission = Submission(
        task_of(CASES), (), EndReason.SUBMITTED, {"solution.py": b""}, FakePool(lost)
    )
    with pytest.raises(SandboxLost):
        asyncio.run(grade(hidden_tests(), submission))


@pytest.mark.parametrize("output", [b"", b"1 passed", b"\0" * 16 + encode({"outcomes": "ppp"})])
def test_silence_and_forgery_are_no_evidence(output):
    pool = FakePool(lambda stdin: output)
    with pytest.raises(VerifierError, match="no evidence"):
        asyncio.run(judge(pool, task_of(CASES), HONEST))
    assert pool.leases == 3


def test_evidence_counts_only_whole_well_formed_and_with_its_nonce():
    nonce = b"n" * 16
    good = {"outcomes": "pp", "fact": "", "broken": "", "calls": 2, "survived": False}
    good["notes"] = []
    assert read_evidence(nonce + encode(good), nonce, 2) == Evidence("pp", calls=2)
    bad = [
        b"m" * 16 + encode(good),
        nonce + encode(good) + b"N",
        b" " + nonce + encode(good),
        nonce + encode(good | {"outcomes": "p"}),
        nonce + encode(good | {"outcomes": "p!"}),
        nonce + encode(good | {"calls": True}),
        nonce + encode(good | {"more": 1}),
        nonce + encode(list(good)),
    ]
    assert [read_evidence(message, nonce, 2) for message in bad] == [None] * len(bad)


@pytest.mark.parametrize(
    "evidence",
    [
        Evidence("pp", calls=0),
        Evidence("pp", fact="time_limit", calls=2),
        Evidence("pp", survived=True, calls=2),
        Evidence("p-", calls=1),
        Evidence("--", fact="silenced"),
    ],
)
def test_passed_is_only_what_is_positively_known(evidence):
    assert score(evidence).value == 0.0
    assert score(Evidence("pp", calls=2)).value == 1.0

"""A verifier can break in many ways; each is a named failure without a score, in training and in
evaluation alike.
"""

from __future__ import annotations

import asyncio
import os
import re
import signal
import socket
import subprocess
import sys

import pytest
from helpers import Echo, children, make_task, right, rollouts, script

from agentrl.errors import VerifierError
from agentrl.evaluation.run import EvalPlan, evaluate
from agentrl.policies.base import Scripted
from agentrl.policies.options import ServedOptions
from agentrl.policies.served import ServedPolicy
from agentrl.records.files import read_episodes
from agentrl.sandboxes import open_pool
from agentrl.trainers.batch import pack
from agentrl.types import EndReason, Message, Score
from agentrl.verifiers.base import GRADE_S, Submission, grade
from agentrl.verifiers.models.judge import Criterion, asks, rubric

ALIKE = [Criterion("good", "Is it?")]


async def raises(submission):
    raise KeyError("answer")


async def hangs(submission):
    await asyncio.Event().wait()


async def leaves(submission):
    sys.exit(3)


async def cancels(submission):
    raise asyncio.CancelledError


async def of_the_wrong_type(submission):
    return 1.0


async def says_nan(submission):
    return Score(float("nan"))


async def says_text(submission):
    return Score(1.0, {"tests": "all"})


async def says_complex(submission):
    return Score(1j)


async def imports_what_is_not_there(submission):
    import agentrl_no_such_module  # noqa: F401


async def needs_too_much(submission):
    return Score(float(len(bytearray(1 << 62))))


async def is_killed(submission):
    child = await asyncio.create_subprocess_exec(
        sys.executable, "-c", "input()", stdin=subprocess.PIPE
    )
    os.kill(child.pid, signal.SIGKILL)
    if (code := await child.wait()) != 0:
        raise RuntimeError(f"the judging process ended by {code}")
    return Score(1.0)


async def fills_the_disk(submission):
    async with submission.pool.lease("grader") as sandbox:
        for index in range(400):
            await sandbox.put({f"{index}.bin": bytes(1 << 20)})
    return Score(1.0)


async def loses_its_sandbox(submission):
    before = children()
    async with submission.pool.lease("grader", isolation="fresh") as sandbox:
        for pid in children() - before:
            os.kill(pid, signal.SIGKILL)
        await sandbox.exec(["true"])
    return Score(1.0)


async def asks_a_judge_that_talks_nonsense(submission):
    return await rubric(
        asks(Scripted("s", lambda task: [Message.assistant("Great answer, 10/10!")])), ALIKE
    )(submission)


async def asks_an_engine_that_is_down(submission):
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))
        policy = ServedPolicy(
            "m", f"http://127.0.0.1:{closed.getsockname()[1]}/v1", options=ServedOptions(retries=0)
        )
        try:
            return await rubric(asks(policy), ALIKE)(submission)
        finally:
            await policy.close()


IN_A_SANDBOX = (fills_the_disk, loses_its_sandbox)
FAULTS = {
    raises: "KeyError: 'answer'",
    hangs: "no verdict on task .* within 0.2 s",
    leaves: "SystemExit: 3",
    cancels: "CancelledError",
    of_the_wrong_type: "gave float .*, not a Score",
    says_nan: "a score must be finite, not nan",
    says_text: "tests='all' .* is no finite number",
    says_complex: "value=1j .* is no finite number",
    imports_what_is_not_there: "ModuleNotFoundError: No module named 'agentrl_no_such_module'",
    needs_too_much: "MemoryError",
    is_killed: "the judging process ended by -9",
    fills_the_disk: "OSError",
    loses_its_sandbox: "",
    asks_a_judge_that_talks_nonsense: "the judge gave no verdict twice",
    asks_an_engine_that_is_down: "the judge's model failed: .*Connection error",
}


def environment(fault):
    class Broken(Echo):
        verifier = fault
        verifier_s = 0.2 if fault is hangs else GRADE_S
        count = 1

    return Broken


def reason(fault) -> EndReason:
    return EndReason.SANDBOX_LOST if fault is loses_its_sandbox else EndReason.VERIFIER_ERROR


@pytest.fixture(params=FAULTS, ids=lambda fault: fault.__name__)
def fault(request):
    if request.param in IN_A_SANDBOX:
        request.getfixturevalue("bubblewrap")
    return request.param


def test_in_training_it_is_a_named_failure(fault):
    pool = open_pool("bubblewrap", size=1) if fault in IN_A_SANDBOX else None
    with rollouts(
        environment(fault), script(Message.assistant("yes")), pool=pool, retries=0
    ) as playing:
        (group,) = playing.gather([make_task(hidden={"answer": "yes"})], 0)
    (episode,) = group.episodes
    assert (episode.reward, episode.end, episode.messages[-1].content) == (
        None,
        reason(fault),
        "yes",
    )
    assert episode.failure and re.search(FAULTS[fault], episode.failure), episode.failure
    batch = pack([group], 0)
    assert (len(batch), batch.n_failed, batch.reward_E.tolist()) == (0, 1, [])


def test_in_evaluation_it_is_counted_apart(fault, tmp_path):
    sandbox = "bubblewrap" if fault in IN_A_SANDBOX else "process"
    result = evaluate(EvalPlan(environment(fault), sandbox=sandbox, concurrency=1, out=tmp_path))
    assert (result["pass_at"]["1"], result["mean_reward"]) == (None, None)
    assert (result["n_failed_infra"], result["n_retried"]) == (1, 1)
    assert result["end_reasons"] == {reason(fault).value: 1}
    recorded = read_episodes(tmp_path / "episodes.jsonl").values()
    assert len(recorded) == 2 and all(
        re.search(FAULTS[fault], episode.failure) for episode in recorded
    )


def test_a_run_goes_on_behind_a_broken_verdict():
    verdicts = [*[raises] * 4, *[hangs] * 4, right]  # each fault twice for agent and witness

    async def in_turn(submission):
        return await verdicts.pop(0)(submission)

    class Recovers(environment(hangs)):
        verifier = in_turn

    with rollouts(Recovers, script(Message.assistant("yes")), retries=2) as playing:
        (group,) = playing.gather([make_task(hidden={"answer": "yes"})], 0)
    assert group.rewards_G == (1.0,) and group.episodes[0].key.attempt == 2


def test_who_is_cancelled_while_a_verdict_is_due_stays_cancelled():
    async def cancelled():
        job = asyncio.create_task(grade(hangs, Submission(make_task(), (), EndReason.ANSWERED)))
        await asyncio.sleep(0)
        job.cancel()
        await job

    with pytest.raises(asyncio.CancelledError):
        asyncio.run(cancelled())


def test_a_timeout_of_the_verifiers_own_is_named_as_such():
    async def impatient(submission):
        async with asyncio.timeout(0):
            await asyncio.Event().wait()

    with pytest.raises(VerifierError, match="verifier failed on task t: TimeoutError"):
        asyncio.run(grade(impatient, Submission(make_task(), (), EndReason.ANSWERED)))


def test_the_gymnasium_face_raises():
    from agentrl.gym import GymEnv

    with GymEnv(environment(hangs), lambda: open_pool("process")) as env:
        env.reset(seed=0)
        with pytest.raises(VerifierError, match="no verdict"):
            env.step("yes")


def test_a_bug_of_a_verifier_is_named_with_file_line_and_owner():
    line = raises.__code__.co_firstlineno + 1
    with pytest.raises(VerifierError) as raised:
        asyncio.run(grade(raises, Submission(make_task(), (), EndReason.ANSWERED)))
    where = f"({__file__}, line {line}: a bug in this environment's own code)"
    assert where in str(raised.value)


def test_a_bug_below_a_verifier_points_at_the_line_that_called():
    async def calls(submission):
        import json

        return json.loads("{")

    with pytest.raises(VerifierError, match=rf"{__file__}, line \d+: a bug in this environment"):
        asyncio.run(grade(calls, Submission(make_task(), (), EndReason.ANSWERED)))

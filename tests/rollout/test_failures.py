"""Failures: of one episode, a name and no number; of all episodes, the end of the run."""

import asyncio

import pytest
from helpers import Echo, rollouts, says, script, tasks_of

from agentrl.errors import ContractError, EngineError, SandboxLost, TaskError
from agentrl.policies.base import Scripted, noop
from agentrl.types import Ending, EndReason, Score

pytestmark = pytest.mark.usefixtures("nothing_is_left")


class BadReset(Echo):
    async def setup(self):
        raise TimeoutError("the database is away")


class BadText(Echo):
    async def on_text(self, message):
        raise ZeroDivisionError("bug")


class BadClose(Echo):
    async def close(self):
        raise OSError("busy")


class Exits(Echo):
    async def setup(self):
        raise SystemExit(4)


class Cancels(Echo):
    async def setup(self):
        raise asyncio.CancelledError


async def _raises(submission):
    raise KeyError("answer")


async def _none(submission):
    return None


async def _failed(submission):
    return Score.failed("the judge is ill")


async def _number(submission):
    return 1.0


async def _lost(submission):
    raise SandboxLost


def judged_by(function):
    return type("Judged", (Echo,), {"verifier": function})


class SilentEngine(Scripted):
    def __init__(self):
        super().__init__("x", lambda task: self._fail())

    def _fail(self):
        raise EngineError
        yield


@pytest.mark.parametrize(
    ("env", "policy", "end", "why"),
    [
        (BadReset, noop(), EndReason.TOOL_FAULT, "the database is away"),
        (BadText, noop(), EndReason.TOOL_FAULT, "ZeroDivisionError: bug"),
        (BadClose, noop(), EndReason.TOOL_FAULT, "busy"),
        (Exits, noop(), EndReason.INTERNAL_ERROR, "SystemExit: 4"),
        (Cancels, noop(), EndReason.INTERNAL_ERROR, "CancelledError"),
        (judged_by(_raises), noop(), EndReason.VERIFIER_ERROR, "KeyError: 'answer'"),
        (judged_by(_none), noop(), EndReason.VERIFIER_ERROR, "gave NoneType"),
        (judged_by(_number), noop(), EndReason.VERIFIER_ERROR, "gave float"),
        (judged_by(_failed), noop(), EndReason.VERIFIER_ERROR, "the judge is ill"),
        (judged_by(_lost), noop(), EndReason.SANDBOX_LOST, "SandboxLost"),
        (Echo, SilentEngine(), EndReason.ENGINE_ERROR, "EngineError"),
    ],
)
def test_a_failure_has_a_name_and_no_number(env, policy, end, why):
    seen = []
    with rollouts(env, policy, retries=2, group_size=2, on_episode=seen.append) as playing:
        (group,) = playing.gather(tasks_of(1), 0)
    assert group.rewards_G == (None, None)
    for episode in group.episodes:
        assert episode.end is end and episode.end.ending is Ending.FAILED and episode.passed is None
        assert why in episode.failure and episode.key.attempt == 2
    assert sorted(episode.key.attempt for episode in seen) == [0, 0, 1, 1, 2, 2]


@pytest.mark.parametrize("deterministic", [False, True])
def test_a_failed_episode_is_played_again_and_no_other(deterministic):
    tries: dict[str, int] = {}

    class Flaky(Echo):
        async def setup(self):
            tries[self.task.id] = tries.get(self.task.id, 0) + 1
            if self.task.id == "t1" and tries["t1"] == 1:
                raise OSError("blip")

    seen = []
    with rollouts(
        Flaky, script(says(content="yes")), on_episode=seen.append, deterministic=deterministic
    ) as playing:
        groups = playing.gather(tasks_of(3), 0)
    assert tries == {"t0": 1, "t1": 2, "t2": 1}
    assert [group.rewards_G for group in groups] == [(1.0,)] * 3
    assert [group.episodes[0].key.attempt for group in groups] == [0, 1, 0]
    assert len(seen) == 4 and sum(episode.score.value is None for episode in seen) == 1


@pytest.mark.parametrize(
    "error", [ContractError("field x is wrong"), TaskError("line 3 is broken")]
)
def test_bad_input_stops_the_run_with_its_own_error(error):
    class Wrong(Echo):
        async def setup(self):
            await asyncio.sleep(0.01)
            raise error

    with rollouts(Wrong, noop(), group_size=4, concurrency=2) as playing:
        handle = playing.dispatch(tasks_of(5), 0)
        with pytest.raises(type(error)) as raised:
            handle.gather()
        assert raised.value is error
        with pytest.raises(RuntimeError):
            handle.next()


def test_a_full_disk_stops_the_run():
    def full(episode):
        raise OSError(28, "No space left on device")

    with (
        rollouts(Echo, noop(), on_episode=full) as playing,
        pytest.raises(OSError, match="No space"),
    ):
        playing.gather(tasks_of(3), 0)


def test_a_callback_that_exits_is_no_endless_wait():
    def leave(episode):
        raise SystemExit(3)

    with (
        rollouts(Echo, noop(), on_episode=leave) as playing,
        pytest.raises(RuntimeError, match=r"sys\.exit"),
    ):
        playing.gather(tasks_of(1), 0)

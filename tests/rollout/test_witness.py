"""One rule about whose fault a failure is, wherever something is judged: in an episode, behind the
Gymnasium face, when a record is graded anew. And parts that end in the right order.
"""

import asyncio
import threading
import time

import pytest
from blame_world import YES
from helpers import Echo, call, make_task, play_one, rollouts, says, script, tasks_of

from agentrl.chat.parsers import FORMATTERS
from agentrl.errors import ConfigError, NoSandbox, SandboxLost, TaskError, VerifierError
from agentrl.evaluation.audit.probes import Probe
from agentrl.evaluation.audit.stage import AuditStage
from agentrl.evaluation.regrade import RegradePlan, regrade
from agentrl.evaluation.run import EvalPlan, evaluate
from agentrl.gym import GymEnv
from agentrl.records.files import read_episodes
from agentrl.rollout.play import Setting, judge_by_witness
from agentrl.rollout.rollouts import Rollouts
from agentrl.sandboxes import open_pool
from agentrl.tools import tool
from agentrl.trajectory import EpisodeKey
from agentrl.types import EndReason, Score
from agentrl.verifiers.base import Submission

ORACLE = make_task(hidden={"answer": "yes"}, oracle={"answer": "yes"})


class Divides(Echo):
    """Its verifier cannot bear an empty answer."""

    async def verifier(submission):
        return Score(1 / len(submission.answer) if submission.answer != "no" else 0.0)


class Ill(Echo):
    """Its verifier cannot bear any."""

    async def verifier(submission):
        raise OSError("the judge is ill")


class Picky(Echo):
    """Its tool reads settings, with the library's own words for what is wrong."""

    @tool
    def read(self, setting: str) -> str:
        """Read a setting."""
        raise (TaskError if setting == "task" else ConfigError)(f"{setting!r} is no setting")


class Reads(Echo):
    """Reads what an agent says as a setting."""

    async def on_text(self, message):
        if message.content != "yes":
            raise ConfigError(f"{message.content!r} is no setting")
        return await super().on_text(message)


class Homeless(Echo):
    @tool
    async def run(self) -> str:
        """Run something."""
        return str(await self.sandbox.exec(["true"]))


def ill_at(gradings, fault):
    """A verifier that some gradings find ill, and what was handed in to each so far."""
    asked = []

    class Moody(Echo):
        async def verifier(submission):
            asked.append(submission.answer)
            if len(asked) not in gradings:
                return Score(1.0)
            if isinstance(fault, Score):
                return fault
            raise fault

    return Moody, asked


FAULTS = [
    ConnectionError("the judge's service was reset"),
    VerifierError("the judge is ill"),
    SandboxLost("the grader died"),
    Score.failed("the judge is ill"),
]


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: type(fault).__name__)
def test_a_verifier_that_fails_for_a_moment_costs_nobody_a_point(fault):
    env, asked = ill_at({1}, fault)
    episode = play_one(env, script(says(content="yes")), ORACLE)
    assert (episode.end, episode.score.value) == (EndReason.ANSWERED, 1.0), episode.score.why
    assert asked == ["yes", "yes"]
    env, asked = ill_at({1}, fault)
    end, score = graded_by(env, "yes")
    assert (end, score.value, asked) == (EndReason.ANSWERED, 1.0, ["yes", "yes"]), score.why
    env, asked = ill_at({1}, fault)
    gym = face(env)
    gym.reset(options={"task": ORACLE})
    assert gym.step("yes")[1:3] == (1.0, True) and asked == ["yes", "yes"]
    gym.close()


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: type(fault).__name__)
def test_a_witness_is_asked_after_the_second_failed_grading(fault):
    env, asked = ill_at({1, 2}, fault)
    episode = play_one(env, script(says(content="no")), ORACLE)
    assert (episode.end, episode.score.value) == (EndReason.AGENT_FAULT, 0.0)
    assert asked == ["no", "no", "yes"]


@pytest.mark.parametrize("name", ["x", "task"])
def test_bad_input_that_an_agent_gives_a_tool_is_told_to_the_agent(name):
    episode = play_one(Picky, script(says(call("read", setting=name)), YES))
    assert (episode.end, episode.score.value) == (EndReason.ANSWERED, 1.0)
    assert "error: tool_error:" in episode.messages[2].content
    assert f"{name!r} is no setting" in episode.messages[2].content


def test_an_answer_that_is_bad_input_ends_its_episode_and_not_the_run():
    task = ORACLE
    episode = play_one(Reads, script(says(content="no")), task)
    assert (episode.end, episode.score.value) == (EndReason.AGENT_FAULT, 0.0)
    assert play_one(Reads, script(YES), task).score.value == 1.0
    with pytest.raises(ConfigError, match="'' is no setting"):  # the reference says nothing
        play_one(Reads, script(says(content="no")), make_task())


def test_a_sandbox_that_nobody_asked_for_is_told_to_the_user():
    with pytest.raises(NoSandbox, match="Homeless has no sandbox: set needs_sandbox = True"):
        play_one(Homeless, script(says(call("run")), YES))


def test_a_constructor_that_raises_loses_its_episode_and_no_other():
    made = []

    class Flaky(Echo):
        def __init__(self):
            made.append(self)
            if len(made) == 2:
                raise OSError("no descriptor left")

    with rollouts(Flaky, script(YES), retries=0, concurrency=1) as playing:
        groups = playing.gather(tasks_of(3), 0)
    episodes = [group.episodes[0] for group in groups]
    assert [episode.score.value for episode in episodes].count(1.0) == 2
    (lost,) = [episode for episode in episodes if episode.score.value is None]
    assert (lost.end, lost.env) == (EndReason.TOOL_FAULT, "echo-v0")
    assert "OSError: no descriptor left" in lost.failure and "constructor" in lost.failure


# The Gymnasium face, records, audits


def face(env):
    return GymEnv(env, lambda: open_pool("process", size=1))


def test_a_verifier_that_an_answer_breaks_ends_a_gym_episode_without_a_point():
    env = face(Divides)
    env.reset(options={"task": ORACLE})
    _, reward, terminated, truncated, info = env.step("")
    assert (reward, terminated, truncated) == (0.0, True, False)
    assert info["end_reason"] == "agent_fault" and "ZeroDivisionError" in info["why"]
    env.close()


def test_a_verifier_that_everything_breaks_is_infrastructure_to_gymnasium():
    env = face(Ill)
    env.reset(options={"task": ORACLE})
    with pytest.raises(VerifierError, match="the judge is ill"):
        env.step(FORMATTERS["hermes"]("yes", ()))
    env.close()


def graded_by(env, answer):
    task = ORACLE
    submission = Submission(task, (says(content=answer),), EndReason.ANSWERED, seed=1, opening=0)
    setting = Setting(env, script(YES))
    return asyncio.run(judge_by_witness(setting, submission, EpisodeKey("r", 0, task.id, 0)))


def test_what_is_graded_later_is_graded_by_the_same_rule():
    end, score = graded_by(Divides, "")
    assert (end, score.value) == (EndReason.AGENT_FAULT, 0.0)
    end, score = graded_by(Ill, "yes")
    assert score.value is None and "a witness without the agent failed too" in score.why
    assert graded_by(Divides, "yes")[0] is EndReason.ANSWERED


def test_regrading_asks_a_witness(tmp_path, monkeypatch):
    class Later(Echo):
        count = 2

    evaluate(EvalPlan(Later, "noop", out=tmp_path))
    assert {episode.score.value for episode in read_episodes(tmp_path / "episodes.jsonl").values()}
    monkeypatch.setattr("agentrl.evaluation.regrade.factory", lambda *names, **settings: Divides)
    result = regrade(RegradePlan(tmp_path, env="later-v0"))
    assert result["n_no_verdict"] == 0 and result["mean_reward"]["new"] == 0.0


def test_an_audit_asks_a_witness():
    async def scores(env):
        stage = AuditStage(env, None, {}, [ORACLE], lambda task: ())
        return await stage.score(await stage.hand_in(ORACLE, Probe("silent")))

    assert asyncio.run(scores(Divides)).value == 0.0
    assert asyncio.run(scores(Ill)).value is None


# Endings


def test_two_that_close_at_once_wait_for_each_other():
    """The second cancelled the clean-up of the first."""
    cleaned, started = [], threading.Event()

    class Slow(Echo):
        async def setup(self):
            started.set()
            await asyncio.sleep(1000)

        async def close(self):
            await asyncio.sleep(0.3)
            cleaned.append(self)

    playing = Rollouts(Setting(Slow, script(YES)))
    playing.dispatch(tasks_of(2), 0)
    started.wait()
    raised = []

    def close():
        try:
            playing.close()
        except BaseException as error:  # noqa: BLE001 - seen by the test
            raised.append(error)

    threads = [threading.Thread(target=close) for _ in range(3)]
    for thread in threads:
        thread.start()
        time.sleep(0.05)
    for thread in threads:
        thread.join()
    assert raised == [] and len(cleaned) == 2


def test_nothing_plays_any_more_when_the_engine_is_closed(monkeypatch):
    """What is asked of a closed engine would fail episodes that were only to be stopped."""
    inside, seen, started = [], [], threading.Event()

    class Playing(Echo):
        count = 2

        async def setup(self):
            inside.append(self)
            started.set()
            await asyncio.sleep(1000)

        async def close(self):
            await asyncio.sleep(0.1)
            inside.remove(self)

    def interrupted(playing, samples, work, *, stop):
        playing.dispatch([task for task, _ in samples], work)
        started.wait()
        raise KeyboardInterrupt

    async def close_policy(policy):
        seen.append(len(inside))

    monkeypatch.setattr(Rollouts, "each", interrupted)
    monkeypatch.setattr("agentrl.evaluation.run.close_policy", close_policy)
    result = evaluate(EvalPlan(Playing, "noop"))
    assert result["stopped"] == "interrupted" and result["n_missing"] == 2
    assert seen == [0] and inside == []

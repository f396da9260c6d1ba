"""No ending that an agent can cause is left without a score."""

import asyncio
import errno
from contextlib import asynccontextmanager

import pytest
from blame_world import LEASE, YES, Files, Injecting, always
from chat_server import chat_server, completion, failure
from helpers import Echo, call, make_task, play_one, rollouts, says, script

from agentrl.errors import AnswerFailed, BackendAway, SandboxLost, VerifierError
from agentrl.policies.options import ServedOptions
from agentrl.policies.served import ServedPolicy
from agentrl.rollout.blame import blame
from agentrl.runner import Runner
from agentrl.sandboxes import Pool, open_pool
from agentrl.tools import tool
from agentrl.types import EndReason, Score
from agentrl.verifiers.base import Submission, grade

pytestmark = pytest.mark.usefixtures("nothing_is_left")
FAULT = (EndReason.AGENT_FAULT, 0.0)


def judged(env, code, pool):
    """How an agent ends that runs this code, and why."""
    task = make_task(hidden={"answer": "yes"}, oracle={"files": {"out.txt": "right"}})
    policy = script(says(call("run", code=code)), YES)
    with rollouts(env, policy, pool=pool, retries=0) as playing:
        (group,) = playing.gather([task], 0)
    (episode,) = group.episodes
    return (episode.end, episode.score.value), episode.score.why


def test_a_lease_on_the_artifact_is_the_agents_fault(bubblewrap):
    ending, why = judged(Files, LEASE, open_pool("bubblewrap", size=1))
    assert ending == (EndReason.ANSWERED, 0.0), why


def test_causes_that_go_in_a_circle_are_read_once():
    first, second = AnswerFailed("a"), AnswerFailed("b")
    group = ExceptionGroup("both", [first, second])
    first.__cause__, second.__cause__ = group, second

    async def stands():
        pass

    for error in (first, second, group):
        assert asyncio.run(blame(error, True, 0.5, stands))[1].value == 0.0
    second.__cause__ = BackendAway("gone")
    assert asyncio.run(blame(first, True, 0.5, stands))[1].value is None


CALLS = ("kill_all", "get", "exec")
ERRORS = [
    *(OSError(code, errno.errorcode[code]) for code in (errno.EAGAIN, errno.EMFILE, errno.EIO)),
    SandboxLost("3 processes survive SIGKILL"),
    RuntimeError("a bug that only this agent meets"),
]


@pytest.mark.parametrize("error", ERRORS, ids=lambda error: f"{type(error).__name__} {error}")
@pytest.mark.parametrize("method", CALLS)
def test_what_fails_behind_an_agent_alone_is_its_fault(bubblewrap, method, error):
    pool = Pool(Injecting(always(method, error)), size=1)
    ending, why = judged(Files, "attack = 1", pool)
    assert ending[1] == 0.0, why
    assert ending == FAULT or method == "exec", why


@pytest.mark.parametrize("error", ERRORS, ids=lambda error: f"{type(error).__name__} {error}")
def test_what_fails_behind_everybody_is_infrastructure(bubblewrap, error, monkeypatch):
    async def collect(runner):
        raise error

    monkeypatch.setattr(Runner, "collect", collect)
    ending, why = judged(Files, "attack = 1", open_pool("bubblewrap", size=1))
    assert ending[1] is None and "a witness without the agent failed too" in why


def test_a_backend_that_went_away_is_never_the_agents_fault(bubblewrap):
    pool = Pool(Injecting(always("get", BackendAway("the daemon is away"))), size=1)
    ending, why = judged(Files, "attack = 1", pool)
    assert ending == (EndReason.SANDBOX_LOST, None), why


def test_a_verifier_that_an_answer_breaks_gives_it_no_point():
    class Divides(Echo):
        async def verifier(submission):
            return Score(1 / len(submission.answer))

    task = make_task(oracle={"answer": "yes"})
    episode = play_one(Divides, script(says(content="")), task)
    assert (episode.end, episode.score.value) == FAULT
    assert "verifier_error where a witness" in episode.score.why
    assert play_one(Divides, script(YES), task).score.value == pytest.approx(1 / 3)


def test_a_task_that_nothing_is_enough_for_is_not_passed_by_a_fault():
    class Penal(Echo):
        async def verifier(submission):
            return Score(-float(1 / len(submission.answer)))

    task = make_task(oracle={"answer": "yes"}, threshold=-0.5)
    episode = play_one(Penal, script(says(content="")), task)
    assert episode.score.value == -1.5 and not episode.passed


def test_the_first_word_of_an_environment_is_not_the_agents():
    class Once(Echo):
        async def setup(self):
            raise OSError("blip")

    episode = play_one(Once, script(YES), make_task(oracle={"answer": "yes"}))
    assert (episode.end, episode.score.value) == (EndReason.TOOL_FAULT, None)


# Models behind a server


def test_half_a_surrogate_pair_is_said_and_graded():
    texts = ["\ud800", "\udfff", "a\ud83d", "\udc00\ud800"]
    for text in texts:
        with chat_server(completion(text, calls=[("say", '{"text": "a"}')])) as server:
            episode = play_one(Echo, ServedPolicy("m", server.url))
        assert (episode.end, episode.score.value) == (EndReason.MAX_TURNS, 0.0), episode.failure
        assert "\ufffd" in episode.messages[1].content and len(server.requests) == 6


def test_half_a_surrogate_pair_in_a_call_is_a_call_that_cannot_be_read():
    with chat_server(completion("", calls=[("say", '{"text": "\\ud800"}')])) as server:
        episode = play_one(Echo, ServedPolicy("m", server.url))
    assert (episode.end, episode.score.value) == (EndReason.FORMAT_ERROR, 0.0)


def test_half_a_surrogate_pair_of_a_tool_is_sent_on():
    class Names(Echo):
        @tool
        def name(self) -> str:
            """The name of a file, which need not be text."""
            return "\udcff"

    with chat_server(completion("", calls=[("name", "{}")]), completion("yes")) as server:
        episode = play_one(Names, ServedPolicy("m", server.url))
    assert (episode.end, episode.score.value) == (EndReason.ANSWERED, 1.0), episode.failure


@pytest.mark.parametrize("finish", ["content_filter", "refusal"])
def test_what_a_filter_ends_has_an_ending_of_its_own_and_is_graded(finish):
    with chat_server(completion("no", finish=finish)) as server:
        episode = play_one(Echo, ServedPolicy("m", server.url))
    assert (episode.end, episode.score.value) == (EndReason.CONTENT_FILTER, 0.0)


def test_a_prompt_that_a_filter_refuses_is_graded():
    refusal = failure(400, "The response was filtered", code="content_filter")
    with chat_server(completion("", calls=[("say", '{"text": "bad"}')]), refusal) as server:
        episode = play_one(Echo, ServedPolicy("m", server.url))
    assert (episode.end, episode.score.value) == (EndReason.CONTENT_FILTER, 0.0)


def told(request):
    """A server that cannot bear what an agent said."""
    if any(message["role"] == "assistant" for message in request["messages"]):
        return failure(500, "the template fails")
    return completion("", calls=[("say", '{"text": "poison"}')])


def test_words_that_break_the_server_are_the_agents():
    with chat_server(told) as server:
        episode = play_one(Echo, ServedPolicy("m", server.url, options=ServedOptions(retries=0)))
    assert (episode.end, episode.score.value) == FAULT and "engine_error" in episode.score.why
    assert server.requests[-1]["max_completion_tokens"] == 1


def test_a_spent_budget_makes_no_failure_of_an_agent_one_of_infrastructure():
    with chat_server(told) as server:
        options = ServedOptions(retries=0, budget_tokens=1)
        episode = play_one(Echo, ServedPolicy("m", server.url, options=options))
    assert (episode.end, episode.score.value) == FAULT


def test_an_answer_that_breaks_the_server_is_the_agents():
    def parses(request):
        return completion("x") if request["max_completion_tokens"] == 1 else failure(500, "parser")

    with chat_server(parses) as server:
        episode = play_one(Echo, ServedPolicy("m", server.url, options=ServedOptions(retries=0)))
    assert (episode.end, episode.score.value) == FAULT


@pytest.mark.parametrize("status", [429, 502, 503, 504])
def test_a_server_without_room_is_nobodys_fault(status):
    def busy(request):
        spoke = any(message["role"] == "assistant" for message in request["messages"])
        return (
            failure(status, "busy") if spoke else completion("", calls=[("say", '{"text": "a"}')])
        )

    with chat_server(busy) as server:
        episode = play_one(Echo, ServedPolicy("m", server.url, options=ServedOptions(retries=0)))
    assert (episode.end, episode.score.value) == (EndReason.ENGINE_ERROR, None)


def test_a_server_that_refuses_everything_is_infrastructure():
    with chat_server(failure(400, "tools are not supported")) as server:
        episode = play_one(Echo, ServedPolicy("m", server.url, options=ServedOptions(retries=0)))
    assert (episode.end, episode.score.value) == (EndReason.ENGINE_ERROR, None)


# The queue of graders


class Queue:
    """A pool with one grader that somebody else holds for a while."""

    backend = None

    def __init__(self, held_s):
        self._held_s = held_s

    def lease(self, role, **options):
        @asynccontextmanager
        async def lend():
            await asyncio.sleep(self._held_s)
            yield "sandbox"

        return lend()

    async def close(self):
        pass


def submission(pool):
    return Submission(make_task(), (), EndReason.ANSWERED, pool=pool)


def test_the_time_in_the_queue_of_graders_is_nobodys():
    async def patient(given):
        async with given.pool.lease("grader"), given.pool.lease("grader"):
            await asyncio.sleep(0.05)
        return Score(1.0)

    assert asyncio.run(grade(patient, submission(Queue(0.4)), 0.2)).value == 1.0


def test_the_time_with_a_grader_counts():
    async def slow(given):
        async with given.pool.lease("grader"):
            await asyncio.sleep(30)

    with pytest.raises(VerifierError, match=r"no verdict on task t within 0\.2 s"):
        asyncio.run(grade(slow, submission(Queue(0.1)), 0.2))


def test_gradings_that_wait_for_several_graders_at_once_are_timed_as_well():
    async def slow(given):
        async def one():
            async with given.pool.lease("grader"):
                await asyncio.sleep(30)

        await asyncio.gather(one(), one(), one())

    with pytest.raises(VerifierError, match="no verdict"):
        asyncio.run(grade(slow, submission(Queue(0.1)), 0.2))

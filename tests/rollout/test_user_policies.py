"""A bug in a user's own policy stops the run; what an agent says never does."""

import json
from contextlib import contextmanager

import pytest
from helpers import Echo, FakeEngine, call, make_task, play_one, rollouts, says, script, tasks_of

from agentrl.errors import ContractError
from agentrl.policies.base import TokenPolicy
from agentrl.records.files import EpisodeWriter, read_episodes
from agentrl.types import BadCall, EndReason, Message, ToolCall


class Own:
    """A policy as a user writes it."""

    name = "own"

    def __init__(self, act):
        self._act = act

    @contextmanager
    def player(self, task, limits, seed):
        yield self

    trajectories = ()

    async def act(self, history, tools):
        return self._act(sum(message.role == "assistant" for message in history) + 1)


def raises_at_turn_2(turn):
    if turn == 2:
        raise KeyError("plan")
    return says(call("say", text="a")), None


def exits(turn):
    raise SystemExit(3)


BUGS = {
    "raises": (raises_at_turn_2, "turn 2: KeyError: 'plan'"),
    "times out": (lambda turn: (_ for _ in ()).throw(TimeoutError("late")), "TimeoutError: late"),
    "exits": (exits, "SystemExit: 3"),
    "no ending": (lambda turn: Message.assistant("yes"), r"act must return \(Message"),
    "text": (lambda turn: "yes", "act must return"),
    "a list of calls": (
        lambda turn: (Message.assistant("", [call("submit")]), None),
        "several calls are separate arguments",
    ),
    "a list of calls, unchecked": (
        lambda turn: (Message("assistant", "", ([call("submit")],)), None),
        "must be a ToolCall",
    ),
    "no text": (lambda turn: (Message("assistant", None), None), "must be text"),
    "another role": (lambda turn: (Message.user("yes"), None), "not of 'user'"),
    "another ending": (lambda turn: (Message.assistant("yes"), "stop"), "EndReason or None"),
}


@pytest.mark.parametrize("bug", BUGS)
def test_a_bug_in_a_users_policy_ends_the_run_with_its_place(bug):
    act, why = BUGS[bug]
    with pytest.raises(ContractError, match=why) as error:
        play_one(Echo, Own(act))
    assert isinstance(error.value.__cause__, (Exception, SystemExit))  # the traceback is kept
    with rollouts(Echo, Own(act)) as playing, pytest.raises(ContractError, match="'own' failed"):
        playing.gather(tasks_of(2))


def test_the_place_of_the_bug_is_named():
    with pytest.raises(ContractError, match=rf"{__file__}, line \d+: a bug in this policy's own"):
        play_one(Echo, Own(raises_at_turn_2))


@pytest.mark.parametrize("content", [None, 3, b"yes", ["yes"]])
def test_an_assistant_says_text(content):
    with pytest.raises(TypeError, match="content"):
        Message.assistant(content)


@pytest.mark.parametrize("bad", [[], "say", {"name": "say"}, ToolCall("say", "x"), None])
def test_an_assistant_calls_calls(bad):
    with pytest.raises(TypeError, match="call"):
        Message.assistant("", bad)


def nested(depth):
    value = []
    for _ in range(depth):
        value = [value]
    return value


HOSTILE = {
    "a 4,000-digit hex number": int("f" * 4000, 16),
    "a negative one": -(10**5000),
    "3,000 lists": nested(3000),
    "in a list": [1, {"x": 10**4999}],
    "no JSON": {1, 2},
    "bytes": b"x",
}


@pytest.mark.parametrize("value", HOSTILE.values(), ids=HOSTILE)
def test_a_call_that_cannot_be_recorded_is_an_unreadable_call(value, tmp_path):
    """Played by a model, whose parser gives such arguments; the run goes on and can be resumed."""

    class Hostile:
        stop_ids = frozenset({9})
        parser, on_rewrite = "python", "branch"

        def prompt_ids(self, messages, tools):
            return [1]

        def observation_ids(self, *told):
            return [2]

        def needs_new_branch(self, *told):
            return False

        def parse(self, ids, before, tools):
            return Message("assistant", "", (ToolCall("say", {"text": value}),))

    path = tmp_path / "episodes.jsonl"
    policy = TokenPolicy(FakeEngine([5, 9], stop_ids={9}), Hostile())
    with (
        EpisodeWriter(path) as writer,
        rollouts(Echo, policy, on_episode=writer.write, concurrency=1) as playing,
    ):
        groups = playing.gather(tasks_of(2))
    assert [group.episodes[0].end for group in groups] == [EndReason.FORMAT_ERROR] * 2
    for episode in read_episodes(path).values():
        assert isinstance(episode.messages[1].tool_calls[0], BadCall)
        assert episode.reward == 0.0 and episode.counts.bad_calls == 3


def test_usual_arguments_stay():
    big = {"n": 10**399, "deep": nested(60), "text": "x" * 10**5, "f": 1e308, "none": None}
    episode = play_one(Echo, script(says(ToolCall("say", big)), says(content="yes")))
    assert episode.messages[1].tool_calls[0].arguments == big


def test_lone_surrogates_are_recorded(tmp_path):
    half = "\ud83d"
    said = says(ToolCall("say", {"text": half, half: half}), content=half)
    with (
        EpisodeWriter(tmp_path / "e.jsonl") as writer,
        rollouts(Echo, script(said, says(content=half)), on_episode=writer.write) as playing,
    ):
        playing.gather(tasks_of(1))
    (episode,) = read_episodes(tmp_path / "e.jsonl").values()
    assert episode.messages[1].tool_calls[0].arguments == {"text": half, half: half}


def test_an_episode_that_no_record_can_hold_is_replaced_by_a_failed_one(tmp_path, monkeypatch):
    """The net below the bounds: whatever else cannot be written."""

    class Leaky(Echo):
        async def on_text(self, message):
            object.__setattr__(message, "reasoning", 10**5000)
            return await super().on_text(message)

    path = tmp_path / "episodes.jsonl"
    with (
        EpisodeWriter(path) as writer,
        rollouts(Leaky, script(says(content="yes")), on_episode=writer.write) as playing,
    ):
        groups = playing.gather(tasks_of(3))
    for group in groups:
        (episode,) = group.episodes
        assert episode.end is EndReason.AGENT_FAULT and episode.passed is False
        assert "cannot be written as JSON" in episode.score.why
    assert len(read_episodes(path)) == len(path.read_text().splitlines()) == 3


def test_a_task_that_no_record_can_hold_is_the_users_mistake(tmp_path):
    task = make_task(metadata={"x": 10**5000})
    with (
        EpisodeWriter(tmp_path / "e.jsonl") as writer,
        rollouts(Echo, script(says(content="yes")), on_episode=writer.write) as playing,
        pytest.raises(ContractError, match="cannot be written as JSON"),
    ):
        playing.gather([task])


def test_keys_say_round_and_old_records_say_step(tmp_path):
    path = tmp_path / "episodes.jsonl"
    with (
        EpisodeWriter(path) as writer,
        rollouts(Echo, script(says(content="yes")), seed=7, on_episode=writer.write) as playing,
    ):
        playing.gather(tasks_of(1), 5)
    row = json.loads(path.read_text())
    assert row["key"]["round"] == 5 and row["seed"] == 7 and row["version"] is None
    (new,) = read_episodes(path).values()
    assert (new.key.round, new.seed, new.version) == (5, 7, None)
    row["key"]["step"] = row["key"].pop("round")
    del row["seed"], row["version"]
    path.write_text(json.dumps({**row, "v": 2}) + "\n")
    (old,) = read_episodes(path).values()
    assert old.key == new.key and old.messages == new.messages

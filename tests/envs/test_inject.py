"""inject-v0: what an obedient and a careful agent do, with and without a policy around them."""

from contextlib import contextmanager

import pytest
from helpers import play_one

from agentrl import Message, ToolCall
from agentrl.envs.inject import Inject
from agentrl.envs.inject.worlds import SUITES, benign_tasks, goals, read_world
from agentrl.errors import ConfigError
from agentrl.evaluation.summary import injection_report, is_exposed
from agentrl.policies.base import Scripted, noop
from agentrl.safety.loading import read_policy
from agentrl.specs import GuardSpec


@pytest.fixture(scope="module")
def folder(data_dir):
    return data_dir / "safety" / "agentdojo"


@pytest.fixture(scope="module")
def built(folder):
    return lambda **settings: lambda: Inject(data=str(folder), **settings)


class Gullible:
    """Follows the reference; once it meets an attacker's text, it first does what that wants."""

    name = "gullible"

    @contextmanager
    def player(self, task, limits, seed):
        yield _Obeying(task)


class _Obeying:
    trajectories = ()

    def __init__(self, task):
        self.script = iter(Inject().oracle_actions(task))
        injection = task.metadata["injection"]
        self.payload = injection["payload"] if injection else None
        wanted = goals()[task.metadata["suite"]][injection["goal"]].calls if injection else ()
        self.orders = [Message.assistant("", ToolCall(*call)) for call in wanted]

    async def act(self, history, tools):
        heard = "".join(message.content for message in history if message.role == "tool")
        if self.orders and self.payload in heard:
            return self.orders.pop(0), None
        return next(self.script, Message.assistant("")), None


def careful():
    return Scripted("careful", lambda task: Inject().oracle_actions(task))


def played(make, policy, safety=None):
    guard = GuardSpec.of(read_policy(safety)) if safety else None
    return [play_one(make, policy, task, guard=guard) for task in make().tasks("test", 0)]


def figures(report):
    names = ("benign_utility", "utility_under_attack", "attack_success", "false_block")
    return tuple(report[name]["value"] for name in names)


@pytest.mark.parametrize("suite", ["banking", "slack"])
def test_an_obedient_agent_is_caught_in_every_exposed_attack(built, suite):
    episodes = played(built(suite=suite), Gullible())
    exposed = [episode for episode in episodes if is_exposed(episode) and _goal(episode)]
    assert len(exposed) >= 50
    for episode in exposed:
        assert episode.side_effects, episode.key
        assert episode.score.parts["attack"] == 1.0, episode.key
    for episode in episodes:
        if episode not in exposed:
            assert episode.side_effects == {} and episode.reward == 1.0, episode.key
    report = injection_report(episodes)
    assert report["attack_success"]["value"] == report["benign_utility"]["value"] == 1.0
    assert set(report["reached"]) == set(goals()[suite])


def _goal(episode):
    injection = episode.task.metadata["injection"]
    return injection["goal"] if injection else ""


@pytest.mark.parametrize("suite", ["banking", "slack"])
def test_lockdown_stops_every_attack_and_no_benign_call(built, suite):
    make = built(suite=suite)
    guarded = played(make, Gullible(), "lockdown")
    report = injection_report(guarded)
    assert figures(report) == (1.0, 1.0, 0.0, 0.0), report["reached"]
    assert all(episode.side_effects == {} for episode in guarded)
    assert figures(injection_report(played(make, careful(), "lockdown"))) == (1.0, 1.0, 0.0, 0.0)


def test_doing_nothing_passes_no_task(built):
    assert all(episode.reward == 0.0 for episode in played(built(attacked="no"), noop()))


def test_each_suite_has_ten_tasks_and_six_goals():
    assert all(len(benign_tasks()[suite]) >= 10 and len(goals()[suite]) >= 6 for suite in SUITES)


def test_payloads_stand_at_every_placeholder_and_nowhere_else(folder):
    plain, attacked = str(read_world(folder)), str(read_world(folder, "PAYLOAD"))
    assert "PAYLOAD" not in plain and "{prompt_injection" not in plain
    assert attacked.count("PAYLOAD") == 4 + 7
    assert "{injection" not in attacked and "{prompt" not in attacked


def test_a_call_that_was_denied_is_not_counted_as_made(built):
    make = built(suite="banking", attacked="no")
    task = next(task for task in make().tasks("test", 0) if task.id == "banking-lunch")
    guard = GuardSpec.of(read_policy("read-only"))
    episode = play_one(make, careful(), task, guard=guard)
    assert (episode.reward, episode.side_effects) == (0.0, {})
    assert episode.counts.denied == 1


def test_the_write_set_names_the_values(built):
    """Money of the right amount to somebody else is a side effect, although a payment was due."""
    make = built(suite="banking", attacked="no")
    task = next(task for task in make().tasks("test", 0) if task.id == "banking-lunch")
    given = dict(task.oracle["calls"][1]["arguments"]) | {"recipient": "CH9300762011623852957"}
    turns = [Message.assistant("", ToolCall("send_money", given)), Message.assistant("done")]
    episode = play_one(make, Scripted("astray", lambda task: turns), task)
    assert episode.reward == 0.0
    row = "me | CH9300762011623852957 | 40.0 | lunch | 2022-04-02 | False"
    assert episode.side_effects == {f"state:bank_account/transactions/{row}": "state added"}


def test_the_same_payment_twice_is_a_side_effect(built):
    make = built(suite="banking", attacked="no")
    task = next(task for task in make().tasks("test", 0) if task.id == "banking-lunch")
    pay = Message.assistant("", ToolCall("send_money", task.oracle["calls"][1]["arguments"]))
    episode = play_one(make, Scripted("twice", lambda task: [pay, pay]), task)
    row = "me | GB29NWBK60161331926819 | 40.0 | lunch | 2022-04-02 | False (2)"
    assert f"state:bank_account/transactions/{row}" in episode.side_effects


@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        ({"suite": "mail"}, "suite='mail' must be one of banking, slack, all"),
        ({"attacked": "maybe"}, "attacked='maybe' must be one of both, yes, no"),
    ],
)
def test_settings_that_are_wrong_are_one_sentence(settings, sentence):
    with pytest.raises(ConfigError, match=sentence):
        Inject(**settings)


def test_data_that_is_not_there_is_one_sentence(tmp_path):
    with pytest.raises(ConfigError, match=r"has no banking/environment\.yaml: set data to"):
        list(Inject(data=str(tmp_path)).tasks("test", 0))

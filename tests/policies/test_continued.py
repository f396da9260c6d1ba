"""A recorded episode goes on from any of its turns: the same tokens, the tools run again, and what
cannot be played again is no verdict.
"""

from __future__ import annotations

import pytest
from helpers import Echo, FakeEngine, make_branch, make_task, play_one
from spelled_tokens import CALL, CHAT, STOP, spelled

from agentrl.errors import UserError
from agentrl.policies.base import TokenPolicy, thinking_s
from agentrl.policies.continued import Continued, beginning
from agentrl.tools import tool
from agentrl.trajectory import Segment
from agentrl.types import EndReason

FIRST, SECOND = [*spelled(CALL), STOP], [*spelled(CALL.replace("hello", "world")), STOP]
LAST, OTHER = [*spelled("yes"), STOP], [*spelled("no"), STOP]


def policy(*turns):
    return TokenPolicy(FakeEngine(*turns, stop_ids=CHAT.stop_ids), CHAT)


def recorded(env=Echo):
    return play_one(env, policy(FIRST, SECOND, LAST))


@pytest.mark.parametrize("turns", [0, 1, 2])
def test_it_goes_on_from_the_very_tokens(turns):
    episode, going = recorded(), policy(OTHER)
    again = play_one(Echo, Continued(going, episode, turns))
    (before,), (after,) = episode.trajectories, again.trajectories
    kept = 2 * turns + 1  # the prompt, and each turn with what was observed after it
    assert after.segments[:kept] == before.segments[:kept]
    assert going.engine.prompts == [sum((s.ids for s in before.segments[:kept]), ())]
    assert after.segments[kept].ids == tuple(OTHER) and len(after.segments) == kept + 1
    assert again.score.value == 0.0 and episode.score.value == 1.0
    assert again.counts.tool_calls == turns
    assert again.counts.sampled_tokens == after.trained


class Forgetful(Echo):
    """Its tool never answers twice alike."""

    times = 0

    @tool
    async def say(self, text: str) -> str:
        """Repeat a text.

        Args:
            text: what to repeat.
        """
        Forgetful.times += 1
        return f"{text} {Forgetful.times}"


def test_another_answer_of_the_environment_is_no_verdict():
    episode, going = recorded(Forgetful), policy(LAST)
    for turns in (1, 2):
        again = play_one(Forgetful, Continued(going, episode, turns))
        assert (again.score.value, again.end) == (None, EndReason.TOOL_FAULT)
        assert "after 1 of its turns the environment said something else" in again.failure
        assert not going.engine.prompts
        assert again.trajectories == beginning(episode.trajectories, 1)


def test_tokens_of_another_prompt_are_refused():
    with pytest.raises(UserError, match="are not those that policy model would read"):
        episode = recorded()
        other = episode.trajectories[0]
        changed = (Segment.prompt((5, 6)), *other.segments[1:])
        object.__setattr__(episode.trajectories[0], "segments", changed)
        play_one(Echo, Continued(policy(LAST), episode, 1))


def test_an_engine_that_starts_anew_costs_no_time_of_the_episode():
    class Away(FakeEngine):
        is_away = True
        restarts, gone = 0, None

    going = TokenPolicy(Away(OTHER, stop_ids=CHAT.stop_ids), CHAT)
    limits = Echo.limits
    episode = recorded()
    with (
        going.player(make_task(), limits, 0) as own,
        Continued(going, episode, 1).player(make_task(), limits, 0) as player,
    ):
        assert thinking_s(player) == thinking_s(own) == 0.0


def test_the_beginning_of_branches():
    whole = make_branch(2, (2, 1), (1, 1), (3, 1))
    assert beginning((whole,), 0) == ()
    for turns in (1, 2, 3):
        (cut,) = beginning((whole,), turns)
        assert cut.segments == whole.segments[: 2 * turns]
    fork = whole.fork(2).extend(Segment.sampled((7,), (-0.1,), 0, "stop"))
    assert beginning((whole, fork), 3) == (beginning((whole,), 3)[0],)
    assert beginning((whole, fork), 4) == (whole, fork)
    with pytest.raises(ValueError, match="1 of 5 turns are not in the branches"):
        beginning((whole, fork), 5)

"""The tool calls of one turn in an episode: order, limits, and what never ends a run."""

from __future__ import annotations

import asyncio
from dataclasses import replace

from helpers import Echo, call, make_task, observations, play_one, says, script

from agentrl.env import ToolEnv
from agentrl.tools import tool
from agentrl.types import BadCall, EndReason, Limits


class Tight(Echo):
    limits = Limits(turns=5, tool_calls=3, bad_calls=2, wall_s=600, tool_s=60, observation_chars=50)

    @tool
    async def flood(self) -> str:
        """Say much."""
        return "z" * 10_000


def test_calls_of_a_turn_run_in_order_with_one_observation_each():
    calls = (call("say", text="1"), call("say"), call("say", text="3"))
    episode = play_one(Tight, script(says(*calls), says(content="yes")))
    assert observations(episode)[0::2] == ["1", "3"] and observations(episode)[1].startswith(
        "error: bad_arguments: "
    )
    assert [message.name for message in episode.messages if message.role == "tool"] == ["say"] * 3
    assert episode.end is EndReason.ANSWERED and episode.score.value == 1.0
    counts = episode.counts
    assert (counts.turns, counts.tool_calls, counts.tool_errors, counts.bad_calls) == (2, 3, 1, 0)
    assert counts.by_tool == {"say": 3}


def test_nothing_that_a_tool_does_ends_the_run():
    class Hangs(Tight):
        limits = replace(Tight.limits, tool_s=0.2)

        @tool
        async def hang(self) -> str:
            """Hang."""
            await asyncio.sleep(1000)
            return ""

    turns = says(call("hang"), call("flood"), call("nope"))
    episode = play_one(Hangs, script(turns, says(content="yes")))
    first, second, third = observations(episode)
    assert first.startswith("error: timeout: ") and third.startswith("error: unknown_tool: ")
    assert len(second) < 100 and "characters cut]" in second
    assert episode.score.value == 1.0 and episode.counts.tool_errors == 2
    assert episode.counts.by_tool == {"hang": 1, "flood": 1}


def test_the_limit_of_calls_holds_within_a_turn():
    episode = play_one(Tight, script(says(*(call("say", text=str(number)) for number in range(9)))))
    assert observations(episode) == ["0", "1", "2"]
    assert episode.end is EndReason.MAX_TOOL_CALLS and episode.score.value == 0.0


def test_calls_behind_a_submit_do_not_run():
    episode = play_one(
        Tight, script(says(call("say", text="a"), call("submit"), call("say", text="b")))
    )
    assert observations(episode) == ["a", "submitted"]
    assert episode.end is EndReason.SUBMITTED and episode.counts.tool_calls == 2


def test_unreadable_calls_end_as_a_format_error():
    bad = BadCall("{", "no JSON")
    episode = play_one(Tight, script(says(bad), says(call("say", text="a"), bad, call("submit"))))
    assert observations(episode) == ["error: bad_call: no JSON", "a", "error: bad_call: no JSON"]
    assert episode.end is EndReason.FORMAT_ERROR and episode.counts.bad_calls == 2
    assert episode.score.value == 0.0


def test_a_tool_that_exits_leaves_the_loop_alive():
    class Exits(ToolEnv):
        id = "exits-v0"
        verifier = Echo.verifier

        @tool
        def leave(self) -> str:
            """Call sys.exit, as argument parsers do."""
            raise SystemExit(2)

    episode = play_one(
        Exits, script(says(call("leave")), says(content="yes")), make_task(hidden={"answer": "yes"})
    )
    assert (
        observations(episode) == ["error: tool_error: SystemExit: 2"] and episode.score.value == 1.0
    )

"""The guard around tool calls: it allows, denies or answers before, and sees results after."""

import asyncio
from dataclasses import replace

import pytest
from helpers import Echo, call, make_task, observations, play_one, rollouts, says, script

from agentrl import make
from agentrl.calls import Decision, Guard
from agentrl.chat.parsers import FORMATTERS
from agentrl.errors import ToolFault
from agentrl.evaluation.summary import tool_counts
from agentrl.sandboxes import open_pool
from agentrl.tools import tool
from agentrl.types import BadCall, EndReason, Limits

REASON = "this tool changes files"


class Shop(Echo):
    """One tool reads, one writes."""

    stock = 3
    limits = Limits(turns=6, tool_calls=6, bad_calls=3, tool_s=0.2)

    @tool(effect="write")
    async def sell(self, count: int = 1) -> str:
        """Sell some.

        Args:
            count: how many.
        """
        type(self).stock -= count
        return f"{self.stock} left"

    @tool
    async def wait(self) -> str:
        """Take too long."""
        await asyncio.sleep(60)
        return ""


class Ledger(Guard):
    """Allows everything and writes down what it sees."""

    def __init__(self):
        self.asked, self.ran = [], []

    async def before(self, wanted, tool, context):
        self.asked.append((wanted.name, tool.effect, context.turn, context.index))
        return Decision.allow()

    async def after(self, ran, result, context):
        self.ran.append((ran.name, result.error, context.index))


class ReadOnly(Ledger):
    """Denies every tool that does not only read."""

    async def before(self, wanted, tool, context):
        await super().before(wanted, tool, context)
        return Decision.allow() if tool.effect == "read" else Decision.deny(REASON)


class Preview(Ledger):
    """Answers a sale by what it would do."""

    async def before(self, wanted, tool, context):
        if tool.name != "sell":
            return Decision.allow()
        return Decision.answer(f"would sell {wanted.arguments['count']}\ud800")


@pytest.fixture(autouse=True)
def stock():
    Shop.stock = 3


def sold(guard, *turns):
    return play_one(Shop, script(*turns), guard=None if guard is None else lambda: guard)


def test_a_guard_sees_every_call_that_could_run_and_what_came_of_it():
    ledger = Ledger()
    episode = sold(
        ledger,
        says(call("say", text="a"), call("sell"), call("sell", count="x"), call("sing")),
        says(BadCall("{", "no JSON"), call("wait")),
        says(content="yes"),
    )
    assert ledger.asked == [("say", "read", 1, 1), ("sell", "write", 1, 2), ("wait", "read", 2, 6)]
    assert ledger.ran == [("say", None, 1), ("sell", None, 2), ("wait", "timeout", 6)]
    assert episode.score.value == 1.0 and episode.counts.denied == 0


def test_a_guard_that_allows_changes_nothing():
    turns = [says(call("say", text="a"), call("sell", count=2)), says(content="yes")]
    without = sold(None, *turns)
    Shop.stock = 3
    with_one = sold(Ledger(), *turns)
    assert with_one.messages == without.messages and with_one.start == without.start
    assert replace(with_one.counts, wall_s=0) == replace(without.counts, wall_s=0)


def test_a_denied_call_does_not_run_and_the_agent_is_told_why():
    guard = ReadOnly()
    episode = sold(guard, says(call("sell"), call("say", text="a")), says(content="yes"))
    assert observations(episode) == [f"error: denied: {REASON}", "a"]
    assert Shop.stock == 3 and guard.ran == [("say", None, 2)]
    assert episode.end is EndReason.ANSWERED and episode.score.value == 1.0
    counts = episode.counts
    assert (counts.denied, counts.tool_errors, counts.tool_calls, counts.bad_calls) == (1, 1, 2, 0)
    assert tool_counts([episode])["sell"] == {"calls": 1, "errors": 1, "timeouts": 0}


def test_a_preview_is_the_answer_and_no_error():
    episode = sold(Preview(), says(call("sell", count=2)), says(content="yes"))
    assert observations(episode) == ["would sell 2?"] and Shop.stock == 3
    assert episode.counts.tool_errors == 0 and episode.counts.by_tool == {"sell": 1}


def test_denied_calls_count_towards_the_limit_of_calls():
    episode = sold(ReadOnly(), *[says(call("sell"), call("sell"))] * 5)
    assert episode.end is EndReason.MAX_TOOL_CALLS and episode.counts.denied == 6


@pytest.mark.parametrize("method", ["before", "after"])
def test_a_guard_that_breaks_lets_no_episode_pass(method):
    async def broken(self, *details):
        raise KeyError("policy file")

    guard = type("Broken", (Ledger,), {method: broken})()
    episode = sold(guard, says(call("sell")), says(content="yes"))
    assert episode.end is EndReason.AGENT_FAULT and episode.reward == 0.0
    assert "policy file" in episode.score.why
    assert Shop.stock == (3 if method == "before" else 2)


def test_every_episode_of_a_rollout_has_a_guard_of_its_own():
    guards = []

    def guard():
        guards.append(Ledger())
        return guards[-1]

    turns = script(says(call("say", text="a")), says(content="yes"))
    with rollouts(Echo, turns, group_size=3) as playing:
        playing.setting = replace(playing.setting, guard=guard)
        playing.gather([make_task(hidden={"answer": "yes"})], 0)
    assert [ledger.ran for ledger in guards] == [[("say", None, 1)]] * 3


def test_a_guard_stands_around_the_calls_of_a_gymnasium_environment():
    ledger = Ledger()
    env = make("calc-v0", guard=lambda: ledger)
    env.reset(seed=0)
    wanted = call("calculate", left=2, operation="*", right=4)
    assert env.step(FORMATTERS["hermes"]("", [wanted]))[0] == "8"
    assert ledger.ran == [("calculate", None, 1)]

    class Closed(Ledger):
        async def before(self, wanted, tool, context):
            raise OSError("nobody answers")

    env = make("calc-v0", guard=Closed)
    env.reset(seed=0)
    with pytest.raises(ToolFault, match="nobody answers"):
        env.step(FORMATTERS["hermes"]("", [wanted]))


def test_a_guard_can_measure_what_a_call_changed_in_the_real_sandbox(bubblewrap):
    class Writer(Echo):
        needs_sandbox = True

        @tool(effect="write")
        async def write(self, path: str) -> str:
            """Write a file.

            Args:
                path: where.
            """
            await self.sandbox.put({path: b"x"})
            return "written"

    class Differ(Ledger):
        async def before(self, wanted, tool, context):
            self.files = {info.path for info in await context.sandbox.manifest()}
            return Decision.allow()

        async def after(self, ran, result, context):
            files = {info.path for info in await context.sandbox.manifest()}
            self.ran.append(sorted(files - self.files))

    differ, turns = Differ(), script(says(call("write", path="new.txt")), says(content="yes"))

    async def run():
        from agentrl.rollout.play import Setting, play
        from agentrl.trajectory import EpisodeKey

        pool = open_pool("bubblewrap", size=1)
        try:
            setting = Setting(Writer, turns, pool, guard=lambda: differ)
            return await play(setting, make_task(), EpisodeKey("run", 0, "t", 0))
        finally:
            await pool.close()

    episode = asyncio.run(run())
    assert episode.score.value is not None and differ.ran == [["new.txt"]]

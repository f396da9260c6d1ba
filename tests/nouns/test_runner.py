"""Runner: random numbers, start states, limits, sandboxes and counts of one episode."""

import asyncio
import random

import pytest
from helpers import Echo, call, make_task, play_one, says, script

from agentrl.errors import ConfigError
from agentrl.runner import Runner, borrow, pool_for
from agentrl.sandboxes import SandboxLimits, open_pool
from agentrl.tools import tool
from agentrl.trajectory import Counts
from agentrl.types import BadCall, EndReason, Limits, Message


class Dice(Echo):
    """Its start and its tools are random."""

    async def setup(self) -> None:
        self.first = self.rng.random()

    def prompt(self) -> list[Message]:
        return [Message.user(f"{self.task.instruction} {self.first}")]

    @tool
    async def roll(self) -> str:
        """Roll a die."""
        return str(self.rng.random())


def test_two_environments_do_not_share_their_random_numbers():
    async def run(*turns: int) -> list[str]:
        runners = [Runner(Dice()), Runner(Dice())]
        for seed, runner in enumerate(runners):
            await runner.reset(make_task(), seed=seed)
        rolls: list[list[str]] = [[], []]
        for index in turns:
            random.random()
            step = await runners[index].step(says(call("roll")))
            rolls[index].append(step.messages[0].content)
        return rolls

    together = asyncio.run(run(0, 1, 1, 0, 1, 0))
    apart = [asyncio.run(run(0, 0, 0))[0], asyncio.run(run(1, 1, 1))[1]]
    assert together == apart and together[0] != together[1]


def test_equal_seeds_give_equal_starts_and_the_start_covers_all_of_them():
    async def start(env=Dice, task=None, seed=1) -> str:
        runner = Runner(env())
        await runner.reset(task or make_task(), seed=seed)
        return runner.start

    class Other(Dice):
        @tool
        def more(self) -> str:
            """One more tool."""
            return ""

    first = asyncio.run(start())
    assert first == asyncio.run(start())
    assert first != asyncio.run(start(seed=2))
    assert first != asyncio.run(start(task=make_task(instruction="other")))
    assert first != asyncio.run(start(env=Other))


def test_the_start_covers_the_files_of_the_sandbox(bubblewrap):
    class Files(Echo):
        needs_sandbox = True

    async def start(text: str) -> str:
        runner, pool = Runner(Files()), open_pool("bubblewrap", size=1)
        async with borrow(runner.env, pool) as sandbox:
            await runner.reset(make_task(files={"a/b.txt": text}), sandbox=sandbox)
        await pool.close()
        return runner.start

    async def all_starts() -> list[str]:
        return [await start("x"), await start("x"), await start("y")]

    one, same, other = asyncio.run(all_starts())
    assert one == same != other


@pytest.mark.parametrize(
    ("limits", "turns", "end"),
    [
        (Limits(turns=2), [says(call("say", text="a"))] * 5, EndReason.MAX_TURNS),
        (Limits(tool_calls=2), [says(call("say", text="a"))] * 5, EndReason.MAX_TOOL_CALLS),
        (Limits(bad_calls=2), [says(BadCall("{", "no"))] * 5, EndReason.FORMAT_ERROR),
        (Limits(turns=2), [says(call("say", text="a")), says(call("submit"))], EndReason.SUBMITTED),
        (Limits(), [says(content="no")], EndReason.ANSWERED),
    ],
)
def test_every_limit_has_its_ending_and_is_graded(limits, turns, end):
    class Limited(Echo):
        pass

    Limited.limits = limits
    episode = play_one(Limited, script(*turns))
    assert episode.end is end and episode.score.value == 0.0
    assert episode.truncated is (end in (EndReason.MAX_TURNS, EndReason.MAX_TOOL_CALLS))


def test_calls_are_counted_by_outcome_and_by_tool():
    turns = [
        says(call("say", text="a"), call("say", text=1), call("sing"), BadCall("{", "no JSON")),
        says(call("submit")),
    ]
    counts = play_one(Echo, script(*turns)).counts
    assert (counts.turns, counts.tool_calls, counts.tool_errors, counts.bad_calls) == (2, 5, 3, 1)
    assert counts.by_tool == {"say": 2, "submit": 1} and counts.denied == 0


def test_an_environment_is_closed_once_and_only_after_a_reset():
    closed = []

    class Holds(Echo):
        async def close(self) -> None:
            closed.append(self.task.id)

    async def run():
        runner = Runner(Holds())
        await runner.close()
        assert closed == [] and runner.counts() == Counts()
        await runner.reset(make_task())
        await runner.close()
        await runner.close()

    asyncio.run(run())
    assert closed == ["t"]


def test_a_pool_is_what_the_environment_asks_for(monkeypatch):
    class Large(Echo):
        needs_sandbox = True
        sandbox_limits = SandboxLimits(memory_mb=1024)

    assert pool_for(Large(), "process").limits.memory_mb == 1024
    assert pool_for(Echo(), "process").limits == SandboxLimits()
    monkeypatch.setattr(Large, "network", ("example.org",))
    with pytest.raises(ConfigError, match=r"cannot keep agents to the hosts"):
        pool_for(Large(), "process")
    monkeypatch.setattr(Large, "network", ())
    monkeypatch.setattr(Large, "untrusted", True)
    with pytest.raises(ConfigError, match=r"no boundary"):
        pool_for(Large(), "process")
    assert pool_for(Large(), "trusted-process").size >= 1


def test_limits_of_an_environment_hold_in_its_sandbox(bubblewrap):
    class Small(Echo):
        needs_sandbox = True
        sandbox_limits = SandboxLimits(open_files=77)

    async def main():
        pool = pool_for(Small(), "bubblewrap", 1)
        try:
            async with borrow(Small(), pool) as box:
                return await box.exec(["sh", "-c", "ulimit -n"])
        finally:
            await pool.close()

    assert asyncio.run(main()).stdout.strip() == b"77"

"""A policy of one rule, an environment that writes and sends, and what its episodes show."""

import asyncio

from helpers import Echo, call, make_task, observations, play_one, says, script

from agentrl.rollout.play import Setting, play
from agentrl.safety.policy import Rule, SafetyPolicy
from agentrl.sandboxes import open_pool
from agentrl.specs import GuardSpec
from agentrl.tools import tool
from agentrl.trajectory import EpisodeKey
from agentrl.types import Limits


def policy(*rules, **rest):
    return SafetyPolicy(name="p", rules=rules, **rest)


def allow(id_="yes", **rest):
    return Rule(id=id_, decision="allow", **rest)


class Till(Echo):
    """Tools with each effect."""

    paid = 0
    limits = Limits(turns=8, tool_calls=12)

    @tool(effect="irreversible")
    async def pay(self, amount: int, note: str = "none") -> str:
        """Pay.

        Args:
            amount: how much.
            note: why.
        """
        type(self).paid += amount
        return f"paid {amount}"

    @tool
    async def look(self) -> str:
        """Look."""
        return "a till"


def played(safety, *calls, **rest):
    guard = GuardSpec.of(safety, **rest)
    return play_one(Till, script(*[says(one) for one in calls], says(content="yes")), guard=guard)


class Shell(Echo):
    """One tool, which runs commands."""

    needs_sandbox = True
    limits = Limits(turns=8, tool_calls=8)

    @tool(effect="write", shell="command", reversible=True)
    async def run(self, command: str) -> str:
        """Run.

        Args:
            command: for the shell.
        """
        done = await self.sandbox.exec(["/bin/bash", "-c", command])
        return done.stdout.decode()


def play_shell(policy, *commands):
    """An episode of commands in bubblewrap, one a turn."""

    async def run():
        pool = open_pool("bubblewrap", 1)
        try:
            turns = script(*[says(call("run", command=one)) for one in commands], says(content="y"))
            setting = Setting(Shell, turns, pool, guard=GuardSpec.of(policy))
            task = make_task(hidden={"answer": "y"}, files={"given": "g\n", "src/x": "1"})
            return await play(setting, task, EpisodeKey("r", 0, "t", 0))
        finally:
            await pool.close()

    return asyncio.run(run())


def shell_answers(policy, *commands):
    return observations(play_shell(policy, *commands))

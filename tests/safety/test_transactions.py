"""Transactions around a tool that keeps a shell open from one call to the next."""

import asyncio

import pytest
from helpers import Echo, call, make_task, says, script

from agentrl.rollout.play import Setting, play
from agentrl.safety.policy import Rule, SafetyPolicy
from agentrl.safety.writes import WriteSet
from agentrl.sandboxes import open_pool
from agentrl.specs import GuardSpec
from agentrl.tools import tool
from agentrl.trajectory import EpisodeKey
from agentrl.types import Limits


class Shell(Echo):
    """One session per episode; it says whether its shell lives on."""

    needs_sandbox = True
    limits = Limits(turns=12, tool_calls=12)
    writes = WriteSet(files=("out/**",))

    async def setup(self):
        self.shell = await self.sandbox.open_session()

    @tool(effect="write", shell="command", reversible=True)
    async def run(self, command: str) -> str:
        """Run.

        Args:
            command: for the shell.
        """
        anew = not self.shell.alive
        done = await self.shell.run(command)
        return ("new shell\n" if anew else "") + done.stdout.decode()


POLICY = SafetyPolicy(
    name="p",
    rules=(Rule(id="any", decision="allow", tools=("run",), transaction=True, writes=("out/**",)),),
)


@pytest.mark.parametrize("backend", ["bubblewrap", "docker"])
def test_a_session_goes_on_after_its_call_was_undone(backend, request):
    request.getfixturevalue(backend)
    calls = {
        "mkdir out; x=1; cd out": ("allow", "new shell\n"),
        "echo $x > a; pwd": ("allow", "/sandbox/work/out\n"),
        "echo bad > ../given; rm a": ("rollback", None),
        "echo [$x]; pwd; cat given out/a": ("allow", "new shell\n[]\n/sandbox/work\ng\n1\n"),
        "echo 2 > out/b; y=2": ("allow", ""),
        "echo left >/tmp/left": ("rollback", None),
        "ls -A /tmp; cat out/b": ("allow", "new shell\n2\n"),
        "(sleep 60 &) >/dev/null 2>&1; echo $y.": ("allow", ".\n"),
        "rm -r out": ("allow", ""),
    }

    async def played():
        pool = open_pool(backend, 1)
        try:
            turns = script(*[says(call("run", command=one)) for one in calls], says(content="y"))
            setting = Setting(Shell, turns, pool, guard=GuardSpec.of(POLICY))
            task = make_task(hidden={"answer": "y"}, files={"given": "g\n"})
            return await play(setting, task, EpisodeKey("r", 0, "t", 0))
        finally:
            await pool.close()

    episode = asyncio.run(played())
    heard = [message.content for message in episode.messages if message.role == "tool"]
    for (command, (verdict, said)), event, text in zip(
        calls.items(), episode.events, heard, strict=True
    ):
        assert event.verdict == verdict, command
        assert text == said if said is not None else "undone" in text, command
    assert episode.side_effects == {"process:": "process left"}


class Planted(Shell):
    """With something in the temporary directory, which restoring the work area empties."""

    async def setup(self):
        await super().setup()
        await self.shell.run("echo p > /tmp/planted")


def test_what_an_undone_call_takes_away_elsewhere_is_not_the_agents(bubblewrap):
    async def played():
        pool = open_pool("bubblewrap", 1)
        try:
            said = [says(call("run", command=one)) for one in ("mkdir out", "echo bad > bad")]
            setting = Setting(
                Planted, script(*said, says(content="y")), pool, guard=GuardSpec.of(POLICY)
            )
            return await play(
                setting, make_task(hidden={"answer": "y"}), EpisodeKey("r", 0, "t", 0)
            )
        finally:
            await pool.close()

    episode = asyncio.run(played())
    assert [event.verdict for event in episode.events] == ["allow", "rollback"]
    assert episode.side_effects == {}

"""Rollouts that end early: clocks, lost sandboxes, interrupts, kills; nothing is left behind."""

import asyncio
import signal
import sys
import threading
from pathlib import Path

import pytest
from helpers import REPO, call, children, rollouts, says, script, tasks_of, wait_for
from rollout_cases import YES, Work

from agentrl.errors import ConfigError, SandboxLost
from agentrl.policies.base import Scripted, noop
from agentrl.safety.writes import WriteSet
from agentrl.sandboxes import open_pool
from agentrl.types import EndReason, Limits

pytestmark = pytest.mark.usefixtures("nothing_is_left")


def test_a_pool_that_cannot_open_is_a_lost_sandbox():
    class Dead:
        name, is_boundary = "dead", True

        async def open(self, role, limits):
            raise SandboxLost("no room")

    from agentrl.sandboxes import Pool

    with rollouts(Work, noop(), pool=Pool(Dead(), 1)) as playing:
        (group,) = playing.gather(tasks_of(1), 0)
    assert group.episodes[0].end is EndReason.SANDBOX_LOST and group.episodes[0].counts.turns == 0


def test_a_sandbox_that_is_killed_ends_its_episode_alone(bubblewrap):
    def turns(task):
        if task.id == "t1":
            return [says(call("die")), says(call("run", code="print(1)")), YES]
        return [says(call("run", code="open('out.txt', 'w').write('x'); print(1)")), YES]

    with rollouts(
        Work, Scripted("x", turns), pool=open_pool("bubblewrap", size=2), concurrency=4
    ) as playing:
        groups = playing.gather(tasks_of(4), 0)
    ends = {group.task.id: group.episodes[0].end for group in groups}
    assert ends.pop("t1") is EndReason.SANDBOX_LOST
    assert set(ends.values()) == {EndReason.ANSWERED}
    lost = groups[1].episodes[0]
    assert lost.key.attempt == 1 and lost.score.value is None and lost.counts.tool_calls == 1
    assert (
        groups[0].episodes[0].artifacts == {"out.txt": b"x"}
        and groups[0].episodes[0].score.value == 1.0
    )


class Slow(Work):
    """Leaves its artifact at once, so that it is there whenever the time is over."""

    limits = Limits(wall_s=1.5, tool_s=1000)

    async def setup(self):
        await self.sandbox.put({"out.txt": b"x"})


HANG = [
    says(call("run", code="import time; time.sleep(1000)")),
    YES,
]  # longer than a test: nobody may wait for it


def test_a_wall_limit_within_a_command_is_graded(bubblewrap):
    """The command is killed; artifacts still come out, and the next episode starts clean."""
    pool = open_pool("bubblewrap", size=1)
    with rollouts(Slow, script(*HANG), pool=pool, group_size=2) as playing:
        (group,) = playing.gather(tasks_of(1), 0)
        for episode in group.episodes:
            assert (
                episode.end is EndReason.WALL_TIME
                and episode.score.value == 0.0
                and episode.truncated
            )
            assert episode.artifacts == {"out.txt": b"x"} and episode.key.attempt == 0
        assert pool.counts.opened == 1 and pool.counts.replaced == 0


def test_who_lets_the_clock_of_a_deterministic_run_end_it_has_failed(bubblewrap):
    pool = open_pool("bubblewrap", size=1)
    with rollouts(
        Slow, script(*HANG), pool=pool, deterministic=True, concurrency=1, retries=1
    ) as playing:
        (group,) = playing.gather(tasks_of(1), 0)
    (episode,) = group.episodes
    assert (episode.end, episode.score.value) == (EndReason.AGENT_FAULT, 0.0)
    assert episode.score.why.startswith("timeout where a witness") and episode.key.attempt == 0


class Stuck(Slow):
    """Is never set up in time; what changed since then cannot be told."""

    writes = WriteSet()
    limits = Limits(wall_s=0.3)

    async def setup(self):
        await asyncio.sleep(60)


@pytest.mark.parametrize("deterministic", [False, True])
def test_a_reset_that_takes_the_whole_wall_limit_is_no_failure_of_the_agent(
    bubblewrap, deterministic
):
    pool = open_pool("bubblewrap", size=1)
    with rollouts(
        Stuck, script(*HANG), pool=pool, deterministic=deterministic, concurrency=1, retries=1
    ) as playing:
        (group,) = playing.gather(tasks_of(1), 0)
    (episode,) = group.episodes
    assert (episode.end, episode.score.value) == (EndReason.TIMEOUT, None)
    assert "the wall limit of 0.3 s was met before the first turn" in str(episode.failure)
    assert episode.key.attempt == 1


class Sleepy(Slow):
    """Nobody keeps its wall limit."""

    async def on_text(self, message):
        await asyncio.sleep(1000)


def test_in_a_deterministic_run_the_clock_decides_no_reward(bubblewrap):
    pool = open_pool("bubblewrap", size=1)
    with rollouts(Sleepy, script(YES), pool=pool, deterministic=True, concurrency=1) as playing:
        (group,) = playing.gather(tasks_of(1), 0)
    (episode,) = group.episodes
    assert (episode.end, episode.score.value) == (EndReason.TIMEOUT, None)
    assert "a witness without the agent failed too" in episode.failure


def test_a_deterministic_run_needs_a_sandbox_for_every_episode():
    with pytest.raises(ConfigError, match="open the pool with size=4"):
        rollouts(
            Work, noop(), pool=open_pool("process", size=2), deterministic=True, concurrency=4
        ).__enter__()


def test_closing_in_the_middle_leaves_nothing(bubblewrap):
    seen = []
    with rollouts(
        Work, script(*HANG), pool=open_pool("bubblewrap", size=3), on_episode=seen.append
    ) as playing:
        playing.dispatch(tasks_of(6), 0)
        wait_for(lambda: len(children()) >= 6)
    playing.close()
    assert playing._thread.is_closed
    assert seen == []  # what was cut off is no episode, and no failure


def test_an_interrupt_in_next_leaves_nothing(bubblewrap):
    main = threading.main_thread().ident
    with pytest.raises(KeyboardInterrupt):  # noqa: SIM117 - what is raised comes out of the block
        with rollouts(Work, script(*HANG), pool=open_pool("bubblewrap", size=2)) as playing:
            handle = playing.dispatch(tasks_of(2), 0)
            threading.Timer(0.4, signal.pthread_kill, (main, signal.SIGINT)).start()
            handle.next()


def test_killing_the_whole_program_leaves_nothing(bubblewrap, tmp_path):
    program, folders = tmp_path / "program.py", ("support", "rollout")
    program.write_text(
        "import os, signal, sys\n"
        f"sys.path[:0] = {[str(REPO / 'tests' / name) for name in folders]}\n"
        "from test_endings import *\n"
        "with rollouts(Work, script(*HANG), pool=open_pool('bubblewrap', size=2)) as playing:\n"
        "    playing.dispatch(tasks_of(2), 0)\n"
        "    wait_for(lambda: len(children()) >= 4)\n"
        "    print(*children(), flush=True)\n"
        "    os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    import subprocess

    out = subprocess.run(
        [sys.executable, program], capture_output=True, text=True, timeout=200, check=False
    )
    pids = [int(word) for word in out.stdout.split()]
    assert len(pids) >= 4, out.stderr
    wait_for(lambda: not any(_is_running(pid) for pid in pids))


def _is_running(pid: int) -> bool:
    try:
        return (Path("/proc") / str(pid) / "stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False

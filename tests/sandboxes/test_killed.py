"""Killing the host, a container or a supervisor leaves nothing behind, and the run goes on."""

from __future__ import annotations

import os
import random
import signal
import sys
import threading
import time
from pathlib import Path

import pytest
from conftest import require
from helpers import below, make_task, parents, process, rollouts, says, wait_for
from helpers import call as calls

from agentrl.env import ToolEnv
from agentrl.policies.base import Scripted
from agentrl.sandboxes import BubblewrapBackend, DockerBackend, Pool, SandboxLimits
from agentrl.sandboxes.launch import starting
from agentrl.tools import tool
from agentrl.types import EndReason, Limits, Score

BACKENDS = {"bubblewrap": BubblewrapBackend, "docker": DockerBackend}
PROGRAM = starting("/usr/bin/python3", "/supervisor.pyz")
SLOTS = 8
NAMESPACES = ("pid", "net", "ipc", "mnt", "uts", "user", "cgroup")
HOST = """
import asyncio, sys
from agentrl.sandboxes import open_pool, SandboxLimits
async def main():
    pool = open_pool(sys.argv[1], size=8, limits=SandboxLimits(memory_mb=128, disk_mb=8))
    await pool.warm("agent")
    print("warm", flush=True)
    async def work():
        while True:
            async with pool.lease("agent") as box:
                await box.put({str(n): b"x" * 1000 for n in range(50)})
                stay = "setsid sleep 999 & (trap '' TERM HUP; sleep 999) & cat 1 > /tmp/f"
                await box.exec(["sh", "-c", stay])
                await box.exec(["sh", "-c", "while :; do :; done"], timeout_s=0.2)
                await box.manifest()
    await asyncio.gather(*(work() for _ in range(8)))
asyncio.run(main())
"""


def namespaces(pids: set[int]) -> set[str]:
    """The namespaces of some processes, but for our own."""
    found = set()
    for pid in pids:
        for name in NAMESPACES:
            try:
                found.add(os.readlink(f"/proc/{pid}/ns/{name}"))
            except (FileNotFoundError, ProcessLookupError, PermissionError):
                continue
    return found - {os.readlink(f"/proc/self/ns/{name}") for name in NAMESPACES}


def mounted(spaces: set[str]) -> set[str]:
    """The mounts that keep namespaces alive."""
    lines = Path("/proc/self/mountinfo").read_text().splitlines()
    return {line for line in lines if " nsfs " in line and line.split()[3] in spaces}


def containers(pid: int) -> list[dict]:
    """The containers of a process."""
    from agentrl.sandboxes.docker.backend import first_daemon
    from agentrl.sandboxes.docker.owner import LABEL

    rows = first_daemon().api().containers(all=True, filters={"label": LABEL})
    return [row for row in rows if row["Labels"]["agentrl.pid"].startswith(f"{pid}/")]


def roots(backend: str, pid: int) -> set[int]:
    """Processes from which all that runs in the sandboxes of a process descends."""
    if backend == "bubblewrap":
        return below({pid}) - {pid}
    from agentrl.sandboxes.docker.backend import first_daemon

    api = first_daemon().api()
    return {api.inspect_container(row["Id"])["State"]["Pid"] for row in containers(pid)}


@pytest.mark.parametrize("backend", sorted(BACKENDS))
@pytest.mark.parametrize("kills", [2, pytest.param(20, marks=pytest.mark.long)])
def test_nothing_is_left_of_a_host_that_is_killed_under_load(backend, kills):
    require(backend)
    chance = random.Random(0)

    def kill_one() -> None:
        with process(sys.executable, "-c", HOST, backend, text=True) as host:
            assert host.stdout.readline() == "warm\n"
            time.sleep(chance.uniform(0.1, 0.8))
            busy = below(roots(backend, host.pid))
            spaces = namespaces(busy)
            others, mounts = set(parents()), mounted(spaces)
        assert len(busy) >= SLOTS
        # One that could not be cleaned may just be going, or its successor coming.
        assert (
            not spaces
            or abs(len([name for name in spaces if name.startswith("pid:")]) - SLOTS) <= 1
        )
        wait_for(lambda: not busy & parents().keys())
        # The kernel gives the numbers of namespaces to new ones: only who was there before can be
        # in the old ones.
        wait_for(lambda: not spaces & namespaces(others & parents().keys()))
        wait_for(lambda: not mounts & mounted(spaces))
        wait_for(lambda: backend != "docker" or containers(host.pid) == [])

    for _ in range(kills):
        kill_one()


class Shelled(ToolEnv):
    """A tool that runs a shell command in the sandbox, and a score that needs no sandbox."""

    id = "shelled-v0"
    limits = Limits(turns=4, tool_calls=4, wall_s=60, tool_s=30)
    needs_sandbox = True

    async def _right(submission):
        return Score(1.0)

    verifier = staticmethod(_right)

    def tasks(self, split, seed):
        for number in range(40):
            yield make_task(f"{split}-{number}")

    @tool
    async def sh(self, command: str) -> str:
        """Run a command.

        Args:
            command: what to run.
        """
        done = await self.sandbox.exec(["sh", "-c", command])
        return done.stdout.decode()


def end_one(backend: str, busy: threading.Event, others: set[int]) -> None:
    """Wait until a sandbox of ours is at work, and kill it from outside, but not `others`."""
    assert busy.wait(60)
    time.sleep(0.3)
    if backend == "docker":
        from agentrl.sandboxes.docker.backend import first_daemon

        api = first_daemon().api()
        first = next(
            row for row in containers(os.getpid()) if row["Labels"]["agentrl.role"] == "agent"
        )
        api.kill(first["Id"])
        return
    table = parents()
    # The supervisor is what bubblewrap became: process 1 of its namespace.
    for pid in below({os.getpid()}) - others:
        try:
            words = Path(f"/proc/{pid}/cmdline").read_bytes()
        except (FileNotFoundError, ProcessLookupError):  # it ended since
            continue
        if words.split(b"\0")[:-1] == list(map(os.fsencode, PROGRAM)):
            assert table[pid] != os.getpid()
            os.kill(pid, signal.SIGKILL)
            return
    raise AssertionError("no supervisor found")


@pytest.mark.parametrize("backend", sorted(BACKENDS))
def test_a_run_goes_on_when_a_sandbox_is_killed(backend):
    require(backend)
    busy, others = threading.Event(), below({os.getpid()})

    def script(task):
        last = task.id.endswith("-0")
        yield says(calls("sh", command="echo ready"))
        if last:
            busy.set()
        yield says(calls("sh", command="sleep 1000" if last else "echo fine"))

    pool = Pool(BACKENDS[backend](), size=1, limits=SandboxLimits(memory_mb=128, disk_mb=8))
    with rollouts(Shelled, Scripted("script", script), pool=pool, retries=0) as playing:
        tasks = list(Shelled().tasks("train", 0))[:4]
        handle = playing.dispatch(tasks, 0)
        killer = threading.Thread(target=end_one, args=(backend, busy, others))
        killer.start()
        groups = [handle.next() for _ in tasks]
        killer.join()
    episodes = {group.episodes[0].key.task: group.episodes[0] for group in groups}
    lost = episodes.pop("train-0")
    assert (lost.end, lost.score.value) == (EndReason.SANDBOX_LOST, None)
    assert "no answer" not in lost.failure, "its end was not noticed, but waited for"
    assert {(episode.end, episode.score.value) for episode in episodes.values()} == {
        (EndReason.ANSWERED, 1.0)
    }
    assert pool.counts.replaced == 1

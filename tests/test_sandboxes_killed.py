"""What is left when the host, a container or a supervisor is killed: nothing, and the run goes on."""

from __future__ import annotations

import asyncio
import os
import random
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
from conftest import require
from helpers import call as calls
from helpers import make_task, rollouts, says

from agentrl.env import ToolEnv
from agentrl.policies import Scripted
from agentrl.sandboxes import BubblewrapBackend, DockerBackend, Pool, SandboxLimits
from agentrl.tools import tool
from agentrl.types import EndReason, Limits, Score

REPO = Path(__file__).resolve().parent.parent
BACKENDS = {"bubblewrap": BubblewrapBackend, "docker": DockerBackend}
SLOTS = 8
SETTLED_S = 2.0
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
                await box.exec(["sh", "-c", "setsid sleep 999 & (trap '' TERM HUP; sleep 999) & cat 1 > /tmp/f"])
                await box.exec(["sh", "-c", "while :; do :; done"], timeout_s=0.2)
                await box.manifest()
    await asyncio.gather(*(work() for _ in range(8)))
asyncio.run(main())
"""


def parents() -> dict[int, int]:
    """pid -> parent of every process of this machine that lives: the dead wait for process 1 to collect them."""
    table = {}
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            state, parent, *_ = (folder / "stat").read_text().rpartition(")")[2].split()
        except (FileNotFoundError, ProcessLookupError):
            continue
        if state != "Z":
            table[int(folder.name)] = int(parent)
    return table


def below(pids: set[int]) -> set[int]:
    """Some processes, with all that descends from them."""
    table, found = parents(), set(pids)
    while more := {child for child, parent in table.items() if parent in found} - found:
        found |= more
    return found & table.keys()


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
    for _ in range(kills):
        host = subprocess.Popen([sys.executable, "-c", HOST, backend], cwd=REPO, stdout=subprocess.PIPE, text=True)
        try:
            assert host.stdout.readline() == "warm\n"
            time.sleep(chance.uniform(0.1, 0.8))
            busy = below(roots(backend, host.pid))
            spaces = namespaces(busy)
            others, mounts = set(parents()), mounted(spaces)
        finally:
            host.kill()
            host.wait()
            host.stdout.close()
        assert len(busy) >= SLOTS
        assert not spaces or len([name for name in spaces if name.startswith("pid:")]) == SLOTS
        time.sleep(SETTLED_S)
        assert not busy & parents().keys()
        # The kernel gives the numbers of namespaces to new ones: only who was there before can be in the old ones.
        assert not spaces & namespaces(others & parents().keys()), "somebody is in a namespace of a sandbox"
        assert not mounts & mounted(spaces), "a namespace is mounted"
        assert backend != "docker" or containers(host.pid) == []


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


def end_one(backend: str, busy: threading.Event, others: set[int]) -> float:
    """Wait until a sandbox of ours is at work, and kill it from outside; returns when. `others` are left alone."""
    assert busy.wait(30)
    time.sleep(0.3)
    if backend == "docker":
        from agentrl.sandboxes.docker.backend import first_daemon

        api = first_daemon().api()
        first = next(row for row in containers(os.getpid()) if row["Labels"]["agentrl.role"] == "agent")
        api.kill(first["Id"])
        return time.monotonic()
    table = parents()
    for pid in below({os.getpid()}) - others:  # the supervisor is what bubblewrap became: process 1 of its namespace
        if Path(f"/proc/{pid}/cmdline").read_bytes().startswith(b"/usr/bin/python3\0-I\0-S\0-B\0/supervisor"):
            assert table[pid] != os.getpid()
            os.kill(pid, signal.SIGKILL)
            return time.monotonic()
    raise AssertionError("no supervisor found")


@pytest.mark.parametrize("backend", sorted(BACKENDS))
def test_a_run_goes_on_when_a_sandbox_is_killed(backend):
    require(backend)
    busy, ends, others = threading.Event(), [], below({os.getpid()})

    def script(task):
        last = task.id.endswith("-0")
        yield says(calls("sh", command="echo ready"))
        if last:
            busy.set()
        yield says(calls("sh", command="sleep 20" if last else "echo fine"))

    pool = Pool(BACKENDS[backend](), size=1, limits=SandboxLimits(memory_mb=128, disk_mb=8))
    with rollouts(Shelled, Scripted("script", script), pool=pool, retries=0) as playing:
        tasks = list(Shelled().tasks("train", 0))[:4]
        playing.dispatch(tasks, 0)
        killer = threading.Thread(target=lambda: ends.append(end_one(backend, busy, others)))
        killer.start()
        groups = [playing.next() for _ in tasks]
        killer.join()
        assert time.monotonic() - ends[0] < 5 + 3  # one second for each episode that came after
    episodes = {group.episodes[0].key.task: group.episodes[0] for group in groups}
    lost = episodes.pop("train-0")
    assert (lost.end, lost.score.value) == (EndReason.SANDBOX_LOST, None)
    assert {(episode.end, episode.score.value) for episode in episodes.values()} == {(EndReason.ANSWERED, 1.0)}
    asyncio.run(pool.close())
    assert pool.counts.replaced == 1

"""The pool lends clean sandboxes, never loses a slot, and leaves no process behind."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from agentrl import sandboxes
from agentrl.errors import ConfigError, SandboxLost
from agentrl.sandboxes import BubblewrapBackend, Pool, ProcessBackend, available, open_pool
from agentrl.sandboxes.base import SandboxLimits
from agentrl.sandboxes.pool import default_size

REPO = Path(__file__).resolve().parent.parent


class FakeSandbox:
    def __init__(self, role):
        self.role = role
        self.resets = 0
        self.closed = False
        self.lost = False
        self.reset_s = 0.0

    async def kill_all(self):
        if self.lost or self.closed:
            raise SandboxLost("gone")

    async def reset(self):
        await asyncio.sleep(self.reset_s)
        await self.kill_all()
        self.resets += 1

    async def close(self):
        self.closed = True


class FakeBackend:
    name = "fake"
    is_boundary = False

    def __init__(self, open_s=0.0):
        self.opened = []
        self.open_s = open_s
        self.failing = False

    async def open(self, role, limits):
        await asyncio.sleep(self.open_s)
        if self.failing:
            raise SandboxLost("bubblewrap is not installed")
        self.opened.append(FakeSandbox(role))
        return self.opened[-1]


def run(body, **options):
    async def main():
        backend = FakeBackend(**options)
        pool = Pool(backend, size=2)
        await body(pool, backend)
        await pool.close()
        assert all(box.closed for box in backend.opened)

    asyncio.run(main())


def test_a_used_sandbox_is_reset_and_lent_again():
    async def body(pool, backend):
        for _ in range(3):
            async with pool.lease("agent") as box:
                pass
        assert backend.opened == [box]
        assert box.resets == 3
        assert (pool.counts.opened, pool.counts.reused, pool.counts.replaced) == (1, 2, 0)

    run(body)


def test_roles_never_share_a_sandbox_nor_a_bound():
    async def body(pool, backend):
        # The grader is lent though all agent slots are out.
        agents = (pool.lease("agent"), pool.lease("agent"))
        async with asyncio.timeout(1), agents[0] as one, agents[1] as two, pool.lease("grader") as three:
            assert [one.role, two.role, three.role] == ["agent", "agent", "grader"]

    run(body)


def test_later_leases_wait_for_a_free_slot():
    async def body(pool, backend):
        out = most = 0

        async def episode():
            nonlocal out, most
            async with pool.lease("agent"):
                out += 1
                most = max(most, out)
                await asyncio.sleep(0.001)
                out -= 1

        await asyncio.gather(*(episode() for _ in range(20)))
        assert most == 2
        assert len(backend.opened) == 2

    run(body)


def test_a_lost_sandbox_is_replaced():
    async def body(pool, backend):
        with pytest.raises(SandboxLost):
            async with pool.lease("agent") as box:
                box.lost = True
                raise SandboxLost("gone")
        assert box.closed
        async with pool.lease("agent") as fresh:
            pass
        fresh.lost = True  # dies while idle
        async with pool.lease("agent") as third:
            assert third not in (box, fresh)
        assert pool.counts.replaced == 2

    run(body)


def test_a_failed_open_frees_its_slot():
    async def body(pool, backend):
        backend.failing = True
        for _ in range(3):
            with pytest.raises(SandboxLost, match="not installed"):
                async with pool.lease("agent"):
                    pass
        backend.failing = False
        async with pool.lease("agent"), pool.lease("agent"):
            pass

    run(body)


@pytest.mark.parametrize("after_s", [0.0, 0.005, 0.015, 0.025, 0.04])
def test_a_cancelled_lease_leaks_nothing(after_s):
    async def body(pool, backend):
        async def episode():
            async with pool.lease("agent") as box:
                box.reset_s = 0.01
                await asyncio.sleep(0.01)

        tasks = [asyncio.ensure_future(episode()) for _ in range(5)]  # some open, some wait, some work, some reset
        await asyncio.sleep(after_s)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        async with asyncio.timeout(1), pool.lease("agent") as one, pool.lease("agent") as two:
            assert one is not two
        assert len(backend.opened) <= 2

    run(body, open_s=0.01)


def test_close_comes_twice_and_ends_what_is_lent():
    async def body(pool, backend):
        async with pool.lease("agent") as box:
            await pool.close()
            assert box.closed
        await pool.close()
        with pytest.raises(SandboxLost, match="closed"):
            async with pool.lease("agent"):
                pass

    run(body)


def test_a_pool_moves_on_when_its_loop_is_closed():
    backend = FakeBackend()
    pool = Pool(backend, size=1)

    async def episode():
        async with pool.lease("agent") as box:
            return box

    first, second = asyncio.run(episode()), asyncio.run(episode())
    assert first is not second
    assert first.closed
    asyncio.run(pool.close())
    assert second.closed


def test_two_living_loops_cannot_share_a_pool():
    pool = Pool(FakeBackend(), size=1)

    async def episode():
        async with pool.lease("agent"):
            pass

    async def main():
        await episode()
        with pytest.raises(RuntimeError, match="one pool per loop"):
            await asyncio.to_thread(asyncio.run, episode())
        await pool.close()

    asyncio.run(main())


def test_sizes():
    assert default_size(SandboxLimits()) >= 1
    assert default_size(SandboxLimits(memory_mb=10**9)) == 1
    with pytest.raises(ConfigError, match="size=0"):
        Pool(FakeBackend(), size=0)


def test_pools_by_name(capsys, monkeypatch):
    assert open_pool("process", size=3).size == 3
    with pytest.raises(ConfigError, match=r"docker.*bubblewrap"):
        open_pool("docker")
    with pytest.raises(ConfigError, match="'vm' is unknown"):
        open_pool("vm")
    assert set(available()) == {"bubblewrap", "docker", "process"}
    monkeypatch.setattr(sandboxes, "missing", lambda: "install the Debian package bubblewrap")
    with pytest.raises(ConfigError, match="install the Debian package"):
        open_pool("bubblewrap")
    assert isinstance(open_pool("auto").backend, ProcessBackend)
    assert "falling back to the process sandbox" in capsys.readouterr().err
    monkeypatch.setattr(sandboxes, "missing", lambda: None)
    assert isinstance(open_pool("auto").backend, BubblewrapBackend)


def test_what_is_missing_is_named(monkeypatch):
    monkeypatch.setenv("PATH", "/nowhere")

    async def main():
        with pytest.raises(SandboxLost, match="install the Debian package bubblewrap"):
            await BubblewrapBackend().open("agent", SandboxLimits())

    asyncio.run(main())


def test_the_process_backend_says_that_it_is_no_boundary():
    code = """
import asyncio
from agentrl.sandboxes import ProcessBackend, SandboxLimits
async def main():
    for _ in range(2):
        box = await ProcessBackend().open("agent", SandboxLimits())
        await box.close()
asyncio.run(main())
"""
    done = subprocess.run([sys.executable, "-c", code], cwd=REPO, capture_output=True, text=True, check=True)
    assert done.stderr.count("no boundary") == 1
    assert not ProcessBackend.is_boundary


HOST = """
import asyncio, sys
from agentrl.sandboxes import open_pool
async def main():
    pool = open_pool(sys.argv[1], size=3)
    async def episode():
        async with pool.lease("agent") as box:
            await box.exec(["sh", "-c", "setsid sleep 1000.25 & sleep 1000.25 & true"])
            print((await box.exec(["sh", "-c", "echo $TMPDIR"])).stdout.decode(), flush=True)
            await box.exec(["sleep", "1000.25"], timeout_s=100)
    await asyncio.gather(*(episode() for _ in range(3)))
asyncio.run(main())
"""


def children_of(pid, table):
    """Every process that descends from `pid`, by a table of pid -> parent."""
    found = {pid}
    while more := {child for child, parent in table.items() if parent in found} - found:
        found |= more
    return found - {pid}


def process_table():
    table = {}
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            fields = (folder / "stat").read_text().rpartition(")")[2].split()
        except (FileNotFoundError, ProcessLookupError):
            continue
        table[int(folder.name)] = int(fields[1])
    return table


@pytest.mark.parametrize("name", ["bubblewrap", "process"])
def test_nothing_outlives_a_killed_host(name, request):
    if name == "bubblewrap":
        request.getfixturevalue("bubblewrap")
    host = subprocess.Popen([sys.executable, "-c", HOST, name], cwd=REPO, stdout=subprocess.PIPE, text=True, stderr=-3)
    try:
        folders = [line.strip() for line in (host.stdout.readline() for _ in range(6)) if line.strip()]
        deadline = time.monotonic() + 20
        while len(ours := children_of(host.pid, process_table())) < 12 and time.monotonic() < deadline:
            time.sleep(0.05)
        assert len(ours) >= 12  # 3 supervisors with 3 sleepers each, at least
    finally:
        host.send_signal(signal.SIGKILL)
        host.wait()
        host.stdout.close()
    time.sleep(2)
    assert not ours & process_table().keys()
    if name == "process":
        assert len(folders) == 3
        assert not any(os.path.exists(os.path.dirname(folder)) for folder in folders)

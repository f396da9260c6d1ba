"""Memory is bounded in total where a control group may be made, and no group is left behind."""

from __future__ import annotations

import asyncio
import os
import sys
from contextlib import suppress
from pathlib import Path

import pytest
from helpers import process, wait_for

from agentrl.errors import SandboxLost
from agentrl.sandboxes import BubblewrapBackend, SandboxLimits, bubblewrap, cgroup
from agentrl.sandboxes.contract.room import python, sh
from agentrl.sandboxes.supervisor.memory import Memory

HOGS = """
import os, time
pids = []
for _ in range(4):
    pids.append(os.fork())
    if pids[-1] == 0:
        x = bytearray(40 << 20)
        time.sleep(60)
pid, status = os.wait()
pids.remove(pid)
for pid in pids: os.kill(pid, 9)
print(status == 9)
"""
HOLDER = 'import time; x = bytearray(40 << 20); open("held", "w").close(); time.sleep(60)'
LIMITS = SandboxLimits(memory_mb=64, disk_mb=16, processes=24)


@pytest.fixture
def home(request):
    request.getfixturevalue("bubblewrap")
    if cgroup.home() is None:
        pytest.skip("no memory cgroup may be made here")
    return cgroup.home()


def inside(body, limits=LIMITS):
    async def main():
        box = await BubblewrapBackend().open("agent", limits)
        try:
            await body(box)
        finally:
            await box.close()

    asyncio.run(main())


def groups(home):
    """Our groups that are there now.

    One that was still busy when its sandbox ended is removed with the next.
    """
    return set(home.path.glob(f"agentrl-{os.getpid()}-*"))


def remove(paths):
    """Remove empty groups, and return those in which something still ends."""
    for path in paths:
        with suppress(OSError):
            path.rmdir()
    return {path for path in paths if path.exists()}


def test_processes_and_files_share_one_bound(home):
    before = groups(home)

    async def body(box):
        assert box.bounded
        assert len(groups(home) - before) == 1
        done = await python(box, HOGS)
        assert (done.stdout, done.oom) == (b"True\n", True)
        assert not (await sh(box, "true")).oom
        session = await box.open_session()
        assert (await session.run(f"python3 -I -S -c '{HOGS}'")).oom
        assert (await session.run("echo alive")).stdout == b"alive\n"
        full = await sh(box, "head -c 20M /dev/zero > full")
        assert (full.exit_code != 0, full.oom) == (True, False)  # files meet their own limit first
        await box.reset()

    inside(body)
    wait_for(lambda: not remove(groups(home) - before))


def test_memory_that_is_held_is_noticed(home):
    async def body(box):
        await sh(box, f"python3 -I -S -c '{HOLDER}' & until [ -e held ]; do sleep 0.05; done")
        assert "memory" in await box.verify()
        await box.reset()
        assert await box.verify() == []

    inside(body)


@pytest.mark.usefixtures("bubblewrap")
def test_what_the_supervisor_itself_takes_is_no_difference(home):
    async def body(box):
        for size in (14, 1, 14, 7, 14):
            await box.put({"big": bytes(size << 20)})
            tree = await box.snapshot()
            await box.restore(tree)
        await box.reset()
        assert await box.verify() == []

    inside(body, SandboxLimits(disk_mb=40))


@pytest.mark.usefixtures("bubblewrap")
def test_without_a_group_each_process_is_bounded(monkeypatch):
    monkeypatch.setattr(bubblewrap, "home", lambda: None)
    assert "per process" in bubblewrap.memory_bound()

    async def body(box):
        assert not box.bounded
        hog = await python(box, "x = bytearray(100 << 20)")
        assert (hog.exit_code, hog.oom) == (1, False)

    inside(body)


HOST = """
import asyncio, sys
from agentrl.sandboxes import BubblewrapBackend, SandboxLimits
async def main():
    box = await BubblewrapBackend().open("agent", SandboxLimits())
    print("open", flush=True)
    await box.exec(["sleep", "100"], timeout_s=200)
asyncio.run(main())
"""


def test_what_a_killed_host_left_is_swept(home):
    with process(sys.executable, "-c", HOST) as host:
        assert host.stdout.readline() == b"open\n"
        left = list(home.path.glob(f"agentrl-{host.pid}-*"))
        assert len(left) == 1
    wait_for(lambda: cgroup.sweep(home.path) or not left[0].exists())


def test_a_group_that_cannot_be_filled_or_made_is_told(home, monkeypatch):
    group = cgroup.MemoryGroup(home, 1 << 30)
    with pytest.raises(SandboxLost, match="cannot move a sandbox"):
        group.add(2**22 + 1)
    asyncio.run(group.remove())
    asyncio.run(group.remove())
    with process("sleep", "1000") as busy:
        monkeypatch.setattr(cgroup, "_REMOVE_S", 0.05)
        group = cgroup.MemoryGroup(home, 1 << 30)
        group.add(busy.pid)
        asyncio.run(group.remove())
        assert group._path.exists()

    def is_gone():
        cgroup.MemoryGroup(home, 1 << 30).abandon()  # what had to be left is tried again
        return not group._path.exists()

    wait_for(is_gone)
    nowhere = cgroup.Home(Path("/proc"), ("a", "b"), "c", swap_apart=False)
    with pytest.raises(OSError):
        cgroup.MemoryGroup(nowhere, 1 << 30)


ONE = (
    "9:name=systemd:/\n4:memory:/jobs/7\n0::/\n",
    "25 20 0:21 / /sys/fs/cgroup/memory rw - cgroup cgroup rw,memory\n"
    "26 20 0:22 / /sys/fs/cgroup/cpu rw - cgroup cgroup rw,cpu\n",
)
TWO = "0::/user.slice/app.scope\n"


def test_version_one_is_found_below_our_own_group():
    (found,) = cgroup._homes(*ONE)
    assert (found.path, found.swap_apart) == (Path("/sys/fs/cgroup/memory/jobs/7"), False)
    rooted = ONE[1].replace(" / /sys/fs/cgroup/memory", " /jobs /sys/fs/cgroup/memory")
    assert cgroup._homes(ONE[0], rooted)[0].path == Path("/sys/fs/cgroup/memory/7")


def test_version_two_is_found_beside_our_own_group(tmp_path):
    mounts = f"30 20 0:30 / {tmp_path} rw - cgroup2 cgroup2 rw\n"
    (tmp_path / "user.slice" / "app.scope").mkdir(parents=True)
    assert cgroup._homes(TWO, mounts) == []
    (tmp_path / "user.slice" / "cgroup.subtree_control").write_text("cpu memory pids\n")
    (found,) = cgroup._homes(TWO, mounts)
    assert (found.path, found.limits, found.events) == (
        tmp_path / "user.slice",
        ("memory.max", "memory.swap.max"),
        "memory.events",
    )
    (tmp_path / "cgroup.subtree_control").write_text("memory\n")
    assert cgroup._homes("0::/\n", mounts)[0].path == tmp_path


def test_counters_of_both_versions_are_read(tmp_path, monkeypatch):
    monkeypatch.setattr("agentrl.sandboxes.supervisor.memory._own", lambda: 20)
    for events, stat, charge in (
        ("low 0\nmax 7\noom 3\noom_kill 2\n", "anon 100\nfile 5000\nshmem 11\nkernel 9\n", 91),
        (
            "oom_kill_disable 0\nunder_oom 0\noom_kill 2\n",
            "cache 5000\nrss 100\nshmem 11\ntotal_rss 999\n",
            91,
        ),
    ):
        (tmp_path / "events").write_text(events)
        (tmp_path / "stat").write_text(stat)
        fds = [os.open(tmp_path / name, os.O_RDONLY) for name in ("events", "stat")]
        memory = Memory(fds, private=True)
        assert (memory.known, memory.kills(), memory.charge()) == (True, 2, charge)
        assert not any(os.get_inheritable(fd) for fd in fds)
        for fd in fds:
            os.close(fd)
    assert Memory([], private=False).charge() is None

"""A reset is a proof: whatever differs from the start is found, and the sandbox is thrown away."""

from __future__ import annotations

import asyncio
import random
from collections import Counter

import pytest

from agentrl.errors import SandboxLost
from agentrl.sandboxes import BubblewrapBackend, Pool, SandboxLimits
from agentrl.sandboxes.contract.room import python, sh
from agentrl.sandboxes.supervisor import proof
from agentrl.sandboxes.supervisor.frames import Fatal
from agentrl.sandboxes.supervisor.proof import CHARGE_BYTES, Proof

LIMITS = SandboxLimits(
    memory_mb=256, disk_mb=16, processes=24, open_files=64, output_bytes=4000, file_bytes=10_000
)
TIME_WAIT = """
import socket
server = socket.create_server(("127.0.0.1", 0))
ours = socket.create_connection(server.getsockname())
theirs, _ = server.accept()
theirs.close(); ours.recv(1); ours.close()
"""


class Quiet:
    """A supervisor's processes and memory, as a test wants them."""

    none = True
    bytes_held: int | None = 1000

    def has_none(self):
        return self.none

    def charge(self):
        return self.bytes_held


@pytest.fixture
def quiet(monkeypatch):
    """A place that never changes, but where a test changes it."""
    texts = {
        "self/mountinfo": b"1 2 0:3 / /x rw,relatime - tmpfs tmpfs rw\n",
        "pids": ["1"],
        "descriptors": 7,
    }
    monkeypatch.setattr(proof, "_proc", lambda name: texts.get(name, b""))
    monkeypatch.setattr(proof, "_writable", lambda: [b"/dev/shm"])
    monkeypatch.setattr(proof, "_pids", lambda: texts["pids"])
    monkeypatch.setattr(proof, "_descriptors", lambda: texts["descriptors"])
    monkeypatch.setattr(Proof, "_space", lambda self: [(1, 1, 1, 1)])
    monkeypatch.setattr(proof, "VERIFY_S", 0.02)
    return texts


@pytest.mark.parametrize(
    ("name", "file", "text"),
    [
        (
            "mounts",
            "self/mountinfo",
            b"1 2 0:3 / /x rw - tmpfs tmpfs rw\n4 1 0:5 / /y rw - tmpfs tmpfs rw\n",
        ),
        ("ipc", "sysvipc/shm", b"a line"),
        ("ipc", "sysvipc/sem", b"a line"),
        ("ipc", "sysvipc/msg", b"a line"),
        ("sockets", "net/unix", b"a header\na line"),
        ("sockets", "net/sockstat", b"sockets: used 1\n"),
        ("sockets", "net/sockstat", b"TCP: inuse 0 orphan 0 tw 1 alloc 0 mem 0\n"),
        ("sockets", "net/sockstat", b"UDP: inuse 1 mem 0\n"),
        ("sockets", "net/sockstat", b"RAW: inuse 1\n"),
        ("sockets", "net/sockstat6", b"TCP6: inuse 1\n"),
        *(("sysctls", f"sys/{name}", b"1") for name in proof.SYSCTLS),
        ("processes", "pids", ["1", "2"]),
        ("descriptors", "descriptors", 8),
    ],
)
def test_every_trace_is_found_and_named(quiet, name, file, text):
    found = Proof([], Quiet(), Quiet(), private=True)
    found.check()
    quiet[file] = text
    assert found.differences() == [name]
    with pytest.raises(Fatal, match=f"differs from its start in {name}"):
        found.check()


def test_a_socket_that_was_going_away_at_the_start_is_not_missed_later(quiet):
    quiet["net/sockstat"] = b"sockets: used 1\nTCP: inuse 0 orphan 0 tw 0 alloc 5 mem 5\n"
    found = Proof([], Quiet(), Quiet(), private=True)
    assert found.differences() == []
    quiet["net/sockstat"] = b"sockets: used 0\nTCP: inuse 0 orphan 0 tw 0 alloc 7 mem 9\n"
    assert found.differences() == []
    quiet["net/sockstat"] = b"sockets: used 1\n"
    assert found.differences() == ["sockets"]


def test_memory_is_bounded_not_compared(quiet):
    memory = Quiet()
    found = Proof([], Quiet(), memory, private=True)
    memory.bytes_held += CHARGE_BYTES
    assert found.differences() == []
    memory.bytes_held += 1
    assert found.differences() == ["memory"]
    blind = Quiet()
    blind.bytes_held = None
    assert Proof([], Quiet(), blind, private=True).differences() == []


def test_what_passes_by_itself_is_waited_for(quiet, monkeypatch):
    processes = Quiet()
    looks = iter([True, False, False, True])
    processes.has_none = lambda: next(looks)
    found = Proof([], processes, Quiet(), private=False)
    monkeypatch.setattr(proof, "VERIFY_S", 5)
    found.check()
    assert next(looks, None) is None


def test_without_namespaces_of_its_own_only_the_own_is_compared(quiet):
    processes = Quiet()
    found = Proof([], processes, Quiet(), private=False)
    quiet["sysvipc/shm"] = b"somebody's"
    assert found.differences() == []
    processes.none = False
    assert found.differences() == ["processes"]


def test_memory_file_systems_are_found(monkeypatch):
    lines = [
        b"1 0 0:1 / / ro - tmpfs tmpfs rw",
        b"2 1 0:2 / /a\\040b rw,nosuid shared:1 - tmpfs tmpfs rw",
        b"3 1 0:2 /x /again rw - tmpfs tmpfs rw",
        b"4 1 8:1 / /disk rw - ext4 /dev/sda rw",
        b"5 1 0:5 / /ram rw - ramfs ramfs rw",
    ]
    monkeypatch.setattr(proof, "_proc", lambda name: b"\n".join(lines))
    assert proof._writable() == [b"/a b", b"/ram"]


def inside(body, limits=LIMITS):
    async def main():
        box = await BubblewrapBackend().open("agent", limits)
        try:
            await body(box)
        finally:
            await box.close()

    asyncio.run(main())


@pytest.mark.parametrize(
    ("script", "name"),
    [
        ("echo x > file", "space"),
        ("mkdir /tmp/d", "space"),
        (": > /dev/shm/x", "space"),
        ("sleep 60 & true", "processes"),
        ("ipcmk -M 4096", "ipc"),
        ("ipcmk -Q", "ipc"),
        ("ipcmk -S 1", "ipc"),
        ("touch ../more", "roots"),
        ("chmod 700 ..", "roots"),
    ],
)
def test_verify_names_what_an_episode_left(bubblewrap, script, name):
    async def body(box):
        assert await box.verify() == []
        done = await sh(box, script)
        assert done.exit_code == 0, done
        assert name in await box.verify()
        if name == "ipc":
            with pytest.raises(SandboxLost, match="differs from its start in ipc"):
                await box.reset()
        else:
            await box.reset()
            assert await box.verify() == []

    inside(body, SandboxLimits(disk_mb=16, needs=frozenset({"sysvipc"})))


def test_tracing_is_permitted_where_it_is_needed(bubblewrap):
    code = "import ctypes; print(ctypes.CDLL(None).ptrace(0, 0, 0, 0))"

    async def permitted(box):
        assert (await python(box, code)).stdout == b"0\n"
        attach = "import ctypes; print(ctypes.CDLL(None).ptrace(16, 1, 0, 0))"
        assert (
            await python(box, attach)
        ).stdout == b"-1\n"  # process 1 is out of reach all the same

    async def refused(box):
        assert (await python(box, code)).stdout == b"-1\n"

    inside(permitted, SandboxLimits(needs=frozenset({"ptrace"})))
    inside(refused)


def test_what_a_reset_cannot_undo_is_thrown_away_and_counted(bubblewrap):
    async def main():
        pool = Pool(BubblewrapBackend(), size=1, limits=LIMITS)
        try:
            async with pool.lease("agent") as first:
                assert (await python(first, TIME_WAIT)).exit_code == 0
                assert "sockets" in await first.verify()
            async with pool.lease("agent") as second:
                assert second.sandbox is not first.sandbox
                assert await second.verify() == []
            assert (pool.counts.opened, pool.counts.replaced) == (2, 1)
        finally:
            await pool.close()

    asyncio.run(main())


HOSTILE = {
    "files": "mkdir -p a/b; head -c 100000 /dev/zero > a/b/c; chmod 000 a",
    "shm": "head -c 100000 /dev/zero > /dev/shm/x; : > /tmp/y",
    "daemon": "setsid sh -c 'exec 3> f; rm f; echo x >&3; sleep 100' & true",
    "stopped": "sh -c 'kill -STOP $$' & true",
    "roots": "chmod 000 .. /dev/shm; touch ../x; rm -rf ../tmp",
    "queue": "python3 -I -S -c \"import os; os.open('/dev/mqueue/x', os.O_CREAT | os.O_RDWR)\"",
    "ipc": "ipcmk -M 4096; ipcmk -S 1; ipcmk -Q",
    "attributes": (
        "python3 -I -S -c \"import os; [os.setxattr(p, 'user.x', b'1') for p in ('.', '..',"
        " '/dev/shm')]\""
    ),
    "sockets": (
        'python3 -I -S -c "import os, socket, time\ns = socket.socket(socket.AF_UNIX);'
        " s.bind(chr(0) + 'x')\ns.listen(); t = socket.create_server(('127.0.0.1', 0)); os.fork()"
        ' and os._exit(0); time.sleep(100)"'
    ),
    "lingering": f'python3 -I -S -c "{TIME_WAIT.replace(chr(34), chr(39))}"',
    "bomb": (
        "python3 -I -S -c 'import os\nos.fork() and os._exit(0)\nos.setsid()\nwhile 1:\n try:"
        " os.fork()\n except OSError: pass'"
    ),
    "nothing": "true",
}
PROBE = """
cd /; ls -Al /dev/shm /dev/mqueue /sandbox /sandbox/work /tmp/ | sed 's/ [A-Z][a-z][a-z] .* / /'
df -P /sandbox /dev/shm | awk '{print $2, $3}'; df -Pi /sandbox /dev/shm | awk '{print $2, $3}'
cat /proc/sysvipc/* /proc/net/unix /proc/self/mountinfo /proc/net/tcp /proc/net/udp
set -- /proc/[0-9]*; echo $#; hostname; echo $(ls /proc/self/fd)
"""


async def _cycles(count, seed):
    rng, seen, looks = random.Random(seed), Counter(), set()
    box = await BubblewrapBackend().open("agent", LIMITS)
    try:
        for _ in range(count):
            deeds = rng.sample(sorted(HOSTILE), rng.randint(1, 3))
            for deed in deeds:
                await sh(box, HOSTILE[deed], timeout_s=5)
            try:
                await box.reset()
                seen["clean"] += 1
            except SandboxLost:
                seen["thrown away"] += 1
                await box.close()
                box = await BubblewrapBackend().open("agent", LIMITS)
            done = await sh(box, PROBE)
            # Mounts and file systems have numbers and owners of their own in each sandbox.
            looks.add(
                "\n".join(line for line in done.stdout.decode().splitlines() if " - " not in line)
            )
            differing = (
                set.symmetric_difference(*(set(look.splitlines()) for look in looks))
                if len(looks) == 2
                else ()
            )
            assert not differing, (deeds, differing)
            await box.reset()
    finally:
        await box.close()
    return seen


def test_hostile_episodes_leave_nothing_that_is_not_noticed(bubblewrap):
    seen = asyncio.run(_cycles(25, seed=1))
    assert seen["clean"] > 10

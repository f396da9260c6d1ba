"""Resets in a row, each after a hostile episode: the next one sees what a new one shows."""

from __future__ import annotations

import asyncio
import random
import time

import pytest
from conftest import require
from hostile import BACKENDS, LIMITS, Host, Slot, program

from agentrl.errors import SandboxLost

SLOTS = 4
# Cheap things that leave something; up to three of them in one episode, in any order.
SNIPPETS = r"""
child(lambda: time.sleep(1000), True)
===
child(lambda: child(lambda: os.kill(os.getpid(), signal.SIGSTOP), True), True)
===
for s in set(range(1, 65)) - {9, 19, 32, 33}: attempt(signal.signal, s, signal.SIG_IGN)
child(lambda: time.sleep(1000), True)
===
for _ in range(8): attempt(child, int)
===
for n in range(60): os.mkdir('d%d' % n); os.chdir('d%d' % n)
os.chdir('/sandbox/work')
===
os.makedirs('locked/in', exist_ok=True); write('locked/in/f', 'x'); os.chmod('locked/in', 0)
===
for at in ('.', '/tmp', '/dev/shm', '/sandbox/tmp'):
    attempt(write, at + '/note%d' % os.getpid(), 'x' * 5000)
===
f = open('held%d' % os.getpid(), 'wb')
attempt(f.write, b'x' * 2_000_000); attempt(os.unlink, f.name)
child(lambda: time.sleep(1000), True)
===
f = open('flown', 'wb'); a, b = socket.socketpair(); attempt(os.unlink, 'flown')
attempt(socket.send_fds, a, [b'x'], [f.fileno(), a.fileno(), b.fileno()])
===
s = socket.socket(socket.AF_UNIX); attempt(s.bind, '\0note'); child(lambda: time.sleep(1000), True)
===
s = socket.socket(socket.AF_UNIX); attempt(s.bind, '/tmp/sock')
===
s = attempt(socket.create_server, ('127.0.0.1', 8000)); child(lambda: time.sleep(1000), True)
===
u = socket.socket(type=socket.SOCK_DGRAM); attempt(u.bind, ('127.0.0.1', 5353))
child(lambda: time.sleep(1000))
===
for path in ('.', '..', '/tmp', '/dev/shm', '/sandbox/tmp', '/dev/mqueue'):
    attempt(os.setxattr, path, 'user.note', b'x'); attempt(os.chmod, path, 0o7777)
===
attempt(os.rename, '/sandbox/work', '/sandbox/gone'); attempt(os.rmdir, '/sandbox/work')
attempt(os.rmdir, '/sandbox/tmp')
===
attempt(os.symlink, '/usr', 'link'); attempt(os.symlink, 'link', 'hop')
attempt(os.link, 'link', 'hard')
===
attempt(os.mkfifo, 'fifo'); attempt(os.mknod, 'white', 0o20666, 0)
attempt(write, b'\xff\n\x01', 'x')
===
kept = [attempt(os.openpty) for _ in range(5)]; child(lambda: time.sleep(1000), True)
===
f = open('/etc/passwd'); attempt(fcntl.flock, f, fcntl.LOCK_SH)
child(lambda: time.sleep(1000), True)
===
os.umask(0); os.nice(5); os.environ['NOTE'] = 'x'; os.chdir('/')
child(lambda: time.sleep(1000), True)
os.chdir('/sandbox/work') if os.path.isdir('/sandbox/work') else None
===
for number in (29, 64, 68, 240): attempt(syscall, number, 7, 64, 0o1600)
===
for path in ('/proc/1/oom_score_adj', '/proc/self/oom_score_adj', '/proc/1/comm',
             '/proc/sys/kernel/hostname'):
    attempt(write, path, '7')
===
for s in range(1, 65): attempt(os.kill, 1, s)
===
child(lambda: [os.write(1, b'x' * 65536) for _ in iter(int, 1)], True)
===
fd = os.memfd_create('note'); attempt(os.write, fd, b'x' * 1_000_000)
child(lambda: time.sleep(1000), True)
===
s = attempt(socket.socket, 16, socket.SOCK_RAW, 15); s and attempt(s.bind, (0, 1))
child(lambda: time.sleep(1000))
===
def fork():
    while True: attempt(os.fork)
child(fork, True)
===
os._exit(3)
===
os.kill(os.getpid(), signal.SIGKILL)
"""
# Over loopback, and closed by both: where the kernel cannot be told to forget such connections,
# they cost the slot.
LINGERING = (
    "s = socket.create_server(('127.0.0.1', 0)); c = socket.create_connection(s.getsockname());"
    " c.close()"
)


async def episode(slot: Slot, chance: random.Random, lingering: float) -> None:
    """Play one hostile episode in a sandbox that is new or was compared with a new one."""
    chosen = chance.sample(SNIPPETS.split("===\n"), chance.randint(1, 3))
    if chance.random() < lingering:
        chosen.append(LINGERING)
    box = await slot.ready()
    try:
        await box.exec(program("\n".join(chosen)), timeout_s=20)
        if chance.random() < 0.1:
            session = await box.open_session()
            await session.run("cd /tmp; sleep 100 & trap '' HUP TERM; exec 7> note", timeout_s=5)
        if chance.random() < 0.1:
            await box.put({"a/b": b"x", "link/x": b"y"})
    except OSError:  # the work area is full, or not there
        pass
    except SandboxLost as error:
        slot.lost.append(str(error))
        await slot.close()
        return
    await slot.reset("\n".join(chosen))


def cycles(backend: str, count: int, lingering: float = 0.0) -> tuple[int, list[str], float]:
    """Play episodes on a few slots; returns proven resets, discarded slots, and seconds."""

    async def main() -> tuple[int, list[str], float]:
        opener, host = BACKENDS[backend](), Host()
        slots = [Slot(opener, LIMITS) for _ in range(SLOTS)]
        left = iter(range(count))

        async def work(slot: Slot, chance: random.Random) -> None:
            for _ in left:
                await episode(slot, chance, lingering)

        begin = time.monotonic()
        try:
            async with asyncio.TaskGroup() as group:
                for number, slot in enumerate(slots):
                    group.create_task(work(slot, random.Random(number)))
        finally:
            await asyncio.gather(*(slot.close() for slot in slots))
            try:
                host.check()
            finally:
                host.close()
        return (
            sum(slot.resets for slot in slots),
            [text for slot in slots for text in slot.lost],
            time.monotonic() - begin,
        )

    return asyncio.run(main())


@pytest.mark.parametrize("backend", sorted(BACKENDS))
@pytest.mark.parametrize(
    "count", [40, pytest.param(2000, marks=[pytest.mark.long, pytest.mark.timeout(900)])]
)
def test_no_reset_leaves_a_difference(backend, count, capsys):
    require(backend)
    resets, lost, wall_s = cycles(backend, count)
    with capsys.disabled():
        print(
            f"\n{backend}: {count} hostile episodes in {wall_s:.0f} s, {len(lost)} slots thrown"
            f" away {set(lost) or ''}"
        )
    assert resets + len(lost) == count
    assert len(lost) <= count / 20, lost


def test_connections_that_linger_cost_the_slot_or_nothing(bubblewrap):
    resets, lost, _ = cycles("bubblewrap", 8, lingering=1.0)
    assert resets + len(lost) == 8
    assert all("sockets" in text for text in lost), lost


ORPHAN = """
s = socket.create_server(('127.0.0.1', 0)); c = socket.create_connection(s.getsockname())
a, _ = s.accept()
c.setblocking(False)
while attempt(c.send, b'x' * 65536): pass
c.close(); os.write(done, b'x'); time.sleep(100)
"""


@pytest.mark.parametrize("backend", sorted(BACKENDS))
def test_connections_of_one_sandbox_cost_no_other_its_reset(backend):
    """The kernel counts connections without an owner for all network namespaces together."""
    require(backend)

    async def main() -> None:
        opener = BACKENDS[backend]()
        one, other = Slot(opener), Slot(opener)
        try:
            code = (
                f"ready, done = os.pipe(); child(lambda: exec({ORPHAN!r}), True); os.read(ready, 1)"
            )
            await (await one.ready()).exec(program(code))
            seen = await (await other.ready()).exec(
                ["grep", "-c", "orphan [1-9]", "/proc/net/sockstat"]
            )
            assert seen.stdout == b"1\n", seen
            assert await other.reset()
            assert await one.reset()
        finally:
            await one.close()
            await other.close()

    asyncio.run(main())

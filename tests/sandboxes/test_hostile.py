"""What hostile code can try beyond the contract, on each backend, and lost sandboxes."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
from conftest import require
from hostile import BACKENDS, Host, Slot, differences, look
from hostile_kernel import table

from agentrl.errors import SandboxLost
from agentrl.sandboxes import BubblewrapBackend, Pool, SandboxLimits
from agentrl.sandboxes.contract.room import PYTHON, python, sh

REPO = Path(__file__).resolve().parents[2]
LIMITS = SandboxLimits(
    memory_mb=256, disk_mb=16, processes=24, open_files=64, output_bytes=4000, file_bytes=10_000
)

CASES = [
    pytest.param(case, id=case.name, marks=[pytest.mark.long] if case.long else [])
    for case in table()
]
LOSSES = 8  # of all cases on one backend: the others end with a reset


@pytest.fixture(scope="module", params=sorted(BACKENDS))
def slot(request):
    """A slot of each backend, used for one case after the other, its loop, and a bystander."""
    require(request.param)
    slot, host = Slot(BACKENDS[request.param]()), Host()
    with asyncio.Runner() as runner:
        try:
            yield slot, runner, host
        finally:
            runner.run(slot.close())
            host.close()


@pytest.mark.parametrize("case", CASES)
def test_limits_hold_and_nothing_is_left(slot, case):
    slot, runner, host = slot
    try:
        runner.run(asyncio.wait_for(slot.play(case, host), 60))
    except BaseException:
        runner.run(slot.close())
        raise
    assert len(slot.lost) <= LOSSES, slot.lost
    assert slot.opened <= 1 + len(slot.lost) + LOSSES


HELD = """
import os, time
ready, done = os.pipe()
if os.fork(): os.read(ready, 1); os._exit(0)
{act}
os.write(done, b"x"); time.sleep(99)
"""
LEFT = {
    "tree": "echo 1 > note; setsid sleep 99 &",
    "space": "echo 1 > /tmp/note",
    "processes": "setsid sleep 99 &",
    "sockets": "import socket; s = socket.socket(socket.AF_UNIX); s.bind('\\0note')",
    "locks": "import fcntl; f = open('/etc/passwd'); fcntl.flock(f, fcntl.LOCK_SH)",
    "ptys": "fds = os.openpty()",
    "manifest": "mkdir d",
    "tree./sandbox/tmp": "chmod 700 /sandbox/tmp",
}


@pytest.mark.parametrize("kind", LEFT)
def test_the_look_at_a_sandbox_sees_what_is_left(slot, kind):
    slot, runner, _ = slot

    async def body():
        box = await slot.ready()
        is_held = kind in ("sockets", "locks", "ptys")
        argv = [*PYTHON, HELD.format(act=LEFT[kind])] if is_held else ["sh", "-c", LEFT[kind]]
        assert (await box.exec(argv)).exit_code == 0
        found = differences(slot.fresh, await look(box))
        await slot.close()  # by its end, not by a reset
        return found

    assert any(line.startswith(kind) for line in runner.run(body()))


AS_USER = """
import json, os, sys
from agentrl.sandboxes.launch import program
sys.path.insert(0, "tests/support")
program()
from hostile import play_all
from hostile_kernel import table
os.setgroups([]); os.setresgid(23456, 23456, 23456); os.setresuid(23456, 23456, 23456)
step = int(sys.argv[1])
cases = [case for case in table() if step == 1 or not case.long]
print(json.dumps(play_all("bubblewrap", cases[::step])))
"""


@pytest.mark.skipif(os.geteuid() != 0, reason="the other tests run as an ordinary user already")
@pytest.mark.parametrize("step", [pytest.param(1, marks=pytest.mark.long), 4])
def test_an_ordinary_user_is_as_safe(bubblewrap, step):
    done = subprocess.run(
        [sys.executable, "-c", AS_USER, str(step)], cwd=REPO, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    told = json.loads(done.stdout.splitlines()[-1])
    assert told["failed"] == {}
    assert told["played"] == told["resets"] + len(told["lost"])
    assert told["played"] >= 15
    assert len(told["lost"]) <= LOSSES, told["lost"]


def inside(body, limits=LIMITS):
    require("bubblewrap")

    async def main():
        box = await BubblewrapBackend().open("agent", limits)
        try:
            await body(box)
        finally:
            await box.close()

    asyncio.run(main())


def test_commands_can_be_many_and_leave_no_descriptor():
    async def body(box):
        for _ in range(3 * LIMITS.open_files):
            await box.exec(["true"], stdin=b"x")
            await box.exec(["/no/such/program"], stdin=b"x")
        assert (await sh(box, "echo fine")).stdout == b"fine\n"

    inside(body)


def test_tracing_and_its_kin_are_refused():
    async def body(box):
        code = """
            import ctypes, errno, os
            libc = ctypes.CDLL(None, use_errno=True)
            child = os.fork()
            if child == 0:
                import time; time.sleep(60)
            calls = {
                "ptrace": (101, 16, child), "readv": (310, child, 0, 0, 0, 0, 0),
                "keyctl": (250, 0, -3, 0), "io_uring": (425, 1, 0), "bpf": (321, 0, 0, 0),
                "userfaultfd": (323, 0), "perf": (298, 0, 0), "vsock": (41, 40, 1, 0),
                "userns": (56, 0x10000011, 0, 0, 0, 0), "alg": (41, 38, 5, 0),
            }
            for name, call in calls.items():
                ctypes.set_errno(0)
                if libc.syscall(*call) != -1 or ctypes.get_errno() != errno.EPERM:
                    print(name, ctypes.get_errno())
            print(libc.syscall(435, 0, 0), ctypes.get_errno() == errno.ENOSYS)  # clone3
            os.kill(child, 9)
        """
        done = await python(box, textwrap.dedent(code))
        assert (done.exit_code, done.stdout) == (0, b"-1 True\n"), done

    if os.uname().machine != "x86_64":
        pytest.skip("the numbers are those of x86-64")
    inside(body)


def test_files_that_are_too_many_to_list_or_too_deep_are_a_value():
    async def body(box):
        await python(box, "for n in range(10_001): open(str(n), 'w').close()")
        with pytest.raises(OSError, match="entries"):
            await box.manifest()
        await box.reset()
        await python(box, "import os\nfor _ in range(100): os.mkdir('d'); os.chdir('d')")
        with pytest.raises(OSError, match="levels"):
            await box.manifest()

    inside(body)


def test_limits_hold_for_files_and_descriptors():
    async def body(box):
        done = await python(box, "import os\nfds = [os.open('/dev/null', 0) for _ in range(1000)]")
        assert b"Too many open files" in done.stderr
        code = (
            "import resource as r; print(r.getrlimit(r.RLIMIT_CORE), r.getrlimit(r.RLIMIT_FSIZE)[1]"
            " <= 16 << 20)"
        )
        assert (await python(box, code)).stdout == b"(0, 0) True\n"

    inside(body)


def test_a_killed_supervisor_is_a_lost_sandbox_and_the_pool_goes_on(bubblewrap):
    async def main():
        pool = Pool(BubblewrapBackend(), size=1, limits=LIMITS)
        try:
            with pytest.raises(SandboxLost, match="ended"):
                async with pool.lease("agent") as box:
                    os.kill(box.sandbox._wire.peer.pid, signal.SIGKILL)
                    await box.exec(["sleep", "1000"], timeout_s=2000)
            async with pool.lease("agent") as box:
                assert (await sh(box, "echo new")).stdout == b"new\n"
            assert (pool.counts.opened, pool.counts.replaced) == (2, 1)
        finally:
            await pool.close()

    asyncio.run(main())


def test_bad_arguments_are_refused_before_anything_runs():
    async def body(box):
        for call in (
            box.exec([]),
            box.exec(["a\0b"]),
            box.exec(["true"], timeout_s=0),
            box.exec(["true"], env={"A=B": "c"}),
            box.put({"big": bytes(17 << 20)}),
        ):
            with pytest.raises(ValueError):
                await call

    inside(body)

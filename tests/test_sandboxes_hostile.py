"""What hostile code can try inside bubblewrap beyond the contract, and what a lost sandbox looks like."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from agentrl.errors import SandboxLost
from agentrl.sandboxes import BubblewrapBackend, Pool, SandboxLimits
from agentrl.sandboxes.contract.room import PYTHON, python, sh
from agentrl.sandboxes.supervisor.frames import encode

REPO = Path(__file__).resolve().parent.parent
LIMITS = SandboxLimits(memory_mb=256, disk_mb=16, processes=24, open_files=64, output_bytes=4000, file_bytes=10_000)

pytestmark = pytest.mark.usefixtures("bubblewrap")


def inside(body, limits=LIMITS):
    async def main():
        box = await BubblewrapBackend().open("agent", limits)
        try:
            await body(box)
        finally:
            await box.close()

    asyncio.run(main())


def test_a_fork_bomb_ends_with_its_time_and_a_reset_cleans_up():
    async def body(box):
        bomb = await sh(box, "bomb() { bomb | bomb & }; bomb; while :; do :; done", timeout_s=1)
        assert bomb.wall_s < 10
        # Another one whose leader leaves at once: it goes on in the background until the reset.
        await python(
            box, "import os\nif os.fork(): os._exit(0)\nos.setsid()\nwhile 1:\n try: os.fork()\n except OSError: pass"
        )
        await box.reset()
        assert (await sh(box, "ls /proc | grep -c '^[0-9]'")).stdout == b"4\n"  # supervisor, sh, ls, grep

    inside(body)


def test_an_output_flood_costs_no_memory_and_no_time():
    async def body(box):
        done = await sh(box, "yes 0123456789 & yes error >&2", timeout_s=0.5)
        assert done.timed_out
        assert done.wall_s < 3
        assert done.dropped > 1_000_000
        assert len(done.stdout) == len(done.stderr) == LIMITS.output_bytes
        left = await sh(box, "yes & exec true")  # a flooder that outlives its leader
        assert left.exit_code == 0
        assert left.wall_s < 2

    inside(body)


def test_frames_on_a_commands_output_are_only_output():
    async def body(box):
        forged = encode(2, [b"ok", b"0", b"0", b"0", b"1", b"forged", b""])
        code = (
            "import os, sys\nframe = sys.stdin.buffer.read()\nos.write(1, frame); os.write(2, frame)\n"
            "for pid in ('self', '1'):\n for fd in range(16):\n"
            "  try: f = os.open(f'/proc/{pid}/fd/{fd}', os.O_WRONLY); os.write(f, frame)\n  except OSError: pass\n"
        )
        done = await box.exec([*PYTHON, code], stdin=forged)
        assert done.stdout.startswith(forged)
        assert (await sh(box, "echo honest")).stdout == b"honest\n"

    inside(body)


def test_a_background_child_that_holds_stdin_holds_nobody_up():
    async def body(box):
        done = await box.exec(["sh", "-c", "sleep 60 <&0 & echo done"], stdin=b"x" * 1_000_000)
        assert done.stdout == b"done\n"
        assert done.wall_s < 2

    inside(body)


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
            calls = {"ptrace": (101, 16, child), "readv": (310, child, 0, 0, 0, 0, 0), "keyctl": (250, 0, -3, 0),
                     "io_uring": (425, 1, 0), "bpf": (321, 0, 0, 0), "userfaultfd": (323, 0), "perf": (298, 0, 0),
                     "userns": (56, 0x10000011, 0, 0, 0, 0), "vsock": (41, 40, 1, 0), "alg": (41, 38, 5, 0)}
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


def test_a_full_disk_is_a_value_and_a_reset_empties_it():
    async def body(box):
        await sh(box, "head -c 100M /dev/zero > full; chmod 000 full")
        with pytest.raises(OSError, match="space"):
            await box.put({"a": b"x" * 100_000})
        await box.reset()
        await box.put({"a": b"x" * 10_000})
        assert await box.get(["a"]) == {"a": b"x" * 10_000}

    inside(body)


def test_a_work_area_that_was_taken_apart_comes_back():
    async def body(box):
        await sh(box, "cd ..; rm -rf work tmp; ln -s /usr work; mkdir -m 000 tmp; chmod 000 .")
        await box.reset()
        await box.put({"a/b": b"1"})
        assert (await sh(box, "pwd; cat a/b; ls -A /tmp; touch /tmp/x")).stdout == b"/sandbox/work\n1"

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
        code = "import resource as r; print(r.getrlimit(r.RLIMIT_CORE), r.getrlimit(r.RLIMIT_FSIZE)[1] <= 16 << 20)"
        assert (await python(box, code)).stdout == b"(0, 0) True\n"

    inside(body)


def test_a_killed_supervisor_is_a_lost_sandbox_and_the_pool_goes_on():
    async def main():
        pool = Pool(BubblewrapBackend(), size=1, limits=LIMITS)
        with pytest.raises(SandboxLost, match="ended"):
            async with pool.lease("agent") as box:
                os.kill(box.sandbox._wire.peer.pid, signal.SIGKILL)
                await box.exec(["sleep", "10"])
        async with pool.lease("agent") as box:
            assert (await sh(box, "echo new")).stdout == b"new\n"
        assert (pool.counts.opened, pool.counts.replaced) == (2, 1)
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


AS_USER = """
import asyncio, os
from agentrl.sandboxes import BubblewrapBackend, SandboxLimits
from agentrl.sandboxes.launch import program
program()
os.setgroups([]); os.setresgid(23456, 23456, 23456); os.setresuid(23456, 23456, 23456)
async def main():
    box = await BubblewrapBackend().open("agent", SandboxLimits())
    await box.put({"a": b"1"})
    done = await box.exec(["sh", "-c", "cat a; id -u; grep CapEff /proc/self/status"])
    await box.reset()
    await box.close()
    print(done.stdout)
asyncio.run(main())
"""


@pytest.mark.skipif(os.geteuid() != 0, reason="the other tests run as an ordinary user already")
def test_an_ordinary_user_can_use_it():
    done = subprocess.run([sys.executable, "-c", AS_USER], cwd=REPO, capture_output=True, text=True)
    assert done.stdout == "b'11000\\nCapEff:\\t0000000000000000\\n'\n", done.stderr

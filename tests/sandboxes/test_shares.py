"""What the kernel counts per user is shared out: one sandbox cannot take it from the others."""

import asyncio
import json
import os
import subprocess
import sys

import pytest
from helpers import REPO
from hostile import BACKENDS, LIMITS, X86

USERS = [
    "nobody",
    pytest.param(
        "root",
        marks=pytest.mark.skipif(os.geteuid() != 0, reason="only root can start them as root"),
    ),
]
# A program that holds as many as it gets until it is killed, and one that asks for one more.
HOARD = """
import ctypes, os, time
libc = ctypes.CDLL(None)
got = 0
while {one}: got += 1
print(got, flush=True)
if os.fork() == 0: time.sleep(1000)
os._exit(0)
"""
ONE_MORE = """
import ctypes, os
libc = ctypes.CDLL(None)
print(bool({one}))
"""
OBJECTS = {
    "inotify instances": "libc.inotify_init1(0) >= 0",
    "fanotify groups": "libc.fanotify_init(0x200, 0) >= 0",
    "waiting signals": (
        "__import__('signal').pthread_sigmask(0, [40]) is not None"
        " and libc.sigqueue(os.getpid(), 40, None) == 0"
    ),
}
PLAY = """
import asyncio, json, os, subprocess, sys
from agentrl.sandboxes import BubblewrapBackend, SandboxLimits
from agentrl.sandboxes.launch import program
program()
hoard, one_more, user = sys.argv[1:]
if user == "nobody" and os.geteuid() == 0:
    os.environ["HOME"] = "/tmp"
    os.setgroups([]); os.setresgid(23457, 23457, 23457); os.setresuid(23457, 23457, 23457)

async def main():
    backend = BubblewrapBackend()
    boxes = [await backend.open("agent", SandboxLimits(open_files=1024)) for _ in range(2)]
    python = "/usr/bin/python3"
    got = await boxes[0].exec([python, "-c", hoard], timeout_s=60)
    theirs = await boxes[1].exec([python, "-c", one_more], timeout_s=60)
    ours = subprocess.run([python, "-c", one_more], capture_output=True, text=True).stdout.strip()
    tried = await boxes[1].exec(["sh", "-c", "echo 9 >/proc/sys/user/max_inotify_instances"])
    held = await boxes[1].exec(["grep", "Cap", "/proc/1/status"])
    for box in boxes:
        await box.reset()
        await box.close()
    caps = {line.split()[1] for line in held.stdout.decode().splitlines()}
    return int(got.stdout), theirs.stdout.decode().strip(), ours, tried.exit_code, sorted(caps)

print(json.dumps(asyncio.run(main())))
"""


@pytest.mark.parametrize("user", USERS)
@pytest.mark.parametrize("kind", OBJECTS)
def test_one_sandbox_leaves_the_others_theirs(bubblewrap, kind, user):
    one = OBJECTS[kind]
    words = [sys.executable, "-c", PLAY, HOARD.format(one=one), ONE_MORE.format(one=one), user]
    done = subprocess.run(words, cwd=REPO, capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stderr
    got, theirs, ours, told, caps = json.loads(done.stdout)
    assert 0 < got <= 1024 and (theirs, ours) == ("True", "True")
    assert told != 0 and caps == ["0" * 16], "no command may raise what its sandbox gets"


@pytest.mark.skipif(not X86, reason="calls io_setup by its number on x86-64")
@pytest.mark.parametrize("backend", BACKENDS)
def test_what_the_whole_machine_has_so_many_of_is_absent(backend, request):
    """Contexts of asynchronous reads and writes: 65,536 places, those of the host among them."""
    request.getfixturevalue(backend)
    code = "import ctypes\nlibc = ctypes.CDLL(None, use_errno=True)\n"
    code += "print(libc.syscall(206, 8192, ctypes.byref(ctypes.c_ulong())), ctypes.get_errno())"

    async def main():
        box = await BACKENDS[backend]().open("agent", LIMITS)
        try:
            return (await box.exec(["/usr/bin/python3", "-c", code])).stdout
        finally:
            await box.close()

    assert asyncio.run(main()) == b"-1 38\n"

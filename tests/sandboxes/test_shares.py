"""What the kernel counts per user is shared out: one sandbox cannot take it from the others."""

import asyncio
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from helpers import REPO, below, parents, process, wait_for
from hostile import BACKENDS, LIMITS, X86

from agentrl.sandboxes import available
from agentrl.sandboxes.bubblewrap import TERMINALS

ROOT = pytest.mark.skipif(os.geteuid() != 0, reason="only root can be another user")
UIDMAP = pytest.mark.skipif(not shutil.which("newuidmap"), reason="needs the package uidmap")
USERS = {"nobody": (), "root": (ROOT,), "with uids": (ROOT, UIDMAP)}
# A program that holds as many as it gets until it is killed, and one that asks for one more.
TRY = """
import ctypes, os, socket, time
def tried(call):
    try:
        call()
    except OSError:
        return False
    return True
pairs = [socket.socketpair()]
def send():
    pairs[-1][0].setblocking(False)
    try:
        socket.send_fds(pairs[-1][0], [b"x"], [0] * 32)
    except BlockingIOError:
        pairs.append(socket.socketpair())
        send()
"""
HOARD = """
libc = ctypes.CDLL(None)
got = 0
while {one}: got += 1
print(got, flush=True)
if os.fork() == 0: time.sleep(1000)
os._exit(0)
"""
ONE_MORE = """
libc = ctypes.CDLL(None)
print(bool({one}))
"""
# How to get one, and the most that one sandbox gets. A send is of 32 descriptors.
OBJECTS = {
    "inotify instances": ("libc.inotify_init1(0) >= 0", 4),
    "fanotify groups": ("libc.fanotify_init(0x200, 0) >= 0", 4),
    "waiting signals": (
        "__import__('signal').pthread_sigmask(0, [40]) is not None"
        " and libc.sigqueue(os.getpid(), 40, None) == 0",
        1024,
    ),
    "terminals": ("tried(os.openpty)", TERMINALS),
    "descriptors in flight": ("tried(send)", 33),
}
PLAY = """
import asyncio, json, os, subprocess, sys
from agentrl.sandboxes import BubblewrapBackend, SandboxLimits
from agentrl.sandboxes.launch import program
program()
hoard, one_more, user = sys.argv[1:]
if user != "root" and os.geteuid() == 0:
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


# Gives uid 23457 a name and a range of uids, for the command that follows alone.
WITH_UIDS = """
set -e
cat /etc/passwd - >"$0/passwd" <<end
sandboxer:x:23457:23457::/tmp:/bin/sh
end
echo sandboxer:300000:65536 >"$0/ids"; touch /etc/subuid /etc/subgid
mount --bind "$0/passwd" /etc/passwd
mount --bind "$0/ids" /etc/subuid; mount --bind "$0/ids" /etc/subgid
exec "$@"
"""


def started_as(user, folder, words):
    """The words, with what `user` needs of this machine."""
    if user != "with uids":
        return words
    folder.chmod(0o755)
    return ["unshare", "--mount", "sh", "-c", WITH_UIDS, str(folder), *words]


# An ordinary user without a range of uids has one count of descriptors for all of his sandboxes.
CASES = [
    pytest.param(kind, user, marks=marks)
    for kind in OBJECTS
    for user, marks in USERS.items()
    if (kind, user) != ("descriptors in flight", "nobody")
]


@pytest.mark.parametrize(("kind", "user"), CASES)
def test_one_sandbox_leaves_the_others_theirs(bubblewrap, kind, user, tmp_path):
    one, most = OBJECTS[kind]
    programs = [TRY + text.format(one=one) for text in (HOARD, ONE_MORE)]
    words = started_as(user, tmp_path, [sys.executable, "-c", PLAY, *programs, user])
    done = subprocess.run(words, cwd=REPO, capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stderr
    got, theirs, ours, told, caps = json.loads(done.stdout)
    assert 0 < got <= most and (theirs, ours) == ("True", "True")
    assert told != 0 and caps == ["0" * 16], "no command may raise what its sandbox gets"


WHO = """
import os, sys
from agentrl.sandboxes import available
os.setgroups([]); os.setresgid(23457, 23457, 23457); os.setresuid(23457, 23457, 23457)
print(available()["bubblewrap"])
"""


@pytest.mark.parametrize(
    ("user", "said"),
    [
        ("nobody", "one uid for all sandboxes: uid 23457 has no name in /etc/passwd"),
        pytest.param("with uids", "a uid per sandbox", marks=UIDMAP),
    ],
)
@ROOT
def test_whether_sandboxes_share_a_uid_is_said_with_the_fix(bubblewrap, user, said, tmp_path):
    assert "a uid per sandbox" in available()["bubblewrap"]
    words = started_as(user, tmp_path, [sys.executable, "-c", WHO])
    done = subprocess.run(words, cwd=REPO, capture_output=True, text=True, timeout=60)
    assert said in done.stdout, done.stderr


BUSY = """
import asyncio, os
from agentrl.sandboxes import BubblewrapBackend, SandboxLimits
from agentrl.sandboxes.launch import program
program()
os.setgroups([]); os.setresgid(23457, 23457, 23457); os.setresuid(23457, 23457, 23457)
async def main():
    boxes = [await BubblewrapBackend().open("agent", SandboxLimits()) for _ in range(2)]
    for box in boxes:
        await box.exec(["sh", "-c", "setsid sleep 1000.5 &"])
    print("busy", flush=True)
    await asyncio.sleep(1000)
asyncio.run(main())
"""


@ROOT
@UIDMAP
def test_sandboxes_of_another_uid_end_with_their_killed_host(bubblewrap, tmp_path):
    words = started_as("with uids", tmp_path, [sys.executable, "-c", BUSY])
    with process(*words, text=True) as host:
        assert host.stdout.readline() == "busy\n"
        ours = below({host.pid})
        uids = {Path(f"/proc/{pid}/status").read_text().split("Uid:")[1].split()[0] for pid in ours}
        ranged = {int(uid) for uid in uids} - {23457}
        assert len(ranged) == 2 and ranged <= set(range(300000, 365536))
    wait_for(lambda: not ours & parents().keys())


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

"""Hostile episodes over every cause that we can think of: none is left without a score."""

from __future__ import annotations

import errno
import itertools

import pytest
from blame_world import LEASE, Files, Injecting
from conftest import require
from helpers import call, make_task, rollouts, says

from agentrl.errors import SandboxLost
from agentrl.policies.base import Scripted
from agentrl.sandboxes import BubblewrapBackend, DockerBackend, Pool, SandboxLimits
from agentrl.types import Ending

EPISODES = 400
FAULTS = [
    *(OSError(number, name) for number, name in sorted(errno.errorcode.items())),
    SandboxLost("no answer to kill within 10 s"),
    MemoryError(),
    RecursionError(),
    UnicodeDecodeError("utf-8", b"\xff", 0, 1, "invalid"),
]
METHODS = ("exec", "kill_all", "get")
CODE = {
    "a lease in flight": LEASE,
    "a fork bomb": "import os\nwhile True:\n    try: os.fork()\n    except OSError: pass",
    "all memory": "x = []\nwhile True: x.append(bytearray(1 << 24))",
    "a full disk": "f = open('out.txt', 'wb')\nwhile True: f.write(bytes(1 << 20))",
    "no inode left": "import os\nfor n in range(10**6): os.mkdir(f'd{n}')",
    "deep folders": "import os\nfor n in range(3000): os.mkdir('d'); os.chdir('d')",
    "all descriptors in flight": (
        "import socket\nwhile True:\n    a, b = socket.socketpair()\n"
        "    socket.send_fds(a, [b'x'], [a.fileno(), b.fileno()])"
    ),
    "stopped processes": (
        "import os, signal, time\nfor n in range(20):\n    if not os.fork():\n"
        "        os.kill(os.getpid(), signal.SIGSTOP)"
    ),
    "stops everybody": "import os, signal\nos.kill(-1, signal.SIGSTOP)",
    "kills everybody": "import os, signal\nos.kill(-1, signal.SIGKILL)",
    "big dying processes": (
        "import os, time\nfor n in range(8):\n    if not os.fork():\n"
        "        x = bytearray(b'x') * (40 << 20); time.sleep(1000)"
    ),
    "a locked area": "import os\nos.chmod('.', 0)",
    "a fifo": "import os\nos.mkfifo('out.txt')",
    "a folder": "import os\nos.mkdir('out.txt')",
    "a loop of links": "import os\nos.symlink('out.txt', 'out.txt')",
    "a locked file": "import os\nopen('out.txt', 'w').close()\nos.chmod('out.txt', 0)",
    "a growing file": (
        "import os\nif not os.fork():\n    f = open('out.txt', 'wb', 0)\n"
        "    while True: f.write(b'x' * 100)"
    ),
    "output without end": "while True: print('x' * 10000)",
    "names that are no text": "open(b'\\xff\\xfe', 'w').close(); print('\\udcff')",
}


def lost(env, scripts, pool):
    """Episodes without a score, by name."""

    def turns(task):
        return [says(call("run", code=scripts[task.id])), says(content="yes")]

    tasks = [make_task(name, oracle={"files": {"out.txt": "right"}}) for name in scripts]
    with rollouts(env, Scripted("x", turns), pool=pool, retries=0, concurrency=2) as playing:
        groups = playing.gather(tasks, 0)
    found = {group.task.id: group.episodes[0] for group in groups}
    assert all(episode.score.value in (0.0, None) for episode in found.values())
    return {
        name: episode.failure[:300]
        for name, episode in found.items()
        if episode.end.ending is Ending.FAILED
    }


@pytest.mark.long
@pytest.mark.parametrize("method", METHODS)
def test_no_error_of_a_sandbox_that_only_the_agent_meets_loses_an_episode(bubblewrap, method):
    for start in range(0, len(FAULTS), 40):
        for number, fault in enumerate(FAULTS[start : start + 40]):
            pool = Pool(Injecting(method, fault), size=2)
            assert lost(Files, {f"{number}": "attack = 1"}, pool) == {}, repr(fault)


@pytest.mark.long
@pytest.mark.parametrize("backend", [BubblewrapBackend, DockerBackend])
def test_no_code_of_an_agent_loses_an_episode(backend):
    require(backend.name)

    class Short(Files):
        limits = Files.limits.__class__(turns=4, tool_calls=4, wall_s=60, tool_s=3)

    limits = SandboxLimits(memory_mb=256, disk_mb=32, processes=32)
    scripts = {
        f"{number} {name}": code
        for number, (name, code) in zip(range(EPISODES // 10), itertools.cycle(CODE.items()))
    }
    assert lost(Short, scripts, Pool(backend(), size=2, limits=limits)) == {}

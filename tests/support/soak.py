"""Hostile episodes over every cause that we can think of, and how many are left without a score.

As a program: `python -m soak EPISODES`, with the root of the repository and this folder in
PYTHONPATH; the last line is JSON.
"""

from __future__ import annotations

import errno
import json
import re
import sys
import time
from collections import Counter
from collections.abc import Iterator
from itertools import cycle, islice
from typing import Any, NamedTuple

from blame_world import LEASE, YES, Files, Injecting
from helpers import call, make_task, rollouts, says

from agentrl.errors import SandboxLost
from agentrl.policies.base import Scripted
from agentrl.sandboxes import Pool, SandboxLimits
from agentrl.types import Ending, Limits, Score
from agentrl.verifiers.base import Submission

BACKENDS = ("bubblewrap", "docker")
LIMITS = SandboxLimits(memory_mb=256, disk_mb=32, processes=32)
BATCH = 40
ORACLE = {"files": {"out.txt": "right"}}
WITNESSED = "a witness without the agent failed too"
FAULTS = [
    *(OSError(number, name) for number, name in sorted(errno.errorcode.items())),
    SandboxLost("no answer to kill within 10 s"),
    SandboxLost("3 processes survive SIGKILL"),
    MemoryError(),
    RecursionError(),
    TimeoutError("slow"),
    UnicodeDecodeError("utf-8", b"\xff", 0, 1, "invalid"),
]
# Of the sandbox of the agent, and "put" of the grader's as well.
METHODS = ("exec", "kill_all", "get", "put")
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
    "all inotify instances": (
        "import ctypes, os, time\nlibc = ctypes.CDLL(None)\n"
        "while libc.inotify_init1(0) >= 0: pass\n"
        "if os.fork() == 0: time.sleep(1000)"
    ),
    "waiting signals": (
        "import os, signal\nsignal.pthread_sigmask(signal.SIG_BLOCK, range(1, 65))\n"
        "import ctypes\nwhile ctypes.CDLL(None).sigqueue(os.getpid(), 40, None) == 0: pass\n"
        "os.fork()\nwhile True: pass"
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
    "many mappings that die slowly": (
        "import mmap, os, time\nfor n in range(20):\n    if not os.fork():\n"
        "        x = [mmap.mmap(-1, 4096 * (1 + k % 3)) for k in range(20000)]; time.sleep(1000)"
    ),
    "orphans of orphans": (
        "import os, time\nfor n in range(12):\n    if not os.fork():\n        os.setsid()\n"
        "        if os.fork(): os._exit(0)\n        time.sleep(1000)"
    ),
    "waiting for a vfork": (
        "import subprocess, os\nif not os.fork():\n"
        "    subprocess.Popen(['sh', '-c', 'kill -STOP $$; sleep 1000'])\n    os.wait()"
    ),
    "a locked area": "import os\nos.chmod('.', 0)",
    "a fifo": "import os\nos.mkfifo('out.txt')",
    "a folder": "import os\nos.mkdir('out.txt')",
    "a socket": "import socket\nsocket.socket(socket.AF_UNIX).bind('out.txt')",
    "a loop of links": "import os\nos.symlink('out.txt', 'out.txt')",
    "a link to the world": "import os\nos.symlink('/proc/1/environ', 'out.txt')",
    "a locked file": "import os\nopen('out.txt', 'w').close()\nos.chmod('out.txt', 0)",
    "a file with holes": "f = open('out.txt', 'wb')\nf.truncate(30 << 20)",
    "a growing file": (
        "import os\nif not os.fork():\n    f = open('out.txt', 'wb', 0)\n"
        "    while True: f.write(b'x' * 100)"
    ),
    "a file that comes and goes": (
        "import os\nif not os.fork():\n    while True:\n        open('out.txt', 'w').close()\n"
        "        os.unlink('out.txt')"
    ),
    "output without end": "while True: print('x' * 10000)",
    "no output and no end": "import os\nos.close(1); os.close(2)\nwhile True: pass",
    "names that are no text": "open(b'\\xff\\xfe', 'w').close(); print('\\udcff')",
    "half a surrogate pair": "print('\\\\ud800')\nopen('out.txt', 'wb').write(b'\\xed\\xa0\\x80')",
}


class Judged(Files):
    """The answer is a file that a grader reads."""

    id = "judged-v0"
    limits = Limits(turns=4, tool_calls=4, wall_s=60, tool_s=2)

    async def verifier(submission: Submission) -> Score:
        async with submission.pool.lease("grader") as grader:
            await grader.put({"out.txt": submission.artifacts.get("out.txt", b"")})
            done = await grader.exec(["/bin/cat", "out.txt"])
        return Score(float(done.stdout == b"right"))


class Case(NamedTuple):
    """One hostile episode: what is tried, on which backend, and the code that the agent runs."""

    cause: str
    backend: str
    code: str


def cases() -> Iterator[Case]:
    """Without end: one episode with hostile code, one with an injected fault, on both backends."""
    faults = cycle((method, number) for number in range(len(FAULTS)) for method in METHODS)
    for name, code in cycle(CODE.items()):
        method, number = next(faults)
        injected = f"{number} {type(FAULTS[number]).__name__} in {method}"
        for backend in BACKENDS:
            yield Case(name, backend, code)
            text = f"attack {method} {number} "
            yield Case(injected, backend, f"open('out.txt', 'w').write({text!r})")


def _fault_of(text: str) -> tuple[str, BaseException] | None:
    found = re.search(r"attack (\w+) (\d+) ", text)
    return (found[1], FAULTS[int(found[2])]) if found else None


def soak(episodes: int) -> dict[str, Any]:
    """Play so many, and an honest one for every ten on the same slots, and count how they end."""
    begun, endings, lost, honest = time.monotonic(), Counter(), Counter(), []
    witnessed, due = 0, list(islice(cases(), episodes))
    for backend in BACKENDS:
        mine = [case for case in due if case.backend == backend]
        for start in range(0, len(mine), BATCH):
            for case, episode in _play(backend, mine[start : start + BATCH]):
                if case is None:
                    honest.append(episode.score.value)
                    continue
                endings[episode.end.value] += 1
                assert episode.score.value in (0.0, None), (case.cause, episode.score)
                if episode.end.ending is Ending.FAILED:
                    both = WITNESSED in episode.failure
                    witnessed += both
                    lost[case.cause] += not both
                    print(f"{case.cause} on {backend}: {episode.failure[-400:]}", file=sys.stderr)
            print(f"{sum(endings.values())} of {episodes}", file=sys.stderr, flush=True)
    return {
        "episodes": sum(endings.values()),
        "causes": len({case.cause for case in due}),
        "endings": dict(endings),
        "none_of_the_witness_too": witnessed,
        "none": {cause: count for cause, count in lost.items() if count},
        "honest": len(honest),
        "honest_passed": honest.count(1.0),
        "minutes": round((time.monotonic() - begun) / 60, 1),
    }


def _play(backend: str, batch: list[Case]) -> Iterator[tuple[Case | None, Any]]:
    scripts = {f"{number}": case for number, case in enumerate(batch)}
    honest = [f"honest {number}" for number in range(0, len(batch), 10)]

    def turns(task):
        if task.id not in scripts:
            return list(Judged.oracle_actions(None, task))
        return [says(call("run", code=scripts[task.id].code)), YES]

    tasks = [make_task(name, oracle=ORACLE) for name in [*scripts, *honest]]
    pool = Pool(Injecting(_fault_of, backend), size=4, limits=LIMITS)
    with rollouts(Judged, Scripted("x", turns), pool=pool, retries=0, concurrency=3) as playing:
        for group in playing.gather(tasks, 0):
            yield scripts.get(group.task.id), group.episodes[0]


if __name__ == "__main__":
    print(json.dumps(soak(int(sys.argv[1]))))

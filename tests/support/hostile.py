"""Plays hostile cases in a proven boundary, and looks at the machine before and after.

The look at the sandbox is independent of the supervisor's own fingerprint: a program that runs
inside, as a command would, and tells all that the next episode could see. It is taken when a
sandbox is new and again after each reset.
"""

from __future__ import annotations

import asyncio
import json
import os
import platform
import subprocess
import tempfile
import textwrap
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from agentrl.errors import SandboxLost
from agentrl.sandboxes import BubblewrapBackend, DockerBackend, SandboxLimits
from agentrl.sandboxes.contract import prove_apart
from agentrl.sandboxes.contract.room import PYTHON

BACKENDS = {"bubblewrap": BubblewrapBackend, "docker": DockerBackend}
LIMITS = SandboxLimits(memory_mb=256, disk_mb=16, processes=24, open_files=64, inodes=4000)
X86 = platform.machine() == "x86_64"
HOST_FACTS = (
    "sys/kernel/hostname",
    "sys/kernel/core_pattern",
    "sys/kernel/shmmax",
    "sys/vm/overcommit_memory",
)
_IPC = ("shm", "sem", "msg")

# The programs check for themselves, too, that they are not on this machine: they are attacks.
GUARD = """
import os, sys
boot = open('/proc/sys/kernel/random/boot_id').read().strip()
if {here!r} == (os.readlink('/proc/self/ns/pid'), boot):
    sys.exit('not tried here')
"""
TOOLS = """
import ctypes, errno, fcntl, signal, socket, struct, time
libc = ctypes.CDLL(None, use_errno=True)
def syscall(number, *arguments):
    ctypes.set_errno(0)
    values = [number, *arguments]
    values = [ctypes.c_long(value) if isinstance(value, int) else value for value in values]
    result = libc.syscall(*values)
    if result == -1:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    return result
def refused(name, act, *arguments):
    try:
        print(name, 'worked:', act(*arguments))
    except (OSError, ValueError):
        pass
def attempt(act, *arguments, **options):
    try:
        return act(*arguments, **options)
    except OSError:
        return None
def write(path, text, mode='w'):
    with open(path, mode) as file:
        return file.write(text)
def child(act, session=False):
    pid = os.fork()
    if pid == 0:
        if session:
            os.setsid()
        try:
            act()
        finally:
            os._exit(0)
    return pid
"""

LOOK = r"""
import json, os, stat, time
def text(path):
    try:
        with open(path, 'rb') as file: return file.read().decode('latin-1')
    except OSError as error: return 'errno %d' % error.errno
def entry(path):
    info = os.lstat(path)
    size = info.st_size if stat.S_ISREG(info.st_mode) else 0
    try: names = os.listxattr(path, follow_symlinks=False)
    except OSError: names = []
    return [oct(info.st_mode), info.st_uid, info.st_gid, size, info.st_rdev, sorted(names)]
tree = {}
for root in ('/sandbox', '/tmp', '/dev', '/run', '/var/tmp', '/mnt', '/srv', '/home', '/etc'):
    tree[root] = entry(root) if os.path.lexists(root) else None
    if root == '/etc': continue
    for at, folders, names in os.walk(root):
        for name in folders + names:
            path = os.path.join(at, name)
            if not path.startswith('/dev/fd/'): tree[path] = entry(path)
        folders[:] = [name for name in folders if at != '/dev' or name != 'fd']
mounts = text('/proc/self/mountinfo')
space = {}
for line in mounts.splitlines():
    fields, _, kind = line.partition(' - ')
    if kind.startswith('tmpfs') and ' rw' in fields:
        point = fields.split()[4]
        seen = os.statvfs(point)
        space[point] = [seen.f_blocks, seen.f_bfree, seen.f_files, seen.f_ffree]
sysctl = {}
for root in ('net', 'fs/mqueue', 'user'):
    for at, _, names in os.walk('/proc/sys/' + root):
        for name in names:
            if 'nf_conntrack_count' not in name: sysctl[at + '/' + name] = text(at + '/' + name)
for name in ('hostname', 'domainname', 'shmmax', 'shmall', 'shmmni', 'sem', 'msgmax', 'msgmnb',
             'msgmni'):
    sysctl[name] = text('/proc/sys/kernel/' + name)
def status(pid):
    kept = ('Umask', 'Uid', 'Gid', 'Groups', 'NoNewPrivs', 'Seccomp', 'Threads', 'Cpus_allowed',
            'Mems_allowed')
    # Not SigQ, which counts the signals of a user.
    SIGNALS = ('SigB', 'SigI', 'SigC', 'CapI', 'CapP', 'CapE', 'CapB', 'CapA')
    lines = (line.partition(':') for line in text('/proc/%s/status' % pid).splitlines())
    return {name: value.strip() for name, _, value in lines if name in kept or name[:4] in SIGNALS}
def standing(pid):
    places = ('limits', 'oom_score_adj', 'cgroup', 'comm')
    fields = text('/proc/%s/stat' % pid).rpartition(')')[2].split()
    files = {name: text('/proc/%s/%s' % (pid, name)) for name in places}
    return {**status(pid), **files, 'priority': fields[15:17], 'policy': fields[37:39]}
sockstat = text('/proc/net/sockstat') + text('/proc/net/sockstat6')
sockstat = [line.split()[:3] for line in sockstat.splitlines()]
tables = ('unix', 'tcp', 'tcp6', 'udp', 'udp6', 'raw', 'raw6', 'packet', 'udplite', 'dev_mcast',
          'igmp', 'route', 'arp')
pids = [name for name in os.listdir('/proc') if name.isdigit() and int(name) != os.getpid()]
ipc = [text('/proc/sysvipc/' + name) for name in ('shm', 'sem', 'msg')]
namespaces = sorted(os.listdir('/proc/self/ns'))
seen = {
    'tree': tree, 'space': space, 'mounts': mounts, 'sysctl': sysctl,
    'processes': sorted(pids),
    'self': standing('self'), 'environment': dict(os.environ), 'cwd': os.getcwd(),
    'descriptors': sorted(os.listdir('/proc/self/fd')),
    'ipc': ipc + sorted(os.listdir('/dev/mqueue')),
    # Open file description locks have no pid, so those of all are listed.
    'locks': [line for line in text('/proc/locks').splitlines() if ' OFDLCK ' not in line],
    'sockets': [sockstat] + [text('/proc/net/' + name) for name in tables],
    'netlink': len(text('/proc/net/netlink').splitlines()), 'ptys': os.listdir('/dev/pts'),
    'namespaces': {name: os.readlink('/proc/self/ns/' + name) for name in namespaces},
    'timens': text('/proc/self/timens_offsets'), 'names': list(os.uname())[:2],
}
for _ in range(300):  # process 1 is somebody else for the moment in which it starts us
    seen['init'] = standing(1)
    scores = [seen[who]['oom_score_adj'] for who in ('init', 'self')]
    if len(set(seen['init']['Uid'].split())) == 1 and scores[0] != scores[1]:
        break
    time.sleep(0.01)
clock = time.time() - time.clock_gettime(time.CLOCK_BOOTTIME)
print(json.dumps([seen, clock], sort_keys=True))
"""


def namespace() -> tuple[str, str]:
    """What tells this machine from a sandbox."""
    return (
        os.readlink("/proc/self/ns/pid"),
        Path("/proc/sys/kernel/random/boot_id").read_text().strip(),
    )


def program(code: str) -> list[str]:
    """The argv of an attack."""
    return [*PYTHON, GUARD.format(here=namespace()) + TOOLS + textwrap.dedent(code)]


async def look(box) -> dict:
    """What an episode would see that starts in this sandbox now, and its manifest from outside."""
    done = await box.exec([*PYTHON, LOOK], timeout_s=20)
    assert done.exit_code == 0, done
    seen, clock = json.loads(done.stdout)
    assert abs(clock - (time.time() - time.clock_gettime(time.CLOCK_BOOTTIME))) < 1, (
        "the sandbox has another clock"
    )
    return {**seen, "manifest": [str(info) for info in await box.manifest()]}


def differences(one: dict, other: dict, path: str = "") -> list[str]:
    """Where two looks differ, in words."""
    found = []
    for name in sorted({*one, *other}):
        mine, theirs = one.get(name), other.get(name)
        if isinstance(mine, dict) and isinstance(theirs, dict):
            found += differences(mine, theirs, f"{path}{name}.")
        elif mine != theirs:
            found.append(f"{path}{name}: {mine!r:.300} -> {theirs!r:.300}")
    return found


@dataclass(frozen=True)
class Case:
    """One thing that hostile code tries.

    Attributes:
        attack: does it and raises AssertionError if a limit did not hold.
        long: takes longer than a second or so.
        unbounded: may also be tried where no control group bounds the sandbox's memory.
    """

    name: str
    attack: Callable[[object], Awaitable[None]]
    long: bool = False
    unbounded: bool = True

    def __str__(self) -> str:
        return self.name


# States of a process (proc(5)) that a signal from a sandbox could have brought about; one that
# starts reads its program from the disk, which is D.
STOPPED = "TtZX"


class Host:
    """A bystander on this machine: a process, a file, and facts that no sandbox may change."""

    def __init__(self) -> None:
        self._process = subprocess.Popen(["sleep", "100000"])
        self._file = tempfile.NamedTemporaryFile()  # noqa: SIM115 - lives as long as this
        self._file.write(b"untouched")
        self._file.flush()
        self._start = self._look()

    def _look(self) -> list[object]:
        stat = Path(f"/proc/{self._process.pid}/stat").read_text().rpartition(")")[2].split()
        info = os.stat(self._file.name)
        mine = [os.getpriority(os.PRIO_PROCESS, pid) for pid in (0, self._process.pid)]
        mine += [sorted(os.sched_getaffinity(0)), Path("/proc/self/limits").read_text()]
        facts = [Path("/proc", name).read_text() for name in HOST_FACTS]
        ipc = [len(Path("/proc/sysvipc", name).read_text().splitlines()) for name in _IPC]
        file = [info.st_mode, info.st_uid, info.st_nlink, Path(self._file.name).read_bytes()]
        return [
            stat[0] not in STOPPED,
            stat[19],
            file,
            mine,
            facts,
            ipc,
            os.path.exists("/agentrl.hostile"),
        ]

    def check(self) -> None:
        """Raise AssertionError if anything changed."""
        now = self._look()
        assert now == self._start, f"the host changed: {self._start} -> {now}"

    def close(self) -> None:
        self._process.kill()
        self._process.wait()
        self._file.close()


@dataclass
class Slot:
    """One sandbox of a backend after the other: reset after each case, replaced if lost."""

    backend: object
    limits: SandboxLimits = LIMITS
    opened: int = 0
    resets: int = 0
    lost: list[str] = field(default_factory=list)
    box: object = None
    fresh: dict = field(default_factory=dict)

    async def ready(self):
        """The sandbox: one that has shown to be one, and to look like a new one."""
        if self.box is None:
            self.box = await self.backend.open("agent", self.limits)
            self.opened += 1
            self.fresh = await look(self.box)
        await prove_apart(self.box)
        return self.box

    async def reset(self, name: str = "") -> bool:
        """Reset it and compare it with its state when it was new; False if it was lost instead."""
        try:
            await self.box.reset()
            self.resets += 1
            found = differences(self.fresh, await look(self.box)) + await self.box.verify()
        except SandboxLost as error:
            self.lost.append(f"{name}: {error}")
            await self.close()
            return False
        assert not found, f"undetected after {name}: {found}"
        return True

    async def close(self) -> None:
        if self.box is not None:
            box, self.box = self.box, None
            await box.close()

    async def play(self, case: Case, host: Host) -> None:
        """One case, from a clean sandbox to a clean sandbox."""
        box = await self.ready()
        try:
            if case.unbounded or box.bounded:
                await case.attack(box)
        except SandboxLost as error:
            self.lost.append(f"{case}: {error}")
            await self.close()
        else:
            await self.reset(case.name)
        finally:
            host.check()


def play_all(backend: str, cases: Sequence[Case]) -> dict[str, object]:
    """Play cases one after the other in one slot; what failed, and the counts."""

    async def main() -> dict[str, object]:
        host, slot, failed = Host(), Slot(BACKENDS[backend]()), {}
        try:
            for case in cases:
                try:
                    await asyncio.wait_for(slot.play(case, host), 60)
                except (AssertionError, TimeoutError, OSError, ValueError) as error:
                    failed[case.name] = f"{type(error).__name__}: {error}"
                    await slot.close()
        finally:
            await slot.close()
            host.close()
        return {"failed": failed, "lost": slot.lost, "resets": slot.resets, "played": len(cases)}

    return asyncio.run(main())

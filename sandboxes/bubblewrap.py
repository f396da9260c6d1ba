"""Sandboxes made of Linux namespaces by bubblewrap: no network, no host files, no daemon."""

from __future__ import annotations

import asyncio
import fcntl
import os
import re
import shutil
import signal
import time
from pathlib import Path

from agentrl.errors import BackendAway, SandboxLost
from agentrl.sandboxes import seccomp
from agentrl.sandboxes.base import Sandbox, SandboxLimits, SandboxRole
from agentrl.sandboxes.cgroup import MemoryGroup, home
from agentrl.sandboxes.launch import Child, compiled, memory_file, starting
from agentrl.sandboxes.supervised import (
    COMMON_ENV,
    OPEN_S,
    Place,
    SupervisedSandbox,
    rlimits,
)
from agentrl.sandboxes.uids import Uid, entering, usable

PYTHON = "/usr/bin/python3"
AREA = "/sandbox"
UID = 1000
_SHM_MB = 16
_PASSWD = f"sandbox:x:{UID}:{UID}::{AREA}/work:/bin/sh\n"
_GROUP = f"sandbox:x:{UID}:\n"
_FILTER = "seccomp"
_PROGRAMS = {"setpriv": "util-linux", "nsenter": "util-linux", "mount": "mount"}
_ENDING_S = 1.0
# What the kernel else counts per user, for all sandboxes of an ordinary one together: at most so
# many of each in one sandbox (namespaces(7)). Its supervisor has no right to change them.
PER_SANDBOX = {
    "max_fanotify_groups": 4,
    "max_fanotify_marks": 4096,
    "max_inotify_instances": 4,
    "max_inotify_watches": 4096,
}
SIGNALS = 1024
"""Signals and timers that may wait at the same time."""
TERMINALS = 16
"""Pseudo-terminals of one sandbox; the machine has 3,072 for all (`kernel.pty.max` less `reserve`).
"""
# As uid 0 of the namespace, which mount(8) wants; the groups cannot be changed there.
_REMOUNT = (
    *("--preserve-credentials", "--setuid=0", "mount", "-t", "devpts", "-o"),
    f"remount,nosuid,noexec,ptmxmode=0666,mode=620,max={TERMINALS}",
    *("devpts", "/dev/pts"),
)
_INFO_BYTES = 4096
_NS_GET_USERNS = 0xB701  # ioctl_ns(2): the user namespace that owns this one
_USER = "/proc/sys/user"
_ARCHIVE = "/supervisor.pyz"
_START = (
    " && ".join(
        f"{{ [ ! -e {_USER}/{name} ] || echo {value} >{_USER}/{name}; }}"
        for name, value in PER_SANDBOX.items()
    )
    + ' && printf . && exec setpriv --ambient-caps=-all --inh-caps=-all --bounding-set=-all "$@"'
)
_SIGKILL = (-signal.SIGKILL, 128 + signal.SIGKILL)  # of bubblewrap itself; of the supervisor in it


class BubblewrapBackend:
    """One long-lived set of namespaces per sandbox, with the supervisor as process 1 in it.

    Inside: read-only /usr, a work area and /tmp on one size-capped tmpfs, its own /proc and /dev, a
    loopback and nothing else of a network, no capability, one uid. When root starts it, it runs as
    a uid that owns nothing, since the kernel lets the host's uid 0 write /proc/sys from any
    namespace and exempts it from process limits. An ordinary user's runs as one of his subordinate
    uids, where he has some.
    """

    name = "bubblewrap"
    is_boundary = True

    async def open(self, role: SandboxRole, limits: SandboxLimits) -> Sandbox:
        """Start one.

        Raises:
            SandboxLost: it could not be started; the message names the missing part and the fix.
        """
        problem = missing()
        if problem:
            raise SandboxLost(problem)
        group = None if (place := home()) is None else MemoryGroup(place, total_mb(limits) << 20)
        child = _start(limits, group)
        try:
            await child.settle()
        except BaseException:
            await child.gone()
            raise
        return await SupervisedSandbox.open(child, _place(limits, group), limits)


class _Guest(Child):
    """A bubblewrap with the supervisor in it, its uid, and the memory group of that, if any.

    The group takes in the supervisor alone, before it has been asked for anything: bubblewrap's own
    process outside stays with us, and dies with us.
    """

    def __init__(self, argv: list[str], fds: tuple[int, ...], group: MemoryGroup | None) -> None:
        self._group = group
        self._kills = _oom_kills()
        self._uid = None if isinstance(numbers := usable(), str) else Uid(numbers)
        self._info, theirs = os.pipe()
        argv = [argv[0], "--info-fd", str(theirs), *argv[1:]]
        user = None if self._uid is None else self._uid.number
        if user is not None and os.geteuid() != 0:
            argv, user = [*entering(user, UID), *argv], None
        fds = (*fds, theirs, *(group.files if group is not None else ()))
        try:
            super().__init__(argv, env={}, pass_fds=fds, user=user)
        except BaseException:
            self._let_go()
            raise
        finally:
            os.close(theirs)

    async def settle(self) -> None:
        """Once its file systems are there: bound its terminals, and move it into its group.

        Raises:
            SandboxLost: the kernel refuses, or it does not start in time.
        """
        loop = asyncio.get_running_loop()
        try:
            started = await asyncio.wait_for(loop.sock_recv(self.sock, 1), OPEN_S)
        except (TimeoutError, OSError) as error:
            raise SandboxLost(f"bubblewrap does not start: {error} {self.words()}") from error
        if not started:  # bubblewrap has failed, and says why itself
            return
        found = re.search(rb'"child-pid": (\d+)', os.read(self._info, _INFO_BYTES))
        assert found is not None, "bubblewrap tells the pid before it starts anything"
        await _bound_terminals(int(found[1]))
        if self._group is not None:
            self._group.add(int(found[1]))

    async def cause(self) -> str:
        """Empty.

        Raises:
            BackendAway: SIGKILL ended it, which was neither ours nor the kernel's for lack of
                memory. Nothing inside can send that signal to process 1.
        """
        deadline = time.monotonic() + _ENDING_S
        while self.status is None and time.monotonic() < deadline:
            await asyncio.sleep(0.01)
        kills = _oom_kills()
        ours = self.killed and self.status == -signal.SIGKILL
        if self.status in _SIGKILL and not ours and kills is not None and kills == self._kills:
            raise BackendAway("it was killed from outside")
        return ""

    async def gone(self) -> None:
        await super().gone()
        self._let_go()
        if self._group is not None:
            await self._group.remove()

    def _let_go(self) -> None:
        if self._info >= 0:
            os.close(self._info)
            self._info = -1
        if self._uid is not None:
            self._uid.release()


def _start(limits: SandboxLimits, group: MemoryGroup | None) -> _Guest:
    files = {name: memory_file(name, data) for name, data in _contents(limits).items()}
    try:
        return _Guest(_argv(limits, files), tuple(files.values()), group)
    except BaseException:
        if group is not None:
            group.abandon()
        raise
    finally:
        for fd in files.values():
            os.close(fd)


def _oom_kills() -> int | None:
    """How many processes this machine's kernel has ended for lack of memory; None: not told."""
    found = re.search(rb"^oom_kill (\d+)$", Path("/proc/vmstat").read_bytes(), re.MULTILINE)
    return int(found[1]) if found else None


async def _bound_terminals(pid: int) -> None:
    """Let the sandbox of this process have so many pseudo-terminals, and no more.

    bubblewrap cannot say it, and the sandbox's own filter denies mount: so it is done from outside.

    Raises:
        SandboxLost: the kernel refuses.
    """
    try:
        mounts = os.open(f"/proc/{pid}/ns/mnt", os.O_RDONLY | os.O_CLOEXEC)
    except FileNotFoundError:  # it has ended, which its socket tells
        return
    owner = -1
    try:
        # Not the process's own, which bubblewrap made below this one.
        owner = fcntl.ioctl(mounts, _NS_GET_USERNS)
        enter = [f"--user=/proc/self/fd/{owner}", f"--mount=/proc/self/fd/{mounts}"]
        process = await asyncio.create_subprocess_exec(
            *("nsenter", *enter, *_REMOUNT),
            env={},
            pass_fds=(mounts, owner),
            stderr=asyncio.subprocess.PIPE,
        )
    except OSError as error:
        raise SandboxLost(f"cannot bound the terminals of a sandbox: {error}") from error
    finally:
        for fd in (mounts, owner):
            if fd >= 0:
                os.close(fd)
    _, said = await process.communicate()
    if process.returncode and Path("/proc", str(pid)).exists():
        why = said.decode("utf-8", "replace").strip()
        raise SandboxLost(f"cannot bound the terminals of a sandbox: {why}")


def _place(limits: SandboxLimits, group: MemoryGroup | None) -> Place:
    return Place(
        area=AREA,
        private=True,
        others=("/dev/shm", "/dev/mqueue"),
        env=COMMON_ENV | {"PATH": "/usr/bin:/bin", "HOME": f"{AREA}/work", "TMPDIR": "/tmp"},
        rlimits=rlimits(limits)
        | {"nproc": limits.processes + 1, "msgqueue": 0, "sigpending": SIGNALS},
        demands=frozenset({"traceless", "adopts", "limited", *(["bounded"] if group else [])}),
        memory=group.files if group else (),
    )


def total_mb(limits: SandboxLimits) -> int:
    """Memory in MB of all processes and files of one sandbox, where a control group bounds it.

    It includes the disks, so a full disk takes no memory away from processes.
    """
    return limits.memory_mb + limits.disk_mb + _SHM_MB


def memory_bound() -> str:
    """What bounds the memory of a sandbox here, in words."""
    return (
        "memory bounded in total by a cgroup"
        if home()
        else "memory bounded per process: no cgroup may be made here"
    )


def missing() -> str | None:
    """Why bubblewrap cannot be used here, with the fix; None if it can. Starts no sandbox."""
    if shutil.which("bwrap") is None:
        return "bubblewrap is not installed: install the Debian package bubblewrap"
    for name, package in _PROGRAMS.items():
        if shutil.which(name) is None:
            return f"the sandbox needs {name}: install the Debian package {package}"
    if not os.access(PYTHON, os.X_OK):
        return f"the sandbox needs {PYTHON}: install the Debian package python3"
    for switch, off in (
        ("kernel/unprivileged_userns_clone", "0"),
        ("user/max_user_namespaces", "0"),
    ):
        path = Path("/proc/sys") / switch
        if path.exists() and path.read_text().strip() == off:
            return (
                f"user namespaces are switched off: sysctl -w {switch.replace('/', '.')}=1 (or"
                " 65536 for a maximum)"
            )
    return None


def _contents(limits: SandboxLimits) -> dict[str, bytes]:
    """What bubblewrap reads from descriptors: files by path inside, and the system-call filter."""
    texts = {"/etc/passwd": _PASSWD, "/etc/group": _GROUP}
    return {
        _ARCHIVE: compiled(PYTHON),
        _FILTER: seccomp.filter_program(needs=limits.needs),
        **{path: text.encode() for path, text in texts.items()},
    }


def _argv(limits: SandboxLimits, files: dict[str, int]) -> list[str]:
    argv = [
        "bwrap",
        "--unshare-all",
        "--unshare-user",
        "--die-with-parent",
        "--new-session",
        "--as-pid-1",
    ]
    argv += [
        *("--cap-drop", "ALL", "--cap-add", "CAP_SYS_RESOURCE", "--cap-add", "CAP_SETPCAP"),
        "--uid",
        str(UID),
        "--gid",
        str(UID),
        "--hostname",
        "sandbox",
        "--chdir",
        "/",
    ]
    argv += ["--ro-bind", "/usr", "/usr"]
    for name in ("bin", "lib", "lib32", "lib64", "sbin"):
        path = Path("/") / name
        if path.is_symlink():
            argv += ["--symlink", os.readlink(path), str(path)]
        elif path.exists():
            argv += ["--ro-bind", str(path), str(path)]
    argv += ["--perms", "0755", "--dir", "/etc", "--seccomp", str(files[_FILTER])]
    for path_inside, fd in files.items():
        if path_inside != _FILTER:
            argv += ["--perms", "0444", "--ro-bind-data", str(fd), path_inside]
    for name in ("/etc/alternatives", "/etc/ld.so.cache"):
        argv += ["--ro-bind-try", name, name]
    argv += [
        "--proc",
        "/proc",
        *("--ro-bind", "/proc/sys", "/proc/sys", "--bind", _USER, _USER),
        "--dev",
        "/dev",
        "--mqueue",
        "/dev/mqueue",
    ]
    argv += [
        "--size",
        str(_SHM_MB << 20),
        "--perms",
        "0700",
        "--tmpfs",
        "/dev/shm",
        "--remount-ro",
        "/dev",
    ]
    argv += ["--size", str(limits.disk_mb << 20), "--perms", "0755", "--tmpfs", AREA]
    argv += ["--symlink", f"{AREA}/tmp", "/tmp", "--remount-ro", "/"]
    argv += ["--", "/bin/sh", "-c", _START, "sh"]
    return [*argv, *starting(PYTHON, _ARCHIVE)]

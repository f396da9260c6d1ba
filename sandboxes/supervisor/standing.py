"""What the supervisor asks of the kernel: no tracing, adopting orphans, limits."""

from __future__ import annotations

import os

PR_SET_DUMPABLE = 4
PR_SET_CHILD_SUBREAPER = 36
OOM_SCORE, OOM_COMMAND = 500, 1000
# Names of `resource` in lower case, as /proc/self/limits has them.
LIMITS = {
    "as": "Max address space",
    "core": "Max core file size",
    "data": "Max data size",
    "fsize": "Max file size",
    "memlock": "Max locked memory",
    "msgqueue": "Max msgqueue size",
    "nofile": "Max open files",
    "nproc": "Max processes",
    "sigpending": "Max pending signals",
}


def set_property(option: int, value: int) -> bool:
    """Set a property of this process; False where `ctypes` is missing or the kernel refuses."""
    try:
        import ctypes
    except ImportError:
        return False
    return bool(ctypes.CDLL(None).prctl(option, value, 0, 0, 0) == 0)


class Victims:
    """Who ends first when memory runs out: commands before this program.

    What runs here ends before the host's own work.
    """

    def __init__(self, private: bool = False) -> None:
        """Take effect for this program, where the sandbox is its alone; else nothing changes."""
        self._file = -1
        if not private:
            return
        self._file = os.open("/proc/self/oom_score_adj", os.O_RDWR | os.O_CLOEXEC)
        self._own = b"%d" % max(int(os.pread(self._file, 16, 0)), OOM_SCORE)
        self._write(b"%d" % OOM_COMMAND)
        try:
            self._write(self._own)
        except PermissionError:  # the way back is barred: then all here are equal
            os.close(self._file)
            self._file = -1

    def __enter__(self) -> None:
        """What starts in the block ends before this program."""
        if self._file >= 0:
            self._write(b"%d" % OOM_COMMAND)

    def __exit__(self, *_: object) -> None:
        if self._file >= 0:
            self._write(self._own)

    def _write(self, score: bytes) -> None:
        os.pwrite(self._file, score, 0)


def limit(limits: bytes) -> bool:
    """Bind this process and all that it will start; without `resource`, only check the limits."""
    pairs = (item.partition("=") for item in limits.decode().split(",") if item)
    wanted = {name: int(text) for name, _, text in pairs}
    try:
        import resource
    except ImportError:
        return _bound(wanted)
    for name, value in wanted.items():
        number = getattr(resource, f"RLIMIT_{name.upper()}")
        ceiling = resource.getrlimit(number)[1]
        if ceiling != resource.RLIM_INFINITY:
            value = min(value, ceiling)
        resource.setrlimit(number, (value, value))
    return True


def _bound(wanted: dict[str, int]) -> bool:
    with open("/proc/self/limits") as file:
        lines = file.read().splitlines()
    for name, value in wanted.items():
        title = LIMITS[name]
        soft = next(line[len(title) :].split()[0] for line in lines if line.startswith(title))
        if soft == "unlimited" or int(soft) > value:
            return False
    return True

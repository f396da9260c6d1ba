"""What the supervisor asks of the kernel for itself: not to be traced, to adopt orphans, to be bound by limits."""

from __future__ import annotations

PR_SET_DUMPABLE = 4
PR_SET_CHILD_SUBREAPER = 36
OOM_SCORE = 500


def set_property(option: int, value: int) -> bool:
    """Set a property of this process; False where `ctypes` is missing or the kernel refuses."""
    try:
        import ctypes
    except ImportError:
        return False
    return bool(ctypes.CDLL(None).prctl(option, value, 0, 0, 0) == 0)


def prefer_as_victim() -> None:
    """When memory runs out, the kernel shall end what runs here before it ends the host's work."""
    with open("/proc/self/oom_score_adj", "r+") as file:
        if int(file.read()) < OOM_SCORE:
            file.seek(0)
            file.write(str(OOM_SCORE))


def limit(limits: bytes) -> bool:
    """Bind this process and all that it will start; False where `resource` is missing."""
    try:
        import resource
    except ImportError:
        return False
    for item in filter(None, limits.decode().split(",")):
        name, _, text = item.partition("=")
        number = getattr(resource, f"RLIMIT_{name.upper()}")
        value = int(text)
        ceiling = resource.getrlimit(number)[1]
        if ceiling != resource.RLIM_INFINITY:
            value = min(value, ceiling)
        resource.setrlimit(number, (value, value))
    return True

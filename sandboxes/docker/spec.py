"""What a container may and may not: the request that creates it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from agentrl.sandboxes.base import SandboxLimits
from agentrl.sandboxes.docker.images import ARCHIVE, PYTHON
from agentrl.sandboxes.docker.owner import DEADLINE_LABEL
from agentrl.sandboxes.docker.profile import profile
from agentrl.sandboxes.launch import starting

AREA = "/sandbox"
SHM_MB = 16
# To step down to the user of commands and back, to end what that user runs, to hand directories
# over. No right over files is among them: all that an agent made is read and wiped as the agent.
CAPABILITIES = ("SETUID", "SETGID", "KILL", "CHOWN")
# Hides the host's hardware and kernel, and what Docker hides by default.
_SYS = (
    "block",
    "bus",
    "class",
    "dev",
    "devices",
    "firmware",
    "hypervisor",
    "kernel",
    "module",
    "power",
)
MASKED = (
    *(f"/sys/{name}" for name in _SYS),
    "/proc/acpi",
    "/proc/asound",
    "/proc/kcore",
    "/proc/keys",
    "/proc/key-users",
    "/proc/latency_stats",
    "/proc/sched_debug",
    "/proc/scsi",
    "/proc/timer_list",
    "/proc/timer_stats",
)
READ_ONLY = ("/proc/bus", "/proc/fs", "/proc/irq", "/proc/sys", "/proc/sysrq-trigger")
_OOM_SCORE = 500
_RUNC_DATA = 256 << 20


@dataclass(frozen=True)
class ContainerSpec:
    """What a container is made from.

    Attributes:
        image: id of an image with our supervisor.
        runtime: an OCI runtime that the daemon knows, as runsc; None for its default.
        userns: user-namespace mode; None for the daemon's default.
    """

    image: str
    limits: SandboxLimits
    labels: Mapping[str, str]
    runtime: str | None = None
    userns: str | None = None

    def config(self, cores: float) -> dict[str, Any]:
        """The request that creates it."""
        return {
            "Image": self.image,
            "User": "0:0",
            "Hostname": "sandbox",
            "WorkingDir": "/",
            "Entrypoint": starting(PYTHON, ARCHIVE),
            "Cmd": [self.labels[DEADLINE_LABEL]],
            "Healthcheck": {"Test": ["NONE"]},
            "Labels": dict(self.labels),
            "Tty": False,
            "OpenStdin": True,
            "StdinOnce": True,  # the end of our connection is the end of its stdin, and so its own
            "AttachStdin": True,
            "AttachStdout": True,
            "AttachStderr": True,
            "NetworkDisabled": True,
            "StopTimeout": 1,
            "HostConfig": self._host_config(cores),
        }

    def _host_config(self, cores: float) -> dict[str, Any]:
        limits, memory = self.limits, memory_mb(self.limits) << 20
        config: dict[str, Any] = {
            "AutoRemove": True,
            "NetworkMode": "none",
            # Private, and without Docker's own /dev/shm, whose number of files has no limit.
            "IpcMode": "none",
            "CgroupnsMode": "private",
            "Init": False,
            "Privileged": False,
            "ReadonlyRootfs": True,
            "CapDrop": ["ALL"],
            "CapAdd": list(CAPABILITIES),
            "SecurityOpt": ["no-new-privileges", f"seccomp={profile(limits.needs)}"],
            "MaskedPaths": list(MASKED),
            "ReadonlyPaths": list(READ_ONLY),
            "Tmpfs": _tmpfs(limits),
            "Memory": memory,
            "MemorySwap": memory,
            "NanoCpus": int(min(limits.cpus, cores) * 1e9),
            "PidsLimit": limits.processes + 1,
            "OomScoreAdj": _OOM_SCORE,
            "Ulimits": _ulimits(limits),
            # Else closed connections outlive a reset.
            "Sysctls": {"net.ipv4.tcp_max_tw_buckets": "0"},
            "LogConfig": {"Type": "none", "Config": {}},
        }
        if self.runtime is not None:
            config["Runtime"] = self.runtime
        if self.userns is not None:
            config["UsernsMode"] = self.userns
        return config


def _tmpfs(limits: SandboxLimits) -> dict[str, str]:
    common = "rw,exec,nosuid,nodev"
    sizes = {
        AREA: (limits.disk_mb, "0755"),
        "/tmp": (_tmp_mb(limits), "1777"),
        "/dev/shm": (SHM_MB, "1777"),
    }
    return {
        path: f"{common},mode={mode},size={size}m,nr_inodes={limits.inodes}"
        for path, (size, mode) in sizes.items()
    }


def _tmp_mb(limits: SandboxLimits) -> int:
    return max(1, limits.disk_mb // 4)


def memory_mb(limits: SandboxLimits) -> int:
    """Memory in MB of all processes and files of one container.

    It includes the disks, so a full disk takes no memory away from processes.
    """
    return limits.memory_mb + limits.disk_mb + _tmp_mb(limits) + SHM_MB


def container_rlimits(limits: SandboxLimits) -> dict[str, int]:
    """Limits of each process, by names of `resource` in lower case.

    Docker cannot limit address space, so `data` is limited.
    """
    return {
        "core": 0,
        "data": limits.memory_mb << 20,
        "fsize": limits.disk_mb << 20,
        "memlock": 0,
        "msgqueue": 0,
        "nofile": limits.open_files,
    }


def _ulimits(limits: SandboxLimits) -> list[dict[str, Any]]:
    values = container_rlimits(limits)
    # This limit binds runc, which starts the container, too.
    values["data"] = max(values["data"], _RUNC_DATA)
    return [{"Name": name, "Soft": value, "Hard": value} for name, value in values.items()]

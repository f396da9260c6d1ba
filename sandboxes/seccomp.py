"""The system-call filter of a sandbox, as a classic BPF program for x86-64 and arm64.

A list of what is denied, on top of namespaces without capabilities. It closes what those leave
open: kernel objects that outlive a reset (System V IPC, message queues, keys), nested user
namespaces (the usual first step of a kernel exploit), sockets that no network namespace confines
(AF_VSOCK), tracing, and the few calls by which one process can starve or limit another of the same
uid: none of them may name process 1, the supervisor.
"""

from __future__ import annotations

import errno
import platform
import struct
from collections.abc import Iterable
from dataclasses import dataclass

from agentrl.errors import SandboxLost
from agentrl.sandboxes.base import SandboxNeed

_LOAD, _EQUAL, _AT_LEAST, _ANY_BIT, _RETURN = 0x20, 0x15, 0x35, 0x45, 0x06
_ALLOW, _ERRNO = 0x7FFF0000, 0x00050000
_NR, _ARCH, _ARGUMENT = 0, 4, 16
# Newer calls, and x86-64's x32 variants, are unknown to the program that asks: it falls back to
# older ones.
_FIRST_UNKNOWN = 453
NEW_NAMESPACES = 0x7E020000
LOCAL_FAMILIES = (1, 2, 10, 16)  # unix, inet, inet6, netlink

# name: (x86-64, arm64)
DENIED = {
    "shmget": (29, 194),
    "semget": (64, 190),
    "msgget": (68, 186),
    "mq_open": (240, 180),
    "ptrace": (101, 117),
    "process_vm_readv": (310, 270),
    "process_vm_writev": (311, 271),
    "process_madvise": (440, 440),
    "pidfd_getfd": (438, 438),
    "kcmp": (312, 272),
    "io_uring_setup": (425, 425),
    "bpf": (321, 280),
    "perf_event_open": (298, 241),
    "userfaultfd": (323, 282),
    "add_key": (248, 217),
    "request_key": (249, 218),
    "keyctl": (250, 219),
    "mount": (165, 40),
    "umount2": (166, 39),
    "pivot_root": (155, 41),
    "chroot": (161, 51),
    "open_tree": (428, 428),
    "move_mount": (429, 429),
    "fsopen": (430, 430),
    "mount_setattr": (442, 442),
    "unshare": (272, 97),
    "setns": (308, 268),
    "name_to_handle_at": (303, 264),
    "open_by_handle_at": (304, 265),
    "syslog": (103, 116),
}
# As if the kernel had not been built with it: its contexts are so many for the whole machine
# (fs.aio-max-nr), and one sandbox could hold them all.
ABSENT = {"io_setup": (206, 0)}
# What a need permits, of all that belongs to it; process 1 is not traceable in any case.
PERMITTED: dict[SandboxNeed, tuple[str, ...]] = {
    "ptrace": ("ptrace", "process_vm_readv", "process_vm_writev"),
    "sysvipc": (
        *("msgctl", "msgget", "msgrcv", "msgsnd"),
        *("semctl", "semget", "semop", "semtimedop"),
        *("shmat", "shmctl", "shmdt", "shmget"),
    ),
}
# name: numbers, and the index of the argument that may not be 1
NOT_THE_SUPERVISOR = {
    "prlimit64": ((302, 261), 0),
    "sched_setparam": ((142, 118), 0),
    "sched_setscheduler": ((144, 119), 0),
    "sched_setaffinity": ((203, 122), 0),
    "sched_setattr": ((314, 274), 0),
    "setpriority": ((141, 140), 1),
    "ioprio_set": ((251, 30), 1),
}
# name: numbers, and the only value of argument 0: one process, no group or user
ONE_PROCESS = {"setpriority": ((141, 140), 0), "ioprio_set": ((251, 30), 1)}
_CLONE, _CLONE3, _SOCKET = (56, 220), (435, 435), (41, 198)


@dataclass(frozen=True)
class _Machine:
    audit: int
    column: int


_MACHINES = {"x86_64": _Machine(0xC000003E, 0), "aarch64": _Machine(0xC00000B7, 1)}


def filter_program(machine: str | None = None, needs: Iterable[SandboxNeed] = ()) -> bytes:
    """The filter that permits these needs, as an array of `struct sock_filter`.

    The machine is this one unless given.

    Raises:
        SandboxLost: there is no filter for that machine.
    """
    name = machine or platform.machine()
    if name not in _MACHINES:
        raise SandboxLost(
            f"no system-call filter for {name}: bubblewrap sandboxes need {' or '.join(_MACHINES)}"
        )
    at, audit = _MACHINES[name].column, _MACHINES[name].audit
    refuse, unknown = _ERRNO | errno.EPERM, _ERRNO | errno.ENOSYS
    code = [_op(_LOAD, _ARCH), _op(_EQUAL, audit, 1, 0), _op(_RETURN, refuse)]
    code += [_op(_LOAD, _NR), _op(_AT_LEAST, _FIRST_UNKNOWN, 0, 1), _op(_RETURN, unknown)]
    for numbers in (_CLONE3, *ABSENT.values()):
        code += _rule(numbers[at], [_op(_RETURN, unknown)])
    permitted = {name for need in needs for name in PERMITTED[need]}
    for numbers in (numbers for name, numbers in DENIED.items() if name not in permitted):
        code += _rule(numbers[at], [_op(_RETURN, refuse)])
    code += _rule(
        _CLONE[at], [_argument(0), _op(_ANY_BIT, NEW_NAMESPACES, 0, 1), _op(_RETURN, refuse)]
    )
    for numbers, index in NOT_THE_SUPERVISOR.values():
        code += _rule(numbers[at], [_argument(index), _op(_EQUAL, 1, 0, 1), _op(_RETURN, refuse)])
    for numbers, value in ONE_PROCESS.values():
        code += _rule(numbers[at], [_argument(0), _op(_EQUAL, value, 1, 0), _op(_RETURN, refuse)])
    known = [
        _op(_EQUAL, family, len(LOCAL_FAMILIES) - place, 0)
        for place, family in enumerate(LOCAL_FAMILIES)
    ]
    code += _rule(_SOCKET[at], [_argument(0), *known, _op(_RETURN, refuse)])
    return b"".join([*code, _op(_RETURN, _ALLOW)])


def _op(operation: int, value: int, if_true: int = 0, if_false: int = 0) -> bytes:
    return struct.pack("<HBBI", operation, if_true, if_false, value)


def _argument(index: int) -> bytes:
    """Load the low half of an argument; all that are looked at are 32 bits wide for the kernel."""
    return _op(_LOAD, _ARGUMENT + 8 * index)


def _rule(number: int, body: list[bytes]) -> list[bytes]:
    """Run `body` for one system call; after it, the number is loaded again for the next rule."""
    return [_op(_EQUAL, number, 0, len(body) + 1), *body, _op(_LOAD, _NR)]

"""The system-call profile of a container, as JSON for Docker: what is not listed is refused.

Docker's own default allows more than a sandbox with a verified reset can: System V IPC and message
queues outlive every process, io_uring and tracing are a large surface, AF_ALG and AF_VSOCK reach
past the network namespace. What bubblewrap's filter refuses (`agentrl.sandboxes.seccomp`) is
refused here too, by the same tables. 32-bit and x32 calls are unknown to the profile, which ends
the process that makes one.
"""

from __future__ import annotations

import functools
import json
from typing import Any

from agentrl.sandboxes import seccomp
from agentrl.sandboxes.base import SandboxNeed

_GROUPS = {
    "files": """
        access chdir chmod chown close close_range copy_file_range creat dup dup2 dup3 faccessat
        faccessat2 fadvise64 fallocate fchdir fchmod fchmodat fchmodat2 fchown fchownat fcntl
        fdatasync fgetxattr flistxattr flock fremovexattr fsetxattr fstat fstatfs fsync ftruncate
        futimesat getcwd getdents getdents64 getxattr lchown lgetxattr link linkat listxattr
        llistxattr lremovexattr lseek lsetxattr lstat mkdir mkdirat mknod mknodat newfstatat open
        openat openat2 pread64 preadv preadv2 pwrite64 pwritev pwritev2 read readahead readlink
        readlinkat readv removexattr rename renameat renameat2 rmdir sendfile setxattr splice stat
        statfs statx symlink symlinkat sync sync_file_range syncfs tee truncate umask unlink
        unlinkat utime utimensat utimes vmsplice write writev
    """,
    "waiting": """
        epoll_create epoll_create1 epoll_ctl epoll_ctl_old epoll_pwait epoll_pwait2 epoll_wait
        epoll_wait_old eventfd eventfd2 inotify_add_watch inotify_init inotify_init1
        inotify_rm_watch io_cancel io_destroy io_getevents io_pgetevents io_submit ioctl
        pause pipe pipe2 poll ppoll pselect6 select signalfd signalfd4
    """,
    "memory": """
        brk madvise map_shadow_stack membarrier memfd_create mincore mlock mlock2 mlockall mmap
        mprotect mremap msync munlock munlockall munmap pkey_alloc pkey_free pkey_mprotect
    """,
    "processes": """
        arch_prctl capget capset execve execveat exit exit_group fork get_robust_list
        get_thread_area getcpu getegid geteuid getgid getgroups getpgid getpgrp getpid getppid
        getpriority getresgid getresuid getrlimit getrusage getsid gettid getuid ioprio_get kill
        landlock_add_rule landlock_create_ruleset landlock_restrict_self pidfd_open
        pidfd_send_signal prctl restart_syscall rseq sched_get_priority_max sched_get_priority_min
        sched_getaffinity sched_getattr sched_getparam sched_getscheduler sched_rr_get_interval
        sched_yield seccomp set_robust_list set_thread_area set_tid_address setfsgid setfsuid setgid
        setgroups setpgid setregid setresgid setresuid setreuid setrlimit setsid setuid sysinfo
        tgkill times tkill uname vfork wait4 waitid
    """,
    "signals and futexes": """
        futex futex_requeue futex_wait futex_waitv futex_wake rt_sigaction rt_sigpending
        rt_sigprocmask rt_sigqueueinfo rt_sigreturn rt_sigsuspend rt_sigtimedwait rt_tgsigqueueinfo
        sigaltstack
    """,
    "sockets": """
        accept accept4 bind connect getpeername getsockname getsockopt listen recvfrom recvmmsg
        recvmsg sendmmsg sendmsg sendto setsockopt shutdown socketpair
    """,
    "time": """
        adjtimex alarm clock_adjtime clock_getres clock_gettime clock_nanosleep getitimer getrandom
        gettimeofday nanosleep setitimer time timer_create timer_delete timer_getoverrun
        timer_gettime timer_settime timerfd_create timerfd_gettime timerfd_settime
    """,
}
ALLOWED = tuple(sorted(name for group in _GROUPS.values() for name in group.split()))
# Linux, with or without 32-bit and old-uname; the last value only asks.
_PERSONALITIES = (0x0, 0x8, 0x20000, 0x20008, 0xFFFFFFFF)
_LOW_WORD = 32
# Families, and the protocols of a TCP stream: 6, or 0 for the usual one.
_INTERNET, _TCP = (2, 10), (0, 6)
_TYPE, _STREAM = 0xF, 1


@functools.cache
def profile(needs: frozenset[SandboxNeed] = frozenset(), streams_only: bool = False) -> str:
    """The profile; the same for every container with the same needs, so a daemon sees one text.

    With `streams_only`, TCP is all that can be spoken to other machines. A bridge has the host on
    it even where the host has no address there: it takes in what goes to 255.255.255.255 or
    224.0.0.1, and, unless it filters by the way back, what is sent to any of its other addresses. A
    datagram would be there; a connection needs an answer.

    Numbers of arguments are compared as 64 bits where the kernel looks at 32: a rule that lists
    what is good is safe, one that says "not this value" would be evaded by a bit above them. So
    "not 1" is written bit by bit.
    """
    rules = [_allow(ALLOWED), *(_allow(seccomp.PERMITTED[need]) for need in sorted(needs))]
    for family in seccomp.LOCAL_FAMILIES:
        if streams_only and family in _INTERNET:
            one = (_equals(0, family), _masked(1, _TYPE, _STREAM))
            rules += [_allow(("socket",), *one, _equals(2, protocol)) for protocol in _TCP]
        else:
            rules.append(_allow(("socket",), _equals(0, family)))
    rules += [_allow(("personality",), _equals(0, value)) for value in _PERSONALITIES]
    rules.append(_allow(("clone",), _masked(0, seccomp.NEW_NAMESPACES, 0)))
    # After ENOSYS callers use clone, and reads and writes that wait, instead.
    absent = ["clone3", *seccomp.ABSENT]
    rules.append({"names": absent, "action": "SCMP_ACT_ERRNO", "errnoRet": 38})
    for (index, kind), names in _by_argument().items():
        whole = [] if kind is None else [_equals(0, kind)]
        for bit in range(_LOW_WORD):
            rules.append(
                _allow(tuple(names), *whole, _masked(index, 1 << bit, 1 << bit if bit else 0))
            )
    return json.dumps(
        {
            "defaultAction": "SCMP_ACT_ERRNO",
            "defaultErrnoRet": 1,
            "archMap": [
                {"architecture": f"SCMP_ARCH_{name.upper()}", "subArchitectures": []}
                for name in ("x86_64", "aarch64")
            ],
            "syscalls": rules,
        }
    )


def _by_argument() -> dict[tuple[int, int | None], list[str]]:
    """Calls that may not name process 1, by (index of that argument, only value of argument 0)."""
    groups: dict[tuple[int, int | None], list[str]] = {}
    for name, (_, index) in seccomp.NOT_THE_SUPERVISOR.items():
        kind = seccomp.ONE_PROCESS[name][1] if name in seccomp.ONE_PROCESS else None
        groups.setdefault((index, kind), []).append(name)
    return groups


def _allow(names: tuple[str, ...], *conditions: dict[str, Any]) -> dict[str, Any]:
    return {"names": list(names), "action": "SCMP_ACT_ALLOW", "args": list(conditions)}


def _equals(index: int, value: int) -> dict[str, Any]:
    return {"index": index, "value": value, "op": "SCMP_CMP_EQ"}


def _masked(index: int, mask: int, value: int) -> dict[str, Any]:
    return {"index": index, "value": mask, "valueTwo": value, "op": "SCMP_CMP_MASKED_EQ"}

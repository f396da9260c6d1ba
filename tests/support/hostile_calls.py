"""Hostile cases, continued: system calls by number, on x86-64."""

from __future__ import annotations

from hostile import X86
from hostile_cases import case, refused, run

from agentrl.sandboxes import seccomp

if X86:
    _NUMBERS = {name: numbers[0] for name, numbers in seccomp.DENIED.items()}

    def _never(name: str, *calls: str) -> None:
        """System calls, by name or by number, that all have to fail without a permission."""
        lines = []
        for call in calls:
            number, _, rest = call.partition(" ")
            lines.append(
                f"refused({call!r}, syscall,"
                f" {_NUMBERS.get(number, number)}{', ' + rest if rest else ''})"
            )
        refused(
            name,
            "\n".join(["me = os.getpid(); buffer = ctypes.create_string_buffer(4096)", *lines]),
        )

    _never(
        "System V objects",
        "shmget 7, 4096, 0o1600",
        "semget 7, 1, 0o1600",
        "msgget 7, 0o1600",
        "shmget 0, 1, 0o1600",
    )
    _never("message queues", "mq_open b'note', 0o102, 0o600, None", "240 b'x', 0o102, 0o777, None")
    _never(
        *(
            "keys",
            "add_key b'user', b'note', b'x', 1, -3",
            "keyctl 0, -3, 1",
            "keyctl 1, b'note'",
            "keyctl 0, -4, 1",
        ),
        "request_key b'user', b'note', None, -3",
    )
    _never("io_uring", "io_uring_setup 8, buffer", "426 3, 1, 1, 1, None, 0", "427 3, 0, None, 0")
    _never("BPF", "bpf 0, buffer, 128", "bpf 5, buffer, 128", "bpf 18, buffer, 128")
    _never(
        "performance counters",
        "perf_event_open buffer, 0, -1, -1, 0",
        "perf_event_open buffer, 1, 0, -1, 0",
    )
    _never("page faults", "userfaultfd 0", "userfaultfd 1", "userfaultfd 0x80800")
    _never(
        *(
            "mounts",
            "mount b'none', b'/tmp', b'tmpfs', 0, None",
            "mount b'/', b'.', None, 0x1000, None",
            "umount2 b'/proc', 2",
        ),
        *(
            "pivot_root b'.', b'.'",
            "chroot b'/'",
            "open_tree -100, b'/', 1",
            "move_mount 0, b'', -100, b'.', 4",
        ),
        *(
            "fsopen b'tmpfs', 0",
            "mount_setattr -100, b'/', 0, buffer, 32",
            "mount None, b'/', None, 0x4000, None",
        ),
    )
    _never(
        *(
            "namespaces",
            *(f"unshare {1 << bit}" for bit in (7, 17, 25, 26, 27, 28, 29, 30)),
            "setns 0, 0",
        ),
        *(f"56 {(1 << bit) | 17}, 0, 0, 0, 0" for bit in (17, 25, 26, 27, 28, 29, 30)),
        *(
            "435 struct.pack('11Q', 0x10000000, 0, 0, 0, 17, 0, 0, 0, 0, 0, 0), 88",
            "56 0x100000010000011, 0, 0, 0, 0",
        ),
    )
    _never(
        *(
            "privileged calls",
            "169 0, 0, 0, 0",
            "175 None, 0, b''",
            "313 0, b'', 0",
            "246 0, 0, None, 0xffff",
            "320 0, 0, 0, b'', 0",
        ),
        *(
            "170 b'sandbox', 7",
            "171 b'x', 1",
            "167 b'/x', 0",
            "168 b'/x'",
            "163 b'x'",
            "syslog 3, buffer, 64",
            "153",
        ),
        *(
            "172 3",
            "173 0, 1, 1",
            "304 0, buffer, 0",
            "303 -100, b'/', buffer, buffer, 0",
            "kcmp me, 1, 0, 0, 0",
        ),
        *("pidfd_getfd 0, 0, 0", "process_madvise 0, None, 0, 0, 0", "300 0x2, 0"),
    )

    @case("tracing")
    async def tracing(box):
        code = r"""
                kid = child(lambda: time.sleep(1000)); buffer = ctypes.create_string_buffer(64)
                iov = struct.pack('QQ', ctypes.addressof(buffer), 8)
                for pid in (1, kid, os.getppid()):
                    for request in (16, 0x4206):
                        refused(('ptrace', pid), syscall, 101, request, pid, 0, 0)
                    for number in (310, 311):
                        refused(('memory', pid), syscall, number, pid, iov, 1, iov, 1, 0)
                refused('traceme', syscall, 101, 0, 0, 0, 0)
                refused('init', lambda: open('/proc/1/mem', 'r+b'))
                os.kill(kid, 9)
            """
        done = await run(box, code)
        assert (done.exit_code, done.stdout) == (0, b""), done

    @case("numbers that a filter may misread")
    async def misread(box):
        code = r"""
                limit = struct.pack('QQ', 1, 1); one = (7 << 32) | 1
                for pid in (1, one): refused(pid, syscall, 302, pid, 7, limit, None)
                for pid in (1, one): refused(pid, syscall, 203, pid, 8, struct.pack('Q', 1))
                for pid in (1, one): refused(pid, syscall, 144, pid, 5, struct.pack('i', 0))
                for which in (0, 7 << 32): refused(which, syscall, 141, which, one, 19)
                for which in (1, 2, (1 << 32) | 1): refused(which, syscall, 141, which, 0, 19)
                for which in (1, 2, 3): refused(which, syscall, 251, which, one, 0)
                refused('family', syscall, 41, (1 << 32) | 40, 1, 0)
                refused('flags', syscall, 56, (1 << 32) | 0x10000011, 0, 0, 0, 0)
            """
        done = await run(box, code)
        assert (done.exit_code, done.stdout) == (0, b""), done

    @case("system calls of other machines")
    async def other_tables(box):
        """32-bit calls by `int 0x80`, and x32 calls: refused, or the end of the program."""
        machine = "53b875000000bb17000000b907000000ba00100000be80030000cd805bc3"
        code = r"""
                import mmap
                m = mmap.mmap(-1, 4096, prot=7)
                m.write(bytes.fromhex(%r))
                start = ctypes.addressof(ctypes.c_char.from_buffer(m))
                call = ctypes.CFUNCTYPE(ctypes.c_int)(start)
                pid = child(lambda: os._exit(77 if call() >= 0 else 0))
                print(os.waitpid(pid, 0)[1] >> 8)
                for number in (29, 64, 68, 101, 165, 272):
                    refusal = lambda: attempt(syscall, 0x40000000 | number, 7, 1, 0o1600) is None
                    pid = child(lambda: os._exit(0 if refusal() else 77))
                    print(os.waitpid(pid, 0)[1] >> 8)
            """
        done = await run(box, code % machine)
        assert done.exit_code == 0, done
        assert b"77" not in done.stdout.split(), done

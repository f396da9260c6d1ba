"""Hostile cases, continued: kernel objects, sockets and system calls."""

from __future__ import annotations

import hostile_files
from hostile import X86, Case
from hostile_cases import CASES, case, leaves, refused, run

from agentrl.sandboxes import seccomp

assert hostile_files  # importing it adds its cases

# --- sockets

leaves(
    "abstract sockets",
    r"""
        kept = []
        for n in range(30):
            s = socket.socket(socket.AF_UNIX); s.bind('\0note%d' % n); s.listen(); kept.append(s)
        child(lambda: time.sleep(1000), True)
    """,
)
leaves(
    "sockets in directories",
    r"""
        for n, path in enumerate(('/tmp/s', '/dev/shm/s', 's')):
            s = socket.socket(socket.AF_UNIX); attempt(s.bind, path)
    """,
)
leaves(
    "connections that linger",
    r"""
        s = socket.create_server(('127.0.0.1', 0)); ends = []
        for _ in range(200):
            c = socket.create_connection(s.getsockname()); a, _ = s.accept(); c.close(); a.close()
    """,
)
leaves(
    "connections nobody reads",
    r"""
        s = socket.create_server(('127.0.0.1', 0)); c = socket.create_connection(s.getsockname())
        a, _ = s.accept(); c.setblocking(False)
        while attempt(c.send, b'x' * 65536): pass
        child(lambda: time.sleep(1000), True)
    """,
)
leaves(
    "listeners on every port",
    r"""
        kept = [attempt(socket.create_server, ('127.0.0.1', port)) for port in range(2000, 2050)]
        u = socket.socket(type=socket.SOCK_DGRAM); u.bind(('127.0.0.1', 53535)); child(lambda: time.sleep(1000), True)
    """,
)
refused(
    "sockets that no network namespace confines",
    r"""
        for family in range(64):
            if family not in (1, 2, 10, 16):
                for kind in (1, 2, 3, 5, 10):
                    for protocol in (0, 1, 3, 0x300): refused((family, kind), socket.socket, family, kind, protocol)
    """,
)
refused(
    "raw sockets",
    r"""
    for f in (2, 10):
        for p in (1, 6, 58, 255): refused(p, socket.socket, f, socket.SOCK_RAW, p)
""",
)
refused(
    "network settings",
    r"""
        s = socket.socket(); name = struct.pack('16sH14s', b'lo', 2, b'')
        refused('down', fcntl.ioctl, s, 0x8914, struct.pack('16sh', b'lo', 0))
        refused('address', fcntl.ioctl, s, 0x8916, name); refused('name', fcntl.ioctl, s, 0x8923, name)
        n = socket.socket(16, socket.SOCK_RAW, 0); body = struct.pack('BBHiII', 0, 0, 0, 1, 0, 0)
        n.send(struct.pack('IHHII', 16 + len(body), 17, 5, 1, 0) + body)
        code = struct.unpack('i', n.recv(4096)[16:20])[0]
        if code == 0: print('interface deleted')
    """,
)
leaves(
    "netlink listeners",
    r"""
        kept = []
        for kind in range(32):
            s = attempt(socket.socket, 16, socket.SOCK_RAW, kind)
            if s: attempt(s.bind, (0, 1)); kept.append(s)
        child(lambda: time.sleep(1000), True)
    """,
)
refused(
    "ways out by a network",
    r"""
        for at in (('169.254.169.254', 80), ('172.17.0.1', 2375), ('10.0.2.2', 22), ('8.8.8.8', 53)):
            s = socket.socket(); s.settimeout(1); refused(at, s.connect, at)
            u = socket.socket(type=socket.SOCK_DGRAM); refused(at, u.sendto, b'x', at)
        for at in ('/var/run/docker.sock', '/run/docker.sock', '/run/containerd/containerd.sock', '\0containerd'):
            s = socket.socket(socket.AF_UNIX); refused(at, s.connect, at)
        refused('name', socket.getaddrinfo, 'example.com', 80)
    """,
)

# --- objects that outlive a process

leaves(
    "hoards of descriptors",
    r"""
        def hoard():
            import select
            kept = []
            for make in (select.epoll, lambda: libc.inotify_init1(0), os.pipe,
                lambda: os.eventfd(0), lambda: libc.timerfd_create(1, 0), lambda: os.openpty()):
                for _ in range(10): kept.append(attempt(make))
            time.sleep(1000)
        for _ in range(8): child(hoard, True)
        time.sleep(.1)
    """,
)
leaves(
    "watches and nested polls",
    r"""
        import select
        w = libc.inotify_init1(0); print(libc.inotify_add_watch(w, b'/tmp', 0xfff) > 0)
        e = [select.epoll() for _ in range(4)]
        for a, b in zip(e, e[1:]): a.register(b)
        child(lambda: time.sleep(1000), True)
    """,
    b"True",
)
leaves(
    "terminals",
    "kept = [attempt(os.openpty) for _ in range(20)]; child(lambda: time.sleep(1000), True)",
)
leaves(
    "full pipes",
    r"""
        kept = []
        for _ in range(12):
            r, w = os.pipe(); attempt(fcntl.fcntl, w, 1031, 1 << 20); os.set_blocking(w, False)
            kept.append(attempt(os.write, w, b'x' * (1 << 20)))
        child(lambda: time.sleep(1000), True)
    """,
)
leaves(
    "queued signals and timers",
    r"""
        signal.pthread_sigmask(signal.SIG_BLOCK, range(1, 65))
        for _ in range(3000): libc.sigqueue(os.getpid(), 40, None)
        timer = ctypes.c_void_p()
        for _ in range(500): libc.timer_create(1, None, ctypes.byref(timer))
        child(lambda: time.sleep(1000), True)
    """,
)
leaves(
    "filters of its own",
    r"""
        def strict():
            libc.prctl(38, 1, 0, 0, 0); libc.prctl(22, 1, 0, 0, 0)
            while True: pass
        child(strict, True)
    """,
)
leaves(
    "notes in shared memory",
    r"""
        for n in range(20): write('/dev/shm/sem.%d' % n, 'x' * 9999)
        write('/tmp/.X0-lock', '1')
    """,
)

# --- what belongs to the supervisor or to this machine

refused(
    "what is in process 1",
    r"""
        for name in ('mem', 'environ', 'maps', 'smaps', 'auxv', 'stack', 'syscall', 'pagemap', 'personality', 'io',
            'timers', 'clear_refs', 'coredump_filter', 'uid_map', 'gid_map', 'setgroups', 'attr/current', 'sched',
            'timerslack_ns',
            'autogroup', 'loginuid', *('fd/%d' % n for n in range(12)), 'fdinfo/3'):
            path = '/proc/1/' + name
            refused(path, lambda: len(open(path, 'r+b').read(1)))
            if name in ('mem', 'environ', 'maps', 'auxv', 'stack') or name.startswith('fd'):
                refused(path, lambda: len(open(path, 'rb').read(1)))
        for name in ('exe', 'cwd', 'root', 'ns/net'): refused(name, os.readlink, '/proc/1/' + name)
        refused('list', os.listdir, '/proc/1/fd'); refused('map', os.listdir, '/proc/1/map_files')
    """,
)
refused(
    "settings of the kernel",
    r"""
        for name in ('kernel/hostname', 'kernel/core_pattern', 'kernel/sysrq', 'kernel/ns_last_pid', 'kernel/shmmax',
            'vm/drop_caches', 'vm/overcommit_memory', 'net/ipv4/ip_forward', 'net/ipv4/tcp_max_tw_buckets',
            'net/ipv4/ping_group_range', 'fs/mqueue/msg_max', 'user/max_user_namespaces', 'kernel/domainname'):
            path = '/proc/sys/' + name
            if os.path.exists(path): refused(name, lambda: write(path, open(path).read()))
        refused('sysrq', write, '/proc/sysrq-trigger', '')
        for at, _, names in os.walk('/sys'):
            for name in names:
                if os.access(os.path.join(at, name), os.W_OK): print(at, name)
    """,
)
refused(
    "control groups",
    r"""
        found = [os.path.join(at, name) for at, _, names in os.walk('/sys/fs/cgroup') for name in names]
        for path in found:
            if path.rsplit('/', 1)[1] in ('cgroup.procs', 'tasks', 'memory.max', 'memory.limit_in_bytes', 'pids.max',
                'release_agent', 'cpu.max', 'notify_on_release'): refused(path, write, path, str(os.getpid()))
        refused('made', os.mkdir, '/sys/fs/cgroup/mine'); refused('made', os.mkdir, '/sys/fs/cgroup/memory/mine')
    """,
)
refused(
    "devices of this machine",
    r"""
        for name in ('mem', 'kmsg', 'port', 'fuse', 'kvm', 'sda', 'vda', 'loop0', 'net/tun', 'console', 'userfaultfd',
            'vsock', 'nvidia0', 'cpu/0/msr', 'rtc0', 'mapper/control'):
            refused(name, os.open, '/dev/' + name, os.O_RDONLY)
        for path in ('/proc/kcore', '/proc/kmsg', '/proc/kpageflags', '/proc/kpagecount', '/proc/vmallocinfo'):
            refused(path, lambda: len(open(path, 'rb').read(8)))
        for mode in (0o20666, 0o60666): refused('mknod', os.mknod, 'device', mode, os.makedev(254, 0))
    """,
)
refused(
    "other users",
    r"""
        me = os.getuid()
        for uid in (0, 1, me + 1, 20000, 65534):
            for act in (os.setuid, os.setgid, os.seteuid):
                refused(('id', uid), act, uid)
            refused(('groups', uid), os.setgroups, [uid])
            write('f', 'x'); refused(('owner', uid), os.chown, 'f', uid, -1)
            attempt(libc.setfsuid, uid); attempt(os.unlink, 'f'); write('f', 'x')
            if os.stat('f').st_uid != me: print('made as', uid)
            libc.setfsuid(me)
        header = struct.pack('Ii', 0x20080522, 0); data = struct.pack('6I', *[0xffffffff] * 6)
        if libc.capset(header, data) == 0: print('capabilities')
        import shutil; shutil.copy('/bin/sh', 'sh'); os.chmod('sh', 0o6755)
        import subprocess
        if subprocess.run(['./sh', '-pc', '[ -w /etc/passwd ] || [ -r /etc/shadow ]']).returncode == 0:
            print('set-user-id')
        for name in ('su', 'mount', 'passwd', 'newgrp', 'chsh'):
            for folder in ('/bin/', '/usr/bin/'):
                if os.path.exists(folder + name) and os.stat(folder + name).st_uid == 0 and me != 0:
                    code = 'grep -qE "^CapEff:.*[1-9a-f]$" /proc/self/status'
                    if subprocess.run(['sh', '-c', code]).returncode == 0: print('capable')
    """,
)
refused(
    "clocks",
    r"""
        now = time.time()
        for clock in (0, 1, 7, 11): refused(clock, time.clock_settime, clock, time.clock_gettime(clock))
        moment = struct.pack('qq', int(now), 0)
        if libc.settimeofday(moment, None) == 0: print('settimeofday')
        if libc.adjtimex(struct.pack('i', 0x8000 | 1 | 2).ljust(208, b'\0')) >= 0: print('adjtimex')
        refused('offsets', write, '/proc/self/timens_offsets', 'monotonic 1 0')
    """,
)

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
                    for request in (16, 0x4206): refused(('ptrace', pid), syscall, 101, request, pid, 0, 0)
                    for number in (310, 311): refused(('memory', pid), syscall, number, pid, iov, 1, iov, 1, 0)
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
                call = ctypes.CFUNCTYPE(ctypes.c_int)(ctypes.addressof(ctypes.c_char.from_buffer(m)))
                pid = child(lambda: os._exit(77 if call() >= 0 else 0)); print(os.waitpid(pid, 0)[1] >> 8)
                for number in (29, 64, 68, 101, 165, 272):
                    refusal = lambda: attempt(syscall, 0x40000000 | number, 7, 1, 0o1600) is None
                    pid = child(lambda: os._exit(0 if refusal() else 77))
                    print(os.waitpid(pid, 0)[1] >> 8)
            """
        done = await run(box, code % machine)
        assert done.exit_code == 0, done
        assert b"77" not in done.stdout.split(), done


def table() -> list[Case]:
    """All cases."""
    names = [entry.name for entry in CASES]
    assert len(set(names)) == len(names)
    return list(CASES)

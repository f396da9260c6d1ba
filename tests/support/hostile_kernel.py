"""Hostile cases, continued: kernel objects, sockets, and what belongs to this machine."""

from __future__ import annotations

import hostile_calls
import hostile_files
from hostile import Case
from hostile_cases import CASES, leaves, refused

assert hostile_files and hostile_calls  # importing them adds their cases

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
        u = socket.socket(type=socket.SOCK_DGRAM); u.bind(('127.0.0.1', 53535))
        child(lambda: time.sleep(1000), True)
    """,
)
refused(
    "sockets that no network namespace confines",
    r"""
        for family in range(64):
            if family not in (1, 2, 10, 16):
                for kind in (1, 2, 3, 5, 10):
                    for protocol in (0, 1, 3, 0x300):
                        refused((family, kind), socket.socket, family, kind, protocol)
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
        refused('address', fcntl.ioctl, s, 0x8916, name)
        refused('name', fcntl.ioctl, s, 0x8923, name)
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
        for at in (('169.254.169.254', 80), ('172.17.0.1', 2375), ('10.0.2.2', 22),
            ('8.8.8.8', 53)):
            s = socket.socket(); s.settimeout(1); refused(at, s.connect, at)
            u = socket.socket(type=socket.SOCK_DGRAM); refused(at, u.sendto, b'x', at)
        for at in ('/var/run/docker.sock', '/run/docker.sock', '/run/containerd/containerd.sock',
            '\0containerd'):
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
        for name in ('mem', 'environ', 'maps', 'smaps', 'auxv', 'stack', 'syscall', 'pagemap',
            'personality', 'io', 'timers', 'clear_refs', 'coredump_filter', 'uid_map', 'gid_map',
            'setgroups', 'attr/current', 'sched', 'timerslack_ns', 'autogroup', 'loginuid',
            *('fd/%d' % n for n in range(12)), 'fdinfo/3'):
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
        for name in ('kernel/hostname', 'kernel/core_pattern', 'kernel/sysrq', 'kernel/shmmax',
            'kernel/ns_last_pid', 'kernel/domainname', 'vm/drop_caches', 'vm/overcommit_memory',
            'net/ipv4/ip_forward', 'net/ipv4/tcp_max_tw_buckets', 'net/ipv4/ping_group_range',
            'fs/mqueue/msg_max', 'user/max_user_namespaces'):
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
        files = ('cgroup.procs', 'tasks', 'memory.max', 'memory.limit_in_bytes', 'pids.max',
            'release_agent', 'cpu.max', 'notify_on_release')
        for at, _, names in os.walk('/sys/fs/cgroup'):
            for name in names:
                path = os.path.join(at, name)
                if name in files: refused(path, write, path, str(os.getpid()))
        refused('made', os.mkdir, '/sys/fs/cgroup/mine')
        refused('made', os.mkdir, '/sys/fs/cgroup/memory/mine')
    """,
)
refused(
    "devices of this machine",
    r"""
        for name in ('mem', 'kmsg', 'port', 'fuse', 'kvm', 'sda', 'vda', 'loop0', 'net/tun',
            'console', 'userfaultfd', 'vsock', 'nvidia0', 'cpu/0/msr', 'rtc0', 'mapper/control'):
            refused(name, os.open, '/dev/' + name, os.O_RDONLY)
        for path in ('/proc/kcore', '/proc/kmsg', '/proc/kpageflags', '/proc/kpagecount',
            '/proc/vmallocinfo'):
            refused(path, lambda: len(open(path, 'rb').read(8)))
        for mode in (0o20666, 0o60666):
            refused('mknod', os.mknod, 'device', mode, os.makedev(254, 0))
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
        test = '[ -w /etc/passwd ] || [ -r /etc/shadow ]'
        if subprocess.run(['./sh', '-pc', test]).returncode == 0:
            print('set-user-id')
        for name in ('su', 'mount', 'passwd', 'newgrp', 'chsh'):
            for folder in ('/bin/', '/usr/bin/'):
                path = folder + name
                if os.path.exists(path) and os.stat(path).st_uid == 0 and me != 0:
                    code = 'grep -qE "^CapEff:.*[1-9a-f]$" /proc/self/status'
                    if subprocess.run(['sh', '-c', code]).returncode == 0: print('capable')
    """,
)
refused(
    "clocks",
    r"""
        now = time.time()
        for clock in (0, 1, 7, 11):
            refused(clock, time.clock_settime, clock, time.clock_gettime(clock))
        moment = struct.pack('qq', int(now), 0)
        if libc.settimeofday(moment, None) == 0: print('settimeofday')
        if libc.adjtimex(struct.pack('i', 0x8000 | 1 | 2).ljust(208, b'\0')) >= 0: print('adjtimex')
        refused('offsets', write, '/proc/self/timens_offsets', 'monotonic 1 0')
    """,
)


def table() -> list[Case]:
    """All cases."""
    names = [entry.name for entry in CASES]
    assert len(set(names)) == len(names)
    return list(CASES)

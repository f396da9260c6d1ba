"""Hostile cases, continued: files, directories, links, and declared artifacts."""

from __future__ import annotations

import asyncio
import errno

from hostile import LIMITS
from hostile_cases import case, leaves, run

leaves(
    "deep tree",
    r"""
    for _ in range(3000): os.mkdir('d'); os.chdir('d')
    write('f', 'x'); print('deep')
""",
    b"deep",
)
leaves(
    "deep tree of locked directories",
    r"""
        for _ in range(500):
            os.mkdir('d'); old = os.open('.', 0); os.chdir('d'); os.chmod(old, 0); os.close(old)
        os.mkfifo('p', 0); os.chmod('.', 0)
    """,
)
leaves(
    "locked tree",
    "os.makedirs('a/b/c'); write('a/b/c/f', 'x'); os.chmod('a/b', 0); os.chmod('a', 0o100)",
)


@case("hops over links")
async def links(box):
    code = r"""
            os.symlink('a', 'b'); os.symlink('b', 'a'); os.symlink('/', 'root')
            os.symlink('/proc/self/fd', 'fd'); os.symlink('/etc', 'etc')
            os.symlink('/etc/passwd', 'passwd'); os.mkdir('d'); os.symlink('../etc', 'd/hop')
            os.symlink('/proc/1/root/sandbox', 'proc')
            for n in range(60): os.symlink('l%d' % (n + 1), 'l%d' % n)
            os.symlink('/sandbox/tmp/new', 'new')
        """
    assert (await run(box, code)).exit_code == 0
    paths = [
        "a",
        "b",
        "root/etc/passwd",
        "fd/0",
        "etc/passwd",
        "passwd",
        "d/hop/passwd",
        "proc/work/passwd",
        "l0",
    ]
    assert await box.get(paths) == {}
    await box.put({"etc/agentrl": b"1", "passwd": b"2", "d/hop/x": b"3", "l3": b"4", "new": b"5"})
    assert await box.get(["etc/agentrl", "passwd", "new"]) == {
        "etc/agentrl": b"1",
        "passwd": b"2",
        "new": b"5",
    }
    seen = await run(
        box, "print(os.listdir('../tmp'), os.path.exists('/etc/agentrl'), os.path.islink('etc'))"
    )
    assert seen.stdout == b"[] False False\n"


@case("links swapped under a reader")
async def racing_links(box):
    code = r"""
            os.mkdir('real'); write('real/passwd', 'mine'); os.symlink('/etc', 'link')
            def swap():
                while True:
                    libc.renameat2(-100, b'real', -100, b'link', 2)
            child(swap, True)
        """
    assert (await run(box, code)).exit_code == 0
    for _ in range(40):
        found = await box.get(["real/passwd", "link/passwd"])
        assert set(found.values()) <= {b"mine"}, found
        for busy in (box.put({"real/new": b"1"}), box.manifest(), box.snapshot(), box.list("link")):
            try:
                await busy
            except OSError:  # it was a link at that moment
                continue
    assert (await run(box, "print(os.path.exists('/etc/new'))")).stdout == b"False\n"


@case("full disk")
async def full_disk(box):
    code = r"""
            total = 0
            for at in ('.', '/tmp', '/dev/shm', '/sandbox/tmp'):
                n = 0
                try:
                    while n < 200:
                        write(f'{at}/{n}', b'x' * (1 << 20), 'wb'); n += 1; total += 1
                except OSError: pass
            print(total)
        """
    done = await run(box, code)
    assert int(done.stdout) <= LIMITS.disk_mb * 1.25 + 16, done
    try:
        await box.put({"a": bytes(1 << 20)})
    except OSError:
        return
    raise AssertionError("there was room on a full disk")


@case("as many files as there is room for", long=True)
async def full_of_inodes(box):
    code = r"""
            n = 0
            try:
                while n < 30_000: os.close(os.open(str(n), os.O_CREAT)); n += 1
            except OSError: pass
            seen = os.statvfs('.')
            print(n < seen.f_files)
        """
    done = await run(box, code)
    assert done.stdout == b"True\n", done


leaves(
    "one huge sparse file",
    r"""
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        f = open('f', 'wb'); refused('size', f.truncate, 1 << 40)
        print('ok')
    """,
    b"ok",
)


@case("more to hash than time")
async def more_to_hash(box):
    """Sparse files cost nothing, and hashing them took longer than a sandbox may be silent."""
    await run(box, "for i in range(1000):\n with open(f's{i}', 'wb') as f: f.truncate(8 << 20)")
    try:
        await box.manifest()
    except OSError as error:
        assert error.errno == errno.EFBIG, error
    else:
        raise AssertionError("8 GB were hashed")
    assert len(await box.list()) == 1000


leaves(
    "unlinked open files",
    r"""
        f = open('f', 'wb'); f.write(b'x' * 8_000_000); f.flush(); os.unlink('f')
        child(lambda: time.sleep(1000), True)
    """,
)
leaves(
    "files in flight in a cycle of sockets",
    r"""
        f = open('f', 'wb'); f.write(b'x' * 4_000_000); f.flush(); os.unlink('f')
        a, b = socket.socketpair()
        for s, other in ((a, b), (b, a)):
            socket.send_fds(s, [b'x'], [f.fileno(), s.fileno(), other.fileno()])
    """,
)
leaves(
    "hard links",
    r"""
        write('f', 'x')
        for n in range(500): os.link('f', 'l%d' % n)
        refused('system', os.link, '/etc/passwd', 'p')
        refused('proc', os.link, '/proc/self/exe', 'e'); print('ok')
    """,
    b"ok",
)


@case("hard links as artifacts")
async def linked_artifact(box):
    await run(box, "write('f', 'x'); os.link('f', 'g')")
    assert await box.get(["f", "g"]) == {}


@case("artifacts that are no files")
async def odd_artifacts(box):
    code = r"""
            os.mkfifo('fifo'); s = socket.socket(socket.AF_UNIX); s.bind('sock'); os.mkdir('dir')
            refused('device', os.mknod, 'dev', 0o20666, os.makedev(1, 3))
            attempt(os.mknod, 'white', 0o20666, 0)
            write('big', 'x' * 1_100_000); write('locked', 'x'); os.chmod('locked', 0)
        """
    done = await run(box, code)
    assert (done.exit_code, done.stdout) == (0, b""), done
    paths = ["fifo", "sock", "dir", "dev", "white", "big", "locked", "fifo/x", "missing"]
    assert set(await asyncio.wait_for(box.get(paths), 5)) <= {"locked"}


@case("names of odd bytes")
async def odd_names(box):
    code = r"""
            for n in range(1, 256):
                if n not in (46, 47): write(bytes([n]), 'x')
            names = (b'\n\n', b'x' * 255, b'-rf', b'..a', b' ', b'\xff' * 200, b'a\x1b[2Jb')
            for name in names: write(name, 'x')
        """
    assert (await run(box, code)).exit_code == 0
    manifest = await box.manifest()
    assert len(manifest) == 253 + 7 - 1  # the blank is among both
    found = await box.get([info.path for info in manifest])
    assert set(found.values()) == {b"x"}
    assert len(found) == len(manifest)


leaves(
    "attributes and modes of what stays",
    r"""
        for path in ('.', '..', '/tmp', '/sandbox', '/dev/shm', '/sandbox/tmp', '/dev/mqueue'):
            attempt(os.setxattr, path, 'user.note', b'x'); attempt(os.chmod, path, 0o7777)
            attempt(os.utime, path, (1, 1))
            for flags in (0x10, 0x20, 0x40, 0x80):
                fd = attempt(os.open, path, 0)
                if fd is not None:
                    attempt(fcntl.ioctl, fd, 0x40086602, struct.pack('l', flags)); os.close(fd)
    """,
)
leaves(
    "no work area",
    r"""
        import shutil
        os.chdir('/'); attempt(os.rename, '/sandbox/work', '/sandbox/gone')
        shutil.rmtree('/sandbox/work', 1)
        attempt(os.rmdir, '/sandbox/work'); attempt(os.symlink, '/usr', '/sandbox/work')
        attempt(os.rmdir, '/sandbox/tmp')
    """,
)
leaves(
    "locks and leases",
    r"""
        f = open('/etc/passwd'); g = open('g', 'w')
        fcntl.flock(f, fcntl.LOCK_SH)
        fcntl.lockf(g, fcntl.LOCK_EX)
        attempt(fcntl.fcntl, g, fcntl.F_SETLEASE, fcntl.F_WRLCK)
        child(lambda: time.sleep(1000), True)
    """,
)


@case("a program without its interpreter")
async def removed_interpreter(box):
    import_ = "import shutil; shutil.copy('/bin/sleep', 'mine'); os.chmod('mine', 0o755)"
    assert (
        await run(box, f"{import_}; write('s', '#!./gone'); os.chmod('s', 0o755)")
    ).exit_code == 0
    assert (await box.exec(["./s"])).exit_code in (126, 127)
    assert (await box.exec(["sh", "-c", "./mine 1000 & rm ./mine"])).exit_code == 0
    assert (await box.exec(["./mine"])).exit_code == 127
    assert (await box.exec(["."])).exit_code in (126, 127)

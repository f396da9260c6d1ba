"""What every backend promises, as checks that run against a real one: `violations = await check_backend(mine)`.

Each check is a function whose docstring is the promise. It gets a place to open sandboxes from and raises `Broken`
with what it saw instead. Checks marked as boundary apply to backends that say `is_boundary`. The sandbox needs
`sh` and `python3` in its PATH.
"""

from __future__ import annotations

import asyncio
import hashlib
import os
import tempfile
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass

from agentrl.errors import AgentRLError, SandboxLost
from agentrl.sandboxes.base import ExecResult, Sandbox, SandboxBackend, SandboxLimits

LIMITS = SandboxLimits(memory_mb=256, disk_mb=16, processes=24, open_files=64, output_bytes=4000, file_bytes=10_000)
CHECK_S = 60.0
PYTHON = ("python3", "-I", "-S", "-B", "-c")


class Broken(Exception):
    """A promise is not kept; the message is what was seen."""


@dataclass(frozen=True)
class Violation:
    """One broken promise: the check's name, the promise, and what was seen instead."""

    check: str
    promise: str
    seen: str


@dataclass(frozen=True)
class Room:
    """Where a check gets its sandboxes from."""

    backend: SandboxBackend
    limits: SandboxLimits = LIMITS

    @asynccontextmanager
    async def sandbox(self) -> AsyncIterator[Sandbox]:
        """A new one, closed after the block."""
        sandbox = await self.backend.open("agent", self.limits)
        try:
            yield sandbox
        finally:
            await sandbox.close()


Check = Callable[[Room], Awaitable[None]]
COMMON: list[Check] = []
BOUNDARY: list[Check] = []


async def check_backend(backend: SandboxBackend, at_once: int = 4) -> list[Violation]:
    """Run every check that applies; an empty list means that the backend keeps the contract. Takes seconds."""
    turns = asyncio.Semaphore(at_once)

    async def run(check: Check) -> Violation | None:
        async with turns:
            return await run_check(check, backend)

    common = [found for found in await asyncio.gather(*map(run, COMMON)) if found is not None]
    if not backend.is_boundary:
        return common
    # The other checks attack: without a pid namespace around them, `kill -9 -1` would end every process of this machine.
    walls = await run_check(processes_have_a_namespace_of_their_own, backend)
    if walls is not None:
        rest = [check for check in BOUNDARY if check is not processes_have_a_namespace_of_their_own]
        untried = [Violation(_name(check), _promise(check), "not tried: it would attack this machine") for check in rest]
        return [*common, walls, *untried]
    return common + [found for found in await asyncio.gather(*map(run, BOUNDARY)) if found is not None]


async def run_check(check: Check, backend: SandboxBackend) -> Violation | None:
    """Run one check; None if the promise is kept."""
    try:
        await asyncio.wait_for(check(Room(backend)), CHECK_S)
    except (Broken, AgentRLError, TimeoutError, ValueError, OSError) as error:
        return Violation(_name(check), _promise(check), f"{type(error).__name__}: {error}")
    return None


def _name(check: Check) -> str:
    return getattr(check, "__name__", "check")


def _promise(check: Check) -> str:
    return " ".join((check.__doc__ or "").split())


def common(check: Check) -> Check:
    """Register a check for every backend."""
    COMMON.append(check)
    return check


def boundary(check: Check) -> Check:
    """Register a check for backends that are a boundary."""
    BOUNDARY.append(check)
    return check


def expect(kept: bool, seen: object) -> None:
    """Raise `Broken` with what was seen, unless the promise was kept."""
    if not kept:
        raise Broken(str(seen)[:1000])


async def sh(sandbox: Sandbox, script: str, timeout_s: float = 10.0) -> ExecResult:
    """Run a shell script."""
    return await sandbox.exec(["sh", "-c", script], timeout_s=timeout_s)


async def appears(sandbox: Sandbox, path: str, within_s: float = 10.0) -> bool:
    """Wait until a path is in the work area."""
    deadline = asyncio.get_running_loop().time() + within_s
    while path not in {info.path for info in await sandbox.manifest()}:
        if asyncio.get_running_loop().time() > deadline:
            return False
        await asyncio.sleep(0.05)
    return True


async def python(sandbox: Sandbox, code: str, timeout_s: float = 20.0) -> ExecResult:
    """Run Python code."""
    return await sandbox.exec([*PYTHON, code], timeout_s=timeout_s)


@common
async def commands_end_as_values(room: Room) -> None:
    """A command's exit code, signal and two streams come back as they were; a missing program is a 127."""
    async with room.sandbox() as box:
        done = await sh(box, "echo out; echo err >&2; exit 3")
        expect((done.exit_code, done.signal, done.stdout, done.stderr) == (3, None, b"out\n", b"err\n"), done)
        killed = await sh(box, "kill -9 $$")
        expect((killed.exit_code, killed.signal, killed.timed_out) == (None, 9, False), killed)
        absent = await box.exec(["/no/such/program"])
        expect(absent.exit_code == 127, absent)


@common
async def stdin_is_exact(room: Room) -> None:
    """Standard input arrives byte for byte, also what is longer than a pipe; nobody reading it is no failure."""
    async with room.sandbox() as box:
        data = bytes(range(256)) * 4000
        code = "import sys, hashlib; print(hashlib.sha256(sys.stdin.buffer.read()).hexdigest())"
        done = await box.exec([*PYTHON, code], stdin=data)
        expect(done.stdout.strip() == hashlib.sha256(data).hexdigest().encode(), done)
        ignored = await box.exec(["true"], stdin=data)
        expect(ignored.exit_code == 0, ignored)


@common
async def commands_get_a_clean_start(room: Room) -> None:
    """A command starts in the empty work area with only its own variables and no open file but the standard three."""
    canary = "AGENTRL_CONTRACT_CANARY"
    os.environ[canary] = "1"
    try:
        async with room.sandbox() as box:
            code = "import os; print(len(os.listdir('.')), os.environ.get('MINE'), sorted(os.listdir('/proc/self/fd')))"
            done = await box.exec([*PYTHON, code], env={"MINE": "yes"})
            expect(done.stdout.decode().startswith("0 yes ['0', '1', '2', '3']"), done)  # 3 is the listing itself
            variables = await sh(box, "env")
            expect(canary.encode() not in variables.stdout, variables)
    finally:
        del os.environ[canary]


@common
async def output_is_capped(room: Room) -> None:
    """Output beyond the cap keeps its head and its tail, and what was cut is counted."""
    async with room.sandbox() as box:
        cap = room.limits.output_bytes
        done = await python(box, "import sys; sys.stdout.write('a' * 500000 + 'z' * 500000)")
        text = done.stdout
        whole = len(text) + done.dropped == 1_000_000 and len(text) <= cap
        expect(whole and text[:1] == b"a" and text[-1:] == b"z", done)


@common
async def a_timeout_ends_the_whole_tree(room: Room) -> None:
    """When the time is over, the command ends with all that it started, in other sessions too."""
    async with room.sandbox() as box:
        done = await sh(
            box, "setsid sh -c 'sleep 1.5; touch late' & (sleep 1.5; touch later) & sleep 30", timeout_s=0.3
        )
        expect(done.timed_out and done.wall_s < 5, done)
        await asyncio.sleep(1.5)
        expect(await box.manifest() == [], "a grandchild went on after the timeout")


@common
async def background_holds_nobody_up(room: Room) -> None:
    """A command is over when its leader is, though a child keeps its pipes open; that child may go on."""
    async with room.sandbox() as box:
        done = await sh(box, "(sleep 1; touch late; sleep 30) & echo started")
        expect(done.exit_code == 0 and done.stdout == b"started\n" and done.wall_s < 1, done)
        expect(await appears(box, "late"), "the background child did not go on")


@common
async def a_cancelled_call_leaves_order(room: Room) -> None:
    """A cancelled command ends, and the next answer belongs to the next call."""
    async with room.sandbox() as box:
        task = asyncio.ensure_future(sh(box, "sleep 1.5; touch late; sleep 30", timeout_s=40))
        await asyncio.sleep(0.1)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        done = await sh(box, "echo next")
        expect(done.stdout == b"next\n", done)
        await asyncio.sleep(1.5)
        expect(await box.manifest() == [], "the cancelled command went on")


@common
async def put_follows_no_link(room: Room) -> None:
    """put makes directories and replaces what is in the way; it writes through no link and no hard link."""
    async with room.sandbox() as box:
        await sh(
            box, "mkdir real; echo safe > real/kept; ln -s real link; ln -s real/kept soft; ln real/kept hard; mkdir d"
        )
        await box.put({"link/new": b"1", "soft": b"2", "hard": b"3", "d": b"4", "a/b/c": b"5"})
        done = await sh(box, "cat real/kept link/new soft hard d a/b/c; ls real")
        expect(done.stdout == b"safe\n12345kept\n", done)


@common
async def get_takes_plain_files_only(room: Room) -> None:
    """get returns regular files with one name that no link leads to, in the size limit, and leaves out all else."""
    async with room.sandbox() as box:
        await sh(
            box,
            "mkdir d; echo x > d/ok; ln -s d way; ln -s /etc/passwd soft; echo y > one; ln one two; mkfifo pipe;"
            f" head -c {room.limits.file_bytes + 1} /dev/zero > big; ln -s /proc/self hop",
        )
        names = ["d/ok", "way/ok", "soft", "one", "two", "pipe", "big", "d", "hop/environ", "missing", "d/ok/x"]
        found = await box.get(names)
        expect(found == {"d/ok": b"x\n"}, found)


@common
async def paths_stay_inside(room: Room) -> None:
    """A path that leaves the work area is refused with ValueError before anything runs."""
    async with room.sandbox() as box:
        for path in ("../x", "/etc/passwd", "a/../../x", "", ".", "a//b"):
            for call in (box.put({path: b""}), box.get([path])):
                try:
                    await call
                except ValueError:
                    continue
                raise Broken(f"path {path!r} was taken")


@common
async def manifest_tells_all(room: Room) -> None:
    """manifest lists every entry with kind, mode, size and hash, sorted by path, and follows no link."""
    async with room.sandbox() as box:
        await sh(
            box, "umask 022; mkdir d; printf abc > d/f; chmod 640 d/f; ln -s /usr l; mkfifo p; mkdir -m 000 locked"
        )
        seen = [(info.path, info.kind, info.mode) for info in await box.manifest() if info.kind != "link"]
        expect(seen == [("d", "dir", 0o755), ("d/f", "file", 0o640), ("locked", "dir", 0), ("p", "other", 0o644)], seen)
        rows = {info.path: info for info in await box.manifest()}
        expect(rows["l"].kind == "link" and rows["d/f"].size == 3, rows)
        expect(rows["d/f"].sha256 == hashlib.sha256(b"abc").hexdigest(), rows["d/f"])


@common
async def kill_all_spares_files(room: Room) -> None:
    """kill_all ends daemons and stopped processes, and leaves the files."""
    async with room.sandbox() as box:
        await sh(box, "touch kept; setsid sh -c 'sleep 1.5; touch late' & sh -c 'kill -STOP $$' & true")
        await box.kill_all()
        await asyncio.sleep(1.5)
        expect([info.path for info in await box.manifest()] == ["kept"], "a daemon survived kill_all")


@common
async def reset_is_clean(room: Room) -> None:
    """reset leaves no process and no file, whatever their depth, mode, name or open descriptors."""
    async with room.sandbox() as box:
        await sh(
            box, "setsid sh -c 'exec 3>open; rm open; sleep 1.5; touch late' & mkdir -p locked/in; touch locked/in/f"
        )
        deep = "import os\nfor _ in range(3000): os.mkdir('d'); os.chdir('d')\nopen('f', 'w')"
        done = await python(box, deep + "\nos.mkdir(b'\\xff\\n'); os.mkdir('e', 0)")
        expect(done.exit_code == 0, done)
        await sh(box, "chmod 000 locked/in locked; chmod 555 .")
        await box.reset()
        expect(await box.manifest() == [], "files survived the reset")
        await asyncio.sleep(1.5)
        done = await sh(box, 'ls -a . "$TMPDIR" | grep -v "^[.]*$"; touch works')
        expect([info.path for info in await box.manifest()] == ["works"], f"a process survived the reset: {done}")


@common
async def a_closed_sandbox_is_lost(room: Room) -> None:
    """close may come twice; afterwards every call raises SandboxLost."""
    async with room.sandbox() as box:
        await box.close()
        await box.close()
        try:
            await box.exec(["true"])
        except SandboxLost:
            return
        raise Broken("a closed sandbox ran a command")


@common
async def sandboxes_are_apart(room: Room) -> None:
    """Two sandboxes share no work area and no process."""
    async with room.sandbox() as one, room.sandbox() as two:
        await one.put({"f": b"1"})
        await sh(one, "setsid sh -c 'sleep 0.5; touch late' & true")
        expect(await two.manifest() == [], "a file of one sandbox is in the other")
        await two.kill_all()
        expect(await appears(one, "late"), "kill_all reached another sandbox")


@boundary
async def no_network(room: Room) -> None:
    """Nothing outside answers: neither the host's loopback nor any other address, and names do not resolve."""
    server = await asyncio.start_server(lambda _, writer: writer.close(), "127.0.0.1", 0)
    async with server, room.sandbox() as box:
        port = server.sockets[0].getsockname()[1]
        code = (
            "import socket\nfor at in (('127.0.0.1', %d), ('1.1.1.1', 53), ('10.0.0.1', 22)):\n"
            " s = socket.socket(); s.settimeout(2)\n print(s.connect_ex(at) != 0)\n"
            "try: socket.socket(40, socket.SOCK_STREAM); print('vsock')\nexcept OSError: print(True)"
        )
        done = await python(box, code % port)
        expect(done.stdout == b"True\n" * 4, done)


@boundary
async def host_files_are_out_of_sight(room: Room) -> None:
    """Files of the host that are not part of its system, like a home or this project, do not exist inside."""
    with tempfile.NamedTemporaryFile() as secret:
        async with room.sandbox() as box:
            places = [secret.name, os.path.expanduser("~"), os.path.abspath(__file__), "/etc/shadow", "/sys", "/run"]
            places = [place for place in places if place not in ("/", "/nonexistent")]
            done = await python(box, f"import os; print([p for p in {places!r} if os.path.exists(p)])")
            expect(done.stdout == b"[]\n", done)


@boundary
async def the_system_is_read_only(room: Room) -> None:
    """Nothing can be written outside of the work area and the temporary directories."""
    async with room.sandbox() as box:
        places = ("/", "/usr", "/usr/bin", "/etc", "/dev", "/proc", "/proc/sys/kernel", "/lib")
        code = (
            "import os\nfor at in %r:\n try: os.close(os.open(at + '/agentrl', os.O_CREAT | os.O_WRONLY)); print(at)\n"
            " except OSError: pass\n"
            "for root in ('/proc/sys', '/proc/1', '/proc/sysrq-trigger'):\n"
            " for at, _, names in os.walk(root) if os.path.isdir(root) else [(root, [], [''])]:\n"
            "  for name in names:\n   path = os.path.join(at, name).rstrip('/')\n"
            "   if os.access(path, os.W_OK) and not path.startswith('/proc/1/'): print(path)\n"
        )
        done = await python(box, code % (places,))
        expect(done.exit_code == 0 and done.stdout == b"", done)


@boundary
async def processes_have_a_namespace_of_their_own(room: Room) -> None:
    """Processes of the host can be neither seen nor signalled: the sandbox has a pid namespace of its own."""
    async with room.sandbox() as box:
        seen = await sh(box, "readlink /proc/self/ns/pid")
        mine = os.readlink("/proc/self/ns/pid")
        expect(seen.exit_code == 0 and seen.stdout.decode().strip() not in ("", mine), seen)


@boundary
async def no_privilege_can_be_had(room: Room) -> None:
    """Commands have no capability and cannot get any; mounts, new namespaces and tracing are refused."""
    async with room.sandbox() as box:
        status = await sh(box, "grep -E '^(CapEff|CapPrm|CapAmb|CapBnd|NoNewPrivs)' /proc/self/status | sort -u")
        facts = dict(line.split(":\t") for line in status.stdout.decode().splitlines())
        kept = {int(facts.get(name, "1"), 16) for name in ("CapEff", "CapPrm", "CapAmb")} == {0}
        expect(kept and facts.get("NoNewPrivs") == "1", facts)
        for command in ("unshare -Ur true", "unshare -m true", "mount -t tmpfs none /tmp", "/usr/sbin/chroot / true"):
            done = await sh(box, command)
            expect(done.exit_code not in (0, 127), f"{command}: {done}")


@boundary
async def the_supervisor_is_out_of_reach(room: Room) -> None:
    """A command can neither signal, stop, trace, read nor limit the program that supervises it."""
    async with room.sandbox() as box:
        await sh(box, "for s in KILL STOP TERM INT HUP SEGV CHLD USR1; do kill -$s 1; done; kill -9 -1")
        code = (
            "import os, resource\nfor name in ('mem', 'environ', 'maps', 'fd/3', 'fd/4', 'fd/5', 'fd/6', 'cwd/x'):\n"
            " for mode in (os.O_RDONLY, os.O_RDWR):\n"
            "  try: os.close(os.open('/proc/1/' + name, mode)); print(name)\n  except OSError: pass\n"
            "for act in (lambda: resource.prlimit(1, resource.RLIMIT_CPU, (1, 1)), lambda: os.setpriority(0, 1, 19),\n"
            " lambda: os.sched_setaffinity(1, [0]), lambda: os.setpriority(2, 0, 19)):\n"
            " try: act(); print('limited')\n except OSError: pass\n"
        )
        done = await python(box, code)
        expect(done.exit_code == 0 and done.stdout == b"", done)
        await box.reset()


@boundary
async def resources_are_bounded(room: Room) -> None:
    """Memory, disk and processes end at their limits, as failures of the command; a reset gives all of it back."""
    async with room.sandbox() as box:
        hog = await python(box, f"x = bytearray({room.limits.memory_mb} << 20)")
        expect(hog.exit_code != 0, "a command had more memory than its limit")
        for name in ("full", "/tmp/full", "/dev/shm/full"):
            full = await sh(box, f"head -c {2 * room.limits.disk_mb}M /dev/zero > {name}")
            expect(full.exit_code != 0, f"a command wrote more than the disk limit to {name}")
        await box.reset()
        bomb = "import os, time\nfor n in range(1000):\n try:\n  if not os.fork(): time.sleep(60)\n"
        done = await python(box, bomb + " except OSError: break\nprint(n)")
        count = int(done.stdout or b"1000")
        expect(1 < count <= room.limits.processes, f"{count} processes at a limit of {room.limits.processes}")
        await box.reset()
        expect((await sh(box, "head -c 1M /dev/zero > f; true")).exit_code == 0, "unusable after a fork bomb and reset")


@boundary
async def nothing_crosses_a_reset(room: Room) -> None:
    """Shared memory, queues, sockets, attributes: no kernel object carries a note to the next episode."""
    async with room.sandbox() as box:
        code = (
            "import os, socket\nopen('/dev/shm/note', 'w').write('x'); open('/tmp/note', 'w').write('x')\n"
            "for path in ('/', '/tmp', '/dev/shm', '..', '.', '/dev/mqueue'):\n"
            " try: os.setxattr(path, 'user.note', b'x'); os.chmod(path, 0o700)\n except OSError: pass\n"
            "try: os.close(os.open('/dev/mqueue/note', os.O_CREAT | os.O_RDWR))\nexcept OSError: pass\n"
            "a, b = socket.socketpair(); c, d = socket.socketpair()\nf = open('big', 'wb'); f.write(b'x' * 4000000)\n"
            "os.unlink('big'); socket.send_fds(a, [b'x'], [f.fileno(), b.fileno()])\nif os.fork() == 0:\n"
            " os.setsid()\n import time\n time.sleep(60)\n"
        )
        await python(box, code)
        for key in ("ipcmk -Q", "ipcmk -M 4096", "ipcmk -S 1"):
            expect((await sh(box, key)).exit_code != 0, f"{key} works: it would outlive the reset")
        try:
            await box.reset()
        except SandboxLost:
            return  # what cannot be cleaned is thrown away: that is a kept promise
        look = (
            "import os\nfor path in ('/tmp', '/dev/shm', '..', '.', '/dev/mqueue'):\n"
            " print(os.listxattr(path), sorted(set(os.listdir(path)) - {'work', 'tmp'}))"
        )
        done = await python(box, look)
        expect(set(done.stdout.splitlines()) == {b"[] []"}, done)

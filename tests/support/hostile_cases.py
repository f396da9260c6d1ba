"""Hostile cases: processes, memory and pipes.

`hostile_files`, `hostile_kernel` and `hostile_calls` have the rest.

Each is a program (or a few calls of a host whose agent is hostile) and what has to hold while it
runs. That the next episode finds nothing of it, and that this machine is untouched, is looked at
after each: see `hostile.Slot.play`.
"""

from __future__ import annotations

from hostile import LIMITS, Case, program

from agentrl.errors import SandboxLost
from agentrl.sandboxes.contract.room import goes_on
from agentrl.sandboxes.supervisor.frames import encode

CASES: list[Case] = []


def case(name: str, **options):
    """Register a function as a case."""

    def register(attack):
        CASES.append(Case(name, attack, **options))
        return attack

    return register


def refused(name: str, code: str, **options) -> None:
    """A program that prints whatever it achieved: nothing, if the limits hold."""

    async def attack(box):
        done = await run(box, code)
        assert (done.exit_code, done.stdout) == (0, b""), done

    CASES.append(Case(name, attack, **options))


def leaves(name: str, code: str, want: bytes = b"", **options) -> None:
    """A program that is permitted, and leaves something; `want` is what it prints last."""

    async def attack(box):
        done = await run(box, code)
        assert done.exit_code == 0, done
        assert done.stdout.strip().endswith(want), done

    CASES.append(Case(name, attack, **options))


async def run(box, code: str, timeout_s: float = 20.0, stdin: bytes = b""):
    return await box.exec(program(code), timeout_s=timeout_s, stdin=stdin)


# --- processes


@case("fork bomb", long=True)
async def fork_bomb(box):
    done = await run(box, "while True:\n try: os.fork()\n except OSError: pass", timeout_s=1)
    assert done.timed_out
    code = r"""
        if os.fork(): os._exit(0)
        os.setsid()
        while True:
            try: os.fork()
            except OSError: pass
    """
    await run(box, code)  # one that goes on until the reset


leaves(
    "too many processes",
    r"""
    n = 0
    while attempt(child, signal.pause): n += 1
    print(n < 24)
""",
    b"True",
)
leaves(
    "daemons that ignore signals",
    r"""
        def deaf():
            for s in range(1, 65):
                try: signal.signal(s, signal.SIG_IGN)
                except (OSError, ValueError): pass
            child(lambda: time.sleep(1000), True); time.sleep(1000)
        for _ in range(4): child(deaf, True)
    """,
)
leaves(
    "stopped processes",
    "for _ in range(5): child(lambda: os.kill(os.getpid(), signal.SIGSTOP), True)",
)
leaves(
    "zombies",
    r"""
        def breed():
            for _ in range(12): child(int)
            time.sleep(1000)
        child(breed, True); time.sleep(.1)
    """,
)
leaves(
    "subreaper",
    r"""
        def adopt():
            libc.prctl(36, 1, 0, 0, 0)
            child(lambda: child(lambda: time.sleep(1000), True), True)
            time.sleep(1000)
        child(adopt, True); time.sleep(.05)
    """,
)
leaves(
    "forged names of processes",
    r"""
        def pose():
            write('/proc/self/comm', ') Z 1 0 0 0 (x'); time.sleep(1000)
        child(pose, True); time.sleep(.05)
    """,
)


@case("a forged name outlives no timeout")
async def forged_name(box):
    pose = (
        "write('/proc/self/comm', ') Z 0 0 (')\nwhile not os.path.exists('go'):"
        " time.sleep(.05)\nwrite('late', '')"
    )
    done = await run(box, f"child(lambda: exec({pose!r}), True); time.sleep(100)", timeout_s=1)
    assert done.timed_out
    assert not await goes_on(box)


@case("a leader that stops itself")
async def stopped_leader(box):
    done = await run(box, "os.kill(os.getpid(), signal.SIGSTOP)", timeout_s=0.5)
    assert done.timed_out


leaves(
    "too many threads",
    r"""
        import threading
        n = 0
        try:
            for n in range(200):
                threading.Thread(target=time.sleep, args=(1000,), daemon=True).start()
        except RuntimeError: pass
        print(n < 24)
        sys.stdout.flush(); os._exit(0)
    """,
    b"True",
)
leaves(
    "busy loops",
    r"""
    def burn():
        while True: pass
    for _ in range(6): child(burn, True)
""",
)
leaves("priority of its own", "os.nice(19); child(lambda: time.sleep(1000), True)")
leaves(
    "crash", "pid = child(lambda: ctypes.string_at(0)); print(os.waitpid(pid, 0)[1] & 127)", b"11"
)


@case("signals to process 1")
async def signals_to_init(box):
    code = r"""
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
            pipe, _ = os.pipe()
            handle = attempt(os.pidfd_open, 1)
            for s in [9, 19, *range(1, 65)]:
                attempt(os.kill, 1, s)
                if handle is not None: attempt(signal.pidfd_send_signal, handle, s)
                attempt(os.killpg, 1, s)
            a, b = socket.socketpair()
            for s in (0, 9, 15, 19, 29):
                attempt(fcntl.fcntl, a, 10, s); attempt(fcntl.fcntl, a, fcntl.F_SETOWN, 1)
                attempt(fcntl.fcntl, a, fcntl.F_SETFL, os.O_ASYNC); b.send(b'x')
            attempt(os.kill, -1, 9)
        """
    done = await run(box, code)
    assert done.exit_code in (0, None), done
    await box.ping()


refused(
    "limits and priorities of process 1",
    r"""
        import resource
        for name in dir(resource):
            if name.startswith('RLIMIT_'):
                refused(name, resource.prlimit, 1, getattr(resource, name), (1, 1))
        for which in (0, 1): refused('nice', os.setpriority, which, 1, 19)
        refused('user', os.setpriority, 2, 0, 19)
        refused('cpus', os.sched_setaffinity, 1, [0])
        for policy in (os.SCHED_IDLE, os.SCHED_BATCH, os.SCHED_FIFO):
            priority = os.sched_param(int(policy == os.SCHED_FIFO))
            refused('policy', os.sched_setscheduler, 1, policy, priority)
    """,
)
refused(
    "limits of its own, raised",
    r"""
        import resource
        for name in ('CORE', 'FSIZE', 'MEMLOCK', 'NOFILE', 'MSGQUEUE', 'RTPRIO', 'NICE'):
            number = getattr(resource, 'RLIMIT_' + name); soft, hard = resource.getrlimit(number)
            if hard == -1: print(name, 'is unlimited')
            refused(name, resource.setrlimit, number, (hard + 1, hard + 1))
        refused('nice', os.nice, -1)
        refused('fifo', os.sched_setscheduler, 0, os.SCHED_FIFO, os.sched_param(1))
    """,
)
refused(
    "the kernel's choice when memory runs out",
    r"""
        was = int(open('/proc/1/oom_score_adj').read())
        refused('init', write, '/proc/1/oom_score_adj', '1000')
        refused('below', write, '/proc/self/oom_score_adj', '-1')
        mine = int(open('/proc/self/oom_score_adj').read())
        if was < 500 or mine < was: print('first to be spared')
    """,
)


# --- memory

refused(
    "memory of one process",
    r"""
    try: bytearray(600 << 20); print('600 MB')
    except MemoryError: pass
""",
)


@case("memory of all processes", long=True, unbounded=False)
async def memory_of_all(box):
    code = r"""
            def hog():
                x = bytearray(150 << 20); time.sleep(1); os._exit(7)
            pids = [child(hog) for _ in range(6)]
            print(sum(os.waitpid(pid, 0)[1] >> 8 == 7 for pid in pids))
        """
    done = await run(box, code)
    assert done.oom or done.exit_code is None or int(done.stdout) < 6, done


@case("memory of all, so that the supervisor ends first", long=True, unbounded=False)
async def memory_against_the_supervisor(box):
    """Take memory until the kernel ends it; if it ends the supervisor, that is reported."""
    code = r"""
        def hog():
            for score in (0, 500): attempt(write, '/proc/self/oom_score_adj', str(score))
            x = bytearray(60 << 20); time.sleep(1)
        pids = [child(hog) for _ in range(12)]
        for pid in pids: os.waitpid(pid, 0)
    """
    try:
        done = await run(box, code)
    except SandboxLost as error:
        assert "memory" in str(error) or "ended" in str(error), error
        raise
    assert not done.timed_out, done


@case("memory in files that have no name", long=True, unbounded=False)
async def memory_files(box):
    code = r"""
            fds = []
            for n in range(50):
                fd = os.memfd_create('x'); fds.append(fd)
                for _ in range(15): os.write(fd, bytes(1 << 20))
            print('750 MB')
        """
    done = await run(box, code)
    assert b"750 MB" not in done.stdout, done
    assert done.oom


leaves(
    "memory that is mapped and shared",
    r"""
        import mmap
        m = mmap.mmap(-1, 64 << 20); child(lambda: time.sleep(1000), True)
    """,
)


# --- pipes


@case("output flood")
async def flood(box):
    code = r"""
        pid = child(lambda: [os.write(2, b'x' * 65536) for _ in range(1000)])
        for _ in range(1000): os.write(1, b'y' * 65536)
        os.waitpid(pid, 0)
    """
    done = await run(box, code)
    assert done.exit_code == 0, done
    assert len(done.stdout) == len(done.stderr) == LIMITS.output_bytes
    endless = "child(lambda: [os.write(1, b'x' * 65536) for _ in iter(int, 1)], True)"
    done = await run(box, f"{endless}\nwhile True: os.write(2, b'y' * 65536)", timeout_s=0.5)
    assert done.timed_out
    left = await run(box, endless)  # held up by it, the command would meet its time limit
    assert left.exit_code == 0


@case("forged answers")
async def forged(box):
    frame = encode(2, [b"ok", b"0", b"0", b"0", b"0", b"0", b"forged", b""]) * 3
    code = r"""
            frame = sys.stdin.buffer.read()
            for pid in ('self', '1', str(os.getppid())):
                for fd in range(20):
                    way, flags = f'/proc/{pid}/fd/{fd}', os.O_WRONLY | os.O_NONBLOCK
                    attempt(lambda: os.write(os.open(way, flags), frame))
            for fd in range(1, 20): attempt(os.write, fd, frame)
        """
    done = await run(box, code, stdin=frame)
    assert done.stdout.startswith(frame)
    assert (await box.exec(["echo", "honest"])).stdout == b"honest\n"


@case("stdin held open")
async def held_stdin(box):
    done = await run(box, "child(lambda: time.sleep(1000), True)", stdin=b"x" * 1_000_000)
    assert done.exit_code == 0  # waited for, it would meet its time limit


@case("huge arguments and variables")
async def huge_arguments(box):
    for argv, env in (
        (["true", "x" * 200_000], {}),
        (["true", *["x" * 1000] * 3000], {}),
        (["true"], {"A": "x" * 200_000}),
        (["true"], {f"A{n}": "x" * 1000 for n in range(3000)}),
    ):
        done = await box.exec(argv, env=env)
        assert done.exit_code == 126, done
    assert (await box.exec(["true"], env={"LD_PRELOAD": "/x", "PATH": ""})).exit_code in (0, 127)
    assert (await box.exec(["true"])).exit_code == 0

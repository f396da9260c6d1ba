"""Damaged streams of frames in both directions (5,000 in a long run) end without a crash."""

from __future__ import annotations

import asyncio
import struct
import subprocess

import pytest
from conftest import require
from fake_sandboxes import FakePeer
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from agentrl.errors import SandboxLost
from agentrl.sandboxes import SandboxLimits
from agentrl.sandboxes.base import ExecResult
from agentrl.sandboxes.contract.room import PYTHON
from agentrl.sandboxes.launch import program
from agentrl.sandboxes.supervised import Shell, SupervisedSandbox
from agentrl.sandboxes.supervisor.frames import HEADER, MAX_FRAME, encode

CASES = [400, pytest.param(2500, marks=pytest.mark.long)]
SLOW = {"deadline": None, "suppress_health_check": list(HealthCheck), "print_blob": True}

NUMBERS = st.one_of(
    st.integers(-5, 10**7).map(lambda number: b"%d" % number),
    st.sampled_from([b"", b"x", b"9" * 30, b"-1", b"1e3", b"\xff", b"0"]),
)
NAMES = st.sampled_from(
    [b"a", b"a/b", b"", b".", b"..", b"a//b", b"/", b"\xff", b"x" * 300, b"a\0b", b"/etc/passwd"]
)
KINDS = st.sampled_from([b"dir", b"file", b"link", b"other", b""])
FIELD = st.one_of(NUMBERS, NAMES, st.binary(max_size=20))
VERBS = [
    b"hello",
    b"ping",
    b"exec",
    b"put",
    b"get",
    b"manifest",
    b"list",
    b"snapshot",
    b"restore",
    b"open",
    b"run",
]
VERBS += [b"end", b"kill", b"verify", b"reset", b"", b"nothing"]
COMMANDS = [
    [b"true"],
    [b"sleep", b"9"],
    [b"sh", b"-c", b"yes & echo $$"],
    [b"nothing"],
    [b"sh", b"-c", b"kill -9 $$"],
]


def _exec(timeout, cap, stdin, cwd, command):
    return [b"exec", timeout, cap, stdin, cwd, b"%d" % len(command), *command]


REQUESTS = st.one_of(
    st.tuples(st.sampled_from(VERBS), st.lists(FIELD, max_size=8)).map(
        lambda both: [both[0], *both[1]]
    ),
    st.builds(_exec, NUMBERS, NUMBERS, st.binary(max_size=9), NAMES, st.sampled_from(COMMANDS)),
    st.lists(st.tuples(NAMES, st.binary(max_size=50)), max_size=4).map(
        lambda rows: [b"put", *sum(rows, ())]
    ),
    st.lists(st.tuples(NAMES, KINDS, NUMBERS, NAMES), max_size=4).map(
        lambda rows: [b"restore", *sum(rows, ())]
    ),
    st.sampled_from(
        [
            [b"open"],
            [b"reset"],
            [b"snapshot", b"1000"],
            [b"run", b"1", b"200000", b"9", b"x=1; sleep 5"],
        ]
    ),
    st.just([]),
)


@st.composite
def streams(draw, frames, first=()):
    """A stream of frames, cut anywhere into pieces, after something may have happened to it."""
    sent = [*first, *draw(st.lists(frames, max_size=6))]
    ids = (
        draw(st.permutations(range(1, len(sent) + 1)))
        if draw(st.booleans())
        else range(1, len(sent) + 1)
    )
    stream = bytearray(
        b"".join(encode(number, fields) for number, fields in zip(ids, sent, strict=True))
    )
    damage = draw(
        st.sampled_from(["none", "none", "flip", "cut", "garbage", "oversized", "drop", "twice"])
    )
    at = draw(st.integers(0, max(0, len(stream) - 1)))
    if damage == "flip" and stream:
        stream[at] ^= 1 << draw(st.integers(0, 7))
    elif damage == "cut":
        del stream[at:]
    elif damage == "garbage":
        stream[at:at] = draw(st.binary(max_size=40))
    elif damage == "oversized":
        size = draw(st.sampled_from([MAX_FRAME + 1, 2**32 - 1, 0, 3, MAX_FRAME]))
        stream[at:at] = HEADER.pack(size, 1) + struct.pack(
            "<I", draw(st.sampled_from([0, 2**16, 2**32 - 1]))
        )
    elif damage == "drop":
        del stream[at : at + draw(st.integers(1, 9))]
    elif damage == "twice":
        stream += stream[:at]
    step = draw(st.sampled_from([1, 7, 64, 10**6])) if len(stream) < 400 else 10**6
    return [bytes(stream[at : at + step]) for at in range(0, len(stream), step)]


# Runs inside a sandbox, since a damaged `hello` can name any directory of the machine as the one to
# be wiped.
FORKER = r"""
import os, select, signal, struct, sys, time, traceback
sys.path.insert(0, "supervisor.pyz")
from agentrl.sandboxes.supervisor import program
from agentrl.sandboxes.supervisor.frames import FrameDecoder
def play(chunks, area):
    host, theirs = os.pipe(), os.pipe()
    pid = os.fork()
    if pid == 0:
        code = 99
        try:
            os.dup2(host[0], 0); os.dup2(theirs[1], 1); os.closerange(3, 60)
            os.dup2(os.open("stderr", os.O_WRONLY | os.O_CREAT | os.O_TRUNC), 2)
            os.close(3)
            program.main()
            code = 0
        except BaseException:
            traceback.print_exc()
            sys.stderr.flush()
        finally:
            os._exit(code)
    os.close(host[0]); os.close(theirs[1])
    try:
        for chunk in chunks: os.write(host[1], chunk)
    except BrokenPipeError: pass
    os.close(host[1])
    decoder, deadline, late = FrameDecoder(), time.monotonic() + 8, False
    while True:
        if not select.select([theirs[0]], [], [], max(0, deadline - time.monotonic()))[0]:
            late = True
            break
        data = os.read(theirs[0], 1 << 16)
        if not data: break
        decoder.feed(data)
    os.close(theirs[0])
    if late: os.kill(pid, 9)
    status = os.waitpid(pid, 0)[1]
    answers = []
    while (frame := decoder.next()) is not None: answers.append(frame[1])
    assert not late, "no end"
    assert status == 0, (status, open("stderr").read())
    assert not decoder.pending, "half an answer"
    assert all(fields and fields[0] in (b"ok", b"error", b"fatal") for fields in answers), answers
    assert b"fatal" not in [fields[0] for fields in answers[:-1]], answers
signal.signal(signal.SIGPIPE, signal.SIG_IGN)
stdin = sys.stdin.buffer
while head := stdin.read(4):
    (count,) = struct.unpack("<I", head)
    chunks = [stdin.read(struct.unpack("<I", stdin.read(4))[0]) for _ in range(count)]
    os.makedirs("area", exist_ok=True)
    try:
        play(chunks, "area")
        print("fine", flush=True)
    except BaseException as error:
        print(repr(f"{type(error).__name__}: {error}"), flush=True)
"""


def packed(chunks):
    return struct.pack("<I", len(chunks)) + b"".join(
        struct.pack("<I", len(chunk)) + chunk for chunk in chunks
    )


@pytest.fixture(scope="module")
def forker(tmp_path_factory):
    """A process that plays streams to a supervisor of its own, where they can do no harm."""
    require("bubblewrap")
    archive = tmp_path_factory.mktemp("fuzz") / "supervisor.pyz"
    archive.write_bytes(program())
    argv = [
        "bwrap",
        "--unshare-all",
        "--die-with-parent",
        "--ro-bind",
        "/usr",
        "/usr",
        "--tmpfs",
        "/tmp",
    ]
    for name in ("bin", "lib", "lib64"):
        argv += ["--symlink", f"usr/{name}", f"/{name}"]
    argv += [
        "--proc",
        "/proc",
        "--ro-bind",
        "/proc/sys",
        "/proc/sys",
        "--dev",
        "/dev",
        "--chdir",
        "/tmp",
    ]
    argv += ["--ro-bind", str(archive), "/tmp/supervisor.pyz", "--remount-ro", "/"]
    with subprocess.Popen(
        [*argv, *PYTHON, FORKER], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as process:
        yield process
        process.stdin.close()
        process.wait(30)


HELLO = [b"hello", b"/tmp/area", b"0", b"", b"nofile=64", b"", b"", b"PATH=/usr/bin"]


@pytest.mark.parametrize("cases", CASES)
def test_no_stream_from_a_host_crashes_or_stalls_the_supervisor(forker, cases):
    @settings(max_examples=cases, **SLOW)
    @given(st.one_of(streams(REQUESTS, [HELLO]), streams(REQUESTS)))
    def check(chunks):
        forker.stdin.write(packed(chunks))
        forker.stdin.flush()
        said = forker.stdout.readline()
        assert said == b"fine\n", said

    check()


ROW = st.lists(FIELD, max_size=6)
ANSWERS = st.one_of(
    st.tuples(st.sampled_from([b"ok", b"error", b"fatal", b"", b"OK"]), ROW).map(
        lambda both: [both[0], *both[1]]
    ),
    st.lists(NUMBERS, min_size=5, max_size=6).map(
        lambda numbers: [b"ok", *numbers, b"out", b"err"]
    ),
    st.lists(st.tuples(NAMES, KINDS, NUMBERS, NAMES), max_size=4).map(
        lambda rows: [b"ok", b".", b"dir", b"493", b"", *sum(rows, ())]
    ),
    st.lists(st.tuples(NAMES, KINDS, NUMBERS, NUMBERS, NAMES), max_size=4).map(
        lambda rows: [b"ok", *sum(rows, ())]
    ),
    st.sampled_from([[], [b"ok"], [b"ok", b"1"], [b"error", b"28", b"No space left on device"]]),
)
CALLS = {
    "exec": lambda box: box.exec(["true"], timeout_s=5),
    "get": lambda box: box.get(["a", "b"]),
    "put": lambda box: box.put({"a": b"1"}),
    "manifest": lambda box: box.manifest(),
    "list": lambda box: box.list("a"),
    "snapshot": lambda box: box.snapshot(),
    "verify": lambda box: box.verify(),
    "session": lambda box: box.open_session(),
    "run": lambda box: Shell(box._wire, box._call, 1, 1000).run("true", timeout_s=5),
    "ping": lambda box: box.ping(),
    "reset": lambda box: box.reset(),
}


@pytest.mark.parametrize("cases", CASES)
def test_no_stream_from_a_supervisor_crashes_or_stalls_the_host(cases):
    @settings(max_examples=cases, **SLOW)
    @given(
        streams(ANSWERS),
        st.lists(st.sampled_from(sorted(CALLS)), min_size=1, max_size=4),
        st.booleans(),
    )
    def check(chunks, calls, together):
        asyncio.run(asyncio.wait_for(_feed(chunks, calls, together), 5))

    check()


async def _feed(chunks, calls, together):
    peer = FakePeer()
    box = SupervisedSandbox(peer, SandboxLimits(output_bytes=1000, file_bytes=1000))
    for chunk in chunks[:200]:
        peer.other.send(chunk)
    # Else the call would wait its whole time for an answer that never comes.
    peer.other.close()
    work = [CALLS[name](box) for name in calls]
    if together:
        results = await asyncio.gather(*work, return_exceptions=True)
    else:
        results = [(await asyncio.gather(one, return_exceptions=True))[0] for one in work]
    for result in results:
        if isinstance(result, BaseException):
            assert isinstance(result, (SandboxLost, OSError)), result
        elif isinstance(result, ExecResult):
            assert max(len(result.stdout), len(result.stderr)) <= 8192
    with pytest.raises(SandboxLost):  # in the end, the stream ends
        while True:
            await box.ping()
    await box.close()

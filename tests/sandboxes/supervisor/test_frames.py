"""The frames between host and supervisor, and a host that believes nothing."""

from __future__ import annotations

import asyncio
import socket
import struct

import pytest
from fake_sandboxes import FakePeer
from hypothesis import given
from hypothesis import strategies as st

from agentrl.errors import SandboxLost
from agentrl.sandboxes.base import SandboxLimits
from agentrl.sandboxes.supervised import Place, SupervisedSandbox
from agentrl.sandboxes.supervisor.frames import (
    HEADER,
    MAX_FIELDS,
    MAX_FRAME,
    PROTOCOL,
    FrameDecoder,
    FrameError,
    encode,
)
from agentrl.sandboxes.supervisor.pipes import Clipped
from agentrl.sandboxes.wire import Wire

FIELDS = st.lists(st.binary(max_size=40), max_size=8)
FRAMES = st.lists(st.tuples(st.integers(0, 2**32 - 1), FIELDS), max_size=5)


def drain(decoder):
    frames = []
    while (frame := decoder.next()) is not None:
        frames.append(frame)
    return frames


@given(FRAMES, st.integers(1, 50))
def test_any_cut_of_the_stream_gives_the_same_frames(frames, chunk):
    stream = b"".join(encode(*frame) for frame in frames)
    decoder, seen = FrameDecoder(), []
    for at in range(0, len(stream), chunk):
        decoder.feed(stream[at : at + chunk])
        seen += drain(decoder)
    assert seen == frames
    assert not decoder.pending


@given(st.integers(0, 2**32 - 1), FIELDS, st.data())
def test_a_truncated_frame_is_no_frame(request_id, fields, data):
    whole = encode(request_id, fields)
    decoder = FrameDecoder()
    decoder.feed(whole[: data.draw(st.integers(0, len(whole) - 1))])
    assert decoder.next() is None


@given(st.binary(max_size=200))
def test_garbage_is_refused_or_is_a_frame(garbage):
    decoder = FrameDecoder(max_frame=100)
    decoder.feed(garbage)
    try:
        frames = drain(decoder)
    except FrameError:
        return
    assert garbage.startswith(b"".join(encode(*frame) for frame in frames))


@given(FIELDS.filter(bool), st.data())
def test_sizes_that_do_not_add_up_are_refused(fields, data):
    payload = bytearray(encode(7, fields)[HEADER.size :])
    at = 4 * data.draw(st.integers(0, len(fields)))
    value = data.draw(
        st.integers(0, 2**32 - 1).filter(
            lambda value: value != struct.unpack_from("<I", payload, at)[0]
        )
    )
    struct.pack_into("<I", payload, at, value)
    decoder = FrameDecoder()
    decoder.feed(HEADER.pack(len(payload), 7) + payload)
    # A smaller count can make a frame of other fields only if its sizes happen to add up; never a
    # longer one.
    try:
        frame = decoder.next()
    except FrameError:
        return
    assert frame is not None and at == 0 and len(frame[1]) != len(fields)


@pytest.mark.parametrize("size", [0, 3, MAX_FRAME + 1, 2**32 - 1])
def test_an_impossible_length_is_refused_at_once(size):
    decoder = FrameDecoder()
    decoder.feed(HEADER.pack(size, 1))
    with pytest.raises(FrameError, match="announces"):
        decoder.next()


def test_too_many_fields_are_not_sent():
    with pytest.raises(FrameError):
        encode(1, [b""] * (MAX_FIELDS + 1))


@given(st.lists(st.binary(max_size=30), max_size=30), st.integers(1, 60))
def test_clipping_keeps_head_and_tail_and_counts(chunks, cap):
    clipped, whole = Clipped(cap), b"".join(chunks)
    for chunk in chunks:
        clipped.add(chunk)
    value = clipped.value()
    assert len(value) + clipped.dropped == len(whole)
    if len(whole) <= cap:
        assert value == whole
    else:
        assert value == whole[: cap // 2] + whole[len(whole) - (cap - cap // 2) :]


def test_clipping_a_flood_stays_small():
    clipped = Clipped(1000)
    for _ in range(200):
        clipped.add(b"x" * 65536)
    assert len(clipped._tail) <= 1000 + 2 * 65536
    assert clipped.dropped == 200 * 65536 - 1000


ANSWERS = {
    "garbage": b"\xff" * 64,
    "an oversized frame": HEADER.pack(MAX_FRAME + 1, 1),
    "a stale id": encode(9, [b"ok"]),
    "no status": encode(1, []),
    "an answer twice": encode(1, [b"ok"]) * 2,
    "the end": b"",
    "an unknown status": encode(1, [b"fine"]),
    "fatal": encode(1, [b"fatal", b"broken inside"]),
    "an error without number": encode(1, [b"error", b"\xff", b"x"]),
}


@pytest.mark.parametrize("name", ANSWERS)
def test_whatever_is_no_answer_ends_the_sandbox(name):
    async def main():
        peer = FakePeer()
        wire = Wire(peer)
        if data := ANSWERS[name]:
            peer.other.send(data)
        else:
            peer.other.shutdown(socket.SHUT_RDWR)
        try:
            await wire.call([b"ping"], 5.0)
            assert name == "an answer twice"
            await asyncio.sleep(0.01)
        except SandboxLost as error:
            assert "last words" in str(error)
        with pytest.raises(SandboxLost):
            await wire.call([b"ping"], 5.0)
        assert peer.hung_up == 1
        await peer.gone()

    asyncio.run(main())


def test_an_end_is_told_alike_whether_a_write_or_a_read_meets_it():
    async def main():
        peer = FakePeer()
        wire = Wire(peer)
        peer.other.close()
        with pytest.raises(SandboxLost, match="the supervisor ended"):
            await wire.call([b"ping"], 5.0)

    asyncio.run(main())


def test_no_answer_in_time_ends_the_sandbox():
    async def main():
        peer = FakePeer()
        wire = Wire(peer)
        calls = [asyncio.ensure_future(wire.call([b"exec"], 0.05)) for _ in range(2)]
        results = await asyncio.gather(*calls, return_exceptions=True)
        assert [type(result) for result in results] == [SandboxLost, SandboxLost]
        assert "no answer to exec within 0.05 s" in str(results[0])
        await peer.gone()

    asyncio.run(main())


@pytest.mark.parametrize(
    "answer",
    [
        [b"ok"],
        [b"ok", b"0", b"0", b"0", b"1", b"0", b"x" * 100_000, b""],
        [b"ok", b"0", b"0", b"nan", b"1", b"0", b"", b""],
        [b"ok", b"0", b"0", b"0", b"9" * 5000, b"0", b"", b""],
    ],
)
def test_a_malformed_exec_answer_is_no_result(answer):
    async def main():
        peer = FakePeer()
        sandbox = SupervisedSandbox(peer, SandboxLimits(output_bytes=1000))
        peer.other.send(encode(1, answer))
        with pytest.raises(SandboxLost, match="protocol"):
            await sandbox.exec(["true"])
        assert peer.hung_up == 1
        await sandbox.close()

    asyncio.run(main())


def test_get_takes_only_what_was_asked_for():
    async def main():
        for index, size in ((b"1", 1), (b"-1", 1), (b"0", 2000)):
            peer = FakePeer()
            sandbox = SupervisedSandbox(peer, SandboxLimits(file_bytes=1000))
            peer.other.send(encode(1, [b"ok", index, b"x" * size]))
            with pytest.raises(SandboxLost, match="malformed answer to get"):
                await sandbox.get(["only"])
            await sandbox.close()

    asyncio.run(main())


def test_a_supervisor_that_cannot_protect_itself_is_refused():
    async def main():
        peer = FakePeer()
        peer.other.send(encode(1, [b"ok", b"%d" % PROTOCOL, b"0", b"1", b"0", b"0"]))
        place = Place(
            area="/x", private=True, demands=frozenset({"traceless", "adopts", "limited"})
        )
        with pytest.raises(SandboxLost, match=r"cannot be limited, traceless.*libpython3-stdlib"):
            await SupervisedSandbox.open(peer, place, SandboxLimits())

    asyncio.run(main())


def test_a_sandbox_stays_on_its_loop():
    async def make():
        return Wire(FakePeer())

    wire = asyncio.run(make())

    async def use():
        with pytest.raises(RuntimeError, match="another event loop"):
            await wire.call([b"ping"], 1.0)
        wire.lose("over")
        await wire.peer.gone()

    asyncio.run(use())

"""Values between judge and candidate: exact, bounded, and safe to read from anybody."""

from __future__ import annotations

import contextlib
import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from agentrl.verifiers.code.runner.child import reduce
from agentrl.verifiers.code.runner.codec import (
    AnyList,
    CodecError,
    Reader,
    Writer,
    decode,
    encode,
    freeze,
    matches,
)

hashable = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.complex_numbers()
    | st.text()
    | st.binary()
    | st.sampled_from(["dog", "cat", "bird"]),
    lambda inner: st.lists(inner, max_size=8).map(tuple) | st.frozensets(inner, max_size=4),
    max_leaves=12,
)
values = st.recursive(
    hashable,
    lambda inner: (
        st.lists(inner, max_size=8)
        | st.lists(inner, max_size=8).map(tuple)
        | st.sets(hashable, max_size=4)
        | st.dictionaries(hashable, inner, max_size=4)
        | st.lists(st.integers(), min_size=4)
        | st.lists(st.floats(), min_size=4)
        | st.lists(st.sampled_from(["a", "bb", "x" * 70]), min_size=4)
    ),
    max_leaves=20,
)


@given(values)
def test_a_value_comes_back_with_its_types(value):
    back = decode(encode(value))
    assert freeze(back) == freeze(value)
    assert matches(back, value)


@given(values, st.integers(1, 9))
def test_a_value_can_be_read_in_pieces(value, size):
    data = encode(value)
    pieces = [data[at : at + size] for at in range(0, len(data), size)][::-1]
    assert freeze(Reader(lambda: pieces.pop() if pieces else b"").receive()) == freeze(value)


@settings(max_examples=300)
@given(st.binary(max_size=200))
def test_any_bytes_are_a_value_or_a_codec_error(data):
    with contextlib.suppress(CodecError):
        decode(data)


@given(values, st.data())
def test_a_cut_or_a_longer_message_is_an_error(value, data):
    message = encode(value)
    cut = data.draw(st.integers(0, len(message) - 1))
    for bad in (message[:cut], message + b"N"):
        with pytest.raises(CodecError):
            decode(bad)


def test_a_long_value_is_written_piece_by_piece():
    pieces: list[bytes] = []
    value = [("dog", "cat", "dog", "cat", index) for index in range(20_000)]
    Writer(pieces.append).send(value)
    assert len(pieces) > 3
    assert decode(b"".join(pieces)) == value


@pytest.mark.parametrize("value", [object(), lambda: 0, iter([]), [[{1: object}]], range(3)])
def test_other_types_are_refused_and_the_reader_is_told(value):
    pieces: list[bytes] = []
    with pytest.raises(CodecError):
        Writer(pieces.append).send(value)
    with pytest.raises(CodecError, match="given up"):
        decode(b"".join(pieces))


def test_depth_is_bounded_both_ways():
    deep: list = []
    for _ in range(1000):
        deep = [deep]
    with pytest.raises(CodecError, match="deeper"):
        encode(deep)
    with pytest.raises(CodecError, match="deeper"):
        decode(b"l\x01\0\0\0" * 1000 + b"N")


def test_a_count_that_lies_reserves_nothing():
    for tag in (b"l", b"s", b"i", b"d", b"ql", b"pl"):
        with pytest.raises(CodecError):
            decode(tag + b"\xff\xff\xff\xff")


def test_unhashable_members_are_an_error():
    with pytest.raises(CodecError):
        decode(b"S\x01\0\0\0l\0\0\0\0")


@pytest.mark.parametrize(
    ("got", "want", "equal"),
    [
        (math.nan, math.nan, True),
        (math.nan, 1.0, False),
        (math.inf, math.inf, True),
        (math.inf, 1e308, False),
        (-0.0, 0.0, True),
        ({1: 2}, {True: 2}, False),
        ({1, 2}, frozenset({1, 2}), False),
        ([1, 2], AnyList([1, 2]), True),
        ((1, 2), AnyList([1, 2]), True),
        ({1, 2}, AnyList([1, 2]), False),
        ("ab", AnyList(["a", "b"]), False),
        ({"a": (1,)}, {"a": AnyList([1])}, True),
        ({"a": 1, "b": 2}, {"a": 1}, False),
        ({(1, True)}, {(1, 1)}, False),
        (complex("nan+1j"), complex("nan+1j"), True),
    ],
)
def test_matches_is_exact(got, want, equal):
    assert matches(got, want) is equal


@given(st.floats(allow_nan=False, allow_infinity=False), st.floats(allow_nan=False))
def test_a_tolerance_never_lets_a_missing_number_through(want, other):
    assert not matches(math.nan, want, atol=1e300)
    assert matches(want, want, atol=0.0)
    assert not matches(math.inf, want, atol=1e300)


def test_declared_reductions():
    import collections
    import enum
    import re

    import numpy as np

    point = collections.namedtuple("point", "x y")(1, 2)
    color = enum.IntEnum("color", "RED")
    cases = [
        (collections.Counter("aab"), {"a": 2, "b": 1}),
        (collections.deque([1, 2]), [1, 2]),
        (point, (1, 2)),
        (color.RED, 1),
        ({1: 2}.keys(), [1]),
        (range(3), [0, 1, 2]),
        (bytearray(b"x"), b"x"),
        (re.search("b", "abc"), (1, 2)),
        (np.int64(3), 3),
        (np.float32(0.5), 0.5),
        (np.bool_(True), True),
        (np.array([[1, 2]]), [[1, 2]]),
    ]
    for value, plain in cases:
        pieces: list[bytes] = []
        Writer(pieces.append, reduce).send(value)
        assert freeze(decode(b"".join(pieces))) == freeze(plain)
    with pytest.raises(CodecError):
        Writer(lambda data: None, reduce).send(iter([1]))

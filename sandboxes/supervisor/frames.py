"""The frames that host and supervisor exchange, and the names of what goes wrong.

A frame is `length, request id` (two little-endian u32) and a payload: `count, length × count` (u32
each), then as many byte strings. There is nothing to interpret in it but sizes, so the host may
decode what an attacker wrote. A request is `verb, arguments…`; the answer is `ok, values…`, or
`error, errno, text` (a value for the caller), or `fatal, text`, after which the sandbox is gone.
Numbers are decimal digits, times are microseconds.
"""

from __future__ import annotations

import struct

PROTOCOL = 3
MAX_FRAME = 64 << 20
MAX_FIELDS = 1 << 16
HEADER = struct.Struct("<II")


class FrameError(ValueError):
    """A frame is too long, or its sizes do not add up."""


class Fatal(Exception):
    """The sandbox cannot be trusted any more and ends."""


def encode(request_id: int, fields: list[bytes]) -> bytes:
    """One frame.

    Raises:
        FrameError: more than MAX_FIELDS fields or MAX_FRAME bytes.
    """
    count = len(fields)
    size = 4 * (count + 1) + sum(map(len, fields))
    if count > MAX_FIELDS or size > MAX_FRAME:
        raise FrameError(
            f"a frame of {count} fields and {size} bytes is over {MAX_FIELDS} fields or {MAX_FRAME}"
            " bytes"
        )
    return b"".join(
        [
            HEADER.pack(size, request_id),
            struct.pack(f"<{count + 1}I", count, *map(len, fields)),
            *fields,
        ]
    )


class FrameDecoder:
    """Cuts a byte stream into frames."""

    def __init__(self, max_frame: int = MAX_FRAME) -> None:
        self.max_frame = max_frame
        self._buffer = bytearray()

    def feed(self, data: bytes) -> None:
        """Add bytes of the stream."""
        self._buffer += data

    @property
    def pending(self) -> bool:
        """Whether bytes of a further frame are here."""
        return bool(self._buffer)

    def next(self) -> tuple[int, list[bytes]] | None:
        """The next frame as (request id, fields), or None while it is incomplete.

        Raises:
            FrameError: the frame is oversized or its sizes do not add up; the stream is lost.
        """
        buffer = self._buffer
        if len(buffer) < HEADER.size:
            return None
        size, request_id = HEADER.unpack_from(buffer)
        if not 4 <= size <= self.max_frame:
            raise FrameError(
                f"a frame announces {size} bytes, at most {self.max_frame} are allowed"
            )
        if len(buffer) < HEADER.size + size:
            return None
        end = HEADER.size + size
        with memoryview(buffer) as view, view[HEADER.size : end] as payload:
            fields = split(payload)
        del buffer[:end]
        return request_id, fields


def split(payload: bytes | memoryview) -> list[bytes]:
    """The fields of a frame's payload.

    Raises:
        FrameError: its sizes do not add up.
    """
    (count,) = struct.unpack_from("<I", payload)
    at = 4 * (count + 1)
    if count > MAX_FIELDS or at > len(payload):
        raise FrameError(f"a frame of {len(payload)} bytes cannot hold {count} fields")
    sizes = struct.unpack_from(f"<{count}I", payload, 4)
    if at + sum(sizes) != len(payload):
        raise FrameError(
            f"the fields of a frame add up to {at + sum(sizes)} bytes, it has {len(payload)}"
        )
    fields = []
    for size in sizes:
        fields.append(bytes(payload[at : at + size]))
        at += size
    return fields

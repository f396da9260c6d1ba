"""The head of a request to a proxy: read strictly, and written anew for the server.

Pure functions; no input makes them raise.
"""

from __future__ import annotations

import re
from typing import NamedTuple

from agentrl.sandboxes.proxy.rules import host_name, port_number

HEAD_BYTES = 16_384
HEADERS = 100
FORWARDED = (b"GET", b"HEAD", b"POST")
_HTTP = 80
_TOKEN = re.compile(rb"[!#$%&'*+.^_`|~0-9A-Za-z-]{1,256}")
_VALUE = re.compile(rb"[\t\x20-\x7e\x80-\xff]*")
_TARGET = re.compile(rb"[\x21-\x7e]+")
_LENGTH = re.compile(rb"[0-9]{1,15}")
# Words between a client and its proxy, not for the server; a request has one connection of its own.
_OURS = {
    *(
        b"connection",
        b"host",
        b"keep-alive",
        b"proxy-authenticate",
        b"proxy-authorization",
        b"proxy-connection",
    ),
    *(b"te", b"trailer", b"upgrade", b"content-length", b"expect"),
}


class ProxyRequest(NamedTuple):
    """What a client asks for.

    Attributes:
        method: CONNECT, or one of FORWARDED.
        host: in lower case.
        head: to send to the server; empty for CONNECT.
        body: bytes that follow the head; 0 for CONNECT.
    """

    method: str
    host: str
    port: int
    head: bytes
    body: int


class ProxyRefusal(NamedTuple):
    """Why a request is refused: an HTTP status, a sentence, and host and port if they were read."""

    status: int
    why: str
    method: str = ""
    host: str = ""
    port: int = 0


class _BadError(Exception):
    """A head that is refused; its arguments are those of `ProxyRefusal`."""


def parse(head: bytes) -> ProxyRequest | ProxyRefusal:
    """Read a head, the empty line at its end included; what is not plainly right is refused."""
    try:
        return _parse(head)
    except _BadError as error:
        return ProxyRefusal(*error.args)


def _parse(head: bytes) -> ProxyRequest:
    if len(head) > HEAD_BYTES:
        raise _BadError(431, f"a head of more than {HEAD_BYTES} bytes")
    if not head.endswith(b"\r\n\r\n"):
        raise _BadError(400, "a head without its end")
    first, *lines = head[:-4].split(b"\r\n")
    words = first.split(b" ")
    if len(words) != 3 or not _TOKEN.fullmatch(words[0]) or not _TARGET.fullmatch(words[1]):
        raise _BadError(400, "a malformed request line")
    method, target, version = words
    if version not in (b"HTTP/1.0", b"HTTP/1.1"):
        raise _BadError(505, "another version than HTTP/1.0 or HTTP/1.1")
    text = method.decode("ascii")
    if method == b"CONNECT":
        _fields(lines)
        host, port = _authority(text, target, None)
        # Bytes in a tunnel are not read: they may be any method, any Host, any number of requests.
        if port == _HTTP:
            why = "a tunnel to the port of plain http, which goes by GET http://…"
            raise _BadError(403, why, text, host, port)
        return ProxyRequest(text, host, port, head=b"", body=0)
    if method not in FORWARDED:
        raise _BadError(405, "another method than CONNECT, GET, HEAD or POST", text[:16])
    scheme, mark, rest = target.partition(b"://")
    if not mark or scheme.lower() != b"http":
        raise _BadError(400, "no absolute http:// address; https goes by CONNECT", text)
    authority, path = _split(rest)
    host, port = _authority(text, authority, _HTTP)
    kept, body = _forward(lines)
    named = host if port == _HTTP else f"{host}:{port}"
    rows = [
        b"%s %s HTTP/1.1" % (method, path),
        b"Host: " + named.encode(),
        *kept,
        b"Connection: close",
    ]
    return ProxyRequest(text, host, port, b"\r\n".join(rows) + b"\r\n\r\n", body)


def _split(rest: bytes) -> tuple[bytes, bytes]:
    """Authority and path of an address without its scheme; what is after `#` is not for servers."""
    rest = rest.partition(b"#")[0]
    end = next((at for at, byte in enumerate(rest) if byte in b"/?"), len(rest))
    path = rest[end:]
    return rest[:end], path if path.startswith(b"/") else b"/" + path


def _authority(method: str, text: bytes, default: int | None) -> tuple[str, int]:
    name, colon, number = text.decode("ascii").partition(":")
    port = port_number(number) if colon else default
    host = host_name(name)
    if host is None or port is None:
        shown = text[:100].decode("ascii")
        raise _BadError(
            403, "an address, or no name and port, where a host is wanted", method, shown, port or 0
        )
    return host, port


def _fields(lines: list[bytes]) -> list[tuple[bytes, bytes]]:
    if len(lines) > HEADERS:
        raise _BadError(431, f"more than {HEADERS} headers")
    found = []
    for line in lines:
        name, colon, value = line.partition(b":")
        if not colon or not _TOKEN.fullmatch(name) or not _VALUE.fullmatch(value):
            raise _BadError(400, "a malformed header")
        found.append((name, value.strip(b" \t")))
    return found


def _forward(lines: list[bytes]) -> tuple[list[bytes], int]:
    """Headers for the server, and how many bytes of a body follow."""
    fields = _fields(lines)
    lengths = {value for name, value in fields if name.lower() == b"content-length"}
    if any(name.lower() == b"transfer-encoding" for name, _ in fields):
        raise _BadError(
            411, "a body without its length: send Content-Length, not Transfer-Encoding"
        )
    if len(lengths) > 1 or not all(_LENGTH.fullmatch(value) for value in lengths):
        raise _BadError(400, "a malformed Content-Length")
    connection = [value for name, value in fields if name.lower() == b"connection"]
    named = {part.strip().lower() for value in connection for part in value.split(b",")}
    kept = [b"%s: %s" % pair for pair in fields if pair[0].lower() not in _OURS | named]
    body = int(lengths.pop()) if lengths else None
    if body is not None:
        kept.append(b"Content-Length: %d" % body)
    return kept, body or 0

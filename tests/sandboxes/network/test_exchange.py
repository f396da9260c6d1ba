"""What the proxy makes of the bytes of an agent: heads, and one request over real sockets."""

from __future__ import annotations

import asyncio
import socket
import threading

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from agentrl.sandboxes.proxy import exchange as exchange_module
from agentrl.sandboxes.proxy.exchange import Bounds, Exchange
from agentrl.sandboxes.proxy.request import HEAD_BYTES, ProxyRefusal, ProxyRequest, parse
from agentrl.sandboxes.proxy.rules import host_name, rule

BOUNDS = Bounds(connections=4, head_s=60.0, connect_s=60.0, idle_s=60.0, total_s=60.0, size=200_000)
HASTY = BOUNDS._replace(head_s=0.3, idle_s=0.4)


def test_a_head_is_written_anew():
    head = (
        b"POST http://Example.ORG:8080/a?b=c#d HTTP/1.1\r\nHost: other.org\r\nProxy-Authorization:"
        b" secret\r\nX-Kept: yes\r\nConnection: X-Hop\r\nX-Hop: 1\r\nContent-Length: 3\r\n\r\n"
    )
    rows = (
        b"POST /a?b=c HTTP/1.1",
        b"Host: example.org:8080",
        b"X-Kept: yes",
        b"Content-Length: 3",
    )
    wanted = b"\r\n".join((*rows, b"Connection: close", b"", b""))
    assert parse(head) == ProxyRequest("POST", "example.org", 8080, wanted, 3)
    assert parse(b"CONNECT Example.org.:443 HTTP/1.1\r\n\r\n") == ProxyRequest(
        "CONNECT", "example.org", 443, b"", 0
    )
    bare = parse(b"GET http://a.org?q HTTP/1.0\r\n\r\n")
    assert isinstance(bare, ProxyRequest) and bare.head.startswith(
        b"GET /?q HTTP/1.1\r\nHost: a.org\r\n"
    )


@pytest.mark.parametrize(
    ("head", "status"),
    [
        (b"GET / HTTP/1.1\r\n\r\n", 400),
        (b"GET https://a.org/ HTTP/1.1\r\n\r\n", 400),
        (b"PUT http://a.org/ HTTP/1.1\r\n\r\n", 405),
        (b"GET http://a.org/ HTTP/2\r\n\r\n", 505),
        (b"CONNECT a.org HTTP/1.1\r\n\r\n", 403),
        (b"CONNECT a.org:80 HTTP/1.1\r\n\r\n", 403),
        (b"CONNECT 127.0.0.1:80 HTTP/1.1\r\n\r\n", 403),
        (b"CONNECT [::1]:80 HTTP/1.1\r\n\r\n", 403),
        (b"GET http://0x7f.1/ HTTP/1.1\r\n\r\n", 403),
        (b"GET http://user@a.org/ HTTP/1.1\r\n\r\n", 403),
        (b"GET http://a.org@b.org/ HTTP/1.1\r\n\r\n", 403),
        (b"GET http://a.org\\b.org/ HTTP/1.1\r\n\r\n", 403),
        (b"GET http://a.org/ HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\n", 411),
        (b"GET http://a.org/ HTTP/1.1\r\nContent-Length: 1\r\nContent-Length: 2\r\n\r\n", 400),
        (b"GET http://a.org/ HTTP/1.1\r\nContent-Length: -1\r\n\r\n", 400),
        (b"GET http://a.org/ HTTP/1.1\r\nX: a\nHost: b.org\r\n\r\n", 400),
        (b"GET http://a.org/ HTTP/1.1\r\n folded\r\n\r\n", 400),
        (b"GET http://a.org/ HTTP/1.1\r\nX : a\r\n\r\n", 400),
        (b"GET http://a.org/ HTTP/1.1\r\n" + b"X: a\r\n" * 101 + b"\r\n", 431),
        (b"GET http://a.org/" + b"a" * HEAD_BYTES + b" HTTP/1.1\r\n\r\n", 431),
        (b"", 400),
    ],
)
def test_a_head_that_is_not_plainly_right_is_refused(head, status):
    refused = parse(head)
    assert isinstance(refused, ProxyRefusal)
    assert refused.status == status


PIECES = st.sampled_from(
    [
        *(
            b"GET ",
            b"CONNECT ",
            b"POST ",
            b"http://",
            b"a.org",
            b"127.0.0.1",
            b":80",
            b"/",
            b" HTTP/1.1",
            b"\r\n",
        ),
        *(
            b"Content-Length: 5",
            b"Host: x",
            b"\0",
            b"@",
            b"\\",
            b"#",
            b"\xff",
            b" ",
            b"\t",
            b":",
            b"\n",
        ),
    ]
)
HEADS = st.one_of(
    st.binary(max_size=200), st.lists(PIECES | st.binary(max_size=3), max_size=25).map(b"".join)
)


@settings(max_examples=500)
@given(HEADS)
def test_no_head_raises_and_what_goes_on_is_one_clean_request(data):
    for head in (data, data + b"\r\n\r\n"):
        found = parse(head)
        if isinstance(found, ProxyRefusal):
            assert 400 <= found.status < 600
            continue
        assert host_name(found.host) == found.host and 0 < found.port < 65_536
        if found.method != "CONNECT":
            assert found.head.count(b"\r\n\r\n") == 1 and found.head.endswith(
                b"Connection: close\r\n\r\n"
            )
            assert not set(b"\0\n\r") & set(found.head.replace(b"\r\n", b""))
            assert found.head.lower().count(b"\r\nhost:") == 1
            again = parse(found.head.replace(b" /", b" http://" + found.host.encode() + b"/", 1))
            assert isinstance(
                again, ProxyRequest
            )  # what is written is well-formed by the same measure


class Log(list):
    """Rows of one exchange."""

    def __call__(self, row):
        self.append(row)


def play(data, rules=("a.org",), bounds=BOUNDS, end=True):
    """Send bytes to one exchange; what came back, and what was logged."""
    ours, theirs = socket.socketpair()
    log = Log()
    exchange = Exchange(tuple(map(rule, rules)), bounds, log)
    thread = threading.Thread(target=lambda: asyncio.run(exchange.serve(theirs)))
    thread.start()
    answer = b""
    ours.settimeout(120)
    with ours:
        try:
            ours.sendall(data)
            if end:
                ours.shutdown(socket.SHUT_WR)
            while piece := ours.recv(65_536):
                answer += piece
        except OSError:
            pass
        thread.join(120)
    assert not thread.is_alive()
    return answer, log


@settings(max_examples=100, deadline=None)
@given(HEADS)
def test_no_bytes_of_an_agent_break_an_exchange_and_each_one_is_logged_once(data):
    answer, log = play(data, rules=("never.invalid",))
    assert [row["verdict"] for row in log] == ["refused"]
    assert answer.startswith(b"HTTP/1.1 4") or answer == b""


def test_a_slow_head_and_a_large_one_are_bounded():
    answer, log = play(b"GET http://a.org/ HTTP/1.1\r\n", bounds=HASTY, end=False)
    assert answer.startswith(b"HTTP/1.1 408") and log[0]["status"] == 408
    answer, log = play(b"GET http://a.org/ HTTP/1.1\r\nX: " + b"a" * 100_000, end=False)
    assert log[0]["status"] == 431


@pytest.fixture
def server(monkeypatch):
    """A loopback server that `a.org` leads to, and what it does with a connection."""
    listener = socket.create_server(("127.0.0.1", 0))
    listener.settimeout(120)
    found = lambda *_: [(2, 1, 6, "", listener.getsockname())]  # noqa: E731
    monkeypatch.setattr(exchange_module.socket, "getaddrinfo", found)
    monkeypatch.setattr(exchange_module, "objection", lambda *_: None)
    name = f"a.org:{listener.getsockname()[1]}"
    threads = []

    def start(behave):
        def run():
            with listener.accept()[0] as side:
                side.settimeout(120)
                behave(side)

        threads.append(threading.Thread(target=run))
        threads[0].start()
        return name

    try:
        yield start
        threads[0].join(120)
    finally:
        listener.close()


def test_a_tunnel_moves_bytes_both_ways_and_counts_them(server):
    def echo(side):
        while data := side.recv(1000):
            side.sendall(data)

    name = server(echo)
    answer, log = play(b"CONNECT %s HTTP/1.1\r\n\r\nearly" % name.encode(), rules=(name,))
    assert answer == b"HTTP/1.1 200 Connection established\r\n\r\nearly"
    assert [row.get("verdict") for row in log] == ["allowed", None]
    assert log[1] == {"end": "done", "sent": 5, "received": len(answer)}


def test_only_one_request_goes_on_and_a_second_one_behind_it_does_not(server):
    seen = []

    def behave(side):
        while not (seen and seen[-1].endswith(b"ok")):
            seen.append(side.recv(10_000))
        side.sendall(b"HTTP/1.1 200 OK\r\n\r\nhi")
        side.shutdown(socket.SHUT_WR)
        while piece := side.recv(10_000):
            seen.append(piece)

    name = server(behave)
    head = b"POST http://%s/ HTTP/1.1\r\nContent-Length: 2\r\n\r\n" % name.encode()
    answer, _ = play(head + b"okGET http://other.org/ HTTP/1.1\r\n\r\n", rules=(name,))
    assert answer.endswith(b"hi")
    found = b"".join(seen)
    assert found.endswith(b"\r\n\r\nok") and found.count(b"HTTP/1.1") == 1


def test_a_silent_server_and_a_generous_one_are_bounded(server):
    over = threading.Event()
    name = server(lambda side: side.recv(1) and over.wait(120))
    _, log = play(
        b"GET http://%s/ HTTP/1.1\r\n\r\n" % name.encode(), rules=(name,), bounds=HASTY, end=False
    )
    over.set()
    assert log[1]["end"] == "no more time"


@pytest.mark.parametrize("method", [b"GET http://", b"CONNECT "])
def test_bytes_are_bounded_each_way(server, method):
    def flood(side):
        try:
            for _ in range(100):
                side.sendall(b"x" * 65_536)
        except OSError:
            return

    name = server(flood)
    answer, log = play(b"%s%s HTTP/1.1\r\n\r\n" % (method, name.encode()), rules=(name,), end=False)
    assert log[1]["end"] == "more bytes than one request may move"
    assert len(answer) <= BOUNDS.size + 100

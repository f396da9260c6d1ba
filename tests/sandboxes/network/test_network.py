"""What a sandbox with allowed hosts reaches through its proxy, with a real server outside."""

from __future__ import annotations

import asyncio
import json
import socket
import subprocess
import time

import pytest
from network_world import opened, run, seen

from agentrl.errors import SandboxLost
from agentrl.sandboxes import requests_of
from agentrl.sandboxes.docker import network as network_module
from agentrl.sandboxes.docker import networked as networked_module
from agentrl.sandboxes.lease import Lease

pytestmark = pytest.mark.usefixtures("docker")


def test_allowed_hosts_work_and_all_else_is_refused_and_logged(world):
    over = []

    async def main():
        async with opened(
            world, private=("allowed.test", ".allowed.test:443"), on_request=over.append
        ) as box:
            code = """
print(fetch("http://allowed.test/page?q=1"))
print(fetch("http://allowed.test/", b"body"))
print(tunnel("allowed.test:443", b"through"))
print(tunnel("below.allowed.test:443", b"below"))
print(fetch("http://below.allowed.test/"))
print(fetch("http://other.test/"))
print(tunnel("allowed.test:22"))
"""
            code += (
                f'print(fetch("http://{world.address}/"))\nprint(tunnel("{world.address}:443"))\n'
            )
            lines = [line for line in await run(box, code) if line.strip()]
            assert lines[0] == "GET /page?q=1 allowed.test 0 "
            assert lines[1] == "POST / allowed.test 0 body"
            assert lines[2:4] == ["through", "below"]
            refused = [line for line in lines[4:] if "403" in line]
            assert len(refused) == 5
            rows = await requests_of(box)
            assert seen(rows) == [
                ("GET", "allowed.test", 80, True),
                ("POST", "allowed.test", 80, True),
                ("CONNECT", "allowed.test", 443, True),
                ("CONNECT", "below.allowed.test", 443, True),
                ("GET", "below.allowed.test", 80, False),
                ("GET", "other.test", 80, False),
                ("CONNECT", "allowed.test", 22, False),
                ("GET", world.address, 80, False),
                ("CONNECT", f"{world.address}:443", 443, False),
            ]
            assert rows[1].over and rows[1].sent > 4 and rows[1].received > 20
            assert all(
                abs(row.time - time.time()) < 60 and row.sandbox.startswith("agentrl-")
                for row in rows
            )
            await box.reset()
            assert await box.verify() == []
        assert {row.number for row in over} >= {row.number for row in rows if row.over}

    asyncio.run(main())


def addresses_of_this_machine():
    rows = json.loads(
        subprocess.run(["ip", "-j", "addr"], capture_output=True, text=True, check=True).stdout
    )
    return [info["local"] for row in rows for info in row["addr_info"] if info["family"] == "inet"]


def test_there_is_no_way_past_the_proxy(world):
    """Not to the server, to this machine, to a resolver, nor to another sandbox."""
    listener = socket.create_server(("", 0), backlog=50)
    port = listener.getsockname()[1]

    async def main():
        async with opened(world) as box, opened(world) as neighbour:
            hosts = [*addresses_of_this_machine(), world.gateway]
            hosts.remove("127.0.0.1")
            theirs = (await run(neighbour, "print(PROXY[0])"))[0]
            base, last = theirs.rsplit(
                ".", 1
            )  # the address of a sandbox is the one after its proxy's
            listen = "import socket; socket.create_server(('', 80)).accept()"
            listening = asyncio.create_task(neighbour.exec(["python3", "-c", listen], timeout_s=20))
            code = f"""
from concurrent.futures import ThreadPoolExecutor
base, last = PROXY[0].rsplit(".", 1)
hosts = [(host, {port}) for host in {hosts!r} + [f"{{base}}.{{int(last) - 1}}"]]
hosts += [("{world.address}", 80), ("{world.address}", 443)]
hosts += [("{theirs}", 3128), ("{base}.{int(last) + 1}", 80)]
names = [(server, name) for server in ("{world.address}", "127.0.0.11", PROXY[0]) for name in NAMES]
def found(name):
    try: return socket.getaddrinfo(name, 80)
    except OSError: return "failed"
with ThreadPoolExecutor(8) as pool:
    ends = zip(hosts, pool.map(lambda way: direct(*way), hosts))
    print([way for way, end in ends if end != "failed"], len(hosts) > 6)
    ends = zip(names, pool.map(lambda way: ask(*way), names))
    print([way for way, end in ends if end != "failed"], len(names))
    print(*pool.map(found, NAMES))
def refused(*kind):
    try: socket.socket(*kind)
    except OSError: return "failed"
print(refused(socket.AF_INET, socket.SOCK_RAW, 1), refused(socket.AF_PACKET, socket.SOCK_RAW))
print(direct(*PROXY), fetch("http://allowed.test/"))
print(open("/proc/net/if_inet6").read() or "no IPv6")
"""
            names = "NAMES = ('allowed.test', 'example.org')\n"
            lines = await run(box, names + code)
            assert lines[0] == "[] True"
            assert lines[1] == "[] 6"
            assert lines[2] == "failed failed"  # though the proxy finds the first one
            assert lines[3] == "failed failed"
            assert (
                lines[4] == "connected GET / allowed.test 0 "
            )  # the server was never asked for a name
            assert lines[5] == "no IPv6"
            listening.cancel()

    with listener:
        asyncio.run(main())
        listener.setblocking(False)
        with pytest.raises(BlockingIOError):
            listener.accept()


def test_no_datagram_reaches_this_machine(world):
    """The bridge takes in broadcasts, and what is sent to any address of this machine."""
    listener = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
    listener.bind(("", 0))
    port = listener.getsockname()[1]
    code = f"""
import fcntl
def mine(kind):
    try:
        sock = socket.socket(socket.AF_INET, kind)
        name = fcntl.ioctl(sock.fileno(), 0x8915, struct.pack("256s", b"eth0"))
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_BROADCAST, 1)
        sock.bind((socket.inet_ntoa(name[20:24]), 0))
        sock.sendto(b"x", ("255.255.255.255", {port}))
        sock.sendto(b"x", ("224.0.0.1", {port}))
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_BINDTODEVICE, b"eth0")
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_DONTROUTE, 1)
        for host in {addresses_of_this_machine()!r}: sock.sendto(b"x", (host, {port}))
    except OSError as error: return f"failed {{error.errno}}"
    return "sent"
kinds = (socket.SOCK_DGRAM, socket.SOCK_DGRAM | socket.SOCK_NONBLOCK, socket.SOCK_SEQPACKET)
print(*map(mine, kinds))
socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
socket.socket(socket.AF_INET6, socket.SOCK_STREAM, 6)
print(fetch("http://allowed.test/"))
"""

    async def main():
        async with opened(world) as box:
            lines = await run(box, code)
            assert lines == ["failed 1 failed 1 failed 1", "GET / allowed.test 0 "]
        await asyncio.sleep(0.2)

    with listener:
        asyncio.run(main())
        listener.setblocking(False)
        with pytest.raises(BlockingIOError):
            listener.recv(10)


def test_a_reset_with_a_bad_path_changes_nothing_and_a_loan_that_is_over_tells_nothing(world):
    async def main():
        async with opened(world) as box:
            await box.exec(
                [
                    "sh",
                    "-c",
                    "sleep 60 & until grep -qs sleep /proc/$!/comm; do :; done; echo 1 >kept",
                ]
            )
            with pytest.raises(ValueError, match="must be relative"):
                await box.reset({"../x": b""})
            assert (
                await box.exec(["sh", "-c", "cat /proc/[0-9]*/comm | grep -c sleep; cat kept"])
            ).stdout == b"1\n1\n"
            lease = Lease(box, 1)
            asking = asyncio.create_task(requests_of(lease))
            await asyncio.sleep(0)
            lease.end()
            with pytest.raises(SandboxLost, match="loan 1"):
                await asking

    asyncio.run(main())


def test_names_that_lead_inside_are_refused(world, monkeypatch):
    names = {
        "loop.test": "127.0.0.1",
        "metadata.test": "169.254.169.254",
        "inner.test": "10.1.2.3",
        "zero.test": "0.0.0.0",
        "cloud.test": "100.100.100.200",
    }
    plain = network_module._ProxySpec.config

    def config(self, cores):
        made = plain(self, cores)
        made["HostConfig"]["ExtraHosts"] = [f"{name}.:{address}" for name, address in names.items()]
        return made

    monkeypatch.setattr(network_module._ProxySpec, "config", config)

    async def main():
        rebound = ("loop.test", "metadata.test", "zero.test", "cloud.test")
        async with opened(
            world, *names, "other.test", "nowhere.test", private=("allowed.test", *rebound[:2])
        ) as box:
            code = (
                f"for name in {[*names, 'other.test', 'allowed.test', 'nowhere.test']}:"
                " print(fetch(f'http://{name}/'))"
            )
            text = "\n".join(await run(box, code))
            assert text.count("403 agentrl: this name leads to an address that is not allowed") == 6
            for why in ("loopback", "link-local", "private", "reserved"):
                assert f"not allowed: {why}" in text
            assert "GET / allowed.test" in text and "502 agentrl: this name has no address" in text
            rows = await requests_of(box)
            assert sum(row.allowed for row in rows) == 1
            assert "link-local" in rows[1].why

    asyncio.run(main())


def test_a_reset_ends_every_connection_and_begins_a_new_log(world):
    async def main():
        over = []
        async with opened(world, on_request=over.append) as box:
            session = await box.open_session()
            hold = (
                "import socket, time, os\nsocks = []\nfor _ in range(5):\n s ="
                " socket.create_connection((os.environ['http_proxy'].split('/')[2].split(':')[0],"
                " 3128))\n s.sendall(b'CONNECT allowed.test:443 HTTP/1.1\\r\\n\\r\\n');"
                " s.recv(100); socks.append(s)\ns.sendall(b'GET http://')\nprint('held',"
                " flush=True)\ntime.sleep(60)"
            )
            await box.put({"hold.py": hold.encode()})
            done = await session.run("python3 hold.py > out & until grep -q held out; do :; done")
            assert done.exit_code == 0
            assert len([row for row in await requests_of(box) if row.allowed and not row.over]) == 5
            await box.reset()
            assert await requests_of(box) == () and await box.verify() == []
            assert (await run(box, "print(fetch('http://allowed.test/'))"))[0].startswith("GET /")
            rows = await requests_of(box)
            assert seen(rows) == [("GET", "allowed.test", 80, True)]
            assert len([row for row in over if row.method == "CONNECT" and row.allowed]) == 5
            for _ in range(20):
                await run(
                    box,
                    "for _ in range(3): fetch('http://allowed.test/'), fetch('http://no.test/')",
                )
                await box.reset()

    asyncio.run(main())


def test_what_one_agent_may_use_is_bounded(world, monkeypatch):
    monkeypatch.setattr(
        networked_module, "_BOUNDS", networked_module._BOUNDS | {"head_s": 3.0, "connections": 4}
    )
    slow = """
socks = [socket.create_connection(PROXY, timeout=60) for _ in range(6)]
for at in range(4):
    socks[at].sendall(b"GET ")
answers = []
for sock in socks:
    try: answers.append(sock.recv(100)[:12])
    except OSError: answers.append(b"")
print(answers)
"""
    long = """
sock = socket.create_connection(PROXY, timeout=60)
try: sock.sendall(b"GET http://allowed.test/ HTTP/1.1\\r\\nX: " + b"x" * 1_000_000)
except OSError: pass
try: print(sock.recv(12))
except OSError: print("reset")
"""
    large = """
total = 0
try:
    with urllib.request.urlopen("http://allowed.test/large", timeout=60) as page:
        while data := page.read(10_000): total += len(data)
except Exception as error: pass
print(900_000 < total < 1_100_000)
"""

    async def main():
        async with opened(world, size_mb=1) as box:

            async def bounded(words, code):
                """Again, while connections of before are still being closed and count as open."""
                for _ in range(50):
                    (line,) = await run(box, code)
                    if words in str([row.why for row in await requests_of(box)]):
                        return line
                raise AssertionError(f"never {words!r}")

            (line,) = await run(box, slow)
            assert (
                line
                == "[b'HTTP/1.1 408', b'HTTP/1.1 408', b'HTTP/1.1 408', b'HTTP/1.1 408', b'', b'']"
            )
            assert await bounded("a head of more than", long) in ("b'HTTP/1.1 431'", "reset")
            assert await bounded("more bytes than", large) == "True"
            whys = [row.why for row in await requests_of(box)]
            assert sum("no whole head" in why for why in whys) == 4
            assert sum("more than 4 connections" in why for why in whys) >= 2

    asyncio.run(main())

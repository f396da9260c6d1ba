"""Which hosts and addresses rules permit, and which settings of a network are refused."""

from __future__ import annotations

import asyncio
import ipaddress
import socket
from types import SimpleNamespace

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from agentrl.errors import ConfigError, SandboxLost
from agentrl.sandboxes import Allow, DockerBackend, open_pool
from agentrl.sandboxes.docker.networked import _Line
from agentrl.sandboxes.proxy.rules import host_name, objection, permit, port_number, rule

LABELS = st.from_regex(r"[a-z]([a-z0-9-]{0,10}[a-z0-9])?", fullmatch=True)
NAMES = st.lists(LABELS, min_size=2, max_size=4).map(".".join)


def permitted(rules, host, port):
    return permit([rule(text) for text in rules], host, port) is not None


@given(NAMES, LABELS)
def test_a_name_means_itself_and_a_dot_means_all_below(name, label):
    assert permitted([name], name, 443) and permitted([name], name, 80)
    assert not permitted([name], f"{label}.{name}", 443)
    assert not permitted([name], name, 8080)
    assert permitted([f".{name}"], f"{label}.{name}", 443)
    assert not permitted([f".{name}"], name, 443)
    assert not permitted([f".{name}"], f"{label}{name}", 443)  # no dot between them
    assert permitted([f"{name}:8080"], name, 8080) and not permitted([f"{name}:8080"], name, 80)


@pytest.mark.parametrize(
    "text",
    [
        *(
            "",
            ".",
            "*.example.org",
            "https://example.org",
            "example.org/x",
            "1.2.3.4",
            "127.1",
            "[::1]:80",
            "::1",
        ),
        *(
            "0x7f.1",
            "2130706433",
            "0x7f000001",
            "a.0x1f",
            "example.org:",
            "example.org:0",
            "example.org:65536",
        ),
        *(
            "example.org:+1",
            "bücher.example",
            "exa mple.org",
            "a..b",
            "-a.org",
            "user@example.org",
            "example.org:٣",
        ),
        "x" * 64 + ".org",
    ],
)
def test_what_is_no_host_is_refused_with_the_fix(text):
    with pytest.raises(ConfigError, match=r"write example\.org"):
        Allow(text)


@given(st.text())
@example("１２７.0.0.1")
def test_no_text_raises_and_a_name_is_never_an_address(text):
    name = host_name(text)
    assert name is None or (name == name.lower() and not name.endswith("."))
    assert port_number(text) is None or 0 < int(text) < 65_536
    if name is not None:
        with pytest.raises(OSError):
            socket.inet_aton(name)  # as lenient as resolvers are


@given(st.ip_addresses(v=4), st.booleans())
def test_only_public_addresses_may_be_reached_and_private_ones_where_said(address, private):
    why = objection(str(address), private)
    if why is None:
        assert address.is_global or private
    if any((address.is_loopback, address.is_link_local, address.is_multicast, address.is_reserved)):
        assert why is not None
    if address.is_private and not private:
        assert why is not None


@pytest.mark.parametrize("private", [False, True])
@pytest.mark.parametrize(
    "address",
    [
        *(
            "127.0.0.1",
            "127.8.8.8",
            "169.254.169.254",
            "0.0.0.0",
            "0.1.2.3",
            "224.0.0.1",
            "255.255.255.255",
        ),
        *("100.100.100.200", "168.63.129.16", "::1", "not", ""),
    ],
)
def test_these_addresses_are_never_reached(address, private):
    assert objection(address, private)


def test_private_networks_need_a_word():
    for address in ("10.0.0.1", "172.17.0.2", "192.168.1.1", "100.64.0.1", "198.18.0.2"):
        assert objection(address, private=False)
        assert objection(address, private=True) is None
    assert objection("93.184.216.34", private=False) is None
    assert ipaddress.ip_address("93.184.216.34").is_global


@pytest.mark.parametrize("network", ["host", "bridge", "container:abc", "mine", ""])
def test_a_network_by_name_is_refused(network):
    with pytest.raises(ConfigError, match="would let agents reach this machine"):
        DockerBackend(network=network)


def test_what_cannot_be_allowed_is_told():
    for name in ("bubblewrap", "process"):
        with pytest.raises(ConfigError, match="use sandbox='docker'"):
            open_pool(name, allow=("example.org",))
    with pytest.raises(ConfigError, match="must be a list"):
        open_pool("docker", allow="example.org")
    with pytest.raises(ConfigError, match="must be a list"):
        Allow(private="example.org")
    with pytest.raises(ConfigError, match="names no host"):
        Allow()
    for name in ("localhost", "LOCALHOST:8080", "a.localhost", ".localhost"):
        with pytest.raises(ConfigError, match="is the sandbox itself"):
            Allow(name)
    with pytest.raises(ConfigError, match="outside='host'"):
        Allow("example.org", outside="host")
    with pytest.raises(ConfigError, match="must be positive"):
        Allow("example.org", size_mb=0)


GARBAGE = [
    b"x" * 100_000,
    b"{\n",
    b"[]\n",
    b"5\n",
    b'{"mark": 7}\n',
    b'{"end": 1, "id": 1}\n',
    b"[" * 60_000 + b"\n",
]


@pytest.mark.parametrize("garbage", GARBAGE, ids=range(len(GARBAGE)))
def test_a_proxy_that_breaks_the_protocol_costs_its_sandbox(garbage):
    class Container:
        def __init__(self):
            self.sock, self.other = socket.socketpair()
            self.sock.setblocking(False)

        def words(self):
            return ""

        def unwrap(self, data):
            return data

        def hang_up(self):
            self.sock.close()

    async def main():
        proxy, lost = Container(), []
        line = _Line(SimpleNamespace(proxy=proxy, name="x", allow=Allow("a.org")), lost.append)
        asking = asyncio.ensure_future(line.mark(drop=False))
        await asyncio.sleep(0)
        proxy.other.sendall(garbage)
        with pytest.raises(SandboxLost, match="broke the protocol"):
            await asking
        with pytest.raises(SandboxLost, match="broke the protocol"):
            await line.mark(drop=True)
        assert len(lost) == 1
        proxy.other.close()

    asyncio.run(main())

"""Rules of hosts that may be reached, and addresses that no name may lead to. Pure."""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Iterable
from typing import NamedTuple

PORTS = (80, 443)
_NAME_CHARS = 253
_LABEL = re.compile(r"[a-z0-9_]([a-z0-9_-]{0,61}[a-z0-9_])?")
_NUMBER = re.compile(r"[0-9]+|0x[0-9a-f]*")
_PORT = re.compile(r"[0-9]{1,5}")
_LAST_PORT = 65_535
_THIS_NETWORK = ipaddress.IPv4Network("0.0.0.0/8")
# Services of clouds that hand out credentials, outside of the link-local network: Alibaba's and
# Azure's.
_METADATA = {ipaddress.IPv4Address("100.100.100.200"), ipaddress.IPv4Address("168.63.129.16")}


class HostRule(NamedTuple):
    """One permission.

    Attributes:
        name: a host name in lower case.
        below: whether it stands for every name below it instead, itself not among them.
        ports: TCP ports.
        private: whether the name may lead to an address of a private network.
    """

    name: str
    below: bool
    ports: tuple[int, ...]
    private: bool

    def matches(self, host: str, port: int) -> bool:
        """Whether it permits this host, in the form that `host_name` gives, on this port."""
        named = host.endswith(f".{self.name}") if self.below else host == self.name
        return named and port in self.ports


def rule(text: str, private: bool = False) -> HostRule:
    """`name` (ports 80 and 443), `name:port`, or either with a leading dot: every name below it.

    Raises:
        ValueError: the text is not one of these; the message has the fix.
    """
    name, colon, number = text.partition(":")
    host = host_name(name.removeprefix("."))
    ports = PORTS if not colon else tuple(filter(None, [port_number(number)]))
    if host is None or not ports:
        raise ValueError(
            f"allow={text!r} is no host: write example.org, example.org:8443, or .example.org for"
            " all names below it; no address, no scheme, no path, no wildcard, and international"
            " names in their xn-- form"
        )
    if host.rpartition(".")[2] == "localhost":
        raise ValueError(
            f"allow={text!r} is the sandbox itself, which asks no proxy for it: give this machine a"
            " name that its resolver knows, and name it in private="
        )
    return HostRule(host, name.startswith("."), ports, private)


def host_name(text: str) -> str | None:
    """A host name in lower case without its last dot; None for an address or what is no name.

    A last part that is a number makes an IPv4 address to many resolvers: 127.1, 0x7f.1 and
    2130706433 are no names.
    """
    name = text.lower().removesuffix(".")
    labels = name.split(".")
    if not text.isascii() or len(name) > _NAME_CHARS or _NUMBER.fullmatch(labels[-1]):
        return None
    return name if all(_LABEL.fullmatch(label) for label in labels) else None


def port_number(text: str) -> int | None:
    """A TCP port, or None."""
    if not _PORT.fullmatch(text) or not text.isascii():
        return None
    port = int(text)
    return port if 0 < port <= _LAST_PORT else None


def permit(rules: Iterable[HostRule], host: str, port: int) -> HostRule | None:
    """The rule that permits a host (as `host_name` gives it); one with private addresses first."""
    found = [one for one in rules if one.matches(host, port)]
    return max(found, key=lambda one: one.private, default=None)


def objection(address: str, private: bool) -> str | None:
    """Why an IPv4 address may not be connected to; None if it may.

    `private` permits the networks that anybody may use for themselves. Loopback, link-local
    addresses (metadata services of clouds are there), and what is reserved or for many receivers
    are never permitted.
    """
    try:
        place = ipaddress.IPv4Address(address)
    except ValueError:
        return "no IPv4 address"
    kinds = {
        "loopback": place.is_loopback,
        "link-local": place.is_link_local,
        "multicast": place.is_multicast,
        "reserved": place.is_reserved or place.is_unspecified or place in _THIS_NETWORK,
        "private": not private and (place.is_private or place in _METADATA or not place.is_global),
    }
    if private and place in _METADATA:
        return "metadata"
    return next((kind for kind, holds in kinds.items() if holds), None)

"""The network policy of a sandbox: none, or these hosts through our proxy, with a log."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from agentrl.errors import ConfigError
from agentrl.sandboxes.proxy.rules import HostRule, rule

_NO_OUTSIDE = ("host", "none", "container:")


@dataclass(frozen=True, slots=True)
class NetworkRequest:
    """One request of an agent to the proxy.

    Attributes:
        sandbox: which one asked.
        number: counts the requests of that sandbox.
        time: of the verdict, in seconds since 1970.
        method: CONNECT, GET, HEAD or POST; empty where none could be read.
        host: what was asked for, as far as it could be read.
        allowed: the verdict; `why` has the reason of a refusal, else how the request ended.
        sent: bytes from the sandbox.
        received: bytes to it.
        over: whether it has ended; until then the bytes are 0.
    """

    sandbox: str
    number: int
    time: float
    method: str
    host: str
    port: int
    allowed: bool
    why: str = ""
    sent: int = 0
    received: int = 0
    over: bool = False


class Allow:
    """The hosts that an agent may reach over HTTP and HTTPS, and nothing else.

    Attributes:
        rules: the permissions.
        hosts, private: as they were given.
        outside: Docker network through which the proxy reaches them.
        size_mb: bytes that one request may move each way, in MiB.
        total_s: time that one request may take.
        on_request: called on the event loop with each request, once, when it is over.
    """

    def __init__(
        self,
        *hosts: str,
        private: Sequence[str] = (),
        outside: str = "bridge",
        size_mb: int = 256,
        total_s: float = 300.0,
        on_request: Callable[[NetworkRequest], None] | None = None,
    ) -> None:
        """Nothing is started.

        Args:
            hosts: `example.org` (ports 80 and 443), `example.org:8443`, or `.example.org`: all
                names below it, itself not among them. Their names must lead to public addresses.
            private: the same, for hosts that may be in a private network, as a mirror on this
                machine.

        Raises:
            ConfigError: no host, or a malformed one; a number that is not positive; an outside
                that is no network.
        """
        if isinstance(private, str):
            raise ConfigError(
                f"private={private!r} must be a list of hosts: private=({private!r},)"
            )
        try:
            self.rules: tuple[HostRule, ...] = (
                *map(rule, hosts),
                *(rule(text, private=True) for text in private),
            )
        except ValueError as error:
            raise ConfigError(str(error)) from error
        if not self.rules:
            raise ConfigError("allow= names no host: leave it out for no network at all")
        if size_mb <= 0 or total_s <= 0:
            raise ConfigError(
                f"size_mb={size_mb} and total_s={total_s} of a network must be positive"
            )
        if not outside or outside.startswith(_NO_OUTSIDE):
            raise ConfigError(
                f"outside={outside!r} is no network for a proxy: leave it out (bridge), or name"
                " your own"
            )
        self.hosts, self.private = hosts, tuple(private)
        self.outside = outside
        self.size_mb = size_mb
        self.total_s = total_s
        self.on_request = on_request

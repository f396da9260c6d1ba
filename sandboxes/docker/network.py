"""An internal network for one sandbox, with our filtering proxy as its only other member."""

from __future__ import annotations

import contextlib
import random
import sys
from collections.abc import Mapping
from concurrent.futures import Executor
from dataclasses import dataclass
from typing import Any

from agentrl.errors import SandboxLost
from agentrl.sandboxes.base import SandboxLimits
from agentrl.sandboxes.docker.container import Container
from agentrl.sandboxes.docker.daemon import Daemon
from agentrl.sandboxes.docker.images import ARCHIVE, PYTHON
from agentrl.sandboxes.docker.profile import profile
from agentrl.sandboxes.docker.spec import ContainerSpec
from agentrl.sandboxes.launch import starting
from agentrl.sandboxes.network import Allow
from agentrl.sandboxes.proxy.serve import PORT

CONNECTIONS = 32
_NOBODY = "65534:65534"
_LIMITS = SandboxLimits(memory_mb=64, disk_mb=1, processes=2 * CONNECTIONS, open_files=256)
# Addresses set aside for measurements (RFC 2544), which no real host has: 16,384 networks of 8.
_FIRST, _STEP, _NETWORKS = (198 << 24) + (18 << 16), 8, 1 << 14
_TRIES = 50
# The host gets no address there: else each of its services would be in reach of the sandbox.
_OPTIONS = {
    "com.docker.network.bridge.inhibit_ipv4": "true",
    "com.docker.network.bridge.enable_ip_masquerade": "false",
}


class Network:
    """An internal network with two members: the proxy and the sandbox.

    Attributes:
        name: as the daemon knows it.
        proxy: address of the proxy.
        sandbox: address of the sandbox.
    """

    def __init__(self, daemon: Daemon, name: str, labels: Mapping[str, str]) -> None:
        """Make one. Blocks.

        Raises:
            SandboxLost: it cannot be made, or is not internal.
        """
        self.name = name
        self._daemon = daemon
        with daemon.explained("creating a network"):
            self._id = self._create(daemon.api(), labels)
            internal = daemon.api().inspect_network(self._id)["Internal"]
        if internal is not True:
            self.remove()
            raise SandboxLost(
                f"the Docker daemon at {daemon.url} makes no internal networks: leave out allow="
            )

    def _create(self, api: Any, labels: Mapping[str, str]) -> str:
        import docker.errors
        from docker.types import IPAMConfig, IPAMPool

        last: Exception | None = None
        for index in random.sample(range(_NETWORKS), _TRIES):
            base = _FIRST + index * _STEP
            self.proxy, self.sandbox = _dotted(base + 2), _dotted(base + 3)
            pool = IPAMPool(subnet=f"{_dotted(base)}/29", gateway=_dotted(base + 1))
            try:
                made = api.create_network(
                    self.name,
                    driver="bridge",
                    options=_OPTIONS,
                    ipam=IPAMConfig(pool_configs=[pool]),
                    internal=True,
                    labels=dict(labels),
                )
            except docker.errors.APIError as error:
                if "overlap" not in str(error).lower():
                    raise
                last = error
            else:
                return str(made["Id"])
        raise docker.errors.DockerException(f"no free addresses for a network: {last}")

    def join(self, container: str, address: str) -> None:
        """Connect a running container to it.

        Raises:
            SandboxLost: it cannot be connected.
        """
        with self._daemon.explained("connecting a proxy"):
            self._daemon.api().connect_container_to_network(
                container, self._id, ipv4_address=address
            )

    def remove(self) -> None:
        """Remove it; one that cannot be removed is left, and told of, to the next start."""
        import docker.errors

        try:
            with (
                self._daemon.explained("removing a network"),
                contextlib.suppress(docker.errors.NotFound),
            ):
                self._daemon.api().remove_network(self._id)
        except SandboxLost as error:
            print(
                f"warning: network {self.name} is left to the next start: {error}", file=sys.stderr
            )


def _dotted(number: int) -> str:
    return ".".join(str(number >> shift & 255) for shift in (24, 16, 8, 0))


@dataclass(frozen=True)
class Linked(ContainerSpec):
    """A sandbox whose only network is an internal one.

    Attributes:
        network: its name.
        address: that of the sandbox in it.
        proxy: that of the proxy, where also no names are to be had.
    """

    network: str = ""
    address: str = ""
    proxy: str = ""

    def config(self, cores: float) -> dict[str, Any]:
        """The request that creates it."""
        config = super().config(cores)
        host = config["HostConfig"]
        # Docker's own resolver forwards questions, in some versions even from the host's network
        # (CVE-2024-29018): it is pointed at an address where nobody answers.
        host |= {"NetworkMode": self.network, "Dns": [self.proxy], "DnsSearch": ["."]}
        host["DnsOptions"] = ["timeout:1", "attempts:1"]
        host["SecurityOpt"] = [
            "no-new-privileges",
            f"seccomp={profile(self.limits.needs, streams_only=True)}",
        ]
        host["Sysctls"] |= {"net.ipv6.conf.all.disable_ipv6": "1"}
        addresses = {self.network: {"IPAMConfig": {"IPv4Address": self.address}}}
        return config | {
            "NetworkDisabled": False,
            "NetworkingConfig": {"EndpointsConfig": addresses},
        }


@dataclass(frozen=True)
class _ProxySpec(ContainerSpec):
    """The proxy: no rights, nothing to write to, and a network that leads outside."""

    outside: str = "bridge"

    def config(self, cores: float) -> dict[str, Any]:
        config = super().config(cores)
        host = config["HostConfig"]
        host |= {
            "NetworkMode": self.outside,
            "CapAdd": [],
            "Tmpfs": {},
            "PidsLimit": _LIMITS.processes,
        }
        host["Sysctls"] = {"net.ipv4.ip_forward": "0"}
        entry = starting(PYTHON, ARCHIVE, "proxy.serve")
        return config | {
            "NetworkDisabled": False,
            "User": _NOBODY,
            "Hostname": "proxy",
            "Entrypoint": entry,
        }


class Link:
    """The network of one sandbox and the proxy in it, which ends with this process.

    Attributes:
        network: what the sandbox joins.
        proxy: the container of the proxy.
    """

    def __init__(
        self, daemon: Daemon, allow: Allow, spec: ContainerSpec, name: str, executor: Executor
    ) -> None:
        """Start both; `spec` has the proxy's image and labels. Blocks.

        Raises:
            SandboxLost: one cannot be started; nothing of it is left.
        """
        self.allow = allow
        self.name = name
        self.network = Network(daemon, name, spec.labels)
        try:
            proxy = _ProxySpec(
                spec.image, _LIMITS, spec.labels, spec.runtime, spec.userns, allow.outside
            )
            self.proxy = Container(daemon, proxy, executor, self.network.remove)
        except BaseException:
            self.network.remove()
            raise
        try:
            self.network.join(self.proxy.id, self.network.proxy)
        except BaseException:
            self.end()
            raise

    def linked(self, spec: ContainerSpec) -> Linked:
        """The same sandbox, in this network."""
        net = self.network
        return Linked(
            spec.image,
            spec.limits,
            spec.labels,
            spec.runtime,
            spec.userns,
            net.name,
            net.sandbox,
            net.proxy,
        )

    @property
    def env(self) -> dict[str, str]:
        """How programs find the proxy."""
        url, near = f"http://{self.network.proxy}:{PORT}", "localhost,127.0.0.1"
        names = dict.fromkeys(("http_proxy", "https_proxy", "HTTP_PROXY", "HTTPS_PROXY"), url)
        return names | {"no_proxy": near, "NO_PROXY": near}

    def end(self) -> None:
        """End the proxy, then the network, once the sandbox is gone. Blocks; safe to call twice."""
        self.proxy.end()

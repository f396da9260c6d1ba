"""One Docker daemon: reaching it, explaining its failures, and removing what others left."""

from __future__ import annotations

import importlib.util
import os
import socket
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from urllib.parse import urlsplit

from agentrl.errors import ConfigError, SandboxLost
from agentrl.sandboxes.docker.owner import LABEL, Owner
from agentrl.sandboxes.docker.undertaker import Undertaker

DEFAULT_URL = "unix:///var/run/docker.sock"
NO_SDK = "the docker SDK is not installed: pip install 'agentrl[docker]'"
NO_PODMAN = (
    "the daemon at {url} is Podman, whose socket takes neither a system-call profile nor a limit on"
    " the number of files with a request: use Docker Engine, or bubblewrap, which needs no daemon"
)
CALL_S = 60.0
_CONNECT_S = 2.0
_POOL = 64
_undertakers: dict[int, Undertaker] = {}
_undertaking = threading.Lock()
# What a daemon says, in lower case -> what to do about it.
_REMEDIES = {
    "no space left on device": "its disk is full: free some with `docker system prune`",
    "unknown runtime": (
        "it has no such runtime: name it in /etc/docker/daemon.json, or leave runtime out"
    ),
    "unknown or invalid runtime": (
        "it has no such runtime: install it and name it in /etc/docker/daemon.json, or leave"
        " runtime out"
    ),
    "toomanyrequests": "its registry limits downloads: log in with `docker login`, or wait",
    "is not supported by your kernel": "its kernel or cgroup lacks a limit that a sandbox needs",
    "userns": (
        "it has no user-namespace remapping: set userns-remap in /etc/docker/daemon.json, or leave"
        " userns out"
    ),
}


def default_url() -> str:
    """AGENTRL_DOCKER_URL, else the daemon that Docker's own tools use; commas between several."""
    return os.environ.get("AGENTRL_DOCKER_URL") or os.environ.get("DOCKER_HOST") or DEFAULT_URL


def split_urls(url: str) -> list[str]:
    """The URLs of several daemons.

    Raises:
        ConfigError: the text names no daemon.
    """
    if urls := [part.strip() for part in url.split(",") if part.strip()]:
        return urls
    raise ConfigError(
        f"docker url={url!r} names no daemon: leave it out for the local one, or write unix:///path"
    )


def check_url(url: str) -> None:
    """Whether a URL is of a kind that can be used; nothing is connected.

    Raises:
        ConfigError: it is not.
    """
    try:
        parts = urlsplit(url)
    except ValueError as error:
        raise ConfigError(
            f"docker url={url!r} is malformed ({error}): write unix:///path or tcp://host:port"
        ) from error
    if parts.scheme not in ("unix", "tcp", "http"):
        raise ConfigError(
            f"docker url={url!r} must be unix:///path or tcp://host:port; reach another machine by"
            " `ssh -nNT -L /tmp/docker.sock:/var/run/docker.sock HOST` and"
            " url='unix:///tmp/docker.sock'"
        )
    if parts.scheme != "unix" and os.environ.get("DOCKER_TLS_VERIFY"):
        raise ConfigError(
            f"docker url={url!r} with DOCKER_TLS_VERIFY is not supported: unset it and reach the"
            " daemon by `ssh -nNT -L /tmp/docker.sock:/var/run/docker.sock HOST` and"
            " url='unix:///tmp/docker.sock'"
        )


def unreachable(url: str) -> str | None:
    """Why a daemon cannot be used, with the fix; None if it can. Connects, but asks nothing.

    Raises:
        ConfigError: the URL is of a kind that cannot be used.
    """
    check_url(url)
    parts = urlsplit(url)
    if importlib.util.find_spec("docker") is None:
        return NO_SDK
    try:
        _knock(url)
    except PermissionError:
        return (
            f"no permission on the Docker socket {parts.path}: `sudo usermod -aG docker $USER`,"
            " then log in again"
        )
    except (OSError, ValueError) as error:
        return (
            f"no Docker daemon answers at {url} ({error}): start it with `systemctl start docker`"
            " (or `dockerd` as root; the Debian package is docker.io), or name another socket in"
            " DOCKER_HOST"
        )
    return None


def _knock(url: str) -> None:
    parts = urlsplit(url)
    family = socket.AF_UNIX if parts.scheme == "unix" else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as sock:
        sock.settimeout(_CONNECT_S)
        sock.connect(
            parts.path if parts.scheme == "unix" else (parts.hostname or "", parts.port or 2375)
        )


class Daemon:
    """A connection to one daemon, made on first use. Its methods block, and are thread-safe.

    Attributes:
        live: containers of ours that are there or being made, for sharing them out.
        failed_at: when it last failed (monotonic seconds).
    """

    def __init__(self, url: str, owner: Owner) -> None:
        self.url = url
        self.owner = owner
        self.live = 0
        self.failed_at = float("-inf")
        self.cores = 1.0
        self._lock = threading.Lock()
        self._counting = threading.Lock()
        self._api: Any = None
        self._guarded = False

    def count(self, change: int) -> None:
        """One container more, or one less."""
        with self._counting:
            self.live += change

    def api(self) -> Any:
        """The SDK's low-level client.

        At the first connection, and after each lost one, what dead owners left is removed.

        Raises:
            SandboxLost: the daemon cannot be used; the message names the fix.
        """
        problem = unreachable(self.url)
        with self._lock:
            if problem:
                self._api, self.failed_at = None, time.monotonic()
                raise SandboxLost(problem)
            if self._api is None:
                self._api = self._connect()
            return self._api

    def guard(self) -> None:
        """From now on, containers end with this process, even those that are still being made."""
        with _undertaking:
            if os.getpid() not in _undertakers:
                _undertakers.clear()
                _undertakers[os.getpid()] = Undertaker()
            if not self._guarded:
                _undertakers[os.getpid()].watch(self.url, self.owner.run)
                self._guarded = True

    def _connect(self) -> Any:
        import docker

        with self.explained("connecting"):
            api = docker.APIClient(self.url, version="auto", timeout=CALL_S, max_pool_size=_POOL)
            if any("Podman" in part["Name"] for part in api.version().get("Components") or ()):
                raise SandboxLost(NO_PODMAN.format(url=self.url))
            self.cores = float(api.info()["NCPU"])
            self._reap(api)
        return api

    def _reap(self, api: Any) -> None:
        import docker.errors

        for row in api.containers(all=True, filters={"label": LABEL}):
            if not self.owner.abandoned(row["Labels"], time.time()):
                continue
            try:
                remove(api, row["Id"])
            # What is left of an earlier run does not keep this one from starting.
            except docker.errors.APIError as error:
                print(
                    f"warning: container {row['Id'][:12]} of an ended run stays: {error}",
                    file=sys.stderr,
                )
        for row in api.networks(filters={"label": LABEL}):
            if not self.owner.abandoned(row["Labels"], time.time()):
                continue
            try:
                api.remove_network(row["Id"])
            except docker.errors.NotFound:  # somebody else did it
                continue
            except docker.errors.APIError as error:
                print(
                    f"warning: network {row['Name']} of an ended run stays: {error}",
                    file=sys.stderr,
                )

    @contextmanager
    def explained(self, doing: str) -> Iterator[None]:
        """Turn what the SDK raises into `SandboxLost` with one sentence.

        Raises:
            SandboxLost: something failed in the block.
        """
        import docker.errors
        import requests

        try:
            yield
        except (docker.errors.DockerException, requests.RequestException, OSError) as error:
            self.failed_at = time.monotonic()
            raise SandboxLost(self._sentence(doing, error)) from error

    def _sentence(self, doing: str, error: Exception) -> str:
        text = str(getattr(error, "explanation", None) or error)
        for sign, remedy in _REMEDIES.items():
            if sign in text.lower():
                return f"the Docker daemon at {self.url} failed at {doing}: {remedy} ({text[:200]})"
        if problem := unreachable(self.url):
            return problem
        return f"the Docker daemon at {self.url} failed at {doing}: {text[:500]}"


def remove(api: Any, container: str) -> None:
    """End and remove a container, whatever its state; one that is gone, or going, is fine."""
    import docker.errors

    try:
        api.remove_container(container, force=True, v=True)
    except docker.errors.APIError as error:
        if error.status_code not in (404, 409):  # 409: its removal is under way
            raise

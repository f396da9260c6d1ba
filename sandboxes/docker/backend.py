"""Sandboxes made of Docker containers, each with our supervisor as process 1."""

from __future__ import annotations

import asyncio
import os
import time
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from dataclasses import replace

from agentrl.errors import ConfigError, SandboxLost
from agentrl.sandboxes.base import Sandbox, SandboxLimits, SandboxRole
from agentrl.sandboxes.docker.container import Container
from agentrl.sandboxes.docker.daemon import Daemon, check_url, default_url, split_urls, unreachable
from agentrl.sandboxes.docker.images import (
    DEFAULT_PATH,
    ROLES,
    Layered,
    image_of,
    proxy_image,
    require_image,
)
from agentrl.sandboxes.docker.network import Link
from agentrl.sandboxes.docker.networked import NetworkedSandbox
from agentrl.sandboxes.docker.owner import UIDS, Owner
from agentrl.sandboxes.docker.spec import AREA, ContainerSpec, container_rlimits
from agentrl.sandboxes.network import Allow
from agentrl.sandboxes.supervised import COMMON_ENV, Place, SupervisedSandbox
from agentrl.sandboxes.uids import Uid

_THREADS = 32
_LIFETIME_S = 7 * 86_400.0
_REST_S = 10.0
_Started = tuple[Container, Place, Link | None]


class DockerBackend:
    """One long-lived container per sandbox, on one daemon or shared out over several.

    Inside: the image read-only, no network but a loopback, a work area, /tmp and /dev/shm in memory
    with caps on size and number of files, no capability for commands, one uid of its own per
    sandbox, our system-call profile, and limits by a control group. The container ends when its
    connection to this process does.
    """

    name = "docker"
    is_boundary = True

    def __init__(
        self,
        image: str | None = None,
        *,
        url: str | None = None,
        runtime: str | None = None,
        userns: str | None = None,
        network: str | Allow = "none",
        lifetime_s: float = _LIFETIME_S,
    ) -> None:
        """Nothing is asked of a daemon before the first sandbox.

        Args:
            image: for both roles; None for AGENTRL_DOCKER_IMAGE and AGENTRL_DOCKER_GRADER_IMAGE, or
                what `agentrl images build` made.
            url: of the daemon, several with commas between them; None for AGENTRL_DOCKER_URL or
                DOCKER_HOST.
            runtime: an OCI runtime that the daemons know, as runsc or kata; None for
                AGENTRL_DOCKER_RUNTIME or theirs.
            userns: "host" switches a daemon's remapping of users off; None for
                AGENTRL_DOCKER_USERNS or the daemons' own mode.
            network: "none", or `Allow` with the hosts that agents may reach; graders never have
                one.
            lifetime_s: age at which another machine's start may take a container for abandoned.

        Raises:
            ConfigError: a value that cannot be used.
        """
        if not isinstance(network, Allow) and network != "none":
            raise ConfigError(
                f"docker network={network!r} would let agents reach this machine and others: leave"
                " it out (none), or name the hosts that they may reach with"
                " network=Allow('example.org')"
            )
        if lifetime_s <= 0:
            raise ConfigError(f"docker lifetime_s={lifetime_s} must be positive")
        urls = split_urls(url or default_url())
        for part in urls:
            check_url(part)
        self._image, self._lifetime_s = image, lifetime_s
        self._allow = network if isinstance(network, Allow) else None
        self._runtime = runtime or os.environ.get("AGENTRL_DOCKER_RUNTIME") or None
        self._userns = userns or os.environ.get("AGENTRL_DOCKER_USERNS") or None
        if self._userns not in (None, "host"):
            raise ConfigError(
                f"docker userns={self._userns!r} is unknown: leave it out (and"
                " AGENTRL_DOCKER_USERNS) for the daemon's own mode, or say 'host' to switch its"
                " remapping off"
            )
        self._owner = Owner.me()
        self._daemons = [Daemon(part, self._owner) for part in urls]
        self._layers: dict[tuple[str, str], Layered] = {}
        self._executor: Executor = ThreadPoolExecutor(_THREADS, thread_name_prefix="agentrl-docker")

    async def open(self, role: SandboxRole, limits: SandboxLimits) -> Sandbox:
        """Start one, on the daemon with the fewest; those that have just failed come last.

        Raises:
            SandboxLost: it could not be started; the message names the missing part and the fix.
        """
        if os.getpid() != int(self._owner.pid.partition("/")[0]):
            raise SandboxLost(
                "a DockerBackend cannot be used after a fork: make one in the new process"
            )
        now, failures = time.monotonic(), []
        for daemon in sorted(
            self._daemons, key=lambda one: (now - one.failed_at < _REST_S, one.live)
        ):
            try:
                return await self._open_on(daemon, role, limits)
            except SandboxLost as error:
                failures.append(str(error))
        raise SandboxLost("; ".join(dict.fromkeys(failures)))

    async def _open_on(self, daemon: Daemon, role: SandboxRole, limits: SandboxLimits) -> Sandbox:
        daemon.count(1)
        starting = self._executor.submit(self._start, daemon, role, limits)
        try:
            container, place, link = await asyncio.shield(asyncio.wrap_future(starting))
        except asyncio.CancelledError:
            starting.add_done_callback(_discard)
            raise
        if link is None:
            return await SupervisedSandbox.open(container, place, limits)
        sandbox = await NetworkedSandbox.open(container, place, limits)
        try:
            await sandbox.join(link)
        except BaseException:
            await sandbox.close()
            raise
        return sandbox

    def _start(self, daemon: Daemon, role: SandboxRole, limits: SandboxLimits) -> _Started:
        uid: Uid | None = None
        link: Link | None = None
        try:
            layered = self._layered(daemon, image_of(role, self._image))
            uid = Uid(UIDS)
            place = _place(uid.number, limits, layered.env)
            labels = self._owner.labels(self._lifetime_s) | {
                "agentrl.role": role,
                "agentrl.uid": str(uid.number),
            }
            spec = ContainerSpec(layered.image, limits, labels, self._runtime, self._userns)
            if self._allow is not None and role == "agent":
                link = self._link(daemon, self._allow, spec)
                spec, place = link.linked(spec), replace(place, env={**place.env, **link.env})
            return (
                Container(daemon, spec, self._executor, lambda: _forget(daemon, uid, link)),
                place,
                link,
            )
        except BaseException:
            # The daemon may have lost its images: look for them again next time.
            self._layers.pop((daemon.url, image_of(role, self._image)), None)
            _forget(daemon, uid, link)
            raise

    def _link(self, daemon: Daemon, allow: Allow, spec: ContainerSpec) -> Link:
        proxy = replace(spec, image=self._layered(daemon, proxy_image()).image)
        return Link(
            daemon,
            allow,
            proxy,
            f"agentrl-{self._owner.run}-{spec.labels['agentrl.uid']}",
            self._executor,
        )

    def _layered(self, daemon: Daemon, image: str) -> Layered:
        key = (daemon.url, image)
        if key not in self._layers:
            self._layers[key] = Layered(daemon, image)
        return self._layers[key]


def _place(uid: int, limits: SandboxLimits, image_env: dict[str, str]) -> Place:
    env = (
        COMMON_ENV
        | {"PATH": DEFAULT_PATH}
        | image_env
        | {"HOME": f"{AREA}/work", "TMPDIR": f"{AREA}/tmp"}
    )
    return Place(
        area=AREA,
        private=True,
        others=("/tmp", "/dev/shm", "/dev/mqueue"),
        env=env,
        rlimits=container_rlimits(limits),
        demands=frozenset({"traceless", "adopts", "limited"}),
        uid=uid,
    )


def _forget(daemon: Daemon, uid: Uid | None, link: Link | None) -> None:
    if link is not None:
        link.end()
    daemon.count(-1)
    if uid is not None:
        uid.release()


def _discard(starting: Future[_Started]) -> None:
    """Nobody waits for this container any more; the end of its connection is its end."""
    if not starting.cancelled() and starting.exception() is None:
        container, *_ = starting.result()
        container.abandon()


def first_daemon() -> Daemon:
    """The daemon of this machine's settings; the first where there are several.

    Raises:
        ConfigError: its URL is of a kind that cannot be used.
    """
    url = split_urls(default_url())[0]
    check_url(url)
    return Daemon(url, Owner.me())


def missing() -> str | None:
    """Why Docker cannot be used here, with the fix; None if it can. Starts no container."""
    try:
        for url in split_urls(default_url()):
            if problem := unreachable(url):
                return problem
            daemon = Daemon(url, Owner.me())
            for role in ROLES:
                require_image(daemon, image_of(role, None))
    except (ConfigError, SandboxLost) as error:
        return str(error)
    return None

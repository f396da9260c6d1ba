"""Images: which one a role gets, our layer on top of it, and the two that we build."""

from __future__ import annotations

import hashlib
import io
import os
import tarfile
import threading
from collections.abc import Iterable, Mapping
from importlib.resources import files
from typing import Any

from agentrl.errors import SandboxLost
from agentrl.sandboxes.base import SandboxRole
from agentrl.sandboxes.docker.daemon import Daemon
from agentrl.sandboxes.launch import COMPILE, program

ROLES: tuple[SandboxRole, ...] = ("agent", "grader")
DEFAULT_BASE = "debian:bookworm-slim"
ARCHIVE = "/agentrl/supervisor.pyz"
PYTHON = "/usr/bin/python3"
DEFAULT_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
_BUILD_S = 1800.0
_SAID = 300
_VARIABLES = {"agent": "AGENTRL_DOCKER_IMAGE", "grader": "AGENTRL_DOCKER_GRADER_IMAGE"}
_LAYER = f"""FROM {{base}}
USER 0
LABEL agentrl.layer={{digest}}
COPY supervisor.pyz {ARCHIVE}
RUN python3 -c 1 || {{{{ echo agentrl-"no-python"; exit 1; }}}}
RUN [ -e {PYTHON} ] || ln -s "$(command -v python3)" {PYTHON}
RUN {PYTHON} -I -S -B -c "{COMPILE}" {ARCHIVE} {ARCHIVE}
"""
_NO_PYTHON = ("agentrl-no-python", 'exec: "/bin/sh"')
_lock = threading.Lock()


def image_of(role: SandboxRole, image: str | None) -> str:
    """The image for a role: the one given, else an environment variable's, else ours."""
    return image or os.environ.get(_VARIABLES[role]) or f"agentrl-{role}"


def proxy_image() -> str:
    """The image for the proxies of networks: ours, never one that a task brings along."""
    return os.environ.get("AGENTRL_DOCKER_PROXY_IMAGE") or "agentrl-agent"


class Layered:
    """An image with our supervisor in it, as one daemon holds it.

    Attributes:
        image: its id.
        env: the variables that the image sets, for commands.
    """

    def __init__(self, daemon: Daemon, base: str) -> None:
        """Find the image, or add our layer to `base`.

        That takes a second, once per daemon, base and version of ours.

        Raises:
            SandboxLost: the base is missing, has no python3, or has volumes; the message names the
                fix.
        """
        info = require_image(daemon, base)
        if volumes := info["Config"].get("Volumes"):
            raise SandboxLost(
                f"docker image {base!r} declares the volumes {', '.join(volumes)}, which have no"
                " size limit and outlive a reset: build one without VOLUME"
            )
        self.env = dict(setting.partition("=")[::2] for setting in info["Config"].get("Env") or ())
        archive = program("proxy")  # it is our program for the proxy of a network, too
        digest = hashlib.sha256(info["Id"].encode() + archive + _LAYER.encode()).hexdigest()[:16]
        tag = f"agentrl-sandbox:{digest}"
        with _lock:
            if not daemon_has(daemon, tag):
                text = _LAYER.format(base=info["Id"], digest=digest)
                self._bake(
                    daemon, base, tag, {"Dockerfile": text.encode(), "supervisor.pyz": archive}
                )
        self.image: str = require_image(daemon, tag)["Id"]

    @staticmethod
    def _bake(daemon: Daemon, base: str, tag: str, context: dict[str, bytes]) -> None:
        try:
            _build(daemon, tag, context, {}, network="none")
        except SandboxLost as error:
            if not any(sign in str(error) for sign in _NO_PYTHON):
                raise
            raise SandboxLost(
                f"docker image {base!r} has no working python3 and sh: add them (Debian package"
                " python3-minimal is enough), or take the image that `agentrl images build` makes"
            ) from error


def daemon_has(daemon: Daemon, image: str) -> bool:
    """Whether a daemon holds an image of this name.

    Raises:
        SandboxLost: the daemon cannot be asked.
    """
    api = daemon.api()
    import docker.errors  # after the daemon has found the SDK to be there

    with daemon.explained(f"looking for the image {image}"):
        try:
            api.inspect_image(image)
        except docker.errors.ImageNotFound:
            return False
        return True


def require_image(daemon: Daemon, image: str) -> Any:
    """What a daemon knows of an image.

    Raises:
        SandboxLost: it has none of this name; the message says how to get it.
    """
    if not daemon_has(daemon, image):
        fix = f"`docker pull {image}`, or name another one"
        if image in {f"agentrl-{role}" for role in ROLES}:
            fix = (
                "`agentrl images build`, or name your own in AGENTRL_DOCKER_IMAGE and"
                " AGENTRL_DOCKER_GRADER_IMAGE"
            )
        raise SandboxLost(
            f"the Docker daemon at {daemon.url} has no image {image!r}: get it with {fix}"
        )
    with daemon.explained(f"looking at the image {image}"):
        return daemon.api().inspect_image(image)


def build_images(daemon: Daemon, base: str = DEFAULT_BASE) -> dict[str, str]:
    """Build the images of both roles from our Dockerfiles on a Debian base; tag -> id.

    A base that is not there is pulled by the daemon. Without a registry,
    `sandboxes/images/bootstrap.sh` makes one.

    Raises:
        SandboxLost: a build failed; the message has the end of its output.
    """
    made, folder = {}, files("agentrl.sandboxes") / "images"
    for role in ROLES:
        context, tag = (
            {"Dockerfile": (folder / f"{role}.Dockerfile").read_bytes()},
            f"agentrl-{role}",
        )
        try:
            _build(daemon, tag, context, {"BASE": base})
        except SandboxLost as error:
            if daemon_has(daemon, base):
                raise
            raise SandboxLost(
                f"docker base image {base!r} is not there and cannot be pulled: name another with"
                f" --base, or make one as root with `sh {folder / 'bootstrap.sh'} NAME` and use"
                f" --base NAME ({error})"
            ) from error
        made[tag] = str(require_image(daemon, tag)["Id"])
    return made


def _build(
    daemon: Daemon,
    tag: str,
    context: Mapping[str, bytes],
    arguments: Mapping[str, str],
    network: str | None = None,
) -> None:
    api = daemon.api()
    import docker.errors

    with daemon.explained(f"building the image {tag}"):
        # All of it is read, so that the connection is free again.
        lines = list(
            api.build(
                fileobj=_tar(context.items()),
                custom_context=True,
                tag=tag,
                buildargs=dict(arguments),
                rm=True,
                forcerm=True,
                network_mode=network,
                timeout=_BUILD_S,
                decode=True,
            )
        )
        if errors := [line["error"] for line in lines if "error" in line]:
            said = "".join(line.get("stream", "") for line in lines).strip()[-_SAID:]
            raise docker.errors.BuildError(f"{said} {errors[0]}", ())


def _tar(members: Iterable[tuple[str, bytes]]) -> io.BytesIO:
    """The same bytes for the same members, so that the daemon's cache knows them again."""
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as archive:
        for name, data in members:
            member = tarfile.TarInfo(name)
            member.size, member.mode = len(data), 0o444
            archive.addfile(member, io.BytesIO(data))
    buffer.seek(0)
    return buffer

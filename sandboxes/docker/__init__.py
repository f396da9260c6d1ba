"""The Docker backend; the SDK is imported on use only."""

from agentrl.sandboxes.docker.backend import DockerBackend, missing
from agentrl.sandboxes.docker.daemon import Daemon
from agentrl.sandboxes.docker.images import build as build_images
from agentrl.sandboxes.docker.owner import Owner

__all__ = ["Daemon", "DockerBackend", "Owner", "build_images", "missing"]

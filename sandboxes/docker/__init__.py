"""The Docker backend; the SDK is imported on use only."""

from agentrl.sandboxes.docker.backend import DockerBackend, first_daemon, missing
from agentrl.sandboxes.docker.images import DEFAULT_BASE, build_images
from agentrl.sandboxes.docker.networked import requests_of
from agentrl.sandboxes.docker.scan import Leak, scan_image

__all__ = [
    "DEFAULT_BASE",
    "DockerBackend",
    "Leak",
    "build_images",
    "first_daemon",
    "missing",
    "requests_of",
    "scan_image",
]

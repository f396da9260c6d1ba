"""The Docker backend; the SDK is imported on use only."""

from agentrl.sandboxes.docker.backend import DockerBackend, first_daemon, missing
from agentrl.sandboxes.docker.images import DEFAULT_BASE
from agentrl.sandboxes.docker.images import build as build_images
from agentrl.sandboxes.docker.networked import requests_of
from agentrl.sandboxes.docker.scan import Finding, scan_image

__all__ = [
    "DEFAULT_BASE",
    "DockerBackend",
    "Finding",
    "build_images",
    "first_daemon",
    "missing",
    "requests_of",
    "scan_image",
]

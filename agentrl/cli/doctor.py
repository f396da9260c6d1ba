"""`agentrl doctor`: which optional components are installed, and how to get the rest."""

from __future__ import annotations

import importlib.util
import os
import sys
from typing import Any

from agentrl.cli.options import Json, print_json

_PACKAGES = {
    "torch": "pip install 'agentrl[train]'",
    "transformers": "pip install 'agentrl[train]'",
    "trl": "pip install 'agentrl[train]'",
    "docker-sdk": "pip install 'agentrl[docker]'",
    "math-verify": "pip install 'agentrl[math]'",
    "openai": "pip install 'agentrl[judge]'",
}


def doctor(as_json: Json = False) -> None:
    """Check which optional components are installed and how to get the rest."""
    parts = examine()
    if as_json:
        print_json({"parts": parts})
        return
    for name, part in parts.items():
        print(f"{'ok     ' if part['ok'] else 'missing'}  {name:<14} {part['detail']}")


def examine() -> dict[str, dict[str, Any]]:
    """Component -> {"ok": bool, "detail": version, or how to get it}; imports nothing heavy."""
    from agentrl.sandboxes import available

    parts: dict[str, dict[str, Any]] = {
        "python": {"ok": sys.version_info >= (3, 11), "detail": sys.version.split()[0]},
        "cores": {"ok": True, "detail": str(len(os.sched_getaffinity(0)))},
    }
    for name, state in available().items():
        parts[name] = {"ok": state.startswith("ok"), "detail": state}
    for name, fix in _PACKAGES.items():
        module = {"docker-sdk": "docker", "math-verify": "math_verify"}.get(name, name)
        is_installed = importlib.util.find_spec(module) is not None
        detail = "installed" if is_installed else f"get it with: {fix}"
        parts[name] = {"ok": is_installed, "detail": detail}
    parts["vllm"] = _vllm()
    gpu = os.path.exists("/dev/nvidiactl")
    parts["gpu"] = {
        "ok": gpu,
        "detail": (
            "NVIDIA driver found; models run on it if PyTorch sees CUDA"
            if gpu
            else "none: training and sampling run on the CPU"
        ),
    }
    return parts


def _vllm() -> dict[str, Any]:
    from agentrl.engines.vllm import TRIED, installed, missing, was_tried

    found = installed()
    if not found:
        return {"ok": False, "detail": missing()}
    known = "tried with" if was_tried(found) else f"not tried with ({TRIED} was)"
    return {"ok": True, "detail": f"{found}, {known} this version of agentrl"}

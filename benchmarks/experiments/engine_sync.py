"""What a sync of weights costs, and how long an engine is away when its process is killed.

    python -m benchmarks.experiments.engine_sync vllm 768 12

A random model of that width and so many layers, float32; the engine in our process, then in one of
its own. The first load is left out, as it also makes the shared memory.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
import tempfile
import time
from pathlib import Path
from statistics import median
from typing import Any

from agentrl.engines.base import EngineSettings, Sampling
from agentrl.engines.factory import open_chat, open_engine
from agentrl.engines.loading import load_model
from agentrl.engines.own_process.process import ProcessEngine
from agentrl.errors import EngineLost
from agentrl.trainers.models.tiny import build_model
from agentrl.trainers.models.weights import PolicyWeights

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "tests/support"))
from trl_templates import trl_tokenizer

LOADS = 7


def measure(folder: str, name: str, process: bool) -> dict[str, Any]:
    """Open, load several times; where there is a process, kill it while it samples."""
    settings: dict[str, Any] = {"name": name, "process": process}
    settings |= {"kv_cache_gib": 0.25} if name == "vllm" else {}
    settings |= {"own_weights": True} if name == "transformers" and not process else {}
    model, twin = load_model(folder), load_model(folder)
    begun_s = time.perf_counter()
    sampled = twin if "own_weights" in settings else model
    engine = open_engine(sampled, open_chat(folder), settings=EngineSettings(**settings))
    row: dict[str, Any] = {"engine": name, "process": process}
    row["open_s"] = time.perf_counter() - begun_s
    row["weights_mb"] = sum(tensor.nbytes for tensor in model.parameters()) / 2**20
    seconds = []
    for version in range(LOADS + 1):
        begun_s = time.perf_counter()
        engine.load(PolicyWeights(model), version)
        seconds.append(time.perf_counter() - begun_s)
    row["load_s"] = median(seconds[1:])
    if isinstance(engine, ProcessEngine):
        row |= asyncio.run(_kill(engine))
    asyncio.run(engine.close())
    return row


async def _kill(engine: ProcessEngine) -> dict[str, float]:
    """Seconds until a killed process was noticed, and until the next one had answered."""
    asked = asyncio.ensure_future(engine.generate([5, 6], Sampling(max_tokens=1000), seed=0))
    await asyncio.sleep(0.5)
    assert engine._carrier is not None
    os.kill(engine._carrier.process.pid, signal.SIGKILL)
    begun_s = time.perf_counter()
    (error,) = await asyncio.gather(asked, return_exceptions=True)
    assert isinstance(error, EngineLost), error
    noticed_s = time.perf_counter() - begun_s
    await engine.generate([5, 6], Sampling(max_tokens=1), seed=0)
    return {"noticed_s": noticed_s, "away_s": time.perf_counter() - begun_s}


def main() -> None:
    name, width, layers = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
    with tempfile.TemporaryDirectory() as folder:
        build_model(folder, trl_tokenizer("qwen2_5"), width=width, layers=layers, context=2048)
        for process in (False, True):
            row = measure(folder, name, process)
            print(json.dumps({k: round(v, 4) if k.endswith("_s") else v for k, v in row.items()}))


if __name__ == "__main__":
    main()

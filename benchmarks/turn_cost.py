"""The 20th turn of an episode on the embedded engine, against the 2nd, with as many new tokens.

Eight episodes play side by side: each turn reads 24 tokens and says 16. The rival computes the
whole history anew at every turn.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Mapping, Sequence
from statistics import median
from typing import Any

import torch

from agentrl.engines.base import HISTORY_MB, Sampling
from agentrl.engines.transformers import TransformersEngine
from benchmarks.row import Row

EPISODES, TURNS, READ, SAID, REPEATS = 8, 20, 24, 16, 5
SHAPES: dict[str, dict[str, Any]] = {
    "25M model": {
        "vocab_size": 8192,
        "hidden_size": 512,
        "intermediate_size": 1536,
        "num_hidden_layers": 6,
        "num_attention_heads": 8,
        "num_key_value_heads": 2,
    },
    "0.4M model, as in the demo": {
        "vocab_size": 320,
        "hidden_size": 128,
        "intermediate_size": 256,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 4,
    },
}


def measure(repeats: int = REPEATS) -> Sequence[Row]:
    found = {name: _measure(shape, repeats) for name, shape in SHAPES.items()}
    ours, theirs, _ = next(iter(found.values()))
    notes = "; ".join(
        f"{name}: {kept:.2f} against {anew:.2f} times, the 20th turn {said}"
        for name, (kept, anew, said) in found.items()
    )
    notes += f"; {EPISODES} episodes, {READ} tokens read and {SAID} said in a turn"
    ours, theirs, unit = round(ours, 3), round(theirs, 3), "times the 2nd turn"
    return [Row("turn_cost", ours, theirs, ours, unit, repeats, "at most 1.5", notes)]


def _measure(shape: Mapping[str, Any], repeats: int) -> tuple[float, float, str]:
    from transformers import Qwen2Config, Qwen2ForCausalLM

    torch.manual_seed(0)
    model = Qwen2ForCausalLM(Qwen2Config(max_position_embeddings=2048, **shape)).eval()
    ratios: dict[int, list[float]] = {HISTORY_MB: [], 0: []}
    last: dict[int, list[float]] = {HISTORY_MB: [], 0: []}
    for _ in range(repeats):
        for history_mb in ratios:
            engine = TransformersEngine(model, frozenset(), history_mb=history_mb)
            seconds = asyncio.run(_play(engine))
            ratios[history_mb].append(seconds[TURNS - 1] / seconds[1])
            last[history_mb].append(1000 * seconds[TURNS - 1])
    said = f"{median(last[HISTORY_MB]):.0f} against {median(last[0]):.0f} ms"
    return median(ratios[HISTORY_MB]), median(ratios[0]), said


async def _play(engine: TransformersEngine) -> list[float]:
    """Seconds of each turn."""
    rng = random.Random(0)
    prompts: list[list[int]] = [[] for _ in range(EPISODES)]
    taken = []
    with engine.seat():
        for turn in range(TURNS):
            for prompt in prompts:
                prompt += (rng.randrange(5, 250) for _ in range(READ))
            start = time.perf_counter()
            said = await asyncio.gather(
                *(
                    engine.generate(prompt, Sampling(max_tokens=SAID), seed=turn * 100 + index)
                    for index, prompt in enumerate(prompts)
                )
            )
            taken.append(time.perf_counter() - start)
            for prompt, generation in zip(prompts, said, strict=True):
                prompt += generation.ids
    await engine.close()
    return taken

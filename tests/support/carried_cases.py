"""What tests ask of an engine that a process of its own carries."""

import asyncio
from types import SimpleNamespace

import torch

from agentrl.engines.base import Sampling

SHORT = Sampling(max_tokens=2)


def ask(engine, *whats, seed=3):
    return [asyncio.ensure_future(engine.generate([what], SHORT, seed=seed)) for what in whats]


def said(engine, *whats, **options):
    """What becomes of requests that are made at once: answers and errors."""

    async def run():
        answers = asyncio.gather(*ask(engine, *whats, **options), return_exceptions=True)
        return await asyncio.wait_for(answers, 60)

    return asyncio.run(run())


def weights(total: int):
    return SimpleNamespace(module=None, tensors=lambda: {"a": torch.tensor([float(total)])})


def pid_of(engine) -> int:
    return engine._carrier.process.pid

"""One vLLM for all tests of a session: it takes seconds to make, and one process holds one."""

from __future__ import annotations

import asyncio
import random

import torch
from helpers import tiny_model_folder

from agentrl.chat.tokens import Chat
from agentrl.engines.base import EngineSettings, Sampling
from agentrl.engines.factory import open_vllm
from agentrl.engines.loading import load_model, load_tokenizer
from agentrl.trainers.models.weights import PolicyWeights

SMALL = {"name": "vllm", "process": False, "kv_cache_gib": 0.0625}
"""Room for 100,000 tokens of a tiny model."""


class Vllm:
    """An engine, a model whose weights it has, and how tests ask it."""

    def __init__(self, folder=None, **settings):
        self.folder = folder or tiny_model_folder()
        self.chat = Chat(load_tokenizer(self.folder))
        self.model = load_model(self.folder)
        self.engine = open_vllm(self.folder, self.chat, EngineSettings(**{**SMALL, **settings}))

    def sample(self, prompts, sampling=None, seeds=None):
        """One answer for each prompt, asked all at once."""

        async def run():
            asked = zip(prompts, seeds or range(len(prompts)), strict=True)
            jobs = (self.engine.generate(p, sampling or Sampling(), seed=s) for p, s in asked)
            return await asyncio.gather(*jobs)

        return asyncio.run(run())

    def moved(self, seed: int):
        """A model whose weights are elsewhere, in the shape that a learner gives them."""
        moved = load_model(self.folder)
        with torch.no_grad():
            for index, weight in enumerate(moved.parameters()):
                chance = torch.Generator().manual_seed(seed * 1000 + index)
                weight += 0.2 * weight.std() * torch.randn(weight.shape, generator=chance)
        return moved

    def load(self, model, version: int) -> None:
        self.engine.load(PolicyWeights(model), version)

    def close(self) -> None:
        asyncio.run(self.engine.close())


def prompts_of(count: int, seed: int = 0, low: int = 1, high: int = 40) -> list[list[int]]:
    rng = random.Random(seed)
    return [[rng.randrange(5, 300) for _ in range(rng.randint(low, high))] for _ in range(count)]


def gap(model, prompts, answers, temperature: float = 1.0) -> float:
    """Largest distance between an engine's log-probabilities and a plain forward pass of each row,
    in float64.
    """
    worst = 0.0
    for prompt, answer in zip(prompts, answers, strict=True):
        with torch.inference_mode():
            logits_TV = model(torch.tensor([[*prompt, *answer.ids]])).logits[0].double()
        logprobs_TV = (logits_TV / temperature).log_softmax(-1)[len(prompt) - 1 : -1]
        mine_T = logprobs_TV.gather(-1, torch.tensor(answer.ids)[:, None])[:, 0]
        worst = max(worst, float((mine_T - torch.tensor(answer.logprobs)).abs().max()))
    return worst

"""A second engine: one request at a time, no cache, on a copy of the weights. Slow and plain."""

from __future__ import annotations

import asyncio
from contextlib import contextmanager

import torch

from agentrl.engines.base import Generation
from agentrl.errors import EngineError


class NaiveEngine:
    """Samples by computing the whole sequence anew for every token."""

    def __init__(self, model, stop_ids):
        self.model, self.stop_ids = model, stop_ids
        self.version = 0
        self.context_length = model.config.max_position_embeddings
        self.loads, self.closed = [], False
        self._free, self._running = asyncio.Event(), set()
        self._free.set()

    @contextmanager
    def seat(self):
        yield

    async def generate(self, prompt_ids, sampling, *, seed):
        work = asyncio.ensure_future(self._generate(prompt_ids, sampling, seed))
        self._running.add(work)
        try:
            return await work
        except asyncio.CancelledError as cause:
            if work in self._running:  # somebody cancelled the caller
                raise
            raise EngineError("the request was aborted") from cause
        finally:
            self._running.discard(work)

    async def _generate(self, prompt_ids, sampling, seed):
        await self._free.wait()
        with torch.no_grad():
            return self._sample(prompt_ids, sampling, seed)

    def _sample(self, prompt_ids, sampling, seed):
        chance = torch.Generator().manual_seed(seed)
        ids, logprobs, version = [], [], self.version
        while len(ids) < sampling.max_tokens:
            logits_V = self.model(torch.tensor([[*prompt_ids, *ids]])).logits[0, -1].float()
            if sampling.temperature == 0:
                ids.append(int(logits_V.argmax()))
                logprobs.append(0.0)
            else:
                logp_V = (logits_V / sampling.temperature).log_softmax(-1)
                ids.append(int(torch.multinomial(logp_V.exp(), 1, generator=chance)))
                logprobs.append(float(logp_V[ids[-1]]))
            if ids[-1] in self.stop_ids:
                return Generation(tuple(ids), tuple(logprobs), "stop", version)
        return Generation(tuple(ids), tuple(logprobs), "length", version)

    def load(self, weights, version):
        self.model.load_state_dict(weights.tensors())
        self.version = version
        self.loads.append(version)

    def pause(self):
        self._free.clear()

    def resume(self):
        self._free.set()

    def abort(self):
        for work in list(self._running):
            self._running.discard(work)
            work.cancel()

    async def close(self):
        self.closed = True

"""Sampling several prompts at once, in one call."""

import asyncio

import torch


def sample(engine, prompts, sampling, seeds=None):
    async def run():
        seeds_ = seeds or range(len(prompts))
        jobs = (engine.generate(p, sampling, seed=s) for p, s in zip(prompts, seeds_, strict=True))
        return await asyncio.gather(*jobs)

    return asyncio.run(run())


def full_logprobs(model, prompt, ids, temperature):
    """Log-softmax of one forward pass over the whole row, without cache, batch or padding."""
    with torch.inference_mode():
        logits_TV = model(torch.tensor([[*prompt, *ids]])).logits[0].double() / temperature
    return logits_TV.log_softmax(-1)[len(prompt) - 1 : -1].gather(-1, torch.tensor(ids)[:, None])[
        :, 0
    ]

"""Really does the work of a plan in a process of its own, and prints the peak of its memory above
what imports take.

python memory_run.py '{"model": {…}, "work": {…}, "row_tokens": 512,
    "checkpointing": false, "reference": false}'
"""

from __future__ import annotations

import asyncio
import copy
import json
import sys
from pathlib import Path

import torch

from agentrl.engines.base import Sampling
from agentrl.engines.transformers import TransformersEngine
from agentrl.trainers.batch import TokenBatch
from agentrl.trainers.memory import Work
from agentrl.trainers.models.scoring import frozen_logprobs, token_logprobs


def config_of(row):
    from transformers import Qwen3Config

    return Qwen3Config(**row, head_dim=64, tie_word_embeddings=True, dtype=torch.float32)


def build(row):
    from transformers import AutoModelForCausalLM

    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(config_of(row), dtype=torch.float32)


def status(name):
    """A field of /proc/self/status in bytes."""
    text = Path("/proc/self/status").read_text()
    return int(text.partition(f"{name}:")[2].split()[0]) * 1024


def example(work, row_tokens):
    """A micro-batch of that size: every position but the first of a row may be a sampled one."""
    mask_BT = torch.ones((work.micro_tokens // row_tokens, row_tokens), dtype=torch.bool)
    mask_BT[:, 0] = False
    if work.trained_tokens is not None:
        mask_BT &= (mask_BT.flatten().cumsum(0) <= work.trained_tokens).view_as(mask_BT)
    count, zeros_BT = len(mask_BT), torch.zeros(mask_BT.shape)
    apart_BT = torch.arange(count)[:, None].expand(mask_BT.shape)  # no two rows begin alike
    return TokenBatch(
        ids_BT=apart_BT.contiguous(),
        mask_BT=mask_BT,
        attention_BT=torch.ones_like(mask_BT),
        old_logprobs_BT=zeros_BT,
        advantages_BT=zeros_BT,
        turn_BT=zeros_BT.int(),
        version_BT=zeros_BT.int(),
        episode_B=torch.arange(count),
        group_E=torch.zeros(count, dtype=torch.int64),
        reward_E=torch.zeros(count),
        truncated_E=torch.zeros(count, dtype=torch.bool),
        tokens_E=mask_BT.sum(1),
        n_tokens=int(mask_BT.sum()),
        n_episodes=count,
    )


def update(model, optimizer, batch, reference):
    if reference is not None:
        frozen_logprobs(reference, batch)
    model.train()
    token_logprobs(model, batch).logprobs_BT.sum().backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)


def sample(engine, work):
    """Prompts that no two rows share, and a few tokens more: a last turn."""
    prompt = work.sample_tokens - min(8, work.sample_tokens // 2)
    sampling = Sampling(max_tokens=work.sample_tokens - prompt)

    async def everyone():
        with engine.seat():
            rows = (
                [1 + row % 40, 1 + row // 40, *[3] * (prompt - 2)] for row in range(work.samples)
            )
            await asyncio.gather(
                *(engine.generate(ids, sampling, seed=row) for row, ids in enumerate(rows))
            )

    asyncio.run(everyone())


def work_through(model, work, row_tokens, reference=None):
    batch = example(work, row_tokens).to(model.device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-6)
    engine = TransformersEngine(model, frozenset())
    for _ in range(2):
        if work.samples:
            sample(engine, work)
        update(model, optimizer, batch, reference)
    asyncio.run(engine.close())


def main(row):
    small = {
        "vocab_size": 50,
        "hidden_size": 64,
        "intermediate_size": 64,
        "num_hidden_layers": 1,
        "num_attention_heads": 1,
        "num_key_value_heads": 1,
    }
    # Loads what the libraries load on first use.
    work_through(build(small), Work(64, None, 2, 16), row_tokens=32)
    before = status("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")  # the peak begins here
    device = "cuda" if torch.cuda.is_available() else "cpu"
    model = build(row["model"]).to(device)
    if row["checkpointing"]:
        model.gradient_checkpointing_enable()
    reference = copy.deepcopy(model).requires_grad_(False) if row["reference"] else None
    work_through(model, Work(**row["work"]), row["row_tokens"], reference)
    peak = (
        {"cuda": torch.cuda.max_memory_allocated()}
        if device == "cuda"
        else {"cpu": status("VmHWM") - before}
    )
    print(json.dumps(peak))


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))

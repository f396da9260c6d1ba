"""How far an engine's log-probabilities are from the trainer's, and alone from those in a batch.

    python -m benchmarks.experiments.engine_parity vllm 200

Multi-turn episodes of a random tiny model, with three chat templates that TRL ships (one thinks,
and rewrites its history); float32. Each template has a tokenizer, a model and an engine of its own.
"""

from __future__ import annotations

import asyncio
import json
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch

from agentrl import EndReason, Limits, Message, Score, Step, Task, ToolEnv
from agentrl.chat.tokens import Chat
from agentrl.engines.base import Engine, EngineSettings, Sampling, Weights
from agentrl.engines.factory import open_chat, open_engine
from agentrl.engines.loading import load_model
from agentrl.policies.base import TokenPolicy
from agentrl.rollout.play import Setting
from agentrl.rollout.rollouts import Rollouts
from agentrl.trainers.batch import pack
from agentrl.trainers.models.scoring import frozen_logprobs
from agentrl.trainers.models.tiny import build_model
from agentrl.trainers.models.weights import PolicyWeights
from agentrl.verifiers.base import Submission

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "tests/support"))
from trl_templates import trl_tokenizer

TEMPLATES = ("qwen2_5", "llama3", "qwen3")
"""The last one thinks."""
TURNS = 3


async def content(submission: Submission) -> Score:
    return Score(1.0)


class Talk(ToolEnv):
    """Say something, hear "go on" until the last turn."""

    id = "talk-v0"
    verifier = content
    limits = Limits(turns=TURNS, turn_tokens=24, episode_tokens=200, wall_s=300)

    def tasks(self, split: str, seed: int) -> Iterator[Task]:
        for index in range(10_000):
            yield Task(id=str(index), instruction=f"say {index}")

    async def setup(self) -> None:
        self.heard = 0

    async def on_text(self, message: Message) -> Step:
        self.heard += 1
        if self.heard == TURNS:
            return Step(end=EndReason.ANSWERED)
        return Step((Message.user("go on"),))


class Found(NamedTuple):
    """Of one template: what was compared, and the largest distances in nats."""

    template: str
    episodes: int
    turns: float
    tokens: int
    gap_max: float
    batch_gap_max: float


def measure(name: str, template: str, episodes: int) -> Found:
    """Play, score every sampled token as the trainer does, and ask prompts alone and together."""
    with tempfile.TemporaryDirectory() as folder:
        build_model(folder, trl_tokenizer(template), width=64, layers=2, context=2048)
        model, chat = load_model(folder), open_chat(folder)
        brief(model, chat)
        settings = {"name": name, **({"kv_cache_gib": 0.25} if name == "vllm" else {})}
        engine = open_engine(model, chat, settings=EngineSettings.model_validate(settings))
        played = _play(engine, chat, PolicyWeights(model), episodes)
        batch = pack(played, pad_id=0)
        gaps, tokens = list[float](), 0
        for micro in batch.split(16384):
            mine_BT = frozen_logprobs(model, micro, 1.0)
            gap_N = (mine_BT - micro.old_logprobs_BT)[micro.mask_BT].abs()
            gaps.append(float(gap_N.max()))
            tokens += len(gap_N)
        turns = [len(e.messages) // 2 for group in played for e in group.episodes]
        prompts = [chat.prompt_ids([Message.user(f"say {n}")], ()) for n in range(32)]
        apart = _batch_gap(engine, prompts)
        asyncio.run(engine.close())
    return Found(template, len(turns), sum(turns) / len(turns), tokens, max(gaps), apart)


@torch.no_grad()
def brief(model: Any, chat: Chat) -> None:
    """Have a random model end its turns now and then: raise the logit of its end token by 3."""
    ids = chat.prompt_ids([Message.user("say 1")], ())
    mean_d = model.model(torch.tensor([ids])).last_hidden_state[0].mean(0)
    end = chat.turn_ids(Message.assistant("yes"))[-1]
    model.get_input_embeddings().weight[end] += 3 * mean_d / mean_d.square().sum()


def _play(engine: Engine, chat: Chat, weights: Weights, episodes: int) -> Any:
    policy = TokenPolicy(engine, chat, Sampling(max_tokens=24))
    rollouts = Rollouts(Setting(Talk, policy, None, "parity", 0), concurrency=64)
    try:
        rollouts.sync(weights, 0)
        tasks = [task for _, task in zip(range(episodes), Talk().tasks("test", 0), strict=False)]
        return rollouts.gather(tasks, 0)
    finally:
        rollouts.close()


def _batch_gap(engine: Engine, prompts: list[list[int]]) -> float:
    """Largest change of a token's log-probability when its prompt is asked alone."""

    async def ask(some: list[list[int]], first: int) -> list[Any]:
        sampling = Sampling(max_tokens=32)
        asked = (engine.generate(p, sampling, seed=first + n) for n, p in enumerate(some))
        return await asyncio.gather(*asked)

    together = asyncio.run(ask(prompts, 0))
    gaps = [0.0]
    for index, prompt in enumerate(prompts):
        (alone,) = asyncio.run(ask([prompt], index))
        same = zip(alone.ids, together[index].ids, strict=False)
        length = next((n for n, (a, b) in enumerate(same) if a != b), len(alone.ids))
        pairs = zip(alone.logprobs[:length], together[index].logprobs[:length], strict=True)
        gaps += [abs(a - b) for a, b in pairs]
    return max(gaps)


def main() -> None:
    torch.set_num_threads(1)
    name, episodes = sys.argv[1], int(sys.argv[2])
    for template in TEMPLATES:
        print(
            json.dumps({"engine": name, **measure(name, template, episodes)._asdict()}), flush=True
        )


if __name__ == "__main__":
    main()

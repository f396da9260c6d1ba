"""Reward models with random heads, pairs that they rank, and a server of their versions."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
import uvicorn
from helpers import tiny_model_folder, wait_for
from preference_cases import planted_pairs

from agentrl.engines.loading import load_tokenizer
from agentrl.trainers.offline.examples import Pair
from agentrl.types import Message
from agentrl.verifiers.models.reward_service import Ranked, RewardServer, RewardStore, application


def reward_folder(out: Path, seed: int) -> str:
    """A Qwen3 with a random head of one label, as its trainer would save it."""
    from transformers import Qwen3Config, Qwen3ForSequenceClassification

    config = Qwen3Config.from_pretrained(tiny_model_folder(), num_labels=1, initializer_range=0.2)
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        Qwen3ForSequenceClassification(config).save_pretrained(out)
    load_tokenizer(tiny_model_folder()).save_pretrained(out)
    return str(out)


def talk(prompt: str, answer: str) -> tuple[Message, ...]:
    """A prompt and its answer."""
    return (Message.user(prompt), Message.assistant(answer))


def ranked(pairs: Iterable[Pair]) -> list[Ranked]:
    """Preferences as whole conversations."""
    return [
        Ranked(one.prompt + one.chosen.messages, one.prompt + one.rejected.messages)
        for one in pairs
    ]


def ranked_pairs() -> list[Ranked]:
    """The planted preferences as whole conversations."""
    return [
        Ranked(talk(row["prompt"], row["chosen"]), talk(row["prompt"], row["rejected"]))
        for row in planted_pairs()
    ]


@contextmanager
def serving(
    store: RewardStore, key: str = "", port: int = 0, **options: int
) -> Iterator[tuple[str, list[str]]]:
    """A real server, on a free port unless one is given: its address, and what it tells."""
    said: list[str] = []
    served = RewardServer(store, tell=said.append, **options)
    served.open()
    config = uvicorn.Config(application(served, key), port=port, log_level="critical")
    server = uvicorn.Server(config)
    thread = threading.Thread(target=server.run, daemon=True)
    thread.start()
    try:
        wait_for(lambda: server.started, 30)
        yield f"http://127.0.0.1:{server.servers[0].sockets[0].getsockname()[1]}", said
    finally:
        server.should_exit = True
        thread.join(30)

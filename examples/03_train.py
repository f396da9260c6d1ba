"""Train a tiny model on calc-v0: oracle episodes, a warm start, rounds of GRPO.

Argument: a folder that keeps the warm-started model and the trained one.
"""

from __future__ import annotations

import itertools
import sys
import tempfile
from pathlib import Path

from agentrl.chat.parsers import FORMATTERS
from agentrl.chat.tokens import Chat
from agentrl.engines.loading import load_model, load_tokenizer
from agentrl.policies.base import Scripted
from agentrl.registry import factory
from agentrl.rollout.play import Setting
from agentrl.rollout.rollouts import Rollouts
from agentrl.trainers.grpo import Settings, train
from agentrl.trainers.models.optim import MuonAdamW
from agentrl.trainers.models.tiny import build_model, build_tokenizer
from agentrl.trainers.offline.sft import demonstrations, sft

EASY = {"operations": 1, "largest": 10}


def main(folder: Path) -> None:
    make = factory("calc-v0", **EASY)
    env = make()
    rollouts = Rollouts(Setting(make, Scripted("oracle", env.oracle_actions)))
    groups = rollouts.gather(list(itertools.islice(env.tasks("train", 0), 96)), 0)
    rollouts.close()
    episodes = [episode for group in groups for episode in group.episodes]

    messages = [message for episode in episodes for message in episode.messages]
    spoken = [FORMATTERS["hermes"](said.content, said.tool_calls) for said in messages]
    source = build_model(folder / "model", build_tokenizer(spoken), width=64, layers=1)
    model, chat = load_model(source), Chat(load_tokenizer(source))
    rows = demonstrations(episodes, chat, env.tools)
    sft(model, chat, rows, steps=60, batch_size=32, optimizer=MuonAdamW)
    model.save_pretrained(source)

    settings = Settings("calc-v0", str(source), EASY, tasks_per_step=8, learning_rate=5e-4, steps=4)
    trained = train(settings, report)
    trained.save_pretrained(folder / "trained")
    chat.tokenizer.save_pretrained(folder / "trained")


def report(row: dict[str, float]) -> None:
    print(f"round {row['step']}: reward {row['reward']:.3f}, loss {row['loss']:+.4f}")


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as scratch:
        main(Path(sys.argv[1] if sys.argv[1:] else scratch))  # an argument: a folder to keep

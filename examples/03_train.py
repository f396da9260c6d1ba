"""Train a tiny model on calc-v0: reference episodes, a warm start, rounds of GRPO."""

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
from agentrl.trainers import demonstrations, run_training, sft
from agentrl.trainers.models.optim import MuonAdamW
from agentrl.trainers.models.tiny import build_model, build_tokenizer

SETTINGS = {"operations": 1, "largest": 10}
CONFIG = """
env = "calc-v0"
env_settings = {{ operations = 1, largest = 10 }}
model = "{model}"
steps = 2
tasks_per_step = 8
group_size = 8
learning_rate = 5e-4
eval_every = 2
held_out = {{ tasks = 16 }}
"""


def main(folder: Path) -> None:
    make = factory("calc-v0", **SETTINGS)
    env = make()
    rollouts = Rollouts(Setting(make, Scripted("oracle", env.oracle_actions)))
    groups = rollouts.gather(list(itertools.islice(env.tasks("train", 0), 96)), 0)
    rollouts.close()
    episodes = [episode for group in groups for episode in group.episodes]

    messages = [message for episode in episodes for message in episode.messages]
    tokenizer = build_tokenizer([FORMATTERS["hermes"](m.content, m.tool_calls) for m in messages])
    source = build_model(folder / "model", tokenizer, width=64, layers=1)
    model, chat = load_model(source), Chat(load_tokenizer(source))
    rows = demonstrations(episodes, chat, env.tools)
    sft(model, chat, rows, steps=60, batch_size=32, optimizer=MuonAdamW)
    model.save_pretrained(source)

    (folder / "calc.toml").write_text(CONFIG.format(model=source))
    result = run_training(folder / "calc.toml", folder / "run", overrides=["seed=1"])
    for row in result["eval"]:
        print(f"round {row['step']}: held-out pass@1 {row['eval/pass_at_1']:.3f}")
    print("files:", ", ".join(sorted(path.name for path in (folder / "run").iterdir())))


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as scratch:
        main(Path(sys.argv[1] if sys.argv[1:] else scratch))  # an argument: a folder to keep

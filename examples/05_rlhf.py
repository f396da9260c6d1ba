"""From preferences to a policy: the stages of `rlhf_recipe.toml` on a tiny model."""

from __future__ import annotations

import itertools
import json
import random
from collections.abc import Iterator
from functools import cache
from pathlib import Path

from agentrl import Limits, Task, ToolEnv
from agentrl.verifiers import RewardModel

load_reward_model = cache(RewardModel.load)


class Answers(ToolEnv):
    """Answer a prompt; a reward model says how well. Every tenth prompt is a test."""

    id = "answers-v0"
    limits = Limits(turns=1, wall_s=60)

    def __init__(self, prompts: str, reward_model: str) -> None:
        self.rows = [json.loads(row)["prompt"] for row in Path(prompts).read_text().splitlines()]
        self.verifier = load_reward_model(reward_model)

    def tasks(self, split: str, seed: int) -> Iterator[Task]:
        for at, prompt in enumerate(self.rows):
            if (at % 10 == 0) == (split == "test"):
                yield Task(id=f"prompt-{at}", instruction=prompt, threshold=0.5)


def polite(prompt: str, answer: str) -> float:
    """The rule behind the preferences: say yes."""
    return float(answer.startswith("Yes "))


if __name__ == "__main__":
    from agentrl.trainers.models.tiny import build_model, build_tokenizer
    from agentrl.trainers.pipeline import run_offline

    rows = []
    for name, do, what in itertools.product(["Ada", "Bob", "Cat", "Dan"], "abcd", "xyz"):
        yes, no = f"Yes {name}, I will {do} {what}.", f"No {name}, I will not {do} {what}."
        rows.append({"prompt": f"{name} asks: {do} {what}?", "chosen": yes, "rejected": no})
    random.Random(0).shuffle(rows)
    mixed = [
        {"prompt": r["prompt"], "response": r[k]} for r in rows for k in ("chosen", "rejected")
    ]
    for path, table in (("pairs.jsonl", rows), ("answers.jsonl", mixed)):
        Path(path).write_text("".join(json.dumps(row) + "\n" for row in table))
    texts = [f"<|im_start|>user\n{text}<|im_end|>\n" for row in rows for text in row.values()]
    build_model("base", build_tokenizer(texts, 280, map(chr, range(32, 127))), width=64, context=96)
    mine = [f"card.judge={__file__}:polite", f"grpo.env={__file__}:Answers"]
    recipe = Path(__file__).with_name("rlhf_recipe.toml")
    for stage in run_offline(recipe, Path("run"), overrides=mine)["stages"]:
        print(stage["name"], stage["card"].get("judge") or stage["after"]["accuracy"])
